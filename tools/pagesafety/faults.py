"""What a run can find, by name: the closed set of checks, and which of them an exception belongs to.

Owns `CHECKS`. Must never hide an error: what is not known by name is reported as `error` with its text.
"""

from __future__ import annotations

from typing import NamedTuple

from allocator.errors import InvariantBroken
from daemon.rank.errors import StepRefused
from daemon.rank.modeled_order import DeviceFault

CHECKS: dict[str, str] = {
    "lost_write": "every live virtual unit holds what its last writer wrote; transfers read what they were handed",
    "unordered_overlap": "no two unordered actors touch the same bytes when one of them writes",
    "rank_divergence": "every rank of a stage returns the same effects, digests and fixed extents",
    "cross_dtype_bytes": "state bytes never reach an attention page that a forward reads; sinks stay zero",
    "ledger_leak": "at quiescence nothing is on record, and free equals boot",
    "unrealizable": "what the logical chain accepted is realized",
    "refusal_changed": "a refused demand leaves the logical and every layout digest unchanged",
    "trespass": "what no scheduler may ask for is refused with nothing changed",
    "table": "the effects build the id table that the chain answers from; live units are counted alike",
    "stuck_wait": "nothing waits for work that was never issued, or that may never end",
    "outside_chain": "effects touch only bytes of the chain",
    "invariant": "no invariant of the allocator is broken, other than the above",
    "error": "nothing else is raised",
}


class StressFault(AssertionError):
    """Something that a check saw; `check` is one of `CHECKS`."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        assert check in CHECKS, check
        self.check = check
        self.text = text


class Fault(NamedTuple):
    """What a run found, and at which operation of the program (its length: while it ended)."""

    check: str
    text: str
    at: int


def fault_of(error: Exception, at: int) -> Fault:
    """The fault that an exception stands for."""
    if isinstance(error, StressFault | DeviceFault):
        return Fault(error.check, error.text, at)
    if isinstance(error, InvariantBroken):
        check = {"chain.realizable": "unrealizable", "chain.idle": "ledger_leak"}.get(error.name, "invariant")
        return Fault(check, str(error), at)
    if isinstance(error, StepRefused):
        return Fault("outside_chain", str(error), at)
    return Fault("error", f"{type(error).__name__}: {error}", at)
