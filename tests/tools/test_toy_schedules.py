"""Random schedules over the toy model on a whole engine, and proof that their judgement catches what it is to catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from allocator.effects import Bind
from allocator.physical.band import Band
from allocator.physical.chain import PhysicalChain
from daemon.core import batching, caching
from daemon.core.memory import Memory
from daemon.core.tree_scan import Scan
from daemon.rank import modeled_hash
from daemon.rank.device import HostDevice
from tools.toy_schedules import SHAPES, Schedule, draw, run, shrink

SCHEDULES = 60
BLOCKS = 4
CAUGHT_WITHIN = 60  # schedules of the shapes that a fault can touch
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_schedules_give_the_tokens_of_runs_without_memory(block: int) -> None:
    """Every output equals that of the sequence alone, every request ends as it must, and nothing is held at rest."""
    each = SCHEDULES // BLOCKS
    for seed in range(block * each, (block + 1) * each):
        assert run(draw(seed)).failure == "", f"seed {seed}"


def skipped_state_copy(patch: Patch) -> None:
    """A hit, or a checkpoint, whose state never reaches the other slot."""
    patch.setattr(PhysicalChain, "_copy_state", lambda self, op: [])


def shorter_windows(patch: Patch) -> None:
    """A window that gives units back one token too early."""
    begin = Memory.__init__

    def init(self: Memory, *arguments: Any) -> None:
        begin(self, *arguments)
        self.windows = tuple((band, max(1, tokens - 1)) for band, tokens in self.windows)

    patch.setattr(Memory, "__init__", init)


def hits_without_their_window(patch: Patch) -> None:
    """A match that asks for one page less of every window than the next forward reads."""
    begin = Scan.__init__

    def init(self: Scan, *arguments: Any) -> None:
        begin(self, *arguments)
        self._leads = [(band, max(0, lead - 1)) for band, lead in self._leads]

    patch.setattr(Scan, "__init__", init)


def stale_slot(patch: Patch) -> None:
    """A row that starts continues from what its slot holds of an earlier owner."""
    patch.setattr(modeled_hash, "_carried_state", lambda words, batch: words[batch.slots])


def missed_rebind(patch: Patch) -> None:
    """The last id that a rebind names is not bound on the ranks."""
    whole = Band.rebind

    def rebind(self: Band, sources: Any, targets: Any) -> list[Any]:
        (bind,) = whole(self, sources, targets)
        assert isinstance(bind, Bind)
        return [msgspec.structs.replace(bind, virtual=bind.virtual[:-4], physical=bind.physical[:-4])]

    patch.setattr(Band, "rebind", rebind)


def untold_entries(patch: Patch) -> None:
    """A row whose pages became the cache's is not told so: the ranks go on with the pages that it freed."""
    give = caching.give

    def deaf(core: Any, request: Any, *arguments: Any) -> bool:
        kept = give(core, request, *arguments)
        core.changed.pop(request.row, None)
        return kept

    for module in (caching, batching):
        if hasattr(module, "give"):
            patch.setattr(module, "give", deaf)


def moves_without_bytes(patch: Patch) -> None:
    """A unit that is relocated loses its first bytes on the way."""
    copy = HostDevice.copy

    def torn(self: HostDevice, band: int, sources: Any, targets: Any) -> None:
        copy(self, band, sources, targets)
        if self._stage.bands[band].kind != "state":
            self.arena.units(band)[targets, :16] = 0

    patch.setattr(HostDevice, "copy", torn)


FAULTS: dict[Callable[[Patch], None], Callable[[Schedule], bool]] = {
    skipped_state_copy: lambda schedule: SHAPES[schedule.shape][2] and schedule.caching,
    shorter_windows: lambda schedule: SHAPES[schedule.shape][1] > 0,
    hits_without_their_window: lambda schedule: schedule.shape in ("window", "full+window") and schedule.caching,
    stale_slot: lambda schedule: SHAPES[schedule.shape][2],
    missed_rebind: lambda schedule: SHAPES[schedule.shape][1] > 0 and schedule.caching,
    untold_entries: lambda schedule: schedule.caching,
    moves_without_bytes: lambda schedule: SHAPES[schedule.shape][1] > 0,
}


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_a_planted_fault_is_caught(monkeypatch: Patch, fault: Callable[[Patch], None]) -> None:
    """Each fault of another engine, planted here, fails one of the first schedules that it can touch."""
    fault(monkeypatch)
    touched = (draw(seed) for seed in range(10_000) if FAULTS[fault](draw(seed)))
    assert any(run(schedule).failure for schedule, _ in zip(touched, range(CAUGHT_WITHIN), strict=False))


def test_a_failing_schedule_is_made_smaller_and_fails_again(monkeypatch: Patch) -> None:
    """What is printed is a schedule of few actions that fails the same way each time, also out of its file."""
    stale_slot(monkeypatch)
    failing = next(draw(seed) for seed in range(1000) if run(draw(seed)).failure)
    smaller, ran = shrink(failing, tries=25)
    assert len(smaller.actions) < len(failing.actions)
    again = msgspec.json.decode(msgspec.json.encode(smaller), type=Schedule)
    assert run(again).failure == run(again).failure == ran.failure != ""
