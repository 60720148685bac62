"""Strikes: which process is hit with which signal, when, and how it is found.

Owns the plan of a campaign and the delivery. Must never signal a process that is not one of the server's own family.
The plan follows from the seed: kinds take turns, ranks take turns, and the moment lies anywhere in a round.
"""

from __future__ import annotations

import random
import signal
from typing import NamedTuple

import psutil

from tools.own_server import OwnServer, runs_module

MODULES = {"daemon": "daemon", "rank": "daemon.rank", "frontend": "daemon.frontend"}
KINDS = (
    "daemon:kill",
    "rank:kill",
    "frontend:kill",
    "daemon:stop",
    "rank:stop",
    "frontend:stop",
    "launcher:kill",
    "launcher:stop",
    "client:vanish",
    "two:kill",
)
EXPECTED = {
    "daemon:kill": "red, replaced, streams pause and go on",
    "rank:kill": "red, all ranks replaced, streams pause and go on",
    "frontend:kill": "its HTTP connections break, the others go on",
    "daemon:stop": "as kill, once its silence was noticed",
    "rank:stop": "as kill, once its silence was noticed",
    "frontend:stop": "killed and replaced once it does not answer; then as kill",
    "launcher:kill": "everything ends by itself; the next start recovers",
    "launcher:stop": "nothing: it only watches",
    "client:vanish": "nothing; the front end that comes back resumes",
    "two:kill": "any process, and any again while the first is being replaced: as for each",
}
BREAKS_HTTP = ("frontend:", "launcher:kill")  # what takes HTTP connections along
SECOND_WITHIN_S = 3.0  # of two strikes, drawn


class Strike(NamedTuple):
    """What happens in one round: `kind` out of KINDS, when a share of the round's output has come.

    `which` of several processes of that kind, by number modulo their count; a second strike comes after `pause_s`.
    """

    kind: str
    share: float
    which: int = 0
    pause_s: float = 1.0

    def blows(self) -> list[tuple[float, str, int]]:
        """Each blow: how long after the one before, its kind and which."""
        if not self.kind.startswith("two:"):
            return [(0.0, self.kind, self.which)]
        kinds = [f"{name}:kill" for name in MODULES]
        first, second = self.which % len(kinds), self.which // len(kinds) % len(kinds)
        return [(0.0, kinds[first], self.which), (self.pause_s, kinds[second], self.which)]

    @property
    def breaks_http(self) -> bool:
        """Whether HTTP connections may end with it."""
        return any(kind.startswith(BREAKS_HTTP) for _, kind, _ in self.blows())


def plan(seed: int, rounds: int, kinds: tuple[str, ...]) -> list[Strike]:
    """One strike a round."""
    strikes = []
    for number in range(rounds):
        draw = random.Random(f"{seed}/strike/{number}")
        share, which, pause_s = draw.uniform(0.0, 0.95), draw.randrange(1_000_000), draw.uniform(0.0, SECOND_WITHIN_S)
        strikes.append(Strike(kinds[number % len(kinds)], share, which, pause_s))
    return strikes


def victims(server: OwnServer, kind: str) -> list[psutil.Process]:
    """The live processes of a kind (the part before the colon), in a stable order."""
    name = kind.partition(":")[0]
    if name == "launcher":
        return [psutil.Process(server.pid)]
    found = [process for process in server.processes() if runs_module(process, MODULES[name])]
    return sorted(found, key=_command)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def deliver(process: psutil.Process, kind: str) -> None:
    """The signal of a kind; a process that ended by itself a moment ago is left alone."""
    try:
        process.send_signal(signal.SIGKILL if kind.endswith(":kill") else signal.SIGSTOP)
    except psutil.NoSuchProcess:
        return


def parse_kinds(text: str) -> tuple[str, ...]:
    """Kinds by name, or by their part before or behind the colon; ValueError names one that does not exist."""
    found: list[str] = []
    for part in text.split(","):
        matching = [kind for kind in KINDS if part in (kind, *kind.split(":"))]
        if not matching:
            raise ValueError(f"{part!r} is none of {', '.join(KINDS)}")
        found += [kind for kind in matching if kind not in found]
    return tuple(found)
