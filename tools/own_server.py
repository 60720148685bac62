"""A server of our own: starts `bandmaster serve` as a user would, waits until it is ready, stops it, looks after it.

Owns one launcher process in a session of its own, and a private run directory when none is named. Must never signal a
process that it did not start. Invariant: leaving the context leaves nothing running.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

from daemon.exits import Exit
from daemon.last_words import last_words
from tools.output import because

ROOT = Path(__file__).resolve().parents[1]
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 45.0
POLL_S = 0.05
TAIL_CHARACTERS = 2000


class ServerFailed(Exception):
    """The server did not start, or did not stop; the text ends with what it said last.

    `refused`, where it refused its settings, is its sentence about that.
    """

    def __init__(self, text: str, refused: str = "") -> None:
        super().__init__(text)
        self.refused = refused


def http_get(url: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """Status and body of one GET; where nobody answers as HTTP has it, status 0 and why."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        return 0, because(reason) if isinstance(reason, Exception) else str(reason)


class OwnServer:
    """One `bandmaster serve` on a free port; a context manager. `arguments` are its flags."""

    def __init__(
        self,
        arguments: Sequence[str] = (),
        run_dir: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._temporary = None if run_dir else tempfile.TemporaryDirectory(prefix="bandmaster-")
        self.run_dir = run_dir or Path(self._temporary.name if self._temporary else "") / "run"
        self.arguments = list(arguments)
        self.url = ""
        self._environ = dict(os.environ) | dict(environ or {})
        self._environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), self._environ.get("PYTHONPATH", "")]))
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []
        self._output: IO[bytes] | None = None
        self._output_path = self.run_dir.with_name(self.run_dir.name + ".out")

    # --- life

    def start(self, timeout_s: float = READY_TIMEOUT_S, ready: bool = True) -> OwnServer:
        """Start it and, unless `ready` is false, wait until `/health` says ready; raises ServerFailed."""
        self._output_path.parent.mkdir(parents=True, exist_ok=True)
        self._output = self._output_path.open("ab")
        command = [sys.executable, "-m", "tools.cli", "serve", *self.arguments, "--run-dir", str(self.run_dir)]
        if "--port" not in self.arguments:
            command += ["--port", "0"]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if ready:
            self.wait_ready(timeout_s)
        return self

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until the server printed where it listens and answers that it is ready; raises ServerFailed."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                text = f"the server exited with code {self.exit_code} while starting\n{self.tail()}"
                raise ServerFailed(text, self._refused() if self.exit_code == Exit.USAGE else "")
            found = re.search(r"https?://[\w.\[\]:]+:\d+", self.output())
            self.url = found[0] if found else ""
            if self.url and http_get(f"{self.url}/health")[0] == 200:
                self.processes()
                return
            time.sleep(POLL_S)
        self.kill()
        raise ServerFailed(f"the server was not ready within {timeout_s:g} s\n{self.tail()}")

    def send(self, number: int) -> None:
        """Send a signal to the launcher."""
        assert self._process is not None, "not started"
        self.processes()
        self._process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Its exit code, once it ended; raises ServerFailed when it does not in time."""
        assert self._process is not None, "not started"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"the server did not end within {timeout_s:g} s\n{self.tail()}") from None

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Signal and wait; the exit code."""
        self.send(number)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """End whatever of it still runs, at once, and wait until it is gone."""
        family = self.processes()
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if self._process is not None:
            self._process.wait()
        psutil.wait_procs(family, timeout=10)

    # --- what can be seen of it

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def processes(self) -> list[psutil.Process]:
        """Every process ever seen of this server that still lives: launcher, front end, daemon, ranks."""
        if self._process is not None and self._process.poll() is None:
            try:
                launcher = psutil.Process(self._process.pid)
                seen = [launcher, *launcher.children(recursive=True)]
            except psutil.NoSuchProcess:
                seen = []
            self._family += [process for process in seen if process not in self._family]
        return [process for process in self._family if _lives(process)]

    def process_of(self, module: str) -> psutil.Process:
        """The one live process that runs `python -m MODULE`; raises ServerFailed when there is not exactly one."""
        found = [process for process in self.processes() if runs_module(process, module)]
        if len(found) != 1:
            raise ServerFailed(f"{len(found)} processes run {module}\n{self.tail()}")
        return found[0]

    def output(self) -> str:
        """What it printed so far."""
        return self._output_path.read_text(errors="replace") if self._output_path.exists() else ""

    def _refused(self) -> str:
        """What a server that ended with the code of usage said about it: its own line, or a rank's fault."""
        own = re.findall(r"^bandmaster \w+: (.+)$", self.output(), re.MULTILINE)
        return own[-1] if own else last_words(self.run_dir / "logs" / "daemon.log").partition(": ")[2]

    def tail(self) -> str:
        """The end of what it printed and of each of its logs."""
        parts = [f"--- output\n{self.output()[-TAIL_CHARACTERS:]}"]
        for path in sorted(self.run_dir.glob("logs/*")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-TAIL_CHARACTERS:]}")
        return "\n".join(parts)

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics` by `name{labels}`; raises ServerFailed when they cannot be had."""
        status, body = http_get(f"{self.url}/metrics")
        if status != 200:
            raise ServerFailed(f"/metrics answered {status}: {body[:200]}\n{self.tail()}")
        lines = [line.rpartition(" ") for line in body.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def model(self) -> str:
        """The served model's name; raises ServerFailed when nobody answers as a server does."""
        status, body = http_get(f"{self.url}/v1/models")
        if status != 200:
            raise ServerFailed(f"{self.url} does not answer: {f'status {status}, ' if status else ''}{body[:200]}")
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ServerFailed(f"{self.url} answers, but not with a list of models: {body[:200]!r}") from error

    # --- context

    def __enter__(self) -> OwnServer:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.exit_code is None and self._process is not None:
                self.stop(signal.SIGINT)
        finally:
            self.kill()
            if self._output is not None:
                self._output.close()
            if self._temporary is not None:
                self._temporary.cleanup()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def runs_module(process: psutil.Process, module: str) -> bool:
    """Whether a process was started as `python -m MODULE`."""
    try:
        line = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(flag == "-m" and name == module for flag, name in itertools.pairwise(line))
