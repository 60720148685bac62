"""Digests that more than one process computes: of the sampled tokens, and of what was performed for each op.

Owns the one definition, so that ranks, the daemon's result processor and replay cannot disagree about it. Must never
read anything but its arguments. Invariant: one link per step of an epoch, in seq order, steps without a forward too.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from allocator.effects import Effect, canonical_bytes

DIGEST_BYTES = 16
SAMPLED_START = bytes(DIGEST_BYTES)
EFFECTS_DIGEST_BYTES = 4  # per op: enough to name the op, beside the layout digest that says whether anything differs


def sampled_digest(previous: bytes, seq: int, rows: bytes, generations: bytes, tokens: bytes) -> bytes:
    """The next link of the token digest: BLAKE2b, 16 bytes, over previous link, seq (int64 LE) and the three columns.

    `rows` and `generations` are int32 columns, `tokens` int64, as in `Report`. The first step of an epoch links to
    `SAMPLED_START`.
    """
    assert len(previous) == DIGEST_BYTES, f"the previous link has {len(previous)} bytes, not {DIGEST_BYTES}"
    assert len(rows) == len(generations), f"{len(rows)} bytes of rows, {len(generations)} of generations"
    assert 2 * len(rows) == len(tokens), f"{len(rows)} bytes of int32 rows, {len(tokens)} of int64 tokens"
    link = blake2b(previous, digest_size=DIGEST_BYTES)
    link.update(seq.to_bytes(8, "little"))
    link.update(rows)
    link.update(generations)
    link.update(tokens)
    return link.digest()


def effects_column(performed: Sequence[Effect], ends: Sequence[int]) -> bytes:
    """What a rank performed for the ops of a step: `EFFECTS_DIGEST_BYTES` each, not chained.

    The first entry is of the waits that the launch before needed, then one per op. `ends` are the places in `performed`
    at which each is complete, as `PhysicalChain.apply` plans them; what was performed beyond counts with the last.
    """
    column, begin, last = [], 0, len(ends) - 1
    for place, end in enumerate(ends):
        effects = list(performed[begin:] if place == last else performed[begin:end])
        column.append(blake2b(canonical_bytes(effects), digest_size=EFFECTS_DIGEST_BYTES).digest())
        begin = end
    return b"".join(column)
