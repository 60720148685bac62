"""Comparing: a recorded run is asked again of the present code, up to the first answer that differs.

Owns the replay of one run and the words for its first divergence. Must never go on behind one: everything later may
differ because of it. The recorded side's id tables are rebuilt from its recorded effects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allocator.checks import WARN, Checks
from allocator.columns import i32
from allocator.effects import Bind, Effect
from allocator.effects import canonical_bytes as effect_bytes
from allocator.errors import AllocatorError
from allocator.geometry import BandGeometry
from allocator.logical.chain import LogicalChain
from allocator.physical.chain import PhysicalChain
from tools.smallscope.copies import clone
from tools.tracing.rows import (
    CALLS,
    Call,
    Launch,
    Row,
    Run,
    Stage,
    answer_of,
    effect_text,
    effects_of,
    op_text,
    ops_of,
    read_argument,
)


@dataclass
class Divergence:
    """The first difference of a run. `where` is the logical chain or a stage; both sides in words."""

    run: str
    line: int
    step: int
    where: str
    op: str
    band: str
    recorded: list[str]
    present: list[str]
    recorded_state: list[str] = field(default_factory=list)
    present_state: list[str] = field(default_factory=list)
    state_before: list[str] = field(default_factory=list)


class RunReplay:
    """One run on the present code: give it row after row; the first divergence, or None."""

    def __init__(self, run: Run) -> None:
        self.name = f"{run.shape} page size {run.page_size} seed {run.seed}"
        self.steps = 0
        geometry = run.geometry
        self._bands = geometry.stages[0].bands
        self._geometry = geometry
        self._logical = LogicalChain(geometry, Checks(WARN))
        self._chains = [PhysicalChain(geometry, stage, Checks(WARN)) for stage in range(len(geometry.stages))]
        self._tables: list[list[dict[int, int]]] = [[{} for _ in self._bands] for _ in geometry.stages]

    def feed(self, line: int, row: Row) -> Divergence | None:
        """Asks one recorded thing again."""
        if isinstance(row, Call):
            return self._call(line, row)
        if isinstance(row, Stage):
            return self._stage(line, row)
        assert isinstance(row, Launch), "a run begins its own replay"
        return self._launch(line, row)

    # --- the logical chain -----------------------------------------------------------------------------------------

    def _call(self, line: int, row: Call) -> Divergence | None:
        kinds = CALLS[row.name]
        arguments = [read_argument(kind, value) for kind, value in zip(kinds, row.arguments, strict=False)]
        before = self._logical.live_units()
        try:
            answer = answer_of(getattr(self._logical, row.name)(*arguments))
        except AllocatorError as error:
            refused = type(error).__name__ == "CapacityRefused"
            answer = f"refused: {error}" if refused else f"{type(error).__name__}: {error}"
        if answer == row.answer:
            return None
        state = [f"live units {list(before)}, quarantined {list(self._logical.quarantined())}"]
        words = f"{row.name}({', '.join(map(str, row.arguments))})"
        return Divergence(
            self.name, line, self.steps + 1, "logical chain", words, "", [str(row.answer)], [str(answer)], [], [], state
        )

    # --- a stage ---------------------------------------------------------------------------------------------------

    def _stage(self, line: int, row: Stage) -> Divergence | None:
        chain, ops = self._chains[row.stage], ops_of(row.ops)
        self.steps = row.seq
        kept = clone(chain)
        recorded = effects_of(row.effects)
        state_before = self._state(chain)
        failure = ""
        present: list[Effect] = []
        layout = b""
        try:
            chain.begin_step(row.seq, row.processed, row.released)
            present = chain.apply(ops)
            layout = chain.end_step()
        except (AllocatorError, AssertionError) as error:
            failure = f"{type(error).__name__}: {error}"
        self._follow(row.stage, recorded)
        if not failure and effect_bytes(present) == row.effects and layout == row.layout:
            return None
        at, op = _first_difference(kept, row, recorded, present)
        now = [self._words(effect) for effect in present[at : at + 3]] or ["nothing more"]
        band = next((getattr(e[at], "band", -1) for e in (recorded, present) if at < len(e)), -1)
        divergence = Divergence(
            self.name,
            line,
            row.seq,
            f"stage {row.stage}",
            op,
            self._bands[band].name if band >= 0 else "",
            [self._words(effect) for effect in recorded[at : at + 3]] or ["nothing more"],
            [failure] if failure else now,
            self._recorded_state(row),
            [] if failure else self._state(chain),
            state_before,
        )
        if not failure and recorded == present:
            divergence.recorded, divergence.present = [f"layout {row.layout.hex()}"], [f"layout {layout.hex()}"]
        return divergence

    def _launch(self, line: int, row: Launch) -> Divergence | None:
        chain = self._chains[row.stage]
        writes = {b: None if ids is None else np.array(ids, dtype=np.int32) for b, ids in row.writes.items()}
        state_before = self._state(chain)
        try:
            waits = chain.launched(row.seq, writes)
        except (AllocatorError, AssertionError) as error:
            words = [f"{type(error).__name__}: {error}"]
        else:
            if effect_bytes(waits) == row.waits:
                return None
            words = [self._words(effect) for effect in waits] or ["no wait"]
        recorded = [self._words(effect) for effect in effects_of(row.waits)] or ["no wait"]
        where = f"stage {row.stage}"
        return Divergence(self.name, line, row.seq, where, "launch", "", recorded, words, [], [], state_before)

    # --- words -----------------------------------------------------------------------------------------------------

    def _words(self, effect: Effect) -> str:
        return effect_text(effect, self._bands)

    def _follow(self, stage: int, effects: list[Effect]) -> None:
        """The recorded side's id tables."""
        for effect in effects:
            if isinstance(effect, Bind):
                table = self._tables[stage][effect.band]
                resting = self._chains[stage].resting_unit(effect.band)
                for virtual, unit in zip(i32(effect.virtual).tolist(), i32(effect.physical).tolist(), strict=True):
                    table[virtual] = unit
                    if unit == resting:
                        del table[virtual]

    def _recorded_state(self, row: Stage) -> list[str]:
        counts = np.array(row.counts).reshape(-1, 4)
        tables = self._tables[row.stage]
        return [_band_text(*each) for each in zip(self._bands, row.spans, counts.tolist(), tables, strict=True)]

    def _state(self, chain: PhysicalChain) -> list[str]:
        counts = chain.band_counts().reshape(-1, 4).tolist()
        tables = []
        for band, info in enumerate(self._bands):
            most = self._geometry.virtual_slots if info.kind == "state" else self._geometry.virtual_pages
            ids = np.arange(1, most + 1, dtype=np.int32)
            units, resting = chain.physical(band, ids).tolist(), chain.resting_unit(band)
            tables.append({v: u for v, u in zip(ids.tolist(), units, strict=True) if u != resting})
        return [_band_text(*each) for each in zip(self._bands, chain.spans(), counts, tables, strict=True)]


def _band_text(info: BandGeometry, span: Any, counts: list[int], table: dict[int, int]) -> str:
    live, hole, pending, beyond = counts
    where = "no span" if span is None else f"bytes {span[0]} to {span[1]}"
    units = " ".join(f"{virtual}@{unit}" for unit, virtual in sorted((u, v) for v, u in table.items()))
    return f"{info.name}: {where}, {live} live, {hole} holes, {pending} pending, {beyond} beyond; id@unit {units}"


def _first_difference(
    before: PhysicalChain, row: Stage, recorded: list[Effect], present: list[Effect]
) -> tuple[int, str]:
    """The index of the first different effect, and the op that returned it in the present code."""
    at = 0
    while at < min(len(recorded), len(present)) and recorded[at] == present[at]:
        at += 1
    ops = ops_of(row.ops)
    for number in range(len(ops)):
        trial = clone(before)
        try:
            trial.begin_step(row.seq, row.processed, row.released)
            returned = trial.apply(ops[: number + 1])
        except (AllocatorError, AssertionError):
            return at, op_text(ops[number])
        if len(returned) > at:
            return at, op_text(ops[number])
    return at, op_text(ops[-1]) if ops else "no op"
