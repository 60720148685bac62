"""`replay why`: a request's life from a journal, each pass that skipped it and each decision about it, as sentences."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allocator.capacity import FROZEN, ID_SPACE
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import EndReason, Verdict
from journal.opening import open_journal
from journal.reader import read_records
from journal.records import DECISION_VERSION, SCHEMA_VERSION, Kind, Opened, encode
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.core.scenes import drive, parked_and_shrunk, stage
from tests.core.world import World
from tests.journal.helpers import ID
from tests.journal.world import World as JournalWorld
from tests.tidy.source import ROOT
from tools import replay
from tools.why.story import Asked, Passed, Told, follow
from tools.why.words import SENTENCES, WAITS, sentence, short, waiting

BANDS = [["state", "window:20", "full"]]


class Journaled:
    """A world's life written to a journal as an engine writes it: what it was fed so far, and all from now on."""

    def __init__(self, world: World, directory: Path, version: int = DECISION_VERSION) -> None:
        self.seen: list[dict[str, Any]] = []  # of every pass, what each request waited for, by its number
        self._writer, _ = open_journal(DiskStorage(directory / "journal"), JournalSettings(), ID)
        self._writer.append(Opened(0, "life", SCHEMA_VERSION, version, world.config, {}, {}))
        assert len(world.inputs) == 1, "a journal begins with its world"
        self._writer.append(world.inputs[0])
        world.watchers.append(self._append)
        self._passes = 0

    def _append(self, world: World, item: inputs.Input, out: Outputs) -> None:
        self._writer.append(item)
        self._writer.append_all(out.decisions)
        if out.step is not None:
            self._writer.append_encoded(Kind.STEPPED, encode(out.step))
        if world.core.passes > self._passes:
            self._passes = world.core.passes
            over = {number: world.core.passed_over(number) for number in sorted(world.core._state.requests)}
            self.seen.append({number: (one.number, one.reason) for number, one in over.items() if one is not None})

    def close(self) -> None:
        """Everything is on disk; the life is cut here."""
        self._writer.flush()
        self._writer.close()


def scene(directory: Path) -> tuple[World, Journaled]:
    """Three requests on two rows and few pages: they wait, one is retracted, all end; a fourth is refused."""
    config = CoreConfig(page_size=1, max_running_requests=2, max_batched_tokens=64, chunked_prefill_size=64)
    world = World(config, pages=20, caching=False)
    journal = Journaled(world, directory)
    for k in range(3):
        world.send(f"r{k}", 6 + k, 8)
    world.send("never", 60, 8)
    world.run()
    world.check_rest()
    return world, journal


def why(directory: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    code = replay.main(["why", str(directory), *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_M1_one_command_tells_each_pass_that_skipped_a_request_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the core said after each pass while it ran is what the command tells from the journal, pass for pass."""
    world, journal = scene(tmp_path)
    journal.close()
    waited = 0
    for number in (1, 2, 3):
        code, out, _ = why(tmp_path, capsys, "--request", str(number), "--json")
        assert code == 0
        (told,) = json.loads(out)["requests"]
        passes = [(event["pass"], event["reason"]) for event in told["events"] if "pass" in event]
        assert passes == [seen[number] for seen in journal.seen if number in seen]
        waited += len(passes)
        assert told["ended"]
    assert waited > 10
    assert world.verdicts("retracted")


def test_every_decision_about_the_request_is_told_in_order(tmp_path: Path) -> None:
    """All recorded decisions of the request, and those that were made for it, in the journal's order."""
    world, journal = scene(tmp_path)
    journal.close()
    for number in (1, 2, 3):
        follower = follow(read_records(DiskStorage(tmp_path / "journal")), Asked(request=number))
        (story,) = follower.stories
        assert not follower.notes
        told = [event.decided for event in story.events if isinstance(event, Told)]
        about = [one for one in world.decisions if one.request == number]
        assert [one for one in told if one.request == number] == about
        assert told[-1].verdict == Verdict.ENDED
        others = [one for one in world.decisions if one.request != number and one.by == number]
        assert [one for one in told if one.request not in (0, number)] == [one for one in others if one.request]
        for kind in (Told, Passed):
            sequences = [event.sequence for event in story.events if isinstance(event, kind)]
            assert sequences == sorted(sequences)


def test_the_text_groups_passes_and_names_band_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines: who, accepted, waited so many passes for which reason, admitted, the end; one line a pass on demand."""
    _, journal = scene(tmp_path)
    journal.close()
    code, out, _ = why(tmp_path, capsys, "--request", "3")
    assert code == 0
    shown = out.splitlines()
    assert shown[0].startswith("request 3: id r2 of front end fe, 8 prompt tokens, output 8")
    assert "accepted as request 3" in shown[1]
    assert any("passes " in line and "all 2 rows are taken" in line for line in shown)
    assert any("admitted to row" in line for line in shown)
    assert "ended: length" in shown[-1]
    _, long, _ = why(tmp_path, capsys, "--request", "3", "--every-pass")
    assert len(long.splitlines()) > len(shown)
    assert long.count(": waiting: ") + long.count(": retracted: ") == sum(3 in seen for seen in journal.seen)


def test_a_retraction_says_for_whom_what_was_freed_and_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both sides have the line: the victim's story, and that of the request it was retracted for."""
    world, journal = scene(tmp_path)
    journal.close()
    decided = world.verdicts("retracted")[0]
    _, victim, _ = why(tmp_path, capsys, "--request", str(decided.request))
    line = next(line for line in victim.splitlines() if "retracted" in line and "freed" in line)
    pages = decided.numbers["pages"]
    assert f"retracted for request {decided.by} (memory), time 1: {pages} page" in line
    assert f"{decided.numbers['lost_tokens']} are lost" in line
    assert "of band full short on stage 0" in line
    _, other, _ = why(tmp_path, capsys, "--request", str(decided.by))
    assert f"request {decided.request}: retracted for request {decided.by}" in other


def test_a_refused_request_is_found_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no number; its story is the refusal with code and numbers. An accepted one is found by its id too."""
    _, journal = scene(tmp_path)
    journal.close()
    code, out, _ = why(tmp_path, capsys, "--id", "never")
    assert code == 0
    assert out.startswith("a request that was refused: id never of front end fe, 60 prompt tokens")
    assert "refused: never_fits; n 1, limit " in out
    assert why(tmp_path, capsys, "--id", "r1")[1] == why(tmp_path, capsys, "--request", "2")[1]


def test_parks_and_shrinks_of_a_chunk_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A long prompt that parked: its climbs of the ladder, the passes that left it out, and how it went on."""
    world = parked_and_shrunk_from_the_start(tmp_path)
    number = world.clients["fe", "long"].accepted.first_request
    _, out, _ = why(tmp_path, capsys, "--request", str(number))
    assert "relief for its chunk: reclaim > spill: no tier > shrink > park" in out
    assert "parked (memory); " in out
    assert "parked chunk: memory: " in out
    assert "goes on with " in out


def parked_and_shrunk_from_the_start(directory: Path) -> World:
    """The scene of `scenes.parked_and_shrunk`, journaled from its first input, run to rest."""
    built = parked_and_shrunk()
    world = World(built.config, pages=built.pages)
    journal = Journaled(world, directory)
    for item in built.inputs[1:]:
        if isinstance(item, inputs.Arrived):
            world.arrive(item.generate, item.frontend, item.seed)
    world.run()
    world.check_rest()
    journal.close()
    return world


def test_a_request_that_still_lives_is_told_to_the_journals_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A journal that was cut: the story ends with the last pass and says that no end is there."""
    config = CoreConfig(page_size=4, max_running_requests=1, max_batched_tokens=32)
    world = World(config)
    journal = Journaled(world, tmp_path)
    world.send("runs", 5, 40)
    world.send("waits", 5, 4)
    drive(world, lambda: stage(world, "runs") == "running")
    world.tick()
    journal.close()
    _, out, _ = why(tmp_path, capsys, "--request", "2")
    assert out.splitlines()[-1] == "  the journal ends here without its end: it still runs, or the daemon was cut off"
    assert "all 1 row are taken" in out


def test_a_request_of_a_life_that_was_killed_goes_on_in_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next life names what it took over; the story goes on over the border."""
    first = JournalWorld(DiskStorage(tmp_path / "journal"), 2)
    for _ in range(40):
        first.iterate()
    (number, *_) = sorted(first.core._state.requests)
    first.writer._storage.unlock()
    second = JournalWorld(DiskStorage(tmp_path / "journal"), 3, "two")
    second.iterate()
    second.writer.close()
    code, out, _ = why(tmp_path, capsys, "--request", str(number))
    assert code == 0
    assert any("taken over from an earlier life with " in line for line in out.splitlines())


def test_what_is_not_there_is_a_usage_error_that_says_what_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number or an id that the journal does not have: exit code 2, and the numbers that it has."""
    _, journal = scene(tmp_path)
    journal.close()
    for arguments, named in ((("--request", "99"), "request 99"), (("--id", "x"), "request with the id 'x'")):
        code, out, err = why(tmp_path, capsys, *arguments)
        assert (code, out) == (2, "")
        assert f"the journal has no {named}; it numbers them 1 to 3" in err
    with pytest.raises(SystemExit):
        replay.main(["why", str(tmp_path)])


def test_the_id_of_an_answer_finds_the_requests_of_its_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A front end puts the number of the prompt behind it; other ids that begin alike are others."""
    world = World(CoreConfig(page_size=4))
    journal = Journaled(world, tmp_path)
    for id in ("cmpl-1f-0", "cmpl-1f-1", "cmpl-1f3-0", "cmpl-1f-x"):
        world.send(id, 5, 2)
    world.run()
    journal.close()
    for asked, numbers in (("cmpl-1f", [1, 2]), ("cmpl-1f-1", [2]), ("cmpl-1f-x", [4]), ("cmpl-1f3", [3])):
        code, out, _ = why(tmp_path, capsys, "--id", asked, "--json")
        assert (code, [one["request"] for one in json.loads(out)["requests"]]) == (0, numbers)
    code, _, err = why(tmp_path, capsys, "--id", "q3")
    assert code == 2
    assert "--id takes an answer's id" in err
    assert "the log line HttpRequest has the answer's id beside X-Request-Id" in err


@pytest.mark.parametrize("content", [b"", random.Random(1).randbytes(100_000)], ids=["empty", "random"])
def test_a_journal_without_a_record_is_damaged(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 4 and what is wrong with the file, not that a request is missing."""
    (tmp_path / "0000000001.kvj").write_bytes(content)
    code, out, err = why(tmp_path, capsys, "--request", "3")
    assert (code, out) == (4, "")
    assert f"{tmp_path}: no record can be read: 0000000001.kvj at byte 0" in err


def test_a_torn_end_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What lies behind the last whole record was not read, and the story says so."""
    _, journal = scene(tmp_path)
    journal.close()
    (file,) = (tmp_path / "journal").glob("*.kvj")
    file.write_bytes(file.read_bytes()[:-7])
    code, out, _ = why(tmp_path, capsys, "--request", "1")
    assert code == 0
    assert out.startswith(f"note: {file.name} at byte ")


def test_a_shortage_of_ids_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no stage is short, and as data too; band and place have names for every number that the core gives."""
    for numbers, said in (
        ({"units_short": 3, "stage": ID_SPACE, "band": 1}, "3 units of band window:20 short in the id space"),
        ({"units_short": 1, "stage": FROZEN, "band": 2}, "1 unit of band full short on every stage"),
        ({"units_short": 1, "stage": 1, "band": 0}, "1 unit of band state short on stage 1"),
    ):
        assert short(numbers, BANDS).startswith(said)
    _, journal = scene(tmp_path)
    journal.close()
    _, out, _ = why(tmp_path, capsys, "--request", "3", "--json")
    lacking = [event for event in json.loads(out)["requests"][0]["events"] if "units_short" in event["numbers"]]
    assert lacking
    assert all(event["short"]["band"] == "full" for event in lacking)
    assert all(f"band full short {event['short']['where']}" in event["text"] for event in lacking)


def test_nobody_ahead_is_said_as_a_place(tmp_path: Path) -> None:
    """Those ahead of it started in the pass that did not come to it."""
    assert waiting("queue", {"ahead": 0, "stopped_at": 11}, BANDS) == (
        "not looked at: it is at the head of the queue now; the pass ended at request 11"
    )


def test_a_reader_who_has_enough_is_no_error(tmp_path: Path) -> None:
    """`replay why | head -1`: nothing is said; a full disk is named. No traceback, no code of a damaged journal."""
    _, journal = scene(tmp_path)
    journal.close()
    command = [sys.executable, "-m", "tools.cli", "replay", "why", str(tmp_path), "--request", "1"]
    read, written = os.pipe()
    os.close(read)
    for stdout, said in ((written, ""), (os.open("/dev/full", os.O_WRONLY), "No space left on device")):
        done = subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
        os.close(stdout)
        assert done.returncode == 1
        assert said in done.stderr
        assert bool(said) == bool(done.stderr)
        assert "Traceback" not in done.stderr


def test_decisions_of_another_version_are_told_without_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another core would say of passes what this one did not: only what was recorded is told, and a note says so."""
    world = World(CoreConfig(page_size=4, max_running_requests=1))
    journal = Journaled(world, tmp_path, DECISION_VERSION + 1)
    world.send("a", 5, 3)
    world.send("b", 5, 3)
    world.run()
    journal.close()
    code, out, _ = why(tmp_path, capsys, "--request", "2")
    assert code == 0
    assert out.startswith("note: life life: its decisions are of version")
    assert "passes" not in out.split("\n", 1)[1]
    assert "waits: all 1 row are taken" in out


def test_from_the_first_decision_that_differs_no_pass_is_told(tmp_path: Path) -> None:
    """A journal with one false decision: what was recorded is told to the end, passes up to there, and a note."""
    _, journal = scene(tmp_path)
    journal.close()
    found = list(read_records(DiskStorage(tmp_path / "journal")))
    place = next(
        at for at, one in enumerate(found) if one.kind == Kind.DECIDED and _verdict(one.decode()) == Verdict.ADMITTED
    )
    false = encode(msgspec.structs.replace(found[place].decode(), reason="false"))
    found[place] = found[place]._replace(payload=false)
    follower = follow(found, Asked(request=3))
    (note,) = follower.notes
    assert f"sequence {found[place].sequence}: the replayed core decided otherwise" in note
    (story,) = follower.stories
    assert story.ended
    assert all(event.sequence < found[place].sequence for event in story.events if isinstance(event, Passed))


def _verdict(decided: object) -> str:
    assert isinstance(decided, Decided)
    return decided.verdict


# --- words -----------------------------------------------------------------------------------------------------------

SHORT = {"units_short": 3, "stage": 0, "band": 1}

TOLD: dict[Verdict, tuple[Decided, str]] = {
    Verdict.ACCEPTED: (
        Decided(0, "accepted", 4, "", {"n": 2, "prompt_tokens": 1500, "max_tokens": 1}),
        "accepted as requests 4 to 5: 1,500 prompt tokens, at most 1 output token",
    ),
    Verdict.REFUSED: (Decided(0, "refused", 0, "queue_full", {"limit": 3}), "refused: queue_full; limit 3"),
    Verdict.ADMITTED: (
        Decided(
            0,
            "admitted",
            4,
            "window:20",
            {
                "row": 1,
                "generation": 2,
                "tokens": 40,
                "chunk_tokens": 8,
                "chunk_pages": 2,
                "waited_ms": 1234,
                "cached_tokens": 16,
                "matched_tokens": 24,
                "queried_tokens": 39,
            },
        ),
        "admitted to row 1 (generation 2), 1,234 ms after it came; 16 of 39 tokens looked up were cached (24 known; "
        "window:20 ended the hit); first chunk 8 of 40 tokens, in 2 pages",
    ),
    Verdict.WAITS: (
        Decided(0, "waits", 4, "memory", SHORT),
        "waits: memory: 3 units of band window:20 short on stage 0",
    ),
    Verdict.SHRUNK: (
        Decided(0, "shrunk", 4, "memory", {"tokens": 8, "wanted_tokens": 512}),
        "chunk shrunk to 8 of 512 tokens (memory)",
    ),
    Verdict.PARKED: (
        Decided(0, "parked", 4, "memory", {"start": 8, **SHORT}),
        "parked (memory); 3 units of band window:20 short on stage 0",
    ),
    Verdict.UNPARKED: (Decided(0, "unparked", 4, "memory", {"tokens": 1}), "goes on with 1 token"),
    Verdict.RETRACTED: (
        Decided(
            0,
            "retracted",
            4,
            "memory",
            {
                "pages": 1,
                "unlocked_pages": 7,
                "units_state": 2,
                "tokens": 40,
                "cached_tokens": 16,
                "lost_tokens": 24,
                "times": 3,
                **SHORT,
            },
            9,
        ),
        "retracted for request 9 (memory), time 3: 1 page freed, 2 units of state, 7 cached pages left without a reader"
        "; of 40 tokens 16 stay cached and 24 are lost; 3 units of band window:20 short on stage 0",
    ),
    Verdict.ENDED: (
        Decided(0, "ended", 4, "length", {"prompt_tokens": 5, "output_tokens": 7, "retractions": 1, "age_ms": 9}),
        "ended: length (the output reached its token limit or the model's length); 7 of its output tokens delivered, "
        "retracted 1 time; 9 ms after it came",
    ),
    Verdict.REQUEUED: (
        Decided(0, "requeued", 4, "epoch", {"epoch": 2, "tokens": 1500, "output_tokens": 7}),
        "waits again: epoch 2 ended; 1,500 tokens to compute again, 7 of output kept",
    ),
    Verdict.RECOVERED: (
        Decided(0, "recovered", 4, "", {"output_tokens": 7, "retractions": 2}),
        "taken over from an earlier life with 7 output tokens, retracted 2 times",
    ),
    Verdict.RESUMED: (
        Decided(0, "resumed", 4, "adopted", {"held_tokens": 9, "output_tokens": 7, "confirmed_tokens": 5}),
        "its client came back with 9 output tokens, of which the journal has 5: it goes on behind them, not behind 7",
    ),
    Verdict.STALLED: (
        Decided(0, "stalled", 0, "livelock: rows: park", {"live": 2}),
        "nothing could be scheduled: livelock: rows: park; live 2",
    ),
    Verdict.DRAINING: (Decided(0, "draining", 0, "drain", {"live": 2}), "draining: drain; live 2"),
    Verdict.IDLE: (Decided(0, "idle", 0, "", {"rows": 0}), "idle; rows 0"),
    Verdict.FLUSHED: (
        Decided(0, "flushed", 0, "cache", {"freed_units_full": 2}),
        "flushed: cache; freed_units_full 2",
    ),
    Verdict.RELIEF: (
        Decided(0, "relief", 4, "reclaim > spill: no tier > park", {"pages": 2, **SHORT}),
        "relief for its chunk: reclaim > spill: no tier > park; 3 units of band window:20 short on stage 0; pages 2",
    ),
    Verdict.EVICTED: (
        Decided(0, "evicted", 0, "reclaim", {"units_state": 1, "units_full": 30}),
        "the prefix cache gave up 1 unit of state, 30 units of full",
    ),
    Verdict.UNPINNED: (
        Decided(0, "unpinned", 4, "limit", {"tokens": 1040, "pin_ms": 5000, "pinned_units_full": 60}),
        "the 1,040 tokens that it left in the cache were to be pinned for 5,000 ms and are not: all pins together "
        "would pass --pinned-max; pinned are 60 units of full",
    ),
}


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_verdict_has_its_sentence(verdict: Verdict) -> None:
    """Each verdict of the core, with the numbers it comes with, as the sentence that a reader sees."""
    decided, text = TOLD[verdict]
    assert verdict in SENTENCES
    assert sentence(decided, BANDS) == text


def test_a_retraction_for_priority_tells_whose() -> None:
    """Numbers that only some retractions have are told behind the others."""
    numbers = {"pages": 2, "unlocked_pages": 0, "tokens": 8, "cached_tokens": 0, "lost_tokens": 8, "times": 1}
    told = sentence(Decided(0, "retracted", 4, "priority", {**numbers, "priority": 7}, 9), BANDS)
    assert told == (
        "retracted for request 9 (priority), time 1: 2 pages freed; of 8 tokens 0 stay cached and 8 are lost; "
        "priority 7"
    )


@pytest.mark.parametrize("reason", list(EndReason))
def test_every_end_has_its_sentence(reason: EndReason) -> None:
    """Each end reason is explained."""
    numbers = {"prompt_tokens": 5, "output_tokens": 7, "retractions": 0, "age_ms": 9}
    assert sentence(Decided(0, "ended", 4, reason, numbers), BANDS).startswith(f"ended: {reason.value} (")


WAITED = {
    "memory": (
        {"units": 9, **SHORT},
        "memory: 3 units of band window:20 short on stage 0; it and what is promised to others take 9 units",
    ),
    "protected": (
        SHORT,
        "retracted so often that it is protected, and all such requests must fit together; "
        "3 units of band window:20 short on stage 0",
    ),
    "budget": ({"limit": 2048}, "the step's budget of 2,048 tokens was used up before it"),
    "throttled": ({"steps": 1}, "admissions are throttled for 1 more step after a shortage"),
    "rows": ({"limit": 64}, "all 64 rows are taken"),
    "ranks": ({}, "there are no ranks now: the next epoch has not begun"),
    "microbatch": (
        {"rows": 22, "limit": 22},
        "the micro-batch of the step has 22 rows, its share of 22; the next one may take it",
    ),
    "resident": (
        {"prompt_tokens": 9000},
        "another prompt is prefilled in parts, and its own 9,000 tokens would be too",
    ),
    "parked": ({"requests": 2}, "2 requests parked for want of memory; nobody is admitted"),
    "trial": (
        {"suspects": 3, "tried": 7},
        "epochs died under 3 requests, each of which runs alone first, request 7 now",
    ),
    "sibling": ({}, "an earlier choice of its group is still prefilled, whose pages it can share"),
    "queue": (
        {"ahead": 3, "stopped_at": 7},
        "not looked at: 3 requests ahead of it in the queue; the pass ended at request 7",
    ),
}


@pytest.mark.parametrize("reason", sorted(WAITS))
def test_every_reason_to_wait_has_its_sentence(reason: str) -> None:
    """Each reason that a pass gives, with its numbers."""
    numbers, text = WAITED[reason]
    assert waiting(reason, numbers, BANDS) == text


def test_a_trial_that_went_well_is_told() -> None:
    """It waits again, and that is not because an epoch ended."""
    told = Decided(0, "requeued", 4, "trial", {"epoch": 2, "tokens": 16, "output_tokens": 1})
    assert sentence(told, BANDS) == (
        "ran alone and got further, so it is no suspect, and waits until the others were tried; 16 tokens to compute "
        "again, 1 of output kept"
    )


def test_what_no_row_knows_is_told_as_it_stands() -> None:
    """A reason or verdict of a later version: nothing that was recorded is left out."""
    assert waiting("new", {"some": 5, **SHORT}, BANDS) == "new; 3 units of band window:20 short on stage 0; some 5"
    assert (
        waiting("memory", {"units_short": 1, "stage": 4, "band": 9}, BANDS)
        == "memory: 1 unit of band 9 short on stage 4"
    )
    assert sentence(Decided(0, "later", 1, "why", {"some": 5}), BANDS) == "later: why; some 5"
