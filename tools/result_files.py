"""Result files: what a command leaves on disk is either the old file or the whole new one.

Owns how tools write a file that may be there already. Must never open a target for writing before its new text is
complete: that is a draft beside it, renamed over it at the end. What is no regular file (a pipe, /dev/stdout) cannot be
renamed over and is written to directly. A symbolic link stays, and the file that it names is replaced.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from errno import EACCES, EISDIR
from pathlib import Path


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
    if not _is_replaced(path):
        path.write_text(text, encoding="utf-8")
        return
    draft = _draft(path)
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            draft.chmod(stat.S_IMODE(path.stat().st_mode))
        draft.replace(os.path.realpath(path))
    finally:
        draft.unlink(missing_ok=True)


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
