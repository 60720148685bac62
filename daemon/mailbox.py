"""Mailbox items: what the daemon's actors send each other besides the core's own inputs.

Owns the plain values and the mailbox bounds. Must never hold behaviour. A mailbox is a bounded trio memory channel; a
full one makes its sender wait, except where the item is a hint (`compaction`), which may be dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from daemon.core.account import Account
from daemon.core.inputs import Input, Reported
from daemon.core.outputs import Outputs, Reply
from journal.records import Digested

INPUTS_MAX = 4096  # the engine's mailbox: inputs waiting for the core
REPORTS_MAX = 256  # rank reports waiting to be collated
OBSERVED_MAX = 1024  # iterations waiting for metrics and logs
HINTS_MAX = 16  # hints waiting for the compaction worker
ITERATION_INPUTS_MAX = 16  # most inputs that one engine iteration takes: between two, steps go to ranks


@dataclass(slots=True)
class Collated:
    """One step is complete over its ranks: their digests, to be journaled first, and the input made of them.

    `bands` has, per stage and band in chain order, live, hole, pending and beyond units; `forward_us` is the slowest
    rank's; `snapshots` has, by stage, its packed state where the step asked for it.
    """

    digests: list[Digested]
    reported: Reported
    bands: list[list[tuple[int, int, int, int]]] = field(default_factory=list)
    forward_us: int = 0
    snapshots: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Iteration:
    """One engine iteration as metrics and logs see it: inputs and their outputs, pairwise, after they were written.

    `sequence` is the newest record then, `account` what the core counted behind the last of the inputs.
    """

    now_ns: int
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Outputs] = field(default_factory=list)
    collated: list[Collated] = field(default_factory=list)
    sequence: int = 0
    core_ns: int = 0
    flush_ns: int = 0
    account: Account | None = None

    def replies(self) -> Iterator[Reply]:
        """Every reply of the iteration, in order."""
        for outputs in self.outputs:
            yield from outputs.replies


@dataclass(slots=True)
class StepSent:
    """Hint: step `seq` is with the ranks and the report of an earlier one is still due."""

    seq: int


@dataclass(slots=True)
class BecameIdle:
    """Hint: every step was reported and there is nothing to schedule."""

    seq: int


@dataclass(slots=True)
class BandCounts:
    """Hint: the counts of every band of every stage after step `seq`, each as in `Collated.bands`."""

    seq: int
    bands: list[tuple[int, int, int, int]]
