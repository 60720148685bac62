"""Errors: every way a request can fail towards its client, in the API's shape, decided by tables.

Owns `ApiError` and the tables that map the daemon's refusals and end reasons to HTTP status, error type and code.
Must never decide anything about a request beyond its answer. Invariant: every `RefusalCode` and every unsuccessful
`EndReason` has a row, so nothing unsuccessful can look like success.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from daemon.frontend.discreet import discreet
from ipc.messages import Finished, Refused

JSON_TYPE = "application/json"


@dataclass(eq=False)
class ApiError(Exception):
    """An answer in the API's error shape; `param` names the field at fault, `code` is machine-readable."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """The body as the API has it: `{"error": {message, type, param, code}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """The body encoded as JSON."""
        return msgspec.json.encode(self.document())


def bad_field(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field `param`; the message begins with its name."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


class Row(NamedTuple):
    """One row of a table: HTTP status, error type, error code."""

    status: int
    type: str
    code: str


INVALID, BUSY, DOWN, FAILED = "invalid_request_error", "rate_limit_error", "service_unavailable_error", "server_error"

# RefusalCode -> answer.
REFUSALS: dict[str, Row] = {
    "empty_prompt": Row(400, INVALID, "empty_prompt"),
    "token_out_of_range": Row(400, INVALID, "token_out_of_range"),
    "prompt_too_long": Row(400, INVALID, "context_length_exceeded"),
    "output_too_long": Row(400, INVALID, "context_length_exceeded"),
    "never_fits": Row(400, INVALID, "never_fits"),
    "bad_parameter": Row(400, INVALID, "invalid_value"),
    "id_conflict": Row(409, INVALID, "id_conflict"),
    "queue_full": Row(429, BUSY, "queue_full"),
    "draining": Row(503, DOWN, "draining"),
    "not_ready": Row(503, DOWN, "not_ready"),
    "deadline_unreachable": Row(400, INVALID, "deadline_unreachable"),
    "unknown_request": Row(503, DOWN, "unknown_request"),  # of a resume; the client has sent the request anew by then
}

# The daemon's field names where the API has another; `max_tokens` is spelled as the client spelled it.
REFUSED_FIELDS: dict[str, str] = {"stop_ids": "stop_token_ids", "pin_ms": "cache_pin_ms", "store": "cache_store"}

# Unsuccessful EndReason -> answer; "lost" is the front end's own: the daemon stopped answering.
ENDS: dict[str, Row] = {
    "abort": Row(500, FAILED, "request_aborted"),
    "deadline": Row(504, FAILED, "deadline_exceeded"),
    "unschedulable": Row(503, DOWN, "unschedulable"),
    "memory": Row(503, DOWN, "out_of_memory"),
    "fault": Row(500, FAILED, "engine_fault"),
    "drained": Row(503, DOWN, "drained"),
    "lost": Row(503, DOWN, "daemon_lost"),
}

SUCCESSES = ("stop", "length")


def refusal_error(refused: Refused, max_tokens_field: str) -> ApiError:
    """The answer to a refusal: numbers in the message, `Retry-After` where the daemon says when to come back."""
    row = REFUSALS.get(refused.code, Row(500, FAILED, refused.code))
    param: str | None = REFUSED_FIELDS.get(refused.field, refused.field) or None
    if param == "max_tokens":
        param = max_tokens_field
    message = discreet(refused.message) or refused.code
    if refused.limit and str(refused.limit) not in message:
        message += f" (limit {refused.limit}, got {refused.value})"
    return ApiError(row.status, message, row.type, param, row.code, retry_headers(row.status, refused.retry_after_ms))


def retry_headers(status: int, retry_after_ms: int) -> dict[str, str]:
    """`Retry-After` in whole seconds, at least one, for answers that invite another try."""
    if status not in (429, 503):
        return {}
    return {"Retry-After": str(max(1, math.ceil(retry_after_ms / 1000)))}


def end_error(finished: Finished) -> ApiError:
    """The answer to a request that was accepted and ended without success."""
    row = ENDS.get(finished.reason, Row(500, FAILED, finished.reason))
    message = f"The request ended with reason {finished.reason!r}"
    if finished.detail:
        message += f": {discreet(finished.detail)}"
    return ApiError(row.status, message, row.type, None, row.code, retry_headers(row.status, 0))


def lost_error(detail: str) -> ApiError:
    """The answer when the daemon stopped answering with this request open."""
    row = ENDS["lost"]
    return ApiError(
        row.status, f"The daemon stopped answering: {discreet(detail)}", row.type, None, row.code, retry_headers(503, 0)
    )
