"""The CUDA backend: three streams, one event per forward in flight and per host copy.

Owns the forward, schedule and copy streams and the events between them. Must never wait for the GPU on the host except
for a forward's tokens and for what a transfer engine, which no stream orders, is about to touch. Invariants:

    schedule work    waits only for the forwards and host copies that effects name
    a forward        waits for all schedule work issued before it
    a host copy      waits for all schedule work issued and all forwards launched before it
    a transfer       starts when the forward it names was processed and the schedule work before it has ended

No GPU was at hand when this was written. The kernels and `triton_ops` are tested in Triton's interpreter and the order
of streams with modeled ones that report two accesses which nothing orders; none of it has run on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from allocator.columns import Int32s, Int64s
from allocator.geometry import StageGeometry
from daemon.rank.device import Device
from daemon.rank.errors import StepRefused
from daemon.rank.layout import Layout, local_ranks
from daemon.rank.paged_attention import LayerViews, PagedAttention
from daemon.rank.runner import Launched, Outcome
from daemon.rank.sampler import Limits
from daemon.rank.states import LayerStates, RecurrentStates
from daemon.rank.transfers import TransferEngine, no_engine
from daemon.rank.triton_ops import TritonAttention, TritonUnits
from daemon.rank.triton_states import TRITON_OPS
from ipc.messages import RowLogprobs
from kernels.host_library import HostLibrary
from kernels.sampling import sample

POLL_S = 0.0002


class Streams(NamedTuple):
    """The three streams of a GPU; inside `on(stream)`, work goes to that stream."""

    forward: torch.cuda.Stream
    schedule: torch.cuda.Stream
    copies: torch.cuda.Stream
    on: Callable[[torch.cuda.Stream], contextlib.AbstractContextManager[object]] = torch.cuda.stream


class Units(Protocol):
    """What a device enqueues on the current stream; `triton_ops.TritonUnits` says what each does."""

    def open_tables(self, tables: Sequence[Int32s]) -> None: ...
    def zero(self, band: int, units: Int32s) -> None: ...
    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None: ...
    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None: ...
    def to_host(self, use: int, band: int, units: Int32s, slots: Int64s) -> None: ...
    def from_host(self, use: int, band: int, units: Int32s, slots: Int64s) -> None: ...


class _Deferred(NamedTuple):
    """A send, or with `virtual` a publication: due when forward `behind` is retired and then `ready` has fired."""

    use: int
    band: int
    virtual: Int32s | None
    units: Int32s
    behind: int
    ready: torch.cuda.Event


class CudaDevice:
    """Orders the streams by events; see the module."""

    def __init__(self, streams: Streams, units: Units, engine: TransferEngine | None = None) -> None:
        self._streams = streams
        self._units = units
        self._engine = engine
        self._forwards: dict[int, torch.cuda.Event] = {}  # the end of every forward that is not retired
        self._copies: dict[int, tuple[torch.cuda.Event, int]] = {}  # its end, and the forward that it runs behind
        self._transfers: set[int] = set()
        self._deferred: list[_Deferred] = []
        self._newest = 0
        self._retired = 0
        self._behind = 0  # the newest forward that schedule work issued from now on runs behind

    def open_tables(self, tables: Sequence[Int32s]) -> None:
        """Upload them as the first schedule work."""
        with self._streams.on(self._streams.schedule):
            self._units.open_tables(tables)

    def wait_forward(self, seq: int) -> None:
        """Following schedule work waits for forward `seq` on the GPU; a retired one has ended."""
        self._check_launched(seq)
        event = self._forwards.get(seq)
        if event is not None:
            self._streams.schedule.wait_event(event)
            self._behind = max(self._behind, seq)

    def wait_copy(self, use: int) -> None:
        """Following schedule work waits for the copy on the GPU."""
        if use not in self._copies:
            raise StepRefused(f"wait for host copy {use}, which is not under way")
        event, behind = self._copies[use]
        self._streams.schedule.wait_event(event)
        self._behind = max(self._behind, behind)

    def host_wait(self, use: int) -> None:
        """Start what of the transfer is deferred, whatever that waits for, then wait for the engine."""
        if use not in self._transfers or self._engine is None:
            raise StepRefused(f"wait for transfer {use}, which is not under way")
        for one in [one for one in self._deferred if one.use == use]:
            self._deferred.remove(one)
            self._start(one)
        self._engine.wait(use)

    def zero(self, band: int, units: Int32s) -> None:
        """Zero whole units, on the schedule stream."""
        with self._streams.on(self._streams.schedule):
            self._units.zero(band, units)

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Copy units pair by pair, on the schedule stream."""
        with self._streams.on(self._streams.schedule):
            self._units.copy(band, sources, targets)

    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None:
        """Update the id table, on the schedule stream; a forward's tables were translated on the host before."""
        with self._streams.on(self._streams.schedule):
            self._units.bind(band, virtual, physical)

    def host_read(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Units into host slots, on the copy stream."""
        self._begin_copy()
        with self._streams.on(self._streams.copies):
            self._units.to_host(use, band, units, slots)
        self._end_copy(use)

    def host_write(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Host slots into units, on the copy stream."""
        self._begin_copy()
        with self._streams.on(self._streams.copies):
            self._units.from_host(use, band, units, slots)
        self._end_copy(use)

    def send_units(self, use: int, band: int, units: Int32s, after: int) -> None:
        """Start the engine once the forward is retired and the schedule work before has ended."""
        self._defer(use, band, None, units, after)

    def publish_units(self, use: int, band: int, virtual: Int32s, units: Int32s, after: int) -> None:
        """Tell the peer once the forward is retired and the schedule work before has ended."""
        self._defer(use, band, virtual.copy(), units, after)

    def schedule_done(self) -> None:
        """The next forward waits for all schedule work issued so far."""
        self._streams.forward.wait_event(self._streams.schedule.record_event())

    def record_forward(self, seq: int) -> None:
        """Keep an event at the end of forward `seq`."""
        if seq <= self._newest:
            raise StepRefused(f"forward {seq} recorded after forward {self._newest}")
        self._forwards[seq] = self._streams.forward.record_event()
        self._newest = seq

    def retire_through(self, seq: int) -> None:
        """Drop the events of forwards that were processed, and start what was deferred behind them, in order."""
        self._check_launched(seq)
        self._retired = max(self._retired, seq)
        for done in [one for one in self._forwards if one <= seq]:
            del self._forwards[done]
        due = [one for one in self._deferred if one.behind <= self._retired]
        self._deferred = [one for one in self._deferred if one.behind > self._retired]
        for one in due:
            self._start(one)

    def release(self, uses: Sequence[int]) -> None:
        """Drop the events of copies; have the engine forget transfers, and never start what was deferred of them."""
        for use in uses:
            self._copies.pop(use, None)
            if use in self._transfers:
                self._transfers.discard(use)
                self._deferred = [one for one in self._deferred if one.use != use]
                assert self._engine is not None, "only an engine begins a transfer"
                self._engine.end(use)

    def _check_launched(self, seq: int) -> None:
        if seq > self._newest:
            raise StepRefused(f"wait for forward {seq}, but the newest launched one is {self._newest}")

    def _begin_copy(self) -> None:
        """The copy stream runs behind all schedule work and every forward so far."""
        streams = self._streams
        streams.copies.wait_event(streams.schedule.record_event())
        newest = self._forwards.get(self._newest)
        if newest is not None:
            streams.copies.wait_event(newest)

    def _end_copy(self, use: int) -> None:
        self._copies[use] = (self._streams.copies.record_event(), self._newest)

    def _defer(self, use: int, band: int, virtual: Int32s | None, units: Int32s, after: int) -> None:
        if self._engine is None:
            no_engine(use)
        self._check_launched(after)
        # Behind what the schedule work waits for, too: then the host waits for its event only, never for a forward.
        behind = max(after, self._behind)
        one = _Deferred(use, band, virtual, units.copy(), behind, self._streams.schedule.record_event())
        self._transfers.add(use)
        if behind <= self._retired:
            self._start(one)
        else:
            self._deferred.append(one)

    def _start(self, one: _Deferred) -> None:
        """Hand it to the engine; waits on the host for what it must be behind."""
        assert self._engine is not None
        event = self._forwards.get(one.behind)
        if event is not None:
            event.synchronize()
        one.ready.synchronize()
        if one.virtual is None:
            self._engine.submit(one.use, one.band, one.units)
        else:
            self._engine.publish(one.use, one.band, one.virtual, one.units)


class CudaLaunched:
    """A forward on the GPU; its tokens are copied to pinned memory behind it."""

    def __init__(self, tokens: Tensor, logprobs: list[RowLogprobs]) -> None:
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._host.copy_(tokens, non_blocking=True)
        self._done = torch.cuda.current_stream().record_event()
        self._logprobs = logprobs

    def due_in_s(self) -> float:
        """0 when the tokens are on the host, else when to look again."""
        return 0 if self._done.query() else POLL_S

    def outcome(self) -> Outcome:
        """Wait for the tokens."""
        self._done.synchronize()
        return Outcome(np.array(self._host.numpy()), self._logprobs)


class CudaBackend:
    """One CUDA GPU: ranks of a machine take its GPUs in turn."""

    library: HostLibrary | None = None  # of the host
    kernels = "triton"

    def __init__(self, number: int = 0) -> None:
        """`number`: the rank's place among those of this machine."""
        self.torch_device = torch.device("cuda", number % torch.cuda.device_count())
        with torch.cuda.device(self.torch_device):
            self._streams = Streams(torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream())

    def choose_kernels(self, asked: str, dtype: torch.dtype) -> None:
        """There is one form; the thread that computes is put on this GPU."""
        torch.cuda.set_device(self.torch_device)

    def free_bytes(self) -> int:
        """Free memory of the GPU."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def sharing(self, layout: Layout) -> int:
        """The ranks that were given this GPU too, when there are more ranks here than GPUs."""
        return -(-local_ranks(layout) // torch.cuda.device_count())

    def open_device(self, stage: StageGeometry) -> tuple[Device, Tensor]:
        """A device with a zeroed arena on the GPU, before any of its streams uses it and after the last one's work."""
        torch.cuda.synchronize(self.torch_device)
        data = torch.zeros(stage.arena_bytes, dtype=torch.uint8, device=self.torch_device)
        torch.cuda.synchronize(self.torch_device)
        return CudaDevice(self._streams, TritonUnits(stage, data)), data

    def attention(self, views: Mapping[int, LayerViews]) -> PagedAttention:
        """Triton kernels."""
        return TritonAttention(views)

    def states(self, views: Mapping[int, LayerStates]) -> RecurrentStates:
        """Triton kernels."""
        return RecurrentStates(views, self.torch_device, TRITON_OPS)

    def draw(self, logits: Tensor, limits: Limits, keys: Tensor) -> Tensor:
        """By the sampling kernel: temperature, min-p, top-k, top-p and noise in one launch that the host never waits
        for."""
        columns = [torch.from_numpy(column).pin_memory().to(logits.device, non_blocking=True) for column in limits]
        return sample(logits, keys, *columns)

    def forward_scope(self) -> contextlib.AbstractContextManager[object]:
        """Work goes to the forward stream."""
        return torch.cuda.stream(self._streams.forward)

    def launched(self, tokens: Tensor, logprobs: list[RowLogprobs]) -> Launched:
        """Copy the tokens out behind the forward."""
        return CudaLaunched(tokens, logprobs)
