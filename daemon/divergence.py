"""Divergence: where two sides of the decide-once contract parted, from what the ranks say they did.

Owns the comparison. Must never guess: where the traces are equal it says so. Pure: a mismatch of digests and the ranks'
answers to `Explain` in, one record out.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import NamedTuple

from daemon.results import DigestMismatch
from ipc.messages import Explained, OpTrace, StepTrace
from ipc.rank_id import RankId, rank_name
from journal.records import Divergence

NOTHING = "nothing"
SAME = "the same in every op: what differs lies behind them, in counts or in the digest itself"


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
    left = difference.left
    if left is None:  # the daemon moves no memory: a rank that did as it was told stands in for it
        left = _agreeing(traces, difference.right, step.logical)
    parted = _parted(mismatch, None if left is None else traces.get(left), traces.get(difference.right))
    left_name, right_name = _name(difference.left), _name(difference.right)
    return Divergence(now_ns, epoch, step.seq, difference.what, left_name, right_name, *parted)


def in_words(record: Divergence) -> str:
    """One sentence for the log and for health."""
    where = f"op {record.op} ({record.kind}) in band {record.band or '-'}" if record.op >= 0 else "in no single op"
    return (
        f"{record.what} digests differ first at step {record.seq}, {where}: {record.left} did {record.left_did}; "
        f"{record.right} did {record.right_did}"
    )


def _parted(mismatch: DigestMismatch, left: StepTrace | None, right: StepTrace | None) -> Parted:
    what, words = mismatch.difference.what, mismatch.difference.words
    if what == "sampled":
        return Parted(-1, "Forward", "", *words)
    if right is None:
        return Parted(-1, "", "", words[0], f"{words[1]}, and did not say what it did")
    if left is not None:
        return _compare(left.ops, right.ops)
    told = ", ".join(type(op).__name__ for op in mismatch.step.ops) or NOTHING
    done = ", ".join(f"{trace.kind} {trace.band} {trace.effects}" for trace in right.ops) or NOTHING
    return Parted(-1, "", "", f"{words[0]} from {told}", f"{words[1]} from {done}")


def _of_step(explained: Explained, seq: int) -> StepTrace | None:
    return next((trace for trace in explained.steps if trace.seq == seq), None)


def _agreeing(traces: Mapping[RankId, StepTrace], wrong: RankId, logical: bytes) -> RankId | None:
    """A rank of the same stage that agrees with the daemon: only there the effects can be equal."""
    good = (rank for rank, trace in traces.items() if rank[0] == wrong[0] and trace.logical == logical)
    return min((rank for rank in good if rank != wrong), default=None)


def _compare(left: list[OpTrace], right: list[OpTrace]) -> Parted:
    for one, other in zip_longest(left, right):
        if one == other:
            continue
        sides = [trace for trace in (one, other) if trace is not None]
        shown = next((trace for trace in sides if trace.band), sides[0])  # a wait belongs to no band
        left_did = one.effects if one is not None else NOTHING
        return Parted(shown.index, shown.kind, shown.band, left_did, other.effects if other is not None else NOTHING)
    return Parted(-1, "", "", SAME, SAME)


def _name(rank: RankId | None) -> str:
    return "the daemon" if rank is None else rank_name(rank)
