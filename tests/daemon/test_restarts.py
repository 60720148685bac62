"""Restarts and blame: how often, how late, and whose fault it was."""

from __future__ import annotations

import itertools

import pytest

from daemon.blame import Mark, RankLost, Sign, fault_mark, judge
from daemon.restarts import PAUSE_MAX_S, Restarts


def test_no_more_than_allowed_within_any_window() -> None:
    """With 3 within 100 s: whatever the times, no window of that length ever holds a fourth."""
    restarts = Restarts(3, 100)
    taken = [now for now in range(0, 1000, 7) if restarts.take(now, progressed=True) is not None]
    assert len(taken) == restarts.total > 20
    assert all(later - first >= 100 for first, later in zip(taken, taken[3:], strict=False))
    assert Restarts(0, 100).take(0, progressed=True) is None


def test_the_pause_doubles_while_nothing_comes_of_it() -> None:
    """0.1 s after an epoch that made tokens; each restart in a row in vain doubles it, to five seconds at most."""
    restarts = Restarts(100, 1e9)
    assert restarts.take(0, progressed=True) == pytest.approx(0.1)
    pauses = [restarts.take(0, progressed=False) for _ in range(20)]
    assert pauses[:6] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, PAUSE_MAX_S])
    assert set(pauses[6:]) == {PAUSE_MAX_S}
    assert restarts.take(0, progressed=True) == pytest.approx(0.1)


@pytest.mark.parametrize(("left", "right"), list(itertools.pairwise(Mark)))
def test_the_more_telling_sign_is_the_cause(left: Mark, right: Mark) -> None:
    """Each mark wins over the next one of the table, whichever came first; of equals the first."""
    signs = [Sign(right, RankLost((0, 1), "b")), Sign(left, RankLost((0, 0), "a")), Sign(left, RankLost((1, 0), "c"))]
    assert judge(signs) is signs[1]
    assert judge(signs[::-1]) is signs[2]


def test_what_survivors_say_does_not_hide_the_dead() -> None:
    """Three ranks say that a peer is gone before the death of the fourth is noticed: it is the fourth."""
    gone = [Sign(fault_mark("GroupBroken: rank 1.0 is gone"), RankLost((0, rank), "failed")) for rank in range(3)]
    dead = Sign(Mark.KILLED, RankLost((1, 0), "was killed by SIGKILL"))
    assert judge([*gone, dead]) is dead
    own = Sign(fault_mark("OutOfMemoryError: 3 GiB"), RankLost((0, 2), "failed"))
    assert judge([*gone, own]) is own
