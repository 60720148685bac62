"""Divergence: two ranks that part are named with step, op and band; nothing of that step or a later one is told."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from allocator.columns import pack_i32
from allocator.ops import Free, Part, Take
from daemon.divergence import SAME, diverged, in_words
from daemon.results import Difference, DigestMismatch
from ipc.messages import Explained, OpTrace, Step, StepTrace
from ipc.rank_id import RankId
from journal.reader import read_records
from journal.records import Divergence, Kind
from journal.storage import DiskStorage
from tests.daemon.daemon_process import running
from tests.daemon.test_recovery import Told, follow
from tools.replay import replay_directory

TOLD = b"t" * 16
OPS = [
    OpTrace(0, "Take", "full", "Bind virtual 1, 2 physical 1, 2"),
    OpTrace(0, "Take", "window:64", "Bind virtual 1 physical 9"),
    OpTrace(1, "Free", "", "nothing"),
]


def step() -> Step:
    part = Part(0, pack_i32([1, 2]))
    return Step(3, 7, 0, 6, [], [Take([part]), Free([part])], None, TOLD)


def explained(rank: RankId, ops: list[OpTrace], logical: bytes = TOLD) -> Explained:
    older = StepTrace(6, b"o" * 16, b"o" * 16, [OpTrace(0, "Take", "full", f"of {rank}")])
    return Explained(*rank, [older, StepTrace(7, logical, b"l" * 16, ops)])


def mismatch(what: str, left: RankId | None, right: RankId) -> DigestMismatch:
    return DigestMismatch(step(), Difference(what, left, right, ("left aa", "right bb")), [])


def changed(index: int, effects: str) -> list[OpTrace]:
    made = list(OPS)
    made[index] = msgspec.structs.replace(made[index], effects=effects)
    return made


@pytest.mark.parametrize("index", range(3))
def test_the_first_op_and_band_that_differ_are_named(index: int) -> None:
    """Of one step: its number, kind, band and both sides' effects; other steps in the traces do not count."""
    others = changed(index, "Bind physical 33")[: index + 1] + changed(2, "late too")[index + 1 :]
    said = {(0, 0): explained((0, 0), OPS), (0, 1): explained((0, 1), others)}
    record = diverged(mismatch("layout", (0, 0), (0, 1)), said, 3, 99)
    assert (record.epoch, record.seq, record.op) == (3, 7, OPS[index].index)
    assert (record.kind, record.band) == (OPS[index].kind, OPS[index].band)
    assert (record.left_did, record.right_did) == (OPS[index].effects, "Bind physical 33")
    assert "step 7" in in_words(record)
    assert "rank 0.0 did" in in_words(record)


def test_an_op_that_only_one_side_has() -> None:
    """It is the place where they part; the other side did nothing there."""
    for index in range(2):
        made = changed(2, "Zero units 4")
        sides = (made, OPS[:2]) if index else (OPS[:2], made)
        said = {(0, rank): explained((0, rank), ops) for rank, ops in enumerate(sides)}
        record = diverged(mismatch("layout", (0, 0), (0, 1)), said, 3, 99)
        assert (record.op, record.kind) == (1, "Free")
        assert [record.left_did, record.right_did][index] == "nothing"
        assert [record.left_did, record.right_did][1 - index] == "Zero units 4"


def test_the_side_that_has_a_band_names_it() -> None:
    """One side waits, which is of no band, where the other binds pages of one."""
    waits = [OpTrace(0, "Take", "", "WaitForward seq 6"), *OPS]
    for left, right in ((waits, OPS), (OPS, waits)):
        said = {(0, 0): explained((0, 0), left), (0, 1): explained((0, 1), right)}
        record = diverged(mismatch("layout", (0, 0), (0, 1)), said, 3, 99)
        assert (record.op, record.band) == (0, "full")


def test_a_rank_that_agrees_stands_in_for_the_daemon() -> None:
    """Of the same stage only: on another one effects differ by right; without any, the step as sent is shown."""
    wrong = explained((1, 0), changed(1, "Bind physical 33"), b"w" * 16)
    said = {(0, 0): explained((0, 0), OPS[:1]), (1, 0): wrong, (1, 1): explained((1, 1), OPS)}
    record = diverged(mismatch("logical", None, (1, 0)), said, 3, 99)
    assert (record.left, record.right, record.op, record.band) == ("the daemon", "rank 1.0", 0, "window:64")
    del said[1, 1]
    record = diverged(mismatch("logical", None, (1, 0)), said, 3, 99)
    assert record.op == -1
    assert "Take, Free" in record.left_did
    assert "physical 33" in record.right_did


def test_what_cannot_be_said_is_not_made_up() -> None:
    """Equal traces, a silent rank, sampled tokens: no op is named, and why."""
    same = {rank: explained(rank, OPS) for rank in ((0, 0), (0, 1))}
    record = diverged(mismatch("layout", (0, 0), (0, 1)), same, 3, 99)
    assert (record.op, record.left_did) == (-1, SAME)
    silent = diverged(mismatch("layout", (0, 0), (0, 1)), {(0, 0): same[0, 0]}, 3, 99)
    assert "did not say" in silent.right_did
    sampled = diverged(mismatch("sampled", (0, 0), (0, 1)), same, 3, 99)
    assert (sampled.op, sampled.left_did, sampled.right_did) == (-1, "left aa", "right bb")


@pytest.mark.e2e
async def test_R2_a_rank_that_parts_is_named_and_its_step_never_leaves(tmp_path: Path) -> None:
    """The layout digest of a tensor rank differs at step 30: named in log and journal; the tokens are those of a rank
    alone, none doubled; the journal replays.
    """
    run_dir = tmp_path / "run"
    async with running(run_dir) as (_, client):
        alone = Told()
        await follow(client, "alone", alone, 100)
    faults = {"BANDMASTER_FAULTS": "rank-0-1:report=30:corrupt_layout", "BANDMASTER_FAULTS_DIR": str(tmp_path)}
    run_dir = tmp_path / "two"
    async with running(run_dir, "--tp", "2", environ=faults) as (daemon, client):
        told = Told()
        await follow(client, "a", told, 100)
    assert told.said == alone.said
    records = list(read_records(DiskStorage(run_dir / "journal")))
    at = next(index for index, record in enumerate(records) if record.kind == Kind.DIVERGED)
    record = records[at].decode()
    assert isinstance(record, Divergence)
    assert (record.epoch, record.seq, record.what, record.right) == (1, 30, "layout", "rank 0.1")
    reported = [record for record in records[:at] if record.kind == Kind.REPORTED]
    assert max(record.decode().seq for record in reported) == 29  # type: ignore[attr-defined]
    assert daemon.lines("Diverged")[0]["seq"] == 30
    assert [line["mark"] for line in daemon.lines("EpochLost")] == ["diverged"]
    assert replay_directory(str(run_dir)).divergence is None
