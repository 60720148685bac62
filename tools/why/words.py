"""Words: one decision, or the passes that passed a request over, as a sentence with its numbers.

Owns the two tables of sentences. Must never decide what belongs to a story. Invariant: every verdict of the core has a
row; a reason or number that no row knows is told as it stands, so nothing that was recorded is left out in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from allocator.capacity import FROZEN, ID_SPACE
from daemon.core.outputs import Decided
from daemon.core.reasons import END_TEXT, EndReason, Verdict

Numbers = Mapping[str, int]
Bands = Sequence[Sequence[str]]
"""Names of bands by stage and place, of the epoch that is told of."""

PLACES = {ID_SPACE: "in the id space (all that an arena of this size can have are taken)", FROZEN: "on every stage"}
"""What stands for a stage where it is none."""


def units(count: int, what: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def short(numbers: Numbers, bands: Bands) -> str:
    """Where memory lacks how much; empty when the numbers do not say."""
    if "units_short" not in numbers:
        return ""
    return f"{units(numbers['units_short'], 'unit')} of band {band_name(numbers, bands)} short {place(numbers)}"


def band_name(numbers: Numbers, bands: Bands) -> str:
    """The band that is short; its number where no epoch said more. Every stage has the same bands."""
    band = numbers.get("band", 0)
    known = bool(bands) and 0 <= band < len(bands[0])
    return bands[0][band] if known else str(band)


def place(numbers: Numbers) -> str:
    """Where it is short, in words."""
    stage = numbers.get("stage", 0)
    return PLACES.get(stage, f"on stage {stage}")


def rest(numbers: Numbers, told: Sequence[str] = ("units_short", "stage", "band")) -> str:
    """Numbers that no sentence took, by name."""
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items() if name not in told)


def joined(*parts: str) -> str:
    """Parts of a sentence, without the empty ones."""
    return "; ".join(part for part in parts if part)


def _promised(numbers: Numbers) -> str:
    """What an admission asked for, beside where it is short."""
    asked = f"it and what is promised to others take {units(numbers['units'], 'unit')}" if "units" in numbers else ""
    return joined(asked, rest(numbers, ("units_short", "stage", "band", "units")))


def _ahead(requests: int) -> str:
    """Its place behind the pass, which may have started all that stood before it."""
    return (
        f"{units(requests, 'request')} ahead of it in the queue" if requests else "it is at the head of the queue now"
    )


# --- why a pass passed a request over --------------------------------------------------------------------------------

WAITS: dict[str, Callable[[Numbers, Bands], str]] = {
    "memory": lambda n, b: joined("memory: " + (short(n, b) or "it does not fit now"), _promised(n)),
    "protected": lambda n, b: joined(
        "retracted so often that it is protected, and all such requests must fit together", short(n, b)
    ),
    "budget": lambda n, b: f"the step's budget of {n.get('limit', 0):,} tokens was used up before it",
    "throttled": lambda n, b: f"admissions are throttled for {units(n.get('steps', 0), 'more step')} after a shortage",
    "rows": lambda n, b: f"all {units(n.get('limit', 0), 'row')} are taken",
    "ranks": lambda n, bands: "there are no ranks now: the next epoch has not begun",
    "microbatch": lambda n, bands: (
        f"the micro-batch of the step has {n['rows']:,} rows, its share of {n['limit']:,}; the next one may take it"
    ),
    "resident": lambda n, b: (
        f"another prompt is prefilled in parts, and its own {n.get('prompt_tokens', 0):,} tokens would be too"
    ),
    "trial": lambda n, b: (
        f"epochs died under {units(n.get('suspects', 0), 'request')}, each of which runs alone first"
        + (f", request {n['tried']} now" if n.get("tried") else "")
    ),
    "parked": lambda n, b: f"{units(n.get('requests', 0), 'request')} parked for want of memory; nobody is admitted",
    "sibling": lambda n, b: joined(
        "an earlier choice of its group is still prefilled, whose pages it can share", rest(n)
    ),
    "queue": lambda n, b: joined(
        f"not looked at: {_ahead(n.get('ahead', 0))}",
        f"the pass ended at request {n['stopped_at']}" if n.get("stopped_at") else "",
    ),
}
"""Reasons of `waits`, and `queue` for a request that the pass did not come to."""


def waiting(reason: str, numbers: Numbers, bands: Bands) -> str:
    """Why a request got no tokens."""
    row = WAITS.get(reason)
    return row(numbers, bands) if row is not None else joined(reason, short(numbers, bands), rest(numbers))


# --- decisions -------------------------------------------------------------------------------------------------------


def _accepted(told: Decided, bands: Bands) -> str:
    n = told.numbers
    last = told.request + n.get("n", 1) - 1
    which = f"request {told.request}" if last == told.request else f"requests {told.request} to {last}"
    return (
        f"accepted as {which}: {n['prompt_tokens']:,} prompt tokens, at most {units(n['max_tokens'], 'output token')}"
    )


def _admitted(told: Decided, bands: Bands) -> str:
    n = told.numbers
    found = ""
    if "queried_tokens" in n:
        found = f"{n['cached_tokens']:,} of {n['queried_tokens']:,} tokens looked up were cached"
        if told.reason:
            found += f" ({n['matched_tokens']:,} known; {told.reason} ended the hit)"
    pages = units(n["chunk_pages"], "page")
    first = f"first chunk {n['chunk_tokens']:,} of {units(n['tokens'], 'token')}, in {pages}"
    return joined(
        f"admitted to row {n['row']} (generation {n['generation']}), {n['waited_ms']:,} ms after it came", found, first
    )


_RETRACTED = (
    *("pages", "unlocked_pages", "tokens", "cached_tokens", "lost_tokens", "times"),
    *("units_short", "stage", "band"),
)  # numbers that its sentence has


def _retracted(told: Decided, bands: Bands) -> str:
    n = told.numbers
    freed = units(n["pages"], "page") + " freed"
    others = [f"{units(count, 'unit')} of {name.removeprefix('units_')}" for name, count in n.items() if _is_band(name)]
    freed = ", ".join([freed, *others])
    if n.get("unlocked_pages"):
        freed += f", {units(n['unlocked_pages'], 'cached page')} left without a reader"
    lost = n.get("lost_tokens", n["tokens"])
    work = f"of {n['tokens']:,} tokens {n.get('cached_tokens', 0):,} stay cached and {lost:,} are lost"
    by = f" for request {told.by}" if told.by else ""
    extra = rest(n, (*_RETRACTED, *(name for name in n if _is_band(name))))
    return joined(f"retracted{by} ({told.reason}), time {n['times']}: {freed}", work, short(n, bands), extra)


def _is_band(name: str) -> bool:
    return name.startswith("units_") and name != "units_short"


def _ended(told: Decided, bands: Bands) -> str:
    n = told.numbers
    text = END_TEXT[EndReason(told.reason)]
    counts = f"{n['output_tokens']:,} of its output tokens delivered, retracted {units(n['retractions'], 'time')}"
    return joined(f"ended: {told.reason} ({text})", counts, f"{n['age_ms']:,} ms after it came")


def _requeued(told: Decided, bands: Bands) -> str:
    n = told.numbers
    again = f"{n['tokens']:,} tokens to compute again, {n['output_tokens']:,} of output kept"
    if told.reason == "trial":
        return f"ran alone and got further, so it is no suspect, and waits until the others were tried; {again}"
    return f"waits again: epoch {n['epoch']} ended; {again}"


def _recovered(told: Decided, bands: Bands) -> str:
    n = told.numbers
    had = units(n["output_tokens"], "output token")
    return f"taken over from an earlier life with {had}, retracted {units(n['retractions'], 'time')}"


def _resumed(told: Decided, bands: Bands) -> str:
    n = told.numbers
    came = f"its client came back with {units(n['held_tokens'], 'output token')}"
    known = f"of which the journal has {n['confirmed_tokens']:,}"
    return f"{came}, {known}: it goes on behind them, not behind {n['output_tokens']:,}"


def _refused(told: Decided, bands: Bands) -> str:
    return joined(f"refused: {told.reason}", rest(told.numbers))


def _relief(told: Decided, bands: Bands) -> str:
    whose = "its chunk" if told.request else "decode rows"
    return joined(f"relief for {whose}: {told.reason}", short(told.numbers, bands), rest(told.numbers))


def _evicted(told: Decided, bands: Bands) -> str:
    gave = ", ".join(f"{units(n, 'unit')} of {name.removeprefix('units_')}" for name, n in told.numbers.items())
    why = ", beyond the quota of their namespace" if told.reason == "quota" else ""
    return f"the prefix cache gave up {gave}{why}"


def _unpinned(told: Decided, bands: Bands) -> str:
    n = told.numbers
    held = ", ".join(
        f"{units(n[name], 'unit')} of {name.removeprefix('pinned_units_')}" for name in n if name.startswith("pinned_")
    )
    asked = f"the {n['tokens']:,} tokens that it left in the cache were to be pinned for {n['pin_ms']:,} ms"
    return f"{asked} and are not: all pins together would pass --pinned-max; pinned are {held}"


def _plain(told: Decided, bands: Bands) -> str:
    return joined(f"{told.verdict}: {told.reason}" if told.reason else told.verdict, rest(told.numbers))


SENTENCES: dict[str, Callable[[Decided, Bands], str]] = {
    Verdict.ACCEPTED: _accepted,
    Verdict.REFUSED: _refused,
    Verdict.ADMITTED: _admitted,
    Verdict.WAITS: lambda told, bands: "waits: " + waiting(told.reason, told.numbers, bands),
    Verdict.SHRUNK: lambda told, bands: (
        f"chunk shrunk to {told.numbers['tokens']:,} of {told.numbers['wanted_tokens']:,} tokens ({told.reason})"
    ),
    Verdict.PARKED: lambda told, bands: joined(f"parked ({told.reason})", short(told.numbers, bands)),
    Verdict.UNPARKED: lambda told, bands: f"goes on with {units(told.numbers.get('tokens', 0), 'token')}",
    Verdict.RETRACTED: _retracted,
    Verdict.ENDED: _ended,
    Verdict.REQUEUED: _requeued,
    Verdict.RECOVERED: _recovered,
    Verdict.RESUMED: _resumed,
    Verdict.STALLED: lambda told, bands: joined(f"nothing could be scheduled: {told.reason}", rest(told.numbers)),
    Verdict.DRAINING: _plain,
    Verdict.IDLE: _plain,
    Verdict.FLUSHED: _plain,
    Verdict.RELIEF: _relief,
    Verdict.EVICTED: _evicted,
    Verdict.UNPINNED: _unpinned,
}


def sentence(told: Decided, bands: Bands) -> str:
    """A decision as a sentence."""
    row = SENTENCES.get(told.verdict)
    return row(told, bands) if row is not None else _plain(told, bands)
