"""Show: a story as lines for a terminal, and as plain values.

Owns the form. Must never leave an event out: passes in a row that say the same are one line, which says how many they
are and how their numbers went; `every_pass` gives each its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from tools.why.story import Passed, Story, Told
from tools.why.words import Numbers, band_name, joined, place, sentence, waiting

NS_PER_S = 1_000_000_000


def lines(story: Story, every_pass: bool = False) -> Iterator[str]:
    """The story, one event or run of passes a line: seconds since it came, the record, the sentence."""
    yield headline(story)
    told_by_pass = any(isinstance(event, Passed) for event in story.events)
    for (kind, _), run in groupby(story.events, key=lambda event: _same(event, every_pass)):
        events = list(run)
        if kind == "told":
            for event in events:
                assert isinstance(event, Told), "a run is of one kind"
                if event.decided.verdict != Verdict.WAITS or not told_by_pass:
                    yield _line(story, event.decided.now_ns, event.sequence, _spoken(story, event.decided))
            continue
        passes = [event for event in events if isinstance(event, Passed)]
        yield _line(story, passes[0].now_ns, passes[0].sequence, passes_text(story, passes))
    if not story.ended:
        yield "  the journal ends here without its end: it still runs, or the daemon was cut off"


def headline(story: Story) -> str:
    """Who it is and what it asked for."""
    generate = story.arrived.generate
    who = f"request {story.request}" if story.request else "a request that was refused"
    most = "as many as fit" if generate.max_tokens is None else f"{generate.max_tokens:,}"
    extra = [f"choice {story.choice} of {generate.n}"] if generate.n > 1 else []
    extra += [f"priority {generate.priority}"] if generate.priority else []
    extra += [f"deadline {generate.deadline_ms:,} ms"] if generate.deadline_ms else []
    extra += [f"namespace {generate.namespace}"] if generate.namespace else []
    asked = f"{len(generate.prompt) // 8:,} prompt tokens, output {most}"
    return ", ".join([f"{who}: id {generate.id} of front end {story.arrived.frontend}", asked, *extra])


def passes_text(story: Story, passes: list[Passed]) -> str:
    """Passes in a row for one reason: which, how long, why, and the numbers of the first and last where they differ."""
    first, last = passes[0].over, passes[-1].over
    which = f"pass {first.number}" if len(passes) == 1 else f"passes {first.number} to {last.number} ({len(passes):,})"
    took_ns = passes[-1].now_ns - passes[0].now_ns
    took = f" over {took_ns / 1e6:,.0f} ms" if took_ns else ""
    moved = [
        f"{name} {first.numbers[name]:,} -> {number:,}"
        for name, number in last.numbers.items()
        if first.numbers.get(name, number) != number and name not in ("stage", "band")
    ]
    what = waiting(last.reason, last.numbers, story.bands)
    return joined(f"{which}{took}: {last.state.value.replace('_', ' ')}: {what}", ", ".join(moved))


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
        "events": [_plain_event(story, event) for event in story.events],
    }


def _plain_event(story: Story, event: Told | Passed) -> dict[str, Any]:
    if isinstance(event, Told):
        told = event.decided
        return {
            "sequence": event.sequence,
            "now_ns": told.now_ns,
            "verdict": str(told.verdict),
            "request": told.request,
            "reason": told.reason,
            "numbers": told.numbers,
            **_short(story, told.numbers),
            "by": told.by,
            "text": _spoken(story, told),
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
        "text": waiting(event.over.reason, event.over.numbers, story.bands),
    }


def _short(story: Story, numbers: Numbers) -> dict[str, Any]:
    """The names behind the numbers of what is short."""
    if "units_short" not in numbers:
        return {}
    return {"short": {"band": band_name(numbers, story.bands), "where": place(numbers)}}


def _same(event: Told | Passed, every_pass: bool) -> tuple[str, str]:
    """Events in a row with equal keys share a line."""
    if isinstance(event, Told):
        return ("told", "")
    return ("passed", str(event.over.number) if every_pass else f"{event.over.state} {event.over.reason}")


def _spoken(story: Story, told: Decided) -> str:
    """The sentence, with the request's number where it is about another one."""
    about = f"request {told.request}: " if told.request and told.request != story.request else ""
    if told.verdict == Verdict.ACCEPTED:
        about = ""
    return about + sentence(told, story.bands)


def _line(story: Story, now_ns: int, sequence: int, text: str) -> str:
    seconds = (now_ns - story.arrived.now_ns) / NS_PER_S
    return f"  {seconds:>9.3f} s  #{sequence:<8} {text}"
