"""incident: one archive with everything that an engineer elsewhere needs to find out what happened.

    bandmaster incident RUN_DIR [-o FILE.tar.zst] [--include-prompts] [--last 256MiB]

Owns the command line, the archive and its list of contents. Must never write into the run directory, and never put into
an archive what was not redacted, unless that was asked for. Works beside a live daemon, behind a dead one, and on a
damaged journal, which the exit code says (`tools.ends`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from errno import EACCES, EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from daemon.versions import versions
from journal.errors import JournalError
from journal.records import DECISION_VERSION, SCHEMA_VERSION
from journal.segment import segment_names
from journal.storage import DiskStorage
from tools import result_files
from tools.ends import DAMAGED, DONE, NO, Refused, Unreadable, ended, in_words
from tools.incident import logs, machine, summary
from tools.incident.excerpt import Excerpt, all_of, beginnings
from tools.incident.part import SCHEMES, JournalPart, Nothing, fresh_names
from tools.incident.pseudonyms import Names
from tools.journal_files import ReadingProgress, open_directory
from tools.output import OutputLost, tell, to_file
from tools.packed_files import suffix_of
from tools.reading_flags import add_json, reading_parser
from tools.replay import divergence_in_words, replay_directory

LEVEL = 9
UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
KEPT = "ids, front ends, namespaces and salts are pseudonyms, tokens are exchanged, log probabilities are 0"
AS_IT_IS = "NOT redacted: prompts and outputs are in it"


class BadPlace(Refused):
    """The archive cannot be written there."""


def gather(run_dir: Path, folder: Path, last_bytes: int, names: Names | None) -> dict[str, Any]:
    """Fill an archive's folder; its list of contents. Raises NoJournal, Nothing and OSError."""
    source = open_directory(str(run_dir))
    journal = folder / "journal"
    with ReadingProgress(source, "taking the journal") as seen:
        taken = JournalPart(source, journal, last_bytes, names, seen).run()
    notes = list(taken.notes)
    if not segment_names(DiskStorage(journal).names()):
        nowhere = (
            "no record stands in front of its journal's damage, and behind it no snapshot at which one could begin"
        )
        raise Nothing("; ".join([f"{run_dir}: {nowhere}; --include-prompts takes it as it is", *notes]))
    notes += logs.put(run_dir / "logs", folder / "logs", names)
    notes += machine.put(run_dir, folder, names)
    checked, same = _checked(journal)
    storage = DiskStorage(journal)
    with ReadingProgress(storage, "summing up") as seen:
        places = beginnings(storage)[0] or [all_of(storage)]
        told = summary.read(Excerpt(storage, places[0]).records(), seen)
    how = f"redacted: {KEPT}; {SCHEMES[taken.scheme]}" if taken.scheme else AS_IT_IS
    lines = summary.text(told, journal, [how, *notes], checked)
    (folder / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    contents = {
        "made_by": versions(),
        "schema_version": SCHEMA_VERSION,
        "decision_version": DECISION_VERSION,
        "redacted": bool(taken.scheme),
        "journal": asdict(taken),
        "replays": same,
        "replay": checked,
        "notes": notes,
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
    }
    (folder / "contents.json").write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return contents


def _checked(journal: Path) -> tuple[str, bool]:
    """Whether the archive's journal replays, in words."""
    try:
        verdict = replay_directory(str(journal))
    except (Refused, Unreadable, JournalError, msgspec.MsgspecError, OSError, ValueError) as error:
        return f"it was not replayed to its end: {_without(in_words(error), str(journal.parent))}", False
    if verdict.divergence is not None:
        return f"replay check differs: {divergence_in_words(verdict.divergence)}", False
    counts = verdict.counts
    if verdict.damage is not None and not counts.records:
        return f"nothing was replayed, it is damaged: {_without(in_words(verdict.damage), str(journal.parent))}", False
    return (
        f"replay check reproduced its {counts.records} records, {counts.steps} steps and {counts.decisions} decisions",
        True,
    )


def _without(text: str, place: str) -> str:
    """A text that does not name where the archive's files stand meanwhile."""
    return text.replace(f"{place}{os.sep}", "") if place else text


def pack(folder: Path, target: Path, name: str) -> int:
    """Write the folder as a `.tar.zst`, readable by its owner alone; returns its bytes. Raises OutputLost."""
    with to_file(target, private=True) as file:
        packed = zstandard.ZstdCompressor(level=LEVEL).stream_writer(file, closefd=False)
        with packed, tarfile.open(fileobj=packed, mode="w|") as archive:
            archive.add(folder, name, filter=_anonymous)
        return packed.tell()


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _target(output: str, run_dir: Path, name: str) -> Path:
    target = Path(output or f"{name}.tar.zst").absolute()
    if target.is_dir():
        target /= f"{name}.tar.zst"
    places = [target.parent.resolve(), Path(os.path.realpath(target)).parent]
    if any(run_dir.resolve() in (place, *place.parents) for place in places):
        raise BadPlace(f"{target} lies in the run directory, which is never written to; choose another place with -o")
    suffix_of(target, frozenset({".zst"}))
    if not target.parent.is_dir():
        raise BadPlace(f"{target.parent} is no directory")
    if result_files.is_regular(target) and not os.access(target.parent, os.W_OK | os.X_OK):
        raise BadPlace(f"no file can be made in {target.parent}: {os.strerror(EACCES)}")
    return target


def _bytes(text: str) -> int:
    digits = text.rstrip("kKmMgGiIbB")
    unit = text[len(digits) :].lower()
    unit = "" if unit == "b" else unit
    if not digits.isdecimal() or len(digits) > 12 or unit not in UNITS or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write one like 256MiB")
    return int(digits) * UNITS[unit]


def _parser() -> argparse.ArgumentParser:
    parser = reading_parser("incident", "Pack journal, logs, metrics and versions of a run, without its prompts.")
    parser.add_argument("directory", metavar="RUN_DIR", help="a run directory, of a live daemon or a dead one")
    parser.add_argument("-o", "--output", default="", metavar="FILE", help="default: incident-TIME.tar.zst, here")
    parser.add_argument("--include-prompts", action="store_true", help="take everything as it is: nothing is redacted")
    parser.add_argument("--last", type=_bytes, default=256 << 20, metavar="SIZE", help="of the journal; default 256MiB")
    add_json(parser, "print the list of contents as one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    """`bandmaster incident`."""
    options = _parser().parse_args(argv)
    return ended("incident", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    run_dir = Path(options.directory)
    name = f"incident-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    target = _target(options.output, run_dir, name)
    beside = target.parent if result_files.is_regular(target) else None  # a device's folder is no place for files
    place = ""
    try:
        with tempfile.TemporaryDirectory(prefix=".incident-", dir=beside) as place:
            folder = Path(place) / name
            folder.mkdir()
            contents = gather(run_dir, folder, options.last, None if options.include_prompts else fresh_names())
            size = pack(folder, target, name)
    except (JournalError, msgspec.MsgspecError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EFBIG):
            raise OutputLost(f"{target} cannot be written: {os.strerror(error.errno)}") from error
        raise Unreadable(_without(in_words(error), place)) from error
    # An archive that goes to standard output stays one: what is told about it goes beside.
    with redirect_stdout(sys.stderr) if result_files.is_standard_output(target) else nullcontext():
        document = contents | {"archive": str(target), "archive_bytes": size}
        tell(options.json, lambda: document, lambda: _show(contents, target, size))
    if contents["journal"]["damaged"]:
        return DAMAGED
    return DONE if contents["replays"] else NO


def _show(contents: dict[str, Any], target: Path, size: int) -> None:
    taken = contents["journal"]
    span = f"records {taken['first_sequence']:,} to {taken['last_sequence']:,}"
    print(f"{target}: {size:,} bytes, {span if taken['records'] else 'no record in front of the damage'}")
    print(f"redacted: {KEPT}" if contents["redacted"] else AS_IT_IS)
    print(contents["replay"])
    for note in contents["notes"]:
        print(f"note: {note}")


if __name__ == "__main__":
    raise SystemExit(main())
