"""Endings: the one place where a request ends, and where it gives everything back without ending.

Owns the terminal decision and message of each choice and the memory of ended ids. Must never end a request twice (the
life table raises) or leave it holding anything. Invariant: one `Decided(ENDED)` and one `Finished` per accepted choice.
"""

from __future__ import annotations

import msgspec
import numpy as np

from allocator.capacity import Demand
from daemon.core import caching
from daemon.core.kept_logprobs import drop, joined
from daemon.core.outputs import Decided, Outputs, Reply
from daemon.core.reasons import EndReason, Verdict
from daemon.core.requests import END_EVENT, Event, Group, Request, State
from daemon.core.state import ENDED_BYTES_MAX, ENDED_GROUPS_MAX, CoreState
from ipc.messages import Finished

_TOTAL_OF = {Event.FINISH: "finished", Event.ABORT: "aborted", Event.FAIL: "failed"}


def end(
    core: CoreState,
    request: Request,
    reason: EndReason,
    detail: str,
    now_ns: int,
    out: Outputs,
    output_tokens: int | None = None,
) -> None:
    """End a live request, wherever it stands; `output_tokens` is the usage when it is less than what was committed."""
    event = END_EVENT[reason]
    if event is Event.FINISH and request.row >= 0:
        caching.finish(core, request, output_tokens, now_ns, out)
    leave(core, request)
    core.move(request, event)
    assert request.row < 0, "what ended has no row"
    assert request is not core.resident, "what ended is not being prefilled"
    setattr(core.totals, _TOTAL_OF[event], getattr(core.totals, _TOTAL_OF[event]) + 1)
    del core.requests[request.number]
    core.deadlines.ended(request.number)
    core.suspects.pop(request.number, None)
    group = request.group
    if event is Event.FINISH:
        core.expected.finished(group.namespace, request.output_tokens, request.max_output)
    usage = request.output_tokens if output_tokens is None else max(0, min(output_tokens, request.output_tokens))
    group.outputs[request.choice] = b"".join(request.kept)
    logprobs = joined(core, request)
    if logprobs:
        group.logprobs[request.choice] = logprobs
    request.kept = []
    finished = Finished(
        id=group.id,
        choice=request.choice,
        request=request.number,
        reason=reason,
        detail=detail,
        prompt_tokens=request.prompt_tokens,
        output_tokens=usage,
        cached_tokens=request.cached_tokens,
        matched_tokens=request.matched_tokens,
        hit_cut=request.hit_cut,
    )
    group.ended[request.choice] = finished
    group.live -= 1
    assert group.live >= 0, "a choice ends once"
    if group.live == 0:
        close_group(core, group)
    numbers = {
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": usage,
        "retractions": request.retractions,
        "age_ms": (now_ns - request.arrived_ns) // 1_000_000,
    }
    out.decisions.append(Decided(now_ns, Verdict.ENDED, request.number, reason, numbers))
    out.replies.append(Reply(group.frontend, finished))


def leave(core: CoreState, request: Request) -> Demand:
    """Take a live request out of the queue or off its row; returns the units of each band that it gave back."""
    core.blocked = False
    core.busy = True
    if request.state in (State.WAITING, State.RETRACTED):
        core.queue.remove(request)
        return ()
    caching.leave(core, request)
    return core.release_row(request)


def end_all(core: CoreState, reason: EndReason, detail: str, now_ns: int, out: Outputs) -> None:
    """End every live request, oldest first."""
    for number in sorted(core.requests):
        end(core, core.requests[number], reason, detail, now_ns, out)


def end_group(core: CoreState, group: Group, reason: EndReason, detail: str, now_ns: int, out: Outputs) -> None:
    """End what still lives of one arrival."""
    for request in core.choices_of(group):
        end(core, request, reason, detail, now_ns, out)


def forget(core: CoreState, group: Group) -> None:
    """Drop an ended id: the front end may use it again."""
    assert group.live == 0, "only ended ids are forgotten"
    del core.groups[group.frontend, group.id]
    del core.ended_groups[group.frontend, group.id]
    core.ended_bytes -= _kept_bytes(group)


def close_group(core: CoreState, group: Group) -> None:
    """All choices of a group have ended: of its content the digest is left, and what each of them said."""
    assert len(group.ended) == group.accepted.n, "every choice of a closed group has its end"
    if len(core.stop_uses):
        core.stop_uses[group.stop_ids] -= 1
    group.prompt = group.stop_ids = np.zeros(0, np.int64)
    group.generate = msgspec.structs.replace(group.generate, prompt=b"", stop_ids=b"")
    for number in range(group.accepted.first_request, group.accepted.first_request + group.accepted.n):
        drop(core, number)
    core.ended_groups[group.frontend, group.id] = group
    core.ended_bytes += _kept_bytes(group)
    _bound(core)


def replace_end(core: CoreState, group: Group, choice: int, ended: Finished, output: bytes) -> None:
    """Keep another end and output of a choice that has ended, without log probabilities."""
    before = _kept_bytes(group)
    group.ended[choice], group.outputs[choice] = ended, output
    group.logprobs.pop(choice, None)
    if group.live == 0:
        core.ended_bytes += _kept_bytes(group) - before
        _bound(core)
    else:
        drop(core, group.accepted.first_request + choice)


def _bound(core: CoreState) -> None:
    """Of ended ids that nobody acknowledges the oldest are forgotten, and what was closed just now is the newest."""
    while len(core.ended_groups) > ENDED_GROUPS_MAX or core.ended_bytes > ENDED_BYTES_MAX:
        forget(core, next(iter(core.ended_groups.values())))


def _kept_bytes(group: Group) -> int:
    """Bytes of a closed group's outputs and log probabilities."""
    values = [entry.values for entries in group.logprobs.values() for entry in entries]
    columns = sum(len(one.chosen) + len(one.ranks) + len(one.top_ids) + len(one.top_values) for one in values)
    return columns + sum(len(output) for output in group.outputs.values())
