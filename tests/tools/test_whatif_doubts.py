"""What-if's warnings: a reader hears when the pace does not fit and when the unchanged replay is not the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.test_whatif_replays import ask
from tests.tools.whatif_runs import CONFIG, FACTS, FULL, HYBRID, TIMES, geometry_of, lengths, requests, serve
from tools.simulate.engine import NS_PER_S, Engine, Times
from tools.simulate.recording import Recording
from tools.whatif.account import Figures
from tools.whatif.command import main
from tools.whatif.doubts import FIT_OFF_MAX, doubts, other_pace
from tools.whatif.pace import Pace, Work
from tools.whatif.rows import RECORDED, UNCHANGED

FITS = Pace(4e6, 9e3, 3e4, 0.0, forwards=100, error=0.2)


class SlowAtFirst(Times):
    """A machine that is busy with something else for a while: no part of a forward explains its times."""

    calls = 0

    def forward_ns(self, prompt_tokens: int, decoding: int) -> int:
        """Nanoseconds of one forward; each of the first hundred takes fifteen times as long."""
        SlowAtFirst.calls += 1
        return super().forward_ns(prompt_tokens, decoding) * (15 if SlowAtFirst.calls <= 100 else 1)


def figures(**changed: Any) -> Figures:
    """The figures of a run, some of them changed."""
    plain: dict[str, Any] = dict.fromkeys(
        ("refused", "cached_tokens", "computed_prompt_tokens", "retractions", "parks", "evicted_units"), 100
    )
    plain |= {"output_tokens": 1000, "steps": 500, "hit_rate": 0.5, "output_tokens_per_s": 80.0}
    times = {"mean": 200.0, "p50": 150.0, "p99": 900.0}
    return Figures(plain | {"waiting_ms": times, "first_token_ms": times, "request_ms": times} | changed)


def record_slow_at_first(into: Path) -> None:
    """A run of which the first hundred forwards are slow."""
    SlowAtFirst.calls = 0
    with Recording(into, CONFIG) as recording:
        times = SlowAtFirst(*TIMES)
        engine = Engine(CONFIG, geometry_of(FULL, 40_960), FACTS, times, tokens=lengths, recording=recording)
        for at_ns, generate, seed, _ in requests(7, 70, patient=True):
            engine.advance(max(engine.now_ns, NS_PER_S + at_ns))
            engine.submit(generate, seed)
        engine.run()
        recording.close(engine.now_ns, "served", engine.core)


def test_a_pace_that_does_not_fit_and_a_replay_that_is_not_the_record_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run whose machine was slow for a while the notes say first that its figures are not to be trusted."""
    record_slow_at_first(tmp_path)
    found = ask(capsys, str(tmp_path))
    error, off = found["paces"][RECORDED]["error"], found["off"][UNCHANGED]["waiting, mean"]
    assert error > FIT_OFF_MAX
    assert abs(off) > 0.1
    assert found["notes"][0].startswith(f"recorded: the pace fits badly: single forwards are {error:.0%} of their mean")
    assert "more than 10% off what was recorded" in found["notes"][1]
    assert f"({off:+.0%})" in found["notes"][1]


def test_a_machine_that_was_slow_for_a_while_is_slow_then_in_the_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What forwards are off the pace is drawn from about the same time: several replays come nearer than one does."""
    record_slow_at_first(tmp_path)
    alone = ask(capsys, str(tmp_path))["off"][UNCHANGED]
    assert main([str(tmp_path), "--json", "--replays", "7"]) == 0
    several = json.loads(capsys.readouterr().out)["off"][UNCHANGED]
    for name in ("waiting, mean", "time to first token, mean", "whole request, mean"):
        assert abs(several[name]) < 0.6 * abs(alone[name]), name


@pytest.mark.parametrize(("bands", "arena_bytes"), [(FULL, 40_960), (HYBRID, 122_880)])
def test_a_replay_that_is_the_record_is_not_doubted(
    bands: list[Any], arena_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where every figure comes out as recorded, and one daemon lived through it, no note warns of anything."""
    serve(CONFIG, geometry_of(bands, arena_bytes), requests(1), tmp_path)
    found = ask(capsys, str(tmp_path))
    assert not any("trust" in note or "the daemon ended" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"cached_tokens": 109}, ""),
        ({"cached_tokens": 112}, "prompt tokens found in the cache 112 for 100 (+12%)"),
        ({"waiting_ms": {"mean": 170.0, "p50": 150.0, "p99": 900.0}}, "waiting, mean 170 ms for 200 ms (-15%)"),
        ({"hit_rate": 0.4}, "hit rate 40.0% for 50.0% (-20%)"),
        ({"output_tokens_per_s": 70.0}, "output tokens/s 70.0 for 80.0 (-12%)"),
    ],
)
def test_a_figure_that_is_too_far_off_is_named(changed: dict[str, Any], words: str) -> None:
    """More than a tenth; the note has the figure, both values and the share."""
    notes = doubts({RECORDED: figures(), UNCHANGED: figures(**changed)}, {RECORDED: FITS})
    assert len(notes) == bool(words)
    assert words in "".join(notes)


def test_a_few_of_few_are_chance_and_many_for_none_are_not() -> None:
    """Eight retractions for six are a third more and nothing to warn of; thirty where there was none are."""
    few = {RECORDED: figures(retractions=6), UNCHANGED: figures(retractions=8)}
    assert not doubts(few, {RECORDED: FITS})
    many = {RECORDED: figures(retractions=0), UNCHANGED: figures(retractions=30)}
    assert "retractions 30 for 0." in doubts(many, {RECORDED: FITS})[0]


def test_each_pace_is_doubted_by_its_own_name() -> None:
    """Half of a forward off is a busy machine; more than the share that is told is no fit."""
    runs = {RECORDED: figures(), UNCHANGED: figures()}
    paces = {RECORDED: FITS._replace(error=0.5), "rerun": FITS._replace(error=2.377)}
    (note,) = doubts(runs, paces)
    assert note.startswith("rerun: the pace fits badly: single forwards are 238% of their mean off")
    assert "do not trust waiting, times" in note


@pytest.mark.parametrize(
    ("pace", "why"),
    [
        ({"error": 0.9, "stretch": 0.1}, "They are off one by one, and less in a row: a busy machine"),
        ({"error": 0.3, "stretch": 0.16}, "What forwards take hangs on something that is none of their tokens"),
        (
            {"error": 0.5, "stretch": 0.46, "fitted_ns": 13_000_000_000, "slow_ns": 6_000_000_000, "slow_times": 2.1},
            "For 6.0 s of 13.0 s forwards took 2.1 times as long as the others make one expect: two paces are mixed",
        ),
    ],
)
def test_why_a_pace_does_not_fit_is_told(pace: dict[str, Any], why: str) -> None:
    """A busy machine, a slow while, and work of another kind are told apart by single forwards and stretches."""
    runs = {RECORDED: figures(), UNCHANGED: figures()}
    (note,) = doubts(runs, {RECORDED: FITS._replace(**pace)})
    assert why in note
    assert not doubts(runs, {RECORDED: FITS._replace(error=0.6, stretch=0.14)})


def test_a_machine_that_is_slower_in_the_rerun_is_told() -> None:
    """What of the distance is the machine's, by the same work; nothing for a few percent."""
    work = Work(100.0, 10.0, 1.0)
    slower = FITS._replace(fixed_ns=6e6, prompt_token_ns=13.5e3, decoding_row_ns=4.5e4)
    (note,) = other_pace(FITS, [(slower, work), (FITS, work)])
    assert note.startswith("forwards of the rerun took 1.25 times what the recorded pace says")
    assert not other_pace(FITS, [(FITS._replace(fixed_ns=4.1e6), work)])


def test_waiting_that_is_longer_than_the_way_to_the_first_token_is_explained() -> None:
    """It is no mistake: other requests count, and what is waited again."""
    late = {"mean": 210.0, "p50": 150.0, "p99": 900.0}
    (note,) = doubts({RECORDED: figures(waiting_ms=late), UNCHANGED: figures(waiting_ms=late)}, {RECORDED: FITS})
    assert "waited again behind a retraction, lost ranks or a lost daemon" in note
