"""Result files: what a command leaves on disk is either the old file or the whole new one.

Owns how tools write a file that may be there already. Must never open a target for writing before its new text is
complete: that is a draft beside it, renamed over it at the end. What is no regular file (a pipe, a device) is never
renamed over but written to directly, and so is what our standard output goes to, a file too: others write there as
well. A symbolic link stays, and the file that it names is replaced.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EISDIR
from pathlib import Path
from typing import IO


def probe(path: Path) -> None:
    """See, without touching it, that `put` can write there; raises OSError."""
    if path.is_dir():
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(EACCES, os.strerror(EACCES))
    if _is_replaced(path):
        draft = _draft(path)
        try:
            draft.open("xb").close()
        finally:
            draft.unlink(missing_ok=True)


def probe_folder(folder: Path) -> None:
    """Make a folder and see that files can be written there; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    trial = folder / ".probe"
    trial.write_bytes(b"")
    trial.unlink()


def put(path: Path, text: str) -> None:
    """Write a text (UTF-8), wholly or not at all; an old file's permissions stay. Raises OSError."""
    with writing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def writing(path: Path, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write bytes into, which has the name when all of it is written, and not after an exception.

    An old file's permissions stay; `private`: readable by its owner alone. Raises OSError.
    """
    if is_standard_output(path):
        sys.stdout.flush()
        with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as file:
            yield file
        return
    if not _is_replaced(path):
        with path.open("wb") as file:
            yield file
        return
    draft = _draft(path)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not private:
            with suppress(FileNotFoundError):
                draft.chmod(stat.S_IMODE(path.stat().st_mode))
        draft.replace(os.path.realpath(path))
    finally:
        draft.unlink(missing_ok=True)


def is_regular(path: Path) -> bool:
    """Whether a file of this name is one that is, or would be, on a disk: no pipe, no device, not standard output."""
    return _is_replaced(path) and not is_standard_output(path)


def is_standard_output(path: Path) -> bool:
    """Whether this is what our standard output goes to."""
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError, AttributeError):  # not there, closed, or no file of the system
        return False


def same(one: Path, other: Path) -> bool:
    """Whether two names are one file, there or not."""
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def _is_replaced(path: Path) -> bool:
    return path.is_file() or not path.exists()


def _draft(path: Path) -> Path:
    target = Path(os.path.realpath(path))
    return target.with_name(f".{target.name[:80]}.{os.getpid()}.part")
