"""Rank id: which rank is meant, and how it is called wherever a person reads it.

Owns the pair of numbers and its one spelling. Must never hold anything else of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable

RankId = tuple[int, int]  # (stage, tensor rank)


def rank_name(rank: RankId) -> str:
    """As in "rank 1.0": tensor rank 0 of stage 1."""
    return f"rank {number(rank)}"


def number(rank: RankId) -> str:
    """As in "1.0"."""
    return f"{rank[0]}.{rank[1]}"


def numbers(ranks: Iterable[RankId]) -> str:
    """As in "0.1, 1.0"."""
    return ", ".join(map(number, ranks))
