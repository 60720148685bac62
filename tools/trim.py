"""trim: deletes what a journal no longer needs, after it was proved that it does not.

    bandmaster trim DIR [--dry-run] [--json]

Replays from the older of the two kept snapshots and requires the newer one byte for byte, with every step, decision and
digest between them. Only then the segments that end before the older one go, oldest first. Must never delete anything
else, nor a thing on doubt. May run beside the daemon that writes the journal, and be interrupted anywhere. Exit codes:
`tools.ends`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from journal import segment
from journal.reader import Walk
from journal.replay import check
from journal.snapshots import Header, SnapshotUnusable, decode_body, load, snapshot_names
from journal.storage import DiskStorage, Storage
from tools.ends import DONE, NO, Failed, ended
from tools.journal_files import ReadingProgress, open_directory, refuse_foreign
from tools.output import because, counted, tell
from tools.reading_flags import add_directory, add_json, reading_parser
from tools.replay import divergence_in_words
from tools.replica import factories

NEEDED = 2  # snapshots: one to begin at, one to arrive at


@dataclass(slots=True)
class Trimming:
    """What was found and done. `why` says why nothing went, and is empty when something did; `differs`: by replay."""

    segments: list[str] = field(default_factory=list)  # that went, or would
    bytes: int = 0
    older: int = 0  # the sequence that the older snapshot covers
    newer: int = 0
    steps: int = 0  # that were replayed
    why: str = ""
    differs: bool = False


def trim(storage: DiskStorage, dry: bool = False) -> Trimming:
    """Check, then delete; raises JournalError where the journal is damaged, Failed and OSError."""
    found = Trimming()
    usable = _usable(storage, found)
    if usable is None:
        _read(storage)
        return found
    (older, older_data), (newer, newer_data) = usable
    found.older, found.newer = older.sequence, newer.sequence
    found.why = _difference(storage, (older, older_data), (newer, newer_data), found)
    found.differs = bool(found.why)
    if found.differs:
        return found
    found.segments = segments_before(storage, older.sequence)
    found.bytes = sum((storage.directory / name).stat().st_size for name in found.segments)
    if not found.segments:
        found.why = f"no segment ends before record {older.sequence}, which the older snapshot covers"
    if not dry:
        for name in found.segments:
            try:
                with contextlib.suppress(FileNotFoundError):  # another trim, or the daemon compressed it meanwhile
                    storage.remove(name)
            except OSError as error:
                raise Failed(f"{storage.directory / name} cannot be deleted: {because(error)}") from error
        storage.sync_directory()
    return found


def _usable(storage: Storage, found: Trimming) -> list[tuple[Header, bytes]] | None:
    """The two newest snapshots, older first; None says why in `found`."""
    names = list(snapshot_names(storage.names()).values())[-NEEDED:]
    if len(names) < NEEDED:
        there = f"there {'is' if len(names) == 1 else 'are'} {counted(len(names), 'snapshot')}"
        found.why = f"{there}, and {NEEDED} are needed: one is proved by the other"
        return None
    try:
        return [load(storage, name) for name in names]
    except SnapshotUnusable as error:
        found.why = str(error)
        return None


def _read(storage: DiskStorage) -> None:
    """Read what no replay read: a damaged journal is no journal without anything to trim. Raises JournalError."""
    walk = Walk(storage)
    with ReadingProgress(storage, "reading") as seen:
        for record in walk.records():
            seen(record)
    refuse_foreign(walk)


def _difference(storage: Storage, older: tuple[Header, bytes], newer: tuple[Header, bytes], found: Trimming) -> str:
    """Why the newer snapshot does not follow from the older one; empty when it does."""
    start, goal = older[0], newer[0]
    walk = Walk(storage, first=segment.segment_behind(storage, start.sequence))
    assert isinstance(storage, DiskStorage)
    with ReadingProgress(storage, "replaying") as seen:
        begin = (start, decode_body(older[1]))
        verdict = check(walk.records(), factories(), goal.sequence, seen, begin)
    if verdict.damage is not None:
        raise verdict.damage
    found.steps = verdict.counts.steps
    if verdict.divergence is not None:
        return f"replay from {start.sequence} differs: {divergence_in_words(verdict.divergence)}"
    replayed = verdict.replay.state_at(goal.sequence)
    if replayed is None:
        return f"record {goal.sequence} asks for no snapshot, but there is one of it"
    return "" if replayed == newer[1] else _parts(replayed, newer[1])


def _parts(replayed: bytes, recorded: bytes) -> str:
    """Which parts of two bodies differ."""
    ours, theirs = decode_body(replayed), decode_body(recorded)
    names = [name for name in ours.__struct_fields__ if getattr(ours, name) != getattr(theirs, name)]
    places = [str(at) for at, pair in enumerate(zip(ours.stages, theirs.stages, strict=False)) if pair[0] != pair[1]]
    stages = f" (stage {', '.join(places)})" if places else ""
    return f"the newer snapshot has another state than replay from the older one leads to: {', '.join(names)}{stages}"


def segments_before(storage: Storage, sequence: int) -> list[str]:
    """Segment files that end before the record behind `sequence`, oldest first; both forms where there are two."""
    first = segment.segment_behind(storage, sequence)
    numbers = segment.segment_numbers(storage.names())
    return [name for name, number in numbers if number < first]


def _say(found: Trimming, dry: bool) -> str:
    if found.differs:
        return f"NOT trimmed, nothing was deleted: {found.why}"
    if found.why:
        return f"nothing to trim: {found.why}"
    steps = counted(found.steps, "step")
    proved = f"replay of {steps} from record {found.older} led to the snapshot of record {found.newer}"
    done = "would delete" if dry else "deleted"
    return f"{done} {counted(len(found.segments), 'segment')}, {counted(found.bytes, 'byte')}; {proved}, byte for byte"


def _plain(found: Trimming, dry: bool) -> dict[str, Any]:
    return {
        "trimmed": bool(found.segments) and not dry and not found.differs,
        "dry_run": dry,
        "segments": found.segments,
        "bytes": found.bytes,
        "older": found.older,
        "newer": found.newer,
        "steps": found.steps,
        "differs": found.differs,
        "why": found.why,
    }


def main(argv: list[str] | None = None) -> int:
    """`bandmaster trim`."""
    parser = reading_parser("trim", "Delete the segments that two snapshots prove to be no longer needed.")
    add_directory(parser)
    parser.add_argument("--dry-run", action="store_true", help="check and say what would go, delete nothing")
    add_json(parser)
    options = parser.parse_args(argv)

    def run() -> int:
        found = trim(open_directory(options.directory), options.dry_run)
        tell(options.json, lambda: _plain(found, options.dry_run), lambda: print(_say(found, options.dry_run)))
        return NO if found.differs else DONE

    return ended("trim", run)


if __name__ == "__main__":
    raise SystemExit(main())
