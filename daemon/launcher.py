"""Launcher: `bandmaster serve`: one command that prepares the model, runs daemon and front ends, and ends them.

Owns the child processes, the HTTP socket that they accept on, and nothing else: it signals only what it started. Must
never exit 0 after a child ended unasked and was not replaced, whatever follows. Invariants: a signal is passed on; once
the server was ready, a child that dies or freezes is replaced on the same port, within bounds; when one ends for good,
the others are told to end; when this returns, all are reaped and the run directory holds no socket.

    prepare model (once) -> daemon + front ends -> healthy: print where it listens -> signal or last death -> end all
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio

from daemon.config import load, to_environment, unknown_variables
from daemon.endpoints import front_client
from daemon.exits import DaemonError, Exit
from daemon.faults import VARIABLE as FAULTS
from daemon.faults import parse as parse_faults
from daemon.keeper import Keeper
from daemon.listening import LISTEN_VARIABLE, PULSE_VARIABLE, listen, url_of
from daemon.logs import open_log
from daemon.processes import Child, child_environment, exit_text, module_command
from daemon.pulse import DaemonPulse, PairPulse, Pulse
from daemon.rank_settings import stage_layers
from daemon.restarts import Restarts
from daemon.run_dir import RunDir, default_path
from daemon.settings_table import Settings
from ipc.errors import EndpointError

ABOUT = "Serve a model over the OpenAI API: front ends, daemon and ranks, started, kept running and ended together."
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
LOOK_EVERY_S = 0.25  # while booting only
HEALTH_WITHIN_S = 5.0
CONVERTER_ENDS_WITHIN_S = 10.0
NO_SUCH_LAYOUT = 3  # exit code of daemon.rank.convert, with the reason on stdout
RESTART_WINDOW_S = 600.0  # restarts longer ago do not count
END_WITHIN_S = 20.0  # beyond the drain timeout
HANG_FILE = "hang.txt"  # where the daemon's watchdog writes all stacks
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def prepare_model(settings: Settings) -> str:
    """The directory of the model in the form that ranks and front end read; raises DaemonError when there is none.

    A layout that the model cannot be split into is refused here, before anything runs that it would have to end.
    SIGTERM interrupts it as Ctrl-C does: KeyboardInterrupt, with the converter ended.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    layout = ["--without-weights"]
    if settings.rank_runner != "modeled":  # which has no weights, and layers of its own
        stages = ",".join(map(str, stage_layers(settings) or [0]))
        layout = ["--tp", str(settings.tensor_parallel_size), "--stages", stages]
    command = module_command("daemon.rank.convert", *layout, *(["--", settings.model] if settings.model else []))
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
    if converter.returncode == NO_SUCH_LAYOUT:
        raise DaemonError(Exit.USAGE, printed.strip())
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
    """Whether GET /health at this server answers 200, within a few seconds."""
    parts = urlsplit(url)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname or "", parts.hostname or "127.0.0.1")
    question = f"GET /health HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
    try:
        with trio.fail_after(HEALTH_WITHIN_S):
            async with await trio.open_tcp_stream(host, parts.port or 80) as stream:
                await stream.send_all(question)
                return b" 200 " in (await stream.receive_some(64)).split(b"\r\n")[0]
    except (OSError, trio.BrokenResourceError, trio.TooSlowError):
        return False


class Launcher:
    """Runs the processes of one server; `run` returns the exit code of the whole."""

    def __init__(self, settings: Settings, run_dir: RunDir, log: Any) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._log = log
        self._url_file = run_dir.path / "frontend.url"
        self._keepers: list[Keeper] = []
        self._environ: dict[str, str] = {}
        self._bound: socket.socket | None = None
        self._hang_before = self._hang_written()  # by an earlier life
        self._served = False  # it was ready once
        self._asked = False  # somebody wants the end
        self._code = Exit.CLEAN  # worst so far
        self._ending = trio.Event()  # somebody wants the end, or a process has ended for good

    async def run(self) -> int:
        """Start, supervise, end; raises DaemonError when the address is taken."""
        with trio.open_signal_receiver(*SIGNALS) as signals:
            self._bound = listen(self._settings.host, self._settings.port)
            self._url_file.write_text(url_of(self._bound) + "\n")
            self._environ = to_environment(self._settings, os.environ)
            try:
                self._make_keepers()
                for keeper in self._keepers:
                    self._start(keeper)
                await self._supervise(signals)
            finally:
                for keeper in self._keepers:
                    keeper.close()
                self._bound.close()
                self._run_dir.sweep()
                for leftover in (self._url_file, self._run_dir.path / "pids.json"):
                    leftover.unlink(missing_ok=True)
        return int(self._code)

    # --- children

    def _make_keepers(self) -> None:
        settings, count = self._settings, self._settings.frontends
        names = ["frontend"] if count == 1 else [f"frontend-{number}" for number in range(count)]
        starts = [("daemon", "daemon", self._new_daemon)]
        starts += [(name, "frontend", partial(self._new_frontend, name)) for name in names]
        for name, kind, start in starts:
            restarts = Restarts(settings.restarts_max, RESTART_WINDOW_S)
            self._keepers.append(Keeper(name, kind, start, restarts, settings.frontend_timeout_s))

    def _new_daemon(self) -> tuple[Child, Pulse]:
        pulse = DaemonPulse(front_client(self._settings, self._run_dir))
        return Child("daemon", module_command("daemon"), self._environ, hold_signals=True), pulse

    def _new_frontend(self, name: str) -> tuple[Child, Pulse]:
        assert self._bound is not None, "bound before anything starts"
        pulse, bound = PairPulse(), self._bound.fileno()
        environ = self._environ | {LISTEN_VARIABLE: str(bound), PULSE_VARIABLE: str(pulse.theirs)}
        files = (bound, pulse.theirs)
        child = Child(name, module_command("daemon.frontend"), environ, hold_signals=True, files=files)
        pulse.handed_on()
        return child, pulse

    def _start(self, keeper: Keeper) -> None:
        keeper.start()
        self._log.info("ChildStarted", child=keeper.name, pid=keeper.pid)
        pids = {"launcher": os.getpid(), **{one.name: one.pid for one in self._keepers if one.pid}}
        path = self._run_dir.path / "pids.json"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(pids) + "\n")
        draft.replace(path)

    async def _supervise(self, signals: Any) -> None:
        """Until every child has ended for good."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pass_signals, signals)
            nursery.start_soon(self._announce)
            async with trio.open_nursery() as watchers:
                for keeper in self._keepers:
                    watchers.start_soon(self._keep, keeper)
                watchers.start_soon(self._end_all)
            nursery.cancel_scope.cancel()

    async def _keep(self, keeper: Keeper) -> None:
        """One process after the other, until one is the last."""
        while True:
            life = await keeper.life(self._log)
            told = self._ending.is_set()
            if life.code != 0 or not told:
                how = {"how": life.text, "told": told, **self._hang_file(keeper)}
                self._log.error("ChildEnded", child=keeper.name, pid=keeper.pid, **how)
            if told:
                if life.code != 0:
                    self._worsen(life.code)
                return
            pause_s = keeper.pause_s(life, self._served)
            if pause_s is None:
                self._worsen(life.code)
                self._ending.set()
                return
            self._log.warning(
                "ChildRestarts",
                child=keeper.name,
                restart=keeper.restarts.total,
                of=keeper.restarts.most,
                pause_s=pause_s,
            )
            with trio.move_on_after(pause_s):
                await self._ending.wait()
                return
            try:
                self._start(keeper)
            except OSError as error:  # no process or descriptor is to be had: the others end in order
                self._log.error("CannotStart", child=keeper.name, error=str(error))
                self._worsen(Exit.CHILD)
                self._ending.set()
                return

    def _hang_file(self, keeper: Keeper) -> dict[str, str]:
        """Where the daemon's watchdog left all stacks, when it ended this one: the process itself could say nothing."""
        written = self._hang_written()
        if keeper.kind != "daemon" or written in (0, self._hang_before):
            return {}
        self._hang_before = written
        return {"reason": "its loop hung; all stacks are in the file", "file": str(self._run_dir.logs / HANG_FILE)}

    def _hang_written(self) -> int:
        """When the watchdog's file was last written, in nanoseconds; 0 when it is not there or empty."""
        try:
            stat = (self._run_dir.logs / HANG_FILE).stat()
        except OSError:
            return 0
        return stat.st_mtime_ns if stat.st_size else 0

    # --- the end

    def _worsen(self, code: int) -> None:
        """The first failure names the exit code; a child that ended unasked is one even with code 0."""
        if self._code == Exit.CLEAN:
            self._code = Exit(code) if code in set(Exit) - {Exit.CLEAN, Exit.INTERRUPTED} else Exit.CHILD

    async def _end_all(self) -> None:
        """Once the end is wanted, or one has ended: tell those that were not told, kill those that do not listen."""
        await self._ending.wait()
        if self._bound is not None:
            self._bound.close()  # the front ends have their own; nobody is to be queued any more
        patience_s = END_WITHIN_S + (self._settings.drain_timeout_s if self._asked else 0.0)
        for keeper in self._keepers:
            keeper.leave()
            if not self._asked:
                keeper.send_signal(signal.SIGINT)
        with trio.move_on_after(patience_s):
            for keeper in self._keepers:
                assert keeper.child is not None, "all were started"
                await keeper.child.wait()
            return
        for keeper in self._keepers:
            if keeper.child is not None and keeper.child.code is None:
                self._log.error("ChildKilled", child=keeper.name, pid=keeper.pid, patience_s=patience_s)
                self._worsen(Exit.CHILD)
                keeper.send_signal(signal.SIGKILL)

    async def _pass_signals(self, signals: Any) -> None:
        async for number in signals:
            self._asked = True
            self._log.info("Signal", signal=signal.Signals(number).name)
            for keeper in self._keepers:
                keeper.send_signal(number)
            self._ending.set()

    async def _announce(self) -> None:
        """One line on stdout once a request would be served."""
        started = trio.current_time()
        url = self._url_file.read_text().strip()
        while not await healthy(url):
            await trio.sleep(LOOK_EVERY_S)
        self._served = True
        print(f"listening on {url}", flush=True)
        self._log.info(
            "Listening", url=url, run_dir=str(self._run_dir.path), boot_s=round(trio.current_time() - started, 2)
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; returns the exit code (`daemon.exits`)."""
    try:
        settings = load("serve", list(sys.argv[1:] if argv is None else argv), ABOUT)
        parse_faults(os.environ.get(FAULTS, ""))  # a wrong text is refused before any process starts
        run_dir = RunDir(default_path(settings))
        run_dir.prepare()
        run_dir.claim_server()
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
        run_dir.release_server()
    return code


if __name__ == "__main__":
    sys.exit(main())
