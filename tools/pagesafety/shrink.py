"""Shrinking: from a program that fails to a smallest one that fails by the same check.

Owns delta debugging over the operations, and then over their numbers. Must never accept a program whose fault is of
another check. Invariant: the result fails, and no single operation can be left out of it.
"""

from __future__ import annotations

from collections.abc import Callable

from tools.pagesafety.program import Case, Program, run_case

RUNS_MAX = 4000


def shrink(case: Case, check: str, run: Callable[[Case], str | None] | None = None) -> Case:
    """The smallest case found whose fault is of `check`; `run` returns the check that a case fails, or None."""
    runs = 0
    fails = run or _check_of

    def still(program: Program) -> bool:
        nonlocal runs
        runs += 1
        return runs <= RUNS_MAX and fails(case._replace(program=program)) == check

    program = _fewer(case.program, still)
    program = _smaller_numbers(program, still)
    program = _fewer(program, still)
    if case.ranks > 1 and fails(case._replace(program=program, ranks=1)) == check:
        case = case._replace(ranks=1)
    return case._replace(program=program)


def _check_of(case: Case) -> str | None:
    fault = run_case(case).fault
    return fault.check if fault else None


def _fewer(program: Program, still: Callable[[Program], bool]) -> Program:
    """Leaves out ever smaller pieces, down to single operations, until none can go."""
    size = max(1, len(program) // 2)
    while program:
        start, shorter = 0, False
        while start < len(program):
            without = program[:start] + program[start + size :]
            if still(without):
                program, shorter = without, True
            else:
                start += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return program


def _smaller_numbers(program: Program, still: Callable[[Program], bool]) -> Program:
    """Zeros and small numbers instead of large ones, where the fault stays."""
    for at in range(len(program)):
        for place in (0, 1):
            name, *numbers = program[at]
            number = numbers[place]
            for smaller in sorted({0, 1, 2, 3, 255, number % 8, number // 10, number // 2} & set(range(number))):
                numbers[place] = smaller
                trial = [*program[:at], (name, numbers[0], numbers[1]), *program[at + 1 :]]
                if still(trial):
                    program = trial
                    break
    return program
