"""Outputs: what one `feed` of the core asks the shell to do. The core performs none of it.

Owns the output values. Must never be mutated after `feed` returned it. Order within one `Outputs`: tokens go to front
ends before replies; decisions and the step are journaled before either leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from allocator.columns import Int32s, Int64s
from ipc.messages import Accepted, Continued, Finished, Refused, RequestLogprobs, Step


class Decided(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One decision with its numbers. `request` 0 concerns the whole core; `by` is another request or 0.

    `verdict` is a `Verdict`, `reason` a code of the verdict's own set or a short text, `numbers` what it was decided
    on.
    """

    now_ns: int
    verdict: str
    request: int
    reason: str
    numbers: dict[str, int] = {}
    by: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """A message to one front end, named by its index in `SchedulerCore.frontends`."""

    frontend: int
    message: Accepted | Refused | Finished | Continued


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """New output tokens of one step, one entry per request that gained one: front-end index, request number, token."""

    step: int
    frontends: Int32s
    requests: Int64s
    tokens: Int64s
    logprobs: list[RequestLogprobs]


@dataclass(slots=True)
class Outputs:
    """What one input led to. `wants_tick`: another `Ticked` now could make progress. `due_ns`: or at this time."""

    decisions: list[Decided] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    tokens: TokenColumns | None = None
    step: Step | None = None
    wants_tick: bool = False
    due_ns: int | None = None
