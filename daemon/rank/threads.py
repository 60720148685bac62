"""How many threads torch computes with on a CPU: measured on the model's own shapes at boot, or fixed.

Owns the measurement. Must be called in the thread that runs the forwards: the count belongs to it. One core is left to
the daemon and the front ends: the threads of one product wait for each other, so one that shares its core with a busy
process holds up all of them (`bandmaster bench model --threads N` beside such a process shows it on a machine).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from daemon.rank.layout import Layout, local_ranks

ROUNDS = 5
BATCHES = (1, 16)
GAIN_MIN = 1.05  # more threads must be at least this much faster than fewer


def candidates(cores: int) -> list[int]:
    """Counts to try: powers of two below `cores - 1`, and that number, at least 1."""
    most = max(cores - 1, 1)
    counts = {1, most}
    power = 2
    while power < most:
        counts.add(power)
        power *= 2
    return sorted(counts)


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def share_cores(layout: Layout) -> int:
    """Threads of a rank that shares this machine with others; 0 for one that has it to itself: to be measured.

    Several would measure each other, and a layer's work waits for its tensor peers wherever they are. One core is left.
    """
    here = local_ranks(layout)
    return 0 if layout.ranks == 1 and here == 1 else max(1, (usable_cores() - 1) // here)


def choose_threads(fixed: int, work: Callable[[int], object]) -> tuple[int, dict[int, float]]:
    """Set torch's threads: `fixed` if given, else the measured best for `work(batch)`; returns it and ms per count."""
    if fixed:
        torch.set_num_threads(fixed)
        return fixed, {}
    found = {count: _measure(count, work, BATCHES) for count in candidates(usable_cores())}
    best = best_count(found)
    torch.set_num_threads(best)
    return best, found


def best_count(milliseconds: dict[int, float]) -> int:
    """The count to use: a higher one only where it gains GAIN_MIN over the best lower one."""
    best = min(milliseconds)
    for count in sorted(milliseconds):
        if milliseconds[count] * GAIN_MIN < milliseconds[best]:
            best = count
    return best


def _measure(count: int, work: Callable[[int], object], batches: Sequence[int]) -> float:
    """Sum over batches of the median time in ms."""
    torch.set_num_threads(count)
    total = 0.0
    for batch in batches:
        work(batch)
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            work(batch)
            times.append(time.perf_counter() - started)
        total += sorted(times)[ROUNDS // 2]
    return total * 1000
