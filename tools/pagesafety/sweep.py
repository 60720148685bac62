"""Sweeps: many cases over processes, in an order that does not depend on how many.

Owns how seeds, shapes, page sizes and deliberate faults become runs. Must never keep what a run held: only figures and
the cases that failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from tools.pagesafety.cases import Found
from tools.pagesafety.mutants import MUTANTS, applied
from tools.pagesafety.program import Case, Outcome, random_case, run_case
from tools.pagesafety.shrink import shrink

STRICT_EVERY = 4  # every so many seeds the chains also recount themselves after each step
PAGE_SIZES = (1, 16, 64)


class RunSpec(NamedTuple):
    """One run of a sweep."""

    shape: str
    page_size: int
    seed: int
    ops: int
    ranks: int
    device: str = "modeled"


class RunDone(NamedTuple):
    """What it found, what happened in it, and how long it took."""

    spec: RunSpec
    found: Found | None
    figures: dict[str, int]
    seconds: float


class HuntSpec(NamedTuple):
    """The hunt for one deliberate fault, over at most so many seeds on every shape."""

    mutant: str
    seeds: int
    ops: int
    ranks: int
    minimize: bool


class HuntDone(NamedTuple):
    """The case that caught it (None: none did), after how many seeds and runs, and what else was seen before."""

    spec: HuntSpec
    found: Found | None
    seeds: int
    runs: int
    others: tuple[str, ...]
    seconds: float


def run_one(spec: RunSpec) -> RunDone:
    """One run."""
    began = time.perf_counter()
    case = random_case(spec.shape, spec.page_size, spec.seed, spec.ops, spec.ranks)
    strict = spec.seed % STRICT_EVERY == 0
    outcome = _runner(spec.device, strict)(case)
    found = Found(case, None, outcome.fault) if outcome.fault is not None else None
    return RunDone(spec, found, outcome.figures, time.perf_counter() - began)


def shrink_one(done: RunDone) -> Found:
    """The smallest case of a run that failed."""
    assert done.found is not None
    return minimized(done.found, _runner(done.spec.device, done.spec.seed % STRICT_EVERY == 0))


def hunt_one(spec: HuntSpec) -> HuntDone:
    """Seed after seed, on every shape, until a check that is about the fault sees it."""
    began = time.perf_counter()
    others: list[str] = []
    runs = 0
    with applied(spec.mutant):
        for seed in range(spec.seeds):
            for shape in MUTANTS[spec.mutant].shapes:
                case = random_case(shape, PAGE_SIZES[seed % len(PAGE_SIZES)], seed, spec.ops, spec.ranks)
                fault = run_case(case, strict=False).fault
                runs += 1
                if fault is None:
                    continue
                if fault.check in MUTANTS[spec.mutant].checks:
                    found = Found(case, spec.mutant, fault)
                    if spec.minimize:
                        found = minimized(found, _runner("modeled", strict=False))
                    return HuntDone(spec, found, seed + 1, runs, tuple(others), time.perf_counter() - began)
                if fault.check not in others:
                    others.append(fault.check)
    return HuntDone(spec, None, spec.seeds, runs, tuple(others), time.perf_counter() - began)


def _runner(device: str, strict: bool) -> Callable[[Case], Outcome]:
    """How a case is run: over modeled devices, or beside them on the streams of a GPU too."""
    if device == "modeled":
        return lambda case: run_case(case, strict)
    from tools.pagesafety.streamed_device import UNIT_SCALE, StreamedDevice

    return lambda case: run_case(case, strict, StreamedDevice, UNIT_SCALE)


def minimized(found: Found, run: Callable[[Case], Outcome]) -> Found:
    """The smallest case found that fails by the same check; the deliberate fault, if any, is applied already."""
    check = found.fault.check

    def failed(case: Case) -> str | None:
        fault = run(case).fault
        return fault.check if fault else None

    short = found.case._replace(program=found.case.program[: found.fault.at + 1])
    small = shrink(short if failed(short) == check else found.case, check, failed)
    fault = run(small).fault
    assert fault is not None, "what was shrunk still fails"
    assert fault.check == check
    return Found(small, found.mutant, fault)
