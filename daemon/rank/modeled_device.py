"""A modeled device: real bytes, and streams that run as late and in as different an order as their waits allow.

Owns an arena and host slots of one rank, a schedule stream, a forward stream, one stream per host copy and transfer,
and the delays between them, which differ by seed. Must never order two pieces of work that no wait orders, or decide
what a chain decides. Work is queued when it is issued and runs when the seeded delays let it, at the latest when
something waits for it. Invariant: everything runs after what it was told to wait for, and streams run in order.

With `watch`, the device also runs all work at once on a second memory, and checks the order of everything it is given
(`Order`): where no two unordered pieces of work touch one byte, both memories come to hold the same. So a lost byte is
seen at the effect that loses it, and a wait that is missing is seen whatever the delays were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from allocator.columns import Bytes8s, Int32s, Int64s
from allocator.geometry import StageGeometry
from daemon.rank.modeled_order import DeviceFault, Order

JUNK = 0x55
"""What an earlier user of the memory left in the chain's bytes: not zeros, and no bytes of ours."""

_MASK = 2**64 - 1

PeerWrites = Callable[[int, int, Int32s], Bytes8s | None]
"""(use, band, virtual ids) -> the bytes that the peer of a published use writes, or None when it reads."""


class Memory:
    """An arena and host slots; `units[band]` is uint8[units, unit_bytes], `host[band]` uint8[slots, unit_bytes]."""

    def __init__(self, stage: StageGeometry, host_slots: int) -> None:
        self.data: Bytes8s = np.full(stage.arena_bytes, JUNK, dtype=np.uint8)
        self.data[: stage.chain_start_bytes] = 0
        self.units: list[Bytes8s] = []
        self.host: list[Bytes8s] = []
        for band in stage.bands:
            size = band.unit_bytes
            count = stage.arena_bytes // size if size else 0
            self.units.append(self.data[: count * size].reshape(count, max(1, size)))
            self.host.append(np.zeros((host_slots, max(1, size)), dtype=np.uint8))


Work = Callable[[Memory], None]
Reads = Sequence[tuple[int, Int32s]]
"""Whole units that a forward reads, per band (physical)."""
Writes = Sequence[tuple[int, Int32s, Int32s, Bytes8s]]
"""(band, physical units, byte offset in each, bytes uint8[units, n] from there on)."""


class _Item(NamedTuple):
    work: Work | None
    needs: tuple[tuple[_Stream, int], ...]  # streams, and how many of their items must be done first


class _Stream:
    """Work in order: `issued` items were queued, `done` of them ran."""

    __slots__ = ("done", "issued", "queue", "speed")

    def __init__(self, speed: float) -> None:
        self.queue: deque[_Item] = deque()
        self.issued = 0
        self.done = 0
        self.speed = speed


class Draws:
    """Numbers in [0, 1) that follow from a seed: a counter, mixed as in SplitMix64."""

    __slots__ = ("_at",)

    def __init__(self, seed: int) -> None:
        self._at = seed * 0x632BE59BD9B4E019 & _MASK

    def next(self) -> float:
        """The next number."""
        self._at = (self._at + 0x9E3779B97F4A7C15) & _MASK
        mixed = (self._at ^ self._at >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        return (mixed ^ mixed >> 31) / 2**64


class Delays(NamedTuple):
    """How eagerly each stream gets on with its work: the chance that its next piece runs when the device may choose."""

    schedule: float
    forward: float
    copies: float
    transfers: float

    @staticmethod
    def draw(seed: int) -> Delays:
        """Delays of one rank: some streams lag far behind, others hardly."""
        draws = Draws(seed)
        return Delays(*((0.0, 0.1, 0.4, 0.9)[int(4 * draws.next())] for _ in range(4)))


class ModeledDevice:
    """A `device.Device`. Besides: `launch` is what a runner enqueues, `finish` what makes the proof for a release."""

    def __init__(
        self,
        stage: StageGeometry,
        seed: int,
        host_slots: int = 0,
        peer_writes: PeerWrites | None = None,
        watch: bool = False,
    ) -> None:
        self.memory = Memory(stage, host_slots)
        self.at_once = Memory(stage, host_slots) if watch else None
        self._order = Order(stage) if watch else None
        self._peer_writes = peer_writes
        self._draws = Draws(seed + 1)
        self._delays = Delays.draw(seed)
        self._schedule = _Stream(self._delays.schedule)
        self._forward = _Stream(self._delays.forward)
        self._forward_at: dict[int, int] = {}  # forward -> items of the forward stream up to and with it
        self._newest = 0
        self._uses: dict[int, _Stream] = {}
        self._endless: set[int] = set()
        self._copies: set[int] = set()
        self.seen: dict[
            int, list[Bytes8s]
        ] = {}  # what each forward read, in the order of its reads: whoever looks removes it
        self.seen_at_once: list[Bytes8s] = []  # the same of the newest forward, with `watch`
        self.carried: dict[int, list[tuple[int, Bytes8s]]] = {}  # what each send or reading peer took: (band, bytes)
        self.waits = {"forward": 0, "copy": 0, "host": 0}

    # --- effects -------------------------------------------------------------------------------------------------

    def open_tables(self, tables: Sequence[Int32s]) -> None:
        """Forwards name physical units here: their metadata was built when they were launched."""

    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None:
        """The executor's tables are the ones that forwards are built from."""

    def wait_forward(self, seq: int) -> None:
        """Following schedule work runs after forward `seq`."""
        if seq > self._newest:
            raise DeviceFault("stuck_wait", f"wait for forward {seq}, but the newest launched one is {self._newest}")
        self.waits["forward"] += 1
        self._queue(self._schedule, None, self._until_forward(seq))
        if self._order:
            self._order.behind_forward(seq)

    def wait_copy(self, use: int) -> None:
        """Following schedule work runs after host copy `use`."""
        self.waits["copy"] += 1
        if use not in self._copies:
            raise DeviceFault("stuck_wait", f"wait for host copy {use}, which was never issued")
        stream = self._uses.get(use)
        if stream is not None:
            self._queue(self._schedule, None, ((stream, stream.issued),))
        if self._order:
            self._order.behind_use(use)

    def host_wait(self, use: int) -> None:
        """The host goes on when transfer `use` is over on this rank's engine."""
        self.waits["host"] += 1
        if use in self._endless:
            raise DeviceFault("stuck_wait", f"the host waits for use {use}, which may never end")
        if use not in self._uses or use in self._copies:
            raise DeviceFault("stuck_wait", f"the host waits for transfer {use}, which was never issued")
        self.finish(use)
        if self._order:
            self._order.behind_use(use)

    def zero(self, band: int, units: Int32s) -> None:
        """Zero whole units."""
        if self._order:
            self._order.schedule(band, units, True, "zeroing")

        def work(memory: Memory) -> None:
            memory.units[band][units] = 0

        self._queue(self._schedule, work)

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Copy whole units pair by pair, in no order among themselves."""
        distinct = np.unique(targets)
        if distinct.size != targets.size or np.isin(sources, distinct).any():
            raise DeviceFault("unordered_overlap", f"one copy of band {band} reads or writes a target twice")
        if self._order:
            self._order.schedule(band, sources, False, "a copy")
            self._order.schedule(band, targets, True, "a copy")

        def work(memory: Memory) -> None:
            memory.units[band][targets] = memory.units[band][sources]

        self._queue(self._schedule, work)

    def host_read(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Host copy `use` reads units into host slots, behind all schedule work and forwards so far."""
        if self._order:
            self._order.use(use, f"backup {use}", band, units, False, self._newest)

        def work(memory: Memory) -> None:
            memory.host[band][slots] = memory.units[band][units]

        self._copies.add(use)
        self._queue(self._stream_of(use, self._delays.copies), work, self._behind_all())

    def host_write(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Host copy `use` writes units from host slots, behind all schedule work and forwards so far."""
        if self._order:
            self._order.use(use, f"load {use}", band, units, True, self._newest)

        def work(memory: Memory) -> None:
            memory.units[band][units] = memory.host[band][slots]

        self._copies.add(use)
        self._queue(self._stream_of(use, self._delays.copies), work, self._behind_all())

    def send_units(self, use: int, band: int, units: Int32s, after: int) -> None:
        """The engine reads units for `use`, behind all schedule work so far and forward `after`."""
        self._launched(after, f"send {use}")
        if self._order:
            self._order.use(use, f"send {use}", band, units, False, after)
        self._queue(self._stream_of(use, self._delays.transfers), self._reading(use, band, units), self._after(after))

    def publish_units(self, use: int, band: int, virtual: Int32s, units: Int32s, after: int) -> None:
        """A peer reads or writes units for `use`, any time from then until the use is released."""
        writes = self._peer_writes(use, band, virtual) if self._peer_writes else None
        self._launched(after, f"publication {use}")
        self._endless.add(use)
        if self._order:
            self._order.use(use, f"peer {use}", band, units, writes is not None, after)
        stream = self._stream_of(use, self._delays.transfers)
        if writes is None:
            self._queue(stream, self._reading(use, band, units), self._after(after))
            return
        data = writes

        def work(memory: Memory) -> None:
            memory.units[band][units] = data

        self._queue(stream, work, self._after(after))

    # --- forwards ------------------------------------------------------------------------------------------------

    def launch(self, seq: int, reads: Reads, writes: Writes, padding: Writes = ()) -> None:
        """Forward `seq` reads whole units, then writes bytes; behind all schedule work and forwards so far.

        `padding`: what its padding rows write, outside the chain.
        """
        if seq <= self._newest:
            raise DeviceFault("stuck_wait", f"forward {seq} launched after forward {self._newest}")
        if self._order:
            self._order.forward(seq, reads, [(band, units) for band, units, _, _ in writes])
        seen: list[Bytes8s] = []

        def work(memory: Memory) -> None:
            seen.clear()
            for band, units in reads:
                seen.append(memory.units[band][units])
            for band, units, offsets, values in (*writes, *padding):
                memory.units[band][units[:, None], offsets[:, None] + np.arange(values.shape[1])] = values

        self._queue(self._forward, work, ((self._schedule, self._schedule.issued),))
        self.seen_at_once = list(seen)
        self.seen[seq] = seen
        self._forward_at[seq] = self._forward.issued
        self._newest = seq

    def schedule_done(self) -> None:
        """Every forward is behind all schedule work anyway."""

    def record_forward(self, seq: int) -> None:
        """A forward records itself when it is launched."""
        if seq != self._newest:
            raise DeviceFault("stuck_wait", f"forward {seq} recorded, but {self._newest} is the newest launched")

    # --- what the host sees ----------------------------------------------------------------------------------------

    def retire_through(self, seq: int) -> None:
        """The host has the results of all forwards up to `seq`, so they are over."""
        for stream, count in self._until_forward(seq):
            self._run_through(stream, count)
        if self._order:
            self._order.behind_forward(seq)
        for done in [one for one in self._forward_at if one < seq]:
            del self._forward_at[done]

    def finish(self, use: int) -> None:
        """Run use `use` to its end: the proof that a release needs."""
        stream = self._uses.get(use)
        if stream is not None:
            self._run_through(stream, stream.issued)

    def hang(self, use: int) -> None:
        """The engine of send `use` may never end until it is released."""
        self._endless.add(use)

    def release(self, uses: Sequence[int]) -> None:
        """The host knows that these uses are over on every rank."""
        for use in uses:
            self.finish(use)
            self._uses.pop(use, None)
            self._copies.discard(use)
            self._endless.discard(use)
            if self._order:
                self._order.behind_use(use)

    def drift(self) -> None:
        """Every stream may get on with its work, or not."""
        chance = self._draws.next
        for stream in (self._schedule, self._forward, *self._uses.values()):
            while stream.queue and chance() < stream.speed:
                self._run_through(stream, stream.done + 1)

    def drain(self) -> None:
        """Everything issued so far runs."""
        for stream in (self._schedule, self._forward, *self._uses.values()):
            self._run_through(stream, stream.issued)

    # --- inside --------------------------------------------------------------------------------------------------

    def _queue(self, stream: _Stream, work: Work | None, needs: tuple[tuple[_Stream, int], ...] = ()) -> None:
        stream.queue.append(_Item(work, needs))
        stream.issued += 1
        if self.at_once is not None and work is not None:
            work(self.at_once)

    def _run_through(self, stream: _Stream, count: int) -> None:
        while stream.done < count:
            item = stream.queue[0]
            for need, until in item.needs:
                if need.done < until:
                    self._run_through(need, until)
            if stream.queue and stream.queue[0] is item:
                stream.queue.popleft()
                stream.done += 1
                if item.work is not None:
                    item.work(self.memory)

    def _reading(self, use: int, band: int, units: Int32s) -> Work:
        carried = self.carried.setdefault(use, [])

        def work(memory: Memory) -> None:
            if memory is self.memory:
                carried.append((band, memory.units[band][units]))

        return work

    def _stream_of(self, use: int, speed: float) -> _Stream:
        return self._uses.setdefault(use, _Stream(speed))

    def _behind_all(self) -> tuple[tuple[_Stream, int], ...]:
        return (self._schedule, self._schedule.issued), (self._forward, self._forward.issued)

    def _after(self, seq: int) -> tuple[tuple[_Stream, int], ...]:
        return (self._schedule, self._schedule.issued), *self._until_forward(seq)

    def _until_forward(self, seq: int) -> tuple[tuple[_Stream, int], ...]:
        at = max((count for one, count in self._forward_at.items() if one <= seq), default=0)
        return ((self._forward, at),)

    def _launched(self, seq: int, who: str) -> None:
        if seq > self._newest:
            raise DeviceFault("stuck_wait", f"{who} after forward {seq}; the newest launched one is {self._newest}")
