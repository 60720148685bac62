"""The arithmetic of the modeled runner: hashes that are stored where a model would store K, V and state.

Owns what each word of the arena means, how it is read back, and what passes between ranks. Must never import torch, and
never look at a byte that a real model of these bands would not read. Invariant: the context of a position is a hash of
every live byte that the position sees, in every band, on every rank, so that one stale, foreign or missing byte changes
it and everything that follows; and it is the same however layers are split over stages, and stages over tensor ranks.

Words are uint64. The model is `depth` blocks; a block has one layer for each band, and all of them read what entered
the block: in[1,p] = x[p] = token[p] + p * GOLDEN, and in[d+1,p] = out[d,p], the sum that the layers of block d make.

    token band b:       R[b,p] = R[b,p-1] + mix(in[p] + salt[b])               stored at position p of the band's page
    seen of it at p:    H[b,p] = sum of mix(R[b,i] + i * GOLDEN) over the positions i that p sees in b
    state word j:       S[j,p] = S[j,p-1] + mix(in[p] + salt[j])               the slot holds the newest one
    first block:        out[p] = sum over b of mix(H[b,p] + salt[b]) + mix(sum over j of mix(S[j,p] + j * GOLDEN))
    every later one:    out[p] = in[p] + sum over b of mix(H[b,p]) + mix(S[0,p])
    draw at p:          out[p] of the last block

A window band of W tokens sees i > p - W, full attention every i <= p. A band may store `copies` words per position and
layer, word j being the first one + j * GOLDEN, so that units of different bands have different sizes; all are read. The
state of the first block has `STATE_WORDS` words, of later ones one. A model of one block and full attention alone draws
H[full,p] itself.

Every tensor rank of a stage stores and reads everything; what a layer adds to `out` is the sum over the ranks of each
one's finding times its weight, and the weights add up to 1: right when every rank found the same, else garbage for all.
Between stages pass in[p] and out[p] so far. `forward` is a generator: it yields what it exchanges with other ranks, so
that processes, and simulations of many ranks in one thread, run the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int64s
from daemon.rank.batch import BandPages, Batch
from daemon.rank.layout import Layout
from daemon.rank.noise import GOLDEN, Hashes, mix

STATE_WORDS = 30  # of the first block; with the one of a second block they fit a unit of 256 bytes
STATE_SALT = np.uint64(0x5851F42D4C957F2D)


class TokenLayer(NamedTuple):
    """A layer of block `block` that stores in the token band number `band` of the chain.

    `words` uint64[units, page_size, copies].
    """

    block: int
    band: int
    window_tokens: int
    words: NDArray[np.uint64]


class StateLayer(NamedTuple):
    """A recurrent layer of block `block`; `words` uint64[units, STATE_WORDS or 1]."""

    block: int
    words: NDArray[np.uint64]


ToyLayer = TokenLayer | StateLayer


class ToyStage(NamedTuple):
    """The layers of one stage in order, of a model of `depth` blocks.

    `opens`: the first layer here is the first of its block. `bare`: the model is one layer of full attention.
    """

    layout: Layout
    depth: int
    opens: bool
    bare: bool
    layers: list[ToyLayer]


class Exchange(NamedTuple):
    """What a forward does with other ranks: `reduce` sums over the stage's tensor ranks, `broadcast` takes rank 0's,
    `send` goes to the next stage, `receive` comes from the one before. The answer has the shape of `values`.
    """

    call: str
    values: Hashes


Exchanging = Generator[Exchange, Hashes, Hashes]


def weight_of(rank: int, ranks: int) -> np.uint64:
    """What a tensor rank's finding counts: odd for all but the last, and all of them add up to 1."""
    if rank < ranks - 1:
        return np.uint64(2 * rank + 3)
    return np.uint64((1 - sum(2 * other + 3 for other in range(ranks - 1))) % 2**64)


def salt_of(window_tokens: int) -> np.uint64:
    """What tells a band's hashes from another's; 0 for full attention."""
    return mix(np.array([window_tokens], dtype=np.uint64) * GOLDEN)[0] if window_tokens else np.uint64(0)


def inputs_of(tokens: Int64s, positions: Int64s) -> Hashes:
    """x: uint64[T] of token ids and their positions."""
    return tokens.astype(np.uint64) + positions.astype(np.uint64) * GOLDEN


def forward(batch: Batch, tokens: Int64s, stage: ToyStage) -> Exchanging:
    """Store the batch's tokens in every layer of the stage and return the draws uint64[k] of its sampling rows.

    A stage before the last one returns none. Of the last block only the sampling rows' last positions are read.
    """
    layout, block = stage.layout, stage.layers[0].block
    lasts = batch.offsets[1:][batch.sampled] - 1
    if layout.first:
        entered = inputs_of(tokens, batch.positions)
        out = np.zeros_like(entered)
    else:
        entered, out = yield Exchange("receive", np.zeros((2, tokens.size), dtype=np.uint64))
        entered, out = out if stage.opens else entered, out.copy()
    for layer in stage.layers:
        if layer.block > block:
            block, entered, out = layer.block, out, out.copy()
        last_only = block == stage.depth
        if isinstance(layer, TokenLayer):
            found = _attend(layer, batch, entered, last_only=last_only, bare=stage.bare)
        else:
            found = _advance(layer, batch, entered)
            found = found[lasts] if last_only else found
        if layout.ranks > 1:
            found = yield Exchange("reduce", found * weight_of(layout.rank, layout.ranks))
        if last_only:
            out[lasts] += found
        else:
            out += found
    if layout.last:
        return out[lasts]
    yield Exchange("send", np.stack([entered, out]))
    return out[:0]


def _attend(layer: TokenLayer, batch: Batch, entered: Hashes, *, last_only: bool, bare: bool) -> Hashes:
    """Store a token layer's words and return what it adds: uint64[T], or uint64[k] of the sampling rows."""
    salt = salt_of(layer.window_tokens)
    _store(layer, batch, mix(entered + salt))
    seen = _seen(layer, batch, last_only=last_only)
    if bare:
        return seen
    return mix(seen + salt) if layer.block == 1 else mix(seen)


def _advance(layer: StateLayer, batch: Batch, entered: Hashes) -> Hashes:
    """Advance the rows' states by the batch's tokens and return what each position adds, uint64[T]."""
    numbers = np.arange(layer.words.shape[1], dtype=np.uint64)
    steps = mix(entered[:, None] + (numbers + np.uint64(1)) * STATE_SALT)
    words = _running(steps, _carried_state(layer.words, batch), batch)
    layer.words[batch.slots] = words[batch.offsets[1:] - 1]
    return mix(mix(words + numbers * GOLDEN).sum(1, dtype=np.uint64)) if layer.block == 1 else mix(words[:, 0])


def _running(steps: Hashes, carry: Hashes, batch: Batch) -> Hashes:
    """Sums along each row of uint64[T, w], continued from `carry` uint64[n, w]."""
    sums = np.cumsum(steps, axis=0, dtype=np.uint64)
    firsts = batch.offsets[:-1]
    base = carry - (sums[firsts] - steps[firsts])
    sums += np.repeat(base, batch.counts, axis=0)
    return sums


def _store(layer: TokenLayer, batch: Batch, steps: Hashes) -> None:
    """Running hashes of each row's new positions, continued from the page that holds its last stored one."""
    words, pages = layer.words, _pages(layer, batch)
    before = np.maximum(batch.starts.astype(np.int64) - 1, 0)
    places = before // batch.page_size - pages.first
    n = np.arange(batch.rows.size)
    carry = words[pages.tables[n, np.maximum(places, 0)], before % batch.page_size, 0]
    carry = np.where(batch.starts > 0, carry, np.uint64(0))
    sums = _running(steps[:, None], carry[:, None], batch)
    words[pages.write_pages, batch.write_slots] = sums + _copies(words)


def _copies(words: NDArray[np.uint64]) -> Hashes:
    return np.arange(words.shape[2], dtype=np.uint64) * GOLDEN


def _seen(layer: TokenLayer, batch: Batch, *, last_only: bool) -> Hashes:
    """What positions see of a band: uint64[T], or uint64[k] of the sampling rows' last positions.

    Every visible position is read through the band's table, once per row.
    """
    words, pages = layer.words, _pages(layer, batch)
    rows = batch.sampled if last_only else np.arange(batch.rows.size)
    if rows.size == 0:
        return np.zeros(0, dtype=np.uint64)
    ends = batch.starts[rows].astype(np.int64) + batch.counts[rows]
    queries = ends - 1 if last_only else batch.starts[rows].astype(np.int64)
    low = np.maximum(queries - layer.window_tokens + 1, 0) if layer.window_tokens else np.zeros_like(queries)
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
    first = np.maximum(at - layer.window_tokens + 1, 0) if layer.window_tokens else np.zeros_like(at)
    return sums[at + 1 + shift] - sums[first + shift]


def _pages(layer: TokenLayer, batch: Batch) -> BandPages:
    pages = batch.bands[layer.band]
    assert pages is not None, "a stored band has pages"
    return pages


def _carried_state(words: NDArray[np.uint64], batch: Batch) -> Hashes:
    """The rows' slots uint64[n, w]; zero for a row that starts, whatever its slot holds."""
    return np.where(batch.starts[:, None] > 0, words[batch.slots], np.uint64(0))
