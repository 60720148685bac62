"""Demand: what a request needs from each band, priced by one table of rules.

Owns `RULES`, one row per purpose for which a demand is asked, and the pure integer functions behind it. Must never read
what is free. Invariant: a request that is granted its `CEILING` demand from the start never needs a unit more, whatever
it does until its end.

How many tokens are stored: a request with p prompt and n output tokens writes p + n - 1 positions, because its last
sampled token is never an input. One step late (overlap) a forward may have been launched for a token after a stop that
was not foreseen: `surplus_tokens` prices it, up to the ceiling, past which no forward is launched.

A checkpoint slot is priced in full, so that no checkpoint waits for a free slot and the window held back to it is
bounded; only giving a checkpoint to the prefix tree takes another slot, and may fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from allocator.capacity import Demand
from allocator.geometry import BandGeometry


class Purpose(Enum):
    """Why a demand is asked."""

    CEILING = "the most it can ever hold: the memory clip of an arriving request"
    STEADY = "the most it holds while no chunk of it is prefilled: what running requests may still grow to"
    ADMIT = "admission in this pass"
    LOAD_BACK = "a prefix that returns from the host tier"
    DECODE_PREALLOC = "a decode node's room for a prompt that a peer computes, before it arrives"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one purpose prices a request.

    `output`: whether output tokens count, or only the prompt. `surplus`: whether a step launched too late counts.
    `transient`: whether a window holds this pass's chunk beside what it retains. `held`: whether what the request
    already holds is subtracted.
    """

    output: bool
    surplus: bool
    transient: bool
    held: bool


RULES: dict[Purpose, Rule] = {
    Purpose.CEILING: Rule(output=True, surplus=False, transient=True, held=False),
    Purpose.STEADY: Rule(output=True, surplus=False, transient=False, held=False),
    Purpose.ADMIT: Rule(output=True, surplus=True, transient=True, held=True),
    Purpose.LOAD_BACK: Rule(output=False, surplus=False, transient=False, held=True),
    Purpose.DECODE_PREALLOC: Rule(output=True, surplus=False, transient=False, held=True),
}


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """The sizes of one request, in tokens.

    `prompt_tokens` and `output_tokens` are what it will store: the prompt (for `LOAD_BACK` the tokens that return) and
    the output priced (for `CEILING` the most, for `ADMIT` the expected). `output_most` bounds the surplus (0: as
    `output_tokens`). `held` are the units it already has, per band. `chunk_tokens` is the most of its tokens one
    forward writes, `lag_tokens` how many positions window retirement is behind (`retirement_lag_tokens`).
    `checkpoint_interval` says how far the last checkpoint, which holds the window back, can lie behind; a request that
    has one owns its checkpoint slot from admission on, and so does one with `checkpoint_slot`.
    """

    prompt_tokens: int
    output_tokens: int
    output_most: int = 0
    held: Demand = ()
    surplus_tokens: int = 0
    chunk_tokens: int = 1
    lag_tokens: int = 0
    checkpoint_interval: int = 0
    checkpoint_slot: bool = False


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens from a page's start on."""
    assert tokens >= 0
    return -(-tokens // page_size)


def stored_tokens(prompt_tokens: int, output_tokens: int) -> int:
    """Positions that a request writes for this many prompt and output tokens."""
    assert prompt_tokens >= 1
    assert output_tokens >= 0
    return prompt_tokens + max(output_tokens - 1, 0)


def retirement_lag_tokens(steps_in_flight: int, chunk_tokens: int) -> int:
    """Positions that unprocessed forwards keep from retiring, beside the one that is launched now."""
    assert steps_in_flight >= 0
    return steps_in_flight * chunk_tokens


def window_pages(window_tokens: int, span_tokens: int, page_size: int) -> int:
    """The most pages that a window's tokens and `span_tokens` more can touch, however they lie on the page grid."""
    tokens = window_tokens - 1 + span_tokens
    assert tokens >= 1
    return (tokens + page_size - 2) // page_size + 1


def joint(demands: Sequence[Demand]) -> Demand:
    """One demand for several that must all be granted: a load beside what this pass has promised already."""
    assert demands
    return tuple(sum(units) for units in zip(*demands, strict=True))


def request_demand(bands: Sequence[BandGeometry], page_size: int, sizes: RequestSizes, purpose: Purpose) -> Demand:
    """Units that a request needs from each band, in chain order, for this purpose."""
    assert page_size >= 1
    assert sizes.chunk_tokens >= 1
    rule = RULES[purpose]
    output = sizes.output_tokens if rule.output else 0
    tokens = stored_tokens(sizes.prompt_tokens, output)
    if rule.surplus:
        most = stored_tokens(sizes.prompt_tokens, max(output, sizes.output_most))
        tokens = min(tokens + sizes.surplus_tokens, max(tokens, most))
    pages = pages_for(tokens, page_size)
    units: list[int] = []
    for band in bands:
        if band.kind == "state":
            # In full, never shared or estimated: with a slot of its own the floor under the window always advances.
            units.append(2 if sizes.checkpoint_slot or sizes.checkpoint_interval else 1)
        elif band.kind == "window":
            span = sizes.checkpoint_interval + (sizes.chunk_tokens + sizes.lag_tokens if rule.transient else 1)
            units.append(min(pages, window_pages(band.window_tokens, span, page_size)))
        else:
            units.append(pages)
    if rule.held and sizes.held:
        units = [max(0, unit - held) for unit, held in zip(units, sizes.held, strict=True)]
    assert min(units) >= 0
    return tuple(units)
