"""Divergence: the first place where replay and journal differ, as one value with everything that is known of it.

Owns its fields and how they are found in two records. Must never decide that something differs: `journal.replay` and
`journal.ranks` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from allocator.columns import i32
from daemon.core.inputs import Reported
from daemon.core.outputs import Decided
from ipc.messages import EXPLICIT, Forward, Step
from journal.difference import describe, first_difference
from journal.errors import JournalError
from journal.reader import Record
from journal.records import Digested

REQUESTS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where replay and journal differ. Numbers are 0 where they do not apply, `op` is -1.

    `request` is the one that it is about, or the first of `requests`. `means` says what follows, in a sentence.
    """

    sequence: int
    file: str
    offset: int
    what: str
    recorded: str
    replayed: str
    path: str = ""
    epoch: int = 0
    step: int = 0
    op: int = -1
    request: int = 0
    row: int = -1
    requests: tuple[int, ...] = ()
    stage: int = -1
    rank: int = -1
    means: str = ""


class Diverged(JournalError):
    """Carries a Divergence out of the replay of one record."""

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence
        super().__init__(divergence.what)


def diverged(
    record: Record,
    what: str,
    recorded: str,
    replayed: str,
    left: msgspec.Struct | None = None,
    right: msgspec.Struct | None = None,
    *,
    path: str = "",
    op: int = -1,
    requests: Sequence[int] = (),
    means: str = "",
) -> Diverged:
    """What to raise at a record; with both structs also where they differ first."""
    row = -1
    difference = first_difference(left, right) if left is not None and right is not None else None
    if difference is not None:
        path = f"{difference.path}: recorded {difference.recorded}, replayed {difference.replayed}"
        found = difference.op()
        op = op if found is None else found
        row = _row(left, difference.path)
    step = left if isinstance(left, Step | Digested | Reported) else None
    request = left.request if isinstance(left, Decided) else 0
    about = tuple(dict.fromkeys([request, *requests])) if request else tuple(requests)
    return Diverged(
        Divergence(
            record.sequence,
            record.file,
            record.offset,
            what,
            recorded,
            replayed,
            path,
            step.epoch if step else 0,
            step.seq if step else 0,
            op,
            about[0] if about else 0,
            row,
            about,
            left.stage if isinstance(left, Digested) else -1,
            left.rank if isinstance(left, Digested) else -1,
            means,
        )
    )


def at_record(record: Record, what: str, recorded: msgspec.Struct, replayed: str = "", **more: object) -> Diverged:
    """A record that must not stand where it stands."""
    return diverged(record, what, describe(recorded), replayed, recorded, **more)  # type: ignore[arg-type]


def _row(recorded: msgspec.Struct | None, path: str) -> int:
    """Row number of the forward's entry that a path leads to, or -1."""
    if not isinstance(recorded, Step) or recorded.forward is None or not path.startswith("forward."):
        return -1
    forward, name = recorded.forward, path[len("forward.") :].partition("[")[0]
    place = int(path[path.index("[") + 1 : path.index("]")]) if "[" in path else 0
    if name == "tokens":
        return _row_of_token(forward, place)
    if name == "sampling":
        return forward.sampling[place].row if place < len(forward.sampling) else -1
    rows = i32(forward.table_rows if name.startswith("table_") else forward.rows)
    return int(rows[place]) if place < len(rows) else -1


def _row_of_token(forward: Forward, place: int) -> int:
    """The row whose explicit tokens have one at this place, or -1."""
    begin = 0
    for row, count, flag in zip(i32(forward.rows).tolist(), i32(forward.counts).tolist(), forward.flags, strict=True):
        if flag & EXPLICIT:
            begin += count
            if place < begin:
                return int(row)
    return -1


def requests_in_words(requests: Sequence[int]) -> str:
    """`request 7`, `requests 7, 9`, the first few of many; empty for none."""
    if not requests:
        return ""
    more = f" and {len(requests) - REQUESTS_SHOWN} more" if len(requests) > REQUESTS_SHOWN else ""
    return f"request{'s' if len(requests) > 1 else ''} {', '.join(map(str, requests[:REQUESTS_SHOWN]))}{more}"
