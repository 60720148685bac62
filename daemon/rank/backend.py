"""Backends: what differs between computing on a CPU and on a GPU, in one small interface.

Owns the host backend; the CUDA one is in `cuda`. Must never know a model. Invariant: everything that a launch enqueues
is ordered on the backend's forward stream, and what the executor enqueues on its schedule stream.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from allocator.columns import Bytes8s
from allocator.geometry import StageGeometry
from daemon.rank.compiled import choose_library
from daemon.rank.compiled_attention import CompiledAttention
from daemon.rank.device import Device, HostDevice
from daemon.rank.errors import BadOption
from daemon.rank.layout import SOLO, Layout, local_number, local_ranks
from daemon.rank.paged_attention import HostAttention, LayerViews, PagedAttention
from daemon.rank.runner import Launched, Outcome
from daemon.rank.sampler import Limits, choose_on_host
from daemon.rank.sizes import available_bytes
from daemon.rank.states import LayerStates, RecurrentStates
from ipc.messages import RowLogprobs
from kernels.host_library import HostLibrary

DEVICES = ("auto", "cpu", "cuda")


class Backend(Protocol):
    """A device that a torch runner computes on."""

    torch_device: torch.device
    library: HostLibrary | None
    kernels: str  # which kernels serve, in words

    def choose_kernels(self, asked: str, dtype: torch.dtype) -> None:
        """Before anything is opened: which kernels a host uses for this dtype; it may build them."""

    def free_bytes(self) -> int:
        """Memory that an arena could take now."""

    def sharing(self, layout: Layout) -> int:
        """How many ranks take their arenas from these free bytes, by what the environment says of this machine."""

    def open_device(self, stage: StageGeometry) -> tuple[Device, Tensor]:
        """A device with a zeroed arena, and that arena's bytes as a uint8 tensor."""

    def attention(self, views: Mapping[int, LayerViews]) -> PagedAttention:
        """Paged attention over these views."""

    def states(self, views: Mapping[int, LayerStates]) -> RecurrentStates:
        """Recurrent states over these views."""

    def draw(self, logits: Tensor, limits: Limits, keys: Tensor) -> Tensor:
        """Tokens int64[n] of `logits` float32[n, vocab], which may be changed, by limits and `keys` int32[n, 2]."""

    def forward_scope(self) -> contextlib.AbstractContextManager[object]:
        """Inside it, work goes to the forward stream."""

    def launched(self, tokens: Tensor, logprobs: list[RowLogprobs]) -> Launched:
        """The handle of a forward whose sampled tokens will be in `tokens` int64[k]."""


class HostLaunched(NamedTuple):
    """A forward on the CPU: done when the launch returned."""

    result: Outcome

    def due_in_s(self) -> float:
        """Nothing to wait for."""
        return 0

    def outcome(self) -> Outcome:
        """The sampled tokens."""
        return self.result


class HostBackend:
    """The CPU: work is done when a call returns."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.library: HostLibrary | None = None
        self.kernels = "torch"

    def choose_kernels(self, asked: str, dtype: torch.dtype) -> None:
        """By `compiled.choose_library`."""
        self.library, self.kernels = choose_library(asked, dtype)

    def free_bytes(self) -> int:
        """Host memory that is available now."""
        return available_bytes()

    def sharing(self, layout: Layout) -> int:
        """All ranks on this host."""
        return local_ranks(layout)

    def open_device(self, stage: StageGeometry) -> tuple[Device, Tensor]:
        """A device whose arena shares its bytes with the tensor."""
        data = host_bytes(stage.arena_bytes)
        return HostDevice(stage, data), torch.from_numpy(data)

    def attention(self, views: Mapping[int, LayerViews]) -> PagedAttention:
        """By the compiled library where there is one, else vectorized torch."""
        return HostAttention(views) if self.library is None else CompiledAttention(self.library, views)

    def states(self, views: Mapping[int, LayerStates]) -> RecurrentStates:
        """Vectorized torch."""
        return RecurrentStates(views, self.torch_device)

    def draw(self, logits: Tensor, limits: Limits, keys: Tensor) -> Tensor:
        """By torch and numpy."""
        return choose_on_host(logits, limits, keys)

    def forward_scope(self) -> contextlib.AbstractContextManager[object]:
        """There is one stream only."""
        return contextlib.nullcontext()

    def launched(self, tokens: Tensor, logprobs: list[RowLogprobs]) -> Launched:
        """Done already."""
        return HostLaunched(Outcome(tokens.numpy(), logprobs))


def host_bytes(size_bytes: int) -> Bytes8s:
    """Zeroed uint8[size_bytes] of the system's own pages, in huge ones where it has them, taken when first touched.

    Nothing is touched at boot, which would take as long as writing the whole arena; huge pages need fewer touches.
    """
    region = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, dtype=np.uint8)


def open_backend(asked: str, layout: Layout = SOLO) -> Backend:
    """The backend that `asked` names, for a rank of a layout; `auto` is a GPU where there is one. Raises BadOption."""
    if asked not in DEVICES:
        raise BadOption(f"device={asked!r} is not one of {', '.join(DEVICES)}")
    if asked == "cuda" and not torch.cuda.is_available():
        raise BadOption("device=cuda, but this torch finds no CUDA GPU")
    if asked == "cpu" or not torch.cuda.is_available():
        return HostBackend()
    from daemon.rank.cuda import CudaBackend

    return CudaBackend(local_number(layout))
