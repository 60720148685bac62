"""Rows and batches: translation of a forward's columns, and every contradiction refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.columns import pack_i32, pack_i64
from allocator.geometry import BandGeometry
from daemon.rank.batch import Batch, build_batch
from daemon.rank.errors import StepRefused
from daemon.rank.rows import RowTable
from ipc.messages import EXPLICIT, SAMPLE, Forward, RowSampling, Sampling

PAGE = 4
BANDS = [BandGeometry("full", "full", 256)]


def forward(
    rows: list[tuple[int, int, int, int, int]],
    tokens: list[int],
    entries: list[tuple[int, int, int]] = [],  # noqa: B006
    sampling: list[RowSampling] = [],  # noqa: B006
) -> Forward:
    """A forward from (row, generation, start, count, flags) and (row, index, page)."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    new = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    row, generation, start, count = (pack_i32(column) for column in table[:4])
    flags = table[4].astype(np.uint8).tobytes()
    entry, index, page = (pack_i32(column) for column in new)
    return Forward(row, generation, start, count, flags, pack_i64(tokens), entry, index, page, sampling)


def built(rows: RowTable, item: Forward, moved: int = 100) -> Batch:
    """The batch with virtual page v bound to physical unit v + `moved`; the sink stays the sink."""
    table = np.arange(50, dtype=np.int32) + moved
    table[0] = 0
    return build_batch(1, item, rows, [table], BANDS, PAGE)


def test_a_mixed_batch_is_translated() -> None:
    """A decode row and a chunk: positions, pages and slots of every token, carried and sampled rows."""
    rows = RowTable(4, 8)
    built(rows, forward([(2, 0, 0, 5, EXPLICIT | SAMPLE)], [1, 2, 3, 4, 5], [(2, 0, 7), (2, 1, 3)]))
    batch = built(
        rows,
        forward([(2, 0, 5, 1, SAMPLE), (0, 0, 0, 6, EXPLICIT)], [10, 11, 12, 13, 14, 15], [(0, 0, 9), (0, 1, 1)]),
    )
    assert batch.tokens.tolist() == [-1, 10, 11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [5, 0, 1, 2, 3, 4, 5]
    full = batch.bands[0]
    assert full is not None
    assert full.write_pages.tolist() == [103, 109, 109, 109, 109, 101, 101]
    assert batch.write_slots.tolist() == [1, 0, 1, 2, 3, 0, 1]
    assert full.tables.tolist() == [[107, 103], [109, 101]]
    assert (batch.carried.tolist(), batch.sampled.tolist()) == ([0], [0])


def test_written_pages_are_virtual() -> None:
    """The pages a forward writes, each once, by virtual id, row by row."""
    rows = RowTable(4, 8)
    first = forward([(1, 0, 0, 9, EXPLICIT | SAMPLE)], list(range(9)), [(1, 0, 8), (1, 1, 5), (1, 2, 6)])
    built(rows, first)
    assert rows.written_pages(first, PAGE).tolist() == [8, 5, 6]
    second = forward([(1, 0, 9, 1, SAMPLE)], [])
    built(rows, second)
    assert rows.written_pages(second, PAGE).tolist() == [6]


def test_a_higher_generation_starts_afresh() -> None:
    """Table, length and sampling of the old generation are void."""
    rows = RowTable(2, 4)
    item = RowSampling(0, 0, Sampling(temperature=0.5, seed=3, presence_penalty=1.0), 0, 9, pack_i64([4]))
    built(rows, forward([(0, 0, 0, 4, EXPLICIT | SAMPLE)], [1] * 4, [(0, 0, 2)], [item]))
    assert rows.sampling.temperature[0] == 0.5
    built(rows, forward([(0, 3, 0, 1, EXPLICIT)], [1], [(0, 0, 9)]))
    assert rows.tables[0].tolist() == [9, 0, 0, 0]
    assert rows.sampling.temperature[0] == 0
    assert not rows.sampling.penalized[0]
    assert not rows.sampling.banned


STARTED = forward([(1, 4, 0, 3, EXPLICIT | SAMPLE)], [1, 2, 3], [(1, 0, 2)])
CONTRADICTIONS = {
    "no rows": (forward([], []), "columns of 0"),
    "row out of range": (forward([(9, 0, 0, 1, EXPLICIT)], [1]), "row 9"),
    "row twice": (forward([(1, 4, 3, 1, 0), (1, 4, 3, 1, 0)], []), "twice"),
    "an old generation": (forward([(1, 3, 3, 1, 0)], []), "generation 3, known 4"),
    "a gap in positions": (forward([(1, 4, 5, 1, 0)], []), "starts at 5, but holds 3"),
    "a count of nothing": (forward([(1, 4, 3, 0, EXPLICIT)], []), "0 tokens"),
    "no page": (forward([(1, 4, 3, 2, EXPLICIT)], [1, 2]), "no page for position 4"),
    "too few tokens": (forward([(1, 4, 3, 1, EXPLICIT)], []), "0 explicit tokens for 1"),
    "carried rows of two": (forward([(1, 4, 3, 2, 0)], [], [(1, 1, 3)]), "must have one"),
    "a page index too high": (forward([(1, 4, 3, 1, 0)], [], [(1, 77, 3)]), "table entry 77"),
    "a negative row": (forward([(-1, 4, 3, 1, 0)], []), "row -1 in a forward"),
    "a page of a negative row": (forward([(1, 4, 3, 1, 0)], [], [(-1, 0, 3)]), "table entry 0 of row -1"),
    "a page at a negative index": (forward([(1, 4, 3, 1, 0)], [], [(1, -1, 3)]), "table entry -1 of row 1"),
    "a start before the beginning": (forward([(1, 5, -1, 1, EXPLICIT)], [1]), "from position -1"),
    "carried without a sample": (forward([(2, 0, 0, 1, 0)], [], [(2, 0, 4)]), "no sampled token yet in generation 0"),
    "sampling of a stranger": (
        forward([(1, 4, 3, 1, 0)], [], [], [RowSampling(1, 9, Sampling(), 0)]),
        "generation 9",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused(name: str) -> None:
    """A forward that contradicts what the rank holds is refused, and the text says why."""
    rows = RowTable(4, 8)
    built(rows, STARTED)
    item, text = CONTRADICTIONS[name]
    with pytest.raises(StepRefused, match=text):
        built(rows, item)
