"""Cases as files: one JSON object with everything that a run depends on, and what it found.

Owns the format. Must never hold anything but names and numbers, so that a case means the same wherever it is replayed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from tools.pagesafety.faults import Fault
from tools.pagesafety.mutants import applied
from tools.pagesafety.program import Case, Outcome, Program, run_case


class SavedFault(msgspec.Struct, frozen=True):
    """The check that saw something, and what it said."""

    check: str
    text: str


class SavedCase(msgspec.Struct, frozen=True):
    """A case with the fault that it shows; `mutant` is the deliberate fault that it was found with, if any."""

    shape: str
    page_size: int
    seed: int
    ranks: int
    program: Program
    mutant: str | None = None
    fault: SavedFault | None = None

    @property
    def case(self) -> Case:
        """What is run."""
        return Case(self.shape, self.page_size, self.seed, self.program, self.ranks)


class Found(NamedTuple):
    """A case that failed."""

    case: Case
    mutant: str | None
    fault: Fault


def save(path: Path, found: Found) -> None:
    """Writes a case that failed."""
    case = found.case
    fault = SavedFault(found.fault.check, found.fault.text)
    saved = SavedCase(case.shape, case.page_size, case.seed, case.ranks, case.program, found.mutant, fault)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(saved) + "\n")


def _text(saved: SavedCase) -> str:
    """JSON with one field, and one operation, a line."""
    fields = []
    for name, value in msgspec.to_builtins(saved).items():
        text = msgspec.json.encode(value).decode()
        if name == "program":
            rows = ",\n".join(f"    {msgspec.json.encode(operation).decode()}" for operation in value)
            text = f"[\n{rows}\n  ]"
        fields.append(f'  "{name}": {text}')
    return "{\n" + ",\n".join(fields) + "\n}"


def load(path: Path) -> SavedCase:
    """Reads a case; raises msgspec.ValidationError where it is none."""
    return msgspec.json.decode(path.read_bytes(), type=SavedCase)


def run_saved(saved: SavedCase, with_mutant: bool = True) -> Outcome:
    """Runs a saved case, with the deliberate fault it was found with or without."""
    with applied(saved.mutant if with_mutant else None):
        return run_case(saved.case, strict=saved.mutant is None)
