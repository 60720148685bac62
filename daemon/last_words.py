"""Last words: what a child process said last about why it ended, out of its log file.

Owns the reading of a log's end. Must never raise, nor read more than `TAIL_BYTES`: it serves an error line that must
come out whatever the log holds. Invariant: one line of at most `WORDS_MAX` characters; empty when nothing was said.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TAIL_BYTES = 64 << 10
WORDS_MAX = 500
ERROR_LEVELS = ("error", "critical", "exception")
WHAT_FIELDS = ("errors", "what", "error", "reason", "exception")  # where a line says what went wrong, best first
# The last line of a Python trace ("ValueError: text", "package.OddError"), also in a group's margin.
EXCEPTION = re.compile(r"[\s|]*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Group|Fault)\b(?::.*)?)")


def last_words(log: Path, since_bytes: int = 0) -> str:
    """The last line of level error, or the last exception, or the last line at all, behind byte `since_bytes`.

    A log line of a lower level says nothing about an end: where one is the last, the answer is empty.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since_bytes, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    said = (words for line in reversed(lines) if (words := _error_line(line)))
    found = next(said, "") or (lines[-1] if lines and not _is_event(lines[-1]) else "")
    found = " ".join(found.split())
    return found if len(found) <= WORDS_MAX else found[: WORDS_MAX - 3] + "..."


def _is_event(line: str) -> bool:
    """Whether the line is one of a structured log."""
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _error_line(line: str) -> str:
    """What an error line says; empty for any other line."""
    if line.startswith("{"):
        try:
            event: Any = json.loads(line)
        except ValueError:
            return ""
        return _event_text(event) if event.get("level") in ERROR_LEVELS else ""
    match = EXCEPTION.fullmatch(line)
    return match[1] if match else ""


def _event_text(event: dict[str, Any]) -> str:
    what = next((event[name] for name in WHAT_FIELDS if event.get(name)), "")
    if isinstance(what, list):
        what = "; ".join(map(str, what))
    elif "\n" in str(what):
        what = str(what).strip().splitlines()[-1]
    return f"{event.get('event', '')}: {what}" if what else str(event.get("event", ""))
