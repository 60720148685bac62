"""Ops: the only way allocator state changes, decided by the logical chain and applied by every physical chain.

Owns the closed set of ops and their canonical bytes. Ops name virtual ids explicitly: a physical chain never mints.
Must never name a physical unit, a time or a rank. Invariant: equal op sequences have equal canonical bytes.

An owner page (full attention) and the units that window bands bind to it are separate parts of one `Take` or `Free`,
one part per band, in chain order; a take is joint: all its parts succeed together or the take was never accepted.

A *use* is something outside the forwards that touches units for a while: a host copy or a network transfer. The op that
begins it names it by a number that is never used again in the epoch; it ends when a step lists it as released. Units
are named by virtual ids until that op, and resolved when it is applied: from then on the use knows addresses.

| op | what touches the units | until released the units |
| - | - | - |
| `Backup` | a host copy reads them | may move; whoever writes the old bytes waits for the copy |
| `Load` | a host copy writes them; no forward reads them | may move behind the copy |
| `Hold` | nothing yet: rows that a peer will write | may move, but only if nothing else helps; are not freed |
| `Send` | our own engine reads them | may move, once the host has waited for the engine; freed ones are quarantined |
| `Fix` | an engine that may never end | are fixed, as published ones |
| `Publish` | a peer that knows their addresses | are fixed; freed ones are quarantined by the logical chain |
"""

from __future__ import annotations

import msgspec


class Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Units of one band named by an op: `band` is its index in chain order, `ids` an int32 column of virtual ids."""

    band: int
    ids: bytes


class Take(msgspec.Struct, array_like=True, frozen=True, tag="take"):
    """Bind each virtual id to a unit of its band; units of token bands are zeroed before anything can read them."""

    parts: list[Part]


class Free(msgspec.Struct, array_like=True, frozen=True, tag="free"):
    """Unbind each virtual id; its unit pends behind the newest launched forward. No parts: nothing to free."""

    parts: list[Part]


class Flush(msgspec.Struct, array_like=True, frozen=True, tag="flush"):
    """Opportunistic compaction of the ends: at most `moves_max` moves in every band, waiting for no forward."""

    moves_max: int


class Rebind(msgspec.Struct, array_like=True, frozen=True, tag="rebind"):
    """Give a window band's units to other owner pages, pair by pair; no byte moves.

    `sources` (int32, strictly ascending) hold a unit of `band`, `targets` (int32, distinct) are live owner pages that
    hold none.
    """

    band: int
    sources: bytes
    targets: bytes


class CopyState(msgspec.Struct, array_like=True, frozen=True, tag="copy_state"):
    """Copy the state in slots `sources` (int32, any, repeats allowed) to live slots `targets` (strictly ascending).

    No target is a source. Ordered behind every forward launched before it.
    """

    band: int
    sources: bytes
    targets: bytes


class Backup(msgspec.Struct, array_like=True, frozen=True, tag="backup"):
    """Host copy `use` reads these units; `slots` are int64 columns of host slots, one per part, one slot per unit."""

    use: int
    parts: list[Part]
    slots: list[bytes]


class Load(msgspec.Struct, array_like=True, frozen=True, tag="load"):
    """Host copy `use` writes these live units from host slots (`slots` as in `Backup`)."""

    use: int
    parts: list[Part]
    slots: list[bytes]


class Hold(msgspec.Struct, array_like=True, frozen=True, tag="hold"):
    """These live units are the rows of a receive whose addresses no peer knows yet."""

    use: int
    parts: list[Part]


class Send(msgspec.Struct, array_like=True, frozen=True, tag="send"):
    """This rank's transfer engine reads these units and pushes them to a peer, which never learns an address."""

    use: int
    parts: list[Part]


class Fix(msgspec.Struct, array_like=True, frozen=True, tag="fix"):
    """Send `use` cannot be waited for any more: its units stay where they are until it is proved to be over."""

    use: int


class Publish(msgspec.Struct, array_like=True, frozen=True, tag="publish"):
    """A peer learns the addresses of these units, to write (a receive, which ends the hold of `use`) or to read."""

    use: int
    parts: list[Part]


Op = Take | Free | Flush | Rebind | CopyState | Backup | Load | Hold | Send | Fix | Publish
UseOp = Backup | Load | Hold | Send | Publish

_encoder = msgspec.msgpack.Encoder()


def canonical_bytes(ops: list[Op]) -> bytes:
    """The bytes of an op sequence that digests are taken over."""
    return _encoder.encode(ops)
