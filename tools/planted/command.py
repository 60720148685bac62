"""`bandmaster replay plant`: makes a journal for each planted fault, and says what replay names of it.

    bandmaster replay plant [--only NAME] [--keep DIR] [--json]

Owns the judging: the first wrong step, the op and a request that it concerns must be named, or for damage the file, the
byte, the record and the rule. Exit code 0: all were named; 1: one was missed, or a sound journal was not reproduced, or
the journals or what is told of them could not be written; 2: usage.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from journal.divergence import requests_in_words
from journal.replay import Verdict
from tools.ends import DONE, NO, Failed, ended
from tools.output import because, tell
from tools.planted import cores, files, ranks, records
from tools.planted.scene import Fault, Scene, Truth
from tools.replay import replay_directory
from tools.tables import print_table

FAULTS: dict[str, type[Fault]] = {fault.name: fault for room in (ranks, cores, records, files) for fault in room.FAULTS}
NOTHING = files.Nothing.name


def judge(name: str, directory: Path, processes: int = 1) -> dict[str, Any]:
    """The row of one fault; `missed` says what was not named, empty: all of it was."""
    fault = files.Nothing() if name == NOTHING else FAULTS[name]()
    began = time.monotonic()
    truth = Scene(fault, directory).make()
    verdict = replay_directory(str(directory), processes=processes)
    found, damage = verdict.divergence, verdict.damage
    said = ""
    if found is not None:
        where = [f"step {found.step}"] if found.step else []
        where += [f"op {found.op}"] if found.op >= 0 else []
        where += [requests_in_words(found.requests)] if found.requests else []
        said = ", ".join([f"sequence {found.sequence}", *where])
    elif damage is not None:
        said = f"{damage.file} at byte {damage.offset}, sequence {damage.sequence}: {damage.rule}"
    return {
        "fault": name,
        "about": fault.about,
        "planted": in_words(truth),
        "named": said or "; ".join(verdict.notes),
        "what": found.what if found is not None else str(damage or ""),
        "means": found.means if found is not None else "",
        "first_difference": found.path if found is not None else "",
        "missed": missed(fault, truth, verdict),
        "seconds": round(time.monotonic() - began, 2),
    }


def in_words(truth: Truth) -> str:
    """What is false."""
    where = [truth.file] if truth.file else []
    where += [f"byte {truth.offset}"] if truth.offset >= 0 and truth.file else []
    where += [f"sequence {truth.sequence}"] if truth.sequence else []
    where += [f"step {truth.step}"] if truth.step else []
    where += [f"op {truth.op}"] if truth.op >= 0 else []
    where += [f"request {truth.request}"] if truth.request else []
    return ", ".join(where) or "one record"


def missed(fault: Fault, truth: Truth, verdict: Verdict) -> str:
    """What of the truth the verdict does not name."""
    found, damage = verdict.divergence, verdict.damage
    if fault.name == NOTHING:
        return "a sound journal was not reproduced" if found is not None or damage is not None else ""
    if truth.rule and fault.tolerated:
        place = f"{truth.file} at byte {truth.offset}, sequence {truth.sequence}"
        told = any(place in note for note in verdict.notes)
        return "" if told and found is None and damage is None else f"the torn end at {place}"
    if truth.rule:
        if damage is None:
            return "the damage"
        pairs = {"rule": truth.rule, "file": truth.file, "sequence": truth.sequence}
        pairs |= {"offset": truth.offset} if truth.offset > 0 else {}
        lacks = [f"{name} {value}" for name, value in pairs.items() if getattr(damage, name) != value]
        whole = verdict.counts.last_sequence == damage.sequence - 1
        return ", ".join(lacks + ([] if whole else ["that everything in front of it is reproduced"]))
    if found is None:
        return "that anything is wrong"
    lacks = [f"step {truth.step}"] if truth.step and found.step != truth.step else []
    lacks += [f"op {truth.op}"] if truth.op >= 0 and found.op != truth.op else []
    lacks += [f"request {truth.request}"] if truth.request and truth.request not in found.requests else []
    lacks += [f"sequence {truth.sequence}"] if truth.sequence and found.sequence != truth.sequence else []
    return ", ".join(lacks)


def show(rows: list[dict[str, Any]]) -> None:
    """The table, and what was missed."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("fault", "planted at", "replay names", ""):
        table.add_column(name, overflow="fold")
    for row in rows:
        verdict = f"MISSED: {row['missed']}" if row["missed"] else "named"
        table.add_row(row["fault"], row["planted"], row["named"], verdict)
    print_table(Console(), table)
    for row in rows:
        if row["missed"]:
            print(f"MISSED {row['fault']} ({row['about']}): {row['missed']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bandmaster replay plant", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=sorted([*FAULTS, NOTHING]), metavar="NAME", help="one fault of the table")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the journals there, one directory per fault")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    """`bandmaster replay plant`."""
    options = _parser().parse_args(argv)
    return ended("replay plant", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    names = [options.only] if options.only else [NOTHING, *FAULTS]
    with tempfile.TemporaryDirectory(prefix="bandmaster-planted-") as temporary:
        place = options.keep or Path(temporary)
        try:
            rows = [judge(name, place / name) for name in names]
        except OSError as error:
            raise Failed(f"{error.filename or place} cannot be written: {because(error)}") from error
    missing = [row["fault"] for row in rows if row["missed"]]
    tell(options.json, lambda: {"faults": rows, "missed": missing}, lambda: show(rows))
    return NO if missing else DONE


if __name__ == "__main__":
    raise SystemExit(main())
