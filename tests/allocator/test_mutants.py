"""Deliberate faults that the page-safety harness must catch: what shows that the harness can fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from allocator.columns import Int32s
from allocator.errors import AllocatorError
from allocator.physical.band import EndBand
from allocator.physical.compaction import plan_retreat
from allocator.physical.forward_steps import ForwardSteps, PendingBatches
from allocator.physical.ledger import BandLedger
from tests.allocator.harness import Harness, random_program


def skip_the_wait(patch: pytest.MonkeyPatch) -> None:
    """Settles a pending batch without waiting for its forward."""
    patch.setattr(BandLedger, "stream_wait", lambda self, consumer, seq: False)


def free_at_launch(patch: pytest.MonkeyPatch) -> None:
    """A freed unit is a hole at once though a forward in flight may touch it."""
    patch.setattr(ForwardSteps, "newest_in_flight", property(lambda self: 0))


def wait_for_the_oldest(patch: pytest.MonkeyPatch) -> None:
    """Settling waits for one forward too few."""
    settle = PendingBatches.settle

    def early(self: PendingBatches, units: int) -> tuple[int, Int32s]:
        seq, positions = settle(self, units)
        return seq - 1, positions

    patch.setattr(PendingBatches, "settle", early)


def move_written_units(patch: pytest.MonkeyPatch) -> None:
    """A flush moves a unit that an unfinished forward writes."""
    patch.setattr(BandLedger, "written", lambda self, positions: np.zeros(positions.size, dtype=np.bool_))


def reuse_vacated_units(patch: pytest.MonkeyPatch) -> None:
    """A moved-from unit is a hole at once though a forward may still read it."""
    move = EndBand._move

    def forgetful(self: EndBand, sources: Int32s, targets: Int32s) -> list[object]:
        effects = move(self, sources, targets)
        positions = self.ledger.vacated.release_through(2**60)
        if positions is not None:
            self._become_holes(positions)
        return list(effects)

    patch.setattr(EndBand, "_move", forgetful)


def return_one_step_early(patch: pytest.MonkeyPatch) -> None:
    """Processing a forward also returns what pends behind the next one."""
    progress = EndBand.progress
    patch.setattr(EndBand, "progress", lambda self, through: progress(self, through + 1))


def retreat_over_live_units(patch: pytest.MonkeyPatch) -> None:
    """The frontier retreats one unit too far."""
    plan = plan_retreat
    patch.setattr("allocator.physical.band.plan_retreat", lambda state, frontier: max(0, plan(state, frontier) - 1))


def skip_zeroing(patch: pytest.MonkeyPatch) -> None:
    """Hands units out with the bytes of their last user."""
    take = EndBand.take

    def dirty(self: EndBand, ids: Int32s) -> list[object]:
        return [effect for effect in take(self, ids) if type(effect).__name__ != "Zero"]

    patch.setattr(EndBand, "take", dirty)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (skip_the_wait, "unordered_overlap"),
    (free_at_launch, "unordered_overlap"),
    (wait_for_the_oldest, "unordered_overlap"),
    (move_written_units, "unordered_overlap"),
    (reuse_vacated_units, "unordered_overlap"),
    (return_one_step_early, "unordered_overlap"),
    (retreat_over_live_units, "more was removed"),
    (skip_zeroing, "lost_write"),
]


@pytest.mark.parametrize(("mutant", "caught_as"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_the_harness_catches(
    mutant: Callable[[pytest.MonkeyPatch], None], caught_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a few seeded programs the fault is seen, and by the check that is about it."""
    mutant(monkeypatch)
    seen = []
    for seed in range(12):
        harness = Harness(units=(4, 9, 30, 80)[seed % 4], seed=seed)
        try:
            harness.run(random_program(seed, 250))
        except (AssertionError, AllocatorError) as fault:
            seen.append(str(fault))
    assert any(caught_as in fault for fault in seen), f"seen instead: {sorted(set(seen))}"
