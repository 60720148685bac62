"""Arrival: every check an arriving request passes, each with its own code, and what an accepted one becomes.

Owns the tables `RANGES` and `FLOAT_RANGES` and the order of the checks. Must never raise on anything a front end can
send, and never hold anything for a refused request. Invariant: a refusal names the field, the limit and the value;
the same content under a known id is answered with its present state and changes nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from allocator.capacity import CapacityRefusal, Demand
from allocator.columns import Int64s, i64
from allocator.demand import stored_tokens
from daemon.core import deadlines
from daemon.core.budget import shortage
from daemon.core.inputs import Arrived
from daemon.core.limits import CoreConfig
from daemon.core.memory import Memory
from daemon.core.outputs import Decided, Outputs, Reply
from daemon.core.reasons import RefusalCode, Verdict
from daemon.core.requests import Group, Request
from daemon.core.state import CoreState
from ipc.messages import Accepted, Generate, ModelFacts, Refused

NAME_CHARS_MAX = 256
PRIORITY_MAX = 1_000_000
DEADLINE_MS_MAX = 7 * 24 * 3600 * 1000
PIN_MS_MAX = 7 * 24 * 3600 * 1000
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
COUNT_MAX = 2**31 - 1
RETRY_MS_MIN, RETRY_MS_MAX = 100, 30_000


class Problem(NamedTuple):
    """Why a request is refused: the code, the field of `Generate` or `Sampling` at fault, and the numbers.

    `short` says where the empty memory lacks how much, for what never fits it.
    """

    code: RefusalCode
    field: str
    message: str
    limit: int = 0
    value: int = 0
    retry_after_ms: int = 0
    short: CapacityRefusal | None = None


class Plan(NamedTuple):
    """What was worked out about a request that passed: its prompt, most output and most units per band."""

    prompt: Int64s
    max_output: int
    ceiling: Demand
    steady: Demand


IntRange = tuple[str, Callable[[Generate], int], Callable[[CoreConfig], int], Callable[[CoreConfig], int]]

# field, value, lowest, highest
RANGES: list[IntRange] = [
    ("n", lambda g: g.n, lambda c: 1, lambda c: c.n_max),
    ("max_tokens", lambda g: 0 if g.max_tokens is None else g.max_tokens, lambda c: 0, lambda c: COUNT_MAX),
    ("min_tokens", lambda g: g.min_tokens, lambda c: 0, lambda c: COUNT_MAX),
    ("priority", lambda g: g.priority, lambda c: -PRIORITY_MAX, lambda c: PRIORITY_MAX),
    ("deadline_ms", lambda g: g.deadline_ms, lambda c: 0, lambda c: DEADLINE_MS_MAX),
    ("pin_ms", lambda g: g.pin_ms, lambda c: 0, lambda c: PIN_MS_MAX),
    ("top_k", lambda g: g.sampling.top_k, lambda c: 0, lambda c: COUNT_MAX),
    ("seed", lambda g: g.sampling.seed or 0, lambda c: INT64_MIN, lambda c: INT64_MAX),
    ("logprobs", lambda g: g.sampling.logprobs, lambda c: -1, lambda c: c.logprobs_max),
    ("prompt_logprobs", lambda g: g.sampling.prompt_logprobs, lambda c: -1, lambda c: c.logprobs_max),
    ("id", lambda g: len(g.id), lambda c: 1, lambda c: NAME_CHARS_MAX),
    ("namespace", lambda g: len(g.namespace), lambda c: 0, lambda c: NAME_CHARS_MAX),
]

# field, lowest, lowest is allowed, highest
FLOAT_RANGES: list[tuple[str, float, bool, float]] = [
    ("temperature", 0.0, True, 100.0),
    ("top_p", 0.0, False, 1.0),
    ("min_p", 0.0, True, 1.0),
    ("repetition_penalty", 0.0, False, 100.0),
    ("presence_penalty", -2.0, True, 2.0),
    ("frequency_penalty", -2.0, True, 2.0),
]


def arrive(core: CoreState, item: Arrived, out: Outputs) -> None:
    """Accept, refuse or answer again; exactly one of the three, with its decision and reply."""
    generate = item.generate
    outcome = _examine(core, item)
    frontend = core.intern(item.frontend)
    if isinstance(outcome, Group):
        core.totals.repeated += 1
        out.replies.append(Reply(frontend, outcome.accepted))
        out.replies.extend(Reply(frontend, outcome.ended[choice]) for choice in sorted(outcome.ended))
        return
    choices = generate.n if 1 <= generate.n <= core.config.n_max else 1
    core.totals.received += choices
    if isinstance(outcome, Problem):
        core.totals.refused += choices
        _refuse(frontend, item, outcome, choices, out)
    else:
        core.totals.accepted += choices
        _accept(core, frontend, item, outcome, out)


def content_digest(generate: Generate) -> bytes:
    """16 bytes that tell requests of equal content from others, for an id that comes twice."""
    return hashlib.blake2b(msgspec.msgpack.encode(generate), digest_size=16).digest()


def _examine(core: CoreState, item: Arrived) -> Problem | Group | Plan:
    generate = item.generate
    known = core.group_of(item.frontend, generate.id)
    if known is not None and known.digest == content_digest(generate):
        return known
    if core.facts is None:
        return Problem(RefusalCode.NOT_READY, "", "the model is not loaded yet; try again", retry_after_ms=1000)
    problem = _bad_number(core.config, generate) or _bad_tokens(core.config, core.facts, generate)
    if problem is not None:
        return problem
    if known is not None:
        return Problem(RefusalCode.ID_CONFLICT, "id", f"id {generate.id!r} is in use by a request of other content")
    problem = _closed(core)
    if problem is not None:
        return problem
    plan = _lengths(core, core.facts, generate)
    if not isinstance(plan, Plan):
        return plan
    return _too_late(core, generate, plan) or _queue_full(core, generate.n) or plan


def _bad(field: str, message: str, limit: int = 0, value: int = 0) -> Problem:
    return Problem(RefusalCode.BAD_PARAMETER, field, message, limit, value)


def _bad_number(config: CoreConfig, generate: Generate) -> Problem | None:
    for field, value_of, lowest_of, highest_of in RANGES:
        value, lowest, highest = value_of(generate), lowest_of(config), highest_of(config)
        if not lowest <= value <= highest:
            limit = lowest if value < lowest else highest
            what = f"the length of {field}" if field in ("id", "namespace") else field
            return _bad(field, f"{what} must be from {lowest} to {highest}, not {value}", limit, value)
    for field, low, low_allowed, high in FLOAT_RANGES:
        number: float = getattr(generate.sampling, field)
        if not math.isfinite(number) or number > high or number < low or (number == low and not low_allowed):
            bounds = f"from {low} to {high}" if low_allowed else f"above {low} and at most {high}"
            return _bad(field, f"{field} must be {bounds}, not {number}")
    if generate.priority and config.schedule_policy == "fcfs":
        text = f"priority {generate.priority} has no meaning under --schedule-policy fcfs; leave it out or serve with"
        return _bad("priority", f"{text} --schedule-policy priority", 0, generate.priority)
    if generate.pin_ms and not (generate.store and config.enable_prefix_caching):
        why = "the prefix cache is off" if generate.store else "store is false"
        return _bad("pin_ms", f"pin_ms {generate.pin_ms} has no meaning where {why}; leave it out", 0, generate.pin_ms)
    if generate.n > config.max_queued_requests:
        text = f"n is {generate.n}, but at most {config.max_queued_requests} (--max-queued-requests) can ever wait"
        return _bad("n", f"{text}; ask for fewer choices at once", config.max_queued_requests, generate.n)
    if generate.max_tokens == 0 and generate.sampling.prompt_logprobs < 0:
        return _bad("max_tokens", "max_tokens must be at least 1 unless prompt_logprobs is asked for, not 0", 1, 0)
    return None


def _bad_tokens(config: CoreConfig, facts: ModelFacts, generate: Generate) -> Problem | None:
    for field, column in (("prompt", generate.prompt), ("stop_ids", generate.stop_ids)):
        if len(column) % 8:
            return _bad(field, f"{field} must be whole int64 token ids, not {len(column)} bytes", 8, len(column))
    if not generate.prompt:
        return Problem(RefusalCode.EMPTY_PROMPT, "prompt", "the prompt must have at least 1 token, not 0", 1, 0)
    stops = len(generate.stop_ids) // 8
    if stops > config.stop_ids_max:
        text = f"at most {config.stop_ids_max} stop_ids are allowed, not {stops}"
        return _bad("stop_ids", text, config.stop_ids_max, stops)
    tokens = len(generate.prompt) // 8
    longest = longest_tokens(config, facts)
    if tokens > longest:
        text = f"the prompt has {tokens} tokens, the model's length is {longest}"
        return Problem(RefusalCode.PROMPT_TOO_LONG, "prompt", text, longest, tokens)
    for field, column in (("prompt", generate.prompt), ("stop_ids", generate.stop_ids)):
        problem = _outside_vocabulary(field, i64(column), facts.vocab_size)
        if problem is not None:
            return problem
    return None


def _outside_vocabulary(field: str, ids: Int64s, vocab_size: int) -> Problem | None:
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if not len(outside):
        return None
    at, token = int(outside[0]), int(ids[outside[0]])
    text = f"{field}[{at}] is {token}; token ids go from 0 to {vocab_size - 1}"
    return Problem(RefusalCode.TOKEN_OUT_OF_RANGE, field, text, vocab_size - 1, token)


def longest_tokens(config: CoreConfig, facts: ModelFacts) -> int:
    """The most tokens that a request may have, prompt and output together."""
    return min(config.max_model_len or facts.max_model_len, facts.max_model_len)


def _closed(core: CoreState) -> Problem | None:
    if core.draining:
        return Problem(RefusalCode.DRAINING, "", "the daemon is draining and takes nothing new")
    if core.measure is None:
        return Problem(RefusalCode.NOT_READY, "", "the ranks are not ready; try again", retry_after_ms=1000)
    if core.degraded:
        text = f"the journal cannot promise durability now ({core.degraded}); try again"
        return Problem(RefusalCode.NOT_READY, "", text, retry_after_ms=1000)
    return None


def _lengths(core: CoreState, facts: ModelFacts, generate: Generate) -> Problem | Plan:
    """Fit prompt and output into the model's length, then into what the empty arena can ever hold (`CEILING`)."""
    memory = core.measure
    assert memory is not None, "closed while not ready"
    prompt = i64(generate.prompt)
    longest = longest_tokens(core.config, facts)
    tokens, asked = len(prompt), generate.max_tokens
    if tokens == longest and asked != 0:
        text = f"the prompt has {tokens} tokens, which leaves no room for output in the model's length {longest}"
        return Problem(RefusalCode.PROMPT_TOO_LONG, "prompt", text, longest - 1, tokens)
    may_cut = generate.clip or asked is None
    output = longest - tokens if asked is None else asked
    if tokens + output > longest:
        if not may_cut:
            text = f"{tokens} prompt tokens and max_tokens {output} pass the model's length {longest}"
            return Problem(RefusalCode.OUTPUT_TOO_LONG, "max_tokens", text, longest - tokens, output)
        output = longest - tokens
    room = memory.capacity_tokens  # the newest output token needs no room of its own
    if tokens > room:
        refused, units = _short(memory, tokens)
        text = f"the prompt has {tokens} tokens, the empty memory holds {room}{units}"
        return Problem(RefusalCode.NEVER_FITS, "prompt", text, room, tokens, short=refused)
    if stored_tokens(tokens, output) > room:
        if not may_cut:
            refused, units = _short(memory, stored_tokens(tokens, output))
            text = (
                f"{tokens} prompt tokens and max_tokens {output} pass the {room} tokens the empty memory holds{units}"
            )
            return Problem(RefusalCode.NEVER_FITS, "max_tokens", text, room + 1 - tokens, output, short=refused)
        output = room + 1 - tokens
    if generate.min_tokens > output:
        text = f"min_tokens {generate.min_tokens} is above the {output} output tokens that are allowed"
        return _bad("min_tokens", text, output, generate.min_tokens)
    stored = stored_tokens(tokens, output)
    ceiling = memory.ceiling(stored)
    assert memory.never_fits(ceiling) is None, "an accepted request fits the empty arena"
    return Plan(prompt, output, ceiling, memory.steady(stored))


def _short(memory: Memory, tokens: int) -> tuple[CapacityRefusal, str]:
    """What an empty arena lacks for so many positions, and what they would take of each band, in words too."""
    ceiling = memory.ceiling(tokens)
    refused = memory.never_fits(ceiling)
    assert refused is not None, "a request of more than the empty memory holds never fits"
    units = ", ".join(f"{count} of band {band.name}" for count, band in zip(ceiling, memory.chain.bands, strict=True))
    lacks = f"{refused.units_short} of band {refused.band_name} are missing"
    return refused, f" (it takes up to these units: {units}; {lacks})"


def _too_late(core: CoreState, generate: Generate, plan: Plan) -> Problem | None:
    """Why the deadline cannot be met, even if nobody else were served: held against the fastest of recent steps."""
    prompt_tokens, output_tokens = len(plan.prompt), min(max(generate.min_tokens, 1), plan.max_output)
    best = deadlines.least(core, prompt_tokens, output_tokens) if generate.deadline_ms else None
    if best is None or best.need_ms <= generate.deadline_ms:
        return None
    assert core.measure is not None, "closed while not ready"
    if core.measure.cache is not None and generate.sampling.prompt_logprobs < 0:
        match = core.measure.cache.match(generate.namespace, plan.prompt, prompt_tokens - 1)
        best = deadlines.least(core, prompt_tokens - match.tokens, output_tokens)
        if best is None or best.need_ms <= generate.deadline_ms:
            return None
    text = f"deadline_ms {generate.deadline_ms} cannot be met: at least {best.need_ms} ms are needed ({best.text()})"
    return Problem(RefusalCode.DEADLINE, "deadline_ms", text, best.need_ms, generate.deadline_ms)


def _queue_full(core: CoreState, choices: int) -> Problem | None:
    limit, waiting = core.config.max_queued_requests, len(core.queue)
    if waiting + choices <= limit:
        return None
    wait_ms = core.admit_interval_ns * choices // 1_000_000
    text = f"{waiting} requests wait, {choices} more would pass the limit {limit}; try again later"
    return Problem(
        RefusalCode.QUEUE_FULL, "", text, limit, waiting + choices, min(max(wait_ms, RETRY_MS_MIN), RETRY_MS_MAX)
    )


def _refuse(frontend: int, item: Arrived, problem: Problem, choices: int, out: Outputs) -> None:
    clipped = max(INT64_MIN, min(problem.value, INT64_MAX))  # what a message can carry
    numbers = {"n": choices, "limit": problem.limit, "value": clipped}
    numbers |= shortage(problem.short) if problem.short is not None else {}
    out.decisions.append(Decided(item.now_ns, Verdict.REFUSED, 0, problem.code, numbers))
    refused = Refused(
        id=item.generate.id,
        code=problem.code,
        message=problem.message,
        field=problem.field,
        limit=problem.limit,
        value=clipped,
        retry_after_ms=problem.retry_after_ms,
    )
    out.replies.append(Reply(frontend, refused))


def make_group(frontend: int, generate: Generate, accepted: Accepted, arrived_ns: int, digest: bytes) -> Group:
    """What is kept of an accepted request, all of whose choices live."""
    return Group(
        frontend=frontend,
        id=generate.id,
        digest=digest,
        generate=generate,
        accepted=accepted,
        prompt=i64(generate.prompt),
        stop_ids=np.unique(i64(generate.stop_ids)),
        sampling=msgspec.structs.replace(generate.sampling, seed=accepted.seed),
        live=accepted.n,
        namespace=generate.namespace,
        store=generate.store,
        pin_ns=generate.pin_ms * 1_000_000,
        arrived_ns=arrived_ns,
    )


def make_request(group: Group, choice: int) -> Request:
    """One choice of a group, which waits and is not priced yet."""
    generate, arrived_ns = group.generate, group.arrived_ns
    return Request(
        number=group.accepted.first_request + choice,
        group=group,
        choice=choice,
        prompt_tokens=len(group.prompt),
        max_output=group.accepted.max_tokens,
        min_output=generate.min_tokens,
        ceiling=(),
        steady=(),
        priority=generate.priority,
        arrived_ns=arrived_ns,
        deadline_ns=arrived_ns + generate.deadline_ms * 1_000_000 if generate.deadline_ms else 0,
    )


def _accept(core: CoreState, frontend: int, item: Arrived, plan: Plan, out: Outputs) -> None:
    generate = item.generate
    first = core.next_request
    core.next_request += generate.n
    seed = item.seed if generate.sampling.seed is None else generate.sampling.seed
    accepted = Accepted(generate.id, first, generate.n, plan.max_output, seed)
    group = make_group(frontend, generate, accepted, item.now_ns, content_digest(generate))
    core.groups[frontend, generate.id] = group
    core.stop_uses[group.stop_ids] += 1
    for choice in range(generate.n):
        request = make_request(group, choice)
        request.ceiling, request.steady = plan.ceiling, plan.steady
        core.enter(request, item.now_ns)
        deadlines.watch(core, request, item.now_ns)
    numbers = {"n": generate.n, "prompt_tokens": len(plan.prompt), "max_tokens": plan.max_output}
    out.decisions.append(Decided(item.now_ns, Verdict.ACCEPTED, first, "", numbers))
    out.replies.append(Reply(frontend, accepted))
