"""The judgement of one greedy output beside the reference's: equal, a flip at ties, or different.

Owns the tie. Must never call a difference a flip without the reference's own logits for every token behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.reference import Reference

TIE = 1e-4


@dataclass(frozen=True)
class Judgement:
    """What the comparison of one output says: `equal`, `flip` (ties only) or `different`; `notes` are the ties."""

    verdict: str
    notes: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""


def trimmed(tokens: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """An output without its end token, which one side may report and the other may not."""
    return list(tokens[:-1] if tokens and tokens[-1] in eos_ids else tokens)


def judge(
    reference: Reference,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    tie: float = TIE,
    *,
    limit: int,
    finish_reason: str,
) -> Judgement:
    """Compare one output with the reference's; `limit` tokens were asked for, and ours ended by `finish_reason`."""
    if trimmed(ours, reference.eos_ids) == trimmed(theirs, reference.eos_ids):
        return Judgement("equal")
    if not ours:
        return Judgement("different", why="no output")
    notes: list[dict[str, Any]] = []
    for position, margin in enumerate(reference.margins(prompt, ours)):
        if margin > tie:
            expected = theirs[position] if position < len(theirs) else None
            why = f"output token {position}: {ours[position]}, {margin:.6f} below the best logit (reference {expected})"
            return Judgement("different", notes, why)
        if margin > 0:
            notes.append({"position": position, "token": ours[position], "margin": margin})
    if not notes and len(ours) != len(theirs):
        return Judgement("different", why=f"{len(ours)} output tokens, the reference has {len(theirs)}")
    if len(ours) < limit and ours[-1] not in reference.eos_ids:
        ends = [reference.margins(prompt, [*ours, eos])[-1] for eos in reference.eos_ids]
        if finish_reason != "stop" or min(ends, default=tie + 1) > tie:
            why = f"{len(ours)} of {limit} output tokens, ended by {finish_reason or 'nothing'} where no end token ties"
            return Judgement("different", notes, why)
    return Judgement("flip", notes)
