"""Ops: the only way allocator state changes, decided by the logical chain and applied by every physical chain.

Owns the closed set of ops and their canonical bytes. Ops name virtual ids explicitly: a physical chain never mints.
Must never name a physical unit, a time or a rank. Invariant: equal op sequences have equal canonical bytes.

An owner page (full attention) and the units that window bands bind to it are separate parts of one `Take` or `Free`,
one part per band, in chain order; a take is joint: all its parts succeed together or the take was never accepted.
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
    """Unbind each virtual id; its unit pends behind the newest launched forward."""

    parts: list[Part]


class Flush(msgspec.Struct, array_like=True, frozen=True, tag="flush"):
    """Opportunistic compaction of the ends: at most `moves_max` moves in every band, waiting for no forward."""

    moves_max: int


Op = Take | Free | Flush

_encoder = msgspec.msgpack.Encoder()


def canonical_bytes(ops: list[Op]) -> bytes:
    """The bytes of an op sequence that digests are taken over."""
    return _encoder.encode(ops)
