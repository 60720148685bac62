"""Traffic: everything that came to a recorded run from outside, in its order, and what each request was told.

Owns a file of events and one of output tokens, both temporary, so that memory grows with the number of requests, a few
numbers each, and not with what they say. Must never hold anything that the run itself decided, but for the outputs:
how long a request's output is and which tokens it has is the traffic's, not the policy's. Invariants: ids are unique
over the whole run (`a` and the number of the arrival from 0); events are in the order of time.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from typing import BinaryIO

import msgspec
import numpy as np

from allocator.columns import Int64s
from daemon.core.inputs import (
    Aborted,
    Arrived,
    Controlled,
    EpochBegan,
    EpochEnded,
    FrontEndLost,
    JournalDegraded,
    Recovered,
)
from daemon.core.limits import CoreConfig

NEVER = -1
WHOLE, OPEN = 1, 0  # of an output: its end is known, or it went on and nobody saw how far
SIZE_BYTES = 8


class LifeBegan(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A daemon started with these settings; what an earlier one left goes on."""

    now_ns: int
    core: CoreConfig


class LifeEnded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A daemon ended, in order or not: what was in flight is lost."""

    now_ns: int


Event = (
    LifeBegan
    | LifeEnded
    | Recovered
    | EpochBegan
    | EpochEnded
    | Arrived
    | Aborted
    | FrontEndLost
    | Controlled
    | JournalDegraded
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)


def id_of(arrival: int) -> str:
    """The id of an arrival, which is its own for the whole run."""
    return f"a{arrival}"


def arrival_of(id: str) -> int:
    """The number of an arrival by its id."""
    return int(id[1:])


class Traffic:
    """Events and outputs of one recorded run; a context manager that removes its files.

    A request has a slot for each choice, the first of them `first_slot[arrival]`. `stop_at` is where a stop string was
    found, with how long after that token the daemon heard of it in `stop_lag_ns`; -1: none was.
    """

    def __init__(self) -> None:
        self._events: BinaryIO = tempfile.TemporaryFile(prefix="bandmaster-events-")  # noqa: SIM115  # closed on exit
        self._tokens: BinaryIO = tempfile.TemporaryFile(prefix="bandmaster-tokens-")  # noqa: SIM115  # closed on exit
        self._written = 0
        self.count = 0  # of events
        self.first_ns = self.ended_ns = 0  # of the first arrival, and of the newest thing of all
        self.complete = True  # everything had ended when the record ended
        self.first_slot = array("q")
        self.offset, self.made = array("q"), array("q")
        self.state = array("b")
        self.limit = array("q")  # most output tokens that it may have, as far as is known
        self.stop_at, self.stop_lag_ns = array("q"), array("q")
        self.share = 1.0  # of its limit that an output takes, on the mean
        self._map: Int64s | None = None

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._map = None
        self._events.close()
        self._tokens.close()

    # --- writing --------------------------------------------------------------------------------------------------

    def add(self, event: Event) -> None:
        """The next event."""
        data = _encoder.encode(event)
        self._events.write(len(data).to_bytes(SIZE_BYTES, "little") + data)
        if isinstance(event, Arrived):
            self.first_ns = self.first_ns or event.now_ns
        self.ended_ns = max(self.ended_ns, event.now_ns)
        self.count += 1

    def new_arrival(self, choices: int, limit: int) -> int:
        """Room for what becomes of the next arrival; its number."""
        self.first_slot.append(len(self.offset))
        for _ in range(choices):
            for column, value in (
                (self.offset, 0), (self.made, 0), (self.limit, limit), (self.stop_at, NEVER), (self.stop_lag_ns, 0)
            ):  # fmt: skip
                column.append(value)
            self.state.append(OPEN)
        return len(self.first_slot) - 1

    def put_output(self, slot: int, tokens: bytes, whole: bool) -> None:
        """All that a choice said (int64 column), and whether that is all that it had to say."""
        self.offset[slot], self.made[slot] = self._written, len(tokens) // 8
        self.state[slot] = WHOLE if whole else OPEN
        self._tokens.write(tokens)
        self._written += len(tokens) // 8

    # --- reading --------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """All events again, from the first; one reader at a time."""
        self._events.seek(0)
        while size := self._events.read(SIZE_BYTES):
            yield _decoder.decode(self._events.read(int.from_bytes(size, "little")))

    def tokens(self) -> Int64s:
        """All output tokens, int64; `offset` says where each output begins."""
        if self._map is None:
            self._tokens.flush()
            self._map = (
                np.memmap(self._tokens, np.int64, "r", shape=(self._written,))
                if self._written
                else np.zeros(0, np.int64)
            )
        return self._map

    def length(self, slot: int) -> int:
        """Output tokens after which a choice ends by itself: as recorded, or as many as one like it has on the mean."""
        if self.state[slot] == WHOLE:
            return self.made[slot]
        return max(self.made[slot] + 1, round(self.share * self.limit[slot]))

    def said(self, slot: int) -> int:
        """Output tokens that a client was left with: none behind its stop string, however many came."""
        return self.made[slot] if self.stop_at[slot] == NEVER else self.stop_at[slot]
