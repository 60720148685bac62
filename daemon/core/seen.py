"""Seen: which beginnings of prompts came before, whether anything of them is still cached or not.

Owns two filters of bits, the newer of which is written; when that has taken its fill it becomes the older one, which is
forgotten. Must never be trusted for content: one look-up in some thousands says yes of a beginning that never came.
Invariant: what was added is known at least until as many others again were added.
"""

from __future__ import annotations

from hashlib import blake2b

FILTER_BYTES = 1 << 21
FILTER_BITS = FILTER_BYTES * 8
ADDED_MAX = 1 << 18  # per filter
PLACES = 3  # bits per beginning


class SeenBeginnings:
    """Beginnings by their digests (at least 9 bytes, evenly spread)."""

    def __init__(self) -> None:
        self._newer = bytearray(FILTER_BYTES)
        self._older = bytearray(FILTER_BYTES)
        self._added = 0

    def add(self, digest: bytes) -> None:
        """A beginning came."""
        if self._added >= ADDED_MAX:
            self._newer, self._older, self._added = bytearray(FILTER_BYTES), self._newer, 0
        for place in _places(digest):
            self._newer[place >> 3] |= 1 << (place & 7)
        self._added += 1

    def __contains__(self, digest: bytes) -> bool:
        places = _places(digest)
        for filter_ in (self._newer, self._older):
            if all(filter_[place >> 3] >> (place & 7) & 1 for place in places):
                return True
        return False

    def content(self) -> list[bytes | int]:
        """What the state digest covers."""
        return [self._added, blake2b(self._newer).digest(), blake2b(self._older).digest()]


def _places(digest: bytes) -> tuple[int, ...]:
    bits = int.from_bytes(digest[: 3 * PLACES], "little")
    return tuple(bits >> 24 * place & FILTER_BITS - 1 for place in range(PLACES))
