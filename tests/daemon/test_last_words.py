"""Last words: the reason that a dead child left in its log, in one bounded line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from daemon.last_words import TAIL_BYTES, WORDS_MAX, last_words

ERROR = json.dumps({"level": "error", "event": "cannot go on", "errors": ["BadOption('no zork')"]})
INFO = json.dumps({"level": "info", "event": "joined"})
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\nValueError: bad  thing'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        (f"{ERROR}\n{INFO}\n", "cannot go on: BadOption('no zork')"),
        (f"{INFO}\n{TRACE}\n", "ValueError: bad thing"),
        ("  | allocator.errors.SomeError: in a group\n  +----------\n", "allocator.errors.SomeError: in a group"),
        ("Killed by something\n\n", "Killed by something"),
        (json.dumps({"level": "error", "event": "fault", "exception": TRACE}), "fault: ValueError: bad thing"),
        (f"{INFO}\n", ""),
        ("{broken\n", "{broken"),
        ("[1]\n", "[1]"),
    ],
)
def test_the_last_error_is_found(tmp_path: Path, text: str, words: str) -> None:
    """The last error line, else an exception, else the last line."""
    log = tmp_path / "log"
    log.write_text(text)
    assert last_words(log) == words


def test_it_is_bounded_and_of_this_life(tmp_path: Path) -> None:
    """Long lines are cut, long logs are read at their end only, and what an earlier life said is not repeated."""
    log = tmp_path / "log"
    log.write_text(ERROR + "\n" + "x" * (2 * TAIL_BYTES))
    assert last_words(log) == "x" * (WORDS_MAX - 3) + "..."
    log.write_text(ERROR + "\n")
    assert last_words(log, since_bytes=log.stat().st_size) == ""
    assert last_words(tmp_path / "nowhere") == ""
