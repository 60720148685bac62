"""Logs: lines of the run directory's log files, cleaned by a list of fields.

Must never let a field through that `fields` does not list: names get their pseudonyms, text of a listed field stays if
it is of our own making, and all else is left out. Of lines that are no JSON only the frames of a traceback and the name
of its error stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.incident.fields import BY_BAND, CODE, ENDS, EVENTS, FIELDS, METHODS, OF_FRONT_ENDS, ROUTES, SENTENCES, WORDS
from tools.incident.pseudonyms import Names, without_places
from tools.incident.values import LEFT_OUT, settings

LOG_BYTES_MAX = 16 << 20  # of each file, from its end
IDS = frozenset(("id", "ids", "answer", "read_by"))
FRONTENDS = frozenset(("frontend", "frontends", "name"))
TRACES = frozenset(("trace", "exception"))
CLOSED = {"event": EVENTS, "method": METHODS, "path": ROUTES, "finish_reasons": ENDS}
"""What these fields can say; every other text of theirs is left out."""
_STOPPED = re.compile(r"(stop token) -?\d+")
_FRAME = re.compile(r'  File "(?P<path>[^"]*)", line (?P<line>\d+), in (?P<name>[\w<>.]+)')
_RAISED = re.compile(
    r"(?P<name>(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Broken|Failed|Lost|Refused|Warning))\b"
)
_HEAD = re.compile(
    r"Traceback \(most recent call last\):|During handling of the above exception.*|The above exception .*"
)


class Cleaner:
    """Cleans lines; `names` are those of the archive's journal, so that both name a request alike."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self.left_out = 0  # lines

    def file(self, path: Path) -> Iterator[str]:
        """The lines of one file as they go into the archive."""
        own = not path.name.startswith("frontend")
        self.left_out = 0
        for line in tail(path):
            cleaned = self.line(line, own)
            if cleaned is None:
                self.left_out += bool(line.strip())
            else:
                yield cleaned
        if self.left_out:
            yield json.dumps({"event": "LinesLeftOut", "lines": self.left_out})

    def line(self, line: str, own: bool = True) -> str | None:
        """One line, or None where nothing of it stays; `own`: the file is not a front end's."""
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except ValueError:
                return None
            return json.dumps(self._fields(event, own)) if isinstance(event, dict) else None
        return _of_trace(line)

    def _fields(self, event: dict[str, Any], own: bool) -> dict[str, Any]:
        """Those that are listed, and how many are not."""
        own = own and event.get("process") != "frontend"
        kept = {key: self._value(key, value, own) for key, value in event.items() if _listed(key, own)}
        left_out = len(event) - len(kept)
        return kept | ({"fields_left_out": left_out} if left_out else {})

    def _value(self, key: str, value: Any, own: bool) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, list):
            return [self._value(key, one, own) for one in value]
        if isinstance(value, dict):
            return settings(value) if key == "settings" else self._fields(value, own)
        return self._text(key, str(value), own)

    def _text(self, key: str, text: str, own: bool) -> str:
        if not text or _is_ours(key, text, own):
            return text
        if key in IDS:
            return self._names.id(text)
        if key == "request_id":
            return self._names.call(text)
        if key in FRONTENDS:
            return self._names.frontend(text)
        if key in TRACES:
            return "\n".join(filter(None, map(_of_trace, text.splitlines())))
        if key in SENTENCES and own:
            return _STOPPED.sub(r"\1", without_places(text))
        return LEFT_OUT


def _listed(key: str, own: bool) -> bool:
    return key in FIELDS or bool(BY_BAND.fullmatch(key)) if own else key in OF_FRONT_ENDS


def _is_ours(key: str, text: str, own: bool) -> bool:
    """Whether a text is of our own making."""
    closed = CLOSED.get(key)
    if closed is not None:
        return text in closed
    return bool(CODE.fullmatch(text)) if key in ("code", "end") else key in WORDS


def _of_trace(line: str) -> str | None:
    """A line of a traceback without what it says of values: a frame, or the name of the error."""
    frame = _FRAME.match(line)
    if frame:
        name = frame["path"].rpartition("/")[2]
        return f'  File ".../{name}", line {frame["line"]}, in {frame["name"]}'
    head = _HEAD.match(line)
    if head:
        return head[0]
    raised = _RAISED.match(line)
    return raised["name"] if raised else None


def tail(path: Path) -> Iterator[str]:
    """The lines of a file, of a large one those at its end."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_BYTES_MAX))
        if size > LOG_BYTES_MAX:
            file.readline()  # the rest of a line whose beginning is left out
        for line in file:
            yield line.decode(errors="replace").rstrip("\r\n")


def put(source: Path, target: Path, names: Names | None) -> list[str]:
    """Put the log files of a run directory into an archive's; notes about what is not there. Raises OSError."""
    if not source.is_dir():
        return [f"there are no logs: {source.name}/ is not there"]
    target.mkdir()
    notes = []
    clean: Callable[[Path], Iterator[str]] = tail if names is None else Cleaner(names).file
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.is_symlink():
            continue
        if path.stat().st_size > LOG_BYTES_MAX:
            notes.append(f"of {path.name} only the last {LOG_BYTES_MAX >> 20} MiB are taken")
        with (target / path.name).open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in clean(path))
    return notes
