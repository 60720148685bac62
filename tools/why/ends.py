"""Ends: why a request was refused, and why an accepted one ended, in words with their numbers.

Owns the two tables by code. Must never decide anything. Invariant: every code of the core has a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from allocator.capacity import ID_SPACE
from allocator.geometry import Geometry
from daemon.core.reasons import EndReason, RefusalCode
from ipc.messages import Generate
from tools.why.nouns import LEAST_ROOM, Bands, Numbers, amount, band_name, listed, short, units

MORE_MEMORY = "what helps: fewer tokens, or more memory (--arena-bytes, --mem-fraction)"
ONLY_STAGE = "on pipeline stage 0 (the only one)"


class Asks(NamedTuple):
    """Tokens that a request has and wants; 0: not known, or as many as fit. `narrow`: as `narrow_stages` has it."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    narrow: tuple[int, ...] = ()


def asks_of(generate: Generate, narrow: tuple[int, ...]) -> Asks:
    """What a client sent, to ranks with such stages."""
    return Asks(len(generate.prompt) // 8, generate.max_tokens or 0, narrow)


def narrow_stages(geometry: Geometry) -> tuple[int, ...]:
    """The stages whose arena can hold the fewest full-attention pages, so that no other can number more."""
    found = []
    for number, stage in enumerate(geometry.stages):
        unit = stage.bands[-1].unit_bytes
        if unit and stage.arena_bytes // unit - -(-stage.chain_start_bytes // unit) <= geometry.virtual_pages:
            found.append(number)
    return tuple(found)


def refused_because(code: str, numbers: Numbers, asks: Asks, bands: Bands) -> list[str]:
    """Why a request was refused, and where memory lacks how much, as clauses; none that the numbers do not have."""
    row = REFUSALS.get(code)
    why = [row(numbers)] if row is not None else []
    if code == RefusalCode.NEVER_FITS:
        why = [_never_fits(numbers, asks)]
    if numbers.get("stage") == ID_SPACE:
        lacking = amount(numbers["units_short"], band_name(numbers, bands))
        named = f"on pipeline stage{'' if len(asks.narrow) == 1 else 's'} {listed(map(str, asks.narrow))}"
        where = ONLY_STAGE if len(bands) == 1 else named if asks.narrow else LEAST_ROOM
        return [*why, f"the empty arena is short of at least {lacking} {where}", MORE_MEMORY]
    lacking = short(numbers, bands, ONLY_STAGE)
    return [*why, f"the empty arena is short of {lacking}", MORE_MEMORY] if lacking else why


def _never_fits(n: Numbers, asks: Asks) -> str:
    """Which of the two it is that is too long shows where they differ."""
    value, limit = n["value"], n["limit"]
    of_prompt, of_output = value == asks.prompt_tokens, value == asks.output_tokens
    if of_prompt and not of_output:
        what = f"its prompt has {units(value, 'token')}, and the empty arena holds at most {limit:,}"
    elif of_output and not of_prompt:
        beside = f"beside its prompt of {units(asks.prompt_tokens, 'token')}"
        what = (
            f"it asks for {units(value, 'output token')}, and {beside} the empty arena has room for at most {limit:,}"
        )
    else:
        what = f"it asks for {units(value, 'token')}, and the empty arena holds at most {limit:,}"
    return f"it would not fit the memory even if it ran alone: {what}"


REFUSALS: dict[str, Callable[[Numbers], str]] = {
    RefusalCode.EMPTY_PROMPT: lambda n: "its prompt has no token",
    RefusalCode.TOKEN_OUT_OF_RANGE: lambda n: (
        f"it names token id {n['value']:,}, and the model's vocabulary ends at {n['limit']:,}"
    ),
    RefusalCode.PROMPT_TOO_LONG: lambda n: (
        f"its prompt has {units(n['value'], 'token')}, and the model's length allows {n['limit']:,}"
    ),
    RefusalCode.OUTPUT_TOO_LONG: lambda n: (
        f"it asks for {units(n['value'], 'output token')}, and after its prompt the model's length leaves"
        f" {n['limit']:,}"
    ),
    RefusalCode.NEVER_FITS: lambda n: _never_fits(n, Asks()),
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
    EndReason.FAULT: "ranks, the processes that run the model, or the daemon failed, and it could not go on",
    EndReason.DRAINED: "the daemon was shut down before it was done",
}
"""Why an accepted request ended."""

FAILED = frozenset({EndReason.DEADLINE, EndReason.UNSCHEDULABLE, EndReason.MEMORY, EndReason.FAULT, EndReason.DRAINED})
"""Ends that are nobody's wish: no answer was completed and no client took it back."""
