"""`bandmaster why`: a request's life from a journal, told by one command, whatever state the journal is in."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allocator.graph import GraphError
from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from journal.records import DECISION_VERSION, Kind, encode
from journal.snapshots import decode_body, load, snapshot_names
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.core.scenes import drive, stage
from tests.core.world import World
from tests.journal.world import World as JournalWorld
from tests.tidy.source import ROOT
from tests.tools import why_scenes as scenes
from tools import trim
from tools.why import command
from tools.why.show import lines
from tools.why.story import Asked, Passed, Story, Told, follow
from tools.why.summary import recomputed, times_of

SMALL = JournalSettings(segment_bytes=16 << 10)
SNAPSHOT_ITERATIONS = 400


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, scenes.Journaled, Path]:
    """The scene of few places on disk."""
    world, journal = scenes.few_rows()
    return world, journal, journal.write(tmp_path_factory.mktemp("few_rows"))


Scene = tuple[World, scenes.Journaled, Path]


def why(capsys: pytest.CaptureFixture[str], directory: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    code = command.main([*(one for one in arguments if one), str(directory)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def one_story(journal: scenes.Journaled, number: int) -> Story:
    """The story of one request."""
    (story,) = follow(journal.records, Asked(request=number)).stories
    return story


def test_M1_one_command_tells_each_pass_that_skipped_a_request_and_why(
    few_rows: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the core said after each pass while it ran is what the command tells from the journal, pass for pass."""
    world, journal, directory = few_rows
    waited = 0
    for number in (1, 2, 3):
        code, out, _ = why(capsys, directory, str(number), "--json")
        assert code == 0
        (told,) = json.loads(out)["requests"]
        passes = [(event["pass"], event["reason"]) for event in told["events"] if "pass" in event]
        assert passes == [seen[number] for seen in journal.seen if number in seen]
        waited += len(passes)
        assert told["ended"]
    assert waited > 10
    assert world.verdicts("retracted")


@pytest.mark.parametrize("name", scenes.SCENES)
def test_every_decision_about_a_request_is_told_and_its_time_adds_up(name: str) -> None:
    """All recorded decisions of it and those made for it, in order; the parts of its time are the whole."""
    world, journal = scenes.SCENES[name]()
    follower = follow(journal.records, [Asked(request=number) for number in scenes.numbers(journal)])
    assert not follower.notes
    assert [story.request for story in follower.stories] == list(scenes.numbers(journal))
    for story in follower.stories:
        number = story.request
        told = [event.decided for event in story.events if isinstance(event, Told)]
        about = [one for one in world.decisions if one.request == number]
        group = story.choice and [told[0]]
        assert [one for one in told if one.request == number] == about or told == [*(group or []), *about]
        assert told[-1].verdict == Verdict.ENDED
        others = [one for one in world.decisions if one.request not in (0, number) and one.by == number]
        assert [one for one in told[1:] if one.request not in (0, number)] == others
        for kind in (Told, Passed):
            sequences = [event.sequence for event in story.events if isinstance(event, kind)]
            assert sequences == sorted(sequences)
        times = times_of(story)
        assert times.whole_ns == told[-1].now_ns - story.arrived.now_ns
        assert times.whole_ns == times.parts.total()
        assert times.parts["waiting"] == times.waited.total()
        assert 0 < times.first_token_ns <= times.whole_ns or name == "aborted"


def test_the_text_groups_passes_and_begins_with_a_summary(few_rows: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines: who, its life in a paragraph, then events; one line a pass on demand."""
    _, journal, directory = few_rows
    code, out, _ = why(capsys, directory, "3")
    assert code == 0
    shown = out.splitlines()
    assert shown[0].startswith("request 3: id r2 of front end fe, prompt of 8 tokens, output at most 8")
    assert shown[1].startswith("  It took 24 ms from its arrival to its end: 16 ms waiting, ")
    assert (
        "6 ms for memory, 4 ms for a place in the batch, 4 ms for its turn behind a request that waited for "
        in shown[1]
    )
    assert any("1 request ahead of it" in line and "that one waits for memory: its prompt, " in line for line in shown)
    assert "accepted as request 3" in shown[2]
    assert any("2 of 2 are taken" in line and "(passed over 4 times in 3 ms)" in line for line in shown)
    assert "ended (length)" in shown[-1]
    _, long, _ = why(capsys, directory, "3", "--every-pass")
    assert len(long.splitlines()) > len(shown)
    assert long.count("  waits for ") == sum(3 in seen for seen in journal.seen)


def test_a_terminal_gets_lines_of_its_width(few_rows: Scene) -> None:
    """Nothing is lost where lines are broken, and what goes on is set in under its sentence."""
    story = one_story(few_rows[1], 1)
    whole, broken = "\n".join(lines(story)), "\n".join(lines(story, width=80))
    assert max(map(len, broken.splitlines())) <= 80
    assert whole.split() == broken.split()


def test_several_requests_by_number_and_by_id(few_rows: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is told once, in the journal's order; one that is missing is named, and what is there is told."""
    _, _, directory = few_rows
    code, out, _ = why(capsys, directory, "3", "r1", "2")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("request ")] == [
        "request 2",
        "request 3",
    ]
    code, out, err = why(capsys, directory, "1", "99", "nobody")
    assert code == 2
    assert out.startswith("request 1: ")
    assert "the journal has no request 99; it numbers them 1 to 3" in err
    assert "the journal has no request with the id 'nobody'" in err


def test_a_refused_request_is_found_by_its_id(few_rows: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no number; its story is the refusal with code and numbers. An accepted one is found by its id too."""
    _, _, directory = few_rows
    code, out, _ = why(capsys, directory, "never")
    assert code == 0
    assert out.startswith("a request that was refused: id never of front end fe, prompt of 60 tokens")
    assert "It was refused when it came (never_fits)" in out
    assert (
        "refused (never_fits): it would not fit the memory even if it ran alone: its prompt has 60 tokens, and the "
        "empty arena holds at most 20; the empty arena is short of " in out
    )
    assert why(capsys, directory, "r1")[1] == why(capsys, directory, "2")[1]


def test_a_request_that_still_lives_is_told_to_the_journals_end() -> None:
    """A journal that was cut: the story ends with the last pass and says that no end is there."""
    world, journal = scenes.journaled(max_running_requests=1)
    world.send("runs", 5, 40)
    world.send("waits", 5, 4)
    drive(world, lambda: stage(world, "runs") == "running")
    world.tick()
    shown = list(lines(one_story(journal, 2)))
    assert shown[-1] == "  the journal ends here without its end: it still runs, or the daemon was cut off"
    assert "The journal has no end of it" in shown[1]
    assert "1 of 1 are taken" in shown[-2]


def test_a_request_of_a_life_that_was_killed_goes_on_in_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next life names what it took over; the story goes on over the border, from the files of both."""
    first = JournalWorld(DiskStorage(tmp_path / "journal"), 2)
    for _ in range(40):
        first.iterate()
    (number, *_) = sorted(first.core._state.requests)
    first.writer._storage.unlock()
    second = JournalWorld(DiskStorage(tmp_path / "journal"), 3, "two")
    second.iterate()
    second.writer.close()
    code, out, _ = why(capsys, tmp_path, str(number))
    assert code == 0
    assert "the daemon's process stops here: it was killed or it crashed" in out
    assert "taken over from the journal by a new process of the daemon: it has " in out
    code, out, _ = why(capsys, tmp_path, "")
    assert code == 0
    assert "thrown back most often by lost ranks or restarts" in out


def test_an_end_that_was_not_written_any_more_is_told_by_the_next_life() -> None:
    """The input that ended it is in the journal, its decision is not: what the next life took over says it."""
    world, journal = scenes.lost_daemon()
    at = next(at for at, one in enumerate(journal.records) if one.kind == Kind.RECOVERED)
    ended = [one for one in journal.records[:at] if one.kind == Kind.DECIDED]
    assert not [one for one in ended if _decided(one).verdict == "ended"]
    world, journal = scenes.journaled()
    world.send("a", 5, 3)
    drive(world, lambda: stage(world, "a") == "ended")
    cut = next(
        at for at, one in enumerate(journal.records) if one.kind == Kind.DECIDED and _decided(one).verdict == "ended"
    )
    kept = journal.records[:cut]
    world.restart()
    later = journal.records[len(journal.records) - 2 :]
    (story,) = follow([*kept, *later], Asked(request=1)).stories
    assert story.ended
    assert "ended (length: 3 output tokens) with 3 output tokens" in story.events[-1].text  # type: ignore[union-attr]


def _decided(record: Any) -> Decided:
    decoded = record.decode()
    assert isinstance(decoded, Decided)
    return decoded


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[JournalWorld, Path, Path]:
    """A long life, its journal as it was, and what trimming leaves of it."""
    directory = tmp_path_factory.mktemp("trimmed")
    world = JournalWorld(DiskStorage(directory / "whole"), 11, settings=SMALL, snapshot_bytes=30 << 10)
    for _ in range(SNAPSHOT_ITERATIONS):
        world.iterate()
    world.writer.flush()
    world.writer.close()
    copied = directory / "left"
    shutil.copytree(directory / "whole", copied)
    assert trim.trim(DiskStorage(copied)).segments
    return world, directory / "whole", copied


def test_what_was_trimmed_is_said_and_the_rest_told(
    trimmed: tuple[JournalWorld, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A journal that begins at a snapshot: who lived there is told of from there on, who ended before is not there."""
    _, whole, left = trimmed
    header, data = load(DiskStorage(left), next(iter(snapshot_names(DiskStorage(left).names()).values())))
    lived = [group.accepted.first_request for group in decode_body(data).groups if group.choices[0].ended is None]
    assert lived
    code, out, _ = why(capsys, left, str(lived[0]), "--json")
    (told,) = json.loads(out)["requests"]
    assert (code, told["known_from"]) == (0, header.sequence)
    _, out, _ = why(capsys, whole, str(lived[0]), "--json")
    (all_of_it,) = json.loads(out)["requests"]
    behind = [event for event in all_of_it["events"] if event["sequence"] > header.sequence]
    assert [event["text"] for event in told["events"]] == [event["text"] for event in behind]
    _, out, _ = why(capsys, left, str(lived[0]))
    assert f"what happened to it up to record {header.sequence:,} was trimmed from the journal" in out
    code, _, err = why(capsys, left, "1")
    assert code == 2
    assert "the journal has no request 1; it numbers them 1 to " in err
    assert "what is older was trimmed" in err
    assert why(capsys, left, "")[0] == 0


def test_a_state_that_cannot_be_read_costs_the_passes_alone(
    trimmed: tuple[JournalWorld, Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of a core with other fields: what was recorded behind it is told, and a note says what is not."""
    _, _, left = trimmed
    _, data = load(DiskStorage(left), next(iter(snapshot_names(DiskStorage(left).names()).values())))
    number = next(group.accepted.first_request for group in decode_body(data).groups if group.choices[0].ended is None)
    whole = json.loads(why(capsys, left, str(number), "--json")[1])["requests"]

    def refuse(state: bytes) -> None:
        raise GraphError("a class has no field `other`")

    monkeypatch.setattr(command, "restore_core", refuse)
    code, out, _ = why(capsys, left, str(number), "--json")
    told = json.loads(out)
    assert code == 0
    assert any("a class has no field `other`): passes are not told" in note for note in told["notes"])
    recorded = [event["numbers"] for event in whole[0]["events"] if "verdict" in event]
    assert [event["numbers"] for event in told["requests"][0]["events"] if "verdict" in event] == recorded


def test_a_late_request_is_told_from_the_newest_snapshot_before_it(
    trimmed: tuple[JournalWorld, Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before is not replayed, and the story is the same but for whose pages were evicted."""
    world, whole, _ = trimmed
    storage = DiskStorage(whole)
    _, data = load(storage, next(reversed(snapshot_names(storage.names()).values())))
    late = next(number for number in range(decode_body(data).next_request, world.core.next_request))
    start, _ = command._start(storage, [Asked(request=late)])
    assert start is not None
    quick = json.loads(why(capsys, whole, str(late), "--json")[1])["requests"]
    monkeypatch.setattr(command, "snapshot_names", lambda names: {})
    slow = json.loads(why(capsys, whole, str(late), "--json")[1])["requests"]
    assert quick[0]["events"]
    for story in (*quick, *slow):
        for event in story["events"]:
            event.pop("left_by", None)
    assert quick == slow


def test_what_is_not_there_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No journal, no directory, no number of a list: exit code 2 and what to do."""
    assert command.main(["7", str(tmp_path)]) == 2
    assert "no journal segments" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main([])
    for most in ("0", "-1", "x"):
        with pytest.raises(SystemExit, match="2"):
            command.main([str(tmp_path), "--most", most])


def test_the_id_of_an_answer_finds_the_requests_of_its_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A front end puts the prompt's number behind it; other ids that begin alike are others; digits may be an id."""
    world, journal = scenes.journaled()
    for id in ("cmpl-1f-0", "cmpl-1f-1", "cmpl-1f3-0", "cmpl-1f-x", "12"):
        world.send(id, 5, 2)
    scenes.run(world)
    directory = journal.write(tmp_path)
    for asked, numbers in (("cmpl-1f", [1, 2]), ("cmpl-1f-1", [2]), ("cmpl-1f-x", [4]), ("cmpl-1f3", [3]), ("12", [5])):
        code, out, _ = why(capsys, directory, asked, "--json")
        assert (code, [one["request"] for one in json.loads(out)["requests"]]) == (0, numbers)
    assert why(capsys, directory, "q3", "--json")[:2] == (2, ""), "no answer is no empty one"
    code, out, _ = why(capsys, directory, "1", "q3", "--json")
    assert (code, [one["request"] for one in json.loads(out)["requests"]]) == (2, [1])
    code, _, err = why(capsys, directory, "q3")
    assert code == 2
    assert "An id is an answer's id" in err
    assert "the log line HttpRequest has the answer's id beside X-Request-Id" in err


@pytest.mark.parametrize("asked", ["3", ""])
@pytest.mark.parametrize("content", [bytes(7), random.Random(1).randbytes(100_000)], ids=["torn", "random"])
def test_a_journal_without_a_record_is_damaged(
    content: bytes, asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 4 and what is wrong with the file, not that a request is missing."""
    (tmp_path / "0000000001.kvj").write_bytes(content)
    code, out, err = why(capsys, tmp_path, asked)
    assert (code, out) == (4, "")
    assert "0000000001.kvj at byte 0" in err


def test_before_damage_all_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit in the first of two lives: the story up to there, where the damage is, and exit code 4."""
    _, journal = scenes.lost_daemon()
    directory = journal.write(tmp_path)
    file = min((directory / "journal").glob("*.kvj"))
    data = bytearray(file.read_bytes())
    data[-200] ^= 1
    file.write_bytes(data)
    for asked, said in (("1", "accepted as request 1"), ("", "2 requests accepted")):
        code, out, _ = why(capsys, directory, asked)
        assert code == 4
        assert out.startswith(f"note: DAMAGED: {file.name} at byte ")
        assert said in out


def test_a_torn_end_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What lies behind the last whole record was not read, and the story says so; nothing is written there."""
    _, journal = scenes.few_rows()
    directory = journal.write(tmp_path)
    (file,) = (directory / "journal").glob("*.kvj")
    file.write_bytes(file.read_bytes()[:-7])
    before = {path.name: path.read_bytes() for path in (directory / "journal").iterdir()}
    for asked in ("r1", ""):
        code, out, _ = why(capsys, directory, asked)
        assert code == 0
        assert out.startswith(f"note: {file.name} at byte ")
    assert before == {path.name: path.read_bytes() for path in (directory / "journal").iterdir()}


def test_a_reader_who_has_enough_is_no_error(few_rows: Scene) -> None:
    """`why | head -1`: nothing is said; a full disk is named. No traceback, no code of a damaged journal."""
    command_line = [sys.executable, "-m", "tools.cli", "why", "1", str(few_rows[2])]
    read, written = os.pipe()
    os.close(read)
    for stdout, said in ((written, ""), (os.open("/dev/full", os.O_WRONLY), "No space left on device")):
        done = subprocess.run(command_line, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
        os.close(stdout)
        assert done.returncode == 1
        assert said in done.stderr
        assert bool(said) == bool(done.stderr)
        assert "Traceback" not in done.stderr


def test_decisions_of_another_version_are_told_without_passes() -> None:
    """Another core would say of passes what this one did not: only what was recorded is told, and a note says so."""
    world = World(msgspec.structs.replace(scenes.CONFIG, max_running_requests=1), 64)
    journal = scenes.Journaled(world, DECISION_VERSION + 1)
    world.send("a", 5, 3)
    world.send("b", 5, 3)
    world.run()
    follower = follow(journal.records, Asked(request=2))
    (note,) = follower.notes
    assert "its decisions are of version" in note
    text = "\n".join(lines(follower.stories[0]))
    assert "passed over" not in text
    assert "waits for a place in the batch: 1 of 1 are taken" in text
    assert times_of(follower.stories[0]).waited["rows"] > 0


def test_who_waits_when_ranks_are_lost_waits_for_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It has no decision of its own then: the loss is told with its cause, and the list counts the same time."""
    world, journal = scenes.journaled(max_running_requests=1)
    world.send("runs", 9, 20)
    world.send("waits", 9, 20)
    drive(world, lambda: stage(world, "runs") == "running")
    world.end_epoch()
    world.wait(700)
    world.begin()
    scenes.run(world)
    for number, lost in ((1, "lost its memory with the ranks"), (2, "the ranks (the processes that run the model)")):
        story = one_story(journal, number)
        assert times_of(story).waited["ranks"] == 700_000_000
        (line,) = [line for line in lines(story) if "epoch 1 ended" in line]
        assert lost in line
        assert "a rank died" in line
    assert command.main([str(journal.write(tmp_path)), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["waited"]
    assert [one["waits_ns"]["ranks"] for one in entries] == [700_000_000] * 2


@pytest.mark.parametrize("name", ["crowd", "pressed", "preempted", "lost_ranks", "poisoned", "protected"])
def test_what_was_computed_again_is_what_the_core_counted(name: str) -> None:
    """Only what had been computed before, not the rest of a prompt that was retracted in the middle."""
    world, journal = scenes.MORE[name]()
    stories = follow(journal.records, [Asked(request=number) for number in scenes.numbers(journal)]).stories
    told = [recomputed(story) for story in stories]
    assert all(sure for _, sure in told)
    assert sum(again for again, _ in told) == world.core.state.totals.recomputed_tokens > 0


def test_no_more_is_lost_than_there_was() -> None:
    """A decode step under way when its rank dies has left no token that could be computed again."""
    world, journal = scenes.journaled()
    world.send("a", 9, 20)
    while "a" not in world.by_request and not world.verdicts("admitted"):
        world.tick()
    world.tick()
    world.end_epoch()
    world.begin()
    scenes.run(world)
    (requeued,) = world.verdicts("requeued")
    assert (requeued.numbers["tokens"], requeued.numbers["output_tokens"]) == (10, 0)
    (line,) = [line for line in lines(one_story(journal, 1)) if "lost its memory" in line]
    assert "it had no output, 9 tokens must be computed again" in line


def test_quick_tells_what_was_recorded(few_rows: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """The same decisions, no passes, nothing that only replay knows; waiting is summed by decisions."""
    for number in ("1", "2", "3"):
        _, out, _ = why(capsys, few_rows[2], number, "--quick", "--json")
        (quick,) = json.loads(out)["requests"]
        _, out, _ = why(capsys, few_rows[2], number, "--json")
        (whole,) = json.loads(out)["requests"]
        recorded = [event for event in whole["events"] if "verdict" in event]
        assert [event["numbers"] for event in quick["events"]] == [event["numbers"] for event in recorded]
        assert quick["summary"]["whole_ns"] == whole["summary"]["whole_ns"]
        assert quick["summary"]["spent_ns"].get("waiting") == whole["summary"]["spent_ns"].get("waiting")


def test_from_the_first_decision_that_differs_no_pass_is_told() -> None:
    """A journal with one false decision: what was recorded is told to the end, passes up to there, and a note."""
    _, journal = scenes.few_rows()
    found = list(journal.records)
    place = next(
        at for at, one in enumerate(found) if one.kind == Kind.DECIDED and _decided(one).verdict == Verdict.ADMITTED
    )
    false = encode(msgspec.structs.replace(_decided(found[place]), reason="false"))
    found[place] = found[place]._replace(payload=false)
    follower = follow(found, Asked(request=3))
    (note,) = follower.notes
    assert f"sequence {found[place].sequence}: the replayed core decided otherwise" in note
    (story,) = follower.stories
    assert story.ended
    assert all(event.sequence < found[place].sequence for event in story.events if isinstance(event, Passed))


def test_reading_stops_where_nothing_more_can_come() -> None:
    """A number that has ended comes no second time; an id may."""
    _, journal = scenes.few_rows()
    ends = [
        at for at, one in enumerate(journal.records) if one.kind == Kind.DECIDED and _decided(one).verdict == "ended"
    ]
    first = min(_decided(journal.records[at]).request for at in ends[:1])
    assert follow(journal.records, Asked(request=first)).records == ends[0] + 1
    assert follow(journal.records, Asked(id=f"r{first - 1}")).records == len(journal.records)


def test_the_legend_has_no_word_without_a_text(few_rows: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """It stands behind the story, and says that nothing is ever spilled."""
    _, out, _ = why(capsys, few_rows[2], "1", "--legend")
    assert out.index("ended (length)") < out.index("\nwords:\n")
    assert "  retracted: it lost its memory and waits again" in out
    assert "  spilled: swapped out to host memory: does not occur" in out
