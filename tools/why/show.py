"""Show: a story as lines for a terminal, and as plain values.

Owns the form. Must never leave an event out: passes in a row that say the same are one line, which says how many they
are and how their numbers went; a long stretch of waiting for this and that is one line with its sums; evictions in a
row are one line with their sum; `every_pass` gives each its own.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from tools.why.nouns import (
    CLOCK_FROM_NS,
    Numbers,
    amount,
    amounts,
    joined,
    milliseconds,
    short_of,
    units,
)
from tools.why.passes import passes_text, stretch_text, why_passed
from tools.why.story import Event, Noted, Passed, Story, Told
from tools.why.summary import as_plain, summary
from tools.why.waits import waiting
from tools.why.words import for_this, left_by, sentence

NS_PER_MS = 1_000_000
INDENT = 26
RUNS_MAX = 4  # runs of passes in a row that have a line each; more of them share one
WIDTH_MIN = 60


def lines(story: Story, every_pass: bool = False, width: int = 0) -> Iterator[str]:
    """The story: who it is, its summary, then one event or run of passes a line, wrapped at `width` (0: not).

    A line is seconds since it came, the number of the record, and the sentence.
    """
    yield from _wrapped(headline(story), width, 2)
    yield from _wrapped("  " + summary(story), width, 2)
    if story.known_from:
        yield f"  what happened to it up to record {story.known_from:,} was trimmed from the journal"
    for events in _lines(story, every_pass):
        yield from _line(story, events[0], line_text(story, events), width)
    if not story.ended:
        yield "  the journal ends here without its end: it still runs, or the daemon was cut off"


def headline(story: Story) -> str:
    """Who it is and what it asked for."""
    generate = story.arrived.generate
    who = f"request {story.request}" if story.request else "a request that was refused"
    most = "as many tokens as fit" if generate.max_tokens is None else f"at most {generate.max_tokens:,}"
    came_ns = story.arrived.now_ns
    came = [f"came {datetime.fromtimestamp(came_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"]
    extra = [f"choice {story.choice} of n = {generate.n}"] if generate.n > 1 else []
    extra += [f"priority {generate.priority}"] if generate.priority else []
    extra += [f"deadline {generate.deadline_ms:,} ms"] if generate.deadline_ms else []
    extra += [f"namespace {generate.namespace}"] if generate.namespace else []
    extra += came if came_ns >= CLOCK_FROM_NS else []
    asked = f"prompt of {units(len(generate.prompt) // 8, 'token')}, output {most}"
    return ", ".join([f"{who}: id {generate.id} of front end {story.arrived.frontend}", asked, *extra])


def evictions_text(story: Story, events: Sequence[Event]) -> str:
    """Evictions in a row: how often, for how long, and what they came to."""
    told = [event for event in events if isinstance(event, Told)]
    sums: dict[str, int] = {}
    for event in told:
        for name, count in event.decided.numbers.items():
            sums[name] = sums.get(name, 0) + count
    mine = sum(event.aside.took[0] for event in told)
    took_ns = told[-1].decided.now_ns - told[0].decided.now_ns
    total = sum(event.aside.took[1] for event in told)
    often = f"{len(told):,} steps within {milliseconds(took_ns)}" if took_ns else f"{len(told):,} steps"
    for_it = f", which took {amount(total, 'full')}, {for_this(mine, total)}" if total else ""
    whose: Counter[int] = Counter()
    for event in told:
        whose.update(dict(event.aside.left_by))
    by = left_by(list(whose.items()), story.request)
    return joined(f"the prefix cache evicted {amounts(sums)} to make room for {often}{for_it}", by)


def plain(story: Story) -> dict[str, Any]:
    """The story as plain values, every pass of it."""
    generate = story.arrived.generate
    return {
        "request": story.request,
        "id": generate.id,
        "frontend": story.arrived.frontend,
        "choice": story.choice,
        "arrived_ns": story.arrived.now_ns,
        "prompt_tokens": len(generate.prompt) // 8,
        "max_tokens": generate.max_tokens,
        "priority": generate.priority,
        "deadline_ms": generate.deadline_ms,
        "namespace": generate.namespace,
        "ended": story.ended,
        "known_from": story.known_from,
        "summary": as_plain(story),
        "events": [_plain_event(story, event) for event in story.events],
    }


def _plain_event(story: Story, event: Event) -> dict[str, Any]:
    if isinstance(event, Told):
        told, aside = event.decided, event.aside
        return {
            "sequence": event.sequence,
            "now_ns": told.now_ns,
            "verdict": str(told.verdict),
            "request": told.request,
            "reason": told.reason,
            "numbers": told.numbers,
            **_short(story, told.numbers),
            "by": told.by,
            "detail": aside.detail,
            "cause": aside.cause,
            "left_by": [{"request": number, "pages": pages} for number, pages in aside.left_by],
            "text": spoken(story, event),
        }
    if isinstance(event, Noted):
        return {
            "sequence": event.sequence,
            "now_ns": event.now_ns,
            "noted": event.what,
            "numbers": event.numbers,
            "text": event.text,
        }
    return {
        "sequence": event.sequence,
        "now_ns": event.now_ns,
        "pass": event.over.number,
        "step": event.step,
        "state": event.over.state.value,
        "reason": event.over.reason,
        "numbers": event.over.numbers,
        **_short(story, event.over.numbers),
        "running": event.running,
        "resident": event.resident,
        "blocker": {"reason": event.blocker[0], "numbers": event.blocker[1]},
        "text": "waits " + waiting(event.over.reason, event.over.numbers, story.bands),
    }


def _short(story: Story, numbers: Numbers) -> dict[str, Any]:
    """The names behind the numbers of what is short."""
    if "units_short" not in numbers:
        return {}
    return {"short": short_of(numbers, story.bands)}


def _lines(story: Story, every_pass: bool) -> Iterator[list[Event]]:
    """Events that share a line, in order."""
    replayed = any(isinstance(event, Passed) for event in story.events)
    told = [event for event in story.events if not replayed or not _is(event, Verdict.WAITS)]
    for waits, run in groupby(told, key=lambda event: not every_pass and _waits(event)):
        events = list(run)
        if not waits:
            yield from _alike(events, every_pass)
            continue
        passes: list[Event] = [event for event in events if isinstance(event, Passed)]
        runs = list(_alike(passes, every_pass))
        yield from runs if len(runs) <= RUNS_MAX else [passes]
        evictions: list[Event] = [event for event in events if not isinstance(event, Passed)]
        if evictions:
            yield evictions


def _waits(event: Event) -> bool:
    """Whether an event is one of waiting: a pass, or an eviction of what the request had left in the cache."""
    return isinstance(event, Passed) or (
        isinstance(event, Told) and _is(event, Verdict.EVICTED) and not event.aside.took[0]
    )


def _alike(events: Sequence[Event], every_pass: bool) -> Iterator[list[Event]]:
    """Events in a row that say the same."""
    for (form, _), run in groupby(events, key=lambda event: _same(event, every_pass)):
        alike = list(run)
        yield from [alike] if form else [[event] for event in alike]


def _same(event: Event, every_pass: bool) -> tuple[str, str]:
    """Events in a row with equal keys share a line; without a form each has its own."""
    if isinstance(event, Passed):
        return ("passed", str(event.over.number) if every_pass else why_passed(event))
    if isinstance(event, Told) and event.decided.verdict == Verdict.EVICTED and not every_pass:
        return ("evicted", event.decided.reason)
    return ("", "")


def _is(event: Event, verdict: Verdict) -> bool:
    return isinstance(event, Told) and event.decided.verdict == verdict


def line_text(story: Story, events: Sequence[Event]) -> str:
    """What a line says of the events that share it."""
    passes = [event for event in events if isinstance(event, Passed)]
    if passes and len({why_passed(one) for one in passes}) > 1:
        return stretch_text(story, passes)
    if passes:
        return passes_text(story, passes)
    return evictions_text(story, events) if len(events) > 1 else spoken(story, events[0])


def spoken(story: Story, event: Event) -> str:
    """The sentence, with the request's number where it is about another one."""
    if isinstance(event, Noted):
        return event.text
    assert isinstance(event, Told), "a pass is spoken of with its neighbours"
    told: Decided = event.decided
    other = told.request and told.request != story.request and told.verdict != Verdict.ACCEPTED
    about = f"request {told.request} was " if other and told.verdict == Verdict.RETRACTED else ""
    about = f"request {told.request}: " if other and not about else about
    return about + sentence(told, story.bands, event.aside)


def _line(story: Story, event: Event, text: str, width: int) -> Iterator[str]:
    now_ns = event.decided.now_ns if isinstance(event, Told) else event.now_ns
    seconds = (now_ns - story.arrived.now_ns) // NS_PER_MS / 1000  # cut off, as all durations are
    yield from _wrapped(f"  {seconds:>9.3f} s  #{event.sequence:<8}  {text}", width, INDENT)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """A line, broken at words where a terminal is narrower, as long as that leaves a column to read."""
    if width < WIDTH_MIN:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
