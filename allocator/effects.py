"""Effects: what a rank must do to its arena after its physical chain applied the ops of a step.

Owns the closed set of effects and their canonical bytes. A physical chain returns effects in an order that is safe to
execute one after the other; it performs none of them. Physical unit numbers appear here and nowhere else outside a
rank. Invariant: equal effect sequences have equal canonical bytes, on every tensor rank of a stage.

Streams: `Zero`, `Copy` and `Bind` run on the schedule stream, in order. `HostRead` and `HostWrite` run on the copy
stream, behind everything issued before them on the schedule stream and behind every forward launched before them.
`Send` and `Publish` leave the host once the schedule work before them is done and forward `after` has ended. A forward
runs behind all schedule work issued before its launch.
"""

from __future__ import annotations

import msgspec


class WaitForward(msgspec.Struct, array_like=True, frozen=True, tag="wait"):
    """Order everything that follows on the schedule stream behind the end of forward `seq` (a stream wait)."""

    seq: int


class WaitCopy(msgspec.Struct, array_like=True, frozen=True, tag="wait_copy"):
    """Order everything that follows on the schedule stream behind the end of host copy `use` (a stream wait)."""

    use: int


class HostWait(msgspec.Struct, array_like=True, frozen=True, tag="host_wait"):
    """The host goes on only when this rank's engine has finished transfer `use`."""

    use: int


class Zero(msgspec.Struct, array_like=True, frozen=True, tag="zero"):
    """Zero whole units of a band; `units` is an int32 column of physical units."""

    band: int
    units: bytes


class Copy(msgspec.Struct, array_like=True, frozen=True, tag="copy"):
    """Copy whole units within a band, pair by pair (int32 columns).

    No target is a source, targets are distinct; a source may repeat (a state copied into several slots).
    """

    band: int
    sources: bytes
    targets: bytes


class Bind(msgspec.Struct, array_like=True, frozen=True, tag="bind"):
    """Point virtual ids at physical units in the band's id table (int32 columns of one length).

    A freed or retired virtual id is bound to the band's resting unit: the sink, unit 0, or the padding slot.
    """

    band: int
    virtual: bytes
    physical: bytes


class HostRead(msgspec.Struct, array_like=True, frozen=True, tag="host_read"):
    """Host copy `use`: units (int32) of a band into host slots (int64), pair by pair."""

    use: int
    band: int
    units: bytes
    slots: bytes


class HostWrite(msgspec.Struct, array_like=True, frozen=True, tag="host_write"):
    """Host copy `use`: host slots (int64) into units (int32) of a band, pair by pair."""

    use: int
    band: int
    units: bytes
    slots: bytes


class SendUnits(msgspec.Struct, array_like=True, frozen=True, tag="send_units"):
    """The transfer engine reads these units for `use`, after forward `after` has ended (0: at once)."""

    use: int
    band: int
    units: bytes
    after: int


class PublishUnits(msgspec.Struct, array_like=True, frozen=True, tag="publish_units"):
    """The peer of `use` may learn these units' addresses, after forward `after` has ended (0: at once).

    `virtual` are their ids, in the same order: what both sides call them.
    """

    use: int
    band: int
    virtual: bytes
    units: bytes
    after: int


Effect = WaitForward | WaitCopy | HostWait | Zero | Copy | Bind | HostRead | HostWrite | SendUnits | PublishUnits

_encoder = msgspec.msgpack.Encoder()


def canonical_bytes(effects: list[Effect]) -> bytes:
    """The bytes of an effect sequence that layout digests are taken over."""
    return _encoder.encode(effects)
