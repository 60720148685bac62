"""Closed sets of the reasons the core gives: why a request was refused, why it ended, what was decided.

Owns the codes and the one sentence that explains each. Must never depend on another room. Every code here is raised
somewhere and shown by a test.
"""

from __future__ import annotations

from enum import StrEnum


class RefusalCode(StrEnum):
    """Why an arriving request was not accepted; nothing is held for a refused request."""

    EMPTY_PROMPT = "empty_prompt"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    PROMPT_TOO_LONG = "prompt_too_long"
    OUTPUT_TOO_LONG = "output_too_long"
    NEVER_FITS = "never_fits"
    BAD_PARAMETER = "bad_parameter"
    ID_CONFLICT = "id_conflict"
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    NOT_READY = "not_ready"
    DEADLINE = "deadline_unreachable"
    UNKNOWN_REQUEST = "unknown_request"


class EndReason(StrEnum):
    """Why an accepted request ended: exactly one per choice, in the journal, in the log and to the client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    UNSCHEDULABLE = "unschedulable"
    MEMORY = "memory"
    FAULT = "fault"
    DRAINED = "drained"


class Verdict(StrEnum):
    """What a `Decided` record says happened to a request (or, with request 0, to the whole core)."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    ADMITTED = "admitted"
    WAITS = "waits"
    SHRUNK = "shrunk"
    PARKED = "parked"
    UNPARKED = "unparked"
    RETRACTED = "retracted"
    ENDED = "ended"
    STALLED = "stalled"
    DRAINING = "draining"
    IDLE = "idle"
    FLUSHED = "flushed"
    RELIEF = "relief"
    EVICTED = "evicted"
    UNPINNED = "unpinned"
    REQUEUED = "requeued"
    RECOVERED = "recovered"
    RESUMED = "resumed"


LOSES_ROW = frozenset({Verdict.RETRACTED, Verdict.REQUEUED, Verdict.RESUMED})
"""Behind these a request holds nothing and is in the queue, where it may have been already."""

WAITS_AGAIN = LOSES_ROW | {Verdict.RECOVERED}
"""The same, and the first decision about a request that a life took over from the one before."""


END_TEXT: dict[EndReason, str] = {
    EndReason.STOP: "a stop token, or a stop string that the front end found",
    EndReason.LENGTH: "the output reached its token limit or the model's length",
    EndReason.ABORT: "ended by the client, its front end or an operator",
    EndReason.DEADLINE: "its deadline passed",
    EndReason.UNSCHEDULABLE: "it can never fit the memory that is left",
    EndReason.MEMORY: "nothing else held memory and it still did not fit",
    EndReason.FAULT: "a rank or the daemon failed",
    EndReason.DRAINED: "the daemon was told to stop before it was done",
}
