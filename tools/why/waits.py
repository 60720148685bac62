"""Waits: why a scheduling pass gave a request no tokens, as a clause with its numbers.

Owns the table by reason. Must never decide what belongs to a story. Invariant: a reason that no row knows is told as it
stands, with all its numbers.
"""

from __future__ import annotations

from collections.abc import Callable

from tools.why.nouns import SHORT, Bands, Numbers, amount, band_name, joined, rest, short, units


def _memory(numbers: Numbers, bands: Bands) -> str:
    lacking = short(numbers, bands)
    if not lacking:
        return joined("for memory: the next step needs more than there is", rest(numbers))
    lacks = f"even with all of the prefix cache evicted that nobody reads, {lacking} {is_are(numbers['units_short'])}"
    lacks += " missing"
    extra = rest({name: number for name, number in numbers.items() if name not in _RELIEF}, (*SHORT, "units"))
    if "units" not in numbers:
        return joined(f"for memory: {lacks}", extra)
    price = amount(numbers["units"], band_name(numbers, bands))
    if numbers["units_short"] > numbers["units"]:
        lacks += ", since the other kinds of memory that they take need room too"
    asked = f"its prompt, its expected output and the expected growth of running requests take {price}"
    return joined(f"for memory: {asked}", lacks, extra)


_RELIEF = {
    *("rows", "pages", "tokens", "start", "reclaim_units", "spill_units", "throttle_steps", "retract_requests"),
    *("retract_pages", "shrink_tokens", "park_requests", "end_requests"),
}  # of the newest climb, which has its own sentence


def is_are(count: int) -> str:
    """The verb behind a count."""
    return "is" if count == 1 else "are"


def _queue(numbers: Numbers, bands: Bands) -> str:
    ahead = numbers.get("ahead", 0)
    where = f"{units(ahead, 'request')} ahead of it in the queue" if ahead else "nobody is ahead of it in the queue now"
    at = numbers.get("stopped_at", 0)
    return joined(f"for its turn: {where}", f"the scheduler came as far as request {at}" if at else "")


def _sibling(numbers: Numbers, bands: Bands) -> str:
    other = f"request {numbers['sibling']}" if numbers.get("sibling") else "an earlier one"
    return (
        f"for {other}, another choice of the same prompt (n > 1), which computes the prompt now; this one will start"
        " behind it and share its pages"
    )


def _trial(numbers: Numbers, bands: Bands) -> str:
    suspects, tried = numbers.get("suspects", 0), numbers.get("tried", 0)
    now = f"; request {tried} is on trial now" if tried else ""
    return (
        f"for trials: ranks died twice or more in a row while {units(suspects, 'suspected request')} ran, and each of"
        f" those runs alone first, to find the one that kills them{now}"
    )


WAITS: dict[str, Callable[[Numbers, Bands], str]] = {
    "memory": _memory,
    "protected": lambda n, b: joined(
        "for memory: it was retracted so often that it may not be retracted again, so it starts only when all such"
        " requests fit the memory together, each at its longest",
        f"for that {short(n, b)} {is_are(n['units_short'])} missing" if "units_short" in n else "",
    ),
    "budget": lambda n, b: (
        f"for the next step: requests before it used up this step's {n.get('limit', 0):,} tokens"
        " (--max-num-batched-tokens)"
    ),
    "throttled": lambda n, b: (
        "for memory: running requests just ran short of it, so no new request starts for"
        f" {units(n.get('steps', 0), 'more step')}"
    ),
    "rows": lambda n, b: (
        f"for a place in the batch: {n.get('limit', 0):,} of {n.get('limit', 0):,} are taken (--max-running-requests)"
    ),
    "ranks": lambda n, b: "for ranks (the processes that run the model): none is ready now",
    "microbatch": lambda n, b: (
        "for the next micro-batch (pipeline stages take turns): the one being formed has"
        f" {units(n.get('rows', 0), 'request')}, and its share is {n.get('limit', 0):,}"
    ),
    "resident": lambda n, b: (
        "for another request's chunked prefill: only one prompt at a time is computed in chunks, and its own"
        f" {units(n.get('prompt_tokens', 0), 'token')} need chunks too"
    ),
    "trial": _trial,
    "parked": lambda n, b: (
        f"for memory: {units(n.get('requests', 0), 'running request')} cannot go on for want of it (parked), and no new"
        " request starts before they do"
    ),
    "sibling": _sibling,
    "queue": _queue,
    "report": lambda n, b: f"for the result of step {n.get('step', 0):,}, which the ranks are computing",
}
"""Reasons of `waits`, and of what a live request is asked for."""

FOR: dict[str, str] = {
    "memory": "memory",
    "protected": "memory (it might not be retracted again)",
    "budget": "room in a step",
    "throttled": "memory (running requests had been short of it)",
    "rows": "a place in the batch",
    "ranks": "ranks that were not ready",
    "microbatch": "its micro-batch",
    "resident": "another request's chunked prefill",
    "trial": "trials of requests under which ranks died",
    "parked": "memory (running requests were parked)",
    "sibling": "another choice of its prompt",
    "queue": "its turn in the queue",
    "daemon": "the daemon, which was down",
    "step": "the next step to be formed",
}
"""What it waited for, in a few words, for sums of time; `daemon` and `step` are no pass's."""


BEHIND = "queue:"
"""Before a reason: its turn had not come, and the request at which the scheduler stopped waited for that."""


def for_what(reason: str) -> str:
    """What it waited for, in a few words."""
    if reason.startswith(BEHIND):
        return f"its turn behind a request that waited for {for_what(reason.removeprefix(BEHIND))}"
    return FOR.get(reason, reason)


def waiting(reason: str, numbers: Numbers, bands: Bands) -> str:
    """Why a request got no tokens: a clause behind `waits`."""
    row = WAITS.get(reason)
    return row(numbers, bands) if row is not None else joined(reason, short(numbers, bands), rest(numbers))
