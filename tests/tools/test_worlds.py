"""Random worlds hold every check, and every check can fail: deliberate faults are found, made small, and told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tools.worlds.canaries import CANARIES, applied
from tools.worlds.cases import BadCase, Case, draw, load, save
from tools.worlds.checks import CHECKS
from tools.worlds.command import hunt, main, run_seed, shrunk
from tools.worlds.run import OTHERS, run

SEEDS = 60


def test_random_worlds_hold_every_check_and_are_eventful() -> None:
    """After every input and at rest, whatever happens; and enough happens that no check holds for want of occasions."""
    happened = Counter[str]()
    for seed in range(SEEDS):
        ran = run_seed(seed).ran
        assert ran.failure is None, f"seed {seed}: {ran.failure}"
        happened += ran.happened
    few = ("retracted memory", "retracted priority", "relief", "refused queue_full", "ended deadline", "ended fault")
    many = ("hits", "admitted", "ended length", "ended stop", "evicted units", "checkpoints given", "surplus tokens")
    died = ("requeued epoch", "requeued trial", "recovered", "resumed adopted")
    assert not [name for name in (*few, *died, "draining", "ended abort") if happened[name] < 1], dict(happened)
    assert not [name for name in many if happened[name] < SEEDS], dict(happened)


def test_every_check_has_a_canary() -> None:
    """No check is there that nothing was seen to fail."""
    assert {canary.check for canary in CANARIES.values()} == {*CHECKS, *OTHERS}


@pytest.mark.parametrize("name", CANARIES)
def test_a_canary_is_found(name: str) -> None:
    """Each deliberate fault fails its check in one of the first cases in which it can show."""
    hunted = hunt(name)
    assert hunted.seed is not None, f"{CANARIES[name].breaks} not found in {hunted.cases} cases: {hunted.others}"


def test_a_case_is_a_function_of_its_seed_and_survives_its_file(tmp_path: Path) -> None:
    """Drawn twice, saved and loaded it is the same case with the same run; a longer one begins with a shorter."""
    case = draw(11)
    save(tmp_path / "case.json", case)
    assert load(tmp_path / "case.json") == case == draw(11)
    assert run(case).happened == run(draw(11)).happened
    assert draw(11, actions=400, pressed=True).actions[:120] == draw(11, pressed=True).actions[:120]


def test_a_failing_case_is_made_small_and_fails_alike() -> None:
    """What is left of a failing case is a few actions that fail by the same check, each time they run."""
    name = "deadlines_pass_unseen"
    seed = hunt(name).seed
    assert seed is not None
    small, failure = shrunk(seed, name)
    assert failure.check == "deadlines"
    assert len(small.actions) <= 4
    assert len(small.asks) == 1
    with applied(name):
        again = run(msgspec.json.decode(msgspec.json.encode(small), type=Case)).failure
    assert again == failure
    assert run(small).failure is None, "without the fault the case is clean"


def test_the_command_tells_what_fails_and_replays_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes, the files of failing worlds, and the story of a saved one."""
    assert main(["--seeds", "0:3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["worlds"], found["failed"], found["failures"]) == (3, 0, [])
    name = "a_resident_chunk_wants_no_tick"
    seed = hunt(name).seed
    assert seed is not None
    with applied(name):
        assert main(["--seeds", f"{seed}:{seed + 1}", "--minimize", "--out", str(tmp_path)]) == 1
        told = capsys.readouterr().err
        assert "check liveness fails" in told
        assert "> submit 0" in told
        (path,) = tmp_path.iterdir()
        assert main(["--replay", str(path)]) == 1
    assert main(["--replay", str(path)]) == 0
    assert "every check holds" in capsys.readouterr().out
    assert main(["--canaries", name]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seeds", "3"],
        ["--seeds", "3:3"],
        ["--seeds", "-1:3"],
        ["--seeds=-1:3"],
        ["--jobs", "0"],
        ["--canaries", "none"],
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    """Each is a usage error."""
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2


def test_a_place_to_write_is_tried_before_the_hunt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file, and a directory that cannot be: exit code 2 before a world is run; a new one is made, and left empty."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    for place in (tmp_path / "file", Path("/proc/x")):
        assert main(["--seeds", "0:1", "--out", str(place)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert f"--out {place}: " in shown.err
    assert main(["--seeds", "0:1", "--out", str(tmp_path / "new")]) == 0
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_that_is_no_world_is_refused(tmp_path: Path) -> None:
    """By its content, with exit code 2."""
    path = tmp_path / "bad.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(BadCase):
        load(path)
    assert main(["--replay", str(path)]) == 2
