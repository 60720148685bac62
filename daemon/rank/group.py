"""Group: the ranks of one epoch that compute together, and everything that passes between them within a forward.

Owns the interface of collectives and of transfers between stages; `torch.distributed` stands behind it in processes
(`process_group`), plain memory in tests. Must never decide anything: what passes here is tensors of one step, in the
order that every rank has from the step stream. Invariants: every tensor rank of a stage makes the same calls in the
same order; a peer that is gone or late is a GroupBroken within the timeout, never a wait without end.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from daemon.rank.layout import SOLO, Layout

__all__ = ["Group", "Layout", "SoloGroup"]


class Group(Protocol):
    """Collectives over the tensor ranks of a stage, and transfers to and from the same tensor rank of its neighbours.

    Each call raises GroupBroken when a peer is gone or the timeout passed. With one tensor rank collectives return what
    they are given. Tensors may be of any float or integer dtype and live on the rank's device.
    """

    layout: Layout

    def meet(self, what: str) -> None:
        """Wait until every rank of every stage has come to `what`, for as long as a boot may take; no collective."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the stage's tensor ranks, on each; `tensor` itself may be overwritten and returned."""

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The equal-sized parts of all tensor ranks along `dim`, in rank order, on each."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """What tensor rank 0 of the stage has, on each; shapes and dtypes are equal on all."""

    def send_next(self, tensor: Tensor) -> None:
        """Hand a tensor to the next stage; returns once it may be reused, not waiting for the receiver."""

    def expect_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Make ready for a tensor that `receive_previous` will ask for, behind those expected before.

        It may then arrive while this rank computes. Nothing need be expected.
        """

    def receive_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that the previous stage sent next."""

    def close(self) -> None:
        """Leave; harmless twice."""


class SoloGroup:
    """One rank on its own: nothing passes."""

    layout = SOLO

    def meet(self, what: str) -> None:
        """Everyone is here."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensor."""
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def send_next(self, tensor: Tensor) -> None:
        """There is no next stage."""
        raise AssertionError("the only stage has no next one")

    def expect_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """There is no previous stage."""
        raise AssertionError("the only stage has no previous one")

    def receive_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """There is no previous stage."""
        raise AssertionError("the only stage has no previous one")

    def close(self) -> None:
        """Nothing is open."""
