"""Journals that the tests of `view` look at, and a reader that follows them beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from allocator.columns import Int32s
from allocator.physical.units import LIVE
from daemon.core.inputs import EpochBegan
from journal.reader import Walk
from journal.records import Kind, Opened
from journal.storage import DiskStorage
from tests.journal.world import World, two_lives
from tests.tools.simulate_world import conversations, write
from tools.replica import StageReplica
from tools.simulate import command

DATED_NS = 4_000_000_000 * 1_000_000_000  # in 2096: snapshots of the world have the machine's own time, which is less
BANDS = ["--band", "full=4096/page", "--band", "window:128=4096/page", "--band", "state:256=9000/slot"]
SETTINGS = ["--page-size", "16", "--max-running-requests", "8", "--no-bound", "--json", "--block-tokens", "64"]


def pressed(directory: Path, requests: int = 40) -> Path:
    """The journal of a simulated run of three bands in an arena far too small."""
    trace = write(directory / "trace.jsonl", conversations(3, requests, 30, block=64))
    journal = directory / "pressed"
    flags = ["--policy", "value", "--arena-fraction", "10%", "--journal", str(journal)]
    assert command.main([str(trace), *BANDS, *SETTINGS, *flags]) == 0
    return journal


class Dated(World):
    """A world whose clock is that of a real daemon: nanoseconds since 1970."""

    def now(self) -> int:
        """The next millisecond."""
        self.now_ns = max(self.now_ns, DATED_NS)
        return super().now()


def troubled(directory: Path, snapshot_bytes: int = 0, made: type[World] = World) -> Path:
    """Two lives on two stages: the first loses an epoch and is cut off, the second closes."""
    return two_lives(directory, (3, 4), (60, 60, 60), made, snapshot_bytes=snapshot_bytes)


class Seen(NamedTuple):
    """The stages behind one step: per stored band its states, holders on live units, counts and span."""

    sequence: int
    bands: list[tuple[Any, Int32s, tuple[int, ...], tuple[int, int]]]


def stages_behind_steps(directory: Path) -> Iterator[Seen]:
    """The truth: every step applied to fresh replicas, read off their columns."""
    config: Any = None
    stages: list[StageReplica] = []
    for record in Walk(DiskStorage(directory)).records():
        if record.kind not in (Kind.OPENED, Kind.EPOCH_BEGAN, Kind.STEPPED):
            continue
        said: Any = record.decode()
        if isinstance(said, Opened):
            config = said.core
        elif isinstance(said, EpochBegan):
            shape = said.geometry
            stages = [StageReplica(shape, at, config, said.facts) for at in range(len(shape.stages))]
        else:
            for stage in stages:
                stage.apply_step(said)
            bands = [band for stage in stages for band in stage._chain._stored]
            yield Seen(record.sequence, [_band(band) for band in bands])


def _band(band: Any) -> tuple[Any, Int32s, tuple[int, ...], tuple[int, int]]:
    units = band.units
    states = units.state[: units.capacity].copy()
    holders = np.where(states == LIVE, units.holder, 0).astype(np.int32)
    return states, holders, band.counts(), (units.begin, units.frontier)
