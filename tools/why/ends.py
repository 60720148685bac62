"""Ends: why a request was refused, and why an accepted one ended, in words with their numbers.

Owns the two tables by code. Must never decide anything. Invariant: every code of the core has a row.
"""

from __future__ import annotations

from collections.abc import Callable

from daemon.core.reasons import EndReason, RefusalCode
from tools.why.nouns import Numbers, units

REFUSALS: dict[str, Callable[[Numbers], str]] = {
    RefusalCode.EMPTY_PROMPT: lambda n: "its prompt has no token",
    RefusalCode.TOKEN_OUT_OF_RANGE: lambda n: (
        f"it names token id {n['value']:,}, and the model's vocabulary ends at {n['limit']:,}"
    ),
    RefusalCode.PROMPT_TOO_LONG: lambda n: (
        f"its prompt has {units(n['value'], 'token')}, and the model's length allows {n['limit']:,}"
    ),
    RefusalCode.OUTPUT_TOO_LONG: lambda n: (
        f"it asks for {units(n['value'], 'output token')}, and behind its prompt the model's length leaves"
        f" {n['limit']:,}"
    ),
    RefusalCode.NEVER_FITS: lambda n: (
        f"it would not fit the memory even if it were alone there: it asks for {units(n['value'], 'token')}, and at"
        f" most {n['limit']:,} could be held"
    ),
    RefusalCode.BAD_PARAMETER: lambda n: (
        "a parameter is out of its range or means nothing here"
        + (f": it is {n['value']:,}, the limit is {n['limit']:,}" if n["limit"] or n["value"] else "")
    ),
    RefusalCode.ID_CONFLICT: lambda n: "another request with the same id and other content is live",
    RefusalCode.QUEUE_FULL: lambda n: (
        f"{units(n['value'], 'request')} would wait with it, and at most {n['limit']:,} may (--max-queued-requests)"
    ),
    RefusalCode.DRAINING: lambda n: "the daemon was shutting down and took nothing new",
    RefusalCode.NOT_READY: lambda n: "the daemon was not ready: its ranks were not up, or its journal took no writes",
    RefusalCode.DEADLINE: lambda n: (
        f"its deadline of {n['value']:,} ms could not be met: even served alone, at the fastest speed measured, it"
        f" would have taken {n['limit']:,} ms"
    ),
    RefusalCode.UNKNOWN_REQUEST: lambda n: (
        "no such request is known: it was never accepted, or its end was acknowledged"
    ),
}
"""By code; `value` is what it asked for and `limit` what there is, as the core gave them."""

ENDS: dict[EndReason, str] = {
    EndReason.STOP: "the output came to a stop token or stop string",
    EndReason.LENGTH: "the output reached its limit of tokens",
    EndReason.ABORT: "somebody outside ended it: its client, its front end or an operator",
    EndReason.DEADLINE: "its deadline passed, or could not be met any more",
    EndReason.UNSCHEDULABLE: "it can never fit the memory that is left",
    EndReason.MEMORY: "it held all the memory that was in use and still needed more",
    EndReason.FAULT: "ranks or the daemon failed, and it could not go on",
    EndReason.DRAINED: "the daemon was shut down before it was done",
}
"""Why an accepted request ended."""

FAILED = frozenset({EndReason.DEADLINE, EndReason.UNSCHEDULABLE, EndReason.MEMORY, EndReason.FAULT, EndReason.DRAINED})
"""Ends that are nobody's wish: no answer was completed and no client took it back."""
