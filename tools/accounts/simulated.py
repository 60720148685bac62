"""Simulated: one world from its first request to the verdict about its accounts.

Owns the order: the world runs, then journal, log and scrapes are read as those of any run directory. Must never hand
the check anything that the world knows and a reader of its files does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.accounts.check import Result
from tools.accounts.directory import check_directory
from tools.accounts.world.world import BARE_EACH, FATES, Outcome, Plant, World


class Simulated(NamedTuple):
    """The world's own story, and what the check says."""

    outcome: Outcome
    result: Result


def simulate(
    directory: Path,
    requests: int,
    seed: int = 1,
    fates: Sequence[str] = FATES,
    plant: Plant | None = None,
    progress: Callable[[int], None] | None = None,
    bare_each: int = BARE_EACH,
) -> Simulated:
    """Run a world in a directory that is new or empty, then check it."""
    outcome = World(directory, requests, seed, fates, plant, bare_each).run(progress)
    result = check_directory(str(directory), scrapes=outcome.scrapes)
    for problem in outcome.problems:
        result.findings.add("clients", 0, 0, problem)
    return Simulated(outcome, result)
