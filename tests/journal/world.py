"""A whole daemon in one thread without sockets: core, journal and rank doubles, driven by a seed.

Owns the order of things as the engine has it (input appended, core fed, outputs appended, one write) and doubles of the
ranks that follow the steps with chains and page tables of their own. Must never share code with the replay it tests.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trio

from allocator.columns import i32, pack_i32, pack_i64
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.logical.mirror import LogicalMirror
from allocator.physical.chain import PhysicalChain
from daemon.clock import SystemClock
from daemon.core.inputs import (
    Aborted,
    Acknowledged,
    Arrived,
    Controlled,
    EpochBegan,
    EpochEnded,
    FinishAsked,
    FlushAsked,
    Input,
    Reported,
    Ticked,
)
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from daemon.core.scheduler import SchedulerCore
from daemon.mailbox import Collated
from daemon.rank.rows import RowTable
from daemon.rank.stage_state import stage_state
from daemon.recovery import recover
from daemon.snapshot_draft import Begin, Moment, Written, write
from daemon.snapshot_keeper import SnapshotKeeper
from daemon.snapshots import core_state, restore_core
from ipc.digests import SAMPLED_START, effects_column, sampled_digest
from ipc.messages import SAMPLE, Generate, ModelFacts, Sampling, Step
from ipc.packing import pack
from journal.opening import open_journal
from journal.records import DECISION_VERSION, SCHEMA_VERSION, Closed, Digested, Kind, Opened, Snapshotted, encode
from journal.storage import DiskStorage, Storage
from journal.writer import JournalSettings
from tests.journal.helpers import ID

PAGE = 4
VOCAB = 100
EOS = 7
FACTS = ModelFacts("double", "none", VOCAB, 64, "float32", [EOS])
CONFIG = CoreConfig(page_size=PAGE, max_running_requests=6, max_batched_tokens=32, chunked_prefill_size=12)


def geometry(pages: int = 40, stages: int = 2) -> Geometry:
    """Stages of one full-attention band each, with unlike unit sizes."""
    units = [64 * (stage + 1) for stage in range(stages)]
    return Geometry(
        PAGE,
        4 * pages,
        8,
        [StageGeometry(unit * (pages + 1), unit, [BandGeometry("full", "full", unit)]) for unit in units],
    )


class Lines:
    """A logger that keeps the names of events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def info(self, event: str, **values: object) -> None:
        self.events.append(event)

    warning = info


async def in_place(function: Callable[[], Any]) -> Any:
    """A worker thread that is this one."""
    return function()


class InPlace:
    """A draft by the process itself: one whose disk is in its own memory has no use for a copy's."""

    def __init__(self, core: SchedulerCore, storage: Storage, moment: Moment) -> None:
        self._begun = restore_core(core_state(core)), storage, moment

    async def finish(self, stages: Sequence[bytes]) -> Written:
        """Written here and now."""
        return write(*self._begun, iter(stages).__next__)

    def abandon(self) -> None:
        """There is nothing to end."""

    async def reap(self) -> None:
        """There is nothing to wait for."""

    def gone(self) -> bool:
        """There never was a process."""
        return True


class RankDouble:
    """A stage's rank: its own chains, page tables as dictionaries, tokens from a sum."""

    def __init__(self, shape: Geometry, stage: int) -> None:
        self.stage, self.last = stage, stage == len(shape.stages) - 1
        self.chain, self.mirror = PhysicalChain(shape, stage), LogicalMirror(shape)
        self.tables: dict[int, dict[int, int]] = {}
        self.rows = RowTable(CONFIG.max_running_requests, 40)
        self.sampled = SAMPLED_START

    def run(self, step: Step) -> tuple[Digested, tuple[bytes, bytes, bytes]]:
        """Apply and launch; what it reports, and the columns of sampled rows."""
        self.chain.begin_step(step.seq, step.processed_through, step.released)
        logical = self.mirror.apply_step(step.seq, step.ops)
        ends: list[int] = []
        self.chain.apply(step.ops, ends)
        effects = effects_column(self.chain.applied, ends)
        layout = self.chain.end_step()
        rows: list[int] = []
        generations: list[int] = []
        tokens: list[int] = []
        forward = step.forward
        if forward is not None:
            entries = zip(i32(forward.table_rows), i32(forward.table_indexes), i32(forward.table_pages), strict=True)
            for row, index, page in entries:
                self.tables.setdefault(int(row), {})[int(index)] = int(page)
            written = set()
            columns = (i32(forward.rows), i32(forward.generations), i32(forward.starts), i32(forward.counts))
            for row, generation, first, count, flag in zip(*columns, forward.flags, strict=True):
                pages = range(first // PAGE, (first + count - 1) // PAGE + 1)
                written.update(self.tables[int(row)][page] for page in pages)
                if flag & SAMPLE:
                    rows.append(int(row))
                    generations.append(int(generation))
                    tokens.append(int(5 * row + 3 * (first + count) + step.seq) % VOCAB)
            self.chain.launched(step.seq, {0: np.array(sorted(written), np.int32)})
            self.rows.apply(forward)
        self.state = pack(stage_state(self.chain, self.mirror, self.rows)) if step.snapshot else b""
        sampled = (pack_i32(rows), pack_i32(generations), pack_i64(tokens))
        if self.last:
            self.sampled = sampled_digest(self.sampled, step.seq, *sampled)
        digest = self.sampled if self.last else b""
        return Digested(step.epoch, step.seq, self.stage, 0, logical, layout, digest, effects), sampled


class World:
    """One life over a storage. Time goes in steps of a millisecond; everything else comes of the seed."""

    def __init__(
        self,
        storage: Storage,
        seed: int = 0,
        life: str = "life",
        settings: JournalSettings | None = None,
        shape: Geometry | None = None,
        snapshot_bytes: int = 0,
        part_bytes: int = 4000,
        begin: Begin = InPlace,
    ) -> None:
        self.rng = random.Random(seed)
        self.shape = shape or geometry()
        self.writer, found = open_journal(storage, settings or JournalSettings(), ID)
        self.recovery = recover(storage, found)
        self.core = SchedulerCore(CONFIG)
        self.orders: deque[Controlled | Snapshotted] = deque()
        self.lines = Lines()
        self.keeper = SnapshotKeeper(
            self.writer, self.orders.append, SystemClock(), self.lines, life, snapshot_bytes, in_place, begin
        )
        self.now_ns = 0
        self.ids = 0
        self.known: list[str] = []
        self.flying: deque[Step] = deque()
        self.ranks: list[RankDouble] = []
        self.steps = 0
        self.wants_tick = False
        self.writer.append(Opened(0, life, SCHEMA_VERSION, DECISION_VERSION, CONFIG, {"world": "1"}, {}))
        if found.life_segment:
            for part in self.recovery.taken_over(self.now(), part_bytes):
                self.feed(part)
        self.begin_epoch(1)

    def now(self) -> int:
        """The next millisecond."""
        self.now_ns += 1_000_000
        return self.now_ns

    def begin_epoch(self, epoch: int) -> None:
        """Ranks with empty arenas, and the input that says so."""
        self.flying.clear()
        self.ranks = [RankDouble(self.shape, stage) for stage in range(len(self.shape.stages))]
        self.feed(EpochBegan(self.now(), epoch, self.shape, FACTS))

    def end_epoch(self, epoch: int, recovers: bool = True) -> None:
        """The ranks are lost, and with them the steps in flight."""
        self.flying.clear()
        self.feed(EpochEnded(self.now(), epoch, "the world ends it", recovers))

    def feed(self, item: Input) -> Outputs:
        """As the engine does: append, feed, append what it led to."""
        if isinstance(item, EpochBegan | EpochEnded):
            self.keeper.epoch_changed()
        self.writer.append(item)
        outputs = self.core.feed(item)
        self.writer.append_all(outputs.decisions)
        if outputs.step is not None:
            self.writer.append_encoded(Kind.STEPPED, encode(outputs.step))
            if outputs.step.snapshot:
                self.keeper.stepped(outputs.step, self.writer.last_sequence, self.core)
            self.flying.append(outputs.step)
            self.steps += 1
        self.wants_tick = outputs.wants_tick
        return outputs

    def arrive(self) -> None:
        """A request of random size; some have several choices, some stop early, some are refused."""
        self.ids += 1
        rng = self.rng
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(0 if rng.random() < 0.05 else 1, 40))]
        request = Generate(
            f"r{self.ids}",
            pack_i64(prompt),
            Sampling(temperature=rng.choice([0.0, 1.0])),
            rng.choice([None, 1, 5, 20]),
            stop_ids=pack_i64([EOS]),
            n=rng.choice([1, 1, 1, 2]),
            priority=rng.randrange(2),
            clip=True,
        )
        self.known.append(request.id)
        self.feed(Arrived(self.now(), f"front{rng.randrange(2)}", request, rng.getrandbits(60)))

    def report(self) -> None:
        """The oldest step in flight is complete on every stage."""
        step = self.flying.popleft()
        columns, digests = (b"", b"", b""), []
        for rank in self.ranks:
            digested, columns = rank.run(step)
            digests.append(digested)
        self.writer.append_all(digests)
        reported = Reported(self.now(), step.epoch, step.seq, *columns)
        states = {rank.stage: rank.state for rank in self.ranks if rank.state}
        self.keeper.collated(Collated(digests, reported, snapshots=states))
        self.feed(reported)

    def iterate(self, arrivals: float = 0.3) -> None:
        """One iteration: some inputs, a report, a tick, one write; sometimes a sync."""
        rng = self.rng
        if rng.random() < arrivals:
            self.arrive()
        if self.known and rng.random() < 0.08:
            frontend, id = f"front{rng.randrange(2)}", rng.choice(self.known)
            item = rng.choice(
                [
                    Aborted(self.now(), frontend, id, "client"),
                    FinishAsked(self.now(), frontend, id, 0, 1),
                    Acknowledged(self.now(), frontend, [id]),
                    FlushAsked(self.now(), 4),
                ]
            )
            self.feed(item)
        if self.flying and rng.random() < 0.8:
            self.report()
        if self.wants_tick:
            self.feed(Ticked(self.now()))
        self.writer.flush()
        self.keeper.flushed()
        if self.keeper.complete:
            trio.run(self.keeper.write_complete)
        while self.orders:
            order = self.orders.popleft()
            if isinstance(order, Controlled):
                self.feed(order)
            else:
                self.writer.append(order)
        if rng.random() < 0.2:
            self.writer.sync()

    def close(self) -> None:
        """Drain, then the footer."""
        self.feed(Controlled(self.now(), "drain"))
        for _ in range(10_000):
            if not (self.flying or self.wants_tick):
                break
            self.iterate(arrivals=0)
        gauges = self.core.gauges()
        assert gauges["live"] == 0, "the world does not come to an end"
        totals = {name: value for name, value in gauges.items() if name.endswith("_total")}
        self.writer.append(Closed(self.now(), "drained", totals, self.core.state_digest()))
        self.writer.close()


def two_lives(
    directory: Path,
    seeds: tuple[int, int],
    counts: tuple[int, int, int],
    made: type[World] = World,
    arrivals: float = 0.3,
    closes: bool = True,
    **more: Any,
) -> Path:
    """A journal: a life of two epochs that is cut off, and another, with so many iterations each; its directory."""
    first = made(DiskStorage(directory), seeds[0], "first", **more)
    for epoch, count in enumerate(counts[:2], start=1):
        if epoch == 2:
            first.end_epoch(1)
            first.begin_epoch(2)
        for _ in range(count):
            first.iterate(arrivals)
    first.writer.sync()
    first.writer.close()
    first.writer.storage.unlock()
    second = made(DiskStorage(directory), seeds[1], "second", **more)
    for _ in range(counts[2]):
        second.iterate(arrivals)
    second.close() if closes else second.writer.close()
    second.writer.storage.unlock()
    return directory
