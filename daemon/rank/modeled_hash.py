"""The arithmetic of the modeled runner: hashes that are stored where a model would store K, V and state.

Owns what each word of the arena means and how it is read back. Must never import torch, and never look at a byte that a
real model of these bands would not read. Invariant: the context of a position is a hash of every live byte that the
position sees, in every band, so that one stale, foreign or missing byte changes it and everything that follows.

Words are uint64. x[p] = token[p] + p * GOLDEN. Two layers, as a real model has: the second reads through the first.

    token band b, layer 1:   R[b,p] = R[b,p-1] + mix(x[p] + salt[b])           stored at position p of the band's page
    seen of it at p:         H[b,p] = sum of mix(R[b,i] + i * GOLDEN) over the positions i that p sees in b
    state word j, layer 1:   S[j,p] = S[j,p-1] + mix(x[p] + salt[j])           the slot holds the newest one
    context of p:            C[p]   = sum over b of mix(H[b,p] + salt[b]) + mix(sum over j of mix(S[j,p] + j * GOLDEN))
    layer 2, every band:     U[b,p] = U[b,p-1] + mix(C[p] + salt[b]), stored beside layer 1; the state has one such word
    draw at p:               C[p] + sum over b of mix(what p sees of U[b]) + mix(U of the state)

A window band of W tokens sees i > p - W, full attention every i <= p. A band may store `copies` words per position and
layer, word j being the first one + j * GOLDEN, so that units of different bands have different sizes; all are read. The
model of full attention alone has one layer: its draw is H[full,p].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int64s
from daemon.rank.batch import BandPages, Batch
from daemon.rank.noise import GOLDEN, Hashes, mix

STATE_WORDS = 30  # of layer 1; with the one of layer 2 they fit a unit of 256 bytes
STATE_SALT = np.uint64(0x5851F42D4C957F2D)


class TokenBand(NamedTuple):
    """The token band number `band` of the chain: uint64[units, page_size, copies] per layer, one or two layers."""

    band: int
    window_tokens: int
    layers: list[NDArray[np.uint64]]


class StateBand(NamedTuple):
    """The state band: `near` uint64[units, STATE_WORDS] of layer 1, `deep` uint64[units, 1] of layer 2."""

    near: NDArray[np.uint64]
    deep: NDArray[np.uint64]


def salt_of(window_tokens: int) -> np.uint64:
    """What tells a band's hashes from another's; 0 for full attention."""
    return mix(np.array([window_tokens], dtype=np.uint64) * GOLDEN)[0] if window_tokens else np.uint64(0)


def inputs_of(tokens: Int64s, positions: Int64s) -> Hashes:
    """x: uint64[T] of token ids and their positions."""
    return tokens.astype(np.uint64) + positions.astype(np.uint64) * GOLDEN


def forward(batch: Batch, tokens: Int64s, bands: list[TokenBand], state: StateBand | None) -> Hashes:
    """Store the batch's tokens in every band and return the draws uint64[k] of its sampling rows."""
    x = inputs_of(tokens, batch.positions)
    for band in bands:
        _store(band, 0, batch, mix(x + salt_of(band.window_tokens)))
    if state is None and len(bands) == 1 and len(bands[0].layers) == 1:
        return _seen(bands[0], 0, batch, last_only=True)
    contexts = np.zeros(x.size, dtype=np.uint64)
    for band in bands:
        contexts += mix(_seen(band, 0, batch, last_only=False) + salt_of(band.window_tokens))
    if state is not None:
        contexts += mix(_advance(state, batch, x))
    lasts = batch.offsets[1:][batch.sampled] - 1
    draws = contexts[lasts]
    for band in bands:
        _store(band, 1, batch, mix(contexts + salt_of(band.window_tokens)))
        draws += mix(_seen(band, 1, batch, last_only=True))
    if state is not None:
        deep = _running(mix(contexts + STATE_SALT)[:, None], _carried_state(state.deep, batch), batch)
        state.deep[batch.slots] = deep[batch.offsets[1:] - 1]
        draws += mix(deep[lasts, 0])
    return draws


def _running(steps: Hashes, carry: Hashes, batch: Batch) -> Hashes:
    """Sums along each row of uint64[T, w], continued from `carry` uint64[n, w]."""
    sums = np.cumsum(steps, axis=0, dtype=np.uint64)
    firsts = batch.offsets[:-1]
    base = carry - (sums[firsts] - steps[firsts])
    sums += np.repeat(base, batch.counts, axis=0)
    return sums


def _store(band: TokenBand, layer: int, batch: Batch, steps: Hashes) -> None:
    """Running hashes of each row's new positions, continued from the page that holds its last stored one."""
    words, pages = band.layers[layer], _pages(band, batch)
    before = np.maximum(batch.starts.astype(np.int64) - 1, 0)
    places = before // batch.page_size - pages.first
    n = np.arange(batch.rows.size)
    carry = words[pages.tables[n, np.maximum(places, 0)], before % batch.page_size, 0]
    carry = np.where(batch.starts > 0, carry, np.uint64(0))
    sums = _running(steps[:, None], carry[:, None], batch)
    words[pages.write_pages, batch.write_slots] = sums + _copies(words)


def _copies(words: NDArray[np.uint64]) -> Hashes:
    return np.arange(words.shape[2], dtype=np.uint64) * GOLDEN


def _seen(band: TokenBand, layer: int, batch: Batch, *, last_only: bool) -> Hashes:
    """What positions see of a band: uint64[T], or uint64[k] of the sampling rows' last positions.

    Every visible position is read through the band's table, once per row.
    """
    words, pages = band.layers[layer], _pages(band, batch)
    rows = batch.sampled if last_only else np.arange(batch.rows.size)
    if rows.size == 0:
        return np.zeros(0, dtype=np.uint64)
    ends = batch.starts[rows].astype(np.int64) + batch.counts[rows]
    queries = ends - 1 if last_only else batch.starts[rows].astype(np.int64)
    low = np.maximum(queries - band.window_tokens + 1, 0) if band.window_tokens else np.zeros_like(queries)
    lengths = ends - low
    cuts = np.cumsum(lengths) - lengths
    owner = np.repeat(rows, lengths)
    positions = np.arange(int(lengths.sum())) - np.repeat(cuts - low, lengths)
    units = pages.tables[owner, positions // batch.page_size - pages.first[owner]]
    places = positions.astype(np.uint64) * GOLDEN
    read = words[units, positions % batch.page_size]
    hashes = mix(read[:, 0] + places) if words.shape[2] == 1 else mix(read + places[:, None]).sum(1, dtype=np.uint64)
    if last_only:
        return np.add.reduceat(hashes, cuts)
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    at, shift = batch.positions, np.repeat(cuts - low, batch.counts)
    first = np.maximum(at - band.window_tokens + 1, 0) if band.window_tokens else np.zeros_like(at)
    return sums[at + 1 + shift] - sums[first + shift]


def _pages(band: TokenBand, batch: Batch) -> BandPages:
    pages = batch.bands[band.band]
    assert pages is not None, "a stored band has pages"
    return pages


def _carried_state(words: NDArray[np.uint64], batch: Batch) -> Hashes:
    """The rows' slots uint64[n, w]; zero for a row that starts, whatever its slot holds."""
    return np.where(batch.starts[:, None] > 0, words[batch.slots], np.uint64(0))


def _advance(state: StateBand, batch: Batch, x: Hashes) -> Hashes:
    """Advance the rows' states by the batch's tokens; uint64[T]: the hash of all words behind each position."""
    numbers = np.arange(STATE_WORDS, dtype=np.uint64)
    steps = mix(x[:, None] + (numbers + np.uint64(1)) * STATE_SALT)
    words = _running(steps, _carried_state(state.near, batch), batch)
    state.near[batch.slots] = words[batch.offsets[1:] - 1]
    return mix(words + numbers * GOLDEN).sum(1, dtype=np.uint64)
