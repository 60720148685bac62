"""Sockets: ZeroMQ under trio. The only file that knows that a ZeroMQ file descriptor is edge-triggered.

Owns one `zmq.Socket` per `Socket`. Must never decode a message. A ZeroMQ descriptor becomes readable when *something*
changed and falls silent when the state is looked at, by whichever operation looks. Hence the rules here:

* Every operation is tried first, without waiting. Only when it would block, its task sleeps.
* Of the sleeping tasks one leads: it alone waits on the descriptor (trio allows one). The others are parked.
* After every operation and every wake-up `_settle` looks at the state again and wakes whom it concerns: an operation
  may have swallowed the change that another task sleeps for. Invariant: while a task is parked, another one leads or
  is about to run.
* A message that was taken is returned: after success there is no point at which a cancellation is delivered.

No task belongs to a socket, so an idle one costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import outcome
import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from ipc.endpoints import UnixListener, check_tcp, listen_unix, unix_path
from ipc.errors import EndpointError, PeerGone
from ipc.keys import ClientKeys, ServerKeys

T = TypeVar("T")
ZAP_DOMAIN = b"bandmaster"
FRAMES_MAX = 16  # frames kept of one message (ZAP has 9); a hostile peer may send any number


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Bounds of one socket: messages queued per peer and direction, and the bytes of one frame (0: no bound).

    `gone_ms`: a tcp peer that answers no ping for so long counts as disconnected: a host or a network that is gone says
    nothing, and the kernel would try for a quarter of an hour.
    """

    send_hwm: int = 1024
    recv_hwm: int = 1024
    max_message_bytes: int = 0
    reconnect_ms: int = 50
    gone_ms: int = 30_000


@dataclass(slots=True)
class SocketStats:
    """Plain counters of one socket since it was opened."""

    sent: int = 0
    received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    blocked: int = 0  # sends that met the high-water mark
    unreachable: int = 0  # sends to a peer that was not there


@dataclass(slots=True)
class _Lead:
    """The one task that waits on the descriptor."""

    direction: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Socket:
    """A ZeroMQ socket whose operations are trio's: they wait, they are cancellable, and cancellation loses nothing."""

    def __init__(self, raw: zmq.Socket[bytes], endpoint: str, listener: UnixListener | None = None) -> None:
        self.endpoint = endpoint
        self.stats = SocketStats()
        self._raw = raw
        self._fd: int = raw.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._listener = listener
        self._monitor: Socket | None = None
        self._parked: dict[int, deque[trio.lowlevel.Task]] = {zmq.POLLIN: deque(), zmq.POLLOUT: deque()}
        self._lead: _Lead | None = None
        self._closed = False

    # --- operations ------------------------------------------------------------------------------------------------

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send one message; waits while the peer's queue is full. Cancelled: not sent. PeerGone: no such peer."""
        await self._operate(zmq.POLLOUT, lambda: self._send_now(frames))

    def try_send(self, frames: Sequence[bytes]) -> bool:
        """Send one message without waiting; False when the peer's queue is full. PeerGone: no such peer."""
        self._check_open()
        try:
            self._send_now(frames)
        except zmq.Again:
            self.stats.blocked += 1
            return False
        finally:
            self._settle()
        return True

    async def recv(self) -> list[bytes]:
        """Wait for one message; its frames (a router's first frame is the peer's identity)."""
        return await self._operate(zmq.POLLIN, self._recv_now)

    async def recv_batch(self, n: int) -> list[list[bytes]]:
        """Wait for a message, then take what else is there: 1 to `n` messages, in order."""
        return await self._operate(zmq.POLLIN, lambda: self._recv_many(n))

    @property
    def readable(self) -> bool:
        """Whether a message could be received now."""
        self._check_open()
        ready = bool(self._events() & zmq.POLLIN)
        self._settle()
        return ready

    async def wait_disconnected(self) -> None:
        """Return when an established connection of this socket has ended (the peer died, closed or was cut off)."""
        self._check_open()
        if self._monitor is None:
            raw = self._raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._monitor = Socket(raw, f"monitor of {self.endpoint}")
        while True:
            event = parse_monitor_message(await self._monitor.recv())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                return

    def watch_disconnects(self) -> None:
        """Begin to note disconnections now, so that a later `wait_disconnected` also sees those before it."""
        if self._monitor is None:
            self._monitor = Socket(self._raw.get_monitor_socket(zmq.EVENT_DISCONNECTED), f"monitor of {self.endpoint}")

    # --- the end ---------------------------------------------------------------------------------------------------

    def close(self, linger_ms: int = 0) -> None:
        """Close at once; unsent messages are dropped after `linger_ms`. Sleeping tasks get ClosedResourceError."""
        if self._closed:
            return
        self._closed = True
        if self._monitor is not None:
            self._raw.disable_monitor()
            self._monitor.close()
        trio.lowlevel.notify_closing(self._fd)
        for queue in self._parked.values():
            while queue:
                trio.lowlevel.reschedule(queue.popleft(), outcome.Error(trio.ClosedResourceError("socket closed")))
        self._raw.close(linger=linger_ms)
        if self._listener is not None:
            self._listener.remove()

    async def aclose(self, drain_ms: int = 0) -> None:
        """Close, but let ZeroMQ go on sending what is queued for up to `drain_ms` in the background."""
        self.close(linger_ms=drain_ms)
        await trio.lowlevel.cancel_shielded_checkpoint()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    # --- one try, never waiting ------------------------------------------------------------------------------------

    def _send_now(self, frames: Sequence[bytes]) -> None:
        raw, last = self._raw, len(frames) - 1
        try:
            for index, frame in enumerate(frames):
                raw.send(frame, zmq.DONTWAIT | (zmq.SNDMORE if index < last else 0))
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self.stats.unreachable += 1
                raise PeerGone(f"no peer {frames[0]!r} on {self.endpoint}") from None
            raise
        self.stats.sent += 1
        self.stats.sent_bytes += len(frames[last])

    def _recv_now(self) -> list[bytes]:
        raw = self._raw
        frames = [raw.recv(zmq.DONTWAIT)]
        while raw.getsockopt(zmq.RCVMORE):
            frame = raw.recv(zmq.DONTWAIT)
            if len(frames) < FRAMES_MAX:
                frames.append(frame)
        self.stats.received += 1
        self.stats.received_bytes += len(frames[-1])
        return frames

    def _recv_many(self, n: int) -> list[list[bytes]]:
        messages = [self._recv_now()]
        while len(messages) < n and self._events() & zmq.POLLIN:  # an attempt that fails costs ten times as much
            messages.append(self._recv_now())
        return messages

    # --- waiting ---------------------------------------------------------------------------------------------------

    async def _operate(self, direction: int, attempt: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        tries, slept = 0, False
        while True:
            self._check_open()
            if direction == zmq.POLLIN and not self._events() & direction:  # costs less than to try and fail
                slept = True
                await self._sleep_until_ready(direction, 0)
                continue
            try:
                result = attempt()
            except zmq.Again:
                tries += 1
                await self._sleep_until_ready(direction, tries)
                continue
            except BaseException:
                self._settle()
                raise
            self._settle()
            if not tries and not slept:
                await trio.lowlevel.cancel_shielded_checkpoint()
            return result

    async def _sleep_until_ready(self, direction: int, tries: int) -> None:
        """Sleep until an operation in `direction` may succeed. After it returns, no checkpoint before the attempt."""
        self._settle()
        if direction == zmq.POLLOUT and tries == 1:
            self.stats.blocked += 1
        if self._events() & direction:
            if tries > 1:  # a router is writable while any peer is: this one's queue can only be asked again
                await trio.sleep(min(tries, 20) / 1000)
            return
        if self._lead is not None:
            await self._park(direction)
            return
        lead = self._lead = _Lead(direction)
        try:
            with lead.scope:
                if not self._events() & direction:  # looked at again as leader: another thread wakes only leaders
                    await trio.lowlevel.wait_readable(self._fd)
        finally:
            self._lead = None
            if not self._closed:
                self._settle()

    async def _park(self, direction: int) -> None:
        task = trio.lowlevel.current_task()
        queue = self._parked[direction]
        queue.append(task)

        def abort(_: object) -> trio.lowlevel.Abort:
            queue.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _settle(self) -> None:
        """Wake one sleeper per ready direction; if tasks stay parked without a leader, wake one to lead."""
        reading, writing = self._parked[zmq.POLLIN], self._parked[zmq.POLLOUT]
        lead = self._lead
        if lead is None and not reading and not writing:
            return
        events = self._events()
        woken = False
        for direction, queue in ((zmq.POLLIN, reading), (zmq.POLLOUT, writing)):
            if not events & direction:
                continue
            if lead is not None and lead.direction == direction:
                lead.scope.cancel()
            elif queue:
                trio.lowlevel.reschedule(queue.popleft())
                woken = True
        if lead is None and not woken and (reading or writing):
            trio.lowlevel.reschedule((reading or writing).popleft())

    def _events(self) -> int:
        return self._raw.getsockopt(zmq.EVENTS)  # type: ignore[return-value]

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError(f"the socket on {self.endpoint} is closed")


# --- opening ---------------------------------------------------------------------------------------------------------


def bind_router(
    endpoint: str,
    options: SocketOptions | None = None,
    keys: ServerKeys | None = None,
    insecure: bool = False,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
) -> Socket:
    """A bound ROUTER that reports unknown peers; `ipc://` gets a 0600 socket file, `tcp://` CURVE.

    Raises EndpointInUse, InsecureEndpoint, or EndpointError with the reason.
    """
    check_tcp(endpoint, keys is not None, insecure)
    raw = _open(zmq.ROUTER, options or SocketOptions(), context)
    raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
    listener: UnixListener | None = None
    try:
        if keys is not None:
            raw.setsockopt(zmq.CURVE_SERVER, 1)
            raw.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            raw.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            raw.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            raw.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a running authenticator nobody gets in
        path = unix_path(endpoint)
        if path is not None:
            listener = listen_unix(path)
            raw.setsockopt(zmq.USE_FD, listener.fd)  # ours: libzmq neither creates nor removes the file
        raw.bind(endpoint)
    except zmq.ZMQError as error:
        raw.close(linger=0)
        if listener is not None:
            listener.remove()
        raise EndpointError(f"cannot bind {endpoint}: {error}") from error
    except BaseException:
        raw.close(linger=0)
        raise
    bound = raw.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return Socket(raw, endpoint if listener is not None else bound.rstrip(b"\0").decode(), listener)


def connect_dealer(
    endpoint: str,
    options: SocketOptions | None = None,
    keys: ClientKeys | None = None,
    insecure: bool = False,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
) -> Socket:
    """A connecting DEALER; the other end need not be there yet. Raises InsecureEndpoint or EndpointError.

    It never names its own identity: after a lost connection the router sees a new peer, so a gap cannot go unnoticed.
    """
    return Socket(open_dealer(endpoint, options, keys, insecure, context), endpoint)


def open_dealer(
    endpoint: str,
    options: SocketOptions | None = None,
    keys: ClientKeys | None = None,
    insecure: bool = False,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
) -> zmq.Socket[bytes]:
    """What `connect_dealer` puts into a Socket."""
    check_tcp(endpoint, keys is not None, insecure)
    raw = _open(zmq.DEALER, options or SocketOptions(), context)
    try:
        if keys is not None:
            raw.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            raw.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            raw.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        if endpoint.startswith("tcp://"):
            gone_ms = (options or SocketOptions()).gone_ms
            raw.setsockopt(zmq.HEARTBEAT_IVL, max(gone_ms // 6, 1))
            raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, gone_ms)
        raw.connect(endpoint)
    except zmq.ZMQError as error:
        raw.close(linger=0)
        raise EndpointError(f"cannot connect to {endpoint}: {error}") from error
    return raw


def flush_and_end(within_ms: int, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
    """Before a process leaves without its interpreter's shutdown: send what closed sockets still hold, then nothing."""
    (context or zmq.Context.instance()).destroy(linger=within_ms)


def _open(kind: int, options: SocketOptions, context: zmq.Context[zmq.Socket[bytes]] | None) -> zmq.Socket[bytes]:
    raw = (context or zmq.Context.instance()).socket(kind)
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.SNDHWM, options.send_hwm)
    raw.setsockopt(zmq.RCVHWM, options.recv_hwm)
    raw.setsockopt(zmq.RECONNECT_IVL, options.reconnect_ms)
    raw.setsockopt(zmq.RECONNECT_IVL_MAX, 20 * options.reconnect_ms)
    raw.setsockopt(zmq.IPV6, 1)
    if options.max_message_bytes:
        raw.setsockopt(zmq.MAXMSGSIZE, options.max_message_bytes)
    return raw
