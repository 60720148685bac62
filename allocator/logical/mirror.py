"""The logical mirror: the logical chain as a rank sees it, rebuilt from the explicit ops of each step.

Owns the rank's own computation of the logical digest. Must never mint an id or answer a capacity question. Invariant:
fed the ops of the same steps, its digest equals the deciding chain's after every step; an op that could not have come
from a correct chain (a live id taken, a free one freed, a held or published one freed or written, a use begun twice)
stops it at that op. Quarantined units are live here: a rank hears of their end only.
"""

from __future__ import annotations

from collections.abc import Sequence

from allocator.checks import Checks, some
from allocator.columns import Int32s
from allocator.geometry import Geometry
from allocator.logical.bands import LogicalBands
from allocator.ops import Op


class LogicalMirror:
    """Applies steps in order from seq 1; every stage's ranks have one, whatever bands their stage stores."""

    def __init__(self, geometry: Geometry, checks: Checks | None = None) -> None:
        self._checks = checks or Checks()
        self._state = LogicalBands(geometry, self._checks)

    def apply_step(self, seq: int, ops: list[Op], released: Sequence[int] = ()) -> bytes:
        """Ends the step's released uses, applies its ops, and returns the chained logical digest (16 bytes).

        Raises InvariantBroken where something does not hold; the mirror is then of no further use.
        """
        for use in released:
            self._state.end_use(use)
        for op in ops:
            self._state.apply(op)
        return self._state.end_step(seq, ops, released)

    def live_units(self) -> tuple[int, ...]:
        """Live units per band, in chain order."""
        return tuple(self._state.counts)

    def live_ids(self, band: int) -> Int32s:
        """Live virtual ids of a band, ascending."""
        return self._state.live_ids(band)

    def open_uses(self) -> tuple[int, ...]:
        """Numbers of the uses that are not over, ascending."""
        return tuple(sorted(self._state.uses.open))

    def check_idle(self) -> None:
        """Nothing is live or in use: raises InvariantBroken naming what leaked."""
        for band, units in enumerate(self._state.counts):
            if units:
                leaked = some(self.live_ids(band))
                self._checks.broken("chain.idle", f"band {self._state.names[band]} still holds {units}: {leaked}")
        if self._state.uses.open:
            self._checks.broken("chain.idle", f"uses {some(self.open_uses())} are still open")
