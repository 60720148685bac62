"""Lives: what one life of the daemon leaves to the next.

Owns both directions: `recoverable` reads it out of a core that has replayed the old life's inputs, `recovered` is the
first input of the new one. Must never change a core that it reads. Invariants: numbers, arrival, seeds and output stay,
so that the same tokens follow; what had ended stays known until it is acknowledged; nothing of the device is taken
over.
"""

from __future__ import annotations

from allocator.errors import InvariantBroken
from daemon.core import deadlines, suspects
from daemon.core.arrival import content_digest, make_group, make_request
from daemon.core.endings import close_group
from daemon.core.inputs import Recovered, RecoveredChoice, RecoveredGroup
from daemon.core.kept_logprobs import bound, keep, shared, size_of, unknown
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import Verdict
from daemon.core.requests import Group, Request
from daemon.core.state import CoreState
from ipc.messages import RequestLogprobs


def recoverable(core: CoreState) -> list[RecoveredGroup]:
    """Every group that has not ended, or whose end nobody acknowledged, in the order of arrival."""
    return [_group(core, group) for group in sorted(core.groups.values(), key=lambda one: one.accepted.first_request)]


def recovered(core: CoreState, item: Recovered, out: Outputs) -> None:
    """Take over what an earlier life left; the first input of a life, or the first few."""
    if core.totals.received or core.facts is not None:
        raise InvariantBroken(
            "core.recovered",
            f"what an earlier life left comes first in a life, not behind {core.totals.received} arrivals or an epoch",
        )
    for left in item.groups:
        _take_over(core, left, item.now_ns, out)
    bound(core)
    if item.next_request < core.next_request:
        raise InvariantBroken(
            "core.recovered", f"the next free number is {item.next_request}, but {core.next_request - 1} is taken"
        )
    core.next_request = item.next_request


def _group(core: CoreState, group: Group) -> RecoveredGroup:
    first = group.accepted.first_request
    return RecoveredGroup(
        frontend=core.frontends[group.frontend],
        generate=group.generate,
        seed=group.accepted.seed,
        accepted=group.accepted,
        arrived_ns=group.arrived_ns,
        choices=[_choice(core, group, number - first) for number in range(first, first + group.accepted.n)],
        digest=group.digest if group.live == 0 else b"",
    )


def _choice(core: CoreState, group: Group, choice: int) -> RecoveredChoice:
    request = core.requests.get(group.accepted.first_request + choice)
    if request is None:
        return RecoveredChoice(group.outputs[choice], group.ended[choice], group.logprobs.get(choice, []))
    losses, furthest_tokens = suspects.standing(core, request)
    tokens = core.output_of(request)
    return RecoveredChoice(
        tokens=tokens,
        logprobs=request.logprobs,
        prompt_logprobs_next=request.prompt_logprobs_next,
        retractions=request.retractions,
        started=request.started,
        cached_tokens=request.cached_tokens,
        matched_tokens=request.matched_tokens,
        hit_cut=request.hit_cut,
        losses=losses,
        furthest_tokens=furthest_tokens,
        confirmed=len(tokens) // 8 if request.confirmed < 0 else request.confirmed,
    )


def _take_over(core: CoreState, left: RecoveredGroup, now_ns: int, out: Outputs) -> None:
    accepted = left.accepted
    if accepted.first_request < core.next_request or len(left.choices) != accepted.n:
        raise InvariantBroken(
            "core.recovered",
            f"group {accepted.id!r} of {len(left.choices)} choices begins at number {accepted.first_request},"
            f" but has {accepted.n}, and {core.next_request} is the next free one",
        )
    core.next_request = accepted.first_request + accepted.n
    frontend = core.intern(left.frontend)
    digest = left.digest or content_digest(left.generate)
    group = make_group(frontend, left.generate, accepted, left.arrived_ns, digest)
    core.groups[frontend, accepted.id] = group
    for choice, was in enumerate(left.choices):
        if was.ended is None:
            _go_on(core, make_request(group, choice), was, now_ns, out)
            continue
        group.live -= 1
        group.ended[choice], group.outputs[choice] = was.ended, was.tokens
        prompt, output = _logprobs(group, choice, was)
        if prompt or output:
            group.logprobs[choice] = [*prompt, *output]
            keep(core, group, accepted.first_request + choice, size_of(group.logprobs[choice]))
    if group.live == 0:
        close_group(core, group)


def _go_on(core: CoreState, request: Request, was: RecoveredChoice, now_ns: int, out: Outputs) -> None:
    """One choice waits as it would have after a retraction."""
    request.kept, request.output_tokens = [was.tokens] if was.tokens else [], len(was.tokens) // 8
    sure = request.output_tokens if was.confirmed < 0 else was.confirmed
    request.confirmed = min(sure, request.output_tokens)  # output may have been left out
    request.prompt_logprobs, request.output_logprobs = _logprobs(request.group, request.choice, was)
    keep(core, request.group, request.number, size_of(request.logprobs))
    request.prompt_logprobs_next = was.prompt_logprobs_next
    request.retractions, request.started = was.retractions, was.started
    request.cached_tokens, request.matched_tokens, request.hit_cut = was.cached_tokens, was.matched_tokens, was.hit_cut
    request.losses, request.furthest_tokens = was.losses, was.furthest_tokens
    request.advanced_from = was.furthest_tokens
    core.enter(request, now_ns)
    core.totals.recovered += 1
    deadlines.watch(core, request, now_ns)
    numbers = {"output_tokens": request.output_tokens, "retractions": request.retractions}
    out.decisions.append(Decided(now_ns, Verdict.RECOVERED, request.number, "", numbers))


def _logprobs(group: Group, choice: int, was: RecoveredChoice) -> tuple[list[RequestLogprobs], list[RequestLogprobs]]:
    """Those of the prompt that were delivered, and one per output token: not known where they were left out."""
    prompt = [entry for entry in was.logprobs if entry.prompt_position >= 0]
    output = [shared(entry) for entry in was.logprobs if entry.prompt_position < 0]
    if group.sampling.logprobs >= 0:
        output += unknown(group.accepted.first_request + choice, len(was.tokens) // 8 - len(output))
    return prompt, output
