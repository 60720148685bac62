"""Redaction of every kind of life that the core can give a request: what is decided stays, whatever users sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from allocator.columns import i64
from daemon.core.inputs import Arrived, Resumed
from daemon.core.outputs import Decided
from journal import records
from journal.records import Kind
from tests.tools import why_scenes as scenes
from tools.incident.excerpt import FirstReading
from tools.incident.pseudonyms import KEY_BYTES, Names, Tokens
from tools.incident.redactor import Made, Redactor
from tools.incident.values import Values

SCENES: list[Callable[[], Any]] = [
    scenes.crowd,
    scenes.few_rows,
    scenes.cached_crowd,
    scenes.preempted,
    scenes.lost_ranks,
    scenes.lost_daemon,
    scenes.aborted,
    scenes.siblings,
    scenes.pressed,
    scenes.refusals,
    scenes.unready,
    scenes.deadlines,
    scenes.frontend_lost,
    scenes.stopped,
    scenes.shrunken_arena,
    scenes.adopted,
    scenes.poisoned,
    scenes.cut_hits,
    scenes.windows_alone,
    scenes.cold,
    scenes.parked_rows,
    scenes.scored,
]


def redacted(journal: Any) -> list[Made]:
    """The records that take the place of a scene's."""
    reading = FirstReading(None)
    for record in journal.records:
        reading.take(record)
    known, names = reading.known, Names(bytes(KEY_BYTES))
    redactor = Redactor(
        Values(names, Tokens(names, known.vocabularies, known.eos_ids, known.stop_ids)), snapshots=False
    )
    made = [one for record in journal.records for one in redactor.take(record)]
    return [*made, *redactor.end()]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: str(scene.__name__))
def test_every_decision_of_a_scene_is_made_again(scene: Callable[[], Any]) -> None:
    """Record for record, with the same reasons and numbers; and what was sent is something else."""
    _, journal = scene()
    made = redacted(journal)
    assert [(one.sequence, one.kind) for one in made] == [(one.sequence, one.kind) for one in journal.records]
    pairs = list(zip(journal.records, made, strict=True))
    decided = [(was.payload, now.payload) for was, now in pairs if was.kind == Kind.DECIDED]
    assert decided
    assert [was for was, _ in decided] == [now for _, now in decided]
    sent: list[Any] = [was.decode() for was, _ in pairs]
    everything = b"".join(one.payload for one in made)
    for item in sent:
        if isinstance(item, Arrived) and len(item.generate.prompt) >= 8 * 8:
            assert item.generate.prompt not in everything
        elif isinstance(item, Resumed) and len(item.tokens) >= 8 * 8:
            assert item.tokens not in everything


def test_the_scenes_have_what_is_hard_to_redact() -> None:
    """Clients that come back with other tokens, ends by stop ids, several choices, choices taken over by a life."""
    verdicts = set()
    for scene in SCENES:
        _, journal = scene()
        items: list[Any] = [one.decode() for one in journal.records]
        verdicts |= {str(one.verdict) for one in items if isinstance(one, Decided)}
    assert verdicts >= {"resumed", "recovered", "requeued", "retracted", "parked", "refused", "ended", "evicted"}


def test_stop_ids_of_one_request_alone_are_other_ids_and_end_it_all_the_same() -> None:
    """Its prompt, its output and its list have the drawn id where the client's stood; nothing has the client's."""
    _, journal = scenes.stopped()
    reading = FirstReading(None)
    for record in journal.records:
        reading.take(record)
    stops = reading.known.stop_ids - reading.known.eos_ids
    assert stops, "the scene has none"
    assert any(one.reason == "stop" for one in decisions(journal)), "none of them ended anything"
    made = redacted(journal)
    arrived: list[Any] = [records.decode(one.kind, one.payload) for one in made if one.kind == Kind.ARRIVED]
    named = {id for one in arrived for id in i64(one.generate.stop_ids).tolist()}
    assert len(named - reading.known.eos_ids) == len(stops)
    assert named.isdisjoint(stops)
    sampled: list[Any] = [records.decode(one.kind, one.payload) for one in made if one.kind == Kind.REPORTED]
    assert named & {token for one in sampled for token in i64(one.tokens).tolist()}


def decisions(journal: Any) -> list[Decided]:
    items: list[Any] = [one.decode() for one in journal.records]
    return [one for one in items if isinstance(one, Decided)]
