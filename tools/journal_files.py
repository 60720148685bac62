"""Journal files: how the commands find a journal, and how far through it they are.

Owns the reading of DIR arguments, where an output cannot stand, and the progress bar. Must never write into a journal's
directory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from journal.reader import Record, Walk
from journal.segment import segment_names
from journal.storage import DiskStorage
from tools.ends import Refused, Unreadable

REDRAW_RECORDS = 2048
BAD_TAIL = "bad_tail"  # of the recovery table


class NoJournal(Refused):
    """The directory is none, or holds no journal, or one without a byte; the text says which."""


class Foreign(Unreadable):
    """The directory has files with a journal's names, and nothing of a journal in them."""


class BadPlace(Refused):
    """The output may not, or cannot, stand there."""


def refuse_place(path: str) -> None:
    """Raise BadPlace for a directory, and for a file in none: before a journal is read for it."""
    target = Path(path).absolute()
    if target.is_dir():
        raise BadPlace(f"{path} is a directory; name a file")
    if not target.parent.is_dir():
        raise BadPlace(f"{path}: there is no directory {target.parent}")


def refuse_foreign(walk: Walk) -> None:
    """Raise Foreign when a walk that is over found bytes, but no header and no record."""
    strange = [one.text() for one in walk.findings if one.offset == 0 and one.row.label == BAD_TAIL]
    if strange and walk.header is None and not walk.at.sequence:
        raise Foreign(f"DAMAGED: nothing of it is a journal's: {'; '.join(strange)}")


def open_directory(path: str) -> DiskStorage:
    """The journal in a directory, or in the `journal/` of a run directory; raises NoJournal, and OSError."""
    if not Path(path).exists():
        raise NoJournal(f"{path}: there is no such directory")
    if not Path(path).is_dir():
        raise NoJournal(f"{path}: this is no directory; name a journal directory, or a run directory that holds one")
    for directory in (Path(path), Path(path) / "journal"):
        storage = DiskStorage(directory)
        names = segment_names(storage.names() if directory.is_dir() else []).values()
        if names and not any((directory / name).stat().st_size for name in names):
            raise NoJournal(f"{path}: nothing was recorded; {', '.join(names)}: 0 bytes")
        if names:
            return storage
    raise NoJournal(f"{path}: no journal segments (NNNNNNNNNN.kvj) here or in its journal/ directory")


class ReadingProgress:
    """A bar over the bytes of a journal's files, on stderr, drawn only on a terminal."""

    def __init__(self, storage: DiskStorage, what: str) -> None:
        self._sizes = {
            name: (storage.directory / name).stat().st_size for name in segment_names(storage.names()).values()
        }
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(what, total=sum(self._sizes.values()))
        self._file = ""
        self._before = 0
        self._records = 0

    def __enter__(self) -> Callable[[Record], None]:
        self._progress.start()
        return self._seen

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _seen(self, record: Record) -> None:
        """A record was read; a compressed file counts as read when its first record is."""
        if record.file != self._file:
            self._before += self._sizes.get(self._file, 0)
            self._file = record.file
        self._records += 1
        if self._records % REDRAW_RECORDS == 0:
            done = self._before + min(record.offset, self._sizes.get(record.file, 0))
            self._progress.update(self._task, completed=done, description=f"sequence {record.sequence}")
