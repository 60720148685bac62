"""The CUDA backend: two streams, one event per forward in flight.

Owns the forward stream, the schedule stream and the events between them. Must never wait for the GPU on the host except
for a forward's tokens. Invariants: schedule work waits only for the forwards that effects name; a forward waits for all
schedule work issued before it; an event is kept until its forward was processed. No GPU was at hand when this was
written: the kernels and `triton_ops` are tested in Triton's interpreter, the streams and events here were not run.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch import Tensor

from allocator.columns import Int32s
from allocator.geometry import StageGeometry
from daemon.rank.arena import ArenaBytes
from daemon.rank.device import Device
from daemon.rank.errors import StepRefused
from daemon.rank.paged_attention import LayerViews, PagedAttention
from daemon.rank.runner import Launched, Outcome
from daemon.rank.triton_ops import TritonArena, TritonAttention
from ipc.messages import RowLogprobs
from kernels.sampling import sample

POLL_S = 0.0002


class CudaDevice:
    """Orders the two streams by events."""

    def __init__(self) -> None:
        self.forward = torch.cuda.Stream()
        self.schedule = torch.cuda.Stream()
        self._events: dict[int, torch.cuda.Event] = {}
        self._newest = 0

    def wait_forward(self, seq: int) -> None:
        """Following schedule work waits for forward `seq` on the GPU; a retired forward needs no wait."""
        if seq > self._newest:
            raise StepRefused(f"wait for forward {seq}, but the newest launched one is {self._newest}")
        event = self._events.get(seq)
        if event is not None:
            self.schedule.wait_event(event)

    def schedule_done(self) -> None:
        """The next forward waits for all schedule work issued so far."""
        self.forward.wait_event(self.schedule.record_event())

    def record_forward(self, seq: int) -> None:
        """Keep an event at the end of forward `seq`."""
        if seq <= self._newest:
            raise StepRefused(f"forward {seq} recorded after forward {self._newest}")
        self._events[seq] = self.forward.record_event()
        self._newest = seq

    def retire_through(self, seq: int) -> None:
        """Drop the events of forwards that were processed: their work is over."""
        for done in [one for one in self._events if one <= seq]:
            del self._events[done]


class CudaArena:
    """Unit operations on the schedule stream."""

    def __init__(self, stage: StageGeometry, data: Tensor, stream: torch.cuda.Stream) -> None:
        self._units = TritonArena(stage, data)
        self._stream = stream

    def zero(self, band: int, units: Int32s) -> None:
        """Zero whole units of a band."""
        with torch.cuda.stream(self._stream):
            self._units.zero(band, units)

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Copy units pair by pair."""
        with torch.cuda.stream(self._stream):
            self._units.copy(band, sources, targets)


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
    """One CUDA GPU, the current one."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._streams = CudaDevice()
        self.device: Device = self._streams

    def free_bytes(self) -> int:
        """Free memory of the GPU."""
        return int(torch.cuda.mem_get_info()[0])

    def allocate(self, stage: StageGeometry) -> tuple[ArenaBytes, Tensor]:
        """A zeroed arena on the GPU, before either stream uses it."""
        data = torch.zeros(stage.arena_bytes, dtype=torch.uint8, device=self.torch_device)
        torch.cuda.synchronize()
        return CudaArena(stage, data, self._streams.schedule), data

    def attention(self, views: list[LayerViews]) -> PagedAttention:
        """Triton kernels."""
        return TritonAttention(views)

    def draw(self, scaled: Tensor, keys: Tensor) -> Tensor:
        """By the sampling kernel, with the logits scaled already."""
        return sample(scaled, torch.ones_like(scaled[:, 0]), keys)

    def forward_scope(self) -> contextlib.AbstractContextManager[object]:
        """Work goes to the forward stream."""
        return torch.cuda.stream(self._streams.forward)

    def launched(self, tokens: Tensor, logprobs: list[RowLogprobs]) -> Launched:
        """Copy the tokens out behind the forward."""
        return CudaLaunched(tokens, logprobs)
