"""Answer: reads a journal, replays it without and with the changes, and runs it for real where that is asked.

Owns the order of work and the notes. Must never write into the journal's directory. Invariant: what replays take for
the time of a forward is measured, in the recorded run, or, where the machine was another one by then, in the rerun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from allocator.geometry import Geometry
from daemon.core.limits import CoreConfig
from daemon.settings_table import Settings
from ipc.messages import ModelFacts
from journal.storage import DiskStorage
from tools.whatif.account import Figures, together
from tools.whatif.changes import (
    Change,
    arena_bytes_of,
    changed_core,
    changed_geometry,
    changed_settings,
    check_servable,
    settings_of,
)
from tools.whatif.doubts import doubts, downtime
from tools.whatif.errors import WhatIfError
from tools.whatif.pace import Pace, Samples
from tools.whatif.recorded import Recorded, read_journal
from tools.whatif.rerun import rerun, sendings, settings_for
from tools.whatif.show import CHANGED, PACED, RECORDED, RERUN, UNCHANGED, document
from tools.whatif.traffic import NEVER, WHOLE, Traffic, id_of
from tools.whatif.world import Made, World

Progress = Callable[[str], AbstractContextManager[Callable[[float], None]]]
"""A bar with this text; what it gives is told which part is done."""


class Asked(NamedTuple):
    """What a journal is asked: the settings of its newest life, those with the changes, and how many replays."""

    found: Recorded
    before: Settings
    after: Settings
    changes: list[Change]
    replays: int

    def made(self, changed: bool) -> Made:
        """How the lives of a replay are set up."""
        after = self.after if changed else self.before

        def core(recorded: CoreConfig) -> CoreConfig:
            return changed_core(recorded, self.before, after)

        def geometry(recorded: Geometry, facts: ModelFacts) -> Geometry:
            length = min(after.max_model_len or facts.max_model_len, facts.max_model_len)
            return changed_geometry(recorded, self.before, after, length)

        return Made(core, geometry)


def answer(
    directory: str, storage: DiskStorage, changes: list[Change], replays: int, real: bool, progress: Progress
) -> dict[str, Any]:
    """The document of one question. Raises WhatIfError, Foreign, JournalError, ServerFailed."""
    with Traffic() as traffic:
        found = read_journal(storage, traffic)
        assert found.opened is not None, "a journal without a life is refused"
        assert found.facts is not None, "a journal without an epoch is refused"
        before = settings_of(found.opened.settings, found.opened.core)
        arena_bytes = arena_bytes_of(found.geometries[-1])
        asked = Asked(found, before, changed_settings(before, changes, arena_bytes), changes, replays)
        arena_after = arena_bytes_of(asked.made(True).geometry(found.geometries[-1], found.facts))
        if real:
            check_servable(arena_after)
        pace, paces = fitted(found.samples), dict[str, Pace]()
        paces[RECORDED] = pace
        runs, notes = {RECORDED: found.account.figures()}, list(found.notes)
        for name in [UNCHANGED, *([CHANGED] if changes else [])]:
            runs[name] = replay(asked, name, pace, notes, progress)
        notes += downtime(found)
        if real:
            runs[RERUN], paces[RERUN] = run_for_real(asked, arena_after, notes)
            runs[PACED] = replay(asked, PACED, paces[RERUN], notes, progress)
        notes[:0] = doubts(runs, paces)
        facts = {
            "lives": found.lives,
            "epochs": found.epochs,
            "arena_bytes": {"recorded": arena_bytes, "changed": arena_after},
            "replays": replays,
        }
    return document(directory, [str(one) for one in changes], facts, paces, runs, notes)


def fitted(samples: Samples) -> Pace:
    """The pace of a run's forwards; raises WhatIfError where it had none."""
    try:
        return samples.fit()
    except ValueError as error:
        raise WhatIfError(f"{error}: without one, nothing says how long forwards take") from error


def replay(asked: Asked, name: str, pace: Pace, notes: list[str], progress: Progress) -> Figures:
    """The figures of as many replays of one kind as are asked, together."""
    traffic, made = asked.found.traffic, asked.made(name != UNCHANGED)
    made_up, drawn = 0, list[Figures]()
    for number in range(asked.replays):
        world = World(traffic, made, pace, seed=number + 1 if asked.replays > 1 else 0)
        with progress(f"replaying, {name}, {number + 1} of {asked.replays}") as tell:
            drawn.append(world.run(tell).figures())
        made_up = max(made_up, world.made_up_tokens)
    if made_up and name != PACED:
        notes.append(
            f"{name}: {made_up:,d} output tokens are made up, since the recorded run did not get that far: such "
            f"outputs are taken to have {traffic.share:.0%} of what they may have, as the others had"
        )
    stuck = max(one["live"] for one in drawn)
    if stuck and traffic.complete:
        notes.append(f"{name}: {stuck} requests can never go on; the figures stop there")
    return together(drawn)


def run_for_real(asked: Asked, arena_bytes: int, notes: list[str]) -> tuple[Figures, Pace]:
    """The figures of a rerun and the pace of its forwards, by its own journal."""
    traffic, seen = asked.found.traffic, list[tuple[Figures, Pace]]()
    requests = sendings(traffic)
    until_ns = NEVER if traffic.complete else traffic.ended_ns - traffic.first_ns
    print(f"running for real: {requests[-1].at_ns / 1e9:,.0f} s of arrivals, and what is left then", file=sys.stderr)

    def use(made: Recorded) -> None:
        seen.append((made.account.figures(), fitted(made.samples)))
        there = arena_bytes_of(made.geometries[-1])
        if there != arena_bytes:
            notes.append(f"the rerun's arena has {there:,d} bytes, not {arena_bytes:,d}")
        other, of = other_outputs(traffic, made)
        if other:
            notes.append(f"{other:,d} of {of:,d} outputs of the rerun have another length than the recorded ones")

    rerun(settings_for(asked.after, arena_bytes), requests, until_ns, use)
    return seen[0]


def other_outputs(recorded: Traffic, again: Recorded) -> tuple[int, int]:
    """How many outputs that are whole in both runs came out with another length, and of how many."""
    assert again.names is not None, "a rerun is read with its names"
    other = of = 0
    for arrival, first in enumerate(recorded.first_slot):
        there = again.names.get(id_of(arrival))
        if there is None:
            continue
        end = recorded.first_slot[arrival + 1] if arrival + 1 < len(recorded.first_slot) else len(recorded.offset)
        for choice in range(end - first):
            slot, now = first + choice, again.traffic.first_slot[there] + choice
            if recorded.state[slot] == again.traffic.state[now] == WHOLE:
                of += 1
                other += recorded.said(slot) != again.traffic.said(now)
    return other, of
