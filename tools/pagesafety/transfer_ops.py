"""Operations on the host tier and the network: backups, loads, sends, receives, publications, releases, late reports.

Owns the rows of the operation table that begin and end uses. Each does nothing where nothing is possible.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int32s
from allocator.errors import InvariantBroken
from tools.pagesafety.faults import StressFault
from tools.pagesafety.request_ops import new_units
from tools.pagesafety.world import Entry, Holder, Ids, World


def backup(world: World, a: int, b: int) -> None:
    """A holder's units go to host slots; the holder may live on, move, be written and end meanwhile."""
    holder = world.pick(a, world.readable())
    if holder is None:
        return
    last = 1 + b % max(1, len(holder.pages))
    parts = world.units_of(holder, 0, last)
    if world.state in parts:
        known = parts[world.state][world.slot_known[parts[world.state]]]
        parts = {**{band: ids for band, ids in parts.items() if band != world.state}}
        if known.size:
            parts[world.state] = known
    if not parts or any(len(world.free_host[band]) < ids.size for band, ids in parts.items()):
        return
    number = max(world.entries, default=0) + 1
    use = world.begin_use("backup", parts, holder, entry=number)
    if use is None:
        return
    slots = {band: _host_slots(world, band, ids.size, b) for band, ids in parts.items()}
    pages = parts.get(world.owner, np.empty(0, dtype=np.int32))
    windows = {band: np.searchsorted(pages, parts[band]).astype(np.int32) for band in world.windows if band in parts}
    states = parts[world.state].size if world.state in parts else 0
    world.entries[number] = Entry(number, pages.size, windows, states, slots)
    world.ops.append(world.logical.backup(use.number, world.per_band(parts), _columns(world, slots)))


def _host_slots(world: World, band: int, count: int, number: int) -> NDArray[np.int64]:
    """Free host slots in an order that follows no page order."""
    free = world.free_host[band]
    chosen = free[:count]
    del free[:count]
    return np.roll(np.array(chosen, dtype=np.int64), number)


def _columns(world: World, slots: dict[int, NDArray[np.int64]]) -> list[NDArray[np.int64] | None]:
    return [slots.get(band) for band in range(world.bands)]


def forget(world: World, a: int, b: int) -> None:
    """A host copy that nothing reads is given up."""
    idle = [e for e in world.entries.values() if e.ready and e.readers == 0]
    if idle:
        world.forget(idle[a % len(idle)])


def load_back(world: World, a: int, b: int) -> None:
    """Units are taken for a host copy's load, which is submitted by a later operation: until then they may move."""
    ready = [e for e in world.entries.values() if e.ready]
    if not ready:
        return
    entry = ready[a % len(ready)]
    demand = [0] * world.bands
    bound: list[Int32s | None] = [None] * world.bands
    demand[world.owner] = entry.pages
    for band, indexes in entry.windows.items():
        demand[band], bound[band] = indexes.size, indexes
    if world.state >= 0:
        demand[world.state] = entry.states
    taken = world.take(demand, bound)
    if taken is None:
        return
    slots = taken.ids[world.state].tolist() if entry.states else []
    pages = taken.ids[world.owner].tolist()
    node = world.add_holder(False, entry.pages * world.page_size, pages, slots)
    node.waits_for, node.entry = -1, entry.number
    entry.readers += 1
    if b % 3 == 0:
        submit(world, -1, 0)


def submit(world: World, a: int, b: int) -> None:
    """A load whose units were taken before is submitted."""
    waiting = [h for h in world.holders.values() if h.waits_for == -1 and h.entry]
    holder = world.pick(a, waiting)
    if holder is None:
        return
    entry = world.entries[holder.entry]
    parts = _units_of_entry(world, holder, entry)
    use = world.begin_use("load", parts, holder, entry=entry.number)
    if use is not None:
        holder.waits_for, holder.entry = use.number, 0
        world.ops.append(world.logical.load(use.number, world.per_band(parts), _columns(world, entry.slots)))


def _units_of_entry(world: World, holder: Holder, entry: Entry) -> Ids:
    """Nothing was freed or bound since they were taken: a holder that waits for its load is not touched."""
    parts = world.units_of(holder)
    assert {band: ids.size for band, ids in parts.items()} == {band: ids.size for band, ids in entry.slots.items()}
    return parts


def send(world: World, a: int, b: int) -> None:
    """Our engine pushes a holder's units to a peer."""
    holder = world.pick(a, world.readable())
    if holder is not None:
        parts = _known(world, world.units_of(holder, 0, 1 + b % max(1, len(holder.pages))))
        use = world.begin_use("send", parts, holder)
        if use is not None:
            world.ops.append(world.logical.send(use.number, world.per_band(parts)))


def pull(world: World, a: int, b: int) -> None:
    """A peer learns the addresses of a holder's units, to read them: they are fixed and not written until then."""
    holder = world.pick(a, world.readable())
    if holder is not None:
        parts = _known(world, world.units_of(holder, 0, 1 + b % max(1, len(holder.pages))))
        use = world.begin_use("pull", parts, holder)
        if use is not None:
            world.ops.append(world.logical.publish(use.number, world.per_band(parts)))


def _known(world: World, parts: Ids) -> Ids:
    """Without slots whose state nobody wrote yet."""
    slots = parts.pop(world.state, None)
    if slots is not None and world.slot_known[slots].any():
        parts[world.state] = slots[world.slot_known[slots]]
    return parts


def trespass(world: World, a: int, b: int) -> None:
    """What no scheduler may ask for is refused with nothing changed: reads of rows that a peer may write, and more."""
    kind = "hold" if b % 4 == 3 else "receive"
    open_uses = [use for use in world.uses.values() if use.kind == kind and use.holder in world.holders]
    if not open_uses:
        return
    ids = open_uses[a % len(open_uses)].ids
    parts, number = world.per_band(ids), world.next_use
    attempts: dict[str, Callable[[], object]] = {
        "a send of received rows": lambda: world.logical.send(number, parts),
        "a publication of received rows": lambda: world.logical.publish(number, parts),
        "a backup of received rows": lambda: world.logical.backup(number, parts, _first_slots(world, ids)),
        "a free of held rows": lambda: world.logical.free(parts),
    }
    what = list(attempts)[b % 4]
    before = world.logical.state_digest()
    try:
        attempts[what]()
    except InvariantBroken:
        if world.logical.state_digest() == before:
            return
        raise StressFault("trespass", f"{what} was refused, but changed something") from None
    raise StressFault("trespass", f"{what} was accepted")


def _first_slots(world: World, ids: Ids) -> list[NDArray[np.int64] | None]:
    return _columns(world, {band: np.arange(column.size, dtype=np.int64) for band, column in ids.items()})


def expect(world: World, a: int, b: int) -> None:
    """Rows for a receive are taken and held; the peer learns nothing yet."""
    demand, bound = new_units(world, 1 + a % 4, 1, tail_only=b % 2 > 0)
    taken = world.take(demand, bound)
    if taken is None:
        return
    slots = taken.ids[world.state].tolist() if world.state >= 0 else []
    pages = taken.ids[world.owner].tolist()
    holder = world.add_holder(True, len(pages) * world.page_size, pages, slots)
    parts = world.units_of(holder)
    use = world.begin_use("hold", parts, holder)
    if use is not None:
        holder.waits_for = use.number
        world.ops.append(world.logical.hold(use.number, world.per_band(parts)))


def publish(world: World, a: int, b: int) -> None:
    """The peer of a held receive learns its addresses, and writes whenever it likes."""
    held = [use for use in world.uses.values() if use.kind == "hold"]
    if held:
        use = held[a % len(held)]
        use.kind = "receive"
        world.show(use)
        world.ops.append(world.logical.publish(use.number, world.per_band(use.ids)))


def release(world: World, a: int, b: int) -> None:
    """A use is over on every rank; in any order, except that a hold ends by its publication or its request's end."""
    able = [use for use in world.uses.values() if use.kind != "hold"]
    if able:
        world.release(able[a % len(able)])


def fix(world: World, a: int, b: int) -> None:
    """Nobody waits for a send's engine any more."""
    sends = [use for use in world.uses.values() if use.kind == "send" and use.sent]
    if sends:
        world.fix(sends[a % len(sends)])


def report(world: World, a: int, b: int) -> None:
    """The daemon consumes a report of fixed extents: mostly the oldest."""
    world.report(a if b % 5 == 0 else 0)
