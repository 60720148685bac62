"""Cases: planted faults, each with a server of its own and what must come of it.

Owns the table of cases that `bandmaster faults run --each` goes through, and what is checked beyond what every client
is owed. Must never pass a case whose fault did not strike.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

from daemon.faults import DIRECTORY_VARIABLE, VARIABLE
from tools.faults.campaign import Plan, Result, run


class Case(NamedTuple):
    """Specifications that strike together, texts that the daemon's log must then have, and one that replay must say."""

    specs: str
    logged: tuple[str, ...] = ()
    diverges: str = ""  # what `replay check` names; empty: it reproduces everything


def cases(stages: int, ranks: int) -> list[Case]:
    """One case for every action, for that many stages and tensor ranks of each."""
    last, peer = stages - 1, ranks - 1
    rank, other = f"rank-{last}-{peer}", f"rank-0-{peer}"
    asked = f"asked for by {VARIABLE}"
    layout = (
        Case(f"{other}:report=45:corrupt_layout", ("layout digests differ at step 45",))
        if ranks > 1  # nobody else has that stage's layout: only a replay can tell
        else Case(f"{other}:report=45:corrupt_layout", diverges="the layout digest of stage 0")
    )
    return [
        Case(f"{rank}:step=40:kill", ("was killed by SIGKILL",)),
        Case(f"{other}:forward=35:stop", ("has been silent for",)),
        Case(f"{rank}:forward=30:raise", (f"at step 30: FaultInjected: {asked}",)),
        Case(f"{other}:forward=25:oom", (f"at step 25: MemoryError: {asked}",)),
        Case("rank-*:forward=1:delay:ms=0..20:seed=7"),
        Case("rank-*:report=1:delay:ms=0..20:seed=8;rank-*:step=1:delay:ms=0..20:seed=9"),
        Case(f"{rank}:step=30:drop", ("step 31 of epoch 1 came after step 29",)),
        Case(f"{other}:report=30:drop", ("reported step 31 after step 29",)),
        Case(f"{rank}:report=45:corrupt_logical", ("logical digests differ at step 45",)),
        layout,
        Case(f"rank-{last}-0:report=45:corrupt_sampled", ("sampled digests differ at step 45",)),
        Case("daemon:journal.write=60:kill"),
        Case("daemon:journal.written=61:kill"),
        Case("daemon:journal.fsync=5:kill"),
        Case("daemon:journal.written=50:stop"),
        Case("daemon:journal.fsync=4:fail", (asked,)),
        Case("daemon:journal.write=40:fail", (asked,)),
        Case("daemon:journal.write=40:short"),
        Case("daemon:journal.write=40:full", (asked,)),
        Case("daemon:journal.write=40:full:times=1000000", (asked,)),
        Case("daemon:clock=200:skew:ms=3600000;daemon:journal.write=80:kill"),
        Case("daemon:clock=1:skew:ms=-3600000"),
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
    log = (place / "logs" / "daemon.log").read_text(errors="replace")
    result.problems += [f"the daemon's log does not say {text!r}" for text in case.logged if text not in log]
    result.diverges = case.diverges
    return result
