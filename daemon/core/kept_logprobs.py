"""Kept log probabilities: those of choices that may go on, for clients that come back for them, within a bound.

Owns how much is kept, of which choice, and what is forgotten. Must never forget a token, nor a place: what is forgotten
stands there as not known, so that positions stay; nor look at what it does not forget: that takes time for each entry
that goes and each choice that has some. A client that is connected was told them at once and misses nothing.
Invariants: `kept_bytes` is the sum over `holders`, and over all groups of which a choice lives; behind `bound` it is at
most `LIVE_BYTES_MAX`, but for what cannot be made less.

    over the bound: of the choice that has most, then of the next, the older half, until an eighth of the bound is free
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from allocator.columns import pack_i32
from ipc.messages import Logprobs, RequestLogprobs

if TYPE_CHECKING:
    from daemon.core.requests import Group, Request
    from daemon.core.state import CoreState

LIVE_BYTES_MAX = 256 * 1024 * 1024
ENTRY_BYTES = 320  # of one entry's objects, beside its columns
PLACE_BYTES = 8  # of a token's that is not known: all of them share one entry
NOT_KNOWN = -9999.0  # in place of a log probability, as the OpenAI API has it for what is beyond its table
_NOT_KNOWN_BYTES = np.array([NOT_KNOWN], "<f4").tobytes()
UNKNOWN = Logprobs(0, _NOT_KNOWN_BYTES, pack_i32([0]), b"", b"")  # of a token without one


@dataclass(slots=True)
class Holder:
    """A choice, and the bytes of what is kept of it.

    `lean` is how many entries at the head of each of its lists cannot be made less: of the prompt, of the output.
    """

    group: Group
    has_bytes: int = 0
    lean: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Kept:
    """How much is kept, and what was left when the newest forgetting was over (it may be above the bound)."""

    kept_bytes: int = 0
    least_bytes: int = 0
    holders: dict[int, Holder] = field(default_factory=dict)  # by request number; none with nothing

    def content(self) -> list[int]:
        """What makes a difference, for the state's digest."""
        return [self.kept_bytes, self.least_bytes]


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


def keep(core: CoreState, group: Group, number: int, more_bytes: int) -> None:
    """So much more is kept of a choice, or less."""
    if not more_bytes:
        return
    kept = core.kept_logprobs
    holder = kept.holders.get(number)
    if holder is None:
        holder = kept.holders[number] = Holder(group)
    holder.has_bytes += more_bytes
    kept.kept_bytes += more_bytes
    assert holder.has_bytes >= 0, "what goes was kept"
    if not holder.has_bytes:
        del kept.holders[number]


def replace_output(core: CoreState, request: Request, output: list[RequestLogprobs]) -> None:
    """Other entries of the output of a live choice: some of the head that it had, then places that are not known."""
    keep(core, request.group, request.number, size_of(output) - size_of(request.output_logprobs))
    request.output_logprobs = output
    holder = core.kept_logprobs.holders.get(request.number)
    if holder is not None:
        holder.lean = (holder.lean[0], min(holder.lean[1], len(output)))


def drop(core: CoreState, number: int) -> None:
    """Nothing more is kept of a choice."""
    holder = core.kept_logprobs.holders.pop(number, None)
    if holder is not None:
        core.kept_logprobs.kept_bytes -= holder.has_bytes


def joined(core: CoreState, request: Request) -> list[RequestLogprobs]:
    """What was kept of a choice that ends, as one list: its head cannot be made less as far as those of both."""
    holder, prompt = core.kept_logprobs.holders.get(request.number), len(request.prompt_logprobs)
    if holder is not None:
        of_prompt, of_output = holder.lean
        holder.lean = (prompt + of_output if of_prompt == prompt else of_prompt, 0)
    return request.logprobs


def bound(core: CoreState) -> None:
    """Forget until there is room again; called behind whatever keeps more."""
    kept = core.kept_logprobs
    if kept.kept_bytes <= max(LIVE_BYTES_MAX, kept.least_bytes + LIVE_BYTES_MAX // 8):
        return
    most = [(-holder.has_bytes, number) for number, holder in kept.holders.items()]
    heapq.heapify(most)
    while most and kept.kept_bytes > LIVE_BYTES_MAX - LIVE_BYTES_MAX // 8:
        _, number = heapq.heappop(most)
        _forget(core, number, kept.holders[number])
    kept.least_bytes = kept.kept_bytes


def _lists(core: CoreState, number: int, group: Group) -> list[list[RequestLogprobs]]:
    """The lists that hold what is kept of a choice."""
    request = core.requests.get(number)
    if request is not None:
        return [request.prompt_logprobs, request.output_logprobs]
    return [group.logprobs[number - group.accepted.first_request], []]


def _forget(core: CoreState, number: int, holder: Holder) -> None:
    """The oldest entries of a choice, half of what it has."""
    freed, tokens, enough_bytes = 0, 0, holder.has_bytes // 2
    (place,) = unknown(number, 1)
    ends = []
    for entries, begin in zip(_lists(core, number, holder.group), holder.lean, strict=True):
        end = begin
        while freed < enough_bytes and end < len(entries):
            entry = entries[end]
            forgotten = place if entry.prompt_position < 0 else _without_values(entry)
            less = size(entry) - size(forgotten)
            if less:
                entries[end] = forgotten
                freed += less
                tokens += len(entry.values.ranks) // 4
            end += 1
        ends.append(end)
    holder.lean = (ends[0], ends[1])
    core.totals.forgotten_logprobs += tokens
    keep(core, holder.group, number, -freed)


def _without_values(entry: RequestLogprobs) -> RequestLogprobs:
    """Of prompt positions: there, and not known."""
    count = len(entry.values.ranks) // 4
    values = Logprobs(0, _NOT_KNOWN_BYTES * count, bytes(4 * count), b"", b"")
    return RequestLogprobs(entry.request, entry.prompt_position, values)
