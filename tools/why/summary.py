"""Summary: where the time of one request went, and its life in one paragraph.

Owns the sums. Must never tell what is not in the story. Invariant: the parts of the time add up to the whole, from its
arrival to its end or to the last event that is known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from daemon.core.reasons import WAITS_AGAIN, Verdict
from tools.why.nouns import listed, milliseconds, times, units
from tools.why.story import Event, Noted, Passed, Story, Told
from tools.why.waits import BEHIND, for_what
from tools.why.words import ended_because, missing_kind

WAITING = "waiting"
PREFILL = "prefill"
DECODE = "decode"
PARKED = "parked"
BACK = dict.fromkeys(WAITS_AGAIN, "") | {Verdict.REQUEUED: "ranks", Verdict.RECOVERED: "ranks"}
"""Decisions behind which a request waits again, and for what until a pass says more."""


@dataclass(slots=True)
class Times:
    """Nanoseconds: `parts` by what it did (waiting, prefill, decode, parked), `waited` by what it waited for.

    `first_token_ns` is from its arrival, 0 where there was none or no replay says.
    """

    whole_ns: int = 0
    parts: Counter[str] = field(default_factory=Counter)
    waited: Counter[str] = field(default_factory=Counter)
    first_token_ns: int = 0


class _Clock:
    """Adds the time between events to what the request did in it."""

    def __init__(self, now_ns: int, ready: bool, between: str) -> None:
        self.times = Times()
        self._began_ns = self._at_ns = now_ns
        self._doing, self._before_parked, self._why = WAITING, DECODE, between if ready else "ranks"
        self._between = between  # what it waits for until a pass or a decision says more

    def take(self, story: Story, event: Event) -> None:
        """The next event."""
        now_ns = event.decided.now_ns if isinstance(event, Told) else event.now_ns
        self._pass(now_ns)
        if isinstance(event, Passed):
            self._why = f"{BEHIND}{event.blocker[0]}" if event.blocker[0] else event.over.reason
        elif isinstance(event, Noted):
            self._noted(event)
        elif event.decided.request == story.request:
            self._decided(event)

    def _noted(self, event: Noted) -> None:
        if event.what == "first_token":
            self.times.first_token_ns = self.times.first_token_ns or event.now_ns - self._began_ns
            self._doing = DECODE
        elif event.what == "ranks" and self._doing == WAITING:
            self._why = self._between
        elif event.what == "lost_ranks":
            self._why = "ranks"
        elif event.what == "stopped":
            self._doing, self._why = WAITING, "daemon"

    def _decided(self, event: Told) -> None:
        told = event.decided
        if told.verdict == Verdict.WAITS:
            self._why = told.reason
        elif told.verdict == Verdict.ADMITTED:
            self._doing = PREFILL
        elif told.verdict == Verdict.PARKED and self._doing != PARKED:
            self._before_parked, self._doing = self._doing, PARKED
        elif told.verdict == Verdict.UNPARKED:
            self._doing = self._before_parked
        elif told.verdict in BACK:
            kept = self._why if self._doing == WAITING else self._between
            self._doing, self._why = WAITING, BACK[Verdict(told.verdict)] or kept

    def _pass(self, now_ns: int) -> None:
        took_ns = max(now_ns - self._at_ns, 0)
        self._at_ns = max(self._at_ns, now_ns)
        self.times.whole_ns += took_ns
        self.times.parts[self._doing] += took_ns
        if self._doing == WAITING:
            self.times.waited[self._why] += took_ns


def times_of(story: Story) -> Times:
    """Where its time went."""
    clock = _Clock(story.arrived.now_ns, story.ready, "step" if story.replayed else "queue")
    for event in story.events:
        clock.take(story, event)
    return clock.times


def decisions(story: Story, verdict: str) -> list[Told]:
    """All decisions of one verdict about it."""
    told = [event for event in story.events if isinstance(event, Told)]
    return [event for event in told if event.decided.verdict == verdict and event.decided.request == story.request]


def summary(story: Story) -> str:
    """Its life in one paragraph."""
    if not story.request:
        refused = next(event for event in story.events if isinstance(event, Told))
        return f"It was refused when it came ({refused.decided.reason}): it never waited and held nothing."
    spent = times_of(story)
    parts = [_spent(story, spent), _waited(spent), _cached(story), _lost(story), _answered(story, spent), _end(story)]
    return " ".join(part for part in parts if part)


def _spent(story: Story, spent: Times) -> str:
    names = {WAITING: "waiting", PREFILL: "prefilling", DECODE: "decoding", PARKED: "parked"}
    if not spent.first_token_ns:
        names[PREFILL] = "running"
    doing = [f"{milliseconds(spent.parts[what])} {name}" for what, name in names.items() if spent.parts[what]]
    until = "from its arrival to its end" if story.ended else "from its arrival to the last thing that is known of it"
    if not spent.whole_ns:
        return "It came and ended at once." if story.ended else "It came, and nothing more is known of it yet."
    return f"It took {milliseconds(spent.whole_ns)} {until}: {listed(doing)}."


def _waited(spent: Times) -> str:
    waited = [(reason, ns) for reason, ns in spent.waited.most_common() if ns]
    if not waited or (len(waited) == 1 and waited[0][0] == "step"):
        return ""
    what = [f"{milliseconds(ns)} for {for_what(reason)}" for reason, ns in waited]
    return f"Of the waiting, {listed(what)}." if len(what) > 1 else f"It waited {what[0]}."


def _cached(story: Story) -> str:
    starts = decisions(story, Verdict.ADMITTED)
    if not starts:
        return ""
    n, cut = starts[0].decided.numbers, starts[0].decided.reason
    if "cached_tokens" not in n:
        return ""
    cached, tokens = n["cached_tokens"], n["tokens"]
    if not cached and cut in ("", "full") and not n.get("left_tokens"):
        return f"The prefix cache had none of its {units(tokens, 'token')}."
    if n.get("left_tokens"):
        return f"The prefix cache had {n['left_tokens']:,} of its {tokens:,} tokens, for which there was no room."
    text = f"The prefix cache saved it {cached:,} of {units(tokens, 'token')}"
    if cut not in ("", "full"):
        text += f" (full-attention pages of {n['matched_tokens']:,} were cached, but not the {missing_kind(cut)})"
    return text + "."


def _lost(story: Story) -> str:
    """Retractions, ends of epochs and of lives, and the work that they cost."""
    said = []
    retracted = decisions(story, Verdict.RETRACTED)
    if retracted:
        by = sorted({event.decided.by for event in retracted if event.decided.by})
        for_whom = f" for {listed(f'request {number}' for number in by[:5])}" if by else ""
        for_whom += " and others" if len(by) > 5 else ""
        said.append(f"retracted {times(len(retracted))}{for_whom}")
    requeued = [event for event in decisions(story, Verdict.REQUEUED) if event.decided.reason == "epoch"]
    if requeued:
        said.append(f"thrown back {times(len(requeued))} by the loss of ranks")
    recovered = decisions(story, Verdict.RECOVERED)
    if recovered:
        said.append(f"taken over by a new process of the daemon {times(len(recovered))}")
    parked = decisions(story, Verdict.PARKED)
    if parked:
        said.append(f"parked {times(len(parked))}")
    again, sure = recomputed(story)
    least = "" if sure else "at least "
    cost = f", and had to compute {least}{units(again, 'token')} again" if again else ""
    return f"It was {listed(said)}{cost}." if said else ""


def recomputed(story: Story) -> tuple[int, bool]:
    """Tokens that were computed again behind retractions and losses, and whether that is all of them.

    What had been computed of a request that a process of the daemon left in its prefill no decision says.
    """
    again, reached, sure = 0, 0, not story.known_from
    start: tuple[int, int] | None = None  # what the newest start found in the cache, and the length it was to reach
    for event in story.events:
        if not isinstance(event, Told) or event.decided.request != story.request:
            continue
        told, n = event.decided, event.decided.numbers
        if told.verdict == Verdict.ADMITTED:
            start = (n.get("cached_tokens", 0), n["tokens"])
        elif told.verdict in BACK and start is not None:
            sure = sure and "tokens" in n
            had = n.get("tokens", start[1] if n.get("output_tokens") else 0)
            again += max(0, min(reached, had, start[1]) - start[0])
            reached, start = max(reached, had), None
    if start is not None:
        again += max(0, min(reached, start[1]) - start[0])
    return again, sure


def _answered(story: Story, spent: Times) -> str:
    if not spent.first_token_ns:
        return ""
    first = f"Time to its first output token: {milliseconds(spent.first_token_ns)}"
    ended = decisions(story, Verdict.ENDED)
    tokens = ended[-1].decided.numbers["output_tokens"] if ended else 0
    if tokens < 2:
        return first + "."
    each_ns = spent.parts[DECODE] // (tokens - 1)
    more = units(tokens - 1, "more token")
    return f"{first}; then {more}, one every {milliseconds(each_ns)} of decoding."


def _end(story: Story) -> str:
    ended = decisions(story, Verdict.ENDED)
    if not ended:
        left = [event for event in story.events if isinstance(event, Noted) and event.what in ("ended", "left")]
        if left:
            return f"In the end: {left[-1].text}."
        return "" if story.ended else "The journal has no end of it: it still runs, or the daemon was cut off."
    event = ended[-1]
    tokens = units(event.decided.numbers["output_tokens"], "output token")
    return f"It ended ({event.decided.reason}) with {tokens}: {ended_because(event.decided.reason, event.aside)}."


def as_plain(story: Story) -> dict[str, Any]:
    """The summary as plain values."""
    spent = times_of(story)
    return {
        "text": summary(story),
        "whole_ns": spent.whole_ns,
        "spent_ns": dict(spent.parts),
        "waited_ns": dict(spent.waited),
        "first_token_ns": spent.first_token_ns,
        "retractions": len(decisions(story, Verdict.RETRACTED)),
        "starts": len(decisions(story, Verdict.ADMITTED)),
    }
