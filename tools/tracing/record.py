"""Recording: a program of the page-safety harness is run, and what the allocator was asked and answered is written.

Owns the two recorders that stand in for a world's logical chain and for the chain of the first rank of every stage.
Must never change what they pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allocator.columns import Int32s
from allocator.effects import Effect
from allocator.effects import canonical_bytes as effect_bytes
from allocator.errors import CapacityRefused
from allocator.logical.chain import LogicalChain
from allocator.ops import Op
from allocator.ops import canonical_bytes as op_bytes
from allocator.physical.chain import PhysicalChain
from tools.pagesafety.program import make_world, random_case, run_operation
from tools.tracing.rows import CALLS, VERSION, Call, Launch, Row, Run, Stage, answer_of, write_argument

Put = Callable[[Row], None]


def record(shape: str, page_size: int, seed: int, length: int, put: Put) -> None:
    """Runs the program of a seed on one rank per stage and puts the rows of its run."""
    case = random_case(shape, page_size, seed, length, ranks=1)
    world: Any = make_world(case, strict=False)
    put(Run(VERSION, shape, page_size, seed, length, world.geometry))
    world.logical = LogicalRecorder(world.logical, put)
    for number, stage in enumerate(world.fleet.stages):
        stage.ranks[0].chain = StageRecorder(stage.ranks[0].chain, number, put)
    for operation in case.program:
        run_operation(world, operation)
    world.finish()


class LogicalRecorder:
    """A logical chain whose calls of `CALLS` are recorded; everything else is passed on."""

    def __init__(self, chain: LogicalChain, put: Put) -> None:
        self._chain, self._put = chain, put

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._chain, name)
        kinds = CALLS.get(name)
        if kinds is None:
            return value

        def call(*arguments: Any) -> Any:
            given = [write_argument(kind, each) for kind, each in zip(kinds, arguments, strict=False)]
            try:
                answer = value(*arguments)
            except CapacityRefused as error:
                self._put(Call(name, given, f"refused: {error}"))
                raise
            self._put(Call(name, given, answer_of(answer)))
            return answer

        return call


class StageRecorder:
    """A physical chain whose steps and launches are recorded; everything else is passed on."""

    def __init__(self, chain: PhysicalChain, stage: int, put: Put) -> None:
        self._chain, self._number, self._put = chain, stage, put
        self._begun: tuple[int, int, Sequence[int]] = (0, 0, ())
        self._ops: list[Op] = []
        self._effects: list[Effect] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)

    def begin_step(self, seq: int, processed_through: int, released: Sequence[int] = ()) -> None:
        """Passes on."""
        self._begun = seq, processed_through, released
        self._chain.begin_step(seq, processed_through, released)

    def apply(self, ops: list[Op]) -> list[Effect]:
        """Passes on."""
        self._ops = list(ops)
        self._effects = self._chain.apply(ops)
        return self._effects

    def end_step(self) -> bytes:
        """Passes on, and puts the step."""
        layout = self._chain.end_step()
        seq, processed, released = self._begun
        self._put(
            Stage(
                self._number,
                seq,
                processed,
                [int(use) for use in released],
                op_bytes(self._ops),
                effect_bytes(self._effects),
                layout,
                self._chain.spans(),
                [int(count) for count in self._chain.band_counts()],
            )
        )
        return layout

    def launched(self, seq: int, writes: Mapping[int, Int32s | None]) -> list[Effect]:
        """Passes on, and puts the launch."""
        waits = self._chain.launched(seq, writes)
        told = {band: None if ids is None else [int(value) for value in ids] for band, ids in writes.items()}
        self._put(Launch(self._number, seq, told, effect_bytes(waits)))
        return waits
