"""Succession: whether a life of the daemon took over what the life before it left.

Owns the comparison of `Recovered` with what the replayed core of the earlier life knows. Must never judge a life whose
core cannot be followed: one of another decision version, or one in which it raised. Invariant: as in `journal.opening`,
a life that died before it had taken over everything left nothing of its own, and the one before it still counts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from allocator.columns import i64
from daemon.core.inputs import Recovered, RecoveredChoice, RecoveredGroup
from journal import frame
from journal.difference import first_difference

GROUP_BYTES_MAX = frame.PAYLOAD_BYTES_MAX - 4096  # of one request; of a larger one something was left out


class Core(Protocol):
    """What is asked of the core of a life that is over."""

    def recoverable(self) -> list[RecoveredGroup]:
        """What the next life takes over."""

    @property
    def next_request(self) -> int:
        """The next free number."""


class Parted(NamedTuple):
    """What the records say was taken over, and what replay says was left."""

    recorded: str
    replayed: str
    request: int = 0
    path: str = ""  # the first field of the request that differs, with both values


class Succession:
    """Follows lives in their order."""

    def __init__(self) -> None:
        self._left: tuple[list[RecoveredGroup], int] | None = None
        self._groups: list[RecoveredGroup] = []  # taken over so far
        self._whole = True  # the present life counts: it is the first, or has taken over everything

    def opened(self, before: Core | None, sound: bool) -> None:
        """A life begins behind one with this core, if any; `sound`: it was followed to its last record."""
        if before is not None:
            if self._whole:
                self._left = (before.recoverable(), before.next_request) if sound else None
            self._whole = False
        self._groups = []

    def recovered(self, item: Recovered) -> Parted | None:
        """The life takes over a part; with the last one, where it differs from what was left."""
        self._groups += item.groups
        if item.left:
            return None
        self._whole = True
        if self._left is None:
            return None
        groups, next_request = self._left
        ours = {group.accepted.first_request: group for group in groups}
        theirs = {group.accepted.first_request: group for group in self._groups}
        for number in sorted(ours.keys() | theirs.keys()):
            left, taken = ours.get(number), theirs.get(number)
            same = left is not None and taken is not None and _encoded(left) == _encoded(taken)
            if not same and (left is None or len(_encoded(left)) <= GROUP_BYTES_MAX):
                return Parted(_in_words(number, taken), _in_words(number, left), number, _where(taken, left))
        if item.next_request != next_request:
            return Parted(f"next free number {item.next_request}", f"next free number {next_request}")
        return None


def _where(taken: RecoveredGroup | None, left: RecoveredGroup | None) -> str:
    found = first_difference(taken, left) if taken is not None and left is not None else None
    return f"{found.path}: recorded {found.recorded}, replayed {found.replayed}" if found is not None else ""


def _encoded(group: RecoveredGroup) -> bytes:
    return msgspec.msgpack.encode(group)


def _in_words(number: int, group: RecoveredGroup | None) -> str:
    if group is None:
        return f"no request {number}"
    return f"request {number} ({group.accepted.id!r} of {group.frontend}): " + ", ".join(map(_choice, group.choices))


def _choice(choice: RecoveredChoice) -> str:
    tokens = f"{len(i64(choice.tokens))} output tokens, {len(choice.logprobs)} log probabilities"
    return tokens if choice.ended is None else f"{tokens}, ended by {choice.ended.reason}"
