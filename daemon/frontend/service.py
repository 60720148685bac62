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
from daemon.frontend.errors import DOWN, REFUSALS, ApiError, retry_headers
from daemon.frontend.metrics import Metrics
from daemon.frontend.prepare import Model
from daemon.frontend.tokenizer import Tokenizer
from ipc.messages import Answer, Generate, Welcome

TOKENIZE_INLINE_BYTES = 16 * 1024  # a larger body is prepared in a thread: about 5 ms of tokenization
PREPARE_THREADS = 4


class Daemon(Protocol):
    """The part of `ipc.client.DaemonClient` that the front end uses."""

    connected: bool
    welcome: Welcome | None
    lost_reason: str

    def generate(self, message: Generate) -> Any:
        """An async context manager with the request's event stream."""

    async def ask(self, what: str, options: dict[str, int] | None = None, timeout_s: float = 5.0) -> Answer:
        """The daemon's answer to a question."""

    def last_answer_age(self) -> float:
        """Seconds since the daemon was last heard."""


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
    metrics: Metrics = field(default_factory=Metrics)
    draining: bool = False
    now_unix_s: Callable[[], int] = field(default=lambda: int(time.time()))
    log: Any = field(default_factory=lambda: structlog.get_logger("frontend"))
    threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(PREPARE_THREADS))
    open_requests: int = 0
    idle: trio.Event = field(default_factory=trio.Event)  # set when draining and no request is open

    def drain(self) -> None:
        """Take nothing new from now on; `idle` is set when the last open request has ended."""
        self.draining = True
        self.request_ended(0)

    def request_ended(self, count: int = 1) -> None:
        """An HTTP request is over."""
        self.open_requests -= count
        if self.draining and self.open_requests == 0:
            self.idle.set()

    def model(self) -> Model:
        """What requests are prepared with; raises ApiError 503 while the daemon has not said what it serves."""
        welcome = self.daemon.welcome
        if welcome is None:
            reason = self.daemon.lost_reason or "the daemon is starting"
            raise self._unavailable("not_ready", f"The model is not ready: {reason}")
        return Model(self.tokenizer, self.template, (self.served_name or welcome.facts.name,), welcome.facts)

    def check_open(self) -> None:
        """Raises ApiError 503 when nothing new can be taken: this process is stopping, or the daemon is away."""
        if self.draining:
            raise self._unavailable("draining", "The server is stopping and takes no new requests")
        if self.daemon.welcome is not None and not self.daemon.connected:
            raise self._unavailable("daemon_lost", f"The daemon does not answer: {self.daemon.lost_reason}")

    def _unavailable(self, code: str, message: str) -> ApiError:
        row = REFUSALS.get(code)
        return ApiError(503, message, row.type if row else DOWN, None, code, retry_headers(503, 1000))

    async def prepare(self, function: Any, *arguments: Any, size_bytes: int) -> Any:
        """`function(*arguments)`, in a thread when the body is large; abandoned when the client hangs up."""
        if size_bytes <= TOKENIZE_INLINE_BYTES:
            return function(*arguments)
        return await trio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True, limiter=self.threads)
