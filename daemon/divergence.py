"""Divergence: where two sides of the decide-once contract parted, from what the ranks say they did.

Owns the comparison. Must never guess: where the traces are equal it says so. Pure: a mismatch of digests and the ranks'
answers to `Explain` in, one record out.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import NamedTuple

from daemon.blame import RankId
from daemon.results import DigestMismatch
from ipc.messages import Explained, OpTrace, StepTrace
from journal.records import Divergence

NOTHING = "nothing"


class Parted(NamedTuple):
    """The first place at which two traces differ: op number (-1: none), kind, band, and what each side did there."""

    op: int
    kind: str
    band: str
    left_did: str
    right_did: str


def diverged(mismatch: DigestMismatch, explained: Mapping[RankId, Explained], epoch: int, now_ns: int) -> Divergence:
    """The record of a divergence: its step, and the op and band where it began, as far as the ranks could say."""
    step, difference = mismatch.step, mismatch.difference
    traces = {rank: trace for rank, said in explained.items() if (trace := _of_step(said, step.seq)) is not None}
    right = traces.get(difference.right)
    left_rank, left = difference.left, None
    if left_rank is None and right is not None:
        left_rank = _agreeing(traces, difference.right, step.logical)
    if left_rank is not None:
        left = traces.get(left_rank)
    return Divergence(
        now_ns,
        epoch,
        step.seq,
        difference.what,
        "the daemon" if difference.left is None else _name(difference.left),
        _name(difference.right),
        *_parted(mismatch, left_rank, left, right),
    )


def in_words(record: Divergence) -> str:
    """One sentence for the log and for health."""
    where = f"op {record.op} ({record.kind}) in band {record.band}" if record.op >= 0 else "no single op"
    return (
        f"{record.what} digests differ first at step {record.seq}, {where}: {record.left} did {record.left_did}, "
        f"{record.right} did {record.right_did}"
    )


def _parted(
    mismatch: DigestMismatch, left_rank: RankId | None, left: StepTrace | None, right: StepTrace | None
) -> Parted:
    difference = mismatch.difference
    if difference.what == "sampled":
        return Parted(-1, "forward", "", f"told {difference.words[0]}", f"sampled {difference.words[1]}")
    if right is None:
        return Parted(-1, "", "", *_silent(difference.words[0], difference.words[1]))
    if left is not None:
        return _compare(left.ops, right.ops)
    if difference.left is None and left_rank is None:
        return _against_step([type(op).__name__ for op in mismatch.step.ops], right)
    return Parted(-1, "", "", *_silent(difference.words[0], difference.words[1]))


def _silent(left: str, right: str) -> tuple[str, str]:
    return f"({left}; it did not say what)", f"({right}; it did not say what)"


def _of_step(explained: Explained, seq: int) -> StepTrace | None:
    return next((trace for trace in explained.steps if trace.seq == seq), None)


def _agreeing(traces: Mapping[RankId, StepTrace], wrong: RankId, logical: bytes) -> RankId | None:
    """A rank that did what the daemon wanted, best of the same stage."""
    good = [rank for rank, trace in traces.items() if rank != wrong and trace.logical == logical]
    return min(good, key=lambda rank: (rank[0] != wrong[0], rank), default=None)


def _compare(left: list[OpTrace], right: list[OpTrace]) -> Parted:
    for one, other in zip_longest(left, right):
        if one == other:
            continue
        shown = one or other
        return Parted(
            shown.index,
            shown.kind,
            shown.band,
            one.effects if one is not None else NOTHING,
            other.effects if other is not None else NOTHING,
        )
    return Parted(-1, "", "", *("the same in every op: what lies behind the ops differs",) * 2)


def _against_step(kinds: list[str], right: StepTrace) -> Parted:
    """No rank agrees with the daemon: the step as it was sent is all there is to compare with."""
    told = [(index, kind) for index, kind in enumerate(kinds)]
    done = list(dict.fromkeys((trace.index, trace.kind) for trace in right.ops))
    for one, other in zip_longest(told, done):
        if one is None or other is None or (one[0], one[1].lower()) != (other[0], other[1].lower().replace("_", "")):
            index, kind = one or other or (-1, "")
            return Parted(index, kind, "", one[1] if one else NOTHING, other[1] if other else NOTHING)
    return Parted(-1, "", "", "what the step says", "the same ops: units, counts or the digest itself differ")


def _name(rank: RankId) -> str:
    return f"rank {rank[0]}.{rank[1]}"
