"""Browser: opens a page in a headless Chromium and asks it what it shows.

Owns the process and the talk with it, over a pipe (`--remote-debugging-pipe`: JSON objects, each ended by a zero byte).
Must never use a network or a profile of a person, and never leave the process running.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from tools.ends import Refused
from tools.view.arena import COUNTS
from tools.view.film import Film
from tools.view.heat import boards

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
PIPES = """import os, sys
high = [os.dup(os.dup(os.dup(os.dup(os.dup(int(fd)))))) for fd in sys.argv[1:3]]
os.dup2(high[0], 3), os.dup2(high[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Puts two pipes where a browser looks for them: it reads from descriptor 3 and writes to 4."""

STEPS_CHECKED = 24
WIDTHS = (400, 800, 1600)
"""In pixels: at each the page must not be wider than its window."""
FRAMES = 60
"""Frames that are measured, of zooming and of playing each."""


class BrowserMissing(Refused):
    """No browser is found, or it does not answer."""


def find_browser(named: str | None) -> str:
    """The program: the named one, or the first Chromium there is; raises BrowserMissing."""
    for name in (named,) if named else NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BrowserMissing(f"no browser: {named or ', '.join(NAMES)}; --browser names one")


class Browser:
    """A headless browser with one page."""

    def __init__(self, program: str | None = None, width: int = 1440, height: int = 900) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="view-browser-", ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        command = [find_browser(program), *FLAGS, f"--user-data-dir={self._profile.name}"]
        command += [f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PIPES, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, ""

    def __enter__(self) -> Self:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer; raises BrowserMissing when it fails."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                break
        if "error" in answer:
            raise BrowserMissing(f"the browser refused {method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def run(self, expression: str) -> Any:
        """The value of an expression in the page, awaited; raises BrowserMissing when it throws."""
        answer = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"].get("exception", {}).get("description", "")
            raise BrowserMissing(f"the page failed: {thrown or answer['exceptionDetails'].get('text')}")
        return answer["result"].get("value")

    def open(self, path: Path, link: str = "") -> None:
        """Open a page of ours, and wait until it is drawn; raises BrowserMissing with what it failed of."""
        self.ask("Page.navigate", url=path.resolve().as_uri() + link)
        wait = "new Promise((done) => { const look = () => document.body && document.body.classList.contains('ready')"
        self.run(f"{wait} ? done(true) : setTimeout(look, 20); look(); setTimeout(() => done(false), 60000); }})")
        if not self.run("document.body.classList.contains('ready')"):
            raise BrowserMissing("the page did not open within 60 s")

    def overflow(self, width: int) -> str:
        """What is wrong with the page in a window of this width; nothing, where it does not reach over its edge."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        needs = int(self.run("document.documentElement.scrollWidth"))
        return f"in a window of {width} pixels the page has {needs}" if needs > width else ""

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from, 1 << 20)
            if not data:
                raise BrowserMissing("the browser ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        read: dict[str, Any] = json.loads(line)
        return read


def check_page(path: Path, film: Film, program: str | None) -> dict[str, Any]:
    """Compare what a film's page shows with the film, at steps all over it, and its width with that of windows; and how
    long opening and frames take.
    """
    steps = sorted({int(step) for step in np.linspace(0, film.position - 1, STEPS_CHECKED)}) if film.position else []
    with Browser(program) as browser:
        browser.open(path)
        shown = browser.run(f"checkSteps({json.dumps(steps)})")
        frames = browser.run(f"measureFrames({FRAMES})")
        wide = [browser.overflow(width) for width in WIDTHS]
    expected = expected_at(film, steps)
    wrong = [
        f"step {step + 1}, stored band {place}: {name} {theirs}, not {ours}"
        for step, bands, page in zip(steps, expected, shown, strict=True)
        for place, (own, other) in enumerate(zip(bands, page, strict=True))
        for name, ours, theirs in zip(("codes", "ids", "takers", *COUNTS), own, other, strict=True)
        if ours != theirs
    ]
    wrong += [text for text in wide if text]
    took = [*frames["zoom"], *frames["play"]]
    return {
        "steps": len(steps),
        "compared": sum(map(len, expected)),
        "wrong": wrong,
        "open_ms": frames["openMs"],
        "frame_ms_mean": sum(took) / len(took),
        "frame_ms_max": max(took),
        "zoom_ms_max": max(frames["zoom"]),
        "play_ms_max": max(frames["play"]),
    }


def expected_at(film: Film, steps: Sequence[int]) -> list[list[list[int]]]:
    """By step and stored band what `checkSteps` of `check.js` must give."""
    out = []
    for at, stretch, board in boards(film, np.asarray(steps, np.int64)):
        bands = []
        for place in range(len(stretch.bands)):
            sums = [zlib.crc32(column[place].tobytes()) for column in (board.codes, board.ids, board.takers)]
            columns = stretch.counts[place * len(COUNTS) : (place + 1) * len(COUNTS)]
            bands.append([*sums, *(int(column[at - stretch.first]) for column in columns)])
        out.append(bands)
    return out
