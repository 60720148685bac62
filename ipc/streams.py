"""Streams: the daemon's end of the ordered message streams between it and its ranks (`ipc.rank_stream`: a rank's end).

Owns who a rank is (the token it joined with, the connection it joined on) and the order of what it says and hears.
Must never repair an order: a hole in a rank's stream ends the epoch. Invariants, per epoch and rank:

* steps go out with seq 1, 2, 3, ...;
* reports come back with seq 1, 2, 3, ...; a report of another epoch is dropped and counted, never returned;
* a message counts for the (stage, rank) that joined on its connection, whatever numbers it carries;
* a rank was told that it is over when it said so (`Left`), not when that was sent.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable, Iterable

import trio
import zmq

from ipc import codec
from ipc.errors import DecodeError, PeerGone, RankGone, RankStalled, StreamBroken, VersionMismatch
from ipc.farewell import Farewell
from ipc.handshake import version_problem
from ipc.keys import ServerKeys
from ipc.messages import Begin, Explain, FromRank, Hello, Join, Left, RankSettings, Report, StandsBy, Stop, ToRank
from ipc.rank_id import RankId
from ipc.rank_stream import RANK_SOCKET
from ipc.sockets import bind_router

_NOTHING = RankSettings("", "", "", 0, 0, 0, 0, 0, 0)  # for a rank that will load nothing


class _Member:
    """One joined rank: its connection, whether it was told Hello, the newest seq it reported in this epoch."""

    __slots__ = ("identity", "rank", "reported", "told")

    def __init__(self, identity: bytes, rank: RankId) -> None:
        self.identity = identity
        self.rank = rank
        self.reported = 0
        self.told = False


class RankServer:
    """The daemon's end of all rank streams."""

    def __init__(
        self,
        endpoint: str,
        *,
        token: str,
        ranks: Iterable[RankId],
        keys: ServerKeys | None = None,
        insecure: bool = False,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        complain: Callable[[str, str], None] | None = None,
        replaced: bool = False,
    ) -> None:
        """`complain` is told of every message that no rank can have sent: the counter it counts in, and a text.

        With `replaced`, somebody else starts the ranks: one that joins stands for a process that ended and breaks the
        stream of the epoch; it takes part in the next one. If that process is connected still, a second one was
        started by mistake: it waits until the first is gone. One of another protocol version is told ours, and ends by
        that; one that this daemon starts breaks the stream, since a new process of the daemon would start another.
        """
        self._socket = bind_router(endpoint, RANK_SOCKET, keys, insecure, context)
        self._complain = complain
        self._token = token
        self._expected = frozenset(ranks)
        self._by_identity: dict[bytes, _Member] = {}
        self._by_rank: dict[RankId, _Member] = {}
        self._former: set[bytes] = set()  # connections of ranks of the last epoch
        self._replaced = replaced
        self._early: dict[RankId, tuple[bytes, Join]] = {}  # who joins in the next epoch
        self._taken: list[FromRank] = []  # their Joins, once it began
        self._standing: dict[RankId, bytes] = {}  # connections of those who start the processes of ranks
        self._farewell: Farewell | None = None  # what whoever joins from now on is told
        self._epoch = 0
        self._sent_seq = 0
        self.stats: dict[str, int] = {"undecodable": 0, "not_joined": 0, "bad_join": 0, "old_epoch": 0, "wrong_rank": 0}

    @property
    def endpoint(self) -> str:
        """Where ranks connect to."""
        return self._socket.endpoint

    @property
    def untold(self) -> list[RankId]:
        """Ranks that have not said that they read the last word; none while `dismiss` has not been called."""
        return sorted(self._farewell.unread) if self._farewell is not None else []

    def begin_epoch(self, epoch: int) -> None:
        """Start afresh: no rank has joined, steps and reports begin at seq 1, older epochs' messages are dropped."""
        assert epoch > self._epoch, f"epoch {epoch} after epoch {self._epoch}"
        self._epoch = epoch
        self._sent_seq = 0
        self._former = set(self._by_identity)
        self._by_identity.clear()
        self._by_rank.clear()
        self._taken = [message for _, message in self._early.values()]
        for rank, (identity, _) in self._early.items():
            self._admit(identity, rank)
        self._early.clear()

    def forget(self, stage: int, rank: int) -> None:
        """A rank that joined is gone again before it was told anything: another may join in its place."""
        member = self._by_rank.pop((stage, rank), None)
        if member is not None:
            del self._by_identity[member.identity]

    # --- to ranks --------------------------------------------------------------------------------------------------

    async def send(self, stage: int, rank: int, message: ToRank) -> None:
        """Send one rank a message, waiting while its queue is full. RankGone when it is not there."""
        member = self._by_rank.get((stage, rank))
        if member is None:
            raise RankGone("has not joined", (stage, rank))
        try:
            await self._socket.send([member.identity, codec.encode(message)])
        except PeerGone:
            what = f"is not connected any more ({type(message).__name__} could not be sent)"
            raise RankGone(what, (stage, rank)) from None
        member.told = member.told or isinstance(message, Hello)

    def send_step(self, seq: int, data: bytes) -> None:
        """Send every rank the encoded step `seq`. RankGone, RankStalled name the rank; the epoch is over then."""
        if seq != self._sent_seq + 1:
            raise StreamBroken(f"epoch {self._epoch}: step {seq} is to be sent after step {self._sent_seq}")
        self._sent_seq = seq
        self._to_all(data, f"step {seq}")

    def broadcast(self, message: Begin | Explain | Stop) -> None:
        """Send every joined rank the same message, without waiting. RankGone, RankStalled name the rank."""
        self._to_all(codec.encode(message), type(message).__name__)

    async def dismiss(self, stop: Stop) -> None:
        """Tell each rank that it is over, also those that are between two epochs and join from now on.

        Returns when of each of them its process, or who starts that, has said that it read this; one that does not come
        or read is waited for until the caller cancels. What was sent to a connection proves nothing: its process may
        have died, or have read first that another epoch follows. Either way another process comes in its place, and is
        told.
        """
        farewell = self._farewell = Farewell(self._expected, codec.encode(stop))
        for member in self._by_rank.values():
            self._tell_last(farewell, member.rank, member.identity)
        for rank, (identity, _) in self._early.items():
            self._tell_last(farewell, rank, identity)
        for rank, identity in self._standing.items():
            self._tell_last(farewell, rank, identity)
        with farewell.scope:
            while True:
                for frames in await self._socket.recv_batch(len(self._expected)):
                    with contextlib.suppress(StreamBroken, VersionMismatch):
                        self._take(frames)

    def _tell_last(self, farewell: Farewell, rank: RankId, identity: bytes) -> None:
        with contextlib.suppress(PeerGone):
            if self._socket.try_send([identity, farewell.data]):
                farewell.told(identity, rank)

    def _to_all(self, data: bytes, what: str) -> None:
        missing = self._expected - self._by_rank.keys()
        if missing and not what == Stop.__name__:
            raise RankGone(f"{what} cannot be sent: not joined are (stage, rank) {sorted(missing)}")
        problem: RankGone | RankStalled | None = None
        for rank, member in self._by_rank.items():  # the others hear it although one does not
            try:
                if not self._socket.try_send([member.identity, data]):
                    text = f"has {RANK_SOCKET.send_hwm} messages unread ({what} could not be sent)"
                    problem = problem or RankStalled(text, rank)
            except PeerGone:
                problem = problem or RankGone(f"is not connected any more ({what} could not be sent)", rank)
        if problem is not None:
            raise problem

    # --- from ranks ------------------------------------------------------------------------------------------------

    async def recv(self) -> FromRank:
        """The next message of a joined rank, or a Join that was taken. StreamBroken for a rank out of order."""
        if self._taken:
            await trio.lowlevel.checkpoint()
            return self._taken.pop(0)
        while True:
            message = self._take(await self._socket.recv())
            if message is not None:
                return message

    async def recv_batch(self, n: int) -> list[FromRank]:
        """What is there, 1 to `n` messages. StreamBroken as in `recv`: the rest of that epoch does not count."""
        if self._taken:
            await trio.lowlevel.checkpoint()
            early, self._taken = self._taken, []
            return early
        while True:
            messages, broken = [], None
            for frames in await self._socket.recv_batch(n):
                try:
                    message = self._take(frames)
                except StreamBroken as error:
                    broken = broken or error  # who joins behind it must still be noted
                    continue
                if message is not None:
                    messages.append(message)
            if broken is not None:
                raise broken
            if messages:
                return messages

    def _take(self, frames: list[bytes]) -> FromRank | None:
        if len(frames) != 2:
            self._drop("undecodable", f"{len(frames) - 1} frames where 1 belongs")
            return None
        identity, data = frames
        try:
            message = codec.from_rank(data)
        except DecodeError as error:
            self._drop("undecodable", error.text)
            return None
        if isinstance(message, Join):
            return self._join(identity, message)
        if isinstance(message, Left):
            self._left(identity, message)
            return None
        if isinstance(message, StandsBy):
            self._stands_by(identity, message)
            return None
        member = self._by_identity.get(identity)
        if identity in self._former:
            self.stats["old_epoch"] += 1  # sent before its epoch ended
            return None
        if member is None:
            self._drop("not_joined", f"{type(message).__name__} on a connection that has not joined")
            return None
        if (message.stage, message.rank) != member.rank:
            said = (message.stage, message.rank)
            self._drop("wrong_rank", f"{type(message).__name__} as {said} on the connection of {member.rank}")
            return None
        if isinstance(message, Report):
            return self._report(member, message)
        return message

    def _drop(self, counter: str, text: str) -> None:
        """Count a message that no rank of ours sent, and say so."""
        self.stats[counter] += 1
        if self._complain is not None:
            self._complain(counter, text)

    def _join(self, identity: bytes, message: Join) -> Join | None:
        rank = (message.stage, message.rank)
        proven = self._proves(message.token)
        known = rank in self._expected and rank not in self._by_rank and identity not in self._by_identity
        self._former.discard(identity)
        again = proven and self._replaced and rank in self._by_rank and identity not in self._by_identity
        if not again and not (proven and known):
            why = "it is not expected, or is here already" if proven else "with a wrong token"
            self._drop("bad_join", f"Join as stage {message.stage} rank {message.rank}: {why}")
            return None
        problem = version_problem(message.version, f"stage {message.stage} rank {message.rank}")
        if problem and not self._replaced:
            raise VersionMismatch(problem)
        if problem:
            self._drop("bad_join", problem)
            with contextlib.suppress(PeerGone):
                self._socket.try_send([identity, codec.encode(Hello(self._epoch, _NOTHING))])
            return None
        if self._farewell is not None:
            self._tell_last(self._farewell, rank, identity)
            return None
        if again:
            self._early[rank] = (identity, message)
            if self._connected(self._by_rank[rank]):
                who = f"stage {message.stage} rank {message.rank}"
                text = f"a second process as {who} (pid {message.pid}) waits until the first is gone: start each once"
                self._drop("bad_join", text)
                return None
            raise StreamBroken(
                f"stage {message.stage} rank {message.rank} joins anew (pid {message.pid}): its process was replaced"
            )
        self._admit(identity, rank)
        return message

    def _stands_by(self, identity: bytes, message: StandsBy) -> None:
        """Who starts this rank's processes is there: it is told the last word, now if that was said already."""
        rank = (message.stage, message.rank)
        who = f"the starter of stage {message.stage} rank {message.rank}"
        problem = version_problem(message.version, who)
        if rank not in self._expected or not self._replaced:
            problem = f"{who} stands by: it is not expected"
        elif not self._proves(message.token):
            problem = f"{who} stands by with a wrong token"
        if problem:
            self._drop("bad_join", problem)
            return
        if self._farewell is not None and self._standing.get(rank) != identity:
            self._tell_last(self._farewell, rank, identity)
        self._standing[rank] = identity

    def _proves(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())

    def _left(self, identity: bytes, message: Left) -> None:
        """A rank read a Stop: the last one, or one behind which it comes again."""
        if self._farewell is not None and self._farewell.read(identity, message):
            return
        if identity not in self._by_identity and identity not in self._former:
            self._drop("not_joined", "Left on a connection that has not joined")

    def _connected(self, member: _Member) -> bool:
        """Whether a rank can be written to; one that was told nothing yet could not understand the question."""
        try:
            if member.told:
                self._socket.try_send([member.identity, codec.encode(Explain(1))])  # its answer counts for nothing
        except PeerGone:
            return False
        return member.told

    def _admit(self, identity: bytes, rank: RankId) -> None:
        member = _Member(identity, rank)
        self._by_identity[identity] = member
        self._by_rank[rank] = member

    def _report(self, member: _Member, message: Report) -> Report | None:
        if message.epoch != self._epoch:
            self.stats["old_epoch"] += 1
            return None
        if message.seq != member.reported + 1 or message.seq > self._sent_seq:
            raise StreamBroken(
                f"epoch {self._epoch}: stage {message.stage} rank {message.rank} reported step {message.seq} "
                f"after step {member.reported}, while step {self._sent_seq} was the last one sent"
            )
        member.reported = message.seq
        return message

    async def aclose(self, drain_ms: int = 200) -> None:
        """Close; a Stop just sent still goes out."""
        await self._socket.aclose(drain_ms)
