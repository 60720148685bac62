"""Rank stream: a rank's end of the ordered message stream between it and the daemon (`ipc.streams`: the other end).

Owns the order of what the rank says and hears. Must never repair an order, nor keep a Stop to itself. Invariants:

* steps are accepted with seq 1, 2, 3, ... of this epoch only; reports are sent with seq 1, 2, 3, ...;
* a Stop that was read is answered with `Left`, wherever it was read;
* the daemon counts as gone when its connection has ended and everything that came over it was read.
"""

from __future__ import annotations

import trio
import zmq

from ipc import codec
from ipc.errors import DecodeError, Dismissed, StreamBroken, VersionMismatch
from ipc.handshake import version_problem
from ipc.keys import ClientKeys
from ipc.messages import Begin, Explain, FromRank, Hello, Join, Left, Report, Step, Stop, ToRank
from ipc.sockets import Socket, SocketOptions, connect_dealer

RANK_SOCKET = SocketOptions(send_hwm=256, recv_hwm=256, max_message_bytes=codec.TRUSTED_LIMITS.message_bytes_max)
REJOIN_FIRST_S, REJOIN_MOST_S = 0.05, 1.0
READ_WITHIN_S = 1.0  # what came before the connection ended, by whoever reads this stream
LOOK_S = 0.005


class RankStream:
    """A rank's end of its stream."""

    def __init__(
        self,
        endpoint: str,
        *,
        stage: int,
        rank: int,
        token: str,
        keys: ClientKeys | None = None,
        insecure: bool = False,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._where = (endpoint, RANK_SOCKET, keys, insecure, context)
        self._socket: Socket
        self._gone: bool
        self._connect()
        self._stage, self._rank, self._token = stage, rank, token
        self._epoch = 0
        self._received = 0
        self._reported = 0

    def _connect(self) -> None:
        self._socket = connect_dealer(*self._where)
        self._socket.watch_disconnects()
        self._gone = False

    async def join(self, pid: int, timeout_s: float = 60.0) -> Hello:
        """Prove who we are and wait to be taken in. VersionMismatch, Dismissed, or TooSlowError after it.

        A daemon that goes meanwhile takes the Join with it: whoever comes in its place is asked anew, over a connection
        of its own.
        """
        pause_s = REJOIN_FIRST_S
        with trio.fail_after(timeout_s):
            while (message := await self._ask_in(pid)) is None:
                self._socket.close()
                await trio.sleep(pause_s)
                pause_s = min(pause_s * 2, REJOIN_MOST_S)
                self._connect()
        if isinstance(message, Stop):
            raise Dismissed(message.why, message.again)
        if not isinstance(message, Hello):
            raise StreamBroken(f"{self._who()}: expected Hello, got {type(message).__name__}")
        problem = version_problem(message.version, "the daemon")
        if problem:
            raise VersionMismatch(problem)
        self._epoch = message.epoch
        return message

    async def _ask_in(self, pid: int) -> ToRank | None:
        """The answer to a Join; None when that daemon is gone, unless a Stop was the last that it said."""
        await self.send(Join(self._stage, self._rank, pid, self._token))
        answers: list[list[bytes]] = []
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                answers.append(await self._socket.recv())
                nursery.cancel_scope.cancel()

            nursery.start_soon(read)
            await self.wait_daemon_gone()
            nursery.cancel_scope.cancel()
        if not answers:
            return None
        message = self._decoded(answers[0])
        return None if self._gone and isinstance(message, Hello) else message

    async def recv(self) -> Begin | Step | Explain | Stop:
        """The daemon's next message; steps in dense order only. StreamBroken otherwise."""
        message = self._decoded(await self._socket.recv())
        if isinstance(message, Hello):
            raise StreamBroken(f"{self._who()}: a second Hello")
        if isinstance(message, Step | Begin) and message.epoch != self._epoch:
            raise StreamBroken(
                f"{self._who()}: {type(message).__name__} of epoch {message.epoch}, we are in epoch {self._epoch}"
            )
        if isinstance(message, Step):
            if message.seq != self._received + 1:
                raise StreamBroken(f"{self._who()}: step {message.seq} came after step {self._received}")
            self._received = message.seq
        return message

    async def send(self, message: FromRank) -> None:
        """Send the daemon a message, reports in dense order. Waits at the high-water mark; cancelled means not sent."""
        if isinstance(message, Report):
            self._check_report(message)
            await self._socket.send([codec.encode(message)])
            self._reported = message.seq
            return
        await self._socket.send([codec.encode(message)])

    def send_now(self, report: Report) -> bool:
        """As `send` of a report, without waiting or raising; False: not sent, and `send` would wait or raise."""
        due = self._reported < report.seq <= min(self._reported + 1, self._received) and not self._socket.closed
        if not due or not self._socket.try_send([codec.encode(report)]):
            return False
        self._reported = report.seq
        return True

    def _check_report(self, report: Report) -> None:
        if report.seq != self._reported + 1 or report.seq > self._received:
            raise StreamBroken(
                f"{self._who()}: report of step {report.seq} after step {self._reported}, "
                f"received through {self._received}"
            )

    async def wait_daemon_gone(self) -> None:
        """Return when the connection to the daemon has ended (it died, or stopped listening), and what came over it was
        read, but for `READ_WITHIN_S` at most: a Stop may be the last of it.
        """
        if not self._gone:
            await self._socket.wait_disconnected()
            self._gone = True
        with trio.move_on_after(READ_WITHIN_S):
            while self._socket.readable:
                await trio.sleep(LOOK_S)

    async def aclose(self, drain_ms: int = 200) -> None:
        """Close; what was sent (a last Fault) still goes out within `drain_ms` if the daemon is there."""
        await self._socket.aclose(drain_ms)

    def _decoded(self, frames: list[bytes]) -> ToRank:
        if len(frames) != 1:
            raise StreamBroken(f"{self._who()}: a message of {len(frames)} frames, one belongs")
        try:
            message = codec.to_rank(frames[0])
        except DecodeError as error:
            raise StreamBroken(f"{self._who()}: undecodable message from the daemon: {error}") from error
        if isinstance(message, Stop):
            self._socket.try_send([codec.encode(Left(self._stage, self._rank, message.again))])
        return message

    def _who(self) -> str:
        return f"stage {self._stage} rank {self._rank} epoch {self._epoch}"
