"""Run directory: where one daemon keeps its journal, logs and sockets, and who owns it.

Owns the locks on `server.pid` (the launcher's) and `daemon.pid`, and the list of rank processes in `ranks.pid`. Must
never remove what a live process uses. Invariants: one owner at a time, known by locks that end with their processes; a
launcher keeps the directory while its daemon is being replaced; a directory whose ranks outlived their daemon is
refused until they are gone, by their pids.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from daemon.exits import DaemonError, Exit
from daemon.settings_table import Settings
from ipc.endpoints import private_directory

ORPHANS_GONE_WITHIN_S = 5.0


class RunDirInUse(DaemonError):
    """Live processes own the run directory; the text names their pids."""

    def __init__(self, path: Path, who: str) -> None:
        super().__init__(
            Exit.IN_USE, f"the run directory {path} is in use by {who}: stop it, or choose another --run-dir"
        )


def default_path(settings: Settings) -> Path:
    """The run directory of these settings: `--run-dir`, or one per port under the user's state directory."""
    if settings.run_dir:
        return Path(settings.run_dir).absolute()
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "bandmaster" / f"port-{settings.port}"


def process_started(pid: int) -> int:
    """When a live process started, in clock ticks since boot; 0 when there is none. Pid and start name it for ever."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def _holder(file: Path) -> int:
    """Pid of the live process that holds the lock on a file; 0 when nobody does."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.read(handle, 32) or b"1")
    finally:
        os.close(handle)
    return 0


class RunDir:
    """The paths of one run directory, and its claim."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        self.logs = path / "logs"
        self.front_endpoint = f"ipc://{path / 'front.sock'}"
        self.ranks_endpoint = f"ipc://{path / 'ranks.sock'}"
        self._pid_file = path / "daemon.pid"
        self._server_file = path / "server.pid"
        self._ranks_file = path / "ranks.pid"
        self._lock = -1
        self._server_lock = -1

    def prepare(self) -> None:
        """Make the directory and its folders, 0700; raises EndpointError when it is not private to us."""
        private_directory(self.path)
        for folder in (self.journal, self.logs):
            private_directory(folder)

    def owner(self) -> int:
        """Pid of the live daemon that holds the directory; 0 when nobody does."""
        return _holder(self._pid_file)

    def claim(self) -> None:
        """Become the owner; raises RunDirInUse naming a live daemon, another's launcher, or ranks of a dead daemon."""
        launcher = _holder(self._server_file)
        if launcher not in (0, os.getppid()):
            raise RunDirInUse(self.path, f"the server with pid {launcher}")
        self._lock = self._locked(self._pid_file, "the daemon")
        self._await_orphans()

    def claim_server(self) -> None:
        """Keep the directory for one launcher; raises RunDirInUse naming another one, or a daemon without one."""
        self._server_lock = self._locked(self._server_file, "the server")
        if owner := self.owner():
            self.release_server()
            raise RunDirInUse(self.path, f"the daemon with pid {owner}")

    def release_server(self) -> None:
        """The launcher gives the directory up."""
        if self._server_lock >= 0:
            self._server_file.unlink(missing_ok=True)
            os.close(self._server_lock)
            self._server_lock = -1

    def _locked(self, file: Path, who: str) -> int:
        """The handle of a file that is ours alone from now on and names us; raises RunDirInUse naming who has it."""
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            text = f"the run directory {self.path} cannot be used: {file.name}: {error.strerror}"
            raise DaemonError(Exit.USAGE, text) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(handle, 32).decode() or "unknown"
            os.close(handle)
            raise RunDirInUse(self.path, f"{who} with pid {pid}") from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        return handle

    def release(self) -> None:
        """Give the directory up in order: its pid files go."""
        if self._lock >= 0:
            self._ranks_file.unlink(missing_ok=True)
            self._pid_file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def sweep(self) -> None:
        """Remove socket and pid files that killed processes left; does nothing while the directory has an owner."""
        if self.owner() or self.orphans():
            return
        for file in (self.path / "front.sock", self.path / "ranks.sock", self._pid_file, self._ranks_file):
            file.unlink(missing_ok=True)

    def note_ranks(self, pids: list[int]) -> None:
        """Write down the rank processes, for whoever comes after us."""
        self._ranks_file.write_text("".join(f"{pid} {process_started(pid)}\n" for pid in pids))

    def orphans(self) -> list[int]:
        """Ranks of an earlier daemon that still live."""
        try:
            lines = self._ranks_file.read_text().split("\n")
        except FileNotFoundError:
            return []
        noted = [line.split() for line in lines if line.strip()]
        return [int(pid) for pid, started in noted if int(started) and process_started(int(pid)) == int(started)]

    def _await_orphans(self) -> None:
        """Ranks leave by themselves when their daemon dies; give them a moment, before anything runs."""
        deadline = time.monotonic() + ORPHANS_GONE_WITHIN_S
        while (alive := self.orphans()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if alive:
            self.release_lock()
            raise RunDirInUse(self.path, "ranks that outlived their daemon, pids " + ", ".join(map(str, alive)))

    def release_lock(self) -> None:
        """Give the claim up and leave the pid files as they are."""
        os.close(self._lock)
        self._lock = -1
