"""Part: the journal of an archive, redacted or as it is.

Owns the attempts: where to begin, which scheme of pseudonyms, and what is left out when a part cannot be followed. Must
never write into the journal that it reads, and never leave anything of an attempt that failed.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from journal import records
from journal.reader import Record, Walk
from journal.records import Kind, Snapshotted
from journal.segment import segment_names
from journal.snapshots import load_header as snapshot_header
from journal.snapshots import snapshot_names, write
from journal.storage import DiskStorage
from tools.ends import Unreadable
from tools.incident.excerpt import (
    Beginning,
    Excerpt,
    FirstReading,
    Known,
    all_of,
    beginnings,
    chosen,
    life_first,
    load_start,
    mapped_paths,
)
from tools.incident.pseudonyms import KEY_BYTES, Names, Tokens
from tools.incident.redactor import CannotFollow, Made, Redactor
from tools.incident.segments import SegmentFiles
from tools.incident.values import Values

replace = msgspec.structs.replace
Seen = Callable[[Record], None]
SCHEMES = {
    "prefix": "two prompts are equal as far as their beginnings are, and nothing else of them is",
    "page": "two prompts are equal as far as their beginnings are; so is, whatever stands in front of it, the last "
    "page (at most 64 tokens) before each 512th token: the cache knew evicted paths by that",
}


@dataclass(slots=True)
class Taken:
    """What became of a journal: the records that the archive holds, and notes about all that it does not."""

    first_sequence: int = 0
    last_sequence: int = 0
    records: int = 0
    scheme: str = ""  # of SCHEMES; empty: nothing was redacted
    snapshot: int = 0  # the record that the snapshot covers at which it begins
    damaged: bool = False
    notes: list[str] = field(default_factory=list)


class Nothing(Unreadable):
    """No part of the journal can be taken."""


class JournalPart:
    """Puts the newest `last_bytes` of a journal into another directory."""

    def __init__(self, source: DiskStorage, target: Path, last_bytes: int, names: Names | None, seen: Seen) -> None:
        """`names` None: as it is, prompts included. Raises Nothing and JournalDamaged where nothing can be taken."""
        self._source = source
        self._target = target
        self._names = names
        self._seen = seen
        self.taken = Taken()
        self._beginnings, notes = beginnings(source)
        if not self._beginnings and names is None:
            self._beginnings, self.taken.damaged = [all_of(source)], True
        if not self._beginnings:
            next(Walk(source).records(), None)  # raises JournalDamaged where a segment is missing that no trim deleted
            raise Nothing("; ".join(["it begins behind a trimmed part, and no snapshot of that can be used", *notes]))
        self._at = chosen(self._beginnings, last_bytes)
        if self.beginning.size_bytes > last_bytes:
            notes.append(f"it is larger than {last_bytes} bytes: there is no later snapshot at which it could begin")
        self.taken.notes += notes

    @property
    def beginning(self) -> Beginning:
        """Where it begins now."""
        return self._beginnings[self._at]

    def run(self) -> Taken:
        """Fill the directory; raises Nothing and OSError."""
        if self._names is None:
            self._copy()
        else:
            self._redact(self._names)
        if self.beginning.sequence:
            behind = f"the journal begins behind the snapshot of record {self.beginning.sequence}"
            self.taken.notes.insert(0, f"{behind}; what is older is left out")
        self.taken.snapshot = self.beginning.sequence
        return self.taken

    # --- as it is ------------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        self._target.mkdir(parents=True)
        begin = self.beginning
        names = [name for number, name in segment_names(self._source.names()).items() if number >= begin.first]
        names += [name for at, name in snapshot_names(self._source.names()).items() if at >= begin.sequence]
        names += [name for name in self._source.names() if name.endswith(".cut")]
        for name in names:
            shutil.copyfile(self._source.directory / name, self._target / name)
        copied = Excerpt(DiskStorage(self._target), begin)
        for record in copied.records():
            self._count(record.sequence)
            self._seen(record)
        self.taken.notes += copied.torn
        if copied.damage is not None:
            self.taken.damaged = True
            self.taken.notes.append(f"damaged, and taken as it is: {copied.damage.text()}")

    def _count(self, sequence: int) -> None:
        taken = self.taken
        taken.first_sequence, taken.last_sequence = taken.first_sequence or sequence, sequence
        taken.records += 1

    # --- redacted ------------------------------------------------------------------------------------------------

    def _redact(self, names: Names) -> None:
        """Try until a part is followed to its end: by the first scheme, by the second, from a later beginning."""
        excerpt, known = self._first_reading()
        failed = self._attempts(names, excerpt, known)
        while failed is not None:
            said = f"record {failed.sequence} cannot be redacted so that it replays ({failed})"
            later = self._later(failed.sequence)
            if later is None:
                self.taken.notes.append(f"{said}; it and what is behind it are left out")
                self._attempts(names, excerpt, known, failed.sequence)
                return
            self.taken.notes.append(f"{said}; what is in front of a later snapshot is left out")
            self._at = later
            excerpt, known = self._first_reading()
            failed = self._attempts(names, excerpt, known)

    def _attempts(self, names: Names, excerpt: Excerpt, known: Known, before: int = 0) -> CannotFollow | None:
        """Redact the part up to a record by the first scheme that leads there; what stopped the last one."""
        failed: CannotFollow | None = None
        for scheme in SCHEMES:
            failed = self._attempt(names, scheme, excerpt, known, before)
            if failed is None:
                break
        return failed

    def _first_reading(self) -> tuple[Excerpt, Known]:
        """Read the part once, and again from behind its damage, if it has any and can begin there."""
        while True:
            excerpt = Excerpt(self._source, self.beginning)
            reading = FirstReading(
                load_start(self._source, self.beginning.sequence) if excerpt.beginning.sequence else None
            )
            for record in excerpt.records():
                self._seen(record)
                reading.take(record)
            if excerpt.damage is None:
                return excerpt, reading.known
            self.taken.damaged = True
            later = self._later(max(excerpt.damage.sequence, excerpt.last_sequence + 1))
            what = "what is behind it is left out, it could not be redacted" if later is None else "what is before the"
            what += "" if later is None else " next snapshot behind it is left out"
            self.taken.notes.append(f"damaged: {excerpt.damage.text()}; {what}")
            if later is None:
                return excerpt, reading.known
            self._at = later

    def _later(self, sequence: int) -> int | None:
        """The first beginning at or behind a record."""
        found = (at for at, one in enumerate(self._beginnings) if one.sequence >= sequence and at > self._at)
        return next(found, None)

    def _attempt(self, names: Names, scheme: str, excerpt: Excerpt, known: Known, before: int) -> CannotFollow | None:
        """Redact the part by a scheme, up to a record; what stopped it, with nothing left of it."""
        shutil.rmtree(self._target, ignore_errors=True)
        self._target.mkdir(parents=True)
        blocks = known.page_sizes if scheme == "page" else ()
        tokens = Tokens(names, known.vocabularies, known.eos_ids, known.stop_ids, blocks)
        redactor = Redactor(Values(names, tokens), known.snapshots > 0 or bool(self.beginning.sequence))
        self.taken.first_sequence = self.taken.last_sequence = self.taken.records = 0
        target = DiskStorage(self._target)
        try:
            self._write_start(names, tokens, redactor, known, target)
            begin = self.beginning
            with SegmentFiles(
                target, self._journal_id(names), begin.sequence, life_first(self._source, begin)
            ) as files:
                for record in excerpt.records():
                    if before and record.sequence >= before:
                        break
                    self._seen(record)
                    for made in redactor.take(record):
                        self._put(files, target, made)
                for made in redactor.end():
                    self._put(files, target, made)
        except CannotFollow as failed:
            shutil.rmtree(self._target)
            return failed
        self.taken.scheme = scheme
        if tokens.unmoved:
            self.taken.notes.append(f"{tokens.unmoved} stop ids are as they were: there was no other id to draw")
        self.taken.notes += [*redactor.notes, *excerpt.torn]
        return None

    def _journal_id(self, names: Names) -> bytes:
        return names.keyed("journal", b"id")

    def _write_start(self, names: Names, tokens: Tokens, redactor: Redactor, known: Known, target: DiskStorage) -> None:
        """The snapshot at which the part begins."""
        if not self.beginning.sequence:
            return
        header, body = load_start(self._source, self.beginning.sequence)

        def column(namespace: str, prompt: bytes) -> tuple[str, bytes]:
            return names.namespace(namespace), tokens.column(tokens.root(namespace), prompt)[0]

        ghosts = mapped_paths(known, max(known.page_sizes, default=1), column)
        made, mapped = redactor.begin_at(header, body, ghosts)
        write(target, replace(made, journal_id=self._journal_id(names)), mapped)

    def _put(self, files: SegmentFiles, target: DiskStorage, made: Made) -> None:
        """A record, and the file of the snapshot that it names, where the journal still has that."""
        payload = made.payload
        if made.body:
            said: Any = records.decode(Kind.SNAPSHOTTED, payload)
            payload = records.encode(self._put_snapshot(files, target, said, made.body))
        files.append(made.sequence, made.kind, payload)
        self._count(made.sequence)

    def _put_snapshot(self, files: SegmentFiles, target: DiskStorage, said: Snapshotted, body: bytes) -> Snapshotted:
        if said.file not in self._source.names():
            return said
        header = snapshot_header(self._source, said.file)
        made = replace(header, journal_id=files.journal_id, body_bytes=len(body), digest=said.digest)
        _, size_bytes = write(target, made, body)
        return replace(said, size_bytes=size_bytes)


def fresh_names() -> Names:
    """Pseudonyms by a key that is in no file and gone with this process."""
    return Names(secrets.token_bytes(KEY_BYTES))
