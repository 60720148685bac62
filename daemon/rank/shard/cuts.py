"""Cuts: the part of one weight that a tensor rank holds, as ranges along one of its dimensions.

Owns the arithmetic of parts. Must never know a model. Invariants: what a cut returns owns its memory and no more of the
whole; over all ranks the ranges of a divided unit cover it once, those of a replicated one once per rank that has it.
A range (-n, 0) stands for n elements that the whole does not have: zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]
ALIGNED = (64, 32, 16, 8, 4, 2, 1)  # elements that a part of a hidden layer is a multiple of, best first


class Part(NamedTuple):
    """One of `ranks` parts."""

    rank: int
    ranks: int


class Block(NamedTuple):
    """Consecutive units of one kind along a dimension: `units` of `width` elements, a rank has those of `own`.

    Units of `own` beyond the last are zeros.
    """

    units: int
    width: int
    own: Range


@dataclass(frozen=True, slots=True)
class Take:
    """The `ranges` along `dim`, one behind the other."""

    dim: int
    ranges: tuple[Range, ...]

    def __call__(self, whole: Tensor) -> Tensor:
        """The part, in memory of its own."""
        return self.gather(whole.shape, lambda start, end: whole.narrow(self.dim, start, end - start))

    def gather(self, shape: Sequence[int], read: Callable[[int, int], Tensor]) -> Tensor:
        """The part of a whole of `shape`, whose ranges along `dim` are `read`."""
        parts = []
        for start, end in self.ranges:
            if start < 0:
                sizes = list(shape)
                sizes[self.dim] = end - start
                parts.append(read(0, 0).new_zeros(sizes))
            else:
                parts.append(read(start, end))
        return torch.cat(parts, self.dim)

    @property
    def size(self) -> int:
        """Elements of the part along `dim`."""
        return sum(end - start for start, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Once:
    """A bias of an output that is summed over ranks: whole on tensor rank 0, zeros on the others."""

    part: Part

    def __call__(self, whole: Tensor) -> Tensor:
        """The tensor or as many zeros."""
        return whole.clone() if self.part.rank == 0 else torch.zeros_like(whole)


Cut = Take | Once


def share(count: int, part: Part) -> Range:
    """Which of `count` units a part has: as many as the others, or one that several parts have."""
    assert count % part.ranks == 0 or part.ranks % count == 0, f"{count} units over {part.ranks} ranks"
    first = part.rank * count // part.ranks
    return first, first + max(count // part.ranks, 1)


def share_heads(heads: int, groups: int, part: Part) -> tuple[Range, Range]:
    """Which query heads and which groups a part has; where groups do not divide, some beyond the last: zeros."""
    if (heads % part.ranks == 0 and groups % part.ranks == 0) or part.ranks % groups == 0:
        return share(heads, part), share(groups, part)
    each, per = -(-groups // part.ranks), heads // groups
    first = part.rank * each
    return (first * per, (first + each) * per), (first, first + each)


def spread(count: int, part: Part) -> Range:
    """A part of `count` elements that need not divide: as even as can be in the largest aligned pieces."""
    even = next((size for size in ALIGNED if count % (size * part.ranks) == 0), 0)
    size = even or next(size for size in ALIGNED if count % size == 0 and (count // size >= part.ranks or size == 1))
    pieces = count // size
    return part.rank * pieces // part.ranks * size, (part.rank + 1) * pieces // part.ranks * size


def rows_of(blocks: Iterable[Block]) -> tuple[Range, ...]:
    """The ranges of a rank's units in a dimension that is made of `blocks`."""
    ranges, at = [], 0
    for block in blocks:
        first, end = (min(unit, block.units) for unit in block.own)
        ranges.append((at + first * block.width, at + end * block.width))
        missing = (block.own[1] - block.own[0]) - (end - first)
        if missing:
            ranges.append((-missing * block.width, 0))
        at += block.units * block.width
    return tuple(ranges)
