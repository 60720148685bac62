"""Output: where an export goes, a file or standard output, compressed by the file's suffix.

Owns the opening and the closing. Must never write into a journal's directory, nor replace what is no regular file.
Invariant: a file that was not finished does not get its name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools import result_files
from tools.journal_files import BadPlace, refuse_place
from tools.output import OutputLost, because, printing
from tools.packed_files import packed, suffix_of

Write = Callable[[bytes], object]


@contextmanager
def opened(path: str, journal: Path) -> Iterator[Write]:
    """What takes the bytes: `path`, or standard output where it is empty or `-`.

    Raises BadPlace, Refused for a suffix, and OutputLost where what was written did not arrive.
    """
    theirs: OSError | None = None  # of the journal that is read meanwhile
    if path in ("", "-"):
        with printing():
            try:
                yield sys.stdout.buffer.write
            except OSError as error:
                if error.filename is None:  # of writing: only opening a file of the journal has a name
                    raise
                theirs = error
            else:
                sys.stdout.buffer.flush()
        if theirs is not None:
            raise theirs
        return
    suffix_of(Path(path))
    target = Path(path).absolute()
    if journal.resolve() in (target.parent.resolve(), Path(os.path.realpath(target)).parent):
        raise BadPlace(f"{path} is in the journal's own directory, which is never written to; choose another place")
    refuse_place(path)
    try:
        with result_files.writing(target) as file, packed(target, file) as packer:
            try:
                yield _telling(path, packer.write)
            except OSError as error:
                theirs = error
                raise
    except OSError as error:
        raise theirs or OutputLost(f"{path} cannot be written: {because(error)}") from error


def _telling(path: str, write: Write) -> Write:
    def told(data: bytes) -> object:
        try:
            return write(data)
        except OSError as error:
            raise OutputLost(f"{path} cannot be written: {because(error)}") from error

    return told
