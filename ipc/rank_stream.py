"""Rank stream: a rank's end of the ordered message stream between it and the daemon (`ipc.streams`: the other end).

Owns the order of what the rank says and hears. Must never repair an order, nor keep a Stop to itself. From `share` on
the thread that computes takes its steps and reports them itself (`take_steps`, `send_now`): a step then wakes one
thread, once. While that thread is at work for long the loop reads in its place (`stand_in`). Invariants:

* steps are accepted with seq 1, 2, 3, ... of this epoch only; reports are sent with seq 1, 2, 3, ...;
* a Stop that was read is answered with `Left`, wherever it was read;
* the daemon counts as gone when its connection has ended and everything that came over it was read.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

import trio
import zmq

from ipc import codec
from ipc.errors import DecodeError, Dismissed, StreamBroken, VersionMismatch
from ipc.handshake import version_problem
from ipc.keys import ClientKeys
from ipc.messages import Begin, Explain, FromRank, Hello, Join, Left, Report, Step, Stop, ToRank
from ipc.shared_socket import SharedSocket
from ipc.sockets import SocketOptions, open_dealer

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
        self._socket: SharedSocket
        self._gone: bool
        self._connect()
        self._stage, self._rank, self._token = stage, rank, token
        self._epoch = 0
        self._begun = False
        self._received = 0
        self._reported = 0
        # Once it is shared: what the loop has still to hear, and the steps that the other thread has still to take.
        self._shared = False
        self._heard: deque[Begin | Explain | Stop | StreamBroken] = deque()
        self._steps: deque[Step] = deque()
        self._elsewhere = False  # the other thread reads
        self._left_ns = 0  # when it last stopped to
        self._broken = False  # but for a Stop, nothing that is read behind that counts
        self._called = trio.Event()
        self._trio: trio.lowlevel.TrioToken

    def _connect(self) -> None:
        self._socket = SharedSocket(open_dealer(*self._where), self._where[0])
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

    @property
    def received(self) -> int:
        """Seq of the newest step that was read."""
        return self._received

    @property
    def reported(self) -> int:
        """Seq of the newest report that was sent."""
        return self._reported

    async def recv(self) -> Begin | Step | Explain | Stop:
        """The daemon's next message; steps in dense order only, and none once the stream is shared. StreamBroken."""
        if not self._shared:
            return self._in_order(self._decoded(await self._socket.recv()))
        while not self._heard:
            if self._elsewhere and not self._socket.closed:
                await self._called.wait()
                self._called = trio.Event()
            else:
                await self._socket.read_here(self._sort)
                self._socket.ring()  # there may be steps among it
        message = self._heard.popleft()
        if isinstance(message, StreamBroken):
            raise message
        return message

    # --- shared with the thread that computes ----------------------------------------------------------------------

    def share(self) -> bool:
        """From now on steps are another thread's; False: this stream is not to be shared."""
        self._socket.share()
        self._trio = trio.lowlevel.current_trio_token()
        self._left_ns = time.monotonic_ns()
        self._shared = True
        return True

    def take_steps(self, within_s: float | None) -> list[Step] | None:
        """The other thread's: steps that are there, in order; waits for one for so long. None: the stream is closed."""
        if not self._steps:
            self._left_ns = 0
            if not self._elsewhere:
                self._elsewhere = True
                self._tell_loop(self._socket.leave)
            try:
                if not self._socket.read(self._sort, within_s):
                    self._socket.hang_up()
                    return None
            finally:
                self._left_ns = time.monotonic_ns()
        return [self._steps.popleft() for _ in range(len(self._steps))]

    def stand_in(self, after_s: float) -> None:
        """Let `recv` read steps too when the other thread has not looked for so long; that thread ends it."""
        if self._elsewhere and self._left_ns and time.monotonic_ns() - self._left_ns > after_s * 1e9:
            self._elsewhere = False
            self._call()

    def _sort(self, frames: list[bytes]) -> None:
        """One message to the thread that it is for, in the thread that read it, under the socket's lock."""
        try:
            message = self._decoded(frames)
            if self._broken and not isinstance(message, Stop):
                return
            message = self._in_order(message)
            if isinstance(message, Step):
                self._steps.append(message)
                return
            self._heard.append(message)
        except StreamBroken as broken:
            self._broken = True
            self._heard.append(broken)
        self._tell_loop(self._call)

    def _call(self) -> None:
        """In the loop's thread: `recv` looks again, wherever it waits."""
        self._called.set()
        self._socket.leave()

    def _tell_loop(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._trio.run_sync_soon(what)

    async def send(self, message: FromRank) -> None:
        """Send the daemon a message, reports in dense order. Waits at the high-water mark; cancelled means not sent."""
        if isinstance(message, Report):
            self._check_report(message)
            await self._socket.send([codec.encode(message)])
            self._reported = message.seq
            return
        await self._socket.send([codec.encode(message)])

    def send_now(self, report: Report) -> bool:
        """As `send` of a report, in either thread, without waiting or raising; False: `send` would wait or raise."""
        due = self._reported < report.seq <= min(self._reported + 1, self._received)
        if not due or not self._socket.post([codec.encode(report)]):
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
            while self._socket.readable or self._heard:
                self.stand_in(0)  # the other thread may be at work for longer than that
                await trio.sleep(LOOK_S)

    async def aclose(self, drain_ms: int = 200) -> None:
        """Close; what was sent (a last Fault) still goes out within `drain_ms` if the daemon is there."""
        self._socket.close(drain_ms)
        self._called.set()  # whoever waits in `recv` finds it closed
        await trio.lowlevel.cancel_shielded_checkpoint()

    def _decoded(self, frames: list[bytes]) -> ToRank:
        if len(frames) != 1:
            raise StreamBroken(f"{self._who()}: a message of {len(frames)} frames, one belongs")
        try:
            message = codec.to_rank(frames[0])
        except DecodeError as error:
            raise StreamBroken(f"{self._who()}: undecodable message from the daemon: {error}") from error
        if isinstance(message, Stop):
            self._socket.post([codec.encode(Left(self._stage, self._rank, message.again))])
        return message

    def _in_order(self, message: ToRank) -> Begin | Step | Explain | Stop:
        """The message, of this epoch and the next in order; StreamBroken otherwise."""
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
        if isinstance(message, Begin):
            if self._begun:
                raise StreamBroken(f"{self._who()}: a second Begin")
            self._begun = True
        return message

    def _who(self) -> str:
        return f"stage {self._stage} rank {self._rank} epoch {self._epoch}"
