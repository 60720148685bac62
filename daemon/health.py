"""Health: whether the daemon is live, ready and making progress, with the reasons when it is not.

Owns the judgement and the watchdog. Must never report green on the strength of a process being there: ready needs
an epoch, a durable journal and an open door; progress needs scheduled tokens while work waits. Invariant: the task
wakes once a second only while there is work, else once in a few seconds for the watchdog.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from daemon.clock import NS_PER_S, Clock

CHECK_EVERY_S = 1.0
IDLE_CHECK_EVERY_S = 5.0
LOOP_TIMEOUT_S = 120.0  # a loop that turned no round for so long ends the process, with its stacks on disk


@dataclass(frozen=True, slots=True)
class Vitals:
    """What health is judged on, read at one moment."""

    epoch: int
    ending: str
    degraded: str
    live_requests: int
    scheduled_tokens: int
    faults: tuple[str, ...] = ()
    trouble: str = ""  # why no epoch runs, or why the one that runs is over


class Health:
    """Judges vitals; `run` is the task that notices a stall when nobody asks."""

    def __init__(self, clock: Clock, vitals: Callable[[], Vitals], stall_timeout_s: float, log: Any) -> None:
        self._clock = clock
        self._vitals = vitals
        self._stall_ns = int(stall_timeout_s * NS_PER_S)
        self._log = log
        self._progress = -1
        self._moved_ns = clock.now_ns()
        self._stalled = False
        self._worked = False  # there was work at the last look

    def report(self) -> dict[str, Any]:
        """`live`, `ready`, `progress` as booleans, `reasons` as sentences, and the numbers behind them."""
        vitals = self._vitals()
        stalled_s = self._note(vitals) / NS_PER_S
        reasons = list(vitals.faults)
        if vitals.trouble or not vitals.epoch:
            reasons.append(vitals.trouble or "booting: the ranks are not ready")
        if vitals.ending:
            reasons.append(f"ending: {vitals.ending}")
        if vitals.degraded:
            reasons.append(f"the journal is not durable: {vitals.degraded}")
        ready = not reasons
        progress = stalled_s * NS_PER_S < self._stall_ns
        if not progress:
            reasons.append(
                f"no token was scheduled for {stalled_s:.1f} s with {vitals.live_requests} requests waiting or running"
            )
        return {
            "live": True,  # this answer came from the loop itself
            "ready": ready,
            "progress": progress,
            "reasons": reasons,
            "scheduled_tokens": vitals.scheduled_tokens,
            "live_requests": vitals.live_requests,
            "stalled_s": round(stalled_s, 1),
        }

    async def run(self, dump: Path) -> None:
        """Watch for stalls until cancelled; keep the watchdog that ends a hung loop with all stacks in `dump`."""
        with dump.open("w") as file:
            try:
                faulthandler.enable(file=file)  # the launcher ends a loop that hangs by SIGABRT
                while True:
                    faulthandler.dump_traceback_later(LOOP_TIMEOUT_S, exit=True, file=file)
                    self._watch()
                    await trio.sleep(CHECK_EVERY_S if self._vitals().live_requests else IDLE_CHECK_EVERY_S)
            finally:
                faulthandler.cancel_dump_traceback_later()
                faulthandler.disable()
                dump.unlink(missing_ok=True)

    def _watch(self) -> None:
        report = self.report()
        if self._stalled == report["progress"]:
            self._stalled = not report["progress"]
            write = self._log.error if self._stalled else self._log.info
            write("Stalled" if self._stalled else "Progressing", **report)

    def _note(self, vitals: Vitals) -> int:
        """Nanoseconds without progress while there was work; 0 when there is none."""
        now_ns = self._clock.now_ns()
        working = vitals.live_requests > 0 and vitals.epoch > 0 and not vitals.trouble  # else there is a better reason
        if vitals.scheduled_tokens != self._progress or not (working and self._worked):
            self._progress, self._moved_ns = vitals.scheduled_tokens, now_ns
        self._worked = working
        return now_ns - self._moved_ns
