"""Judge: what clients were told, held against an undisturbed run.

Owns the verdict on each story. Must never call a difference a near-tie: it says where outputs part, and whoever asked
finds out why. Invariant: every story gets exactly one verdict, and only `equal` is one without a question.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from tools.faults.work import HTTP, Story


class Verdict(StrEnum):
    """What became of one request."""

    EQUAL = "equal"  # every token as in the undisturbed run, and its end
    PARTED = "parted"  # whole, but other tokens from some place on
    LOST = "lost"  # no end, or an end that is an error
    MISSING = "missing"  # fewer tokens than its end named, or than were asked for, or a skipped position
    DOUBLED = "doubled"  # more tokens than that


class Judged(NamedTuple):
    """A story's verdict: where it parted (-1: nowhere), and what is wrong in words."""

    verdict: Verdict
    parts_at: int
    text: str


def judge(story: Story, reference: Sequence[int]) -> Judged:
    """The verdict on one story, against the tokens of the undisturbed run."""
    task, held = story.task, len(story.tokens)
    told = story.told_tokens if story.told_tokens >= 0 else task.output_tokens
    if story.wrong:
        return Judged(Verdict.MISSING, -1, "; ".join(story.wrong))
    if story.error or not story.finish:
        return Judged(Verdict.LOST, -1, story.error or f"no end; {held} tokens came")
    expected = max(told, task.output_tokens)
    if held != expected:
        verdict = Verdict.MISSING if held < expected else Verdict.DOUBLED
        return Judged(verdict, parting(story.tokens, reference), f"{held} tokens came, its end named {told}")
    for cut in story.cuts:
        if (at := parting(cut, reference[: len(cut)])) >= 0:
            return Judged(Verdict.PARTED, at, f"parted at token {at} before its connection broke")
    at = parting(story.tokens, reference)
    return Judged(Verdict.PARTED, at, f"parted at token {at} of {held}") if at >= 0 else Judged(Verdict.EQUAL, -1, "")


def parting(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """The first place where two outputs differ, in length too; -1 when they are equal."""
    for at, (one, other) in enumerate(zip(tokens, reference, strict=False)):
        if one != other:
            return at
    return -1 if len(tokens) == len(reference) else min(len(tokens), len(reference))


def unexcused(story: Story, breaks_http: bool) -> bool:
    """Whether a connection of this story broke though nothing excuses it."""
    return bool(story.cuts) and not (story.task.via == HTTP and breaks_http)
