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

from allocator.columns import pack_i32, pack_i64
from allocator.effects import Bind, Copy, Effect, Zero
from allocator.geometry import Geometry, StageGeometry
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
) -> None:
    """Run both batches, of at most `tokens_max` tokens together, and the move, in a small arena like `stage`'s."""
    count = max(min(PROMPT_TOKENS, tokens_max - 1), 1)
    pages = count // page_size + 1  # the decode step's position is `count`
    first_units = [-(-stage.chain_start_bytes // band.unit_bytes) if band.unit_bytes else 0 for band in stage.bands]
    owner, first_unit = stage.bands[-1], first_units[-1]
    ends = [(first + 2) * band.unit_bytes for first, band in zip(first_units, stage.bands, strict=True)]
    arena_bytes = max(*ends, (first_unit + pages + 1) * owner.unit_bytes)
    small = msgspec.structs.replace(stage, arena_bytes=arena_bytes)
    device = open_arena(small)
    units = np.zeros(pages + 1, dtype=np.int32)
    units[1:] = np.arange(first_unit, first_unit + pages) if owner.unit_bytes else 1  # without it nothing is read there
    rows = RowTable(1, pages)
    for seq, forward in enumerate((_prefill(count, pages), _decode(count)), 1):
        launch(build_batch(seq, forward, rows, units, page_size)).outcome()
    _move(device, small, first_units)


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


def _prefill(count: int, pages: int) -> Forward:
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
    )


def _decode(start: int) -> Forward:
    """The step after it, from its sampled token."""
    row, none = pack_i32([0]), b""
    return Forward(row, row, pack_i32([start]), pack_i32([1]), bytes([SAMPLE]), none, none, none, none, [])
