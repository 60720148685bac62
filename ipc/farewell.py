"""Farewell: the last word to every rank, and which of them have read it.

Owns who has not. Must never take what was sent for what was read: the process at the other end may be dead already, or
about to leave for another reason, and then another one comes in its place and knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from ipc.messages import Left
from ipc.rank_id import RankId


class Farewell:
    """One encoded Stop on its way to all ranks; `scope` is cancelled when each of them has read it."""

    def __init__(self, ranks: Iterable[RankId], data: bytes) -> None:
        """`data` is the Stop, encoded."""
        self.data = data
        self.scope = trio.CancelScope()
        self.unread: set[RankId] = set(ranks)
        self._told: dict[bytes, RankId] = {}

    def told(self, identity: bytes, rank: RankId) -> None:
        """It was sent on this connection."""
        self._told[identity] = rank

    def read(self, identity: bytes, message: Left) -> bool:
        """A rank leaves; False when it was not sent on this connection. `again`: it read another Stop before."""
        rank = self._told.get(identity)
        if rank is None or rank != (message.stage, message.rank):
            return False
        if not message.again:
            self.unread.discard(rank)
        if not self.unread:
            self.scope.cancel()
        return True
