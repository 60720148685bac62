"""Compaction worker: decides when to ask the core for an opportunistic flush.

Owns the newest band counts and the one request that may be open. Must never touch memory itself: it only sends
`FlushAsked`, and the core decides. Invariants: at most one request is open, until the step that answers it was
reported; no request when there is no hole inside any band's span; after a request that closed none, a pause.

    at idle                          every hole is worth closing: nobody waits
    at the early-processing point    a step was sent and an earlier report is still due: only when holes are an
                                     eighth of what lies inside the span
"""

from __future__ import annotations

import trio

from daemon.clock import Clock
from daemon.core.inputs import FlushAsked, Input
from daemon.mailbox import BandCounts, BecameIdle, StepSent

HOLE_SHARE = 8  # one in so many
QUIET_STEPS = 32  # steps without a request after one that closed nothing

Hint = StepSent | BecameIdle | BandCounts


class CompactionWorker:
    """Turns hints into at most one open `FlushAsked`."""

    def __init__(
        self,
        clock: Clock,
        hints: trio.MemoryReceiveChannel[Hint],
        mailbox: trio.MemorySendChannel[Input],
        moves_max: int,
    ) -> None:
        self.asked = 0
        self._clock = clock
        self._hints = hints
        self._mailbox = mailbox
        self._moves_max = moves_max
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Memory is new and steps count from 1: what was known of the old one is void, and so is an open request."""
        self._holes = 0
        self._live = 0
        self._open_after = 0  # the request is open until a step behind this one was reported; 0: none
        self._holes_when_asked = 0
        self._quiet_until = 0

    async def run(self) -> None:
        """Ask until cancelled."""
        async for hint in self._hints:
            if self.wants(hint):
                self.asked += 1
                await self._mailbox.send(FlushAsked(self._clock.now_ns(), self._moves_max))

    def wants(self, hint: Hint) -> bool:
        """Take one hint in; True when a flush should be asked for now."""
        if isinstance(hint, BandCounts):
            self._take(hint)
            return False
        if self._open_after or not self._holes or hint.seq < self._quiet_until:
            return False
        if isinstance(hint, StepSent) and self._holes * HOLE_SHARE < self._live + self._holes:
            return False
        self._open_after, self._holes_when_asked = hint.seq, self._holes
        return True

    def _take(self, counts: BandCounts) -> None:
        self._live = sum(live for live, _, _, _ in counts.bands)
        self._holes = sum(hole for _, hole, _, _ in counts.bands)
        if self._open_after and counts.seq > self._open_after:
            if self._holes >= self._holes_when_asked:
                self._quiet_until = counts.seq + QUIET_STEPS
            self._open_after = 0
