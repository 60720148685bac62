"""Operations on requests: admission, growth, window retirement, ends, forwards, steps and progress.

Owns the half of the operation table that a model without a tree or transfers needs. Each operation takes the world and
two numbers, which choose among what is possible; where nothing is, it does nothing.
"""

from __future__ import annotations

import numpy as np

from allocator.columns import Int32s
from allocator.ops import CopyState, Flush
from tools.pagesafety.contents import ForwardPlan
from tools.pagesafety.world import Holder, World


def new_units(world: World, pages: int, states: int, tail_only: bool) -> tuple[list[int], list[Int32s | None]]:
    """The demand of `pages` new pages: window units for all of them, or for the tail that windows still reach."""
    demand, bound = [0] * world.bands, [None] * world.bands
    demand[world.owner] = pages
    columns: list[Int32s | None] = list(bound)
    for band in world.windows:
        first = max(0, pages - world.setting.window_pages[band] - 1) if tail_only else 0
        columns[band] = np.arange(first, pages, dtype=np.int32)
        demand[band] = pages - first
    if world.state >= 0:
        demand[world.state] = states
    return demand, columns


def admit(world: World, a: int, b: int) -> None:
    """A prompt in one take: pages, window units, a working slot and maybe a checkpoint slot."""
    tokens = 1 + a % (5 * world.page_size)
    demand, bound = new_units(world, world.pages_for(tokens), 1 + b % 2, tail_only=b % 3 > 0)
    taken = world.take(demand, bound)
    if taken is not None:
        slots = taken.ids[world.state].tolist() if world.state >= 0 else []
        world.add_holder(True, tokens, taken.ids[world.owner].tolist(), slots)


def extend(world: World, a: int, b: int) -> None:
    """A chunk of prefill for one request."""
    holder = world.pick(a, world.requests())
    if holder:
        _lengthen(world, [holder], 1 + b % (3 * world.page_size))


def decode(world: World, a: int, b: int) -> None:
    """Several requests advance; the pages that they need come in one take."""
    chosen = [h for h in world.requests() if (a >> (h.number % 8)) & 1]
    _lengthen(world, chosen, 1 + b % world.page_size)


def _lengthen(world: World, chosen: list[Holder], tokens: int) -> None:
    needs = [world.pages_for(h.tokens + tokens) - world.pages_for(h.tokens) for h in chosen]
    if sum(needs):
        demand, bound = new_units(world, sum(needs), 0, tail_only=False)
        taken = world.take(demand, bound)
        if taken is None:
            return
        pages = iter(taken.ids[world.owner].tolist())
        for holder, need in zip(chosen, needs, strict=True):
            holder.pages += [next(pages) for _ in range(need)]
    for holder in chosen:
        holder.tokens += tokens


def retire(world: World, a: int, b: int) -> None:
    """Window units that fell out of their window are freed: of one holder, or of all requests at once."""
    one = world.pick(a, list(world.holders.values()))
    chosen = world.requests() if b % 2 else [one] if one and one.waits_for == 0 else []
    parts = {}
    for band in world.windows:
        keep = world.setting.window_pages[band] + 1
        old = [page for h in chosen for page in h.pages[:-keep]]
        ids = np.sort(np.array(old, dtype=np.int32))
        parts[band] = ids[world.held[band][ids]]
    world.free(parts)


def trim(world: World, a: int, b: int) -> None:
    """The last pages of a request go: a surplus page, a partial retraction."""
    holder = world.pick(a, world.requests())
    if holder and len(holder.pages) > 1:
        cut = 1 + b % (len(holder.pages) - 1)
        parts = world.units_of(holder, cut)
        world.free(parts)
        del holder.pages[cut:]
        shared = len(world.holders[holder.shared].pages) if holder.shared else 0
        holder.tokens = min(holder.tokens, (shared + len(holder.pages)) * world.page_size)


def abort(world: World, a: int, b: int) -> None:
    """Whatever it is in the middle of, a request (or a node that nobody reads) ends."""
    holder = world.pick(a, [h for h in world.holders.values() if not h.readers])
    if holder:
        world.drop(holder)


def fill(world: World, a: int, b: int) -> None:
    """Takes as much as fits of one mix, to the last unit: the next relief has no room to be clumsy."""
    mixes = [new_units(world, 1, 0, False)[0], new_units(world, 1, 0, True)[0]]
    mixes[1] = [int(band == world.owner) for band in range(world.bands)]
    if world.state >= 0:
        mixes.append([int(band == world.state) for band in range(world.bands)])
    per = mixes[a % len(mixes)]
    most = world.logical.max_extra(None, tuple(per))
    if most > 0:
        count = most if b % 3 else 1 + b % most
        bound: list[Int32s | None] = [None] * world.bands
        taken = world.take([count * units for units in per], bound)
        if taken is not None:
            pages = taken.ids[world.owner].tolist()
            slots = taken.ids[world.state].tolist() if world.state >= 0 else []
            world.add_holder(False, len(pages) * world.page_size, pages, slots)


def checkpoint(world: World, a: int, b: int) -> None:
    """Working slots are copied to checkpoint slots, of several requests in one op."""
    if world.state < 0:
        return
    pairs = [
        (h.slots[0], h.slots[1])
        for h in world.requests()
        if len(h.slots) > 1
        and world.slot_known[h.slots[0]]
        and not world.shown[world.state][h.slots[1]]
        and (a >> (h.number % 8)) & 1
    ]
    copy_states(world, pairs)


def copy_states(world: World, pairs: list[tuple[int, int]]) -> None:
    """One op for pairs of (source, target) slots."""
    if pairs:
        pairs.sort(key=lambda pair: pair[1])
        sources, targets = (np.array(column, dtype=np.int32) for column in zip(*pairs, strict=True))
        op = world.logical.copy_state(sources, targets)
        assert isinstance(op, CopyState)
        world.ops.append(op)
        world.slot_known[targets] = True


def flush(world: World, a: int, b: int) -> None:
    """Opportunistic compaction, with some budget."""
    world.ops.append(Flush(a % 7))


def forward(world: World, a: int, b: int) -> None:
    """A step whose forward reads what some holders read and writes the last page and working slot of each request."""
    _launch(world, a, b, unknown=False)


def speculative(world: World, a: int, b: int) -> None:
    """The same, but the chains are not told which units of the bands it writes."""
    _launch(world, a, b, unknown=True)


def _launch(world: World, a: int, b: int, unknown: bool) -> None:
    if len(world.in_flight) == 2:
        world.process()
    chosen = [h for h in world.holders.values() if h.waits_for == 0 and (a >> (h.number % 8)) & 1]
    writers = [h for h in chosen if h.request]
    plan = ForwardPlan()
    plan.unknown = unknown
    pages = np.concatenate([np.zeros(1, dtype=np.int32), *(world.read_pages(h) for h in chosen)])
    last = np.array(sorted({h.pages[-1] for h in writers if h.pages}), dtype=np.int32)
    for band in (*world.windows, world.owner):
        bound = world.held[band]
        read = pages if band == world.owner else pages[bound[pages] | (pages == 0)]
        written = last if band == world.owner else last[bound[last]]
        plan.reads.append((band, read))
        world.value += 1
        plan.writes.append((band, written[world.shown[band][written] == 0], world.value + b))
    if world.state >= 0:
        slots = np.array([h.slots[0] for h in writers if h.slots], dtype=np.int32)
        plan.reads.append((world.state, slots[world.slot_known[slots]]))
        written = np.sort(slots[world.shown[world.state][slots] == 0])
        world.slot_known[written] = True
        world.value += 1
        plan.writes.append((world.state, written, world.value + b))
    plan.writes = [write for write in plan.writes if write[1].size]
    world.step(plan)


def quiet(world: World, a: int, b: int) -> None:
    """A step without a forward."""
    world.step()


def process(world: World, a: int, b: int) -> None:
    """The oldest forward's result is consumed; the next step says so."""
    world.process()


def settle(world: World, a: int, b: int) -> None:
    """Everything outstanding ends: nothing may be left on record."""
    world.settle()


def drain(world: World, a: int, b: int) -> None:
    """One rank catches up with everything it was given."""
    for stage in world.fleet.stages:
        stage.check_drained(a)
