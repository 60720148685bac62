"""Operations on the prefix tree: finishing into it, checkpoints given to it, hits, rebinding, eviction, joint reclaim.

Owns the rows of the operation table that move ownership between requests and nodes. Each does nothing where nothing is
possible.
"""

from __future__ import annotations

import numpy as np

from allocator.columns import Int32s
from tools.pagesafety.request_ops import copy_states, new_units
from tools.pagesafety.world import Holder, World


def into_tree(world: World, a: int, b: int) -> None:
    """A request ends and the tree keeps its whole pages and its checkpoint; the rest is freed."""
    holder = world.pick(a, world.requests())
    if holder is None:
        return
    shared = len(world.holders[holder.shared].pages) if holder.shared else 0
    whole = max(0, holder.tokens // world.page_size - shared)
    parts = world.units_of(holder, whole)
    if world.state >= 0:
        parts[world.state] = np.array(holder.slots[:1] if len(holder.slots) > 1 else holder.slots, dtype=np.int32)
    world.free(parts)
    if holder.shared:
        world.holders[holder.shared].readers -= 1
    if whole or len(holder.slots) > 1:
        world.add_holder(False, whole * world.page_size, holder.pages[:whole], holder.slots[1:])
    del world.holders[holder.number]


def gift(world: World, a: int, b: int) -> None:
    """The tree gets a request's checkpoint and whole pages, together with a fresh slot for it; without one, nothing."""
    able = [h for h in world.requests() if len(h.slots) > 1 and not h.shared and world.slot_known[h.slots[1]]]
    holder = world.pick(a, able)
    if holder is None:
        return
    taken = world.take([int(band == world.state) for band in range(world.bands)])
    if taken is None:
        return
    whole = holder.tokens // world.page_size
    node = world.add_holder(False, whole * world.page_size, holder.pages[:whole], [holder.slots[1]])
    holder.pages = holder.pages[whole:]
    holder.slots[1] = int(taken.ids[world.state][0])
    holder.shared = node.number
    node.readers += 1


def hit(world: World, a: int, b: int) -> None:
    """A request is admitted that reads a node, and continues from the node's state."""
    node = world.pick(a, world.nodes())
    if node is None:
        return
    demand, bound = new_units(world, 1, 1 + b % 2, tail_only=False)
    taken = world.take(demand, bound)
    if taken is None:
        return
    slots = taken.ids[world.state].tolist() if world.state >= 0 else []
    tokens = len(node.pages) * world.page_size + 1 + b % world.page_size
    request = world.add_holder(True, tokens, taken.ids[world.owner].tolist(), slots)
    request.shared = node.number
    node.readers += 1
    if node.slots and slots and world.slot_known[node.slots[0]]:
        copy_states(world, [(node.slots[0], slots[0])])


def rebind(world: World, a: int, b: int) -> None:
    """A holder's window units go to pages of another that have none."""
    source = world.pick(a, [h for h in world.holders.values() if h.waits_for == 0])
    target = world.pick(b, world.nodes())
    if source is None or target is None or source is target:
        return
    for band in world.windows:
        have = np.sort(np.array(source.pages, dtype=np.int32))
        have = have[world.held[band][have]]
        lack = np.array(target.pages, dtype=np.int32)
        lack = lack[~world.held[band][lack] & ~world.stuck[band][lack]]
        count = min(have.size, lack.size, 1 + (a + b) % 4)
        if count:
            sources, targets = have[:count], lack[:count]
            world.ops.append(world.logical.rebind(band, sources, targets))
            world.rename(band, sources, targets)


def reattach(world: World, a: int, b: int) -> None:
    """Pages of a node that lost their window units get new ones, in one take over all windows."""
    node = world.pick(a, world.nodes())
    if node is None:
        return
    demand = [0] * world.bands
    columns: list[Int32s | None] = [None] * world.bands
    for band in world.windows:
        lack = np.sort(np.array(node.pages, dtype=np.int32))
        lack = lack[~world.held[band][lack] & ~world.stuck[band][lack]][: 1 + b % 3]
        if lack.size:
            demand[band] = lack.size
            columns[band] = lack
    if any(demand):
        world.take(demand, None, columns)


def evict(world: World, a: int, b: int) -> None:
    """A node goes, or only its window units, or only its state."""
    node = world.pick(a, world.nodes(ready=False, unread=True))
    if node:
        evict_node(world, node, b % 4)


def evict_node(world: World, node: Holder, how: int) -> None:
    """`how`: 1 only window units, 2 only the slot, else everything."""
    parts = world.units_of(node)
    if node.waits_for != 0 or how in (0, 3):
        world.drop(node)
    elif how == 1:
        world.free({band: ids for band, ids in parts.items() if band in world.windows})
    elif world.state in parts:
        world.free({world.state: parts[world.state]})
        node.slots = []


def squeeze(world: World, a: int, b: int) -> None:
    """A large admission with joint reclaim: nodes go, one by one, until it fits; a hopeless one costs none."""
    demand, bound = new_units(world, 2 + a % 6, 2, tail_only=b % 2 > 0)
    if world.logical.never_fits(tuple(demand)) is not None:
        return
    while world.logical.refusal(tuple(demand)) is not None:
        victims = world.nodes(ready=False, unread=True)
        if not victims:
            return
        world.drop(victims[b % len(victims)])
    taken = world.take(demand, bound)
    assert taken is not None, "a demand that is not refused is taken"
    slots = taken.ids[world.state].tolist() if world.state >= 0 else []
    pages = taken.ids[world.owner].tolist()
    world.add_holder(True, len(pages) * world.page_size, pages, slots)
