"""Sessions: which front ends are connected, what they have running, and what waits to be read by them.

Owns the maps between names and ZeroMQ identities, one for front ends and one for watchers. Must never remember a peer
that did not introduce itself: memory grows with names that connected, at most `frontends_max` and `watchers_max`,
whatever else knocks; nor let a watcher take a name or a place of a front end. Invariants: a name has at most one
identity and an identity at most one name; a session without identity keeps its name until it returns or is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ipc.handshake import Limits
from ipc.messages import Connect


class Session:
    """One front end, or one watcher, by name, over its reconnects."""

    __slots__ = (
        "attempt", "connects", "heard_s", "identity", "live", "name", "outbox", "outbox_bytes", "process",
        "silent_rounds", "watches",
    )  # fmt: skip

    def __init__(self, name: str, now_s: float, watches: bool = False) -> None:
        self.name = name
        self.watches = watches  # it only asks: the core never hears of it
        self.identity: bytes | None = None
        self.process, self.attempt = "", 0  # who introduced itself last, and on its which connection
        self.heard_s = now_s
        self.silent_rounds = 0  # rounds of housekeeping since it was heard
        self.connects = 0
        self.live: dict[str, set[int]] = {}  # request id -> choices that have not ended (none: not yet answered)
        self.outbox: deque[bytes] = deque()
        self.outbox_bytes = 0

    def heard(self, now_s: float) -> None:
        """A message came from it."""
        self.heard_s = now_s
        self.silent_rounds = 0

    def queue(self, data: bytes) -> None:
        """Add a message that ZeroMQ's own queue has no room for."""
        self.outbox.append(data)
        self.outbox_bytes += len(data)

    def empty_outbox(self) -> int:
        """Drop everything queued; how many messages."""
        dropped = len(self.outbox)
        self.outbox.clear()
        self.outbox_bytes = 0
        return dropped


class Sessions:
    """All front ends and watchers that are connected or not yet given up."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._frontends: dict[str, Session] = {}
        self._watchers: dict[str, Session] = {}  # may go by the names of front ends
        self._by_identity: dict[bytes, Session] = {}

    def __len__(self) -> int:
        """Sessions known."""
        return len(self._frontends) + len(self._watchers)

    def __iter__(self) -> Iterator[Session]:
        """Front ends in the order of their first connect, then watchers; a copy, so that sessions may go meanwhile."""
        return iter([*self._frontends.values(), *self._watchers.values()])

    def by_identity(self, identity: bytes) -> Session | None:
        """Who speaks on this connection, or None for a stranger."""
        return self._by_identity.get(identity)

    def by_name(self, name: str) -> Session | None:
        """The front end of this name, or None when it was given up."""
        return self._frontends.get(name)

    def expect(self, name: str, now_s: float) -> None:
        """A front end of an earlier life may come back; who left requests behind is never one too many."""
        self._frontends.setdefault(name, Session(name, now_s))

    def is_late(self, connect: Connect) -> bool:
        """Whether the same process has introduced itself on a later connection; this one was given up."""
        session = self._named(connect.watches).get(connect.frontend)
        return session is not None and session.process == connect.process and connect.attempt < session.attempt

    def connect(self, connect: Connect, identity: bytes, now_s: float) -> tuple[Session | None, bytes | None]:
        """Bind a name to an identity: the session, or None when there are too many; and the identity it replaced."""
        name, named = connect.frontend, self._named(connect.watches)
        session = named.get(name)
        if session is None:
            if len(named) >= self.most(connect.watches):
                return None, None
            session = named[name] = Session(name, now_s, connect.watches)
        other = self._by_identity.get(identity)
        if other is not None and other is not session:
            self.disconnect(other)  # one connection changed its name or its kind: the old one is without
        replaced = session.identity if session.identity != identity else None
        self.disconnect(session)
        session.identity = identity
        session.process, session.attempt = connect.process, connect.attempt
        session.heard(now_s)
        session.connects += 1
        self._by_identity[identity] = session
        return session, replaced

    def most(self, watches: bool) -> int:
        """How many watchers, or front ends, there may be."""
        return self._limits.watchers_max if watches else self._limits.frontends_max

    def _named(self, watches: bool) -> dict[str, Session]:
        return self._watchers if watches else self._frontends

    def disconnect(self, session: Session) -> int:
        """The session's connection is gone or cut; its name stays. How many queued messages were dropped."""
        if session.identity is not None:
            del self._by_identity[session.identity]
            session.identity = None
        return session.empty_outbox()

    def give_up(self, session: Session) -> None:
        """Forget a front end or a watcher."""
        self.disconnect(session)
        del self._named(session.watches)[session.name]

    def silent(self, rounds: int) -> list[Session]:
        """Count one more silent round for everyone; the sessions that have reached `rounds`."""
        for session in self:
            session.silent_rounds += 1
        return [session for session in self if session.silent_rounds >= rounds]
