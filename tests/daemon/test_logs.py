"""Logs: lines come out whole and in order, a slow sink never blocks, a broken one never raises."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import daemon.logs
from daemon.logs import LineWriter, crash_file, open_log


class Blocked(io.StringIO):
    """A terminal that takes nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.reached = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        self.release.wait(10)
        return super().write(text)


class Broken(io.StringIO):
    """A terminal that is gone."""

    def write(self, text: str) -> int:
        raise OSError("gone")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_carry_ids_level_and_traces(tmp_path: Path) -> None:
    """Every line has the bound ids, its level and time; an exception comes with its trace; debug is left out."""
    log, writer = open_log("json", "info", tmp_path / "x.log", process="daemon")
    log.debug("Unseen")
    log.info("Accepted", request=3)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("Failed")
    writer.close()
    first, second = lines_of(tmp_path / "x.log")
    assert (first["event"], first["request"], first["process"], first["level"]) == ("Accepted", 3, "daemon", "info")
    assert first["timestamp"].endswith("Z")
    assert "ValueError: why" in second["exception"]


def test_a_blocked_terminal_blocks_nobody(tmp_path: Path, monkeypatch: Any) -> None:
    """While the sink hangs, logging returns; what does not fit is dropped, and a later line says how much."""
    monkeypatch.setattr(daemon.logs, "QUEUE_LINES_MAX", 5)
    terminal = Blocked()
    writer = LineWriter(tmp_path / "x.log", pretty=False, stream=terminal)
    writer.put({"event": "first"})
    assert terminal.reached.wait(10)
    for index in range(20):
        writer.put({"event": "more", "index": index})
    assert writer.dropped == 15
    terminal.release.set()
    writer.close()
    lines = lines_of(tmp_path / "x.log")
    assert [line["event"] for line in lines] == ["first", *["more"] * 5]
    assert lines[1]["lines_dropped"] == 15


def test_a_broken_terminal_costs_only_itself(tmp_path: Path) -> None:
    """With stderr gone the file still gets every line."""
    writer = LineWriter(tmp_path / "x.log", pretty=False, stream=Broken())
    for index in range(3):
        writer.put({"event": "line", "index": index})
    writer.close()
    assert [line["index"] for line in lines_of(tmp_path / "x.log")] == [0, 1, 2]


class Full(io.RawIOBase):
    """A disk that takes `room` bytes more, and then nothing until there is room again."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.data = room, b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(28, "no space left")
        taken = bytes(data)[: self.room]
        self.room, self.data = self.room - len(taken), self.data + taken
        return len(taken)


class Script(io.StringIO):
    """A terminal that changes the room on the disk behind the lines it has shown: {lines: bytes}."""

    def __init__(self, disk: Full, rooms: dict[int, int]) -> None:
        super().__init__()
        self.disk, self.rooms, self.shown = disk, rooms, 0

    def write(self, text: str) -> int:
        self.shown += 1
        self.disk.room = self.rooms.get(self.shown, self.disk.room)
        return super().write(text)


def test_lines_that_the_disk_does_not_take_are_counted() -> None:
    """A line that was cut off stays a line of its own, and the next one that fits says how many were lost."""
    disk = Full(40)
    writer = LineWriter(None, pretty=False, stream=Script(disk, {4: 1000, 5: 0, 6: 1000}))
    writer._file = disk  # type: ignore[assignment]
    for index in range(4):
        writer.put({"event": "line", "index": index})
    for event in ("fits", "lost again", "after"):
        writer.put({"event": event})
    writer.close()
    assert (writer.lost, writer.dropped) == (4, 0)
    lines = disk.data.decode().splitlines()
    assert lines[:2] == ['{"event": "line", "index": 0}', '{"event": ']
    assert [json.loads(line) for line in lines[2:]] == [
        {"event": "fits", "lines_dropped": 3},
        {"event": "after", "lines_dropped": 1},
    ]


def test_a_line_that_an_earlier_process_left_unfinished_spoils_no_other(tmp_path: Path) -> None:
    """Whoever was killed while it wrote leaves half a line; the next one's first line stands on its own."""
    path = tmp_path / "x.log"
    for end in ('{"event": "whole"}\n', '{"event": "ha'):
        path.write_text(end)
        writer = LineWriter(path, pretty=False, stream=io.StringIO())
        writer.put({"event": "Opened"})
        writer.close()
        assert path.read_text() == end + "\n" * (not end.endswith("\n")) + '{"event": "Opened"}\n'


def test_lines_lost_at_the_very_end_are_told_too(tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing else comes that could say so: the writer says it itself when it is closed."""
    monkeypatch.setattr(daemon.logs, "QUEUE_LINES_MAX", 5)
    terminal = Blocked()
    writer = LineWriter(tmp_path / "x.log", pretty=False, stream=terminal)
    writer.put({"event": "first"})
    assert terminal.reached.wait(10)
    writer.dropped = 7
    writer._told = 0
    terminal.release.set()
    writer.close()
    assert lines_of(tmp_path / "x.log")[-1] == {"event": "LinesLost", "level": "warning", "lines_dropped": 7}


def test_a_value_that_cannot_be_written_costs_its_line(tmp_path: Path) -> None:
    """The thread goes on, and the next line says that one is missing."""

    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    writer = LineWriter(tmp_path / "x.log", pretty=False, stream=io.StringIO())
    writer.put({"event": "odd", "value": Odd()})
    writer.put({"event": "after"})
    writer.close()
    assert lines_of(tmp_path / "x.log") == [{"event": "after", "lines_dropped": 1}]


def test_pretty_lines_are_readable(tmp_path: Path) -> None:
    """Pretty form on the terminal, JSON in the file, from the same event."""
    terminal = io.StringIO()
    writer = LineWriter(tmp_path / "x.log", pretty=True, stream=terminal)
    writer.put({"event": "Accepted", "level": "info", "timestamp": "t", "request": 3})
    writer.close()
    assert "Accepted" in terminal.getvalue()
    assert "request" in terminal.getvalue()
    assert "{" not in terminal.getvalue()
    assert lines_of(tmp_path / "x.log")[0]["request"] == 3


def test_M7_a_crash_file_needs_no_tool(tmp_path: Path) -> None:
    """The file has the whole trace of an exception group and the state, whatever the state holds."""
    error = ExceptionGroup("outer", [ValueError("inner")])
    path = crash_file(tmp_path, "engine", error, {"core": {"odd": object(), "bytes": b"x"}})
    text = path.read_text()
    assert path.name == "crash-engine.txt"
    assert "ValueError: inner" in text
    assert '"odd"' in text
