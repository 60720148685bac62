"""Warm-up: a prefill chunk, a drawn decode step and a move through a runner's own launch and device.

So no request pays for it. Owns the batches and effects. Must never leave anything behind but warm code: the caller runs
them in an arena of a few units that it throws away. They are made as the daemon's steps are, so everything on the way
runs: translation, attention, sampling, zero, copy, table update, and on a GPU the compilation of the kernels and the
blocks of pinned memory, of every size up to `COLUMN_MOST` ids, that columns travel in.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from allocator.columns import Int32s, pack_i32, pack_i64
from allocator.effects import Bind, Copy, Effect, Zero
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.physical.chain import resting_unit
from daemon.rank.batch import Batch, build_batch
from daemon.rank.device import Device
from daemon.rank.executor import Executor
from daemon.rank.rows import RowTable
from daemon.rank.runner import Launched
from ipc.messages import EXPLICIT, SAMPLE, Forward, RowSampling, Sampling

PROMPT_TOKENS = 32
COLUMN_MOST = 1 << 12  # ids of a column in one effect; larger ones may take a new block of pinned memory


def warm_up(
    open_arena: Callable[[StageGeometry], Device],
    launch: Callable[[Batch], Launched],
    stage: StageGeometry,
    page_size: int,
    tokens_max: int,
    explicit: bool = False,
) -> None:
    """Run both batches, of at most `tokens_max` tokens together, and the move, in a small arena like `stage`'s.

    `explicit`: the decode step brings its token, as with several stages, where the first has not sampled it.
    """
    count = max(min(PROMPT_TOKENS, tokens_max - 1), 1)
    pages = count // page_size + 1  # the decode step's position is `count`
    first_units, small = _small(stage, pages)
    device = open_arena(small)
    tables = [_id_table(*pair, pages) for pair in zip(small.bands, first_units, strict=True)]
    rows = RowTable(1, pages)
    slots = pack_i32([1]) if any(band.kind == "state" for band in small.bands) else b""
    for seq, forward in enumerate((_prefill(count, pages, slots), _decode(count, slots, explicit)), 1):
        launch(build_batch(seq, forward, rows, tables, small.bands, page_size)).outcome()
    _move(device, small, first_units)


def _small(stage: StageGeometry, pages: int) -> tuple[list[int], StageGeometry]:
    """The bands one behind the other: `pages` pages, or one slot, and one more unit of each; their first units."""
    first_units, end = [], stage.chain_start_bytes
    for band in stage.bands:
        first = -(-end // band.unit_bytes) if band.unit_bytes else 0
        first_units.append(first)
        units = 1 if band.kind == "state" else pages
        end = max(end, (first + units + 1) * band.unit_bytes)
    return first_units, msgspec.structs.replace(stage, arena_bytes=end)


def _id_table(band: BandGeometry, first_unit: int, pages: int) -> Int32s:
    """Slot 1 or pages 1.. at the band's first units; id 0 reads as what is below them."""
    count = 1 if band.kind == "state" else pages
    table = np.arange(first_unit - 1, first_unit + count, dtype=np.int32)
    if band.kind != "state":
        table[0] = 0
    return table


def _move(device: Device, stage: StageGeometry, first_units: list[int]) -> None:
    """Zero a unit of every stored band, copy it to the one above, and update id tables by columns of every size."""
    resting = [resting_unit(stage, index) for index in range(len(stage.bands))]
    executor = Executor(Geometry(1, COLUMN_MOST, COLUMN_MOST, [stage]), 0, device, resting)
    effects: list[Effect] = []
    for band, first_unit in enumerate(first_units):
        if not stage.bands[band].unit_bytes:
            continue
        source, target = pack_i32([first_unit]), pack_i32([first_unit + 1])
        effects += [Zero(band, source), Copy(band, source, target)]
        for bits in range(COLUMN_MOST.bit_length()):
            ids = np.arange(1, (1 << bits) + 1)
            effects.append(Bind(band, pack_i32(ids), pack_i32(np.full(ids.size, resting[band]))))
    executor.execute(effects)


def _prefill(count: int, pages: int, slots: bytes) -> Forward:
    """A prompt of `count` tokens that samples at temperature 1."""
    entries = np.arange(pages)
    return Forward(
        pack_i32([0]),
        pack_i32([0]),
        pack_i32([0]),
        pack_i32([count]),
        bytes([EXPLICIT | SAMPLE]),
        pack_i64([0] * count),
        pack_i32(np.zeros(pages)),
        pack_i32(entries),
        pack_i32(entries + 1),
        [RowSampling(0, 0, Sampling(temperature=1.0, seed=0), 0)],
        slots,
    )


def _decode(start: int, slots: bytes, explicit: bool) -> Forward:
    """The step after it, from its sampled token or from an explicit one."""
    row, none = pack_i32([0]), b""
    flags, tokens = (bytes([SAMPLE | EXPLICIT]), pack_i64([0])) if explicit else (bytes([SAMPLE]), none)
    return Forward(row, row, pack_i32([start]), pack_i32([1]), flags, tokens, none, none, none, [], slots)
