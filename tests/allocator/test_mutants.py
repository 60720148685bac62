"""Deliberate faults that the page-safety harness must catch: what shows that the harness can fail.

One stored, minimized case for each (`cases/`); `bandmaster stress --mutants --minimize --out tests/allocator/cases`
hunts them anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.pagesafety.cases import load, run_saved
from tools.pagesafety.mutants import MUTANTS, applied

CASES = Path(__file__).parent / "cases"


def test_every_mutant_has_its_case_and_says_what_it_breaks() -> None:
    """At least 25 faults, each with a stored case by a check that is about it, and no case without its fault."""
    assert len(MUTANTS) >= 25
    assert {path.stem for path in CASES.glob("*.json")} == set(MUTANTS)
    for name, mutant in MUTANTS.items():
        saved = load(CASES / f"{name}.json")
        assert saved.mutant == name
        assert saved.fault is not None
        assert saved.fault.check in mutant.checks
        assert mutant.breaks.endswith(".")
        assert mutant.seeds <= 40


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_harness_catches(name: str) -> None:
    """With the fault, its case fails by the check that is about it; without it, the same case is clean."""
    saved = load(CASES / f"{name}.json")
    fault = run_saved(saved).fault
    assert fault is not None
    assert fault.check in MUTANTS[name].checks
    assert run_saved(saved, with_mutant=False).fault is None


def test_a_fault_is_gone_afterwards() -> None:
    """Leaving `applied` puts everything back, whether or not something was raised inside."""
    saved = load(CASES / "skip_zeroing.json")
    with pytest.raises(KeyError), applied("skip_zeroing"):
        raise KeyError
    assert run_saved(saved, with_mutant=False).fault is None
