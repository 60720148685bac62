"""Rank processes: the ranks of one epoch as children of the daemon, from their start to the last one reaped.

Owns the processes and their log files. Must never judge why one ended. Invariant: when `reap` or `close` has returned,
no rank that was started here lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import trio

from daemon.exits import DaemonError, Exit
from daemon.last_words import last_words
from daemon.processes import Child, is_stopped, module_command
from daemon.run_dir import RunDir
from ipc.rank_id import RankId, rank_name

MEETING_FILES = "rendezvous-"  # how `daemon.rank_settings` names them
REAP_WITHIN_S = 60.0  # a process in the kernel for so long will not come out of it


class RankProcesses:
    """Starts `python -m daemon.rank` once per rank and epoch; none are started where ranks are placed elsewhere."""

    def __init__(self, run_dir: RunDir, arguments: list[str], environ: Mapping[str, str], log: Any) -> None:
        """`arguments` are those that every rank gets: where the daemon listens, and keys."""
        self._run_dir = run_dir
        self._arguments = arguments
        self._environ = environ
        self._log = log
        self._children: dict[RankId, Child] = {}
        self._log_starts: dict[RankId, int] = {}  # bytes that earlier epochs and lives left in a rank's log

    @property
    def children(self) -> Mapping[RankId, Child]:
        """Those of the present epoch."""
        return self._children

    def start(self, ranks: Iterable[RankId]) -> None:
        """Start them all, and write their pids down for whoever comes after us."""
        assert not self._children, "the ranks of the last epoch were not reaped"
        self._sweep()
        for stage, rank in ranks:
            command = module_command("daemon.rank", *self._arguments, "--stage", str(stage), "--rank", str(rank))
            with self._log_path((stage, rank)).open("ab") as output:
                self._log_starts[stage, rank] = output.tell()
                self._children[stage, rank] = Child(rank_name((stage, rank)), command, self._environ, output)
            self._log.info("RankStarted", stage=stage, rank=rank, pid=self._children[stage, rank].pid)
        self._run_dir.note_ranks([child.pid for child in self._children.values()])

    async def reap(self, patience_s: float) -> None:
        """Wait for all of them, kill those that are not gone in time; raises DaemonError when even that is in vain."""
        with trio.move_on_after(patience_s + REAP_WITHIN_S):
            async with trio.open_nursery() as nursery:
                for child in self._children.values():
                    nursery.start_soon(child.end, patience_s, None)
        alive = [child.pid for child in self._children.values() if child.code is None]
        if alive:
            raise DaemonError(
                Exit.RANK,
                f"killed ranks are still there after {REAP_WITHIN_S:g} s, pids {alive}: the kernel holds them",
            )
        self.close()

    def close(self) -> None:
        """Kill and reap what is left."""
        for child in self._children.values():
            child.close()
        self._children.clear()
        self._sweep()

    def _sweep(self) -> None:
        """Remove the files at which ranks of one epoch met."""
        for file in self._run_dir.path.glob(f"{MEETING_FILES}*"):
            file.unlink(missing_ok=True)

    def stopped(self) -> list[RankId]:
        """Ranks whose process is stopped by a signal or a debugger."""
        return [rank for rank, child in self._children.items() if child.code is None and is_stopped(child.pid)]

    def said_last(self, rank: RankId) -> str:
        """What a rank said last in this epoch, and where the rest of it is; empty for one that runs elsewhere."""
        if rank not in self._log_starts:
            return ""
        log = self._log_path(rank)
        words = last_words(log, self._log_starts[rank])
        return f"; it said last: {words}; its log is {log}" if words else f"; it named no error; its log is {log}"

    def _log_path(self, rank: RankId) -> Path:
        return self._run_dir.logs / f"rank-{rank[0]}-{rank[1]}.log"
