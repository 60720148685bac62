"""Words: one decision as a sentence with its numbers, for a reader who knows LLM serving and not this project.

Owns the table of sentences by verdict. Must never decide what belongs to a story. Invariant: every verdict of the core
has a row; a reason or number that no row knows is told as it stands. Only `row` and `generation`, which say nothing
without the ranks' logs, and `spill_units`, since there is no host tier to spill to, are left to the data (`--json`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from daemon.core.outputs import Decided
from daemon.core.reasons import EndReason, Verdict
from tools.why.ends import ENDS, Asks, refused_because
from tools.why.nouns import (
    SHORT,
    Bands,
    amount,
    amounts,
    band_name,
    is_band,
    joined,
    kind,
    listed,
    milliseconds,
    ordinal,
    rest,
    short,
    times,
    units,
)
from tools.why.waits import WAITS, is_are, waiting

__all__ = ["NOTHING", "SENTENCES", "WAITS", "Aside", "joined", "sentence", "short", "waiting"]


class Aside(NamedTuple):
    """What a story knows beside a decision, from the inputs and from replay; all of it may be missing.

    `detail`: what the client was told. `cause`: why what the decision follows from happened. `left_by`: who had left
    the full-attention pages that the cache gave up, by request, with the number of pages. `took`: the full-attention
    pages that this step took for the story's request `own`, and those for all. `asks`: what a refused one asked for.
    `had_tokens`: its prompt and output when it lost its memory.
    """

    detail: str = ""
    cause: str = ""
    left_by: tuple[tuple[int, int], ...] = ()
    took: tuple[int, int] = (0, 0)
    own: int = 0
    asks: Asks = Asks()
    had_tokens: int = 0


NOTHING = Aside()
LEFT_BY_MAX = 4  # requests that are named; the others are counted

Row = Callable[[Decided, Bands, Aside], str]


def _accepted(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    last = told.request + n.get("n", 1) - 1
    which = f"request {told.request}" if last == told.request else f"requests {told.request} to {last} (one per choice)"
    prompt = f"its prompt has {units(n['prompt_tokens'], 'token')}"
    return f"accepted as {which}: {prompt}, it may get {units(n['max_tokens'], 'output token')}"


def _refused(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    why = joined(*refused_because(told.reason, n, aside.asks, bands)) or rest(n)
    said = f'its client was told: "{aside.detail}"' if aside.detail else ""
    many = f"all its {n['n']} choices; " if n.get("n", 1) > 1 else ""
    return joined(f"refused ({told.reason}): {many}{why}", said)


# --- starts ----------------------------------------------------------------------------------------------------------


def _admitted(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    alone = ""
    if n.get("losses"):
        alone = (
            f"it runs alone, on trial: ranks (the processes that run the model) died {times(n['losses'])} in a row"
            " while it ran"
        )
    cached = n.get("cached_tokens", 0)
    left = n["tokens"] - cached
    if n["chunk_tokens"] == left:
        part = f"all {left:,}" if left > 1 else "its last token"
        first = f"this step computes {part}" + (" that are left" if left > 1 else "")
    else:
        first = f"this step computes {n['chunk_tokens']:,} of the {left:,} that are left"
    pages = f"into {units(n['chunk_pages'], 'new page')}" if n["chunk_pages"] else "into pages that it has"
    waited = milliseconds(n["waited_ms"] * 1_000_000)
    return joined(
        f"starts, {waited} after it came, on {units(n['tokens'], 'token')} (prompt and output so far)",
        hit(told, bands),
        f"{first}, {pages}",
        alone,
        rest(n, _ADMITTED),
    )


_ADMITTED = (
    *("row", "generation", "tokens", "chunk_tokens", "chunk_pages", "waited_ms", "losses", "cached_tokens"),
    *("matched_tokens", "queried_tokens", "left_tokens"),
)  # numbers that its sentence has, or leaves to the data


def hit(told: Decided, bands: Bands) -> str:
    """What an admission found in the prefix cache, and what ended it there."""
    n = told.numbers
    if "queried_tokens" not in n:
        return "the prefix cache is off"
    cached, asked = n["cached_tokens"], n["queried_tokens"]
    if n.get("left_tokens"):
        return (
            f"prefix-cache hit given up: its first {n['left_tokens']:,} tokens are cached, but holding them beside what"
            " it must compute does not fit the memory, so it starts cold, from its first token"
        )
    if not asked:
        if n["tokens"] == 1:
            return "the prefix cache was not asked, since the last token is always computed"
        return "the prefix cache was not asked, since log probabilities of its prompt are wanted: all of it is computed"
    last = " (the last token is always computed)"
    if told.reason == "full" and not cached:
        return f"no prefix-cache hit: nothing of its first {asked:,} tokens is cached"
    found = f"prefix-cache hit: {cached:,} of {asked:,} tokens"
    if not told.reason:
        return f"{found}{last}" if cached == asked else f"{found}, all that whole pages can have of them"
    return f"{found}; {cut_short(told.reason, cached, n['matched_tokens'])}"


def cut_short(cut: str, cached: int, known: int) -> str:
    """Which kind of memory ended a hit behind how many tokens, and how far full attention alone reaches."""
    head = f"the hit was cut short at token {cached:,}"
    if cut == "full":
        return f"{head}: the full-attention pages of what follows are not cached (never computed, or evicted)"
    reach = f"although full-attention pages are cached up to token {known:,}"
    if cut == "state":
        why = "no recurrent state is cached there to resume from"
        when = "never kept there, see --checkpoint-interval and --checkpoint-policy, or evicted"
    else:
        size = int(cut.partition(":")[2] or 0)
        why = f"the sliding-window layers lack the {size:,} tokens before that, which they read"
        when = "never kept there, or evicted"
    return f"{head} for want of {missing_kind(cut)}, {reach}: {why} ({when})"


def missing_kind(cut: str) -> str:
    """`recurrent state`: what a hit lacked."""
    if cut == "state":
        return "recurrent state"
    return f"pages{kind(cut)[1]}" if cut.startswith("window:") else f"{kind(cut)[0]}s{kind(cut)[1]}"


# --- memory ----------------------------------------------------------------------------------------------------------


def _retracted(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    by = f" for request {told.by}" if told.by else ""
    again = f"for the {ordinal(n['times'])} time" if n["times"] > 1 else ""
    lacks = short(n, bands)
    if told.reason == "priority":
        why = f", which has priority {n['priority']:,}" if "priority" in n and by else ""
        needs = f"it gives up its place in the batch and its memory{by}{why}"
    elif told.reason == "memory":
        others = f"so that request {told.by} can go on" if told.by else "so that the others can go on"
        needs = joined(
            f"it gives up its memory {others}",
            f"the next tokens of running requests lack {lacks}" if lacks else "",
        )
    else:
        needs = joined(f"it gives up its memory{by} ({told.reason})", lacks)
    head = " ".join(part for part in ("retracted (preempted)", again) if part)
    freed = amounts({"units_full": n["pages"], **n})
    gave = f"it gave back {freed}" if freed else "nothing came free at once"
    if n.get("unlocked_pages"):
        gave += f", and {units(n['unlocked_pages'], 'cached page')} may be evicted now that it reads them no longer"
    lost, stays = n.get("lost_tokens", n["tokens"]), n.get("cached_tokens", 0)
    work = f"its output is kept; of its {units(n['tokens'], 'computed token')} {stays:,}"
    work += f" {'stays' if stays == 1 else 'stay'} in the prefix cache until evicted, and {lost:,} must be computed"
    work += " again"
    extra = rest({name: number for name, number in n.items() if not is_band(name)}, _RETRACTED)
    return joined(f"{head}: {needs}", _chosen(told), gave, work, extra)


_RETRACTED = (
    *("pages", "unlocked_pages", "tokens", "cached_tokens", "lost_tokens", "times", "priority"),
    *("candidates", "protected", "redo_tokens", "own_priority", "next", "next_redo_tokens", "next_priority"),
    *SHORT,
)  # numbers that its sentence has


def _chosen(told: Decided) -> str:
    """Why it was this one and nobody else, where the decision has the numbers."""
    n = told.numbers
    if "candidates" not in n:
        return ""
    if told.reason == "priority":
        return (
            f"why this one: {units(n['candidates'], 'running request')} had a lower priority, this one"
            f" {n['own_priority']:,}; of those the lowest give way first, then those with the fewest tokens that are"
            f" not in the prefix cache yet (this one: {n['redo_tokens']:,}), and only as many as are needed"
        )
    spared = n.get("protected", 0)
    protected = (
        f"; {units(spared, 'other')} had been retracted so often that {'it is' if spared == 1 else 'they are'} spared"
        if spared
        else ""
    )
    if not n.get("next"):
        return f"why this one: no other running request could be chosen{protected}"
    other = f"next in line: request {n['next']}"
    if n["own_priority"] < n["next_priority"]:
        why = f"it has the lowest priority, {n['own_priority']:,} ({other} with {n['next_priority']:,})"
    elif n["redo_tokens"] < n["next_redo_tokens"]:
        why = f"of equal priority, it had the fewest tokens that were not in the prefix cache yet, {n['redo_tokens']:,}"
        why += f" ({other} with {n['next_redo_tokens']:,})"
    else:
        why = f"of equal priority and with as many tokens that were not in the prefix cache yet ({n['redo_tokens']:,}),"
        why += f" it came last ({other})"
    return f"why this one of {units(n['candidates'], 'running request')}: {why}{protected}"


def _parked(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    at = f" of {units(n['start'], 'computed token')}" if "start" in n else ""
    lacks = short(n, bands)
    why = f"its next tokens lack {lacks}" if lacks else told.reason
    return joined(f"parked: it stands still, keeps its memory{at}, and gets no tokens until memory comes free", why)


def _shrunk(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    wanted = units(n["wanted_tokens"], "token")
    return f"memory is short: this step computes only {n['tokens']:,} of the next {wanted} of its prompt"


def _relief(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    if told.request:
        asked = f"the next {units(n.get('tokens', 0), 'token')} of its prompt"
    else:
        asked = f"the next token of {units(n.get('rows', 0), 'running request')}"
    lacks = f": {short(n, bands)} {is_are(n['units_short'])} missing" if "units_short" in n else ""
    head = f"memory is short for {asked}{lacks}"
    ran = [part.partition(":")[0] for part in told.reason.split(" > ")]
    done = [RUNGS[name](n, bands) if name in RUNGS else name for name in ran if name != "spill"]
    return joined(head, "what was done, in this order: " + ", then ".join(done), rest(n, _RELIEF))


RUNGS: dict[str, Callable[..., str]] = {
    "reclaim": lambda n, b: (
        f"the prefix cache is to give all that nobody reads ({amount(n['reclaim_units'], band_name(n, b))})"
        if n.get("reclaim_units")
        else "the prefix cache has nothing to give"
    ),
    "throttle": lambda n, b: f"no new request starts for {units(n.get('throttle_steps', 0), 'step')}",
    "retract": lambda n, b: (
        f"{units(n['retract_requests'], 'running request')} retracted, which freed"
        f" {amount(n.get('retract_pages', 0), 'full')}"
        if n.get("retract_requests")
        else "no running request may be retracted"
    ),
    "shrink": lambda n, b: f"the part of the prompt was cut to {units(n.get('shrink_tokens', 0), 'token')}",
    "park": lambda n, b: "it is parked" if "tokens" in n else f"{units(n.get('park_requests', 0), 'request')} parked",
    "end": lambda n, b: "the request ends, because nobody else holds memory that could come back",
}
"""What each rung of the ladder did, by its name; `spill` is none: there is no host tier."""

_RELIEF = (
    *("rows", "pages", "tokens", "start", "reclaim_units", "spill_units", "throttle_steps", "retract_requests"),
    *("retract_pages", "shrink_tokens", "park_requests", "end_requests"),
    *SHORT,
)


def _evicted(told: Decided, bands: Bands, aside: Aside) -> str:
    gave = amounts(told.numbers) or "nothing"
    mine, total = aside.took
    if told.reason == "quota":
        why = "because their namespace held more than its quota of the cache"
    elif total:
        whose = for_this(mine, total)
        why = f"to make room for the step, which took {amount(total, 'full')}, {whose}"
    else:
        why = "to make room"
    return joined(f"the prefix cache evicted {gave} {why}", left_by(aside.left_by, aside.own))


def for_this(mine: int, total: int) -> str:
    """How many of the pages that were taken were for the story's request."""
    if total == 1:
        return "for this request" if mine else "for another request"
    return f"{'all' if mine == total else f'{mine:,}' if mine else 'none'} of them for this request"


def left_by(left: Sequence[tuple[int, int]], own: int = 0) -> str:
    """Who had computed what was evicted: request `own`, then those with most pages."""
    if not left:
        return ""
    left = sorted(left, key=lambda one: (one[0] != own, -one[1], one[0]))
    named = [
        f"{'this request itself' if number == own else f'request {number}'} ({units(pages, 'page')})"
        for number, pages in left[:LEFT_BY_MAX]
    ]
    more = len(left) - len(named)
    if more:
        pages = sum(count for _, count in left[LEFT_BY_MAX:])
        named.append(f"{units(more, 'other request')} ({units(pages, 'page')})")
    return f"the full-attention pages had been left there by {listed(named)}"


def _unpinned(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    asked = f"the {n['tokens']:,} tokens that it left in the prefix cache were to be kept there for {n['pin_ms']:,} ms"
    held = amounts(n, "pinned_units_") or "nothing yet"
    return f"{asked} and are not: all such pins together would pass --pinned-max; pinned now: {held}"


# --- ends, epochs and lives ------------------------------------------------------------------------------------------


def _ended(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    often = f", retracted {times(n['retractions'])}" if n["retractions"] else ""
    age = milliseconds(n["age_ms"] * 1_000_000)
    counts = f"{units(n['output_tokens'], 'output token')} delivered, {age} after it came{often}"
    return joined(f"ended ({told.reason}): {ended_because(told.reason, aside)}", counts)


def ended_because(reason: str, aside: Aside) -> str:
    """Why it ended: what the inputs say, else what its client was told, else the reason's own text."""
    text = ENDS[EndReason(reason)] if reason in set(EndReason) else reason
    if reason in (EndReason.ABORT, EndReason.STOP) and aside.cause:
        return aside.cause
    if reason == EndReason.LENGTH and aside.detail.endswith("output tokens"):
        return text  # their number is told anyway
    if aside.detail:
        return f'{text}; its client was told: "{aside.detail}"'
    return f"{text} ({aside.cause})" if aside.cause else text


def _requeued(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    kept = f"it keeps {units(n['output_tokens'], 'output token')}" if n["output_tokens"] else "it had no output"
    lost = min(n["tokens"], aside.had_tokens or n["tokens"])  # a token whose step was under way is not there
    again = f"{kept}, {units(lost, 'token')} must be computed again"
    if told.reason == "trial":
        return (
            f"waits again: it ran alone and got further, so it is not what killed the ranks, and the others are tried"
            f" before it goes on; {again}"
        )
    cause = f': "{aside.cause}"' if aside.cause else ""
    return (
        "lost its memory with the ranks (the processes that run the model) and waits again; epoch"
        f" {n['epoch']} ended{cause}; {again}"
    )


def _recovered(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    had = units(n["output_tokens"], "output token")
    often = f", retracted {times(n['retractions'])} so far" if n["retractions"] else ""
    return f"taken over from the journal by a new process of the daemon: it has {had}{often}, and waits again"


def _resumed(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    return (
        f"its client came back with {units(n['held_tokens'], 'output token')}; the journal had saved"
        f" {n['confirmed_tokens']:,} of them, and this process had gone on to {n['output_tokens']:,}: what the client"
        f" has seen counts, so the output goes on after its {n['held_tokens']:,}"
    )


def _stalled(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    tries = f" in {n['ticks']:,} tries in a row" if "ticks" in n else ""
    head = f"the scheduler could start nothing at all{tries}, while {units(n.get('live', 0), 'request')} waited or ran"
    return joined(head, f"last it found: {told.reason}", rest(n, ("live", "ticks")))


def _draining(told: Decided, bands: Bands, aside: Aside) -> str:
    live = units(told.numbers.get("live", 0), "request")
    orders = {
        "drain": f"the daemon was told to shut down: nothing new is accepted, {live} may finish",
        "drain_expired": f"the time for shutting down is over, and what is left ends now: {live}",
        "stop": f"the daemon was told to stop at once, and everything ends now: {live}",
    }
    return orders.get(told.reason, joined(f"the daemon was told: {told.reason}", rest(told.numbers)))


def _flushed(told: Decided, bands: Bands, aside: Aside) -> str:
    n = told.numbers
    freed, kept = amounts(n, "freed_units_") or "nothing", amounts(n, "kept_units_")
    extra = rest(
        {name: number for name, number in n.items() if not name.startswith(("freed_units_", "kept_units_"))}, ()
    )
    return joined(
        f"an operator emptied the prefix cache: {freed} freed", f"{kept} stay, being read" if kept else "", extra
    )


def _idle(told: Decided, bands: Bands, aside: Aside) -> str:
    return joined("nothing is left to do", rest(told.numbers))


def _unparked(told: Decided, bands: Bands, aside: Aside) -> str:
    return f"goes on, no longer parked, with {units(told.numbers.get('tokens', 0), 'token')} in this step"


SENTENCES: dict[str, Row] = {
    Verdict.ACCEPTED: _accepted,
    Verdict.REFUSED: _refused,
    Verdict.ADMITTED: _admitted,
    Verdict.WAITS: lambda told, bands, aside: "waits " + waiting(told.reason, told.numbers, bands),
    Verdict.SHRUNK: _shrunk,
    Verdict.PARKED: _parked,
    Verdict.UNPARKED: _unparked,
    Verdict.RETRACTED: _retracted,
    Verdict.ENDED: _ended,
    Verdict.REQUEUED: _requeued,
    Verdict.RECOVERED: _recovered,
    Verdict.RESUMED: _resumed,
    Verdict.STALLED: _stalled,
    Verdict.DRAINING: _draining,
    Verdict.IDLE: _idle,
    Verdict.FLUSHED: _flushed,
    Verdict.RELIEF: _relief,
    Verdict.EVICTED: _evicted,
    Verdict.UNPINNED: _unpinned,
}


def sentence(told: Decided, bands: Bands, aside: Aside = NOTHING) -> str:
    """A decision as a sentence, about `it` where it is of one request; `aside` says what is known beside it."""
    row = SENTENCES.get(told.verdict)
    if row is not None:
        return row(told, bands, aside)
    return joined(f"{told.verdict}: {told.reason}" if told.reason else told.verdict, rest(told.numbers, ()))
