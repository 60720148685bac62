"""Launcher: whoever ends unasked gives the exit code, the other one is told, and nobody is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import trio

import daemon.launcher
from daemon.exits import DaemonError, Exit
from daemon.launcher import Launcher, served_name
from daemon.rank import convert
from daemon.run_dir import RunDir
from daemon.settings_table import Settings
from tests.daemon.test_observe import NotedLog

# What a child does: its signals, and how it ends. `ready` is a file that it makes once its handlers stand.
WAITS = """
import os, signal
from daemon.processes import take_signals
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: os._exit({code}))
{ready}
take_signals()
signal.pause()
"""
DEAF = """
import signal
{ready}
signal.sigwait([signal.SIGUSR1])
"""
LEAVES = "{ready}; raise SystemExit({code})"


def living_children() -> set[psutil.Process]:
    """Processes that this one started and that run."""
    return {process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE}


class Scene:
    """A launcher whose children are small scripts; it runs in this process and takes its signals."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
        self.run_dir = RunDir(tmp_path / "run")
        self.run_dir.prepare()
        self.ready = {name: tmp_path / f"{name}.ready" for name in scripts}
        commands = {
            {"daemon": "daemon", "frontend": "daemon.frontend"}[name]: script.replace(
                "{ready}", f"open({str(self.ready[name])!r}, 'w').close()"
            )
            for name, script in scripts.items()
        }
        monkeypatch.setattr(daemon.launcher, "module_command", lambda module: [sys.executable, "-c", commands[module]])
        monkeypatch.setattr(daemon.launcher, "END_WITHIN_S", 2.0)
        self.log = NotedLog()
        self.settings = Settings(drain_timeout_s=0.5, port=0, restarts_max=3)
        self.launcher = Launcher(self.settings, self.run_dir, self.log)
        self.before = living_children()  # helpers of other tests of this process

    async def run(self, *signals: int) -> int:
        """Run it; once both children stand, send the signals to ourselves."""
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                while not all(file.exists() for file in self.ready.values()):
                    await trio.sleep(0.01)
                for number in signals:
                    os.kill(os.getpid(), number)
                    await trio.sleep(0.05)

            nursery.start_soon(send)
            with trio.fail_after(20):
                code = await self.launcher.run()
            nursery.cancel_scope.cancel()
        assert not living_children() - self.before
        assert sorted(path.name for path in self.run_dir.path.iterdir()) == ["journal", "logs"]
        return code

    async def serve(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Awaitable[None]]) -> int:
        """Run it as ready as soon as its children stand; `act` once that was announced; the exit code."""

        async def healthy(url: str) -> bool:
            return all(file.exists() for file in self.ready.values())

        monkeypatch.setattr(daemon.launcher, "healthy", healthy)
        async with trio.open_nursery() as nursery:

            async def once_ready() -> None:
                while not self.log.events("Listening"):
                    await trio.sleep(0.01)
                await act()

            nursery.start_soon(once_ready)
            with trio.fail_after(30):
                code = await self.launcher.run()
            nursery.cancel_scope.cancel()
        assert not living_children() - self.before
        return code

    def pid(self, name: str) -> int:
        """The present process of this name."""
        return int(json.loads((self.run_dir.path / "pids.json").read_text())[name])

    async def kill(self, name: str) -> int:
        """Kill a child, wait until another one stands in its place; its pid."""
        ready, before = self.ready[name.split("-")[0]], self.pid(name)
        ready.unlink()
        os.kill(before, signal.SIGKILL)
        while self.pid(name) == before or not ready.exists():
            await trio.sleep(0.01)
        return self.pid(name)

    def ended(self) -> list[str]:
        return [line["child"] for line in self.log.events("ChildEnded")]


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_ordered_stop_is_clean(tmp_path: Path, monkeypatch: Any, number: int) -> None:
    """A signal is passed to both; both end with 0; so does the launcher."""
    wait = WAITS.replace("{code}", "0")
    assert await Scene(tmp_path, monkeypatch, daemon=wait, frontend=wait).run(number) == Exit.CLEAN


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("code", "expected"), [("3", Exit.RANK), ("1", Exit.INTERNAL), ("77", Exit.CHILD), ("0", Exit.CHILD)]
)
async def test_X2_a_child_that_ends_unasked_fails_the_whole(
    tmp_path: Path, monkeypatch: Any, code: str, expected: Exit
) -> None:
    """The daemon's own code is the launcher's, even 0 is a failure when nobody asked; the front end is told to end."""
    scene = Scene(tmp_path, monkeypatch, daemon=LEAVES.replace("{code}", code), frontend=WAITS.replace("{code}", "0"))
    assert await scene.run() == expected
    assert scene.ended() == ["daemon"]


@pytest.mark.e2e
async def test_X2_a_signal_after_the_death_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """SIGTERM that follows a fatal death does not turn it into a clean end."""
    scene = Scene(tmp_path, monkeypatch, daemon=LEAVES.replace("{code}", "3"), frontend=DEAF)
    assert await scene.run(signal.SIGTERM, signal.SIGTERM) == Exit.RANK


@pytest.mark.e2e
async def test_a_failure_while_ending_is_a_failure(tmp_path: Path, monkeypatch: Any) -> None:
    """A child that was told to end and ends with a code gives that code."""
    scene = Scene(tmp_path, monkeypatch, daemon=WAITS.replace("{code}", "4"), frontend=WAITS.replace("{code}", "0"))
    assert await scene.run(signal.SIGTERM) == Exit.JOURNAL


@pytest.mark.e2e
async def test_X4_a_child_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: Any) -> None:
    """When the patience is over the deaf child is killed, which is no clean end."""
    scene = Scene(tmp_path, monkeypatch, daemon=DEAF, frontend=WAITS.replace("{code}", "0"))
    assert await scene.run(signal.SIGTERM) == Exit.CHILD
    assert [line["child"] for line in scene.log.events("ChildKilled")] == ["daemon"]


@pytest.mark.e2e
async def test_X4_two_children_that_do_not_listen_are_killed(tmp_path: Path, monkeypatch: Any) -> None:
    """The patience begins with the signal, not with the first end: when both hang, both are killed."""
    scene = Scene(tmp_path, monkeypatch, daemon=DEAF, frontend=DEAF)
    assert await scene.run(signal.SIGTERM) == Exit.CHILD
    assert sorted(line["child"] for line in scene.log.events("ChildKilled")) == ["daemon", "frontend"]


# --- deaths once the server was ready


@pytest.mark.e2e
async def test_X1_who_dies_is_replaced_on_the_same_port(tmp_path: Path, monkeypatch: Any) -> None:
    """Daemon and front end are killed in turn: another process each time, the port open throughout, the end clean."""
    wait = WAITS.replace("{code}", "0")
    scene = Scene(tmp_path, monkeypatch, daemon=wait, frontend=wait)

    async def act() -> None:
        url = urlsplit((scene.run_dir.path / "frontend.url").read_text().strip())
        pids = {name: scene.pid(name) for name in ("daemon", "frontend", "launcher")}
        for name in ("daemon", "frontend", "daemon"):
            await scene.kill(name)
            with socket.create_connection((url.hostname, url.port), timeout=5):  # queued until somebody accepts
                pass
        assert {name for name, pid in pids.items() if scene.pid(name) != pid} == {"daemon", "frontend"}
        os.kill(os.getpid(), signal.SIGTERM)

    assert await scene.serve(monkeypatch, act) == Exit.CLEAN
    assert scene.ended() == ["daemon", "frontend", "daemon"]
    assert [line["restart"] for line in scene.log.events("ChildRestarts")] == [1, 1, 2]


@pytest.mark.e2e
async def test_too_many_deaths_end_the_server(tmp_path: Path, monkeypatch: Any) -> None:
    """One more than `--restarts-max`: the exit code says that a child failed, and the other one was told to end."""
    wait = WAITS.replace("{code}", "0")
    scene = Scene(tmp_path, monkeypatch, daemon=wait, frontend=wait)

    async def act() -> None:
        for _ in range(3):
            await scene.kill("daemon")
        os.kill(scene.pid("daemon"), signal.SIGKILL)
        await trio.sleep_forever()

    assert await scene.serve(monkeypatch, act) == Exit.CHILD
    assert scene.ended() == ["daemon"] * 4
    assert scene.log.events("ChildKilled") == []


@pytest.mark.e2e
async def test_X2_an_honest_end_of_the_daemon_is_not_repaired(tmp_path: Path, monkeypatch: Any) -> None:
    """It told every request its end and left with the code for lost ranks: that is the server's end and code."""
    leaves = WAITS.replace("{ready}", "signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))\n{ready}")
    leaves = leaves.replace("{code}", "0")
    scene = Scene(tmp_path, monkeypatch, daemon=leaves, frontend=WAITS.replace("{code}", "0"))

    async def act() -> None:
        os.kill(scene.pid("daemon"), signal.SIGUSR1)
        await trio.sleep_forever()

    assert await scene.serve(monkeypatch, act) == Exit.RANK
    assert scene.log.events("ChildRestarts") == []


@pytest.mark.e2e
async def test_a_stop_while_a_child_is_being_replaced_is_clean(tmp_path: Path, monkeypatch: Any) -> None:
    """SIGTERM in the pause before a restart: nothing more is started, and nothing is left."""
    monkeypatch.setattr("daemon.restarts.PAUSE_MIN_S", 60.0)
    monkeypatch.setattr("daemon.restarts.PAUSE_MAX_S", 60.0)
    wait = WAITS.replace("{code}", "0")
    scene = Scene(tmp_path, monkeypatch, daemon=wait, frontend=wait)

    async def act() -> None:
        os.kill(scene.pid("daemon"), signal.SIGKILL)
        while not scene.log.events("ChildRestarts"):
            await trio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    assert await scene.serve(monkeypatch, act) == Exit.CLEAN
    assert len(scene.log.events("ChildStarted")) == 2


@pytest.mark.e2e
async def test_a_machine_without_room_for_another_process_ends_the_server(tmp_path: Path, monkeypatch: Any) -> None:
    """The next daemon cannot be started: that is said, and the front end is told to end instead of serving nothing."""
    wait = WAITS.replace("{code}", "0")
    scene = Scene(tmp_path, monkeypatch, daemon=wait, frontend=wait)

    async def act() -> None:
        def no_room(*arguments: Any, **more: Any) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(daemon.launcher, "Child", no_room)
        os.kill(scene.pid("daemon"), signal.SIGKILL)
        await trio.sleep_forever()

    assert await scene.serve(monkeypatch, act) == Exit.CHILD
    assert [line["child"] for line in scene.log.events("CannotStart")] == ["daemon"]
    assert scene.log.events("ChildKilled") == []


@pytest.mark.e2e
async def test_several_front_ends_share_one_port(tmp_path: Path, monkeypatch: Any) -> None:
    """Each is a child of its own and gets the same socket; one is replaced without the others."""
    script = WAITS.replace(
        "{ready}", "{ready}\nopen(f'{tmp}/{os.getpid()}', 'w').write(os.environ['BANDMASTER_LISTEN_FD'])"
    )
    script = script.replace("{code}", "0").replace("{tmp}", str(tmp_path))
    scene = Scene(tmp_path, monkeypatch, daemon=WAITS.replace("{code}", "0"), frontend=script)
    scene.launcher = Launcher(replace(scene.settings, frontends=3), scene.run_dir, scene.log)

    async def told(pids: list[int]) -> set[str]:
        """The descriptor that each of these was given."""
        files = [tmp_path / str(pid) for pid in pids]
        while not all(file.exists() and file.read_text() for file in files):
            await trio.sleep(0.01)
        return {file.read_text() for file in files}

    async def act() -> None:
        before = [scene.pid(f"frontend-{number}") for number in range(3)]
        descriptors = await told(before)
        await scene.kill("frontend-1")
        after = [scene.pid(f"frontend-{number}") for number in range(3)]
        assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]
        assert len(descriptors | await told(after)) == 1
        os.kill(os.getpid(), signal.SIGTERM)

    assert await scene.serve(monkeypatch, act) == Exit.CLEAN


async def test_a_taken_port_starts_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """The launcher itself listens: the address is refused in words before any process runs."""
    scene = Scene(tmp_path, monkeypatch, daemon=DEAF, frontend=DEAF)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = Launcher(replace(scene.settings, port=port), scene.run_dir, scene.log)
        with pytest.raises(DaemonError, match=f"cannot listen on 127.0.0.1:{port}"):
            await launcher.run()
    assert scene.log.events("ChildStarted") == []


HANGS = """
import os
from pathlib import Path
{ready}
Path({dump!r}).write_text("Timeout! all stacks")
os._exit(1)
"""


@pytest.mark.e2e
@pytest.mark.parametrize(("hangs", "old"), [(True, False), (True, True), (False, True), (False, False)])
async def test_a_hung_daemon_leaves_its_reason(tmp_path: Path, monkeypatch: Any, hangs: bool, old: bool) -> None:
    """The line about its end names the file with all stacks when it was written in this life, and only then."""
    dump = tmp_path / "run" / "logs" / "hang.txt"
    script = HANGS.replace("{dump!r}", repr(str(dump))) if hangs else LEAVES.replace("{code}", "1")
    if old:
        dump.parent.mkdir(parents=True)
        dump.write_text("of an earlier life")
    scene = Scene(tmp_path, monkeypatch, daemon=script, frontend=WAITS.replace("{code}", "0"))
    assert await scene.run() == Exit.INTERNAL
    (ended,) = scene.log.events("ChildEnded")
    assert ended.get("file") == (str(dump) if hangs else None)


CONVERTS = """
import signal, sys, time
def clean(*_):
    open({cleaned!r}, "w").close()
    sys.exit(130)
signal.signal(signal.SIGINT, clean)
import os
os.kill(os.getppid(), {number})
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_before_anything_was_served(tmp_path: Path, monkeypatch: Any, number: int) -> None:
    """A signal while the model is prepared: the converter may clean up, and the exit code is no clean one."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    cleaned = tmp_path / "cleaned"
    script = CONVERTS.format(cleaned=str(cleaned), number=int(number))
    monkeypatch.setattr(daemon.launcher, "module_command", lambda *_: [sys.executable, "-c", script])
    try:
        assert daemon.launcher.main(["--run-dir", str(tmp_path / "run")]) == Exit.INTERRUPTED == 130
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert cleaned.exists()


@pytest.mark.parametrize(
    ("model", "name"), [("", "SmolLM2-135M-Instruct"), ("/m/Tiny-Llama", "Tiny-Llama"), ("/m/x.Q4_1.gguf", "x.Q4_1")]
)
def test_a_server_names_its_model(model: str, name: str) -> None:
    """Without `--served-model-name` the API shows the directory's or file's name."""
    assert served_name(model) == name


def test_wrong_faults_are_refused_before_anything_starts(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A BANDMASTER_FAULTS that means nothing: code 2, the reason on stderr, no child and no run directory."""
    monkeypatch.setenv("BANDMASTER_FAULTS", "bogus")
    monkeypatch.setattr(daemon.launcher, "module_command", lambda *_: pytest.fail("something is started"))
    assert daemon.launcher.main(["--run-dir", str(tmp_path / "run")]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "BANDMASTER_FAULTS" in said
    assert "bogus" in said
    assert not (tmp_path / "run").exists()


def test_a_layout_that_the_model_cannot_have_starts_nothing(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """The layout is handed to who prepares the model; its refusal is the reason of the end, with code 2."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    asked: list[tuple[str, ...]] = []

    def command(*arguments: str) -> list[str]:
        asked.append(arguments)
        return [sys.executable, "-c", f"print('no 7 ranks'); raise SystemExit({convert.NO_SUCH_LAYOUT})"]

    monkeypatch.setattr(daemon.launcher, "module_command", command)
    flags = ["--run-dir", str(tmp_path / "run"), "--tp", "7", "--pp", "2", "--pp-layers", "10,20"]
    try:
        assert daemon.launcher.main(flags) == Exit.USAGE
        assert daemon.launcher.main([*flags, "--rank-runner", "modeled"]) == Exit.USAGE
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert asked[0] == ("daemon.rank.convert", "--tp", "7", "--stages", "10,20")
    assert asked[1] == ("daemon.rank.convert", "--without-weights"), "a modeled device has none, and layers of its own"
    assert "no 7 ranks" in capfd.readouterr().err
