"""Orphans: a child ends when its parent dies, however that one died and whatever state the child is in."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from daemon.processes import SOURCE_ROOT

PARENT = """
import os, signal, sys
from daemon.processes import Child
child = Child("orphan", [sys.executable, "-c", {child!r}], os.environ)
print(child.pid, flush=True)
signal.pause()
"""
CHILD = """
import os, signal, sys, time
from daemon.processes import die_with_parent
def told(*_):
    open({told!r}, "w").close()
    sys.exit(0)
signal.signal(signal.SIGINT, told)
die_with_parent({death})
open({ready!r}, "w").close()
{then}
while True:
    time.sleep(60)
"""


def orphan(tmp_path: Path, death: str, then: str) -> tuple[psutil.Process, Path, subprocess.Popen[str]]:
    """A parent and its child, once that is ready; what it writes when it was told; the parent."""
    told, ready = tmp_path / "told", tmp_path / "ready"
    child = CHILD.format(told=str(told), ready=str(ready), death=death, then=then)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(child=child)], stdout=subprocess.PIPE, text=True, cwd=SOURCE_ROOT
    )
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    until(ready.exists, "the child is ready")
    return process, told, parent


def until(condition, what: str) -> None:  # type: ignore[no-untyped-def]
    """Wait for a condition, with patience."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def gone(process: psutil.Process) -> bool:
    """It has ended (a zombie, which nobody may be there to reap, counts)."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.e2e
@pytest.mark.parametrize("state", ["runs", "is stopped"])
@pytest.mark.parametrize(("death", "is_told"), [("", True), ("signal.SIGKILL", False)])
def test_X4_an_orphan_ends_in_whatever_state_it_is(tmp_path: Path, state: str, death: str, is_told: bool) -> None:
    """kill -9 of the parent: the child is told to end in order, or is killed; a stopped one is woken for it."""
    process, told, parent = orphan(tmp_path, death, "")
    try:
        if state == "is stopped":
            process.suspend()
            until(lambda: process.status() == psutil.STATUS_STOPPED, "the child is stopped")
        parent.kill()
        until(lambda: gone(process), "the orphan has ended")
        assert told.exists() is is_told
    finally:
        parent.kill()
        parent.communicate()
        if not gone(process):
            process.kill()


@pytest.mark.e2e
def test_a_child_that_is_continued_lives_on_while_its_parent_does(tmp_path: Path) -> None:
    """Stop and continue, as a person at a terminal does, end nobody."""
    process, told, parent = orphan(tmp_path, "", f"signal.pause(); open({str(tmp_path / 'woken')!r}, 'w').close()")
    try:
        process.suspend()
        until(lambda: process.status() == psutil.STATUS_STOPPED, "the child is stopped")
        process.send_signal(signal.SIGCONT)
        until((tmp_path / "woken").exists, "its handler ran")
        assert not told.exists()
        assert not gone(process)
    finally:
        parent.kill()
        parent.communicate()
        until(lambda: gone(process), "the child ends with its parent")
