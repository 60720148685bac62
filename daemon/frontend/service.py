"""Service: what every route needs, in one value: the daemon's client, the tokenizer, names, limits, metrics.

Owns the way from the client's state to "may a request be sent now". Must never hold anything of one request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
import trio

from daemon.frontend.chat_template import ChatTemplate
from daemon.frontend.errors import DOWN, ApiError, retry_headers
from daemon.frontend.metrics import Metrics
from daemon.frontend.prepare import Model
from daemon.frontend.sizes import HEAVY_BYTES, INLINE_BYTES, RETRY_AFTER_MS, Bodies
from daemon.frontend.tokenizer import Tokenizer
from ipc.messages import Answer, Generate, Welcome

PREPARE_THREADS = 4


def unavailable(code: str, message: str) -> ApiError:
    """A 503 that invites another try."""
    return ApiError(503, message, DOWN, None, code, retry_headers(503, RETRY_AFTER_MS))


class Daemon(Protocol):
    """The part of `ipc.client.DaemonClient` that the front end uses."""

    stats: dict[str, int]

    @property
    def lost_reason(self) -> str:
        """Why no daemon is connected; empty while one is."""

    @property
    def connected(self) -> bool:
        """A daemon has welcomed us and is not found lost."""

    @property
    def welcome(self) -> Welcome | None:
        """What the present daemon serves; None without one."""

    def stop_waiting(self) -> None:
        """From now on, requests do not wait for a daemon that is gone."""

    def generate(self, message: Generate) -> Any:
        """An async context manager with the request's event stream."""

    async def ask(self, what: str, options: dict[str, int] | None = None, timeout_s: float = 5.0) -> Answer:
        """The daemon's answer to a question."""


@dataclass
class Service:
    """Shared by all requests of this process; `draining` is set once, when the process is told to stop."""

    daemon: Daemon
    tokenizer: Tokenizer
    template: ChatTemplate | None
    served_name: str = ""  # empty: the daemon's name for the model
    api_keys: tuple[str, ...] = ()
    body_limit_bytes: int = 8 << 20
    body_timeout_s: float = 60.0
    sse_keepalive_s: float = 15.0  # 0: none
    metrics: Metrics = field(default_factory=Metrics)
    draining: bool = False
    now_unix_s: Callable[[], int] = field(default=lambda: int(time.time()))
    log: Any = field(default_factory=lambda: structlog.get_logger("frontend"))
    threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(PREPARE_THREADS))
    heavy: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))
    bodies: Bodies = field(default_factory=Bodies)
    open_requests: int = 0  # without those of monitors
    open_monitors: int = 0
    _met: bool = False  # a daemon was connected once
    idle: trio.Event = field(default_factory=trio.Event)  # set when draining and no request is open

    def drain(self) -> None:
        """Take nothing new from now on; `idle` is set when the last open request has ended."""
        self.draining = True
        self.daemon.stop_waiting()
        self.note_open(0)

    def note_open(self, change: int, monitor: bool = False) -> None:
        """HTTP requests began (+) or are over (-). Those of monitors are waited for, and are no load."""
        if monitor:
            self.open_monitors += change
        else:
            self.open_requests += change
        self.metrics.open.set(self.open_requests)
        if self.draining and self.open_requests + self.open_monitors == 0:
            self.idle.set()

    def model(self) -> Model:
        """What requests are prepared with; raises ApiError 503 while there is no daemon to say what it serves."""
        welcome = self.daemon.welcome
        if welcome is None:
            code = "daemon_lost" if self._met else "not_ready"
            raise unavailable(code, f"The daemon does not serve at the moment: {self.daemon.lost_reason}")
        self._met = True
        return Model(self.tokenizer, self.template, (self.served_name or welcome.facts.name,), welcome.facts)

    def check_open(self) -> None:
        """Raises ApiError 503 when this process is stopping and takes nothing new."""
        if self.draining:
            raise unavailable("draining", "The server is stopping and takes no new requests")

    async def prepare(self, function: Any, *arguments: Any, size_bytes: int) -> Any:
        """`function(*arguments)`, in a thread when the body is large; abandoned when the client hangs up.

        The largest go one at a time, abandoned ones included, so that their memory is bounded.
        """
        if size_bytes <= INLINE_BYTES:
            return function(*arguments)
        limiter = self.heavy if size_bytes > HEAVY_BYTES else self.threads
        return await trio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True, limiter=limiter)
