"""Passes: how often the scheduler passed a request over, for what, and how that went, in one line.

Owns the text of passes in a row. Must never leave out why. Invariant: the parts of a stretch add up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from tools.why.nouns import Bands, joined, listed, milliseconds, times, units
from tools.why.story import Passed, Story
from tools.why.waits import BEHIND, for_what, waiting

MOVED = {
    "units": "what it takes",
    "units_short": "what is missing",
    "ahead": "those ahead of it",
    "steps": "steps left",
    "reclaim_units": "what the prefix cache can give",
    "limit": "the limit",
    "rows": "requests there",
    "requests": "parked requests",
    "suspects": "suspected requests",
    "prompt_tokens": "its tokens",
    "step": "the step",
}
"""Numbers of which a line says how they moved; the others name something, or are told by the climb that they are of."""
NAMED_MAX = 4  # requests that are named; the others are counted


def why_passed(passed: Passed) -> str:
    """Passes in a row with equal ones say the same."""
    return f"{passed.over.state} {passed.over.reason} {passed.blocker[0]}"


def waited_for(passed: Passed) -> str:
    """For what it waits, with what stands behind its turn."""
    return f"{BEHIND}{passed.blocker[0]}" if passed.blocker[0] else passed.over.reason


def passes_text(story: Story, passes: Sequence[Passed]) -> str:
    """Passes in a row for one reason: how many, how long, why, and the numbers of the first and last that differ."""
    first, last = passes[0].over, passes[-1].over
    took_ns = passes[-1].now_ns - passes[0].now_ns
    over = f" in {milliseconds(took_ns)}" if took_ns else ""
    who = "stands still, parked," if first.state.value.startswith("parked") else "waits"
    count = f" (passed over {times(len(passes))}{over})" if len(passes) > 1 else ""
    moved = [
        f"{MOVED[name]} went from {first.numbers[name]:,} to {number:,}"
        for name, number in last.numbers.items()
        if first.numbers.get(name, number) != number and name in MOVED
    ]
    what = waiting(last.reason, last.numbers, story.bands)
    return joined(f"{who} {what}{count}", ", ".join(moved), _others(passes, story.bands))


def _others(passes: Sequence[Passed], bands: Bands) -> str:
    """Who stood in its way: the long prompt that was computed in parts, and how many held memory."""
    blocked = passes[-1].blocker
    why = f"that one waits {waiting(*blocked, bands)}" if blocked[0] else ""
    ahead = list(dict.fromkeys(one.resident for one in passes if one.resident and one.over.reason == "resident"))
    named = [f"request {number}" for number in ahead[:NAMED_MAX]]
    named += [units(len(ahead) - NAMED_MAX, "other")] if len(ahead) > NAMED_MAX else []
    ran = sorted({passes[0].running, passes[-1].running})
    held = f"{' to '.join(f'{count:,}' for count in ran)} {'request' if ran == [1] else 'requests'} held memory"
    return joined(why, f"prefilled meanwhile: {listed(named)}" if named else "", held if ran[-1] else "")


def stretch_text(story: Story, passes: Sequence[Passed]) -> str:
    """Passes in a row for several reasons: how long for which, and the newest one in full."""
    spent: Counter[str] = Counter()
    for one, following in pairwise(passes):
        spent[waited_for(one)] += following.now_ns - one.now_ns
    first, last = passes[0], passes[-1]
    whole_ns = last.now_ns - first.now_ns
    parts = [f"{milliseconds(ns)} for {for_what(why)}" for why, ns in spent.most_common() if ns]
    head = f"waits {milliseconds(whole_ns)}, passed over {times(len(passes))}: {listed(parts)}"
    ahead = [one.over.numbers["ahead"] for one in passes if "ahead" in one.over.numbers]
    queue = f"{units(max(ahead), 'request')} ahead of it at most" if ahead else ""
    held = sorted(one.running for one in passes)
    holding = f"{held[0]:,} to {held[-1]:,} requests held memory" if held[0] != held[-1] else ""
    at_last = f"in the last pass it waits {waiting(last.over.reason, last.over.numbers, story.bands)}"
    return joined(head, queue, holding, at_last)
