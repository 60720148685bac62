"""Grid: where states of a sequence may be kept, which of them are wanted in the cache, and where chunks end.

Owns the rules of checkpoint admission, as plain functions of positions. Must never look at memory, rows or the tree.
Invariants: a wanted point lies on the grid and before the sequence's last token; a chunk never runs over a wanted
point; the answers depend on positions alone, so every rank's journal gives the same ones.

    tokens     0 ...... start ............ known ..................................... target
               found and used | known, to be computed | never seen before
    wanted                            branch      mark        mark       stem     last
                                        ^ the grid point at or below `known`        ^ before the last token

`branch` is where later requests leave what this one shares with others; `last` is where the same prompt again, or
another answer to it, begins; `stem`, on a coarser grid, is for the next turn that leaves a prompt a little before its
end, because of a template's closing words or another tokenization; marks give a prompt that was never seen before some
points for whoever shares a part of it. Where a turn ended is wanted too, but known only at its end: that state waits in
the row's own slot. A conversation that is known to go on from there wants neither `last` nor `stem` (`ends`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """Why a state is in the cache; NONE: it is not wanted there."""

    NONE = 0
    BRANCH = 1
    PROMPT = 2
    MARK = 3
    TURN = 4
    RETRACTED = 5
    GRID = 6
    STEM = 7


KIND_NAMES = {kind: kind.name.lower() for kind in Kind if kind}
STEM_TOKENS = 512  # the coarser grid of stems


class Wanted(NamedTuple):
    """What is wanted of one sequence while its first `target` tokens are computed; all counts in tokens.

    `interval` is the grid's (0: no state of it is kept at all), `known` how much of the sequence the cache knows,
    `mark` how far apart marks lie beyond that (0: none). `ends`: later requests may start at the prompt's end.
    `everywhere`: every grid point is wanted.
    """

    interval: int
    known: int
    target: int
    mark: int
    ends: bool = True
    everywhere: bool = False

    @property
    def last(self) -> int:
        """The last grid point before the last token, which is always computed."""
        return (self.target - 1) // self.interval * self.interval

    @property
    def branch(self) -> int:
        """The grid point at or below what the cache knows; where all is known, that is `last`."""
        return min(self.known // self.interval * self.interval, self.last)

    @property
    def stem(self) -> int:
        """The last point of the coarser grid in the prompt, where a grid point lies there; 0: none."""
        point = min(self.target // STEM_TOKENS * STEM_TOKENS, self.last)
        return point if point % self.interval == 0 else 0

    def kind(self, position: int) -> Kind:
        """Why a state after the first `position` tokens, a grid point, is wanted."""
        assert position % self.interval == 0, "states stand on the grid"
        if not 0 < position <= self.last:
            return Kind.NONE
        if self.everywhere:
            return Kind.GRID
        if position == self.branch:
            return Kind.BRANCH
        if self.ends and position == self.last:
            return Kind.PROMPT
        if self.ends and position == self.stem:
            return Kind.STEM
        return Kind.MARK if position == self._mark_behind(position - 1) else Kind.NONE

    def behind(self, start: int) -> int:
        """The first wanted point behind `start`; 0 when there is none before the last token."""
        if not self.interval:
            return 0
        if self.everywhere:
            points = [(start // self.interval + 1) * self.interval]
        else:
            points = [self.branch, self._mark_behind(start), *([self.stem, self.last] if self.ends else [])]
        return min((point for point in points if start < point <= self.last), default=0)

    def _mark_behind(self, start: int) -> int:
        """The first mark behind `start` and behind what is known; 0: there are no marks."""
        if not self.mark:
            return 0
        apart, behind = max(self.mark, self.interval), max(start, self.known)
        number = behind // apart
        while number * apart // self.interval * self.interval <= behind:  # at most three times: marks are rounded down
            number += 1
        return number * apart // self.interval * self.interval


def cut(wanted: Wanted, start: int, count: int) -> int:
    """How many tokens of a chunk [start, start + count) run: it ends at the first wanted point it reaches.

    One that reaches none ends at the last grid point it reaches, so that its state can be kept at all; one that reaches
    no grid point runs as is. Without a grid every chunk does.
    """
    if not wanted.interval:
        return count
    end = start + count
    point = wanted.behind(start)
    if not 0 < point <= end:
        point = (end if end < wanted.target else wanted.target - 1) // wanted.interval * wanted.interval
    return point - start if point > start else count


def next_point(interval: int, end: int) -> int:
    """The first grid point that a sequence which is computed up to `end` stands on or will reach."""
    return -(-end // interval) * interval
