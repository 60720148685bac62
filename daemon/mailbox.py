"""Mailbox items: what the daemon's actors send each other besides the core's own inputs.

Owns the plain values and the mailbox bounds. Must never hold behaviour. A mailbox is a bounded trio memory channel; a
full one makes its sender wait, except where the item is a hint (`compaction`), which may be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from daemon.core.inputs import Input, Reported
from daemon.core.outputs import Outputs, Reply, TokenColumns
from journal.records import Digested

INPUTS_MAX = 4096  # the engine's mailbox: inputs waiting for the core
DELIVERIES_MAX = 256  # iterations waiting for the gateway
REPORTS_MAX = 256  # rank reports waiting to be collated
OBSERVED_MAX = 1024  # iterations waiting for metrics and logs
HINTS_MAX = 16  # hints waiting for the compaction worker
ITERATION_INPUTS_MAX = 256  # most inputs that one engine iteration takes


@dataclass(slots=True)
class Delivery:
    """All that one engine iteration has for front ends; the journal is written through `sequence`."""

    sequence: int
    tokens: list[TokenColumns]
    replies: list[Reply]


@dataclass(slots=True)
class Durable:
    """The journal is on disk through `sequence`: acceptances up to it may leave."""

    sequence: int


@dataclass(slots=True)
class Collated:
    """One step is complete over its ranks: their digests, to be journaled first, and the input made of them."""

    digests: list[Digested]
    reported: Reported


@dataclass(slots=True)
class Iteration:
    """One engine iteration as metrics and logs see it, after it was written."""

    now_ns: int
    sequence: int
    inputs: list[Input]
    outputs: list[Outputs]
    core_ns: int
    flush_ns: int


@dataclass(slots=True)
class StepSent:
    """Hint: step `seq` is with the ranks and the report of an earlier one is still due."""

    seq: int


@dataclass(slots=True)
class BecameIdle:
    """Hint: nothing runs, nothing waits and every step was reported."""

    seq: int


@dataclass(slots=True)
class BandCounts:
    """Hint: per band, summed over ranks: live, hole, pending and beyond units after step `seq`."""

    seq: int
    counts: list[tuple[int, int, int, int]] = field(default_factory=list)
