"""Blame: which of many ranks that fail at once is the one that failed first.

Owns the order of signs. Must never wait or look anywhere: signs in, one of them out. When one rank of a group dies, its
peers fail too, often sooner than the death is noticed; what they say ("a peer is gone") must not hide the dead one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from daemon.exits import DaemonError, Exit
from ipc.rank_id import RankId, rank_name

PEER_GONE = "GroupBroken"  # a Fault that begins so says that a peer is gone or late, not that this rank is wrong
REFUSED = {"BadOption": Exit.USAGE, "UnsupportedModel": Exit.BOOT}
"""... that what it was told to do cannot be done: it would say so again; and as what a first boot then ends."""


class Mark(IntEnum):
    """What kind of sign it is, the most telling first."""

    KILLED = 1  # the process was ended by a signal
    DIVERGED = 2  # digests differ, or it reported what no correct rank can
    SILENT = 3  # no heartbeat: frozen, or its host or network is gone
    FAULT = 4  # it said itself why it cannot go on
    EXITED = 5  # the process ended and said nothing
    DISAGREED = 6  # ranks offer what cannot be one epoch
    LATE = 7  # it did not report a step, or was not ready, in time
    UNREACHABLE = 8  # it cannot be written to, or its stream has a hole
    PEER_GONE = 9  # it says that another one is gone


class RankLost(DaemonError):
    """A rank is gone, frozen or wrong; the text names it and says how that was noticed."""

    def __init__(self, rank: RankId | None, what: str, code: Exit = Exit.RANK, refused: Exit | None = None) -> None:
        """`refused`: it said that it cannot do what the settings say; the exit code that this is in a first boot."""
        who = "a rank" if rank is None else rank_name(rank)
        super().__init__(code, f"{who} {what}")
        self.rank = rank
        self.refused = refused


class Sign(NamedTuple):
    """One sign that the epoch is over, and the error that it would be if it were the cause."""

    mark: Mark
    error: DaemonError


def refusal(what: str) -> Exit | None:
    """What a Fault is in a first boot if it says that the settings cannot be followed; None for any other."""
    return next((code for name, code in REFUSED.items() if what.startswith(name)), None)


def fault_mark(what: str) -> Mark:
    """The mark of a Fault, by the error that it names first."""
    return Mark.PEER_GONE if what.startswith(PEER_GONE) else Mark.FAULT


def judge(signs: Sequence[Sign]) -> Sign:
    """The sign that names the cause: the most telling, of equals the first."""
    assert signs, "nothing says that the epoch is over"
    return min(signs, key=lambda sign: sign.mark)
