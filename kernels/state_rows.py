"""The rows of a batch as recurrent layers see them: single tokens in one call, chunks cut into blocks of one size.

Owns the places: which tokens belong to which row, block and step. Must never touch a state. Every layer of a forward
shares one plan. A row that starts at position 0 is `fresh`: its state is zero whatever its slot holds.

    block i of a chunk row:  its tokens places[i, :]; where inside[i, :] is false the row's first token stands
                             in, which must change no state
    step j of the scan:      the j-th block of every chunk row that has one; rows are sorted by length, so those with
                             a j-th block come first
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.upload import upload

BLOCK_LEAST, BLOCK_MOST = 16, 64
PASS_BYTES = 2 << 20  # of states or blocks that a CPU takes at a time: they stay in its cache from load to store


class Singles(NamedTuple):
    """Rows with one token: `tokens` int64[b] (None: all tokens of the batch, in order), `slots` int64[b], `fresh`
    bool[b] (None: no row is fresh)."""

    tokens: Tensor | None
    slots: Tensor
    fresh: Tensor | None


class Blocks(NamedTuple):
    """Chunk rows cut for the torch ops; kernels find their tokens by `Chunks.begins` and `sizes`.

    `tokens` int64[s]: the places of their tokens in the batch, row after row; `rows` int64[s]: each token's row; `ends`
    int64[m]: tokens up to the end of each row; `places` int64[n, L] and `inside` bool[n, L]: the blocks; `steps`: for
    every step the int64 numbers of its blocks.
    """

    tokens: Tensor
    rows: Tensor
    ends: Tensor
    places: Tensor
    inside: Tensor
    steps: list[Tensor]


class Chunks(NamedTuple):
    """Rows with several tokens, the longest first.

    `slots` int64[m]; `fresh` bool[m] or None; `begins`, `sizes` int64[m]: the place of each row's first token and how
    many it has, at most `longest`; `blocks`: None where the plan is for kernels.
    """

    slots: Tensor
    fresh: Tensor | None
    begins: Tensor
    sizes: Tensor
    longest: int
    blocks: Blocks | None

    def cut(self) -> Blocks:
        """The blocks, of a plan that has them."""
        assert self.blocks is not None, "planned without blocks, for kernels"
        return self.blocks


class RowPlan(NamedTuple):
    """Both kinds of rows; None where the batch has none of a kind."""

    singles: Singles | None
    chunks: Chunks | None


def block_of(longest: int) -> int:
    """Tokens of a block for rows of at most `longest` tokens: a power of two."""
    return min(max(BLOCK_LEAST, 1 << (longest - 1).bit_length()), BLOCK_MOST)


def plan_rows(starts: Tensor, counts: Tensor, slots: Tensor, device: torch.device, cut_blocks: bool = True) -> RowPlan:
    """The plan of rows with `counts` tokens from positions `starts` in state `slots`; all int64[n] on the host.

    Uploads a few columns, as many for a long chunk as for a short one unless blocks are cut, and waits for none.
    """
    single = counts == 1
    places = counts.cumsum(0) - counts
    singles, chunks = None, None
    if single.any():
        tokens = None if single.all() else upload(places[single], device)
        singles = Singles(tokens, upload(slots[single], device), _fresh(starts[single], device))
    if not single.all():
        rows = torch.nonzero(~single).flatten()
        rows = rows[counts[rows].argsort(descending=True, stable=True)]
        counts, places = counts[rows], places[rows]
        blocks = _blocks(counts, places, device) if cut_blocks else None
        own = (upload(slots[rows], device), _fresh(starts[rows], device))
        chunks = Chunks(*own, upload(places, device), upload(counts, device), int(counts[0]), blocks)
    return RowPlan(singles, chunks)


def _fresh(starts: Tensor, device: torch.device) -> Tensor | None:
    fresh = starts == 0
    return upload(fresh, device) if device.type != "cpu" or fresh.any() else None  # kernels of a GPU always read it


def _blocks(counts: Tensor, places: Tensor, device: torch.device) -> Blocks:
    """Rows sorted by falling `counts`; `places`: where each begins in the batch."""
    block = block_of(int(counts[0]))
    numbers = torch.arange(counts.numel())
    ends = counts.cumsum(0)
    rows = torch.repeat_interleave(numbers, counts)
    tokens = torch.arange(int(ends[-1])) + (places - ends + counts)[rows]
    blocks = (counts + block - 1) // block
    firsts = blocks.cumsum(0) - blocks
    owners = torch.repeat_interleave(numbers, blocks)
    within = (torch.arange(owners.numel()) - firsts[owners])[:, None] * block + torch.arange(block)
    inside = within < counts[owners][:, None]
    blocked = torch.where(inside, places[owners][:, None] + within, places[owners][:, None])
    steps = [firsts[: int((blocks > step).sum())] + step for step in range(int(blocks[0]))]
    tokens, rows, ends, blocked, inside = (upload(column, device) for column in (tokens, rows, ends, blocked, inside))
    return Blocks(tokens, rows, ends, blocked, inside, [upload(step, device) for step in steps])


def load_states(states: Tensor, slots: Tensor, fresh: Tensor | None) -> Tensor:
    """A copy [m, ...] of the rows' states out of `states` [slots, ...]; zero for fresh rows, whatever is stored."""
    loaded = states.index_select(0, slots)
    if fresh is not None:
        loaded.masked_fill_(fresh.view(-1, *[1] * (loaded.ndim - 1)), 0)
    return loaded


def pieces(count: int, item_bytes: int) -> Iterator[slice]:
    """`count` items in groups of at most PASS_BYTES, at least one item."""
    size = max(PASS_BYTES // item_bytes, 1)
    for begin in range(0, count, size):
        yield slice(begin, begin + size)


def passes(states: Tensor, rows: Singles) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """The rows in pieces by the bytes of their states: which, their slots, which are fresh."""
    for own in pieces(rows.slots.numel(), states[0].numel() * states.element_size()):
        yield own, rows.slots[own], None if rows.fresh is None else rows.fresh[own]


def block_pieces(rows: Blocks, token_bytes: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The blocks of every step in pieces by the bytes of their tokens: which rows, the blocks' places and insides."""
    for blocks in rows.steps:
        for own in pieces(blocks.numel(), token_bytes * rows.places.shape[1]):
            yield slice(own.start, min(own.stop, blocks.numel())), rows.places[blocks[own]], rows.inside[blocks[own]]
