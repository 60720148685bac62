"""Recovered parts: what a life takes over, cut into inputs that records can hold.

Owns what is left out of a request that one record cannot hold whole. Must never let one request keep all others from
going on: a record that is too large could not be written, in this life and in every later one. Invariants: parts come
in the order of numbers; a request is in one part; what is left out is said in a note.

    left out first    log probabilities of output, and those of the prompt where they can be computed again
    then              the output of choices that go on: they start from the prompt again, behind what their client holds
    at last           the request: who comes back for it is told that nobody knows it, and sends it again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from daemon.core.inputs import Recovered, RecoveredChoice, RecoveredGroup
from journal import records
from journal.records import Kind
from journal.succession import GROUP_BYTES_MAX

PART_BYTES = 8 << 20  # of one part, if there is more than one request in it


def parts_of(
    groups: Sequence[RecoveredGroup],
    next_request: int,
    now_ns: int,
    part_bytes: int = PART_BYTES,
    group_bytes_max: int = GROUP_BYTES_MAX,
) -> tuple[list[Recovered], list[str]]:
    """The first inputs of a life, as a reader of the journal will see them, and a note for everything left out."""
    parts: list[list[RecoveredGroup]] = [[]]
    notes: list[str] = []
    size = 0
    for whole in groups:
        group, group_bytes = _fitting(whole, group_bytes_max, notes)
        if group is None:
            continue
        if parts[-1] and size + group_bytes > part_bytes:
            parts.append([])
            size = 0
        parts[-1].append(group)
        size += group_bytes
    items = []
    for place, part in enumerate(parts, start=1):
        left = len(parts) - place
        free = part[-1].accepted.first_request + part[-1].accepted.n if left else next_request
        item = records.decode(Kind.RECOVERED, records.encode(Recovered(now_ns, part, free, left)))
        assert isinstance(item, Recovered)
        items.append(item)
    return items, notes


def _fitting(group: RecoveredGroup, bytes_max: int, notes: list[str]) -> tuple[RecoveredGroup | None, int]:
    """The request with as much of it as fits, and its bytes."""
    whole = size = len(msgspec.msgpack.encode(group))
    left_out = ""
    for what, lean in SACRIFICES:
        if size <= bytes_max:
            break
        left_out = what
        choices = [lean(choice) for choice in group.choices]
        group = msgspec.structs.replace(group, choices=choices)
        size = len(msgspec.msgpack.encode(group))
    if left_out:
        name = f"request {group.accepted.first_request} ({group.accepted.id!r} of {group.frontend})"
        left_out = left_out if size <= bytes_max else "all of it, until its client sends it again"
        notes.append(f"{name} takes {whole} bytes, a record holds {bytes_max}; left out: {left_out}")
    return (group, size) if size <= bytes_max else (None, 0)


def _without_logprobs(choice: RecoveredChoice) -> RecoveredChoice:
    if choice.ended is None:
        return msgspec.structs.replace(choice, logprobs=[], prompt_logprobs_next=1)
    return msgspec.structs.replace(choice, logprobs=[one for one in choice.logprobs if one.prompt_position >= 0])


def _without_output(choice: RecoveredChoice) -> RecoveredChoice:
    return msgspec.structs.replace(choice, logprobs=[], tokens=choice.tokens if choice.ended is not None else b"")


SACRIFICES: list[tuple[str, Callable[[RecoveredChoice], RecoveredChoice]]] = [
    ("log probabilities", _without_logprobs),
    ("log probabilities, and the output of choices that go on", _without_output),
]
