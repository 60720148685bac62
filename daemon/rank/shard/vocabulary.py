"""The vocabulary by rows: each tensor rank has some of the rows of the embedding and of the output head.

Owns both. Rows need not divide: the last part is filled up with zeros, which no token reads and whose logits are
dropped. Invariants: embedded tokens are bit for bit the whole table's (one rank adds a row, the others zeros); logits
are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from daemon.rank.group import Group
from daemon.rank.shard.cuts import Block, Part, Take, rows_of


def vocabulary_cut(rows: int, part: Part) -> Take:
    """A rank's rows of `rows`."""
    size = -(-rows // part.ranks)
    return Take(0, rows_of([Block(rows, 1, (part.rank * size, (part.rank + 1) * size))]))


def embed(lookup: Callable[[Tensor], Tensor], cut: Take, group: Group) -> Callable[[Tensor], Tensor]:
    """The embedding of `ids` by a `lookup` in the rank's own rows."""
    first, end = cut.ranges[0]
    if group.layout.ranks == 1:
        return lookup

    def forward(ids: Tensor) -> Tensor:
        outside = (ids < first) | (ids >= end)
        found = lookup((ids - first).masked_fill(outside, 0))
        return group.all_reduce(found.masked_fill_(outside[..., None], 0))

    return forward


def gathered_logits(head: Callable[[Tensor], Tensor], rows: int, group: Group) -> Callable[[Tensor], Tensor]:
    """Logits of all `rows` by a `head` of the rank's own."""
    if group.layout.ranks == 1:
        return head

    def forward(x: Tensor) -> Tensor:
        own = head(x)
        return group.all_gather(own, own.ndim - 1)[..., :rows]

    return forward
