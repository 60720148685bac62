"""Resuming: a front end comes back for a choice and says what of its output reached the client.

Owns the reply `Continued` and what is done where both sides know different output. Must never let a client see a token
twice or miss one: the reply begins right behind what the client holds, and what was committed since comes with it.

    the client holds   the first tokens of ours           -> it gets the rest
                       more, or others behind `confirmed` -> that is the output: a client has seen it; goes on there
                       anything else                      -> reason fault

Output up to `confirmed` was said before a machine may have lost what clients were told behind it. It stays there over
any number of lives, however far they compute, until the client comes back; nothing can be lost any more then.
"""

from __future__ import annotations

import msgspec
import numpy as np

from allocator.columns import Int64s, i64
from daemon.core.endings import end, replace_end
from daemon.core.inputs import Resumed
from daemon.core.kept_logprobs import replace_output, unknown
from daemon.core.outputs import Decided, Outputs, Reply
from daemon.core.reasons import EndReason, RefusalCode, Verdict
from daemon.core.requests import CAME_BACK, Group, Request
from daemon.core.requeue import requeue
from daemon.core.state import CoreState
from ipc.messages import Continued, Refused, RequestLogprobs


def resumed(core: CoreState, item: Resumed, out: Outputs) -> None:
    """Answer with what the client lacks; with the end, if there is one; or with a refusal for what is not known."""
    group = core.group_of(item.frontend, item.id)
    if group is None or not 0 <= item.choice < group.accepted.n:
        out.replies.append(Reply(core.intern(item.frontend), _unknown(item, group)))
        return
    core.totals.resumed += 1
    number, held = group.accepted.first_request + item.choice, i64(item.tokens)
    request = core.requests.get(number)
    ours = i64(core.output_of(request) if request is not None else group.outputs[item.choice])
    agreed = _agreed(held, ours)
    if agreed == len(held):
        if request is not None:
            request.confirmed = CAME_BACK
    elif request is None:
        _conflict_behind_the_end(core, group, item.choice, held, agreed)
    elif 0 <= request.sure_tokens <= agreed and _can_be(core, request, held):
        _adopt(core, request, held, len(ours), item.now_ns, out)
    else:
        end(core, request, EndReason.FAULT, _conflict(held, ours, agreed), item.now_ns, out)
        return
    _tell(core, group, item.choice, len(held), out)
    if request is not None and request.number in core.requests:
        _end_if_complete(core, request, held, item.now_ns, out)


def _tell(core: CoreState, group: Group, choice: int, position: int, out: Outputs) -> None:
    """Where a choice goes on behind its first `position` output tokens, and its end, if it has one."""
    request = core.requests.get(group.accepted.first_request + choice)
    ended = group.ended.get(choice)
    if request is not None:
        output, logprobs = core.output_of(request), request.logprobs
    else:
        assert ended is not None, "a choice that is not live has ended"
        output, logprobs = group.outputs[choice][: 8 * ended.output_tokens], group.logprobs.get(choice, [])
    told = _behind(logprobs, position, len(output) // 8)
    continued = Continued(
        id=group.id,
        choice=choice,
        request=group.accepted.first_request + choice,
        output_tokens=position,
        tokens=output[8 * position :],
        logprobs=told,
    )
    out.replies.append(Reply(group.frontend, continued))
    if ended is not None:
        out.replies.append(Reply(group.frontend, ended))


def _unknown(item: Resumed, group: Group | None) -> Refused:
    """Nothing is held of what the front end names."""
    if group is not None:
        most = group.accepted.n - 1
        text = f"choices of request {item.id!r} go from 0 to {most}, not {item.choice}"
        return Refused(item.id, RefusalCode.BAD_PARAMETER, text, "choice", most, item.choice)
    text = f"no request {item.id!r} is known: it was never accepted, or its end was acknowledged; send it again"
    return Refused(item.id, RefusalCode.UNKNOWN_REQUEST, text, "id")


def _agreed(held: Int64s, ours: Int64s) -> int:
    """How many tokens both begin with."""
    shorter = min(len(held), len(ours))
    differ = np.flatnonzero(held[:shorter] != ours[:shorter])
    return int(differ[0]) if len(differ) else shorter


def _conflict(held: Int64s, ours: Int64s, agreed: int) -> str:
    return (
        f"the client holds {len(held)} output tokens and the daemon {len(ours)}, of which only the first {agreed}"
        " agree; one of them is wrong"
    )


def _conflict_behind_the_end(core: CoreState, group: Group, choice: int, held: Int64s, agreed: int) -> None:
    """The choice ended before its client came back with other tokens: the client is told that, and nothing more."""
    ended = group.ended[choice]
    if agreed >= ended.output_tokens:
        return  # what it holds beyond is behind a stop string that it found itself
    detail = _conflict(held, i64(group.outputs[choice]), agreed)
    fault = msgspec.structs.replace(ended, reason=EndReason.FAULT, detail=detail, output_tokens=len(held))
    replace_end(core, group, choice, fault, held.tobytes())


def _can_be(core: CoreState, request: Request, held: Int64s) -> bool:
    """Whether a client can have been told so much of this request, in this vocabulary."""
    within = core.facts is None or int(held.max()) < core.facts.vocab_size
    return len(held) <= request.max_output and int(held.min()) >= 0 and within


def _adopt(core: CoreState, request: Request, held: Int64s, had: int, now_ns: int, out: Outputs) -> None:
    """The client's tokens take the place of ours, and the request goes on behind them."""
    if request.row >= 0:
        requeue(core, request, now_ns)
    request.kept, request.output_tokens = [held.tobytes()] if len(held) else [], len(held)
    request.match = None
    if len(held):
        request.hold(request.sequence_tokens)
    if request.group.sampling.logprobs >= 0:
        known = request.output_logprobs[: request.sure_tokens]
        replace_output(core, request, known + unknown(request.number, len(held) - len(known)))
    numbers = {"held_tokens": len(held), "output_tokens": had, "confirmed_tokens": request.sure_tokens}
    request.confirmed = CAME_BACK
    out.decisions.append(Decided(now_ns, Verdict.RESUMED, request.number, "adopted", numbers))


def _end_if_complete(core: CoreState, request: Request, held: Int64s, now_ns: int, out: Outputs) -> None:
    """Of tokens that only the client knew, the last one may have been the last one."""
    if request.row >= 0 or not len(held):
        return
    stops = request.group.stop_ids
    if request.output_tokens == len(held) > request.min_output and bool((stops == held[-1]).any()):
        end(core, request, EndReason.STOP, f"stop token {int(held[-1])}", now_ns, out)
    elif len(held) == request.max_output:
        end(core, request, EndReason.LENGTH, f"{request.max_output} output tokens", now_ns, out)


def _behind(logprobs: list[RequestLogprobs], position: int, end: int) -> list[RequestLogprobs]:
    """Of what was delivered everything of the prompt, and that of output tokens [position, end)."""
    prompt = [entry for entry in logprobs if entry.prompt_position >= 0]
    return prompt + logprobs[len(prompt) :][position:end]
