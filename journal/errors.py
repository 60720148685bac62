"""Errors of the journal, as one tree.

    JournalError
      JournalBusy      another process holds the directory's lock
      JournalDamaged   what is on disk cannot be read as written, and cutting it could lose what was promised
      JournalFailed    the disk took neither the segment nor a new one; the records are still held in memory

Must never be raised for a broken invariant of our own code: that is an AssertionError and stops the daemon.
"""

from __future__ import annotations


class JournalError(Exception):
    """Base of everything the journal raises on purpose."""


class JournalBusy(JournalError):
    """Another process writes to this directory; `pid` is its number, 0 when it did not leave one."""

    def __init__(self, directory: str, pid: int) -> None:
        self.pid = pid
        owner = f"process {pid}" if pid else "another process"
        super().__init__(f"journal {directory} is in use by {owner}; stop it first or choose another --run-dir")


class JournalDamaged(JournalError):
    """The journal was refused: `rule` is the label of the row in the recovery table that refused it."""

    def __init__(self, rule: str, file: str, offset: int, sequence: int, what: str) -> None:
        self.rule = rule
        self.file = file
        self.offset = offset
        self.sequence = sequence
        super().__init__(f"{file} at byte {offset}, sequence {sequence}: {what} [{rule}]")


class JournalFailed(JournalError):
    """A write or an fsync failed and so did the attempt to go on in a new segment. Nothing may be sent or promised."""
