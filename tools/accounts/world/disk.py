"""Disk and log of the world: real files, without waiting for a device, that a death of the machine cuts.

Owns which bytes a device would have. Must never lose what was synced.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from daemon.logs import LineWriter
from journal.storage import DiskStorage


class WorldDisk(DiskStorage):
    """A journal's directory whose syncs cost nothing; `broken`: it takes nothing more."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.broken = False
        self._names: dict[int, str] = {}
        self._synced: dict[str, int] = {}

    def create(self, name: str) -> int:
        """A new file, of which the device has nothing."""
        handle = super().create(name)
        self._names[handle], self._synced[name] = name, 0
        return handle

    def write(self, handle: int, data: bytes) -> int:
        """One write, or an error."""
        if self.broken:
            raise OSError(28, "the world's disk takes nothing more")
        return super().write(handle, data)

    def sync(self, handle: int) -> None:
        """What was written is safe."""
        if self.broken:
            raise OSError(5, "the world's disk takes nothing more")
        self._synced[self._names[handle]] = os.fstat(handle).st_size

    def sync_directory(self) -> None:
        """Names are safe at once here."""

    def rename(self, name: str, new_name: str) -> None:
        """The same file goes by another name."""
        super().rename(name, new_name)
        self._synced[new_name] = self._synced.pop(name, 0)
        self._names = {handle: new_name if one == name else one for handle, one in self._names.items()}

    def remove(self, name: str) -> None:
        """Unlink."""
        super().remove(name)
        self._synced.pop(name, None)

    def crash(self, rng: random.Random) -> int:
        """The machine dies: of what was not synced any part is gone, from the end. How many bytes that are."""
        lost = 0
        for name, synced in self._synced.items():
            path = self.directory / name
            size = path.stat().st_size if path.exists() else 0
            if size > synced:
                kept = rng.randint(synced, size)
                os.truncate(path, kept)
                lost += size - kept
        self._synced.clear()
        return lost


class WorldLines(LineWriter):
    """A log writer that a killed process takes along, with whatever its queue holds."""

    killed = False

    def _line(self, event: dict[str, Any]) -> None:
        if not self.killed:
            super()._line(event)

    def kill(self) -> None:
        """The process is gone."""
        self.killed = True
        self.close()


class Nowhere:
    """A terminal that nobody reads."""

    def isatty(self) -> bool:
        """It is none."""
        return False

    def write(self, text: str) -> int:
        """Takes everything."""
        return len(text)

    def flush(self) -> None:
        """There is nothing to flush."""
