"""Feed: asks the daemon once an interval, over its deaths and restarts.

Owns the connection. Must never send more than one question at a time, nor keep the daemon busy when nobody looks: a
question waits for the answer to the last one. Invariant: `on_watched` and `on_lost` are called in the order in which
things happened; a decision is handed over once per life.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import msgspec
import trio

from daemon.watch import Watched, WatchedLife
from ipc.client import DaemonClient
from ipc.errors import DaemonLost
from ipc.keys import ClientKeys

FIRST_WITHIN_S = 10.0
ANSWER_WITHIN_S = 5.0
DECISIONS_AT_FIRST = 64
LOOK_EVERY_S = 0.1


class NoAnswer(Exception):
    """The daemon cannot be watched; the text says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the daemon's front-end socket is, with which keys, and how people call it."""

    endpoint: str
    name: str
    keys: ClientKeys | None = None
    insecure: bool = False

    def client(self) -> DaemonClient:
        """A client that only watches."""
        name = f"top-{os.getpid()}-{secrets.token_hex(3)}"
        return DaemonClient(self.endpoint, name, keys=self.keys, insecure=self.insecure, watches=True)


async def ask(client: DaemonClient, since: int, rows: int | None = None) -> Watched:
    """One answer; raises DaemonLost, NoAnswer for a daemon that does not know the question, trio.TooSlowError."""
    options = {"since": since} | ({"rows": rows} if rows is not None else {})
    if not since:
        options["decisions"] = DECISIONS_AT_FIRST
    answer = await client.ask("watch", options, ANSWER_WITHIN_S)
    if not answer.ok:
        raise NoAnswer(f"the daemon answers: {answer.body[:200]}")
    return msgspec.json.decode(answer.body.encode(), type=Watched)


async def ask_life(client: DaemonClient, request: int) -> WatchedLife | None:
    """What is known of a request; None: nothing, or nothing any more."""
    answer = await client.ask("life", {"request": request}, ANSWER_WITHIN_S)
    return msgspec.json.decode(answer.body.encode(), type=WatchedLife) if answer.ok else None


async def first(place: Place, interval_s: float) -> tuple[Watched, Watched]:
    """Two answers, an interval apart, so that there are rates; raises DaemonLost or NoAnswer."""
    async with place.client() as client:
        await client.wait_connected(FIRST_WITHIN_S)
        before = await ask(client, 0)
        await trio.sleep(interval_s)
        return before, await ask(client, before.serial)


@dataclass(slots=True)
class Feed:
    """A thread with an event loop of its own. What it calls must be safe to call from there."""

    place: Place
    on_watched: Callable[[Watched], None]
    on_lost: Callable[[str], None]
    on_life: Callable[[int, WatchedLife | None], None]
    interval_s: float = 1.0
    _lives: SimpleQueue[int] = field(default_factory=SimpleQueue)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    _token: trio.lowlevel.TrioToken | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._thread = threading.Thread(target=trio.run, args=(self._run,), name="feed", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, also amid a question that nobody answers, and wait for it."""
        self._over.set()
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)
        if self._thread is not None:
            self._thread.join(ANSWER_WITHIN_S)

    def want_life(self, request: int) -> None:
        """Ask for what is known of a request, soon."""
        self._lives.put(request)

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            await self._ask_on()

    async def _ask_on(self) -> None:
        async with self.place.client() as client:
            life, since = "", 0
            while not self._over.is_set():
                began_s = trio.current_time()
                try:
                    if client.welcome is not None and client.welcome.life != life:
                        life, since = client.welcome.life, 0
                    watched = await ask(client, since)
                except (DaemonLost, trio.TooSlowError, NoAnswer) as error:
                    self.on_lost(str(error) or f"no answer within {ANSWER_WITHIN_S:g} s")
                    await trio.sleep(LOOK_EVERY_S)
                    continue
                since = watched.serial
                self.on_watched(watched)
                await self._answer_lives(client)
                while not self._over.is_set() and trio.current_time() < began_s + self.interval_s and client.connected:
                    await trio.sleep(min(LOOK_EVERY_S, self.interval_s))
                    await self._answer_lives(client)

    async def _answer_lives(self, client: DaemonClient) -> None:
        while True:
            try:
                request = self._lives.get_nowait()
            except Empty:
                return
            try:
                self.on_life(request, await ask_life(client, request))
            except (DaemonLost, trio.TooSlowError):
                return  # the next question finds the daemon lost, and says so
