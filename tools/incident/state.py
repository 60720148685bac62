"""State: a core out of a snapshot, with pseudonyms in place of what users wrote.

Owns the list of places in the core's state where names and tokens lie. Must never change a number, an order or an
identity of objects: what the core decides from there on must be what it decided. Work and memory are those of one
state.

One thing in it cannot be mapped: paths that were evicted are known by a digest of their last tokens alone. Where a
later prompt of the journal shows which tokens those were, the digest is made anew (`ghosts`); one that nobody asks for
again is drawn.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from allocator.columns import i64
from daemon.core.arrival import content_digest
from daemon.core.fair import FairShare
from daemon.core.memory import Memory
from daemon.core.requests import Group, Request
from daemon.core.scheduler import SchedulerCore
from daemon.core.state import CoreState
from daemon.core.tree import PrefixTree
from daemon.core.tree_nodes import Node
from daemon.core.visits import Visits
from tools.incident.pseudonyms import Tip
from tools.incident.values import Values, request_logprobs

replace = msgspec.structs.replace


class Tips:
    """Where sequences end: of prompts by front end and id (mapped), of live requests by number."""

    def __init__(self) -> None:
        self.prompts: dict[tuple[str, str], Tip] = {}
        self.requests: dict[int, Tip] = {}


def redact(core: SchedulerCore, values: Values, ghosts: dict[bytes, bytes]) -> Tips:
    """Put pseudonyms into the core's state, in place; `ghosts` maps digests of evicted paths that come back."""
    state, tips, names = core.state, Tips(), values.names
    prompts = {number: _sequence(state, request) for number, request in state.requests.items()}
    memories = [memory for memory in (state.memory, state.measure) if memory is not None]
    _rename_config(state, memories, values)
    state.frontends = [names.frontend(name) for name in state.frontends]
    state.frontend_index = {names.frontend(name): at for name, at in state.frontend_index.items()}
    for group in state.groups.values():
        key = state.frontends[group.frontend], names.id(group.id)
        tips.prompts[key] = _group(group, values)
    state.groups = {(at, group.id): group for (at, _), group in state.groups.items()}
    state.ended_groups = {(at, group.id): group for (at, _), group in state.ended_groups.items()}
    stops = np.zeros_like(state.stop_uses)
    for stop in np.flatnonzero(state.stop_uses).tolist():
        stops[values.tokens.stop_id(stop)] = state.stop_uses[stop]
    state.stop_uses = stops
    tails = np.zeros_like(state.rows.tail)
    for number, request in state.requests.items():
        tips.requests[number] = _request(state, request, prompts[number], values, tips, tails)
    state.rows.tail = tails
    _accounts(state, values)
    for memory in {id(one): one for one in memories}.values():
        if memory.cache is not None:
            _tree(memory.cache, values, ghosts)
    return tips


def _sequence(state: CoreState, request: Request) -> tuple[bytes, bytes]:
    """Prompt and output of a live request as they were."""
    return request.group.prompt.tobytes(), state.output_of(request)


def _rename_config(state: CoreState, memories: list[Memory], values: Values) -> None:
    config = values.config(state.config)
    if config == state.config:
        return
    state.config = config
    for memory in memories:
        memory._config = config


def _group(group: Group, values: Values) -> Tip:
    """One request's content; the end of its prompt."""
    namespace, closed = group.namespace, group.live == 0
    group.generate, tip = values.generate(group.generate)
    if closed:
        tip = values.without_prompt(namespace, group.digest)
        group.digest = values.names.digest(group.digest)
    else:
        group.prompt = i64(group.generate.prompt)
        group.stop_ids = np.unique(i64(group.generate.stop_ids))
        group.digest = content_digest(group.generate)
    group.id, group.namespace = group.generate.id, group.generate.namespace
    group.sampling = values.sampling(group.sampling)
    group.accepted = replace(group.accepted, id=group.id, seed=values.names.seed(group.accepted.seed))
    group.ended = {choice: values.finished(ended) for choice, ended in group.ended.items()}
    group.outputs = {choice: values.tokens.column(tip, output)[0] for choice, output in group.outputs.items()}
    group.logprobs = {choice: request_logprobs(entries) for choice, entries in group.logprobs.items()}
    return tip


def _request(
    state: CoreState,
    request: Request,
    was: tuple[bytes, bytes],
    values: Values,
    tips: Tips,
    tails: np.ndarray[Any, Any],
) -> Tip:
    """One live choice, whose group is mapped already; the end of its output."""
    group = request.group
    prompt_tip = tips.prompts[state.frontends[group.frontend], group.id]
    output, tip = values.tokens.column(prompt_tip, was[1])
    at, kept = 0, []
    for part in request.kept:
        kept.append(output[at : at + len(part)])
        at += len(part)
    request.kept = kept
    if request.row >= 0:
        newest = output[at:]
        tails[request.row, : len(newest) // 8] = np.frombuffer(newest, np.int64)
    if request.sequence is not None:
        covered = len(request.sequence)
        whole = i64(group.prompt.tobytes() + output)
        request.sequence = group.prompt if covered == len(group.prompt) else whole[:covered].copy()
    if request.lock is not None:
        request.lock.namespace = group.namespace
    if request.match is not None:
        request.match = request.match._replace(namespace=group.namespace)
    request.prompt_logprobs = request_logprobs(request.prompt_logprobs)
    request.output_logprobs = request_logprobs(request.output_logprobs)
    return tip


def _accounts(state: CoreState, values: Values) -> None:
    """What is kept by namespace outside of the cache."""
    named = values.names.namespace
    expected = state.expected
    expected._estimates = {named(name): one for name, one in expected._estimates.items()}
    discipline = state.queue._discipline
    if isinstance(discipline, FairShare):
        for account in discipline._accounts.values():
            account.namespace = named(account.namespace)
        discipline._accounts = {account.namespace: account for account in discipline._accounts.values()}


# --- the prefix cache ----------------------------------------------------------------------------------------------


def _tree(cache: PrefixTree, values: Values, ghosts: dict[bytes, bytes]) -> None:
    """The nodes of every namespace, from its root down, and the digests of paths."""
    tree, named = cache._tree, values.names.namespace
    for space in tree.spaces.values():
        tip = values.tokens.root(space.name)
        space.name = named(space.name)
        space.root.tokens = space.name.encode()
        stack: list[tuple[Node, Tip]] = [(space.root, tip)]
        while stack:
            node, end = stack.pop()
            children = list(node.children.values())
            for child in children:
                child.tokens, behind = values.tokens.column(end, child.tokens)
                stack.append((child, behind))
            node.children = {child.tokens[: tree.shape.page_bytes]: child for child in children}
    tree.spaces = {space.name: space for space in tree.spaces.values()}
    tree.space_orders = {named(name): order for name, order in tree.space_orders.items()}
    tree.over = {named(name): None for name in tree.over}
    if tree.visits is not None:
        _visits(tree.visits, values, ghosts)


def _visits(visits: Visits, values: Values, ghosts: dict[bytes, bytes]) -> None:
    def renamed(key: bytes) -> bytes:
        return ghosts.get(key) or values.names.keyed("ghost", key) if key else key

    known = {id(visit): visit for visit in visits._ghosts.values()}
    for waiting in visits._waiting:
        known |= {id(visit): visit for visit in waiting}
    visits._ghosts = {renamed(key): visit for key, visit in visits._ghosts.items()}
    for visit in known.values():
        visit.ghost = renamed(visit.ghost)
