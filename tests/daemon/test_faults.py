"""Fault specifications: what they mean, which are refused, and that a fault strikes once, where it was asked for."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from daemon.clock import NS_PER_MS, SystemClock
from daemon.exits import DaemonError, Exit
from daemon.fault_hooks import faulty_clock, faulty_storage
from daemon.faults import ACTIONS, DIRECTORY_VARIABLE, POINTS, VARIABLE, FaultInjected, Faults, parse, planted
from journal.storage import DiskStorage


def faults(text: str, process: str = "daemon", directory: Path | None = None) -> Faults:
    """The faults of one process out of a text."""
    environ = {VARIABLE: text} | ({DIRECTORY_VARIABLE: str(directory)} if directory else {})
    return planted(process, environ)


def test_every_action_parses_at_each_of_its_points() -> None:
    """The table's rows and the grammar agree: what the table lists is accepted, everything else refused by name."""
    for name, action in ACTIONS.items():
        for point, where in POINTS.items():
            process = {"daemon": "daemon", "rank": "rank-0-1"}[where.kind]
            text = f"{process}:{point}=3:{name}" + (":ms=5" if name in ("delay", "skew") else "")
            if point in action.points:
                (spec,) = parse(text)
                assert (spec.process, spec.point, spec.number, spec.action) == (process, point, 3, name)
            else:
                with pytest.raises(DaemonError, match=f"{name} cannot strike a {where.kind} at {point}"):
                    parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("postman:step=1:kill", "no process 'postman'"),
        ("rank-0:step=1:kill", "no process 'rank-0'"),
        ("rank-0-0:step=1", "exactly one POINT=NUMBER and one ACTION"),
        ("rank-0-0:kill", "exactly one POINT=NUMBER and one ACTION"),
        ("rank-0-0:step=1:report=2:kill", "exactly one POINT=NUMBER and one ACTION"),
        ("rank-0-0:step=1:kill:stop", "exactly one POINT=NUMBER and one ACTION"),
        ("rank-0-0:step=1:explode", "no action 'explode'"),
        ("rank-0-0:step=1:kill:sed=3", "no option 'sed'"),
        ("rank-0-0:step=0:kill", "must lie between 1"),
        ("rank-0-0:step=9..4:kill", "the lower bound first"),
        ("rank-0-0:step=x:kill", "neither a whole number"),
        ("rank-0-0:forward=1:delay", "delay needs ms="),
        ("rank-0-0:forward=1:oom:ms=4", "oom has no ms="),
        ("daemon:step=1:kill", "kill cannot strike a daemon at step"),
        ("rank-0-0:forward=1:delay:ms=-5", "must lie between 0"),
    ],
)
def test_a_wrong_text_is_refused_before_anything_starts(text: str, says: str) -> None:
    """The refusal names the text, what is wrong with it and what is allowed, with the exit code of usage."""
    with pytest.raises(DaemonError, match=says) as refused:
        parse(f"rank-0-0:step=1:kill;{text}")
    assert refused.value.code == Exit.USAGE
    assert text in str(refused.value)


def test_a_process_takes_only_its_own() -> None:
    """`rank-*` is every rank's, other names are one process's; without the variable there is nothing."""
    text = "rank-0-1:step=4:kill;rank-*:forward=2:oom; daemon:journal.fsync=1:fail"
    assert [spec.point for spec in faults(text, "rank-0-1").specs] == ["step", "forward"]
    assert [spec.point for spec in faults(text, "rank-1-0").specs] == ["forward"]
    assert [spec.point for spec in faults(text).specs] == ["journal.fsync"]
    assert not planted("daemon", {})
    assert not faults("", "rank-0-0")


def test_a_range_is_drawn_by_its_seed() -> None:
    """The same seed gives the same step, and different seeds spread over the range."""
    drawn = {parse(f"rank-0-0:step=20..60:kill:seed={seed}")[0].number for seed in range(200)}
    assert drawn == set(range(20, 61))
    assert len({parse("rank-0-0:step=20..60:kill:seed=7")[0].number for _ in range(5)}) == 1


def test_a_fault_strikes_where_it_was_asked_and_as_often() -> None:
    """`raise` and `oom` strike at their step alone; `times` counts on from there."""
    planted_here = faults("rank-0-0:forward=3:raise;rank-0-0:forward=5:oom", "rank-0-0")
    raised: dict[int, str] = {}
    for seq in range(1, 8):
        try:
            list(planted_here.hit("forward", seq))
        except (FaultInjected, MemoryError) as error:
            raised[seq] = type(error).__name__
    assert raised == {3: "FaultInjected", 5: "MemoryError"}
    assert not planted_here.at("step", "report")


def test_a_claimed_fault_is_not_repeated_by_the_next_process(tmp_path: Path) -> None:
    """With a directory the first process to get there fires and leaves a note; its successor passes the same point."""
    text = "rank-0-0:forward=2:raise"
    with pytest.raises(FaultInjected):
        list(faults(text, "rank-0-0", tmp_path).hit("forward", 2))
    assert list(faults(text, "rank-0-0", tmp_path).hit("forward", 2)) == []
    (note,) = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert (note["spec"], note["process"], note["number"]) == (text, "rank-0-0", 2)
    with pytest.raises(FaultInjected):  # without a directory nobody remembers
        list(faults(text, "rank-0-0").hit("forward", 2))
    with pytest.raises(DaemonError, match="is no directory"):
        faults(text, "rank-0-0", tmp_path / "absent")


def test_delays_go_on_in_every_life_and_differ_by_rank(tmp_path: Path) -> None:
    """A delay is drawn anew for every step from its first on, the same for the same rank and seed."""
    text = "rank-*:forward=3:delay:ms=5..50:seed=7"

    def delays(process: str) -> list[float]:
        own = faults(text, process, tmp_path)
        return [own.delay_s(spec) for seq in range(1, 40) for spec in own.hit("forward", seq)]

    first, again, other = delays("rank-0-0"), delays("rank-0-0"), delays("rank-0-1")
    assert len(first) == 37
    assert first == again
    assert first != other
    assert min(first) >= 0.005
    assert max(first) <= 0.05
    assert len(set(first)) > 10


def test_the_nth_write_and_fsync_fail(tmp_path: Path) -> None:
    """A full disk lasts `times` writes, a failing fsync one; the bytes of failed writes are not there."""
    own = faults("daemon:journal.write=2:full:times=2;daemon:journal.fsync=2:fail")
    storage = faulty_storage(DiskStorage(tmp_path), own)
    handle = storage.create("a")
    found: list[object] = []
    for number in range(5):
        try:
            found.append(storage.write(handle, b"%d--" % number))
        except OSError as error:
            found.append(error.errno)
    assert found == [3, errno.ENOSPC, errno.ENOSPC, 3, 3]
    assert storage.read("a") == b"0--3--4--"
    storage.sync(handle)
    with pytest.raises(OSError, match="asked for by") as failed:
        storage.sync(handle)
    assert failed.value.errno == errno.EIO
    storage.sync(handle)
    storage.close(handle)


def test_a_short_write_takes_half(tmp_path: Path) -> None:
    """Half of the bytes are taken, and the number says so."""
    storage = faulty_storage(DiskStorage(tmp_path), faults("daemon:journal.write=1:short"))
    handle = storage.create("a")
    assert storage.write(handle, b"abcdef") == 3
    assert storage.write(handle, b"def") == 3
    assert storage.read("a") == b"abcdef"
    storage.close(handle)


def test_hooks_are_not_there_without_a_fault(tmp_path: Path) -> None:
    """Without a fault for them, disk and clock are the very objects that were given."""
    storage, clock = DiskStorage(tmp_path), SystemClock()
    other = faults("rank-0-0:step=1:kill")
    assert faulty_storage(storage, other) is storage
    assert faulty_clock(clock, other) is clock


def test_a_skewed_clock_jumps_once() -> None:
    """From the chosen reading on the clock is off by the amount, and goes on at its own pace."""
    clock = SystemClock()
    skewed = faulty_clock(clock, faults("daemon:clock=3:skew:ms=-5000"))
    readings = [(clock.now_ns(), skewed.now_ns(), clock.now_ns()) for _ in range(6)]
    offs = [round((seen - before) / (1000 * NS_PER_MS)) for before, seen, _ in readings]
    assert offs == [0, 0, -5, -5, -5, -5]
    assert len(skewed.token()) == 32
