"""Ranks as threads of one process: a Group in plain memory, so that layouts are tried without processes.

Owns the meeting points of the threads, and how a runner is opened among them. Must never be used to serve. Invariants:
sums run in rank order, so every rank gets the same bits; a peer that raised, left or is late is a GroupBroken on all
others within the timeout.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from daemon.rank.errors import GroupBroken
from daemon.rank.group import Group
from daemon.rank.layout import Layout
from daemon.rank.runner import Runner
from daemon.rank.torch_runner import TorchRunner
from ipc.messages import RankSettings

MEET_TIMEOUT_S = 600.0
LOOK_S = 0.02  # how often a waiting receiver looks whether its peer has left
T = TypeVar("T")
Open = Callable[[RankSettings, Layout, Group], Runner]


class _Stage:
    """What the tensor ranks of one stage share: a place for each, and two barriers around reading them."""

    def __init__(self, ranks: int) -> None:
        self.places: list[Tensor | None] = [None] * ranks
        self.barrier = threading.Barrier(ranks)


class _World:
    """What all ranks share: the stages, a queue per tensor rank between neighbours, and whether somebody has left."""

    def __init__(self, stages: int, ranks: int) -> None:
        self.stages = [_Stage(ranks) for _ in range(stages)]
        self.queues = [[queue.Queue[Tensor]() for _ in range(ranks)] for _ in range(stages - 1)]
        self.everyone = threading.Barrier(stages * ranks)
        self.left: list[str] = []

    def leave(self, who: str) -> None:
        """Wake all that wait for `who`, and refuse all that will."""
        self.left.append(who)
        for barrier in [self.everyone, *(stage.barrier for stage in self.stages)]:
            barrier.abort()


class ThreadGroup:
    """`daemon.rank.group.Group` of one thread."""

    def __init__(self, layout: Layout, world: _World, timeout_s: float) -> None:
        self.layout = layout
        self.name = f"{layout.stage}.{layout.rank}"
        self._world = world
        self._stage = world.stages[layout.stage]
        self._timeout_s = timeout_s
        self._closed = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the stage, in rank order."""
        parts = self._exchange(tensor, "all_reduce")
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return self._read(total, "all_reduce")

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The parts along `dim`, in rank order."""
        return self._read(torch.cat(self._exchange(tensor, "all_gather"), dim), "all_gather")

    def broadcast(self, tensor: Tensor) -> Tensor:
        """What tensor rank 0 has."""
        return self._read(self._exchange(tensor, "broadcast")[0].clone(), "broadcast")

    def send_next(self, tensor: Tensor) -> None:
        """Put a copy in the queue to the next stage."""
        assert not self.layout.last, "the last stage has no next one"
        self._world.queues[self.layout.stage][self.layout.rank].put(tensor.clone())

    def expect_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """What is sent waits in the queue."""
        assert not self.layout.first, "the first stage has no previous one"

    def receive_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Take what the previous stage sent next."""
        assert not self.layout.first, "the first stage has no previous one"
        waiting = self._world.queues[self.layout.stage - 1][self.layout.rank]
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                tensor = waiting.get(timeout=LOOK_S)
                break
            except queue.Empty:
                if self._world.left or time.monotonic() >= until:
                    raise self._broken("receive_previous", self._timeout_s) from None
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise GroupBroken(
                f"rank {self.name}: the previous stage sent {tuple(tensor.shape)} {tensor.dtype}, "
                f"not {tuple(shape)} {dtype}"
            )
        return tensor

    def meet(self, what: str) -> None:
        """Wait for every rank of every stage."""
        self._wait(self._world.everyone, what, MEET_TIMEOUT_S)

    def close(self) -> None:
        """Leave; whoever waits for this rank gets GroupBroken."""
        if not self._closed:
            self._closed = True
            self._world.leave(self.name)

    def _exchange(self, tensor: Tensor, what: str) -> list[Tensor]:
        """The tensors of all ranks of the stage; nobody may change his before `_read`."""
        self._stage.places[self.layout.rank] = tensor
        self._wait(self._stage.barrier, what, self._timeout_s)
        parts = [place for place in self._stage.places if place is not None]
        first = parts[0]
        assert all(part.shape == first.shape and part.dtype == first.dtype for part in parts), (
            f"rank {self.name}: {what} of {[(tuple(part.shape), part.dtype) for part in parts]}"
        )
        return parts

    def _read(self, result: Tensor, what: str) -> Tensor:
        self._wait(self._stage.barrier, what, self._timeout_s)
        return result

    def _wait(self, barrier: threading.Barrier, what: str, timeout_s: float) -> None:
        try:
            barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise self._broken(what, timeout_s) from None

    def _broken(self, what: str, timeout_s: float) -> GroupBroken:
        gone = ", ".join(self._world.left)
        peers = f"rank {gone} has left" if gone else f"a peer did not take part within {timeout_s:g} s"
        return GroupBroken(f"rank {self.name}: {what}: {peers}")


def open_torch(settings: RankSettings, layout: Layout, group: Group) -> Runner:
    """A torch runner in a group of threads."""
    return TorchRunner(settings, layout, join=lambda *_: group)


def threaded(settings: RankSettings, stages: int, ranks: int) -> RankSettings:
    """The settings of so many stages and tensor ranks that are threads; layers as evenly split as can be, if unsaid."""
    layers = settings.stage_layers or ([0] * stages if stages > 1 else [])
    return msgspec.structs.replace(settings, stage_layers=layers, tensor_ranks=ranks, rendezvous="threads")


def thread_groups(stages: int = 1, ranks: int = 1, timeout_s: float = 60.0) -> list[ThreadGroup]:
    """A group for each of `stages` x `ranks` threads, stage by stage."""
    world = _World(stages, ranks)
    return [
        ThreadGroup(Layout(stage, stages, rank, ranks), world, timeout_s)
        for stage in range(stages)
        for rank in range(ranks)
    ]


def run_ranks(groups: list[ThreadGroup], work: Callable[[ThreadGroup], T]) -> list[T]:
    """`work` of every rank in a thread of its own, in the order of `groups`.

    A rank that raises leaves its group; what it raised is raised here, an error that is not a consequence first.
    """
    results: list[Any] = [None] * len(groups)
    errors: list[BaseException] = []

    def run(at: int, group: ThreadGroup) -> None:
        try:
            results[at] = work(group)
        except BaseException as error:
            errors.append(error)
            group.close()

    threads = [threading.Thread(target=run, args=(at, group), daemon=True) for at, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors.sort(key=lambda error: isinstance(error, GroupBroken))
    if errors:
        raise errors[0]
    return results
