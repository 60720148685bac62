"""The judgement of parity: equal, a listed tie, or a difference that fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tools.parity import judge, trimmed
from tools.parity_prompts import CASES

EOS = 2
THEIRS = [10, 11, 12, EOS]


class FixedReference:
    """A reference whose best logit beats the chosen token by given margins."""

    def __init__(self, margins: Sequence[float]) -> None:
        self.eos_ids = [EOS]
        self._margins = list(margins)

    def margins(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """The margins given, one per output token."""
        assert len(self._margins) == len(output)
        return self._margins


@pytest.mark.parametrize(
    ("ours", "margins", "verdict"),
    [
        ([10, 11, 12, EOS], [], "equal"),
        ([10, 11, 12], [], "equal"),
        ([10, 99, 98], [0.0, 5e-5, 0.0], "flip"),
        ([10, 99, 98], [0.0, 2e-4, 0.0], "different"),
        ([10, 99, 98], [0.0, 5e-5, 0.5], "different"),
        ([], [], "different"),
        ([10, 11], [0.0, 0.0], "different"),
    ],
)
def test_each_judgement(ours: list[int], margins: list[float], verdict: str) -> None:
    """Ties up to the limit are flips and are listed; everything beyond, and a short output, is a difference."""
    judged = judge(FixedReference(margins), [1], ours, THEIRS, 1e-4)  # type: ignore[arg-type]
    assert judged.verdict == verdict
    if verdict == "flip":
        assert judged.notes == [{"position": 1, "token": 99, "margin": 5e-5}]
    assert bool(judged.why) is (verdict == "different")


def test_only_a_trailing_end_token_is_trimmed() -> None:
    """An end token inside an output stays."""
    assert trimmed([EOS, 5, EOS], [EOS]) == [EOS, 5]
    assert trimmed([], [EOS]) == []


def test_the_prompts_are_what_they_promise() -> None:
    """Thirty distinct names, lengths from 1 to 1,500 tokens, several scripts, and shared beginnings."""
    assert len({case.name for case in CASES}) == 30
    lengths = [case.tokens for case in CASES if case.tokens]
    assert (min(lengths), max(lengths)) == (1, 1500)
    assert sum(not case.text.isascii() for case in CASES) >= 8
    starts = [case.text[:120] for case in CASES if len(case.text) >= 120]
    assert sum(starts.count(start) > 1 for start in set(starts)) >= 3
