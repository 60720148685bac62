"""Kept log probabilities: those of choices that may go on, for clients that come back for them, within a bound.

Owns how much is kept and what is forgotten. Must never forget a token, nor a place: what is forgotten stands there as
not known, so that positions stay. A client that is connected was told them at once and misses nothing. Invariants:
`kept_bytes` is the sum over all groups of which a choice lives; behind `bound` it is at most `LIVE_BYTES_MAX`, but for
what cannot be made less.

    over the bound: of the choice that has most, then of the next, the older half, until an eighth of the bound is free
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from allocator.columns import pack_i32
from ipc.messages import Logprobs, RequestLogprobs

if TYPE_CHECKING:
    from daemon.core.requests import Group
    from daemon.core.state import CoreState

LIVE_BYTES_MAX = 256 * 1024 * 1024
ENTRY_BYTES = 320  # of one entry's objects, beside its columns
PLACE_BYTES = 8  # of a token's that is not known: all of them share one entry
NOT_KNOWN = -9999.0  # in place of a log probability, as the OpenAI API has it for what is beyond its table
_NOT_KNOWN_BYTES = np.array([NOT_KNOWN], "<f4").tobytes()
UNKNOWN = Logprobs(0, _NOT_KNOWN_BYTES, pack_i32([0]), b"", b"")  # of a token without one


@dataclass(slots=True)
class Kept:
    """How much is kept, and what was left when the newest forgetting was over (it may be above the bound)."""

    kept_bytes: int = 0
    least_bytes: int = 0


class Holder(NamedTuple):
    """A choice, the bytes of what is kept of it, and the lists that hold it."""

    has_bytes: int
    number: int
    lists: list[list[RequestLogprobs]]


def unknown(request: int, count: int) -> list[RequestLogprobs]:
    """Entries of so many output tokens without a log probability; none where `count` is not above 0."""
    return [RequestLogprobs(request, -1, UNKNOWN)] * count


def shared(entry: RequestLogprobs) -> RequestLogprobs:
    """The same entry of an output token; what is not known takes no objects of its own."""
    return RequestLogprobs(entry.request, -1, UNKNOWN) if size(entry) == PLACE_BYTES else entry


def size(entry: RequestLogprobs) -> int:
    """Bytes that an entry takes."""
    values = entry.values
    if entry.prompt_position < 0 and values.chosen == _NOT_KNOWN_BYTES:
        return PLACE_BYTES
    return ENTRY_BYTES + len(values.chosen) + len(values.ranks) + len(values.top_ids) + len(values.top_values)


def size_of(entries: list[RequestLogprobs]) -> int:
    """Bytes that entries take."""
    return sum(map(size, entries))


def size_of_group(group: Group) -> int:
    """Bytes of those choices of a group that have ended."""
    return sum(map(size_of, group.logprobs.values()))


def bound(core: CoreState) -> None:
    """Forget until there is room again; called behind whatever keeps more."""
    kept = core.kept_logprobs
    if kept.kept_bytes <= max(LIVE_BYTES_MAX, kept.least_bytes + LIVE_BYTES_MAX // 8):
        return
    for one in sorted(_holders(core), key=lambda one: (-one.has_bytes, one.number)):
        if kept.kept_bytes <= LIVE_BYTES_MAX - LIVE_BYTES_MAX // 8:
            break
        _forget(core, one.lists, one.has_bytes // 2)
    kept.least_bytes = kept.kept_bytes


def _holders(core: CoreState) -> list[Holder]:
    """Each choice that has some, of groups of which a choice lives."""
    found = []
    for group in core.groups.values():
        if not group.live or max(group.sampling.logprobs, group.sampling.prompt_logprobs) < 0:
            continue
        for number in range(group.accepted.first_request, group.accepted.first_request + group.accepted.n):
            request = core.requests.get(number)
            ended = group.logprobs.get(number - group.accepted.first_request, [])
            lists = [request.prompt_logprobs, request.output_logprobs] if request is not None else [ended]
            found.append(Holder(sum(map(size_of, lists)), number, lists))
    return [one for one in found if one.has_bytes]


def _forget(core: CoreState, lists: list[list[RequestLogprobs]], enough_bytes: int) -> None:
    """The oldest entries of a choice, so many bytes of them."""
    freed = 0
    for entries in lists:
        for at, entry in enumerate(entries):
            if freed >= enough_bytes:
                break
            lean = _forgotten(entry)
            less = size(entry) - size(lean)
            if less > 0:
                entries[at] = lean
                freed += less
                core.totals.forgotten_logprobs += len(entry.values.ranks) // 4
    core.kept_logprobs.kept_bytes -= freed
    assert core.kept_logprobs.kept_bytes >= 0, "what is forgotten was kept"


def _forgotten(entry: RequestLogprobs) -> RequestLogprobs:
    if entry.prompt_position < 0:
        return unknown(entry.request, 1)[0]
    count = len(entry.values.ranks) // 4
    return RequestLogprobs(
        entry.request, entry.prompt_position, Logprobs(0, _NOT_KNOWN_BYTES * count, bytes(4 * count), b"", b"")
    )
