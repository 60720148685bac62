"""Logs: structured lines, written by a thread of their own so that a slow terminal or disk never holds up a loop.

Owns the writer thread and its bounded queue. Must never raise into the code that logs and never block it: lines for
which the queue or the disk has no room are counted, and the next line in the file says how many, at the latest the last
one. Lines go to the log file as JSON, and to stderr as JSON or readable text. Event names are the names of the records
and decisions.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

import structlog

QUEUE_LINES_MAX = 10_000
CLOSE_WITHIN_S = 2.0
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def _ends_within_a_line(path: Path) -> bool:
    """Whether what is written next must begin on a line of its own; raises OSError."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


class LineWriter:
    """The thread behind the log: takes event dictionaries, writes lines. `dropped` are those that the queue refused."""

    def __init__(self, file: Path | None, pretty: bool, stream: IO[str] | None = None) -> None:
        self.dropped = 0
        self._unwritten = 0  # lines that the file did not take
        self._told = 0  # of both, how many a line has told of
        self._full = threading.Lock()
        self._torn = file is not None and _ends_within_a_line(file)  # as a killed process or a full disk leaves it
        self._file = file.open("ab", buffering=0) if file is not None else None
        self._stream = stream or sys.stderr
        self._json = structlog.processors.JSONRenderer(default=str)
        colors = pretty and self._stream.isatty()
        self._stderr: Any = structlog.dev.ConsoleRenderer(colors=colors) if pretty else self._json
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUE_LINES_MAX)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that are not in the file, for want of place in the queue or on the disk."""
        return self.dropped + self._unwritten

    def put(self, event: dict[str, Any]) -> None:
        """Queue one line; never blocks."""
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            with self._full:  # any thread may log
                self.dropped += 1

    def close(self) -> None:
        """Write what is queued, for a bounded time."""
        try:
            self._queue.put(None, timeout=CLOSE_WITHIN_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_WITHIN_S)
        if self._file is not None and not self._thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            self._line(event)
        if self.lost > self._told:  # nothing else is to come that could say so
            self._line({"event": "LinesLost", "level": "warning"})

    def _line(self, event: dict[str, Any]) -> None:
        lost = self.lost
        if lost > self._told:
            event["lines_dropped"] = lost - self._told
        try:
            line = self._rendered(self._json, dict(event))
            shown = line if self._stderr is self._json else self._rendered(self._stderr, event)
        except Exception:  # a value that cannot be rendered costs its own line, never the thread
            self._unwritten += 1
            return
        if self._file is None or self._append(self._file, line):
            self._told = lost
        else:
            self._unwritten += 1
        self._show(shown)

    @staticmethod
    def _rendered(renderer: Any, event: dict[str, Any]) -> str:
        line = renderer(None, "", event)
        return line if isinstance(line, str) else line.decode()

    def _append(self, file: IO[bytes], line: str) -> bool:
        """Write one whole line; False when the disk did not take it. The next one then begins on a line of its own."""
        data = ("\n" * self._torn + line + "\n").encode()
        try:
            while data:
                data = data[file.write(data) :]
                self._torn = bool(data)
        except (OSError, ValueError):
            return False
        return True

    def _show(self, line: str) -> None:
        """A closed terminal must not end the thread: the next line may find it open again."""
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except (OSError, ValueError):
            return


class _Logger:
    """What structlog calls with the finished event dictionary."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def msg(self, **event: Any) -> None:
        """Pass the event on."""
        self._writer.put(event)

    debug = info = warning = error = critical = exception = msg


def open_log(settings_format: str, level: str, file: Path | None, **ids: Any) -> tuple[Any, LineWriter]:
    """A bound structlog logger whose lines carry `ids`, and its writer, to be closed at the very end."""
    pretty = settings_format == "pretty" or (settings_format == "auto" and sys.stderr.isatty())
    writer = LineWriter(file, pretty)
    return logger_of(writer, level, **ids), writer


def logger_of(writer: LineWriter, level: str, **ids: Any) -> Any:
    """A bound structlog logger whose lines carry `ids` and go to a writer."""
    log = structlog.wrap_logger(
        _Logger(writer),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _keep,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
    )
    return log.bind(**ids)


def _keep(logger: Any, method: str, event: Any) -> Any:
    """Hand the dictionary over as it is: rendering belongs to the writer's thread."""
    return (), event


def crash_file(folder: Path, name: str, error: BaseException, state: dict[str, Any]) -> Path:
    """Write what is known about a fatal error to `logs/crash-NAME.txt`; raises OSError when even that fails."""
    path = folder / f"crash-{name}.txt"
    trace = "".join(traceback.format_exception(error))
    body = structlog.processors.JSONRenderer(default=str, indent=1)(None, "", state)
    path.write_text(f"{trace}\n{body if isinstance(body, str) else body.decode()}\n", encoding="utf-8")
    return path
