"""Replay in two processes: the same verdicts, and an end that is told when the other half dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from journal.reader import read_records
from journal.replay import check, started
from journal.storage import DiskStorage
from tests.golden.make import HERE
from tools.bench_replay import record
from tools.planted.files import Nothing
from tools.planted.scene import Scene
from tools.replay import replay_directory, state_of
from tools.replay_processes import HalfLost, RemoteRanks
from tools.replica import factories


def test_both_ways_say_the_same(tmp_path: Path) -> None:
    """Two lives with a torn end, and a snapshot: counts, state, notes are those of one process."""
    Scene(Nothing(), tmp_path / "j").make()
    last = sorted((tmp_path / "j").glob("*.kvj"))[-1]
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 5)
    for directory, until in ((str(HERE / "v1"), None), (str(HERE / "v1"), 700), (str(tmp_path / "j"), None)):
        one, two = (replay_directory(directory, until, processes=count) for count in (1, 2))
        assert one.divergence is None, one.divergence
        assert one.counts == two.counts
        assert one.counts.steps > 20
        assert state_of(one) == state_of(two)
        assert one.notes == two.notes
    assert one.counts.snapshots == 2
    assert "the end is torn" in one.notes[-1]


def test_from_a_snapshot_too(tmp_path: Path) -> None:
    """What a snapshot holds goes on in both halves."""
    Scene(Nothing(), tmp_path / "j").make()
    one, two = (replay_directory(str(tmp_path / "j"), None, True, count) for count in (1, 2))
    assert one.divergence is None, one.divergence
    assert one.counts == two.counts
    assert "replay begins at the snapshot" in one.notes[0]


def test_a_half_that_dies_is_told(tmp_path: Path) -> None:
    """A killed process is an error with its exit code, not a verdict."""
    record(tmp_path / "j", "full", 8, 400)
    found = list(read_records(DiskStorage(tmp_path / "j")))
    halves: list[RemoteRanks] = []

    def killed(ranks: object) -> RemoteRanks:
        halves.append(RemoteRanks(started(factories(), None)[0]))
        assert halves[0]._copy.pid is not None
        os.kill(halves[0]._copy.pid, signal.SIGKILL)
        return halves[0]

    with pytest.raises(HalfLost, match="ended with code -9"):
        check(found, factories(), elsewhere=killed)
    assert not halves[0]._copy.is_alive()


def test_memory_of_whoever_starts_a_replay_is_not_counted() -> None:
    """A bench that recorded a long journal is larger than the replay that it then measures."""
    held = bytearray(os.urandom(1 << 20) * 384)
    program = "from tools.replay_processes import usage; print(usage().peak_rss_bytes)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(said.stdout) < len(held) - (128 << 20)
