"""Storage: the few operations the journal needs of a disk, and the real disk.

Owns every system call of the journal. Must never retry, buffer or interpret: an error goes up as OSError and the
writer decides. Names are file names within one directory. `Storage` is an interface so that tests can fail the Nth
operation or lose what was not synced.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Protocol

from journal.errors import JournalBusy

LOCK_NAME = "LOCK"


class Storage(Protocol):
    """What a journal needs of a disk. Every operation may raise OSError; a failed one may have happened in part."""

    def lock(self) -> None:
        """Take the directory for this process, or raise JournalBusy; held until `unlock` or the process ends."""

    def unlock(self) -> None:
        """Give the directory back."""

    def names(self) -> list[str]:
        """Names of all files, sorted."""

    def read(self, name: str) -> bytes:
        """The whole file."""

    def read_start(self, name: str, length_bytes: int) -> bytes:
        """At most so many bytes of the file's beginning."""

    def create(self, name: str) -> int:
        """Make a new, empty file for appending; an existing one is an error. Returns a handle."""

    def write(self, handle: int, data: bytes) -> int:
        """Append once; returns how many bytes were taken, which may be fewer."""

    def sync(self, handle: int) -> None:
        """Return when the file's bytes and length are on the device."""

    def close(self, handle: int) -> None:
        """Close the handle."""

    def rename(self, name: str, new_name: str) -> None:
        """Give the file its new name at once, replacing what had it."""

    def sync_directory(self) -> None:
        """Return when creations, renames and removals are on the device."""

    def truncate(self, name: str, length_bytes: int) -> None:
        """Cut the file to a length and sync it."""

    def remove(self, name: str) -> None:
        """Remove the file."""


def write_all(storage: Storage, handle: int, data: bytes) -> None:
    """Write until all is taken; a write that takes nothing is an error."""
    while data:
        taken = storage.write(handle, data)
        assert taken <= len(data), f"a write of {len(data)} bytes took {taken}"
        if taken <= 0:
            raise OSError(f"a write of {len(data)} bytes took {taken}")
        data = data[taken:]


class DiskStorage:
    """A directory of the real file system, private to its owner (0700, files 0600)."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._lock_handle = -1

    def lock(self) -> None:
        """Take an exclusive flock on `LOCK` and leave this process's number in it."""
        assert self._lock_handle < 0, "the journal's lock is taken already"
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self.directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).strip()
            os.close(handle)
            raise JournalBusy(str(self.directory), int(owner) if owner.isdigit() else 0) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, b"%d\n" % os.getpid(), 0)
        self._lock_handle = handle

    def unlock(self) -> None:
        """Release the flock; the file stays, because removing it would let two owners hold two files of one name."""
        if self._lock_handle >= 0:
            os.close(self._lock_handle)
            self._lock_handle = -1

    def names(self) -> list[str]:
        """Names of all files in the directory, sorted; none when it does not exist."""
        if not self.directory.exists():
            return []
        return sorted(entry.name for entry in os.scandir(self.directory) if entry.is_file(follow_symlinks=False))

    def read(self, name: str) -> bytes:
        """The whole file."""
        return (self.directory / name).read_bytes()

    def read_start(self, name: str, length_bytes: int) -> bytes:
        """At most so many bytes of the file's beginning."""
        with (self.directory / name).open("rb") as file:
            return file.read(length_bytes)

    def create(self, name: str) -> int:
        """A new file open for appending."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(self.directory / name, flags, 0o600)

    def write(self, handle: int, data: bytes) -> int:
        """One `os.write`."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """`fdatasync`: the bytes and the length they need."""
        os.fdatasync(handle)

    def close(self, handle: int) -> None:
        """Close the handle."""
        os.close(handle)

    def rename(self, name: str, new_name: str) -> None:
        """Atomic replacement within the directory."""
        os.replace(self.directory / name, self.directory / new_name)

    def sync_directory(self) -> None:
        """fsync of the directory itself."""
        handle = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def truncate(self, name: str, length_bytes: int) -> None:
        """Cut and fsync."""
        handle = os.open(self.directory / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(handle, length_bytes)
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, name: str) -> None:
        """Unlink."""
        os.unlink(self.directory / name)
