"""Events: the trace format that Perfetto and Chrome read, as JSON, written event by event.

Owns the format: microseconds since the first record, processes and threads with names, slices, instants, counters and
arrows. Must never hold an event back. Invariants: slices of one thread do not overlap in part; time does not go back,
also where a life's clock did.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tools.export.output import Write

REQUESTS, CORE, FIRST_STAGE = 1, 2, 10  # processes; a stage's is its number behind the first

_json = msgspec.json.Encoder()


class Events:
    """Writes a trace; `close` makes it whole. `enabled` says whether events are wanted at the moment."""

    def __init__(self, write: Write) -> None:
        self.enabled = True
        self.written = 0
        self._write = write
        self._named: set[tuple[int, int]] = set()
        self._flows = 0
        write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def close(self, about: dict[str, Any]) -> None:
        """The end, with what helps to understand the trace."""
        self._write(b'\n],"otherData":' + _json.encode(about) + b"}\n")

    def name(self, pid: int, tid: int, process: str, thread: str) -> None:
        """Name a thread, and its process, once."""
        if (pid, 0) not in self._named:
            self._named.add((pid, 0))
            self._put({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}})
            self._put({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            self._put({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}})
            self._put({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})

    def forget(self, pid: int, tid: int) -> None:
        """A thread will not come back: its name need not be remembered."""
        self._named.discard((pid, tid))

    def slice(self, pid: int, tid: int, name: str, begin_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        """Something that lasted."""
        assert end_ns >= begin_ns, f"{name} ends before it begins"
        if self.enabled:
            length = {"ts": _us(begin_ns), "dur": _us(end_ns - begin_ns)}
            self._put({"ph": "X", "pid": pid, "tid": tid, "name": name} | length | {"args": args})

    def instant(self, pid: int, tid: int, name: str, at_ns: int, args: dict[str, Any]) -> None:
        """Something that happened."""
        if self.enabled:
            self._put({"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": _us(at_ns), "args": args})

    def counter(self, pid: int, name: str, at_ns: int, values: dict[str, int]) -> None:
        """Numbers from now on."""
        if self.enabled:
            self._put({"ph": "C", "pid": pid, "name": name, "ts": _us(at_ns), "args": values})

    def arrow(self, pid: int, source: int, target: int, name: str, at_ns: int) -> None:
        """From what one thread does now to what another one does."""
        if not self.enabled:
            return
        self._flows += 1
        head = {"cat": "decision", "name": name, "id": self._flows, "pid": pid, "ts": _us(at_ns)}
        self._put(head | {"ph": "s", "tid": source})
        self._put(head | {"ph": "f", "bp": "e", "tid": target})

    def _put(self, event: dict[str, Any]) -> None:
        self._write((b",\n" if self.written else b"\n") + _json.encode(event))
        self.written += 1


def _us(ns: int) -> float:
    return ns / 1000


class Clock:
    """Nanoseconds since the first record, over lives whose clocks may begin anew."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._zero: int | None = None

    def at(self, said_ns: int, anew: bool = False) -> int:
        """A record's time; `anew`: the first of a life."""
        if self._zero is None or (anew and said_ns - self._zero < self.now_ns):
            self._zero = said_ns - self.now_ns
        self.now_ns = max(self.now_ns, said_ns - self._zero)
        return self.now_ns
