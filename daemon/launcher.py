"""Launcher: `bandmaster serve`: one command that prepares the model, runs daemon and front end, and ends both.

Owns the two child processes and nothing else: it signals only what it started. Must never exit 0 after a child ended
unasked, whatever follows. Invariants: a signal is passed on; when one child ends, the other is told to end; when this
returns, both are reaped and the run directory holds no socket.

    prepare model (once) -> daemon + front end -> healthy: print where it listens -> signal or death -> end both
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio

from daemon.config import load, to_environment, unknown_variables
from daemon.exits import DaemonError, Exit
from daemon.logs import open_log
from daemon.processes import Child, child_environment, exit_text, module_command
from daemon.run_dir import RunDir, RunDirInUse, default_path
from daemon.settings_table import Settings
from ipc.errors import EndpointError

ABOUT = "Serve a model over the OpenAI API: front end, daemon and ranks, started and ended together."
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
LOOK_EVERY_S = 0.25  # while booting only
CONVERTER_ENDS_WITHIN_S = 10.0
END_WITHIN_S = 20.0  # beyond the drain timeout
HANG_FILE = "hang.txt"  # where the daemon's watchdog writes all stacks
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def prepare_model(settings: Settings) -> str:
    """The directory of the model in the form that ranks and front end read; raises DaemonError when there is none.

    SIGTERM interrupts it as Ctrl-C does: KeyboardInterrupt, with the converter ended.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command = module_command("daemon.rank.convert", *([settings.model] if settings.model else []))
    with subprocess.Popen(
        command,
        env=child_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C comes through us, once
    ) as converter:
        try:
            printed, _ = converter.communicate()
        except KeyboardInterrupt:
            _end_converter(converter)
            raise
    if converter.returncode != 0:
        raise DaemonError(
            Exit.MODEL, f"the model could not be prepared ({exit_text(converter.returncode)}); the reason is above"
        )
    directory = printed.strip().splitlines()[-1:]
    if not directory or not Path(directory[0]).is_dir():
        raise DaemonError(Exit.MODEL, f"the model could not be prepared: no directory in {printed!r}")
    return directory[0]


def _end_converter(converter: subprocess.Popen[str]) -> None:
    """Interrupt it, with time to remove what it was building; a second signal, or too long a wait, kills it."""
    converter.send_signal(signal.SIGINT)
    try:
        converter.wait(CONVERTER_ENDS_WITHIN_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        converter.kill()


def served_name(model: str) -> str:
    """The model's name in the API when none is given: that of its directory or file, or of the embedded model."""
    return Path(model).absolute().name.removesuffix(".gguf") if model else EMBEDDED_NAME


async def healthy(url: str) -> bool:
    """Whether GET /health at this server answers 200."""
    parts = urlsplit(url)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname or "", parts.hostname or "127.0.0.1")
    try:
        async with await trio.open_tcp_stream(host, parts.port or 80) as stream:
            await stream.send_all(f"GET /health HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
            return b" 200 " in (await stream.receive_some(64)).split(b"\r\n")[0]
    except OSError:
        return False


class Launcher:
    """Runs the two processes of one server; `run` returns the exit code of the whole."""

    def __init__(self, settings: Settings, run_dir: RunDir, log: Any) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._log = log
        self._url_file = run_dir.path / "frontend.url"
        self._children: list[Child] = []
        self._hang_before = self._hang_written()  # by an earlier life
        self._asked = False  # somebody wants the end
        self._code = Exit.CLEAN  # worst so far
        self._one_ended = trio.Event()
        self._ending = trio.Event()  # somebody wants the end, or one child has ended

    async def run(self) -> int:
        """Start, supervise, end."""
        with trio.open_signal_receiver(*SIGNALS) as signals:
            self._url_file.unlink(missing_ok=True)
            environ = to_environment(self._settings, os.environ)
            try:
                self._start("daemon", environ)
                self._start("frontend", environ)
                self._note_pids()
                await self._supervise(signals)
            finally:
                for child in self._children:
                    child.close()
                self._run_dir.sweep()
                for leftover in (self._url_file, self._run_dir.path / "pids.json"):
                    leftover.unlink(missing_ok=True)
        return int(self._code)

    def _start(self, name: str, environ: dict[str, str]) -> None:
        module = {"daemon": "daemon", "frontend": "daemon.frontend"}[name]
        self._children.append(Child(name, module_command(module), environ, hold_signals=True))
        self._log.info("ChildStarted", child=name, pid=self._children[-1].pid)

    def _note_pids(self) -> None:
        pids = {"launcher": os.getpid(), **{child.name: child.pid for child in self._children}}
        (self._run_dir.path / "pids.json").write_text(json.dumps(pids) + "\n")

    async def _supervise(self, signals: Any) -> None:
        """Until every child has ended."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pass_signals, signals)
            nursery.start_soon(self._announce)
            async with trio.open_nursery() as watchers:
                for child in self._children:
                    watchers.start_soon(self._watch, child)
                watchers.start_soon(self._end_all)
            nursery.cancel_scope.cancel()

    async def _watch(self, child: Child) -> None:
        code = await child.wait()
        told = self._asked or self._one_ended.is_set()
        if code != 0 or not told:
            how = {"how": exit_text(code), "told": told, **self._hang_file(child)}
            self._log.error("ChildEnded", child=child.name, pid=child.pid, **how)
            self._worsen(code)
        self._one_ended.set()
        self._ending.set()

    def _hang_file(self, child: Child) -> dict[str, str]:
        """Where the daemon's watchdog left all stacks, when it ended this one: the process itself could say nothing."""
        if child.name != "daemon" or self._hang_written() in (0, self._hang_before):
            return {}
        return {"reason": "its loop hung; all stacks are in the file", "file": str(self._run_dir.logs / HANG_FILE)}

    def _hang_written(self) -> int:
        """When the watchdog's file was last written, in nanoseconds; 0 when it is not there or empty."""
        try:
            stat = (self._run_dir.logs / HANG_FILE).stat()
        except OSError:
            return 0
        return stat.st_mtime_ns if stat.st_size else 0

    def _worsen(self, code: int) -> None:
        """The first failure names the exit code; a child that ended unasked is one even with code 0."""
        if self._code == Exit.CLEAN:
            self._code = Exit(code) if code in set(Exit) - {Exit.CLEAN, Exit.INTERRUPTED} else Exit.CHILD

    async def _end_all(self) -> None:
        """Once the end is wanted, or one has ended: tell those that were not told, kill those that do not listen."""
        await self._ending.wait()
        patience_s = END_WITHIN_S + (self._settings.drain_timeout_s if self._asked else 0.0)
        for child in self._children:
            if not self._asked:
                child.send_signal(signal.SIGINT)
        with trio.move_on_after(patience_s):
            for child in self._children:
                await child.wait()
            return
        for child in self._children:
            if child.code is None:
                self._log.error("ChildKilled", child=child.name, pid=child.pid, patience_s=patience_s)
                self._worsen(Exit.CHILD)
                child.send_signal(signal.SIGKILL)

    async def _pass_signals(self, signals: Any) -> None:
        async for number in signals:
            self._asked = True
            self._log.info("Signal", signal=signal.Signals(number).name)
            for child in self._children:
                child.send_signal(number)
            self._ending.set()

    async def _announce(self) -> None:
        """One line on stdout once a request would be served."""
        started = trio.current_time()
        while not self._url_file.exists() or not await healthy(self._url_file.read_text().strip()):
            await trio.sleep(LOOK_EVERY_S)
        url = self._url_file.read_text().strip()
        print(f"listening on {url}", flush=True)
        self._log.info(
            "Listening", url=url, run_dir=str(self._run_dir.path), boot_s=round(trio.current_time() - started, 2)
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; returns the exit code (`daemon.exits`)."""
    try:
        settings = load("serve", list(sys.argv[1:] if argv is None else argv), ABOUT)
        run_dir = RunDir(default_path(settings))
        run_dir.prepare()
        if owner := run_dir.owner():
            raise RunDirInUse(run_dir.path, f"the daemon with pid {owner}")
    except (DaemonError, EndpointError) as error:
        sys.stderr.write(f"bandmaster serve: {error}\n")
        return error.code if isinstance(error, DaemonError) else Exit.USAGE
    log, writer = open_log(settings.log_format, settings.log_level, run_dir.logs / "launcher.log", process="launcher")
    try:
        for line in unknown_variables(os.environ):
            log.warning("UnknownSetting", what=line)
        model = prepare_model(settings)
        name = settings.served_model_name or served_name(settings.model)
        settings = dataclasses.replace(settings, model=model, served_model_name=name, run_dir=str(run_dir.path))
        code = trio.run(Launcher(settings, run_dir, log).run)
        log.info("Ended", code=code, meaning=Exit(code).name.lower())
    except DaemonError as error:
        log.error("CannotStart", error=str(error))
        code = error.code
    except KeyboardInterrupt:  # while the model was being prepared: nothing runs yet
        log.info("Interrupted", while_doing="preparing the model")
        code = Exit.INTERRUPTED
    finally:
        writer.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
