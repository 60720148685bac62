"""Batches over several bands: what each lists, what is refused, and that a translation is never older than its step."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from allocator.columns import Int32s, pack_i32, pack_i64
from allocator.geometry import BandGeometry
from allocator.ops import Flush
from daemon.rank.batch import Batch, build_batch
from daemon.rank.errors import StepRefused
from daemon.rank.rows import RowTable
from ipc.messages import EXPLICIT, SAMPLE, Forward
from tests.rank.test_step_bands import FULL, STATE, WINDOW, Bands

PAGE = 4
BANDS = [
    BandGeometry("state", "state", 512),
    BandGeometry("window:16", "window", 768, 16),
    BandGeometry("window:6", "window", 256, 6),
    BandGeometry("full", "full", 768),
]
IDS, SLOTS = 60, 9


def id_tables() -> list[Int32s]:
    """Virtual id v of band b is unit 100 * (b + 1) + v; id 0 reads as the sink, or as the padding slot 77."""
    tables = [np.arange(SLOTS + 1, dtype=np.int32) + 100]
    tables += [np.arange(IDS + 1, dtype=np.int32) + 100 * (band + 1) for band in (1, 2, 3)]
    for table in tables:
        table[0] = 0
    tables[0][0] = 77
    return tables


def forward(
    rows: list[tuple[int, int, int, int]], entries: list[tuple[int, int, int]], slots: list[int], carried: bool = False
) -> Forward:
    """A forward from (row, generation, start, count) and (row, index, page); tokens are 1, or the last sampled."""
    row, generation, start, count = (pack_i32(column) for column in zip(*rows, strict=True))
    entry, index, page = (pack_i32(column) for column in np.array(entries, dtype=np.int64).reshape(-1, 3).T)
    tokens = [] if carried else [1] * sum(one[3] for one in rows)
    flags = bytes([SAMPLE | (0 if carried else EXPLICIT)] * len(rows))
    return Forward(
        row, generation, start, count, flags, pack_i64(tokens), entry, index, page, [], pack_i32(slots)
    )  # fmt: skip


def build(rows: RowTable, item: Forward, tables: list[Int32s] | None = None, page: int = PAGE) -> Batch:
    """The batch in the bands above."""
    return build_batch(1, item, rows, tables or id_tables(), BANDS, page)


def entries_of(row: int, pages: list[int]) -> list[tuple[int, int, int]]:
    """Table entries from index 0 on."""
    return [(row, index, page) for index, page in enumerate(pages)]


def test_each_band_lists_what_its_window_shows() -> None:
    """A decode row at position 20 and a fresh chunk: 6 tokens back, 16 back, and everything; slots in batch order."""
    rows = RowTable(4, 12)
    build(rows, forward([(2, 0, 0, 20)], entries_of(2, [11, 12, 13, 14, 15]), [4]))
    item = forward([(2, 0, 20, 1), (0, 0, 0, 9)], [(2, 5, 16), *entries_of(0, [31, 32, 33])], [4, 7])
    batch = build(rows, item)
    state, wide, narrow, full = batch.bands
    assert state is None
    assert wide is not None
    assert narrow is not None
    assert full is not None
    assert (wide.first.tolist(), narrow.first.tolist(), full.first.tolist()) == ([1, 0], [3, 0], [0, 0])
    assert narrow.tables.tolist() == [[314, 315, 316], [331, 332, 333]]
    assert wide.tables.tolist() == [[212, 213, 214, 215, 216], [231, 232, 233, 0, 0]]
    assert full.tables.tolist() == [[411, 412, 413, 414, 415, 416], [431, 432, 433, 0, 0, 0]]
    assert narrow.write_pages.tolist() == [316, *[331] * 4, *[332] * 4, 333]
    assert batch.slots.tolist() == [104, 107]
    assert [pages.window_tokens for pages in (wide, narrow, full)] == [16, 6, 0]


def test_tables_of_long_rows_stay_narrow_at_one_token_a_page() -> None:
    """At page size 1 a window band lists a window's worth of pages, however long the row is."""
    rows = RowTable(1, 4000)
    tables = [np.arange(4001, dtype=np.int32) + 100 for _ in BANDS]
    build(rows, forward([(0, 0, 0, 3999)], entries_of(0, list(range(1, 4001))), [1]), tables, 1)
    batch = build(rows, forward([(0, 0, 3999, 1)], [], [1]), tables, 1)
    assert [pages and pages.tables.shape for pages in batch.bands] == [None, (1, 16), (1, 6), (1, 4000)]


@pytest.mark.parametrize("seed", range(40))
def test_every_visible_position_is_where_its_page_is(seed: int) -> None:
    """Random rows, chunks, page sizes and retired units: visible positions lie where the id tables say, and nothing
    else is listed."""
    chance = random.Random(seed)
    page, rows = chance.choice([1, 2, 4, 16, 64]), RowTable(8, 400)
    lengths = {row: chance.randrange(120) for row in chance.sample(range(8), chance.randint(1, 8))}
    counts = {row: chance.choice([1, 1, chance.randint(1, 60)]) for row in lengths}
    total = sum((lengths[row] + counts[row] + page - 1) // page for row in lengths)
    ids = iter(chance.sample(range(1, total + 1), total))
    tables = [np.array([0, *chance.sample(range(1, total * 2), total)], dtype=np.int32) for _ in BANDS]
    table = {row: [next(ids) for _ in range((lengths[row] + counts[row] + page - 1) // page)] for row in lengths}
    for row, length in lengths.items():
        for band, info in enumerate(BANDS):
            gone = max(length + 1 - info.window_tokens, 0) // page if info.window_tokens else 0
            tables[band][table[row][:gone]] = 0
    started = [(row, 0, 0, length) for row, length in lengths.items() if length]
    if started:
        rows.apply(forward(started, [], []))
    items = [(row, 0, length, counts[row]) for row, length in lengths.items()]
    item = forward(
        items, [one for row in lengths for one in entries_of(row, table[row])], list(range(1, len(items) + 1))
    )
    batch = build_batch(1, item, rows, tables, BANDS, page) if total >= len(items) else None
    assert batch is not None
    for band, info in enumerate(BANDS[1:], 1):
        pages = batch.bands[band]
        assert pages is not None
        for at, (row, _, start, count) in enumerate(items):
            low = max(start + 1 - info.window_tokens, 0) if info.window_tokens else 0
            shown = range(low // page, (start + count - 1) // page + 1)
            assert pages.first[at] == shown[0]
            want = [int(tables[band][table[row][index]]) for index in shown]
            assert pages.tables[at].tolist() == want + [0] * (pages.tables.shape[1] - len(want))
            new = pages.write_pages[batch.offsets[at] : batch.offsets[at + 1]].tolist()
            assert new == [int(tables[band][table[row][p // page]]) for p in range(start, start + count)]


def refused(text: str, item: Forward, tables: list[Int32s] | None = None) -> None:
    """A row of 20 stored tokens in pages 11 to 15 and slot 4; then `item` is refused with this text."""
    rows = RowTable(4, 8)
    build(rows, forward([(2, 0, 0, 20)], entries_of(2, [11, 12, 13, 14, 15]), [4]))
    with pytest.raises(StepRefused, match=text):
        build(rows, item, tables)


def with_sink(band: int, page: int) -> list[Int32s]:
    """The id tables with one unbound id."""
    tables = id_tables()
    tables[band][page] = tables[band][0]
    return tables


DECODE = forward([(2, 0, 20, 1)], [(2, 5, 16)], [4])


def test_a_visible_page_must_be_bound_in_every_band_that_stores_something() -> None:
    """Written or only read, in a window or the owner; what a window no longer shows may be gone."""
    refused("row 2 has no page for position 20 in band window:6", DECODE, with_sink(2, 16))
    refused("row 2 has no page for position 20 in band full", DECODE, with_sink(3, 16))
    refused("row 2 has no page for position 12 in band window:6", DECODE, with_sink(2, 14))
    refused("row 2 has no page for position 4 in band window:16", DECODE, with_sink(1, 12))
    refused("row 2 has no page for position 0 in band full", DECODE, with_sink(3, 11))
    rows = RowTable(4, 8)
    build(rows, forward([(2, 0, 0, 20)], entries_of(2, [11, 12, 13, 14, 15]), [4]))
    retired = id_tables()
    retired[2][[11, 12, 13]] = 0
    retired[1][11] = 0
    build(rows, DECODE, retired)


def test_a_band_that_stores_nothing_here_is_not_looked_at() -> None:
    """A stage without the owner and without state: their ids are unbound, and nothing of them is in the batch."""
    rows, tables = RowTable(4, 8), id_tables()
    tables[3][:] = 0
    tables[0][:] = 77
    bands = [msgspec.structs.replace(band, unit_bytes=0 if band.kind != "window" else 256) for band in BANDS]
    item = forward([(0, 0, 0, 5)], entries_of(0, [1, 2]), [3])
    batch = build_batch(1, item, rows, tables, bands, PAGE)
    assert [pages is None for pages in batch.bands] == [True, False, False, True]
    assert batch.slots.size == 0


def test_every_row_needs_a_slot_of_its_own() -> None:
    """A missing, surplus, shared, unknown or unbound working slot is refused by name."""
    two = [(2, 0, 20, 1), (1, 0, 0, 1)]
    more = [(2, 5, 16), (1, 0, 17)]
    refused("0 state slots for 1 rows", forward(two[:1], more[:1], []))
    refused("1 state slots for 2 rows", forward(two, more, [4]))
    refused("3 state slots for 2 rows", forward(two, more, [4, 5, 6]))
    refused("rows 2 and 1 both have working slot 4", forward(two, more, [4, 4]))
    refused("state slots 0..4; slot ids run from 1 to 9", forward(two, more, [4, 0]))
    refused("state slots 4..10; slot ids run from 1 to 9", forward(two, more, [4, 10]))
    refused("row 1 has working slot 5, which is not bound", forward(two, more, [4, 5]), with_sink(0, 5))


def test_a_model_without_state_has_no_slots() -> None:
    """Slots in a forward for bands without state contradict them."""
    item = forward([(0, 0, 0, 1)], entries_of(0, [1]), [1])
    with pytest.raises(StepRefused, match="without recurrent state"):
        build_batch(1, item, RowTable(1, 2), id_tables()[1:], BANDS[1:], PAGE)


def test_ids_and_positions_beyond_their_tables_are_refused() -> None:
    """A page id that no id table has, and a row that outgrows its own table."""
    refused("pages 61..61; page ids run from 1 to 60", forward([(2, 0, 20, 1)], [(2, 5, 61)], [4]))
    refused("pages -1..-1", forward([(2, 0, 20, 1)], [(2, 5, -1)], [4]))
    refused("row 2 ends at 33; a row has 8 pages of 4", forward([(2, 0, 20, 13)], [(2, 5, 16)], [4]))


def test_incident_21_a_row_handed_out_again_has_nothing_of_the_old_owner() -> None:
    """A chunk is aborted while it runs and its row starts a new generation: the old generation is stale from then on,
    and the new one must bring every page, its own slot and its own last token."""
    rows, entries = RowTable(4, 8), entries_of(2, [11, 12])
    build(rows, forward([(2, 5, 0, 8)], entries, [4]))
    build(rows, forward([(2, 6, 0, 3)], [(2, 0, 21)], [4]))
    with pytest.raises(StepRefused, match="row 2 of generation 5, known 6"):
        build(rows, forward([(2, 5, 8, 1)], [(2, 2, 13)], [4]))
    with pytest.raises(StepRefused, match="starts at 8, but holds 3"):
        build(rows, forward([(2, 6, 8, 1)], [], [4]))
    again = RowTable(4, 8)
    build(again, forward([(2, 5, 0, 8)], entries, [4]))
    with pytest.raises(StepRefused, match="no page for position 4"):
        build(again, forward([(2, 6, 0, 5)], [(2, 0, 21)], [4]))
    with pytest.raises(StepRefused, match="no sampled token yet in generation 7"):
        build(again, forward([(2, 7, 3, 1)], [(2, 0, 21)], [4], carried=True))


def test_written_ids_name_the_slots_and_the_written_pages_only() -> None:
    """Per band, row by row: the slots, and of each row's pages those that the forward writes."""
    rows = RowTable(4, 8)
    build(rows, forward([(2, 0, 0, 20)], entries_of(2, [11, 12, 13, 14, 15]), [4]))
    item = forward([(2, 0, 20, 1), (0, 0, 0, 5)], [(2, 5, 16), *entries_of(0, [32, 31])], [9, 3])
    build(rows, item)
    found = rows.written_ids(item, BANDS, PAGE)
    assert [found[band].tolist() for band in range(4)] == [[9, 3], [16, 32, 31], [16, 32, 31], [16, 32, 31]]


class Seen(Bands):
    """Bands whose runner keeps each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        launch = self.runner.launch

        def launched(batch: Batch) -> Any:
            self.batches.append(batch)
            return launch(batch)

        self.runner.launch = launched  # type: ignore[method-assign]


def test_incident_14_a_batch_is_translated_behind_every_effect_of_its_step() -> None:
    """A load of window pages, then a take that pushes the window band aside, then a forward that reads those pages, all
    in one step: the batch lists where they lie in the end, the load landed there, and state bytes are intact."""
    bands = Seen()
    slots, pages = bands.take(1, 2)
    bands.step(pages, slots)
    column, places = np.array(pages, dtype=np.int32), np.array([0, 1])
    bands.ops.append(bands.chain.backup(1, [None, column, None], [None, places, None]))
    bands.step()
    bands.end(1)
    tables, arena = bands.worker.executor.tables, bands.runner.device.arena
    moved, use = 0, 1
    while bands.chain.refusal((0, 1, 1)) is None:
        use += 1
        before = tables[WINDOW][pages].tolist()
        arena.units(WINDOW)[before] = 0
        bands.ops.append(bands.chain.load(use, [None, column, None], [None, places, None]))
        bands.step(bands.take(0, 1)[1], slots, stored=pages)
        moved += tables[WINDOW][pages].tolist() != before
        for band in (WINDOW, FULL):
            listed = bands.batches[-1].bands[band]
            assert listed is not None
            assert listed.tables[0, :2].tolist() == tables[band][pages].tolist()
            assert not bands.wrong(band, pages)
        assert not bands.wrong(STATE, slots)
        bands.end(use)
    assert moved > 1


def test_S7_a_hit_finds_its_state_in_its_recycled_slot() -> None:
    """A recycled slot is taken for a request with a hit and filled by a state copy in the step of its first forward:
    what that forward finds there is the cached state, though a flush moved the cached slot in that step, too."""
    bands = Bands()
    (recycled, other, kept), pages = bands.take(3, 3)
    bands.step(pages, [recycled, other, kept])
    bands.free(state=[recycled, other])
    bands.step()
    bands.step()
    slots, more = bands.take(1, 1)
    before = int(bands.worker.executor.tables[STATE][kept])
    bands.ops.append(Flush(8))
    bands.ops.append(bands.chain.copy_state(np.array([kept], dtype=np.int32), np.array(slots, dtype=np.int32)))
    found: list[int] = []
    launch = bands.runner.launch

    def launched(batch: Batch) -> Any:
        found.extend(bands.runner.device.arena.units(STATE)[batch.slots[0]].tolist())
        return launch(batch)

    bands.runner.launch = launched  # type: ignore[method-assign]
    bands.step(more, slots)
    assert slots == [recycled]
    assert int(bands.worker.executor.tables[STATE][kept]) != before
    assert set(found) == {kept * 3 + STATE + 1}
    assert not bands.wrong(STATE, [kept, *slots])
