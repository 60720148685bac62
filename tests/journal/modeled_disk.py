"""A disk in memory that fails on demand and forgets what was not synced.

Owns three models: the Nth operation fails (a failed write may have taken half; a failed fsync loses the pages for good,
though a later one reports success); the process dies (everything written stays); the machine dies (of what was not
synced, any part may be lost: bytes, whole pages, directory entries).
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field

from journal.errors import JournalBusy

PAGE_BYTES = 64  # small, so that a lost page lies inside short files too


@dataclass
class Inode:
    """A file: its bytes, and those that a crash of the machine leaves in any case."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    doomed: set[int] = field(default_factory=set)  # pages whose write-back failed: clean in the cache, lost on disk

    def sync(self) -> None:
        durable = bytearray(self.data)
        for page in self.doomed:
            start = page * PAGE_BYTES
            durable[start : start + PAGE_BYTES] = bytes(len(durable[start : start + PAGE_BYTES]))
        self.durable = bytes(durable)

    def lose(self) -> None:
        """A write-back fails: every page that differs from the disk is marked clean and stays lost."""
        first = next((i for i, (a, b) in enumerate(zip(self.data, self.durable, strict=False)) if a != b), None)
        start = len(self.durable) if first is None else first
        self.doomed.update(range(start // PAGE_BYTES, -(-len(self.data) // PAGE_BYTES)))


class ModeledDisk:
    """`Storage` over inodes. `fail_at` is the number of the operation that fails, from 1; `forever`: all later too."""

    def __init__(self, fail_at: int = 0, forever: bool = False, code: int = errno.EIO, short: bool = False) -> None:
        self.files: dict[str, Inode] = {}
        self.durable_entries: dict[str, Inode] = {}
        self.pending: list[
            tuple[str, str, Inode | None]
        ] = []  # since the directory's sync: name gone, name and inode new
        self.fail_at, self.forever, self.code, self.short = fail_at, forever, code, short
        self.operations = 0
        self.log: list[str] = []
        self.locked = False
        self._handles: dict[int, Inode] = {}
        self._next_handle = 1

    # --- faults

    def _operate(self, what: str) -> None:
        self.operations += 1
        self.log.append(what)
        if self.fail_at and (self.operations == self.fail_at or (self.forever and self.operations > self.fail_at)):
            raise OSError(self.code, f"modeled failure of operation {self.operations}, {what}")

    def killed(self) -> ModeledDisk:
        """The disk as the next process finds it after this one died."""
        disk = ModeledDisk()
        disk.files = dict(self.files)
        disk.durable_entries, disk.pending = dict(self.durable_entries), list(self.pending)
        return disk

    def crashed(self, rng: random.Random) -> ModeledDisk:
        """The disk after the machine died: any of the directory's changes since its sync, any of each file's pages."""
        disk = ModeledDisk()
        entries = dict(self.durable_entries)
        chance = rng.choice([0.0, 0.5, 1.0])
        for gone, name, inode in self.pending:
            if rng.random() < chance:
                entries.pop(gone, None)
                if inode is not None:
                    entries[name] = inode
        for name, inode in entries.items():
            disk.files[name] = Inode(bytearray(_after_crash(inode, rng)))
        for inode in disk.files.values():
            inode.durable = bytes(inode.data)
        disk.durable_entries = dict(disk.files)
        return disk

    # --- Storage

    def lock(self) -> None:
        if self.locked:
            raise JournalBusy("modeled", 1)
        self.locked = True

    def unlock(self) -> None:
        self.locked = False

    def names(self) -> list[str]:
        return sorted(self.files)

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return bytes(self.files[name].data)

    def read_start(self, name: str, length_bytes: int) -> bytes:
        return self.read(name)[:length_bytes]

    def create(self, name: str) -> int:
        self._operate(f"create {name}")
        if name in self.files:
            raise FileExistsError(name)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._handles[handle] = Inode()
        self._change("", name, self._handles[handle])
        return handle

    def write(self, handle: int, data: bytes) -> int:
        inode = self._handles[handle]
        try:
            self._operate("write")
        except OSError:
            if self.short:
                inode.data += data[: len(data) // 2]
            raise
        inode.data += data
        return len(data)

    def sync(self, handle: int) -> None:
        inode = self._handles[handle]
        try:
            self._operate("sync")
        except OSError:
            inode.lose()
            raise
        inode.sync()

    def close(self, handle: int) -> None:
        self._operate("close")
        del self._handles[handle]

    def rename(self, name: str, new_name: str) -> None:
        self._operate(f"rename {new_name}")
        self._change(name, new_name, self.files[name])

    def sync_directory(self) -> None:
        self._operate("sync_directory")
        self.durable_entries, self.pending = dict(self.files), []

    def truncate(self, name: str, length_bytes: int) -> None:
        self._operate(f"truncate {name}")
        inode = self.files[name]
        del inode.data[length_bytes:]
        inode.sync()

    def remove(self, name: str) -> None:
        self._operate(f"remove {name}")
        self._change(name, "", None)

    def _change(self, gone: str, name: str, inode: Inode | None) -> None:
        self.files.pop(gone, None)
        if inode is not None:
            self.files[name] = inode
        self.pending.append((gone, name, inode))


def _after_crash(inode: Inode, rng: random.Random) -> bytes:
    """What the device holds: the durable bytes, then none, a part, or all of the rest, with pages missing inside."""
    rest = bytearray(inode.data[len(inode.durable) :])
    del rest[rng.choice([0, len(rest), rng.randint(0, len(rest))]) :]
    found = bytearray(inode.durable) + rest
    lost = {page for page in range(-(-len(found) // PAGE_BYTES)) if rng.random() < 0.3} | inode.doomed
    for page in sorted(lost):
        start = max(page * PAGE_BYTES, len(inode.durable))
        stop = (page + 1) * PAGE_BYTES
        if start < stop:
            found[start:stop] = bytes(len(found[start:stop]))
    return bytes(found)
