"""Observe: the task that turns engine iterations into metrics and log lines.

Owns the times of live requests. Must never touch serving: a failure in here is counted, logged once a minute and
forgotten (X8). Invariants: one line `Accepted` or `Refused` per arrival that was new, one `Finished` per ended choice,
in the order of the decisions, each with the number of the newest record when it was written (`sequence`), so that for
any record the lines up to there, the journal up to there and a scrape made there count the same. Lines follow
decisions, never replies: what a client is told again is counted once. Nothing here is read by anything that decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import trio

from daemon.clock import NS_PER_MS, NS_PER_S, Clock
from daemon.core.inputs import Arrived, EpochBegan, Input, Recovered
from daemon.core.outputs import Decided, Outputs, TokenColumns
from daemon.core.reasons import Verdict
from daemon.mailbox import Iteration
from daemon.metrics import Metrics
from daemon.recent import Recent
from ipc.messages import Finished, Refused

COMPLAIN_EVERY_S = 60.0
LOGGED_AT_INFO = frozenset(
    {Verdict.DRAINING, Verdict.STALLED, Verdict.RETRACTED, Verdict.PARKED, Verdict.UNPARKED, Verdict.FLUSHED}
    | {Verdict.UNPINNED}
)


@dataclass(slots=True)
class Times:
    """When one choice arrived, was admitted first, and had its first token; 0: not yet, or in an earlier life."""

    arrived_ns: int
    frontend: str
    admitted_ns: int = 0
    first_token_ns: int = 0
    started: bool = False  # it was admitted once, in whichever life


UNKNOWN = Times(0, "")  # of a choice whose arrival was lost to a failure in here


class Observer:
    """Follows every request from its arrival to its canonical line."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        log: Any,
        observed: trio.MemoryReceiveChannel[Iteration],
        found: list[str],
    ) -> None:
        """`found` is where the core's checks leave broken invariants; they are logged and taken out."""
        self.bands: list[list[tuple[int, int, int, int]]] = []  # by stage and band, as reported last
        self.recent = Recent()
        self.flushes = 0  # of the prefix cache that were carried out and written
        self.flushed: dict[str, int] = {}  # the numbers of the newest one
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._observed = observed
        self._found = found
        self._times: dict[int, Times] = {}
        self._without_token: set[int] = set()
        self._complain_at = -math.inf
        self._epoch = 0  # the newest that began
        self._sequence = 0  # the newest record of the iteration that is taken in

    async def run(self) -> None:
        """Observe until the engine's side is closed."""
        async for iteration in self._observed:
            self.take(iteration)

    def catch_up(self) -> None:
        """Take in what waits, at once: before the end, when there may be no other turn."""
        while True:
            try:
                iteration = self._observed.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel):
                return
            self.take(iteration)

    def take(self, iteration: Iteration) -> None:
        """Take one iteration in; never raises."""
        try:
            self._take(iteration)
        except Exception:  # a metric must not end the daemon
            self.complain()

    def complain(self) -> None:
        """Count a failure of our own; called in its exception handler. One line a minute at most."""
        if trio.current_time() >= self._complain_at:
            self._complain_at = trio.current_time() + COMPLAIN_EVERY_S
            self._log.exception("ObserveFailed", effect="metrics or log lines are incomplete; serving goes on")
        try:
            self._metrics.observe_failures.inc()
        except Exception:  # the registry itself is broken: the line above has said so
            return

    def synced(self, seconds: float) -> None:
        """One fsync took this long; never raises."""
        try:
            self._metrics.sync_time.observe(seconds)
        except Exception:  # as in `take`
            self.complain()

    def _take(self, iteration: Iteration) -> None:
        metrics = self._metrics
        self._sequence = iteration.sequence
        metrics.written(iteration.sequence, iteration.account)
        for outputs in iteration.outputs:  # first of all: a line that cannot be logged must not cost a count
            metrics.ended(decided.reason for decided in outputs.decisions if decided.verdict == Verdict.ENDED)
        metrics.core_time.observe(iteration.core_ns / NS_PER_S)
        metrics.write_time.observe(iteration.flush_ns / NS_PER_S)
        for collated in iteration.collated:
            if collated.forward_us:
                metrics.forward_time.observe(collated.forward_us / 1e6)
            self.bands = collated.bands or self.bands
        while self._found:
            self._log.error("InvariantBroken", what=self._found.pop(0), epoch=self._epoch)
        for item, outputs in zip(iteration.inputs, iteration.outputs, strict=True):
            try:
                self._follow(item, outputs)
            except Exception:  # it costs its own lines, not those of the inputs behind it
                self.complain()
        self.recent.take(iteration)

    def _follow(self, item: Input, outputs: Outputs) -> None:
        if isinstance(item, EpochBegan):
            self._epoch, self.bands = item.epoch, []
        if outputs.tokens is not None and self._without_token:
            self._first_tokens(outputs.tokens, item.now_ns)
        if isinstance(item, Recovered):
            self._recovered(item)
        told = [reply.message for reply in outputs.replies]
        finished = {message.request: message for message in told if isinstance(message, Finished)}
        refused = next((message for message in told if isinstance(message, Refused)), None)
        for decided in outputs.decisions:
            if decided.verdict == Verdict.ENDED:
                self._finished(item.now_ns, finished[decided.request])
            elif decided.verdict == Verdict.ACCEPTED and isinstance(item, Arrived):
                self._accepted(item, decided)
            elif decided.verdict == Verdict.REFUSED and isinstance(item, Arrived):
                self._refused(item, decided, refused)
            else:
                self._decided(decided)
        if refused is not None and not isinstance(item, Arrived):  # who came back for what is not known
            self._log.info("NotResumed", id=refused.id, code=refused.code, field=refused.field)

    def _accepted(self, item: Arrived, decided: Decided) -> None:
        for request in range(decided.request, decided.request + decided.numbers["n"]):
            self._times[request] = Times(item.now_ns, item.frontend)
            self._without_token.add(request)
        self._log.info(
            "Accepted",
            sequence=self._sequence,
            request=decided.request,
            id=item.generate.id,
            frontend=item.frontend,
            **decided.numbers,
        )

    def _refused(self, item: Arrived, decided: Decided, refused: Refused | None) -> None:
        self._log.info(
            "Refused",
            sequence=self._sequence,
            id=item.generate.id,
            frontend=item.frontend,
            code=decided.reason,
            field=refused.field if refused is not None else "",
            **decided.numbers,
        )

    def _recovered(self, item: Recovered) -> None:
        """Choices of an earlier life that go on in this one; what they waited for first was told then."""
        for group in item.groups:
            for choice, was in enumerate(group.choices):
                if was.ended is not None:
                    continue
                request = group.accepted.first_request + choice
                self._times[request] = Times(group.arrived_ns, group.frontend, started=was.started)
                if not was.tokens:
                    self._without_token.add(request)

    def _first_tokens(self, tokens: TokenColumns, now_ns: int) -> None:
        for request in self._without_token.intersection(tokens.requests.tolist()):
            times = self._times[request]
            times.first_token_ns = now_ns
            self._metrics.first_token.observe((now_ns - times.arrived_ns) / NS_PER_S)
            self._without_token.discard(request)

    def _decided(self, decided: Decided) -> None:
        times = self._times.get(decided.request)
        if decided.verdict == Verdict.ADMITTED:
            self._admitted(decided, times)
        elif decided.verdict == Verdict.FLUSHED:
            self.flushes += 1
            self.flushed = decided.numbers
        ids = {"request": decided.request} if decided.request else {}
        write = self._log.info if decided.verdict in LOGGED_AT_INFO else self._log.debug
        if decided.verdict == Verdict.STALLED:
            write = self._log.error
        write(str(decided.verdict).capitalize(), **ids, reason=decided.reason, by=decided.by, **decided.numbers)

    def _admitted(self, decided: Decided, times: Times | None) -> None:
        """What an admission found in the prefix cache; the first one of a request ends its time in the queue."""
        first = times is not None and not times.started
        if times is not None and first:
            times.admitted_ns, times.started = decided.now_ns, True
            self._metrics.queue_time.observe((decided.now_ns - times.arrived_ns) / NS_PER_S)
        numbers = decided.numbers
        if queried := numbers.get("queried_tokens", 0):
            cached, matched = numbers.get("cached_tokens", 0), numbers.get("matched_tokens", 0)
            self._metrics.looked_up(queried, cached, matched, decided.reason, resumed=not first)

    def _finished(self, now_ns: int, finished: Finished) -> None:
        times = self._times.pop(finished.request, UNKNOWN)
        self._without_token.discard(finished.request)
        self._metrics.prompt_length.observe(finished.prompt_tokens)
        self._metrics.output_length.observe(finished.output_tokens)
        self._log.info(
            "Finished",
            sequence=self._sequence,
            request=finished.request,
            id=finished.id,
            choice=finished.choice,
            frontend=times.frontend,
            epoch=self._epoch,
            reason=finished.reason,
            detail=finished.detail,
            prompt_tokens=finished.prompt_tokens,
            output_tokens=finished.output_tokens,
            cached_tokens=finished.cached_tokens,
            matched_tokens=finished.matched_tokens,
            hit_cut=finished.hit_cut,
            queue_ms=_ms(times.arrived_ns, times.admitted_ns),
            first_token_ms=_ms(times.arrived_ns, times.first_token_ns),
            total_ms=_ms(times.arrived_ns, now_ns) if times is not UNKNOWN else None,
        )


def _ms(start_ns: int, end_ns: int) -> float | None:
    return round((end_ns - start_ns) / NS_PER_MS, 3) if end_ns else None
