"""Warm-up: one prefill chunk and one drawn decode step through a runner's own launch, so that no request pays for it.

Owns the two batches. Must never leave anything behind but warm code: the caller runs them in an arena of a few units
that it throws away. They are made as the daemon's steps are, so everything on the way runs: translation, attention,
sampling, and on a GPU the compilation of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from allocator.columns import pack_i32, pack_i64
from allocator.geometry import StageGeometry
from daemon.rank.batch import Batch, build_batch
from daemon.rank.rows import RowTable
from daemon.rank.runner import Launched
from ipc.messages import EXPLICIT, SAMPLE, Forward, RowSampling, Sampling

PROMPT_TOKENS = 32


def warm_up(
    open_arena: Callable[[StageGeometry], None],
    launch: Callable[[Batch], Launched],
    stage: StageGeometry,
    page_size: int,
    tokens_max: int,
) -> None:
    """Run both batches, of at most `tokens_max` tokens together, in the first units of an arena like `stage`'s."""
    band = stage.bands[-1]
    count = max(min(PROMPT_TOKENS, tokens_max - 1), 1)
    pages = count // page_size + 1  # the decode step's position is `count`
    first_unit = -(-stage.chain_start_bytes // band.unit_bytes)
    open_arena(msgspec.structs.replace(stage, arena_bytes=(first_unit + pages) * band.unit_bytes))
    units = np.zeros(pages + 1, dtype=np.int32)
    units[1:] = np.arange(first_unit, first_unit + pages)
    rows = RowTable(1, pages)
    for seq, forward in enumerate((_prefill(count, pages), _decode(count)), 1):
        launch(build_batch(seq, forward, rows, units, page_size)).outcome()


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
