"""Books of a crowd: what each of its requests was told, message by message.

Owns the counting. Must never repair or leave out anything: what came twice is counted twice, and what came behind an
end is noted. Times are seconds of the monotonic clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from allocator.columns import i64
from ipc.messages import Accepted, Continued, Finished, Refused, TokenBatch

ABORTED = "abort"  # the reason of an end that was asked for
NAMED_MAX = 3  # ids in one sentence

Told = Accepted | Refused | Finished | TokenBatch | Continued


@dataclass(slots=True)
class Entry:
    """One request: its number, its tokens, every end that it was told and when the newest one came."""

    number: int = 0
    refused: str = ""
    tokens: int = 0
    ends: list[str] = field(default_factory=list)
    ended_s: float = 0.0
    told_tokens: int = -1  # by its newest end
    behind_end: int = 0  # tokens


class Books:
    """What all requests of a crowd were told."""

    def __init__(self, ids: Iterable[str]) -> None:
        self.entries = {id_: Entry() for id_ in ids}
        self.strange: Counter[str] = Counter()  # messages about nothing that was asked, by type
        self._by_number: dict[int, Entry] = {}

    def take(self, message: Told, now_s: float) -> str:
        """Account for a message; the id that has ended with it, empty where none has."""
        if isinstance(message, TokenBatch):
            self._tokens(message)
            return ""
        entry = self.entries.get(message.id)
        if entry is None or isinstance(message, Continued):
            self.strange[type(message).__name__] += 1
            return ""
        if isinstance(message, Accepted):
            entry.number = message.first_request
            self._by_number[entry.number] = entry
        elif isinstance(message, Refused):
            entry.refused = entry.refused or f"{message.code}: {message.message}"
        else:
            entry.ends.append(message.reason)
            entry.ended_s, entry.told_tokens = now_s, message.output_tokens
            return message.id
        return ""

    def _tokens(self, batch: TokenBatch) -> None:
        for number in i64(batch.requests).tolist():
            entry = self._by_number.get(number)
            if entry is None:
                self.strange["TokenBatch"] += 1
                continue
            entry.tokens += 1
            entry.behind_end += bool(entry.ends)

    @property
    def accepted(self) -> int:
        """Requests that were accepted."""
        return sum(entry.number > 0 for entry in self.entries.values())

    @property
    def decoding(self) -> int:
        """Requests that got tokens and no end."""
        return sum(entry.tokens > 0 and not entry.ends for entry in self.entries.values())

    @property
    def ended(self) -> int:
        """Requests that were told an end."""
        return sum(bool(entry.ends) for entry in self.entries.values())

    @property
    def answered(self) -> int:
        """Requests that were told exactly one end, the one that was asked for."""
        return sum(entry.ends == [ABORTED] for entry in self.entries.values())

    @property
    def refused(self) -> list[str]:
        """Why requests were not taken."""
        return [entry.refused for entry in self.entries.values() if entry.refused]

    @property
    def last_end_s(self) -> float:
        """When the newest end came; 0.0 without one."""
        return max((entry.ended_s for entry in self.entries.values()), default=0.0)

    def problems(self) -> list[str]:
        """What is wrong, one sentence each."""
        entries = self.entries
        told = (
            ("were refused", [id_ for id_, entry in entries.items() if entry.refused]),
            ("were not answered", [id_ for id_, entry in entries.items() if entry.number and not entry.ends]),
            ("were told more than one end", [id_ for id_, entry in entries.items() if len(entry.ends) > 1]),
            (
                "ended otherwise than by their cancel",
                [id_ for id_, entry in entries.items() if set(entry.ends) - {ABORTED}],
            ),
            ("got tokens behind their end", [id_ for id_, entry in entries.items() if entry.behind_end]),
            (
                "got other numbers of tokens than their end says",
                [id_ for id_, entry in entries.items() if entry.ends and entry.tokens != entry.told_tokens],
            ),
        )
        found = [f"{len(ids)} of {len(entries)} {what}: {named(ids)}" for what, ids in told if ids]
        return found + [f"{count} messages of type {kind} about nothing asked" for kind, count in self.strange.items()]


def named(ids: list[str]) -> str:
    """The first few of some names."""
    more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
    return ", ".join(ids[:NAMED_MAX]) + more
