"""Chained digests: 16 bytes that stand for everything since the epoch began.

Owns the one construction used for logical and layout digests. Must never depend on anything but the bytes given.
Invariant: two chains that were advanced with the same byte strings hold the same digest; the first difference shows in
the digest of that step and of every later one.
"""

from __future__ import annotations

from hashlib import blake2b

DIGEST_BYTES = 16
START = bytes(DIGEST_BYTES)


def advance(previous: bytes, payload: bytes) -> bytes:
    """The digest after `payload`, 16 bytes of BLAKE2b over the previous digest and the payload."""
    assert len(previous) == DIGEST_BYTES
    return blake2b(previous + payload, digest_size=DIGEST_BYTES).digest()
