"""Verdicts: what counts as lost, missing, doubled or parted, and that nothing wrong passes for equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.faults.judge import Verdict, judge, parting, unexcused
from tools.faults.work import HTTP, WIRE, Story, Task

REFERENCE = list(range(100, 110))


def story(via: str = WIRE, **fields: object) -> Story:
    """A story that ended as it should, but for the fields that are given."""
    made = Story(Task(0, via, (1, 2, 3), len(REFERENCE), 0.0, 7), tokens=list(REFERENCE), finish="length")
    made.told_tokens = len(REFERENCE)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("change", "verdict", "parts_at"),
    [
        (lambda s: None, Verdict.EQUAL, -1),
        (lambda s: setattr(s, "finish", ""), Verdict.LOST, -1),
        (lambda s: setattr(s, "error", "engine_fault: a rank died"), Verdict.LOST, -1),
        (lambda s: s.tokens.pop(4), Verdict.MISSING, 4),
        (lambda s: s.tokens.pop(), Verdict.MISSING, 9),
        (lambda s: s.tokens.insert(4, s.tokens[4]), Verdict.DOUBLED, 5),
        (lambda s: s.tokens.__setitem__(6, 1), Verdict.PARTED, 6),
        (lambda s: s.wrong.append("2 are missing"), Verdict.MISSING, -1),
        (lambda s: s.cuts.append(REFERENCE[:3]), Verdict.EQUAL, -1),
        (lambda s: s.cuts.append([*REFERENCE[:3], 1]), Verdict.PARTED, 3),
        (lambda s: setattr(s, "told_tokens", 12), Verdict.MISSING, -1),
    ],
)
def test_each_wrong_has_its_verdict(change: Callable[[Story], object], verdict: Verdict, parts_at: int) -> None:
    """One change to a story that was right, and the verdict that names it."""
    changed = story()
    change(changed)
    judged = judge(changed, REFERENCE)
    assert (judged.verdict, judged.parts_at) == (verdict, parts_at)
    assert bool(judged.text) == (verdict != Verdict.EQUAL)


def test_an_early_end_is_missing_even_where_its_end_agrees() -> None:
    """A request that ends after fewer tokens than were asked for is not whole, whatever its end says."""
    short = story(tokens=REFERENCE[:6], told_tokens=6)
    assert judge(short, REFERENCE).verdict == Verdict.MISSING


def test_a_doubled_run_of_tokens_is_found_wherever_it_is() -> None:
    """Tokens that come twice, of any length at any place, are never called equal."""
    for at in range(len(REFERENCE)):
        for length in range(1, len(REFERENCE) - at + 1):
            twice = [*REFERENCE[: at + length], *REFERENCE[at:]]
            assert judge(story(tokens=twice), REFERENCE).verdict == Verdict.DOUBLED


def test_a_broken_connection_needs_a_cause() -> None:
    """An HTTP stream may break where the strike takes its connection along, and nowhere else."""
    cut = story(HTTP, cuts=[[100]])
    assert not unexcused(cut, breaks_http=True)
    assert unexcused(cut, breaks_http=False)
    assert unexcused(story(WIRE, cuts=[[100]]), breaks_http=True)
    assert not unexcused(story(HTTP), breaks_http=False)


def test_parting() -> None:
    """The first place where two outputs differ, in length too."""
    assert parting([1, 2, 3], [1, 2, 3]) == -1
    assert parting([1, 9, 3], [1, 2, 3]) == 1
    assert parting([1, 2], [1, 2, 3]) == 2
    assert parting([], []) == -1
