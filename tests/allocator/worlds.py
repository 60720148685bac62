"""A driver that runs one logical chain, mirrors and physical chains side by side, over the shapes of `shapes`."""

from __future__ import annotations

from dataclasses import dataclass, field

from allocator.checks import STRICT, Checks
from allocator.effects import Effect
from allocator.logical.chain import LogicalChain
from allocator.logical.mirror import LogicalMirror
from allocator.ops import Flush, Op
from allocator.physical.chain import PhysicalChain
from tests.allocator.shapes import full_geometry, hybrid_geometry, ids, stage_of

__all__ = ["OneBand", "full_geometry", "hybrid_geometry", "ids", "stage_of"]


@dataclass
class OneBand:
    """One logical chain, one mirror and one physical chain over a full-attention band, stepped together."""

    units: int
    seq: int = 0
    processed: int = 0
    in_flight: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.geometry = full_geometry(self.units)
        self.logical = LogicalChain(self.geometry, Checks(STRICT))
        self.mirror = LogicalMirror(self.geometry, Checks(STRICT))
        self.physical = PhysicalChain(self.geometry, 0, Checks(STRICT))
        self._ops: list[Op] = []

    def take(self, pages: int) -> list[int]:
        """Takes pages in the step being formed; their virtual ids."""
        taken = self.logical.take((pages,))
        self._ops.append(taken.op)
        return [int(page) for page in taken.ids[0]]

    def free(self, pages: list[int]) -> None:
        """Frees pages in the step being formed."""
        self._ops.append(self.logical.free([ids(*pages)]))

    def flush(self, moves_max: int = 8) -> None:
        """Asks for a flush in the step being formed."""
        self._ops.append(Flush(moves_max))

    def step(self, writes: list[int] | None = None) -> list[Effect]:
        """Sends the step; with `writes` (maybe empty) it has a forward that writes these pages."""
        self.seq += 1
        ops, self._ops = self._ops, []
        wanted = self.logical.step_digest(self.seq, ops)
        assert self.mirror.apply_step(self.seq, ops) == wanted
        self.physical.begin_step(self.seq, self.processed)
        effects = self.physical.apply(ops)
        self.physical.end_step()
        if writes is not None:
            self.physical.launched(self.seq, {0: ids(*writes)})
            self.in_flight.append(self.seq)
        return effects

    def process(self, forwards: int = 1) -> None:
        """The core consumed the oldest forwards' results; the next step says so."""
        for _ in range(forwards):
            self.processed = self.in_flight.pop(0)

    def where(self, pages: list[int]) -> list[int]:
        """Physical units of virtual pages."""
        return [int(unit) for unit in self.physical.physical(0, ids(*pages))]

    def counts(self) -> dict[str, int]:
        """Units of the band by state."""
        return dict(zip(("live", "hole", "pending", "beyond"), map(int, self.physical.band_counts()), strict=True))
