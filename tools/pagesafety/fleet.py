"""The ranks of every stage: real physical chains and executors over modeled devices, checked after every step.

Owns one mirror, one chain and device per rank, and the checks that compare them with each other and with the expected
contents. Must never decide anything. The first rank of a stage is watched (see `ModeledDevice`); the others only run
late and must agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from allocator.checks import Checks
from allocator.columns import Bytes8s, Int32s, Int64s
from allocator.effects import Effect, canonical_bytes
from allocator.geometry import Geometry
from allocator.logical.mirror import LogicalMirror
from allocator.ops import Fix, Op
from allocator.physical.chain import PhysicalChain
from daemon.rank.executor import Executor
from daemon.rank.modeled_device import Memory, ModeledDevice
from tools.pagesafety.contents import STATE_BIT, ForwardPlan, StageContents, peer_rows, written_rows
from tools.pagesafety.faults import StressFault

MakeDevice = Callable[..., ModeledDevice]
"""Makes a rank's device with the arguments of `ModeledDevice`, which it is where nothing else is asked for."""


class Rank:
    """One rank: its chain, executor and device."""

    def __init__(self, geometry: Geometry, stage: int, level: int, device: ModeledDevice) -> None:
        self.chain = PhysicalChain(geometry, stage, Checks(level))
        self.device = device
        resting = [self.chain.resting_unit(band) for band in range(len(geometry.stages[stage].bands))]
        self.executor = Executor(geometry, stage, device, resting)

    def step(self, seq: int, processed: int, released: Sequence[int], ops: list[Op]) -> tuple[list[Effect], bytes]:
        """Progress, ops, effects; the effects and the layout digest."""
        self.chain.begin_step(seq, processed, released)
        self.device.release(released)
        self.device.retire_through(processed)
        effects = self.chain.apply(ops)
        self.executor.execute(effects)
        return effects, self.chain.end_step()

    def launched(self, seq: int, written: Mapping[int, Int32s | None]) -> list[Effect]:
        """A forward is about to be launched: the waits that came before it."""
        waits = self.chain.launched(seq, written)
        self.executor.execute(waits)
        return waits


class Stage:
    """The ranks of one stage and what their units must hold."""

    def __init__(
        self,
        geometry: Geometry,
        index: int,
        ranks: int,
        seed: int,
        level: int,
        host_slots: int,
        make: MakeDevice | None = None,
    ) -> None:
        self.index = index
        self.geometry = geometry.stages[index]
        self.bands = self.geometry.bands
        self.stored = [band for band, shape in enumerate(self.bands) if shape.unit_bytes]
        self.contents = StageContents(geometry, index, host_slots)
        self.ranks = []
        for rank in range(ranks):
            number = seed * 64 + index * 8 + rank
            device = (make or ModeledDevice)(self.geometry, number, host_slots, self._peer, watch=rank == 0)
            self.ranks.append(Rank(geometry, index, level, device))
        self._ids = [np.arange(1, table.size, dtype=np.int32) for table in self.ranks[0].executor.tables]
        self._awaited: dict[int, list[Bytes8s]] = {}  # what the reads of forwards not processed yet must see
        self._sink_bytes = max((shape.unit_bytes for shape in self.bands if shape.kind != "state"), default=0)

    def _peer(self, use: int, band: int, virtual: Int32s) -> Bytes8s | None:
        shape = self.bands[band]
        return peer_rows(shape.kind, shape.unit_bytes, use, virtual) if self.contents.receives(use) else None

    # --- a step ----------------------------------------------------------------------------------------------------

    def step(self, seq: int, processed: int, released: Sequence[int], ops: list[Op], live: tuple[int, ...]) -> None:
        """One step on every rank, then all checks that need no forward."""
        for use in released:
            self._check_carried(use)
        for op in ops:
            self.contents.apply(op)
            if isinstance(op, Fix):  # always the first op of its step
                for rank in self.ranks:
                    rank.device.hang(op.use)
        effects, digest = self.ranks[0].step(seq, processed, released, ops)
        payload = canonical_bytes(effects)
        for number, rank in enumerate(self.ranks[1:], 1):
            others, other_digest = rank.step(seq, processed, released, ops)
            if canonical_bytes(others) != payload:
                raise StressFault("rank_divergence", f"step {seq}: effects of rank {number} of stage {self.index}")
            if other_digest != digest:
                raise StressFault("rank_divergence", f"step {seq}: layout of rank {number} of stage {self.index}")
        self.check(live)

    def processed(self, seqs: Sequence[int]) -> None:
        """The results of these forwards are in: what they read late, on every rank, was right."""
        for rank in self.ranks:
            if seqs:
                rank.device.retire_through(seqs[-1])
        for seq in seqs:
            wanted = self._awaited.pop(seq)
            for rank in self.ranks:
                self._compare(rank.device.seen.pop(seq), wanted, f"forward {seq}, late,")

    def launch(self, seq: int, plan: ForwardPlan) -> None:
        """The step's forward on every rank."""
        wanted = self._awaited[seq] = self.contents.forward(plan)
        written: dict[int, Int32s | None] = {band: ids for band, ids, _ in plan.writes}
        told = dict.fromkeys(written) if plan.unknown else written
        first: bytes | None = None
        for rank in self.ranks:
            payload = canonical_bytes(rank.launched(seq, told))
            if first is not None and payload != first:
                raise StressFault("rank_divergence", f"step {seq}: waits of a launch on stage {self.index}")
            first = payload
            self._enqueue(rank, seq, plan)
            rank.device.record_forward(seq)
        self._compare(self.ranks[0].device.seen_at_once, wanted, f"forward {seq}")

    def _enqueue(self, rank: Rank, seq: int, plan: ForwardPlan) -> None:
        tables = rank.executor.tables
        reads = [(band, tables[band][ids]) for band, ids in plan.reads if self.bands[band].unit_bytes]
        writes, padding = [], []
        for band, ids, number in plan.writes:
            shape = self.bands[band]
            if shape.unit_bytes:
                offsets, values = written_rows(shape.kind, shape.unit_bytes, ids, number)
                writes.append((band, tables[band][ids], offsets, values))
        for band in self.stored:
            if self.bands[band].kind == "state":
                offsets, values = written_rows("state", self.bands[band].unit_bytes, np.ones(1, np.int32), seq)
                padding.append((band, tables[band][:1], offsets, values))
        rank.device.launch(seq, reads, writes, padding)

    # --- checks ----------------------------------------------------------------------------------------------------

    def check(self, live: tuple[int, ...]) -> None:
        """Tables, counts, extents, sinks, and every live unit as if all issued work had run."""
        first = self.ranks[0]
        counts = first.chain.band_counts()
        extents = self.extents()
        for rank in self.ranks:
            for band in self.stored:
                if not np.array_equal(rank.chain.physical(band, self._ids[band]), rank.executor.tables[band][1:]):
                    raise StressFault("table", f"effects and chain disagree where band {self.bands[band].name} lies")
            if rank is not first and not np.array_equal(rank.chain.band_counts(), counts):
                raise StressFault("rank_divergence", f"counts of stage {self.index} differ between ranks")
            if rank is not first and rank.chain.fixed_extents() != extents:
                raise StressFault("rank_divergence", f"fixed extents of stage {self.index} differ between ranks")
        for band in self.stored:
            if counts[4 * band] != live[band]:
                raise StressFault(
                    "table", f"band {self.bands[band].name}: {counts[4 * band]} live on the rank, {live[band]} by ops"
                )
        memory = first.device.at_once
        assert memory is not None
        self._check_memory(first, memory, "")

    def check_drained(self, number: int) -> None:
        """One rank runs everything it was given; then its real memory holds what it must."""
        rank = self.ranks[number % len(self.ranks)]
        rank.device.drain()
        self._check_memory(rank, rank.device.memory, f" of rank {number % len(self.ranks)}, late")

    def check_quiet(self) -> None:
        """Nothing is in flight and no use is on: nothing pends, nothing is fixed."""
        for rank in self.ranks:
            pending = rank.chain.band_counts().reshape(-1, 4)[:, 2]
            if pending.any():
                raise StressFault("ledger_leak", f"units {pending.tolist()} pend at quiescence")
            if any(extent is not None for extent in rank.chain.fixed_extents()):
                raise StressFault("ledger_leak", f"{rank.chain.fixed_extents()} stay fixed at quiescence")

    def check_idle(self) -> None:
        """Nothing is live either: nothing is on record."""
        self.check_quiet()
        for number, rank in enumerate(self.ranks):
            rank.chain.check_idle()
            self.check_drained(number)

    def extents(self) -> list[tuple[int, int] | None]:
        """The fixed extents that the first rank reports."""
        return self.ranks[0].chain.fixed_extents()

    def _check_memory(self, rank: Rank, memory: Memory, where: str) -> None:
        if memory.data[: self._sink_bytes].any():
            raise StressFault("cross_dtype_bytes", f"the sink of stage {self.index} was written{where}")
        for band in self.stored:
            ids = self.contents.known[band].nonzero()[0]
            found = memory.units[band][rank.executor.tables[band][ids]]
            wanted = self.contents.rows[band][ids]
            if not np.array_equal(found, wanted):
                bad = ids[(found != wanted).any(axis=1)]
                self._blame(band, found, wanted, f"ids {bad[:4].tolist()} of band {self.bands[band].name}{where}")

    def _compare(self, seen: list[Bytes8s], wanted: list[Bytes8s], who: str) -> None:
        assert len(seen) == len(wanted)
        for found, right in zip(seen, wanted, strict=True):
            if not np.array_equal(found, right):
                text = f"{who} reads {found.tolist()} instead of {right.tolist()} on stage {self.index}"
                foreign = ((found & STATE_BIT) != (right & STATE_BIT)).any()
                raise StressFault("cross_dtype_bytes" if foreign else "lost_write", text[:400])

    def _blame(self, band: int, found: Bytes8s, wanted: Bytes8s, text: str) -> None:
        rows = (found != wanted).any(axis=1)
        text = f"{text} hold {found[rows][:4].tolist()} instead of {wanted[rows][:4].tolist()}"
        foreign = self.bands[band].kind != "state" and (found & STATE_BIT).any()
        raise StressFault("cross_dtype_bytes" if foreign else "lost_write", text)

    def _check_carried(self, use: int) -> None:
        """At a release: what each rank's engine carried, and what each host slot holds."""
        wanted = self.contents.ended(use)
        for rank in self.ranks:
            rank.device.finish(use)
            carried = rank.device.carried.pop(use, [])
            for band in self.stored:
                right = [rows for one, rows in wanted if one == band]
                found = [rows for one, rows in carried if one == band]
                if not right and not found:
                    continue
                width = self.bands[band].unit_bytes
                ours = np.concatenate([*right, np.empty((0, width), np.uint8)])
                theirs = np.concatenate([*found, np.empty((0, width), np.uint8)])
                if not np.array_equal(ours, theirs):
                    raise StressFault(
                        "lost_write", f"use {use} carried {theirs.tolist()} instead of {ours.tolist()} of band {band}"
                    )

    def check_host(self, band: int, slots: Int64s) -> None:
        """Host slots of a backup that is over hold what they must, on every rank."""
        for rank in self.ranks:
            found, wanted = rank.device.memory.host[band][slots], self.contents.host[band][slots]
            if not np.array_equal(found, wanted):
                text = f"host slots {slots.tolist()} of band {band} hold {found.tolist()} instead of {wanted.tolist()}"
                raise StressFault("lost_write", text)


class Fleet:
    """All stages and the one logical mirror."""

    def __init__(
        self,
        geometry: Geometry,
        ranks: int,
        seed: int,
        level: int,
        host_slots: int,
        make: MakeDevice | None = None,
    ) -> None:
        self.mirror = LogicalMirror(geometry, Checks(level))
        self.stages = [
            Stage(geometry, index, ranks, seed, level, host_slots, make) for index in range(len(geometry.stages))
        ]

    def step(
        self,
        seq: int,
        processed: int,
        released: Sequence[int],
        ops: list[Op],
        digest: bytes,
        live: tuple[int, ...],
    ) -> None:
        """One step everywhere, with all checks."""
        if self.mirror.apply_step(seq, ops, released) != digest:
            raise StressFault("rank_divergence", f"step {seq}: the mirror's logical digest")
        for stage in self.stages:
            stage.step(seq, processed, released, ops, live)

    def digests(self) -> list[bytes]:
        """The layout digests of all ranks."""
        return [rank.chain.digest for stage in self.stages for rank in stage.ranks]
