"""Deadlines: when each is looked at, what a request needs at the least, and the end of those that cannot make it.

Owns every decision about a deadline. Must never end a request that has a row before its deadline passed, nor refuse one
that could make it by the times measured: only a best case is held against a deadline.

    best case   prefill   its least number of chunks x the fastest step, or its tokens x the fastest token if longer
                output    the fastest step for each token behind the first that it must produce: `min_tokens`, or one

Times are those of `daemon.core.pace`; what the cache knows now is no work. A request that waits is looked at when it
would have to start, one that has a row when its deadline passes.
"""

from __future__ import annotations

from typing import NamedTuple

from daemon.core import caching
from daemon.core.endings import end
from daemon.core.outputs import Outputs
from daemon.core.reasons import EndReason
from daemon.core.requests import QUEUED, Request
from daemon.core.state import CoreState

NS_PER_MS = 1_000_000


class BestCase(NamedTuple):
    """The least that a request needs from now on: time, and the prompt and output tokens that it is made of."""

    need_ns: int
    prompt_tokens: int
    output_tokens: int

    @property
    def need_ms(self) -> int:
        """Whole milliseconds, rounded up."""
        return -(-self.need_ns // NS_PER_MS)

    def text(self) -> str:
        """What it is made of, in words."""
        return f"at the fastest measured, {self.prompt_tokens} prompt and {self.output_tokens} output tokens"


def least(core: CoreState, prompt_tokens: int, output_tokens: int) -> BestCase | None:
    """The best case of so many tokens to compute; None where deadlines are not checked or too little was measured."""
    if not core.config.deadline_check:
        return None
    chunk_tokens = min(core.config.chunked_prefill_size, core.config.max_batched_tokens)
    need_ns = core.pace.least_ns(prompt_tokens, chunk_tokens, output_tokens)
    return None if need_ns is None else BestCase(need_ns, prompt_tokens, output_tokens)


def watch(core: CoreState, request: Request, now_ns: int) -> None:
    """The request waits from now on: look at it when it would have to start, at the latest when its deadline passes."""
    if request.deadline_ns:
        best = least(core, *_work(request))
        _look_at(core, request, request.deadline_ns - (best.need_ns if best is not None else 0), now_ns)


def expire(core: CoreState, now_ns: int, out: Outputs) -> None:
    """End everything whose deadline passed, and what waits and cannot make its own any more."""
    due_ns = core.due_ns()
    while due_ns is not None and due_ns <= now_ns:
        request = core.requests[core.deadlines.pop()]
        if request.deadline_ns <= now_ns:
            end(core, request, EndReason.DEADLINE, _passed(request, now_ns), now_ns, out)
        else:
            _look(core, request, now_ns, out)
        due_ns = core.due_ns()


def _deadline_ms(request: Request) -> int:
    return (request.deadline_ns - request.arrived_ns) // NS_PER_MS


def _passed(request: Request, now_ns: int) -> str:
    """What its client is told: which deadline, how late that was seen, and how far it had come."""
    late_ms = (now_ns - request.deadline_ns) // NS_PER_MS
    came = "it was running" if request.row >= 0 else "it waited again" if request.started else "it never started"
    return f"deadline_ms {_deadline_ms(request)} passed {late_ms} ms ago; {came}"


def _look(core: CoreState, request: Request, now_ns: int, out: Outputs) -> None:
    """End a waiting request that cannot make its deadline; else say when to look again."""
    left_ns, need_ns = request.deadline_ns - now_ns, 0
    if request.state in QUEUED and core.memory is not None:
        match = caching.look(core, request)
        prompt_tokens, output_tokens = _work(request)
        best = least(core, prompt_tokens - (match.tokens if match is not None else 0), output_tokens)
        if best is not None and best.need_ns > left_ns:
            left = f"of deadline_ms {_deadline_ms(request)}, {left_ns // NS_PER_MS} ms are left"
            detail = f"{left} and {best.need_ms} are needed ({best.text()})"
            end(core, request, EndReason.DEADLINE, detail, now_ns, out)
            return
        need_ns = best.need_ns if best is not None else 0
    _look_at(core, request, request.deadline_ns - need_ns, now_ns)


def _look_at(core: CoreState, request: Request, at_ns: int, now_ns: int) -> None:
    assert request.deadline_ns > 0, "a request without a deadline is never looked at"
    core.deadlines.add(min(max(at_ns, now_ns + 1), request.deadline_ns), request.number)


def _work(request: Request) -> tuple[int, int]:
    """Tokens that a waiting request computes before its next output token, and those that it must still produce."""
    assert request.row < 0, "only who waits begins with its whole sequence"
    owed = min(max(request.min_output, 1), request.max_output) - request.output_tokens
    return request.sequence_tokens, max(0, owed)
