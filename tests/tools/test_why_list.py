"""`bandmaster why DIR`: which requests of a journal are worth asking for, from its decisions alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from daemon.core.outputs import Decided
from daemon.core.reasons import EndReason
from journal.reader import Walk
from journal.records import Kind
from journal.storage import DiskStorage
from tests.core.scenes import drive, stage
from tests.tools import why_scenes as scenes
from tools.planted import files
from tools.planted.scene import Scene
from tools.why import command
from tools.why.listing import KINDS, Listing, row
from tools.why.story import Asked, follow
from tools.why.summary import decisions, times_of
from tools.why.waits import for_what


def listed(journal: scenes.Journaled, most: int = 1000) -> Listing:
    """The lists of a whole journal."""
    found = Listing(most)
    for record in journal.records:
        found.take(record)
    found.end()
    return found


@pytest.mark.parametrize("name", scenes.MORE)
def test_the_lists_have_the_numbers_of_the_stories(name: str) -> None:
    """Waiting, retractions, parks, whole time and end of every request are those that its story tells."""
    world, journal = scenes.MORE[name]()
    found = listed(journal)
    entries = {entry.request: entry for worst in found.worst.values() for entry in worst.entries()}
    stories = follow(
        journal.records, [Asked(request=number) for number in scenes.numbers(journal)], replay=False
    ).stories
    assert found.accepted == len(stories)
    for story in stories:
        if story.request not in entries:  # it never waited, and was over at once
            assert times_of(story).whole_ns == 0
            continue
        entry, times = entries[story.request], times_of(story)
        assert entry.waited_ns == times.parts["waiting"]
        assert entry.took_ns == times.whole_ns
        assert entry.retractions == len(decisions(story, "retracted"))
        starts = [one.decided.numbers for one in decisions(story, "admitted")]
        assert entry.cached_tokens == (starts[0].get("cached_tokens", 0) if starts else 0)
        assert entry.parks == len(decisions(story, "parked"))
        assert entry.requeued == len(decisions(story, "requeued")) + len(decisions(story, "recovered"))
        ended = decisions(story, "ended")
        assert entry.end == (ended[-1].decided.reason if ended else "")
        assert entry.output_tokens == (ended[-1].decided.numbers["output_tokens"] if ended else 0)
    assert found.refusals.total() == sum(one.numbers["n"] for one in world.decisions if one.verdict == "refused")
    assert len(found.refused) == len([one for one in world.decisions if one.verdict == "refused"])
    assert found.ends.total() + len(found.live) == found.accepted


def test_a_clock_that_was_set_back_between_two_lives_costs_no_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second life begins at the time at which the first one did."""
    monkeypatch.setattr(files.Nothing, "turns", 90)
    Scene(files.Nothing(), tmp_path).make()
    found, records = Listing(1000), list(Walk(DiskStorage(tmp_path)).records())
    for record in records:
        found.take(record)
    found.end()
    (second,) = [record.sequence for record in records[1:] if record.kind == Kind.OPENED]
    came = [record.sequence for record in records if record.kind == Kind.ARRIVED]
    entries = {entry.request: entry for worst in found.worst.values() for entry in worst.entries()}
    first = 1 + sum(sequence < second for sequence in came)
    own = range(first, len(came) + 1)
    assert len(own) > 5
    stories = follow(records, [Asked(request=number) for number in own], replay=False).stories
    waited = [times_of(story).parts["waiting"] for story in stories]
    assert [entries[story.request].waited_ns for story in stories] == waited
    assert sum(waited) > 0


def test_what_the_cache_had_is_that_of_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was retracted finds its own tokens again, output among them: that is no hit of its prompt."""
    monkeypatch.setattr(files.Nothing, "turns", 200)
    monkeypatch.setattr(files.Nothing, "lives", 1)
    Scene(files.Nothing(), tmp_path).make()
    found, starts = Listing(1000), dict[int, list[int]]()
    for record in Walk(DiskStorage(tmp_path)).records():
        found.take(record)
        payload = record.decode()
        if isinstance(payload, Decided) and payload.verdict == "admitted":
            starts.setdefault(payload.request, []).append(payload.numbers["cached_tokens"])
    found.end()
    again = found.worst["retracted"].entries()
    assert [entry.cached_tokens for entry in again] == [starts[entry.request][0] for entry in again]
    assert any(starts[entry.request][0] == 0 < starts[entry.request][1] for entry in again)


def test_the_worst_come_first_and_no_more_than_asked_for() -> None:
    """Each list is sorted by what it is of, and is the beginning of the list of all."""
    _, journal = scenes.pressed()
    few, all_of_them = listed(journal, 5), listed(journal)
    for name, (_, rank) in KINDS.items():
        ranks = [rank(entry) for entry in all_of_them.worst[name].entries()]
        assert ranks == sorted(ranks, reverse=True)
        assert all(one > 0 for one in ranks)
        assert [one.request for one in few.worst[name].entries()] == [
            one.request for one in all_of_them.worst[name].entries()[:5]
        ]
    assert len(few.worst["waited"].entries()) == 5
    assert len(few.worst["retracted"].entries()) == 5
    assert not few.live


def test_the_lists_name_no_cause_that_the_lives_do_not_have() -> None:
    """A cause is one that the whole life has; where no decision of its own says one, the list says whom to ask."""
    named = unnamed = 0
    for make in [scenes.pressed, *scenes.MORE.values()]:
        _, journal = make()
        found = listed(journal)
        entries = {entry.request: entry for worst in found.worst.values() for entry in worst.entries()}
        asked = [Asked(request=number) for number in scenes.numbers(journal)]
        for story in follow(journal.records, asked).stories:
            entry = entries.get(story.request)
            if entry is None or not entry.waited_ns:
                continue
            told = times_of(story).waited
            said = row(entry)["mostly for"]
            if said == f"ask why {story.request}":
                unnamed += 1
                continue
            named += 1
            assert said in {for_what(reason) for reason, ns in told.items() if ns}, story.request
    assert named > 20
    assert unnamed > 20


def test_who_still_lives_is_ranked_as_it_stands() -> None:
    """A journal that was cut: no end, and the time until the last thing that is known."""
    world, journal = scenes.journaled(max_running_requests=1)
    world.send("runs", 5, 40)
    world.send("waits", 5, 4)
    drive(world, lambda: stage(world, "runs") == "running")
    for _ in range(5):
        world.turn()
    found = listed(journal)
    assert set(found.live) == {1, 2}
    (first, _) = found.worst["waited"].entries()
    assert (first.request, row(first)["end"], row(first)["mostly for"]) == (2, "lives", "a place in the batch")


def test_the_command_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Totals, refusals with their reasons, failures with their cause, and what to ask next; the same as data."""
    for name in ("refusals", "last_epoch", "few_rows"):
        _, journal = scenes.MORE[name]()
        journal.write(tmp_path / name)
    assert command.main([str(tmp_path / "refusals")]) == 0
    out = capsys.readouterr().out
    assert "Refusals: " in out
    assert "never_fits" in out
    assert "it would not fit the memory even if it ran alone" in " ".join(out.split())
    assert command.main([str(tmp_path / "last_epoch")]) == 0
    out = capsys.readouterr().out
    assert "failed, newest first" in out
    assert "fault: a rank died" in out
    assert command.main([str(tmp_path / "few_rows"), "--most", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 requests accepted, 1 refused; 0 of the accepted ones have no end in this journal.\n")
    assert f"The life of one of them: bandmaster why 3 {tmp_path / 'few_rows'}" in out
    assert command.main([str(tmp_path / "few_rows"), "--json", "--most", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["accepted"], told["refusals"], told["ends"]) == (3, {"never_fits": 1}, {EndReason.LENGTH.value: 3})
    assert [one["request"] for one in told["waited"]] == [3, 1]
    assert told["refused"][0]["numbers"]["units_short"] == 20
    assert not told["failed"]
