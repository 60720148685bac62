"""Answer: reads a journal, replays it without and with the changes, and runs it for real where that is asked.

Owns the order of work and the notes. Must never write into the journal's directory. Invariant: what replays take for
the time of a forward is measured, in the recorded run, or, where the machine was another one by then, in the rerun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
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
from tools.whatif.doubts import doubts, downtime, other_pace
from tools.whatif.errors import WhatIfError
from tools.whatif.pace import Pace, Samples, Work
from tools.whatif.recorded import Recorded, read_journal
from tools.whatif.rerun import Run, run_all, sendings, settings_for
from tools.whatif.rows import CHANGED, PACED, RECORDED, RERUN, UNCHANGED
from tools.whatif.show import document
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


class Real(NamedTuple):
    """A run for real: its figures, the pace of its forwards and their mean work, and what is to be said of it."""

    figures: Figures
    pace: Pace
    work: Work
    notes: list[str]


@dataclass(slots=True)
class Prediction:
    """What the journal says of one question, before anything runs for real."""

    asked: Asked
    arena_bytes: int  # with the changes
    runs: dict[str, Figures]
    notes: list[str]


class Study:
    """A journal that was read, to be asked one or several questions. One at a time: traffic has one reader."""

    def __init__(self, storage: DiskStorage, traffic: Traffic, replays: int, progress: Progress) -> None:
        found = read_journal(storage, traffic)
        assert found.opened is not None, "a journal without a life is refused"
        self.found, self._replays, self._progress = found, replays, progress
        self.before = settings_of(found.opened.settings, found.opened.core)
        self.arena_bytes = arena_bytes_of(found.geometries[-1])
        self.pace = fitted(found.samples)
        self._unchanged: tuple[Figures, list[str]] | None = None

    def predict(self, changes: list[Change], real: bool) -> Prediction:
        """The replays of one question; `real`: it must be one that a server can be started with."""
        found = self.found
        assert found.facts is not None, "a journal without an epoch is refused"
        after = changed_settings(self.before, changes, self.arena_bytes)
        asked = Asked(found, self.before, after, changes, self._replays)
        arena_after = arena_bytes_of(asked.made(True).geometry(found.geometries[-1], found.facts))
        if real:
            check_servable(arena_after)
        runs, notes = {RECORDED: found.account.figures()}, list(found.notes)
        if self._unchanged is None:
            self._unchanged = replay(asked, UNCHANGED, [self.pace], self._progress)
        runs[UNCHANGED], told = self._unchanged
        notes += told
        if changes:
            runs[CHANGED], told = replay(asked, CHANGED, [self.pace], self._progress)
            notes += told
        return Prediction(asked, arena_after, runs, notes + downtime(found))

    def conclude(self, directory: str, prediction: Prediction, reals: list[Real]) -> dict[str, Any]:
        """The document of one question, with what was run for real."""
        asked, runs, notes = prediction.asked, dict(prediction.runs), list(prediction.notes)
        paces = {RECORDED: self.pace}
        if reals:
            paces |= {RERUN if not at else f"{RERUN} {at + 1}": real.pace for at, real in enumerate(reals)}
            runs[RERUN] = together([real.figures for real in reals])
            runs[PACED], _ = replay(asked, PACED, [real.pace for real in reals], self._progress)
            notes += dict.fromkeys(note for real in reals for note in real.notes)
            notes += other_pace(self.pace, [(real.pace, real.work) for real in reals])
        facts = {
            "lives": self.found.lives,
            "epochs": self.found.epochs,
            "arena_bytes": {"recorded": self.arena_bytes, "changed": prediction.arena_bytes},
            "replays": self._replays,
            "reruns": len(reals),
        }
        changes = [str(one) for one in asked.changes]
        return document(directory, changes, facts, paces, runs, doubts(runs, paces) + notes)


def answer(
    directory: str, storage: DiskStorage, changes: list[Change], replays: int, real: bool, progress: Progress
) -> dict[str, Any]:
    """The document of one question. Raises WhatIfError, Foreign, JournalError, ServerFailed."""
    with Traffic() as traffic:
        study = Study(storage, traffic, replays, progress)
        prediction = study.predict(changes, real)
        return study.conclude(directory, prediction, run_for_real([prediction])[0] if real else [])


def fitted(samples: Samples) -> Pace:
    """The pace of a run's forwards; raises WhatIfError where it had none."""
    try:
        return samples.fit()
    except ValueError as error:
        raise WhatIfError(f"{error}: without one, nothing says how long forwards take") from error


def replay(asked: Asked, name: str, paces: list[Pace], progress: Progress) -> tuple[Figures, list[str]]:
    """The figures of as many replays of one kind as are asked, together, each at one of the paces; and notes."""
    traffic, made, notes = asked.found.traffic, asked.made(name != UNCHANGED), list[str]()
    made_up, drawn = 0, list[Figures]()
    for number in range(asked.replays):
        world = World(traffic, made, paces[number % len(paces)], seed=number + 1 if asked.replays > 1 else 0)
        with progress(f"replaying, {name}, {number + 1} of {asked.replays}") as tell:
            drawn.append(world.run(tell).figures())
        made_up = max(made_up, world.made_up_tokens)
    if made_up:
        notes.append(
            f"{name}: {made_up:,d} output tokens are made up, since the recorded run did not get that far: such "
            f"outputs are taken to have {traffic.share:.0%} of what they may have, as the others had"
        )
    stuck = max(one["live"] for one in drawn)
    if stuck and traffic.complete:
        notes.append(f"{name}: {stuck} requests can never go on; the figures stop there")
    return together(drawn), notes


def run_for_real(predictions: list[Prediction], reruns: int = 1, together: int = 1) -> list[list[Real]]:
    """So many reruns of each question, as their own journals tell them."""
    traffic = predictions[0].asked.found.traffic
    requests = sendings(traffic)
    until_ns = NEVER if traffic.complete else traffic.ended_ns - traffic.first_ns
    seconds = requests[-1].at_ns / 1e9
    print(f"running for real: {seconds:,.0f} s of arrivals, and what is left then", file=sys.stderr)
    seen: list[list[Real]] = [[] for _ in predictions]
    runs = [
        Run(settings_for(one.asked.after, one.arena_bytes), requests, until_ns, partial(_keep, seen[place], one))
        for _ in range(reruns)
        for place, one in enumerate(predictions)
    ]
    run_all(runs, together)
    return seen


def _keep(reals: list[Real], prediction: Prediction, made: Recorded) -> None:
    reals.append(_real(prediction, made))


def _real(prediction: Prediction, made: Recorded) -> Real:
    arena_bytes, notes = prediction.arena_bytes, []
    there = arena_bytes_of(made.geometries[-1])
    if there != arena_bytes:
        notes.append(f"the rerun's arena has {there:,d} bytes, not {arena_bytes:,d}")
    other, of = other_outputs(prediction.asked.found.traffic, made)
    if other:
        notes.append(f"{other:,d} of {of:,d} outputs of the rerun have another length than the recorded ones")
    return Real(made.account.figures(), fitted(made.samples), made.samples.work(), notes)


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
