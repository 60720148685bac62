"""Server: hypercorn in our own nursery, its log lines as ours, and how it stops.

Owns the accept loop and the stop sequence: refuse, let open requests end, close, cut what is left. Must never
outlive its deadline. Invariant: one connection's failure is a log line, never the server's end.
"""

from __future__ import annotations

import signal
import socket
from functools import partial
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, wrap_app

from daemon.frontend.service import Service
from daemon.processes import take_signals

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


class Http1(H11Protocol):
    """HTTP/1.1 only: an upgrade to HTTP/2 is ignored, as the standard allows.

    hypercorn's HTTP/2 leaves the sender of a closed connection waiting for its window for ever.
    """

    async def _check_protocol(self, event: Any) -> None:
        return


class Connection(TCPServer):
    """One client's connection, without TLS."""

    async def run(self) -> None:
        """Until either side closes it."""
        stream: trio.SocketStream = self.stream  # type: ignore[assignment]
        address = partial(parse_socket_addr, stream.socket.family)
        try:
            client, server = address(stream.socket.getpeername()), address(stream.socket.getsockname())
            async with TaskGroup() as tasks:
                self._task_group = tasks
                ends = (False, client, server, self.protocol_send)
                self.protocol = Http1(self.app, self.config, self.context, tasks, self.state, *ends)  # type: ignore
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
                await stream.aclose()  # the client is gone: a send that waits for it to read must not wait on
        except OSError:
            return  # the connection broke
        finally:
            await self._close()

    async def _close(self) -> None:
        """Close at once: what was written still goes out, and no other sender is disturbed by a second one."""
        await self.stream.aclose()


def server_config(log: Any) -> Config:
    """hypercorn's settings."""
    config = Config()
    config._log = HypercornLog(log)  # type: ignore[assignment]
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 1_000_000
    config.include_server_header = False
    return config


async def serve_http(app: Any, service: Service, bound: socket.socket, grace_s: float) -> None:
    """Serve until the service is idle for good, then close; open connections get `grace_s` more.

    The accept loop is ours: hypercorn's own ends the server when one connection's protocol code fails, which a
    malformed upgrade request is enough for.
    """
    config, context = server_config(service.log), WorkerContext(None)
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")

    async def connection(stream: trio.SocketStream) -> None:
        try:
            await Connection(wrapped, config, context, ConnectionState({}), stream)  # type: ignore[arg-type]
        except Exception:  # this connection is lost; no other one may be
            service.log.exception("HttpConnectionFailed")

    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(bound))]
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(partial(trio.serve_listeners, connection, listeners, handler_nursery=connections))
            await service.idle.wait()
            accepting.cancel_scope.cancel()
        connections.cancel_scope.deadline = trio.current_time() + grace_s
        await context.terminated.set()


async def watch_signals(
    service: Service, scope: trio.CancelScope, grace_s: float, task_status: Any = trio.TASK_STATUS_IGNORED
) -> None:
    """SIGTERM: refuse new requests, finish the open ones within `grace_s`. SIGINT, or a second signal: within seconds.

    `scope` is everything that serves; its deadline is the end whatever is still open.
    """
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        take_signals()
        task_status.started()
        async for number in signals:
            within_s = INTERRUPT_GRACE_S if number == signal.SIGINT or service.draining else grace_s
            name = signal.Signals(number).name
            service.log.info("Stopping", signal=name, open_requests=service.open_requests, within_s=within_s)
            scope.deadline = min(scope.deadline, trio.current_time() + within_s)
            service.drain()
