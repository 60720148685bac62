"""One logical chain and one mirror, stepped together: every op reaches the mirror as a rank would get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from allocator.capacity import Demand, Extents
from allocator.checks import STRICT, Checks
from allocator.columns import Int32s
from allocator.errors import InvariantBroken
from allocator.geometry import Geometry
from allocator.logical.chain import LogicalChain
from allocator.logical.mirror import LogicalMirror
from allocator.ops import Op
from tests.allocator.shapes import hybrid_geometry, stage_of

Ids = Int32s | None


class LogicalWorld:
    """State, one window and full attention (bands 0, 1, 2) unless a geometry is given; all checks on."""

    def __init__(self, geometry: Geometry | None = None) -> None:
        self.geometry = geometry or hybrid_geometry(stage_of(512, 8, (8, 4, 8)), pages=24, slots=6)
        self.chain = LogicalChain(self.geometry, Checks(STRICT))
        self.mirror = LogicalMirror(self.geometry, Checks(STRICT))
        self.seq = 0
        self.ops: list[Op] = []
        self.released: list[int] = []

    def take(
        self, demand: Demand, bound: Sequence[Ids] | None = None, onto: Sequence[Ids] | None = None
    ) -> tuple[Int32s, ...]:
        """Takes in the step being formed; the ids per band."""
        taken = self.chain.take(demand, bound, onto)
        self.ops.append(taken.op)
        return taken.ids

    def free(self, *parts: Ids) -> list[list[int]]:
        """Frees in the step being formed; the ids that ranks hear of, per part."""
        op = self.chain.free(parts)
        self.ops.append(op)
        return [np.frombuffer(part.ids, dtype=np.int32).tolist() for part in op.parts]

    def do(self, op: Op) -> None:
        """An op that the chain just decided joins the step."""
        self.ops.append(op)

    def end(self, *uses: int) -> list[tuple[int, list[int]]]:
        """Uses are over; (band, ids) of what that frees."""
        op = self.chain.end_uses(uses)
        self.ops.append(op)
        self.released += uses
        return [(part.band, np.frombuffer(part.ids, dtype=np.int32).tolist()) for part in op.parts]

    def fixed(self, extents: Sequence[tuple[int, int] | None], through_use: int) -> None:
        """The ranks of the only stage report."""
        stages: Extents = (tuple(extents),)
        self.chain.extents_fixed(stages, through_use)

    def step(self) -> bytes:
        """Sends the step; the digest, which the mirror must hold too."""
        self.seq += 1
        digest = self.chain.step_digest(self.seq, self.ops, self.released)
        assert self.mirror.apply_step(self.seq, self.ops, self.released) == digest
        assert self.mirror.live_units() == self.chain.live_units()
        assert self.mirror.open_uses() == self.chain.open_uses()
        self.ops, self.released = [], []
        return digest

    def refuses(self, name: str, call: Callable[[], object], text: str = ".") -> None:
        """The call breaks this invariant, says so, and changes nothing."""
        before = self.chain.state_digest()
        with pytest.raises(InvariantBroken, match=text) as caught:
            call()
        assert caught.value.name == name
        assert self.chain.state_digest() == before
