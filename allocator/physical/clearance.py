"""CLEARANCE: who must wait for what before touching a unit. The only rule; everything else asks it.

Owns the closed sets of consumers and hazards and the table between them. Must never be bypassed: code that is about to
let a consumer touch a unit looks up the pair of consumer and every hazard recorded on the unit. Invariant: the table is
total, and every cell can arise: the ledger keeps a record of each hazard until it is over.
"""

from __future__ import annotations

from enum import Enum


class Consumer(Enum):
    """Who is about to write a unit (or, for a move, to read its source and write its target)."""

    FORWARD = "the next forward"
    SCHEDULE_COPY = "a move or a state copy on the schedule stream"
    ZERO = "zeroing on hand-out, on the schedule stream"
    HOST_LOAD = "a load from the host tier, on its copy stream"
    NETWORK_RECEIVE = "a receive from a peer"


class Hazard(Enum):
    """A use of a unit that is not over."""

    FORWARD = "a forward that has not retired may read or write it"
    COPY_READ = "a host copy reads it"
    COPY_WRITE = "a host copy writes it"
    NETWORK = "a network transfer that has not been released touches it"
    FIXED = "it must stay where it is"


class Clear(Enum):
    """What the consumer must do about the hazard first."""

    NONE = "nothing: the consumer's own stream is ordered behind it"
    STREAM_WAIT = "a wait on the consumer's stream; the host goes on"
    HOST_WAIT = "the host waits until the transfer is released"
    AFTER_RETIRE = "it comes only after the forward has been processed"
    EXCLUDED = "the unit is not available to this consumer"


_COPIES_AND_MORE = {
    Hazard.COPY_READ: Clear.STREAM_WAIT,
    Hazard.COPY_WRITE: Clear.STREAM_WAIT,
    Hazard.NETWORK: Clear.HOST_WAIT,
    Hazard.FIXED: Clear.EXCLUDED,
}

CLEARANCE: dict[Consumer, dict[Hazard, Clear]] = {
    Consumer.FORWARD: {Hazard.FORWARD: Clear.NONE, **_COPIES_AND_MORE},
    Consumer.SCHEDULE_COPY: {Hazard.FORWARD: Clear.STREAM_WAIT, **_COPIES_AND_MORE},
    Consumer.ZERO: {Hazard.FORWARD: Clear.STREAM_WAIT, **_COPIES_AND_MORE},
    Consumer.HOST_LOAD: {Hazard.FORWARD: Clear.NONE, **_COPIES_AND_MORE},
    Consumer.NETWORK_RECEIVE: {Hazard.FORWARD: Clear.AFTER_RETIRE, **_COPIES_AND_MORE},
}


USES = (Hazard.COPY_READ, Hazard.COPY_WRITE, Hazard.NETWORK, Hazard.FIXED)
"""Hazards of uses: all but those of forwards."""

TO_READ = (Hazard.COPY_WRITE,)
"""What to look for on a unit that a host copy, a state copy or a transfer is about to read: who writes it."""


def to_write(consumer: Consumer) -> tuple[Hazard, ...]:
    """What to look for on a unit that a consumer is about to write."""
    return tuple(hazard for hazard in USES if CLEARANCE[consumer][hazard] is not Clear.NONE)


def to_move_from() -> tuple[Hazard, ...]:
    """What to look for on the source of a move: it is only read, and a host copy may read it besides."""
    return tuple(hazard for hazard in to_write(Consumer.SCHEDULE_COPY) if hazard is not Hazard.COPY_READ)
