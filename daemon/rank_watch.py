"""Rank watch: what is known of the ranks of one epoch, and which of it says that the epoch is over.

Owns when each rank was heard, what it reported, and the signs. Must never touch a process or a socket. Invariant: times
are the caller's, in seconds of one steady clock; a late caller resets them (`forgive`), so that nobody is found silent
because this process slept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import trio

from daemon.blame import Mark, RankLost, Sign, fault_mark, judge, refusal
from daemon.exits import DaemonError, Exit
from daemon.settings_table import Settings
from ipc.messages import Explained, Fault, Ready
from ipc.rank_id import RankId, numbers

SILENT_S = 3.5  # three heartbeats missed: of ranks that fail together the silent one is to blame
BOOT_SILENCE_S = 60.0  # while a model loads its process may be busy for long, but it is not stopped


class RankWatch:
    """The ranks of one epoch."""

    def __init__(
        self, settings: Settings, epoch: int = 0, ranks: tuple[RankId, ...] = (), arenas: tuple[int, ...] = ()
    ) -> None:
        self.epoch = epoch
        self.arenas = arenas  # bytes that each stage is asked to take; empty: ranks measure
        self.ready: dict[RankId, Ready] = {}
        self.all_ready = trio.Event()
        self.heard: dict[RankId, float] = {}  # when each that has joined was heard last
        self.signs: list[Sign] = []
        self.noticed_at = math.inf
        self.over = trio.Event()  # there is a sign
        self.explained: dict[RankId, Explained] = {}
        self.all_explained = trio.Event()
        self._settings = settings
        self._ranks = ranks
        self._ran: dict[RankId, float] = {}  # when each that was found stopped while it boots was last seen running
        self._sent_at: dict[int, float] = {}  # step -> when, until every rank reported it
        self._reported: dict[RankId, int] = dict.fromkeys(ranks, 0)

    @property
    def booting(self) -> bool:
        """Not all are ready yet."""
        return not self.all_ready.is_set()

    @property
    def code(self) -> Exit:
        """The exit code that a loss stands for at this time."""
        return Exit.BOOT if self.booting else Exit.RANK

    @property
    def losing(self) -> str:
        """Why the epoch is over, as far as is known; empty while it is not."""
        return str(judge(self.signs).error) if self.signs else ""

    # --- signs

    def sign(self, mark: Mark, error: DaemonError) -> None:
        """Note a sign that this epoch is over."""
        self.signs.append(Sign(mark, error))
        if not self.over.is_set():
            self.noticed_at = trio.current_time()
            self.over.set()

    def unreachable(self, what: str, rank: RankId | None = None) -> None:
        """One, not always one that can be named, failed to be written to or read from."""
        self.sign(Mark.UNREACHABLE, RankLost(rank, what, self.code))

    def fault(self, rank: RankId, fault: Fault) -> None:
        """A rank says why it cannot go on."""
        refused = refusal(fault.what)
        what = fault.what if refused is not None and not fault.seq else f"failed at step {fault.seq}: {fault.what}"
        self.sign(fault_mark(fault.what), RankLost(rank, what, self.code, refused))

    # --- progress

    def note_ready(self, rank: RankId, ready: Ready) -> None:
        """A rank has loaded its part."""
        self.ready[rank] = ready
        if len(self.ready) == len(self._ranks):
            self.all_ready.set()

    def note_explained(self, rank: RankId, explained: Explained) -> None:
        """A rank said what it did."""
        self.explained[rank] = explained
        if len(self.explained) == len(self._ranks):
            self.all_explained.set()

    def forget_explained(self) -> None:
        """They are asked anew."""
        self.explained.clear()
        self.all_explained = trio.Event()

    def note_sent(self, seq: int, now: float) -> None:
        """A step goes to all ranks."""
        self._sent_at[seq] = now

    def note_report(self, rank: RankId, seq: int) -> None:
        """A rank reported a step."""
        self._reported[rank] = seq
        done = min(self._reported.values())
        while self._sent_at and next(iter(self._sent_at)) <= done:
            del self._sent_at[next(iter(self._sent_at))]

    # --- silence

    def forgive(self, now: float) -> None:
        """Time passed in which nobody was listened to: everybody gets a fresh start."""
        self.heard = dict.fromkeys(self.heard, now)
        self._sent_at = dict.fromkeys(self._sent_at, now)
        self._ran = {}

    def check(self, now: float, stopped: Iterable[RankId]) -> None:
        """Who has been silent or stopped for too long, and whether a step is overdue. `stopped`: by a signal, now."""
        timeout_s = self._settings.rank_timeout_s
        limit_s = max(timeout_s, BOOT_SILENCE_S) if self.booting else timeout_s
        self._note_silent({rank: now - heard for rank, heard in self.heard.items() if now - heard > limit_s})
        if self.booting:
            self._ran = {rank: self._ran.get(rank, now) for rank in stopped}
            self._note_silent({rank: now - ran for rank, ran in self._ran.items() if now - ran > timeout_s})
        if now - min(self._sent_at.values(), default=math.inf) > self._settings.step_timeout_s:
            self._note_late()

    def check_among_failing(self, now: float, alive: Iterable[RankId]) -> None:
        """Some failed: which of those that live said nothing while the others did."""
        if not self.booting:
            self._note_silent({rank: now - self.heard[rank] for rank in alive if now - self.heard[rank] > SILENT_S})

    def _note_silent(self, silent_s: dict[RankId, float]) -> None:
        for rank, for_s in silent_s.items():
            what = f"has been silent for {for_s:.1f} s (--rank-timeout {self._settings.rank_timeout_s:g})"
            self.sign(Mark.SILENT, RankLost(rank, what, self.code))

    def _note_late(self) -> None:
        behind = min(self._reported.values())
        late = [rank for rank in self._ranks if self._reported[rank] == behind]
        also = f" (nor did {numbers(late[1:])})" if late[1:] else ""
        limit = f"--step-timeout {self._settings.step_timeout_s:g} s"
        self.sign(Mark.LATE, RankLost(late[0], f"did not report step {behind + 1} within {limit}{also}"))
