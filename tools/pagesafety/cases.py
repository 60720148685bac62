"""Cases as files: one JSON object with everything that a run depends on, and what it found.

Owns the format. Must never hold anything but names and numbers, so that a case means the same wherever it is replayed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from tools.pagesafety.faults import Fault
from tools.pagesafety.mutants import MUTANTS, applied
from tools.pagesafety.program import OPERATIONS, Case, Outcome, Program, run_case
from tools.pagesafety.shapes import SHAPES

RANKS_MAX = 8


class BadCase(Exception):
    """A file that is no case."""


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
    """Reads a case; raises BadCase where the file is none, with what it may hold."""
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=SavedCase)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise BadCase(str(error)) from None
    if saved.shape not in SHAPES:
        raise BadCase(f"its shape {saved.shape!r} is none of {', '.join(SHAPES)}")
    if saved.mutant is not None and saved.mutant not in MUTANTS:
        raise BadCase(f"its mutant {saved.mutant!r} is none of {', '.join(MUTANTS)}")
    limits = {"page_size": (1, 4096), "ranks": (1, RANKS_MAX), "seed": (0, 2**31 - 1)}
    for name, (least, most) in limits.items():
        if not least <= getattr(saved, name) <= most:
            raise BadCase(f"its {name} {getattr(saved, name)} must be at least {least} and at most {most}")
    for place, (operation, *numbers) in enumerate(saved.program, 1):
        if operation not in OPERATIONS:
            raise BadCase(f"operation {place}, {operation!r}, is none of {', '.join(OPERATIONS)}")
        if not all(0 <= number < 2**31 for number in numbers):
            raise BadCase(f"operation {place}, {operation}, has numbers {numbers}: they must be from 0 to 2147483647")
    return saved


def run_saved(saved: SavedCase, with_mutant: bool = True) -> Outcome:
    """Runs a saved case, with the deliberate fault it was found with or without."""
    with applied(saved.mutant if with_mutant else None):
        return run_case(saved.case, strict=saved.mutant is None)
