"""Hold-back: what must not leave before the journal is on disk.

Owns acceptances not yet durable, and the tokens and ends of their requests behind them. Must never reorder what
belongs to one request, nor hold a request whose acceptance is durable. Pure: no clock, no socket.

Request numbers are dense and new acceptances are decided in number order, so the requests held at any time are exactly
those numbered `hold_from` and up: one comparison per step decides for a whole token column. An acceptance told again is
an old one: it waits only with what is held anyway.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from daemon.core.outputs import Reply, TokenColumns
from ipc.messages import Accepted, Continued, Finished

Released = Reply | TokenColumns


def split_tokens(columns: TokenColumns, number: int) -> tuple[TokenColumns, TokenColumns]:
    """The entries of requests below `number`, and the others; order within each kept."""
    later = columns.requests >= number
    parts = []
    for mask, late in ((~later, False), (later, True)):
        logprobs = [entry for entry in columns.logprobs if (entry.request >= number) is late]
        requests, tokens = columns.requests[mask], columns.tokens[mask]
        parts.append(TokenColumns(columns.step, columns.frontends[mask], requests, tokens, logprobs))
    return parts[0], parts[1]


def is_empty(columns: TokenColumns) -> bool:
    """True when there is neither a token nor a log probability in it."""
    return not len(columns.requests) and not columns.logprobs


@dataclass(slots=True)
class HoldBack:
    """The queue of what waits; `hold_from` is None when nothing does."""

    hold_from: int | None = None
    _newest: int = 0  # highest first request number of any acceptance seen
    _synced: int = 0
    _acceptances: deque[tuple[int, int]] = field(default_factory=deque)  # (journal sequence, first request)
    _items: list[Released] = field(default_factory=list)  # in the order of their coming

    def __len__(self) -> int:
        """Items held."""
        return len(self._items)

    def known_below(self, number: int) -> None:
        """Requests below `number` were accepted in an earlier life of the daemon."""
        self._newest = max(self._newest, number - 1)

    def reply(self, reply: Reply, sequence: int) -> bool:
        """True when the reply, written through `sequence`, may leave now; otherwise it was kept."""
        message = reply.message
        if isinstance(message, Accepted):
            number = message.first_request
            if number > self._newest:
                self._newest = number
                if sequence > self._synced:
                    self._acceptances.append((sequence, number))
                    self.hold_from = self._acceptances[0][1]
        elif isinstance(message, Finished | Continued):
            number = message.request
        else:
            return True
        if self.hold_from is None or number < self.hold_from:
            return True
        self._items.append(reply)
        return False

    def tokens(self, columns: TokenColumns) -> TokenColumns:
        """The part of a step's tokens that may leave now; the rest was kept."""
        if self.hold_from is None:
            return columns
        now, later = split_tokens(columns, self.hold_from)
        if not is_empty(later):
            self._items.append(later)
        return now

    def durable(self, synced_through: int) -> list[Released]:
        """The journal is on disk through this sequence: what may leave now, in order."""
        self._synced = max(self._synced, synced_through)
        acceptances = self._acceptances
        if not acceptances or acceptances[0][0] > self._synced:
            return []
        while acceptances and acceptances[0][0] <= self._synced:
            acceptances.popleft()
        if not acceptances:
            released, self._items, self.hold_from = self._items, [], None
            return released
        self.hold_from = acceptances[0][1]
        return self._release_below(self.hold_from)

    def _release_below(self, number: int) -> list[Released]:
        released: list[Released] = []
        kept: list[Released] = []
        for item in self._items:
            if isinstance(item, TokenColumns):
                now, later = split_tokens(item, number)
                released += [now] if not is_empty(now) else []
                kept += [later] if not is_empty(later) else []
            else:
                (released if _request_of(item) < number else kept).append(item)
        self._items = kept
        return released


def _request_of(reply: Reply) -> int:
    message = reply.message
    if isinstance(message, Accepted):
        return message.first_request
    assert isinstance(message, Finished | Continued), "refusals are never held"
    return message.request
