"""Cases: planted faults, each with a server of its own and what must come of it.

Owns the table of cases that `bandmaster faults run --each` goes through, and what is checked beyond what every client
is owed. Must never pass a case whose fault did not strike.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from daemon.faults import DIRECTORY_VARIABLE, VARIABLE
from tools.faults.campaign import Plan, Result, run


class Case(NamedTuple):
    """Specifications that strike together, and events that the daemon's log must then have; `{last}` is a stage."""

    specs: str
    logged: tuple[str, ...]


def cases(stages: int, ranks: int) -> list[Case]:
    """One case for every action, for that many stages and tensor ranks of each."""
    last, peer = stages - 1, ranks - 1
    rank, other = f"rank-{last}-{peer}", f"rank-0-{peer}"
    return [
        Case(f"{rank}:step=40:kill", ("RankLost",)),
        Case(f"{other}:forward=35:stop", ("RankLost",)),
        Case(f"{rank}:forward=30:raise", ("RankLost",)),
        Case(f"{other}:forward=25:oom", ("RankLost",)),
        Case("rank-*:forward=1:delay:ms=0..20:seed=7", ()),
        Case("rank-*:report=1:delay:ms=0..20:seed=8;rank-*:step=1:delay:ms=0..20:seed=9", ()),
        Case(f"{rank}:step=30:drop", ("RankLost",)),
        Case(f"{other}:report=30:drop", ("RankLost",)),
        Case(f"{rank}:report=45:corrupt_logical", ("RankLost",)),
        Case(f"{other}:report=45:corrupt_layout", ("RankLost",) if ranks > 1 else ()),
        Case(f"rank-{last}-0:report=45:corrupt_sampled", ("RankLost",)),
        Case("daemon:journal.write=60:kill", ()),
        Case("daemon:journal.written=61:kill", ()),
        Case("daemon:journal.fsync=5:kill", ()),
        Case("daemon:journal.written=50:stop", ()),
        Case("daemon:journal.fsync=4:fail", ("JournalDegraded",)),
        Case("daemon:journal.write=40:fail", ()),
        Case("daemon:journal.write=40:short", ()),
        Case("daemon:journal.write=40:full", ()),
        Case("daemon:journal.write=40:full:times=1000000", ()),
        Case("daemon:clock=200:skew:ms=3600000;daemon:journal.write=80:kill", ()),
        Case("daemon:clock=1:skew:ms=-3600000", ()),
    ]


def run_case(plan: Plan, case: Case, number: int, reference: list[list[int]], told: Any) -> Result:
    """One case in a run directory of its own below the plan's; its problems are in the result."""
    place = plan.run_dir / f"case-{number}"
    notes = plan.run_dir / f"case-{number}-notes"
    notes.mkdir(parents=True)
    environ = plan.environ | {VARIABLE: case.specs, DIRECTORY_VARIABLE: str(notes)}
    asked = tuple(tuple(tokens) for tokens in reference)
    result = run(replace(plan, run_dir=place, environ=environ, strikes=(), notes=notes, reference=asked), told)
    fired = {json.loads(path.read_text())["spec"] for path in notes.iterdir()}
    result.problems += [f"{spec} did not strike" for spec in case.specs.split(";") if spec not in fired]
    events = logged(place / "logs" / "daemon.log")
    result.problems += [f"the daemon's log has no {event}" for event in case.logged if event not in events]
    return result


def logged(path: Path) -> set[str]:
    """The names of all events in a log of JSON lines."""
    found: set[str] = set()
    for line in path.read_text(errors="replace").splitlines():
        try:
            found.add(str(json.loads(line).get("event", "")))
        except (ValueError, AttributeError):
            continue  # a process that was killed may leave half a line
    return found
