"""Standard output that may be gone: a full disk, a reader who has enough.

Owns what a command does then. Must never leave a traceback, nor an exit code that means something else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOST = 1  # exit code


class OutputLost(Exception):
    """What was printed did not arrive; the text says why, empty where the reader had enough."""


def lost(command: str, error: OutputLost) -> int:
    """Say in one line what was lost, nothing where the reader had enough; the exit code."""
    if str(error):
        print(f"{command}: {error}", file=sys.stderr)
    return LOST


@contextmanager
def printing() -> Iterator[None]:
    """Everything printed inside has arrived at the end, or OutputLost is raised; nothing but printing belongs here."""
    try:
        yield
        sys.stdout.flush()
    except (OSError, SystemExit) as error:  # `rich` exits where the reader has left
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the interpreter flushes it once more when it ends
        reader_left = isinstance(error, BrokenPipeError | SystemExit)
        raise OutputLost("" if reader_left else f"standard output cannot be written: {error}") from error
