"""Keeper: one process of the server, over its deaths.

Owns the child and the decision whether another one follows it, by one table. Must never start a second one while the
first is not reaped. Invariants: a process that is stopped or stuck is killed and counts as dead; what ends for a reason
that would come again is not started again.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import trio

from daemon.exits import Exit
from daemon.processes import Child, exit_text, is_stopped
from daemon.pulse import Pulse, Watch
from daemon.restarts import Restarts

STEADY_S = 10.0  # a process that lived so long did not die in vain: the next one starts at once
LAST_WORDS_S = 2.0  # for all stacks to reach the disk

# Ends after which another process would end the same way, or whose requests have all been told their end.
FINAL: dict[str, frozenset[int]] = {
    "daemon": frozenset({Exit.CLEAN, Exit.USAGE, Exit.RANK, Exit.MODEL}),
    "frontend": frozenset({Exit.USAGE, Exit.MODEL}),
}
FINAL_AT_BOOT: dict[str, frozenset[int]] = {"daemon": frozenset({Exit.JOURNAL}), "frontend": frozenset()}


def may_return(kind: str, code: int, served: bool, answered: bool) -> bool:
    """Whether a process that ended unasked is worth another one.

    `served`: the server was ready once; `answered`: this process was heard of.
    """
    return served and code not in FINAL[kind] and (answered or code not in FINAL_AT_BOOT[kind])


@dataclass(frozen=True, slots=True)
class Life:
    """How one process of a keeper ended: `silent_s` is how long it had not answered when it was killed for that."""

    code: int
    lived_s: float
    answered: bool
    silent_s: float = 0.0

    @property
    def text(self) -> str:
        """The end in words."""
        frozen = f" after it had not answered for {self.silent_s:g} s" if self.silent_s else ""
        return exit_text(self.code) + frozen


class Keeper:
    """Keeps one process of the server running; `start` makes a child and the pulse that it is watched by."""

    def __init__(
        self, name: str, kind: str, start: Callable[[], tuple[Child, Pulse]], restarts: Restarts, silence_s: float
    ) -> None:
        self.name = name
        self.kind = kind
        self.child: Child | None = None
        self.restarts = restarts
        self._start = start
        self._silence_s = silence_s
        self._started_s = 0.0
        self._watch: Watch | None = None
        self._pulse: Pulse | None = None

    @property
    def pid(self) -> int:
        """Of the present process, or of the last one."""
        return self.child.pid if self.child is not None else 0

    def start(self) -> None:
        """Start a process; the one before is reaped."""
        self.close()
        self.child, self._pulse = self._start()
        self._watch = Watch(self._pulse, self.child.pid, self._silence_s)
        self._started_s = trio.current_time()

    async def life(self, log: Any) -> Life:
        """Until the present process has ended, by itself or because it did not answer."""
        child, watch = self.child, self._watch
        assert child is not None, "started"
        assert watch is not None, "started"
        silent_s = 0.0

        async def end_when_silent() -> None:
            nonlocal silent_s
            silent_s = float(await watch.silence())
            frozen = is_stopped(child.pid)
            log.error("ChildSilent", child=self.name, pid=child.pid, silent_s=silent_s, stopped=frozen)
            await end_silent(child, frozen)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_when_silent)
            code = await child.wait()
            nursery.cancel_scope.cancel()
        return Life(code, trio.current_time() - self._started_s, watch.answered, silent_s)

    def pause_s(self, life: Life, served: bool) -> float | None:
        """How long to wait before the next process; None when there will be none."""
        if not may_return(self.kind, life.code, served, life.answered):
            return None
        return self.restarts.take(trio.current_time(), life.lived_s >= STEADY_S)

    def leave(self) -> None:
        """The present process is the last one and was told to end."""
        if self._watch is not None:
            self._watch.leaving = True

    def send_signal(self, number: int) -> None:
        """To the present process, if one lives."""
        if self.child is not None:
            self.child.send_signal(number)

    def close(self) -> None:
        """Kill and reap what is left."""
        if self.child is not None:
            self.child.close()
        if self._pulse is not None:
            self._pulse.close()


async def end_silent(child: Child, frozen: bool) -> None:
    """Kill a process that does not answer; one that is merely stuck writes down all its stacks first."""
    if not frozen:
        child.send_signal(signal.SIGABRT)
        with suppress(trio.TooSlowError), trio.fail_after(LAST_WORDS_S):
            await child.wait()
            return
    child.send_signal(signal.SIGKILL)
