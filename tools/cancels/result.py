"""The result of a round: one row of figures, and every problem as a sentence.

Owns what counts as a stall and as lost. Must never measure: it holds what clients saw and what the journal has against
the bounds. Invariant: a problem is in words whatever else the row says.

A stall is a pause between two tokens of one kept stream, from the first cancel until the quiet behind the last end,
longer than the bound: as its client saw it, or by the times of the steps in the journal. One that missed its turn has
stalled too, however fast the machine: then more than twice as many steps lie between its tokens as with nothing beside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tools.cancels import kept, trail
from tools.cancels.books import Books
from tools.cancels.pauses import Span, figures, pauses, steps_between
from tools.cancels.round import Seen
from tools.cancels.trail import Trail

SENT_WITHIN_S = 1.0
MS_IN_S, NS_IN_MS = 0.001, 1_000_000
TURNS_MAX = 2  # steps from one token to the next over those with nothing beside
SPANS = ("alone", "crowd", "cancels", "after")  # before the crowd, beside it, until its last end, and behind that
ENDED = "stop"  # how kept streams end


class Bounds(NamedTuple):
    """What must hold: the requests of a crowd, and the longest pause of a kept stream in milliseconds."""

    cancels: int
    stall_ms: float


def row_of(seen: Seen, books: Books | None, broken: Sequence[str], found: Trail, bounds: Bounds) -> dict[str, Any]:
    """A round's figures and problems. `books`: None where nobody is answered (HTTP); `broken`: of its connections."""
    marks = seen.marks
    crowd = found.crowd(Span("round", marks["crowd"].ns, marks["after"].ns))
    first_ns = min((min(one.aborts_ns) for one in crowd if one.aborts_ns), default=0)
    last_ns = max((ns for one in crowd for ns, _ in one.ends), default=first_ns)
    ended = sum([reason for _, reason in one.ends] == ["abort"] for one in crowd)
    differ = kept.differences(seen.kept, seen.again)
    row: dict[str, Any] = {
        "round": seen.number,
        "accepted": seen.accepted,
        "cancels": bounds.cancels,
        "sending_s": round(marks["sent"].s - marks["cancels"].s, 3),
        "answered": books.answered if books else None,
        "answered_s": round(max(books.last_end_s - marks["cancels"].s, 0.0), 3) if books else None,
        "ended": ended,
        "ended_s": round((last_ns - first_ns) / 1e9, 3),
        "steps": found.steps(first_ns, last_ns),
        **{f"{name}_at_cancel": count for name, count in trail.states(crowd).items()},
        "kept": len(seen.kept),
        "kept_equal": len(seen.kept) - len(differ),
        "kept_tokens": sum(len(one.tokens) for one in seen.kept),
        "pauses": _pauses(seen, found),
    }
    row["longest_before_ms"], row["longest_ms"] = (_longest(row["pauses"], names) for names in (SPANS[:2], SPANS[2:]))
    row["problems"] = [
        *(books.problems() if books else []),
        *broken,
        *trail.problems(crowd, bounds.cancels),
        *kept.problems(seen.kept, ENDED),
        *kept.problems(seen.again, "length"),
        *differ,
        *_bounds(row, bounds),
    ]
    return row


def _pauses(seen: Seen, found: Trail) -> dict[str, Any]:
    """By span: pauses as clients saw them, as the journal has them, and steps from one token to the next.

    What ends behind all spans belongs to the last one.
    """
    streams = [one.arrivals_s for one in seen.kept]
    made = [one.tokens for one in found.kept(one.ask.id for one in seen.kept)]
    rows: dict[str, Any] = {}
    for name, until in pairwise([*SPANS, "over"]):
        begin, end = seen.marks[name], seen.marks[until]
        last = name == SPANS[-1]
        by_clients = Span(name, begin.s, math.inf if last else end.s)
        by_journal = Span(name, begin.ns, math.inf if last else end.ns)
        rows[name] = {
            "seconds": round(end.s - begin.s, 3),
            "steps": found.steps(begin.ns, end.ns),
            "seen_ms": figures(pauses(streams, by_clients), MS_IN_S),
            "made_ms": figures(pauses([[ns for ns, _ in one] for one in made], by_journal), NS_IN_MS),
            "steps_between": max(steps_between(made, by_journal), default=0),
        }
    return rows


def _longest(rows: dict[str, Any], names: Sequence[str]) -> float:
    return float(max(rows[name][by]["max"] for name in names for by in ("seen_ms", "made_ms")))


def _bounds(row: dict[str, Any], bounds: Bounds) -> list[str]:
    found = []
    if row["longest_ms"] > bounds.stall_ms:
        text = f"a kept stream paused for {row['longest_ms']:.0f} ms during or behind the cancels"
        found.append(f"{text}, for {row['longest_before_ms']:.0f} ms before; the bound is {bounds.stall_ms:g} ms")
    alone, crowd, *others = (row["pauses"][name]["steps_between"] for name in SPANS)
    if max(others) > TURNS_MAX * (alone or crowd):
        found.append(f"a kept stream waited {max(others)} steps for a token, before it waited {alone or crowd} at most")
    if row["sending_s"] > SENT_WITHIN_S:
        found.append(f"sending the cancels took {row['sending_s']:.2f} s, the bound is {SENT_WITHIN_S:g} s")
    return found
