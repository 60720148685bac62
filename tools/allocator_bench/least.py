"""The fewest bytes that any rearrangement for a demand must move, found without the allocator's own search.

Owns the exact optimum for the pools measured here: one stage, two or three bands, nothing fixed. Must never share code
with what it judges. A layout is a cut between each two neighbours in chain order; a live unit that does not lie wholly
inside its band's piece must move at least once, and one move is enough.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allocator.capacity import Demand
from tools.allocator_bench.world import World

Int64s = NDArray[np.int64]


def least_bytes(world: World, demand: Demand) -> int:
    """Bytes of the live units that must move before `demand` has room; RuntimeError when nothing makes room.

    A cut between a band and the next is moved to the left as far as the last whole unit of the left band: that costs
    the left band nothing and the right one no more. So only multiples of the left band's unit are tried.
    """
    bands = world.stage.bands
    live = [_starts(world, band) for band in range(len(bands))]
    needs = [units.size + wanted for units, wanted in zip(live, demand, strict=True)]
    sizes = [band.unit_bytes for band in bands]
    end = world.stage.arena_bytes
    last_cut = (end // sizes[-1] - needs[-1]) * sizes[-1]  # the last band needs all bytes from here on
    start = world.stage.chain_start_bytes
    if len(bands) == 2:
        first_cut = (-(-start // sizes[0]) + needs[0]) * sizes[0]
        cuts = np.arange(first_cut, last_cut + 1, sizes[0], dtype=np.int64)
        return _least(_cost(live, sizes, 0, cuts))
    first_cut = (-(-start // sizes[0]) + needs[0]) * sizes[0]
    left = np.arange(first_cut, last_cut + 1, sizes[0], dtype=np.int64)
    right = np.arange(0, last_cut + 1, sizes[1], dtype=np.int64)
    cheapest = np.minimum.accumulate(_cost(live, sizes, 1, right)[::-1])[::-1]  # of this right cut or one behind it
    soonest = -(-left // sizes[1]) + needs[1]  # index of the first right cut that leaves the middle band its room
    fits = soonest < right.size
    return _least(_cost(live, sizes, 0, left[fits]) + cheapest[soonest[fits]])


def _starts(world: World, band: int) -> Int64s:
    """First bytes of the live units of a band, ascending."""
    units = world.physical.physical(band, world.logical.live_ids(band)).astype(np.int64)
    units.sort()
    return units * world.stage.bands[band].unit_bytes


def _cost(live: list[Int64s], sizes: list[int], band: int, cuts: Int64s) -> Int64s:
    """Per cut, the bytes of this band's live units that end behind it and of the next one's that start before it."""
    stay = live[band].searchsorted(cuts - sizes[band], side="right")
    go = live[band + 1].searchsorted(cuts, side="left")
    cost: Int64s = (live[band].size - stay) * sizes[band] + go * sizes[band + 1]
    return cost


def _least(costs: Int64s) -> int:
    if not costs.size:
        raise RuntimeError("no layout holds a demand that capacity accepted")
    return int(costs.min())
