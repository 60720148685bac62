"""Records: the kinds a journal holds, their numbers and their payload types.

Owns the kind table. Must never renumber a kind or reorder a field: `schema.lock` is compared by a test. Inputs are the
truth; `Stepped` and `Decided` can be derived from them by replay, `Digested` says what the ranks reported.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from daemon.core import inputs, outputs
from daemon.core.limits import CoreConfig
from ipc.messages import Step

SCHEMA_VERSION = 1
DECISION_VERSION = 5  # raised when the core decides otherwise on equal inputs, or its state has other fields


class Opened(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """First record of each life of a daemon: what decides (`core`), and what helps to understand (the rest)."""

    now_ns: int
    life: str
    schema_version: int
    decision_version: int
    core: CoreConfig
    versions: dict[str, str]
    settings: dict[str, str]


class Digested(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The chained digests that one rank reported for one step, 16 bytes each.

    `effects`: what it performed for each op (`ipc.digests.effects_column`); empty where that was not noted.
    """

    epoch: int
    seq: int
    stage: int
    rank: int
    logical: bytes
    layout: bytes
    sampled: bytes
    effects: bytes = b""


class Readied(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A rank was ready for an epoch: builds, device, dtype and threads that its numbers depend on, by name.

    It helps to understand a run; nothing that decides reads it.
    """

    now_ns: int
    epoch: int
    stage: int
    rank: int
    versions: dict[str, str]


class Divergence(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Two sides of an epoch parted at step `seq`: whose digests differ (`what`), and the first op that each realized
    otherwise: its number in the step (-1: none was found), kind and band, and what either side did.

    It helps to understand a run; nothing that decides reads it.
    """

    now_ns: int
    epoch: int
    seq: int
    what: str
    left: str
    right: str
    op: int
    kind: str
    band: str
    left_did: str
    right_did: str


class Snapshotted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A snapshot file is complete: its name, size and digest, and the last sequence it covers."""

    file: str
    size_bytes: int
    digest: bytes
    sequence: int


class Closed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Last record of a life that ended in order: totals and the core's state digest."""

    now_ns: int
    why: str
    totals: dict[str, int]
    state: bytes


class Kind(IntEnum):
    """Kind numbers as they stand in the frame header."""

    OPENED = 1
    ARRIVED = 16
    ABORTED = 17
    FINISH_ASKED = 18
    REPORTED = 19
    TRANSFER_ENDED = 20
    EXTENTS_FIXED = 21
    FLUSH_ASKED = 22
    EPOCH_BEGAN = 23
    EPOCH_ENDED = 24
    FRONT_END_LOST = 25
    RESUMED = 26
    CONTROLLED = 27
    TICKED = 28
    JOURNAL_DEGRADED = 29
    ACKNOWLEDGED = 30
    RECOVERED = 32
    STEPPED = 64
    DECIDED = 65
    DIGESTED = 96
    READIED = 97
    DIVERGED = 98
    SNAPSHOTTED = 112
    CLOSED = 127


PAYLOADS: dict[Kind, type[msgspec.Struct]] = {
    Kind.OPENED: Opened,
    Kind.ARRIVED: inputs.Arrived,
    Kind.ABORTED: inputs.Aborted,
    Kind.FINISH_ASKED: inputs.FinishAsked,
    Kind.REPORTED: inputs.Reported,
    Kind.TRANSFER_ENDED: inputs.TransferEnded,
    Kind.EXTENTS_FIXED: inputs.ExtentsFixed,
    Kind.FLUSH_ASKED: inputs.FlushAsked,
    Kind.EPOCH_BEGAN: inputs.EpochBegan,
    Kind.EPOCH_ENDED: inputs.EpochEnded,
    Kind.FRONT_END_LOST: inputs.FrontEndLost,
    Kind.RESUMED: inputs.Resumed,
    Kind.CONTROLLED: inputs.Controlled,
    Kind.TICKED: inputs.Ticked,
    Kind.JOURNAL_DEGRADED: inputs.JournalDegraded,
    Kind.ACKNOWLEDGED: inputs.Acknowledged,
    Kind.RECOVERED: inputs.Recovered,
    Kind.STEPPED: Step,
    Kind.DECIDED: outputs.Decided,
    Kind.DIGESTED: Digested,
    Kind.READIED: Readied,
    Kind.DIVERGED: Divergence,
    Kind.SNAPSHOTTED: Snapshotted,
    Kind.CLOSED: Closed,
}

assert set(PAYLOADS) == set(Kind), "a record kind without a payload"

INPUT_KINDS = frozenset(kind for kind in Kind if Kind.ARRIVED <= kind < Kind.STEPPED)

KIND_OF: dict[type[msgspec.Struct], Kind] = {payload: kind for kind, payload in PAYLOADS.items()}

# Records that replay and recovery can do without: a reader that does not know their kind passes over them.
MAY_SKIP = frozenset({Kind.DIGESTED, Kind.READIED, Kind.DIVERGED, Kind.SNAPSHOTTED})

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(payload) for kind, payload in PAYLOADS.items()}


def encode(payload: msgspec.Struct) -> bytes:
    """The payload bytes of a record; equal structs give equal bytes."""
    return _encoder.encode(payload)


def decode(kind: Kind, payload: bytes) -> msgspec.Struct:
    """The struct of a payload; raises msgspec.ValidationError when it does not fit."""
    decoded = _decoders[kind].decode(payload)
    assert isinstance(decoded, msgspec.Struct)
    return decoded
