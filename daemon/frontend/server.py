"""Server: hypercorn in our own nursery, its log lines as ours, and how it stops.

Owns the listening socket and the stop sequence: refuse, let open requests end, close, cut what is left. Must never
outlive its deadline. Invariant: one connection's failure is a log line, never the server's end.
"""

from __future__ import annotations

import signal
import socket
from typing import Any

import hypercorn.trio
import trio
from hypercorn.config import Config, Sockets

from daemon.exits import DaemonError, Exit
from daemon.frontend.service import Service

BACKLOG = 1024
KEEP_ALIVE_S = 75.0
INTERRUPT_GRACE_S = 3.0  # SIGINT: the daemon ends requests at once; this lets their ends reach the clients


class HypercornLog:
    """hypercorn's logger interface over ours; access lines are our own `http_request` lines."""

    def __init__(self, log: Any) -> None:
        self._log = log

    async def access(self, request: Any, response: Any, request_time: float) -> None:
        """Nothing: the envelope writes this line."""

    async def critical(self, message: str, *args: Any, **kwargs: Any) -> None:
        """An error of the server itself."""
        self._log.error("HttpServer", text=message % args if args else message)

    async def error(self, message: str, *args: Any, **kwargs: Any) -> None:
        """An error of the server itself."""
        self._log.error("HttpServer", text=message % args if args else message)

    async def warning(self, message: str, *args: Any, **kwargs: Any) -> None:
        """A warning."""
        self._log.warning("HttpServer", text=message % args if args else message)

    async def info(self, message: str, *args: Any, **kwargs: Any) -> None:
        """The listening line and the like."""
        self._log.debug("HttpServer", text=message % args if args else message)

    async def debug(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Details."""
        self._log.debug("HttpServer", text=message % args if args else message)

    async def exception(self, message: str, *args: Any, **kwargs: Any) -> None:
        """A request's failure that passed the envelope; the answer was cut off."""
        self._log.exception("HttpServer", text=message % args if args else message)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, port 0 being any free one; raises DaemonError naming the address when it is taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)  # clients may connect from now on; they are answered when the server runs
    except OSError as error:
        text = f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or --port"
        raise DaemonError(Exit.USAGE, text) from error
    bound.setblocking(False)
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve_http(app: Any, service: Service, bound: socket.socket, grace_s: float) -> None:
    """Serve until the service is idle for good, then close; returns when all connections are closed."""
    config = Config()
    config._log = HypercornLog(service.log)  # type: ignore[assignment]
    config.create_sockets = lambda: Sockets([], [bound], [])  # type: ignore[method-assign]
    config.backlog = BACKLOG
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.graceful_timeout = grace_s
    config.include_server_header = False
    config.h2_max_concurrent_streams = 1000
    config.keep_alive_max_requests = 1_000_000
    await hypercorn.trio.serve(app, config, shutdown_trigger=service.idle.wait, mode="asgi")


async def watch_signals(
    service: Service, scope: trio.CancelScope, grace_s: float, task_status: Any = trio.TASK_STATUS_IGNORED
) -> None:
    """SIGTERM: refuse new requests, finish the open ones within `grace_s`. SIGINT, or a second signal: within seconds.

    `scope` is everything that serves; its deadline is the end whatever is still open.
    """
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            within_s = INTERRUPT_GRACE_S if number == signal.SIGINT or service.draining else grace_s
            name = signal.Signals(number).name
            service.log.info("Stopping", signal=name, open_requests=service.open_requests, within_s=within_s)
            scope.deadline = min(scope.deadline, trio.current_time() + within_s)
            service.drain()
