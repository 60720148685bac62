"""The same programs on real streams: a modeled device that performs everything on a CUDA device too, and compares.

Owns the real arena, pinned host rows, an engine and delayed forwards of one rank. Must never correct what it finds: a
byte that differs from what the model holds is a fault. Invariant: both are told the same in the same order, so where
the model finds no race, a difference means that the real device missed a wait or did other work.

No GPU was at hand when this was written; its comparisons are tested over streams that run at once, in host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allocator.columns import Bytes8s, Int32s, Int64s
from allocator.geometry import StageGeometry
from daemon.rank.cuda import CudaDevice, Streams, Units
from daemon.rank.host_pool import HostPool, host_rows
from daemon.rank.modeled_device import JUNK, Draws, ModeledDevice, PeerWrites, Reads, Writes
from daemon.rank.modeled_order import DeviceFault

CYCLES_MAX = 2_000_000  # about a millisecond of a GPU's clock
UNIT_SCALE = 8  # unit kernels work in words of so many bytes


class Machinery(NamedTuple):
    """What a streamed device runs on: a GPU (`gpu`), or host memory in tests."""

    where: torch.device
    streams: Callable[[], Streams]
    engine_stream: Callable[[], Any]
    units: Callable[[StageGeometry, Tensor, HostPool], Units]
    pause: Callable[[int], None]  # cycles, on the current stream
    rows: Callable[[int, int], Bytes8s]


def gpu() -> Machinery:
    """The current GPU; raises RuntimeError where there is none."""
    if not torch.cuda.is_available():
        raise RuntimeError("this torch finds no CUDA GPU")
    from daemon.rank.triton_ops import TritonUnits

    def pinned(slots: int, unit_bytes: int) -> Bytes8s:
        if not slots:
            return host_rows(0, unit_bytes)
        return torch.zeros((slots, unit_bytes), dtype=torch.uint8, pin_memory=True).numpy()

    def streams() -> Streams:
        return Streams(torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream())

    where = torch.device("cuda", torch.cuda.current_device())
    return Machinery(where, streams, torch.cuda.Stream, TritonUnits, torch.cuda._sleep, pinned)


class _Engine:
    """Moves units on a stream of its own, as late as it likes; a peer's rows come from the model."""

    def __init__(self, device: StreamedDevice, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self.carried: dict[int, list[tuple[int, Tensor]]] = {}

    def submit(self, use: int, band: int, units: Int32s) -> None:
        """Reads the units."""
        with self._device.on(self._stream):
            self._device.pause()
            self.carried.setdefault(use, []).append((band, self._device.gather(band, units)))

    def publish(self, use: int, band: int, virtual: Int32s, units: Int32s) -> None:
        """A peer that writes them, or reads them."""
        rows = self._device.peer_rows(use, band, virtual)
        if rows is None:
            self.submit(use, band, units)
            return
        with self._device.on(self._stream):
            self._device.pause()
            self._device.scatter(band, units, np.zeros(units.size, dtype=np.int32), rows)

    def wait(self, use: int) -> None:
        """Everything it was given is over."""
        self._stream.synchronize()

    def end(self, use: int) -> None:
        """Forgets what it carried."""
        self.carried.pop(use, None)


class StreamedDevice(ModeledDevice):
    """A rank of a program on real streams beside its model; `machinery` is what it runs on."""

    def __init__(
        self,
        stage: StageGeometry,
        seed: int,
        host_slots: int = 0,
        peer_writes: PeerWrites | None = None,
        watch: bool = False,
        machinery: Machinery | None = None,
    ) -> None:
        super().__init__(stage, seed, host_slots, peer_writes, watch)
        self._real = machinery or gpu()
        self._sizes = [band.unit_bytes for band in stage.bands]
        self._data = torch.full((stage.arena_bytes,), JUNK, dtype=torch.uint8, device=self._real.where)
        self._data[: stage.chain_start_bytes] = 0
        self._pool = HostPool(stage, host_slots, self._real.rows)
        self._pauses = Draws(seed + 2)
        self._streams = self._real.streams()
        self.on = self._streams.on
        self._engine = _Engine(self, self._real.engine_stream())
        units = self._real.units(stage, self._data, self._pool)
        self._cuda = CudaDevice(self._streams, units, self._engine)
        self._ended: dict[int, Any] = {}  # events of forwards
        self._read: dict[int, list[Tensor]] = {}
        self._copied: dict[int, list[tuple[Any, int, Int64s]]] = {}  # events, bands and slots of host copies
        self._peers: set[int] = set()
        if self._real.where.type == "cuda":
            torch.cuda.synchronize()

    # --- bytes ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """The current stream idles for a while, or not."""
        draw = self._pauses.next()
        if draw > 0.5:
            self._real.pause(int((draw - 0.5) * 2 * CYCLES_MAX))

    def peer_rows(self, use: int, band: int, virtual: Int32s) -> Bytes8s | None:
        """What the peer of a publication writes; None when it reads."""
        return self._peer_writes(use, band, virtual) if self._peer_writes else None

    def gather(self, band: int, units: Int32s) -> Tensor:
        """Whole units, on the current stream."""
        return self._view(band)[self._put(units.astype(np.int64))]

    def scatter(self, band: int, units: Int32s, offsets: Int32s, values: Bytes8s) -> None:
        """Bytes into units, on the current stream."""
        columns = offsets.astype(np.int64)[:, None] + np.arange(values.shape[1])
        rows = units.astype(np.int64)[:, None]
        self._view(band)[self._put(rows), self._put(columns)] = self._put(values)

    def _view(self, band: int) -> Tensor:
        size = self._sizes[band]
        return self._data[: self._data.numel() // size * size].view(-1, size)

    def _put(self, array: NDArray[Any]) -> Tensor:
        """A host array on the device; nothing waits for the stream."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory().to(self._real.where, non_blocking=True) if self._real.where.type == "cuda" else host

    # --- effects -------------------------------------------------------------------------------------------------

    def open_tables(self, tables: Sequence[Int32s]) -> None:
        """As the model."""
        self._cuda.open_tables(tables)

    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None:
        """As the model."""
        self._cuda.bind(band, virtual, physical)

    def wait_forward(self, seq: int) -> None:
        """As the model."""
        super().wait_forward(seq)
        self._cuda.wait_forward(seq)

    def wait_copy(self, use: int) -> None:
        """As the model."""
        super().wait_copy(use)
        self._cuda.wait_copy(use)

    def host_wait(self, use: int) -> None:
        """As the model."""
        super().host_wait(use)
        self._cuda.host_wait(use)

    def zero(self, band: int, units: Int32s) -> None:
        """As the model, later."""
        super().zero(band, units)
        self._pause_on(self._streams.schedule)
        self._cuda.zero(band, units)

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """As the model, later."""
        super().copy(band, sources, targets)
        self._pause_on(self._streams.schedule)
        self._cuda.copy(band, sources, targets)

    def host_read(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """As the model, later."""
        super().host_read(use, band, units, slots)
        self._pause_on(self._streams.copies)
        self._cuda.host_read(use, band, units, slots)
        self._copied.setdefault(use, []).append((self._streams.copies.record_event(), band, slots))

    def host_write(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """As the model, later."""
        super().host_write(use, band, units, slots)
        self._pause_on(self._streams.copies)
        self._cuda.host_write(use, band, units, slots)
        self._copied.setdefault(use, []).append((self._streams.copies.record_event(), band, slots))

    def send_units(self, use: int, band: int, units: Int32s, after: int) -> None:
        """As the model."""
        super().send_units(use, band, units, after)
        self._peers.add(use)
        self._cuda.send_units(use, band, units, after)

    def publish_units(self, use: int, band: int, virtual: Int32s, units: Int32s, after: int) -> None:
        """As the model."""
        super().publish_units(use, band, virtual, units, after)
        self._peers.add(use)
        self._cuda.publish_units(use, band, virtual, units, after)

    def schedule_done(self) -> None:
        """As the model."""
        self._cuda.schedule_done()

    # --- forwards ------------------------------------------------------------------------------------------------

    def launch(self, seq: int, reads: Reads, writes: Writes, padding: Writes = ()) -> None:
        """A delayed forward on the forward stream: it gathers what it reads, then writes."""
        super().launch(seq, reads, writes, padding)
        with self.on(self._streams.forward):
            self.pause()
            self._read[seq] = [self.gather(band, units) for band, units in reads]
            self.pause()
            for band, units, offsets, values in (*writes, *padding):
                self.scatter(band, units, offsets, values)
        self._ended[seq] = self._streams.forward.record_event()

    def record_forward(self, seq: int) -> None:
        """As the model."""
        super().record_forward(seq)
        self._cuda.record_forward(seq)

    # --- what the host sees ----------------------------------------------------------------------------------------

    def retire_through(self, seq: int) -> None:
        """Forwards end on both: what each read is the same."""
        super().retire_through(seq)
        for one in [one for one in self._ended if one <= seq]:
            self._ended.pop(one).synchronize()
            for real, model in zip(self._read.pop(one), self.seen[one], strict=True):
                self._equal(real, model, f"forward {one} read")
        self._cuda.retire_through(seq)

    def finish(self, use: int) -> None:
        """The use ends on both: slots and what was carried are the same."""
        super().finish(use)
        for event, band, slots in self._copied.pop(use, []):
            event.synchronize()
            rows = torch.from_numpy(self._pool.rows(band)[slots])
            self._equal(rows, self.memory.host[band][slots], f"host copy {use} left")
        if use in self._peers:
            self._peers.discard(use)
            self._cuda.host_wait(use)
            carried = self._engine.carried.pop(use, [])
            for (band, real), (also, model) in zip(carried, self.carried.get(use, []), strict=True):
                assert band == also
                self._equal(real, model, f"transfer {use} carried")

    def release(self, uses: Sequence[int]) -> None:
        """As the model."""
        super().release(uses)
        self._cuda.release(uses)

    def drain(self) -> None:
        """Everything ends on both; with no peer left to write, both arenas are the same."""
        super().drain()
        if self._peers:
            return
        for stream in (self._streams.schedule, self._streams.forward, self._streams.copies):
            stream.synchronize()
        self._equal(self._data, self.memory.data, "the arena holds")

    # --- inside --------------------------------------------------------------------------------------------------

    def _pause_on(self, stream: Any) -> None:
        with self.on(stream):
            self.pause()

    def _equal(self, real: Tensor, model: Bytes8s, what: str) -> None:
        found = real.cpu().numpy()
        if not np.array_equal(found, model):
            at = np.argwhere(found != model)[0].tolist()
            raise DeviceFault("lost_write", f"on real streams, {what} other bytes than in the model, first at {at}")


class HostStream:
    """A stream whose work is done when it is issued."""

    def record_event(self) -> HostStream:
        """Nothing is outstanding."""
        return self

    def wait_event(self, event: object) -> None:
        """Nothing is outstanding."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""


def host_machinery(units: Callable[[StageGeometry, Tensor, HostPool], Units]) -> Machinery:
    """Host memory and streams that run at once: what is compared can be tested without a GPU."""

    def streams() -> Streams:
        made: list[Any] = [HostStream() for _ in range(3)]
        return Streams(made[0], made[1], made[2], lambda stream: contextlib.nullcontext())

    return Machinery(torch.device("cpu"), streams, HostStream, units, lambda cycles: None, host_rows)
