"""Answers: what the daemon says to a front end's `Ask`, as JSON or text.

Owns the tables of questions and of orders. Must never change anything except through the engine's orders (`drain`,
`flush`, `flush_cache`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from daemon.core.inputs import Controlled, FlushAsked
from daemon.watch import life_of, watched

if TYPE_CHECKING:
    from daemon.app import Daemon

Handler = Callable[[dict[str, int]], Awaitable[tuple[bool, str]]]

FLUSH_WITHIN_S = 5.0
FLUSH_LOOK_EVERY_S = 0.02


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class Answers:
    """The handlers of one daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._began_ns = daemon.clock.now_ns()
        self._watch_ns = 0  # what the newest answer to `watch` took of the loop

    def questions(self) -> dict[str, Handler]:
        """By name, what changes nothing: anybody may ask it. `ping` is the gateway's own."""
        return {
            "health": self._health,
            "status": self._status,
            "watch": self._watch,
            "life": self._life,
            "metrics": self._metrics,
        }

    def orders(self) -> dict[str, Handler]:
        """By name, what changes something: for front ends, never for who only watches."""
        return {
            "drain": self._drain,
            "flush": self._flush,
            "flush_cache": self._flush_cache,
        }

    async def _health(self, options: dict[str, int]) -> tuple[bool, str]:
        """JSON of `Health.report`; ok when ready and making progress."""
        report = self._daemon.health.report()
        return report["ready"] and report["progress"], _json(report)

    async def _status(self, options: dict[str, int]) -> tuple[bool, str]:
        """JSON: the core's view with ages, health, and what is connected."""
        daemon = self._daemon
        now_ns = daemon.clock.now_ns()
        view = daemon.core.view(now_ns)
        return True, _json(
            {
                "life": daemon.life,
                "epoch": daemon.epochs.status(),
                "health": daemon.health.report(),
                "core": view,
                "bands": daemon.bands(),
                "frontends": daemon.gateway.frontends(),
                "journal": daemon.journal_state(),
            }
        )

    async def _watch(self, options: dict[str, int]) -> tuple[bool, str]:
        """JSON: `daemon.watch.Watched`, what a live view shows at one moment; bounded, whatever waits."""
        started_ns = time.perf_counter_ns()
        answer = watched(self._daemon, options, self._began_ns, self._watch_ns)
        body = msgspec.json.encode(answer).decode()
        self._watch_ns = time.perf_counter_ns() - started_ns
        return True, body

    async def _life(self, options: dict[str, int]) -> tuple[bool, str]:
        """JSON: `daemon.watch.WatchedLife` of `request`; not ok when nothing is known of it, or not any more."""
        life = life_of(self._daemon, options.get("request", 0))
        return life is not None, _json(life)

    async def _metrics(self, options: dict[str, int]) -> tuple[bool, str]:
        """Prometheus text. A failure in here is answered and counted, and touches nothing else."""
        daemon = self._daemon
        try:
            daemon.refresh_metrics()
            return True, daemon.metrics.exposition()
        except Exception as error:  # X8: metrics must not end what serves
            daemon.observer.complain()
            return False, f"metrics failed: {error!r}"

    async def _drain(self, options: dict[str, int]) -> tuple[bool, str]:
        """Stop admitting; the daemon ends when what runs has ended, or at the drain timeout."""
        self._daemon.engine.drain()
        return True, _json({"ending": self._daemon.engine.ending, "live_requests": self._daemon.core.gauges()["live"]})

    async def _flush(self, options: dict[str, int]) -> tuple[bool, str]:
        """Compact the ends; ok once a step behind the request was reported, with the band counts before and after."""
        daemon = self._daemon
        engine = daemon.engine
        if not engine.epoch:
            return False, _json({"blocked_by": daemon.epochs.trouble or "booting: there is no memory yet"})
        before, asked_at = daemon.bands(), engine.sent_seq
        engine.order(FlushAsked(daemon.clock.now_ns(), daemon.core_config.flush_moves_max))
        with trio.move_on_after(FLUSH_WITHIN_S):
            while engine.epoch and engine.reported_seq <= asked_at:
                await trio.sleep(FLUSH_LOOK_EVERY_S)
            if not engine.epoch:
                return False, _json({"blocked_by": daemon.epochs.trouble or "the epoch ended", "before": before})
            return True, _json({"before": before, "after": daemon.bands()})
        return False, _json({"blocked_by": f"no step was reported within {FLUSH_WITHIN_S:g} s", "before": before})

    async def _flush_cache(self, options: dict[str, int]) -> tuple[bool, str]:
        """Empty the prefix cache; ok when it is empty, else what is kept and by whom. Only a written decision counts.

        The freed units are reusable once no forward in flight reads them; what running requests read stays.
        """
        daemon = self._daemon
        if not daemon.engine.epoch:
            return False, _json({"blocked_by": daemon.epochs.trouble or "booting: there is no memory yet"})
        observer, before = daemon.observer, daemon.observer.flushes
        daemon.engine.order(Controlled(daemon.clock.now_ns(), "flush_cache"))
        with trio.move_on_after(FLUSH_WITHIN_S):
            while observer.flushes == before:
                await trio.sleep(FLUSH_LOOK_EVERY_S)
            told = {kind: _by_band(observer.flushed, f"{kind}_units_") for kind in ("freed", "kept")}
            kept = any(told["kept"].values())
            readers = {"read_by": self._readers()} if kept else {}
            return not kept, _json({"flushed": not kept, **told, **readers})
        return False, _json({"blocked_by": f"the order was not carried out within {FLUSH_WITHIN_S:g} s"})

    def _readers(self) -> list[str]:
        """Ids of the requests whose page tables name pages of the prefix cache."""
        return [entry["id"] for entry in self._daemon.core.view()["requests"] if entry["shared_pages"]]


def _by_band(numbers: dict[str, int], prefix: str) -> dict[str, int]:
    """The numbers whose names begin so, by the rest of their names: a band's."""
    return {name.removeprefix(prefix): number for name, number in numbers.items() if name.startswith(prefix)}
