"""Output that may be gone: a full disk, a reader who has enough.

Owns what becomes of that: OutputLost, of which `tools.ends` makes a line and an exit code. Must never leave a
traceback, nor blame an output for what is read meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tools import result_files


class OutputLost(Exception):
    """What was printed or written did not arrive; the text says why, empty where the reader had enough."""


@contextmanager
def printing() -> Iterator[None]:
    """Everything printed inside has arrived at the end, or OutputLost is raised; nothing but printing belongs here."""
    try:
        yield
        sys.stdout.flush()
    except (OSError, SystemExit) as error:  # `rich` exits where the reader has left
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the interpreter flushes it once more when it ends
        reader_left = isinstance(error, BrokenPipeError | SystemExit)
        raise OutputLost("" if reader_left else f"standard output cannot be written: {because(error)}") from error


def tell(plain: bool, document: Callable[[], Any], show: Callable[[], None]) -> None:
    """Print one JSON object, or what `show` prints; raises OutputLost."""
    with printing():
        if plain:
            print(json.dumps(document()))
        else:
            show()


@contextmanager
def to_file(path: Path, private: bool = False) -> Iterator[IO[bytes]]:
    """`result_files.writing` of what is only written, so that every OSError inside is the file's: OutputLost."""
    try:
        with result_files.writing(path, private) as file:
            yield file
    except OSError as error:
        raise OutputLost(f"{path} cannot be written: {because(error)}") from error


def counted(number: int, one: str, more: str = "") -> str:
    """A count with its word: 1 epoch, 2 epochs."""
    return f"{number:,} {one if number == 1 else more or f'{one}s'}"


def because(error: BaseException) -> str:
    """Why, without a number of the system's and without the name of a draft."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
