"""Caching: what a request finds in the prefix tree when it starts, and what it gives to it.

Owns every touch of the tree on behalf of a request, from the match at admission to the end of its lock. Must never
decide when memory is short: what the tree can give back, `memory` takes. Invariants: a row's first `shared` pages are
the tree's and held by its lock, the others its own; only whole pages are given, of positions whose tokens are committed
and whose KV a processed forward wrote (with a state that stands behind them: a launched one); where the tree already
has a page, the row names the tree's from then on; a request that is not to be stored reads and gives nothing.

    page table    0 ....... hit ....... shared ......... pages
                  found at  given       own: freed
                  the start since       at the end
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from allocator.capacity import Demand
from allocator.columns import Int64s
from daemon.core.grid import Kind
from daemon.core.memory import minus
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import Verdict
from daemon.core.requests import Request
from daemon.core.rows import NO_FLOOR
from daemon.core.state import CoreState
from daemon.core.tree_nodes import Lock, Match, Node, Reader
from daemon.core.visits import mark_of


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
    reader = Reader(request.priority, request.prompt_tokens, request.started)
    lock = tree.lock(match, reader)
    return Hit(match, lock, minus(tree.locked(), before))


def drop(core: CoreState, hit: Hit | None) -> None:
    """The request waits on: what was found is let go as if nobody had asked."""
    if hit is not None:
        assert core.memory is not None, "only an epoch has a cache"
        assert core.memory.cache is not None, "what was found is in the cache"
        core.memory.cache.unlock(hit.lock, touch=False)


def begin(core: CoreState, request: Request, hit: Hit | None) -> None:
    """The request's row was just assigned: it starts behind what was found."""
    request.lock, request.match, request.processed_tokens, request.known_tokens = None, None, 0, 0
    request.continues = False
    if hit is None:
        return
    memory, rows, row, match = core.memory, core.rows, request.row, hit.match
    assert memory is not None, "only an epoch has rows"
    assert not rows.pages[row], "a row starts empty"
    request.lock, request.known_tokens = hit.lock, match.matched_tokens
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
    if match.slot:
        assert match.node is not None, "a state stands at a node's end"
        core.checkpoints_hit[match.node.kind] += 1
        request.continues = match.node.kind == Kind.TURN
    if not request.started:
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


def give(core: CoreState, request: Request, end: int) -> None:
    """Give the row's whole pages of the first `end` tokens of its sequence; those the cache has from it stay as is."""
    memory, rows, row, lock = core.memory, core.rows, request.row, request.lock
    assert memory is not None, "only an epoch has a cache"
    if memory.cache is None or lock is None or not request.group.store:
        return
    first, last = lock.pages, end // memory.page_size
    if last <= first:
        return
    window_first = [0] * len(memory.none)
    for at, (band, _) in enumerate(memory.windows):
        window_first[band] = int(rows.window_first[row, at])
    table = rows.table[row, : rows.pages[row]]
    tokens = sequence_of(core, request, end)
    given = memory.cache.insert(request.group.namespace, tokens, table, window_first, 0, lock)
    for band, sources, targets in given.rebinds:
        memory.rebind(band, sources, targets)
    memory.give_back(given.free)
    if given.duplicates:
        changed = first + np.flatnonzero(table[first:last] != given.pages)
        table[first:last] = given.pages
        core.changed.setdefault(row, []).extend(changed.tolist())
    rows.shared[row] = lock.pages
    memory.keep_quota(request.group.namespace)


def give_launched(core: CoreState) -> None:
    """Before windows retire and anybody is admitted: pages that launched chunks of prompts write go to the cache early.

    With states all of them: nobody starts there before a state is given, and that waits for the report; but whoever
    comes next learns where it parts from a prompt that is being computed. With windows alone those up to the prompt's
    mark: a later prompt often goes on from there, and until the report the row would give back the window before it.
    The tokens are the prompt's own, and whoever reads the pages is ordered behind the forward that writes them.
    """
    memory, rows = core.memory, core.rows
    assert memory is not None, "only an epoch has rows"
    if memory.cache is None or not (memory.checkpoint_interval or (memory.windows and memory.state < 0)):
        return
    for flight in core.flights:
        for row, generation, end in flight.chunks:
            request = rows.owners[row]
            if request is None or rows.generation[row] != generation or request.processed_tokens >= end:
                continue
            if memory.checkpoint_interval:
                give(core, request, end)
                learn(core, request)
            elif mark_of(request.prompt_tokens) <= end:
                give(core, request, mark_of(request.prompt_tokens))


def learn(core: CoreState, request: Request) -> None:
    """A chunk was given: how far the cache knows the sequence beyond it, from requests that were faster."""
    memory = core.memory
    assert memory is not None, "only an epoch has a cache"
    if memory.cache is None or request.lock is None or request.sequence is None:
        return
    ahead = memory.cache.ahead(request.lock, request.sequence) * memory.page_size
    if ahead > request.lock.pages * memory.page_size:
        request.known_tokens = max(request.known_tokens, ahead)


def has_state(core: CoreState, request: Request, position: int) -> bool:
    """Whether the cache has the state after the first `position` tokens of what this row gave or found."""
    assert core.memory is not None, "only an epoch has a cache"
    assert request.lock is not None, "it is asked of a row that reads the cache"
    node: Node | None = request.lock.node
    page = position // core.memory.page_size
    while node is not None and node.start >= page:
        node = node.parent
    return node is not None and node.end == page and node.slot > 0


def place(core: CoreState, request: Request, position: int, slot: int, kind: Kind) -> bool:
    """Give the state in `slot`, which consumed the first `position` tokens; their pages were given. Whether it is kept.

    Not where the cache has that state already.
    """
    memory = core.memory
    assert memory is not None, "only an epoch has a cache"
    assert memory.cache is not None, "a state is given to a cache"
    assert request.lock is not None, "a row that gives reads through a lock"
    assert position % memory.page_size == 0, "a state stands behind whole pages"
    if not memory.cache.place_state(request.lock, position // memory.page_size, slot, kind):
        return False
    core.totals.checkpoints_given += 1
    core.checkpoints_given[kind] += 1
    memory.keep_quota(request.group.namespace)
    return True


def finish(core: CoreState, request: Request, output_tokens: int | None, now_ns: int, out: Outputs) -> None:
    """The request finishes well: give what it wrote and the newest state it has, and pin that if it was asked for.

    `output_tokens` is where the client's output ends, when that is before what was committed: nobody goes on from what
    lies behind. A pin that would name too much beside the others is not made, and that is told.
    """
    end = request.prompt_tokens + int(core.rows.output[request.row])
    if output_tokens is not None:
        end = min(end, request.prompt_tokens + max(output_tokens, 0))
    if not _leave_behind(core, request, end, Kind.TURN) or not request.group.pin_ns:
        return
    assert core.memory is not None, "only an epoch has a cache"
    assert core.memory.cache is not None, "what was given is in the cache"
    tokens = sequence_of(core, request, end)
    match = core.memory.cache.match(request.group.namespace, tokens, end)
    if match.tokens and not core.memory.cache.pin(match, now_ns + request.group.pin_ns):
        numbers = {"tokens": match.tokens, "pin_ms": request.group.pin_ns // 1_000_000}
        for band, units in zip(core.memory.chain.bands, core.memory.cache.pinned(), strict=True):
            numbers[f"pinned_units_{band.name}"] = units
        out.decisions.append(Decided(now_ns, Verdict.UNPINNED, request.number, "limit", numbers))


def retracted(core: CoreState, request: Request) -> int:
    """The request is about to lose its row: what it wrote goes to the cache, so that it can be resumed from there.

    All of it can be evicted once the row is gone. How many tokens another start would find then.
    """
    _leave_behind(core, request, request.prompt_tokens + int(core.rows.output[request.row]), Kind.RETRACTED)
    return stays(core, request)


def _leave_behind(core: CoreState, request: Request, end: int, kind: Kind) -> bool:
    """Give the pages that a row wrote of its first `end` tokens, all committed, and its newest state among them.

    The working slot holds the state after all tokens that launched forwards consumed, the newest of which may be in
    flight: whoever reads it, or what that one writes, is ordered behind it. It is given where a checkpoint may stand,
    anywhere without checkpoint slots. Else the row's kept state is, which is never behind the working one; where it
    waited to be given anyway, both are. Whether there was a cache to give to.
    """
    memory, rows, row = core.memory, core.rows, request.row
    assert memory is not None, "only an epoch has rows"
    if memory.cache is None or request.lock is None or not request.group.store:
        return False
    written = request.processed_tokens
    if written >= request.target_tokens:
        # The newest token was sampled by a processed forward and is no input of one.
        written = max(written, request.prompt_tokens + int(rows.output[row]) - 1)
    written = min(written, end)
    if memory.state < 0:
        give(core, request, written)
        return True
    consumed, kept = int(rows.scheduled[row]), int(rows.floor[row])
    at_end = 0 < consumed <= end and consumed % (memory.checkpoint_interval or 1) == 0
    waits = core.gifts.get(row)
    at_kept = kept != NO_FLOOR and kept <= end and (not at_end or waits is not None)
    give(core, request, max(written, consumed if at_end else 0, kept if at_kept else 0))
    if at_kept and place(core, request, kept, int(rows.slots[row, 1]), waits.kind if waits is not None else kind):
        rows.slots[row, 1] = 0
    if at_end and place(core, request, consumed, int(rows.slots[row, 0]), kind):
        rows.slots[row, 0] = 0
    return True


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
        core.memory.keep_quota(request.group.namespace)
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
    output = np.frombuffer(core.output_of(request), np.int64)
    assert end <= request.prompt_tokens + len(output), "only what is committed is asked for"
    return np.concatenate([prompt, output[: end - request.prompt_tokens]])
