"""Caching: what a request finds in the prefix tree when it starts, and what it gives to it.

Owns every touch of the tree on behalf of a request, from the match at admission to the end of its lock. Must never
decide when memory is short: what the tree can give back, `memory` takes. Invariants: a row's first `shared` pages are
the tree's and held by its lock, the others its own; only whole pages are given, of positions whose tokens are committed
and whose KV a processed forward wrote; where the tree already has a page, the row names the tree's from then on.

    page table    0 ....... hit ....... shared ......... pages
                  found at  given       own: freed
                  the start since       at the end
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from allocator.capacity import Demand
from allocator.columns import Int64s
from daemon.core.memory import minus
from daemon.core.requests import Request
from daemon.core.state import CoreState
from daemon.core.tree_nodes import Lock, Match


class Hit(NamedTuple):
    """What admission found for a request, held by `lock`.

    `pinned` are the units per band that nobody else reads: they could be evicted before and cannot be now.
    """

    match: Match
    lock: Lock
    pinned: Demand


def look(core: CoreState, request: Request) -> Match | None:
    """How much of a waiting request the cache knows now; None when caching is off. Holds nothing.

    One token is always computed; a request whose prompt log probabilities are still owed computes them all. The answer
    is remembered with the request as long as the tree gives no other.
    """
    assert core.memory is not None, "only an epoch has a cache"
    tree = core.memory.cache
    if tree is None:
        return None
    if request.match is None or request.match.version != tree.version:
        owed = request.group.sampling.prompt_logprobs >= 0 and request.prompt_logprobs_next < request.prompt_tokens
        tokens = sequence_of(core, request, request.prompt_tokens + request.output_tokens)
        request.match = tree.match(request.group.namespace, tokens, 0 if owed else len(tokens) - 1)
    return request.match


def hold(core: CoreState, request: Request, match: Match | None, cold: bool = False) -> Hit | None:
    """Hold what was just found of a request that is to start; `cold`: nothing of it, though it may give later."""
    if match is None:
        return None
    assert core.memory is not None, "only an epoch has a cache"
    assert core.memory.cache is not None, "a match is the cache's"
    tree, group = core.memory.cache, request.group
    if cold:
        match = tree.match(group.namespace, group.prompt, 0)
    before = tree.locked()
    lock = tree.lock(match)
    return Hit(match, lock, minus(tree.locked(), before))


def drop(core: CoreState, hit: Hit | None) -> None:
    """The request waits on: what was found is let go as if nobody had asked."""
    if hit is not None:
        assert core.memory is not None, "only an epoch has a cache"
        assert core.memory.cache is not None, "what was found is in the cache"
        core.memory.cache.unlock(hit.lock, touch=False)


def begin(core: CoreState, request: Request, hit: Hit | None) -> None:
    """The request's row was just assigned: it starts behind what was found."""
    request.lock, request.match, request.processed_tokens = None, None, 0
    if hit is None:
        return
    memory, rows, row, match = core.memory, core.rows, request.row, hit.match
    assert memory is not None, "only an epoch has rows"
    assert not rows.pages[row], "a row starts empty"
    request.lock = hit.lock
    request.scheduled_tokens = request.processed_tokens = match.tokens
    if len(match.pages):
        rows.append_pages(row, match.pages)
    rows.shared[row] = len(match.pages)
    rows.scheduled[row] = match.tokens
    for at, (band, _) in enumerate(memory.windows):
        rows.window_first[row, at] = match.window_first[band]
    if match.tokens:
        rows.retire_at[row] = 0  # worked out before the next step
    core.totals.cached_tokens += match.tokens
    if not request.retractions:
        request.cached_tokens, request.matched_tokens, request.hit_cut = match.tokens, match.matched_tokens, match.cut


def advance(core: CoreState, row: int, band: int, first_page: int) -> None:
    """A row's window moved up over pages of the tree: it reads no unit of this band before `first_page` any more."""
    owner = core.rows.owners[row]
    if owner is not None and owner.lock is not None:
        assert core.memory is not None, "only an epoch has a cache"
        assert core.memory.cache is not None, "a lock is the cache's"
        core.memory.cache.advance(owner.lock, band, first_page)


def copied(core: CoreState, request: Request) -> None:
    """The step that copied the hit's state into the working slot was processed: the cached state may go."""
    if request.lock is not None and request.lock.state_node is not None:
        assert core.memory is not None, "only an epoch has a cache"
        assert core.memory.cache is not None, "a lock is the cache's"
        core.memory.cache.release_state(request.lock)


def give(core: CoreState, request: Request, tokens: Int64s, slot: int) -> bool:
    """Give the row's whole pages of these first tokens of its sequence, and the state in `slot` (0: none) after them.

    Whether the cache keeps the slot; a state fits only behind whole pages.
    """
    memory, rows, row, lock = core.memory, core.rows, request.row, request.lock
    assert memory is not None, "only an epoch has a cache"
    if memory.cache is None or lock is None:
        return False
    assert not slot or len(tokens) % memory.page_size == 0, "a state is that after whole pages"
    first, last = lock.pages, len(tokens) // memory.page_size
    window_first = [0] * len(memory.none)
    for at, (band, _) in enumerate(memory.windows):
        window_first[band] = int(rows.window_first[row, at])
    table = rows.table[row, : rows.pages[row]]
    given = memory.cache.insert(request.group.namespace, tokens, table, window_first, slot, lock)
    for band, sources, targets in given.rebinds:
        memory.rebind(band, sources, targets)
    memory.give_back(given.free)
    if given.duplicates:
        changed = first + np.flatnonzero(table[first:last] != given.pages)
        table[first:last] = given.pages
        core.changed.setdefault(row, []).extend(changed.tolist())
    rows.shared[row] = lock.pages
    return given.slot_kept


def finish(core: CoreState, request: Request, checkpoint: int) -> None:
    """The request finishes well: give what it wrote, its newest checkpoint, and the state it ends with on the grid.

    `checkpoint` is the position of a state in the checkpoint slot that was not given yet, 0 when there is none. The
    working slot holds the state after all tokens that launched forwards consumed, the newest of which may be in flight:
    whoever reads it is ordered behind that one. It is given where a checkpoint may stand, anywhere without checkpoint
    slots; one that consumed a token that was not committed is not.
    """
    memory, rows, row = core.memory, core.rows, request.row
    assert memory is not None, "only an epoch has rows"
    if memory.cache is None or request.lock is None:
        return
    written = request.processed_tokens
    if written >= request.target_tokens:
        # The newest token was sampled by a processed forward and is no input of one.
        written = max(written, request.prompt_tokens + int(rows.output[row]) - 1)
    tokens = sequence_of(core, request, written)
    if checkpoint and give(core, request, tokens[:checkpoint], int(rows.slots[row, 1])):
        rows.slots[row, 1] = 0
        core.totals.checkpoints_given += 1
    consumed, slot = int(rows.scheduled[row]), 0
    committed, grid = request.prompt_tokens + int(rows.output[row]), memory.checkpoint_interval or 1
    if memory.state >= 0 and 0 < written <= consumed <= committed and consumed % grid == 0:
        tokens, slot = sequence_of(core, request, consumed), int(rows.slots[row, 0])
    if give(core, request, tokens, slot):
        rows.slots[row, 0] = 0
        core.totals.checkpoints_given += 1


def stays(core: CoreState, request: Request) -> int:
    """Tokens of a request with a row that another start of it would find in the cache, as that is now."""
    if request.lock is None:
        return 0
    assert core.memory is not None, "only an epoch has a cache"
    assert core.memory.cache is not None, "a lock is the cache's"
    return core.memory.cache.found(request.lock)


def leave(core: CoreState, request: Request) -> None:
    """The request's row is taken back: what it reads of the cache is let go."""
    core.changed.pop(request.row, None)
    if request.lock is not None:
        assert core.memory is not None, "only an epoch has a cache"
        assert core.memory.cache is not None, "a lock is the cache's"
        core.memory.cache.unlock(request.lock)
        request.lock = None


def flush(core: CoreState) -> tuple[Demand, Demand]:
    """Empty the cache of all that nobody reads: the units that came free and those that stay, per band."""
    assert core.memory is not None, "only an epoch has a cache"
    tree = core.memory.cache
    if tree is None:
        return core.memory.none, core.memory.none
    parts = tree.flush()
    core.memory.give_back(parts)
    return tuple(len(ids) for ids in parts), tree.held()


def sequence_of(core: CoreState, request: Request, end: int) -> Int64s:
    """The first `end` tokens (int64) of prompt and committed output, wherever they lie."""
    prompt = request.group.prompt
    if end <= request.prompt_tokens:
        return prompt[:end]
    newest = core.rows.newest_output(request.row).tobytes() if request.row >= 0 else b""
    output = np.frombuffer(b"".join([*request.kept, newest]), np.int64)
    assert end <= request.prompt_tokens + len(output), "only what is committed is asked for"
    return np.concatenate([prompt, output[: end - request.prompt_tokens]])
