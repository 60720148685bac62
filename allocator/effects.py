"""Effects: what a rank must do to its arena after its physical chain applied the ops of a step.

Owns the closed set of effects and their canonical bytes. A physical chain returns effects in an order that is safe to
execute one after the other on the schedule stream; it performs none of them. Physical unit numbers appear here and
nowhere else outside a rank. Invariant: equal effect sequences have equal canonical bytes, on every tensor rank of a
stage.
"""

from __future__ import annotations

import msgspec


class WaitForward(msgspec.Struct, array_like=True, frozen=True, tag="wait"):
    """Order everything that follows on the schedule stream behind the end of forward `seq` (a stream wait)."""

    seq: int


class Zero(msgspec.Struct, array_like=True, frozen=True, tag="zero"):
    """Zero whole units of a band; `units` is an int32 column of physical units."""

    band: int
    units: bytes


class Copy(msgspec.Struct, array_like=True, frozen=True, tag="copy"):
    """Copy whole units within a band, pair by pair; `sources` and `targets` are disjoint int32 columns."""

    band: int
    sources: bytes
    targets: bytes


class Bind(msgspec.Struct, array_like=True, frozen=True, tag="bind"):
    """Point virtual ids at physical units in the band's id table (int32 columns of one length).

    A freed or retired virtual id is bound to the sink, unit 0.
    """

    band: int
    virtual: bytes
    physical: bytes


Effect = WaitForward | Zero | Copy | Bind

_encoder = msgspec.msgpack.Encoder()


def canonical_bytes(effects: list[Effect]) -> bytes:
    """The bytes of an effect sequence that layout digests are taken over."""
    return _encoder.encode(effects)
