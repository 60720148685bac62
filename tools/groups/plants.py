"""Planted divergences: one rank of a group does what no rank may, from a step on, and everything else is as it is.

Owns the faults. Must never touch more than the one rank. Each is what a real engine has done: a choice by local state
(another hole), a decision by what has happened to end already (a clock, an event, free memory).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from allocator.columns import Int32s
from allocator.physical.band import Band
from daemon.rank.step_worker import StepWorker
from tools.groups.exchange import Place
from tools.groups.rank import SimulatedRank

Plant = Callable[[StepWorker, int], None]


def other_hole(worker: StepWorker, seq: int) -> None:
    """From step `seq` on, a take that could have the lowest holes leaves the lowest one out."""
    for band in worker.chain._stored:
        _leave_lowest(worker, band, seq)


def _leave_lowest(worker: StepWorker, band: Band, seq: int) -> None:
    honest = band._take_holes

    def take(k: int, chosen: list[Int32s]) -> int:
        holes = band.units.holes
        if worker._seq < seq or holes.count <= k:
            return honest(k, chosen)
        picked = holes.peek_lowest(k + 1)[1:].copy()
        holes.remove(picked)
        chosen.append(picked)
        return k

    band._take_holes = take  # type: ignore[method-assign]


def by_the_clock(ended: Callable[[], int]) -> Plant:
    """From step `first` on, what pends behind a forward is taken as free once that has ended here: `ended()`, now."""

    def plant(worker: StepWorker, first: int) -> None:
        honest, newest = worker.chain.begin_step, 0

        def begin(seq: int, processed_through: int, released: Sequence[int] = ()) -> None:
            nonlocal newest
            newest = max(newest, processed_through, ended() if seq >= first else 0)
            honest(seq, newest, released)

        worker.chain.begin_step = begin  # type: ignore[method-assign]

    return plant


def ended_forwards(rank: SimulatedRank) -> Callable[[], int]:
    """The newest forward that has ended on a simulated rank's device."""
    device: Any = rank.runner.streamed

    def ended() -> int:
        return max((seq for seq, at in device._forward_at.items() if device._forward.done >= at), default=0)

    return ended


def planted(name: str, place: Place, seq: int) -> Callable[[SimulatedRank], None]:
    """A change that plants the divergence of that name in one rank, from step `seq` on."""

    def change(rank: SimulatedRank) -> None:
        if rank.place == place:
            PLANTS[name](rank)(rank.worker, seq)

    return change


PLANTS: dict[str, Callable[[SimulatedRank], Plant]] = {
    "hole": lambda rank: other_hole,
    "clock": lambda rank: by_the_clock(ended_forwards(rank)),
}
"""Name -> the fault for a rank."""
