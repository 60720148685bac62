"""The step worker over a chain of several bands: state, a window and full attention in one arena, with host copies."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from allocator.columns import Int32s, Int64s, pack_i32, pack_i64
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.logical.chain import LogicalChain
from allocator.ops import Flush, Op
from daemon.rank.batch import Batch
from daemon.rank.device import HostDevice
from daemon.rank.host_pool import HostPool
from daemon.rank.runner import Outcome
from daemon.rank.step_worker import StepWorker
from ipc.messages import EXPLICIT, Begin, Forward, Step
from tools.rank_driver import settings

STATE, WINDOW, FULL = 0, 1, 2
BANDS = [
    BandGeometry("state", "state", 512),
    BandGeometry("window:8", "window", 256, 8),
    BandGeometry("full", "full", 768),
]
STAGE = StageGeometry(24_576, 1536, BANDS)
GEOMETRY = Geometry(4, 40, 8, [STAGE])


class Watched(HostDevice):
    """A host device that notes the order of waits, moves, releases and forwards."""

    def __init__(self) -> None:
        super().__init__(STAGE, pool=HostPool(STAGE, 8))
        self.log: list[tuple[object, ...]] = []

    def wait_copy(self, use: int) -> None:
        """Note it."""
        self.log.append(("wait copy", use))
        super().wait_copy(use)

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Note it."""
        self.log.append(("move", band, sources.size))
        super().copy(band, sources, targets)

    def host_read(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Note it."""
        self.log.append(("backup", use, band))
        super().host_read(use, band, units, slots)

    def release(self, uses: Any) -> None:
        """Note it, if there are any."""
        if uses:
            self.log.append(("release", *uses))
        super().release(uses)


class Stamps:
    """A runner without a model: a forward stamps every byte of what it writes by band and virtual id."""

    def __init__(self) -> None:
        self.device: Any
        self.writes: dict[int, list[int]] = {}
        self.worker: StepWorker

    def prepare(self) -> Any:
        """Nothing to load."""

    def begin(self, geometry: Geometry, stage: int) -> None:
        """A fresh device."""
        self.device = Watched()

    def launch(self, batch: Batch) -> Any:
        """Write through the tables as they are now."""
        self.device.log.append(("forward", batch.seq))
        for band, ids in self.writes.items():
            units = self.worker.executor.tables[band][ids]
            self.device.arena.units(band)[units] = (np.array(ids, dtype=np.uint8) * 3 + band + 1)[:, None]
        return Done()


class Done:
    """A forward that is over and sampled nothing."""

    def due_in_s(self) -> float:
        """Nothing to wait for."""
        return 0

    def outcome(self) -> Outcome:
        """No tokens."""
        return Outcome(np.zeros(0, dtype=np.int64), [])


class Bands:
    """A logical chain in front of a step worker; row n holds the n-th part of what a step writes, one slot each."""

    def __init__(self) -> None:
        self.chain = LogicalChain(GEOMETRY)
        self.runner = Stamps()
        self.worker = StepWorker(self.runner, Begin(1, GEOMETRY), settings(), 160, 0, 0)
        self.runner.worker = self.worker
        self.seq = self.newest = self.processed = self.generation = 0
        self.ops: list[Op] = []
        self.ended: list[int] = []

    @property
    def log(self) -> list[tuple[object, ...]]:
        """What the device was told, in order."""
        return self.runner.device.log

    def take(self, state: int, pages: int) -> tuple[list[int], list[int]]:
        """Slots, and pages with window units bound to all of them; their ids."""
        taken = self.chain.take((state, pages, pages))
        self.ops.append(taken.op)
        return taken.ids[STATE].tolist(), taken.ids[FULL].tolist()

    def free(self, **ids: list[int]) -> None:
        """Free ids of the bands named."""
        columns = [np.array(ids.get(name, []), dtype=np.int32) for name in ("state", "window", "full")]
        if any(column.size for column in columns):
            self.ops.append(self.chain.free(columns))

    def end(self, use: int) -> None:
        """The use is over."""
        self.ops.append(self.chain.end_uses([use]))
        self.ended.append(use)

    def step(
        self,
        pages: list[int] | None = None,
        slots: list[int] | None = None,
        processed: int | None = None,
        stored: list[int] | None = None,
    ) -> None:
        """One step; with pages, its forward writes those pages in both token bands, and at most as many slots.

        The last row continues behind the pages `stored`.
        """
        self.seq += 1
        forward = None
        if pages:
            assert slots
            forward = self._forward(pages, slots, stored or [])
        through = self.processed = self.newest if processed is None else processed
        digest = self.chain.step_digest(self.seq, self.ops, self.ended)
        step = Step(1, self.seq, 0, through, self.ended, self.ops, forward, digest)
        self.ops, self.ended = [], []
        report = self.worker.finish(self.worker.launch(step))
        assert report.logical == digest
        if pages:
            self.newest = self.seq

    def _forward(self, pages: list[int], slots: list[int], stored: list[int]) -> Forward:
        """One row per slot; the last one has the stored pages and those that are left over."""
        assert len(slots) <= len(pages)
        self.runner.writes = {WINDOW: pages, FULL: pages, STATE: slots}
        self.generation += 1
        others = [1] * (len(slots) - 1)
        written, held = [*others, len(pages) - len(others)], [*others, len(stored) + len(pages) - len(others)]
        rows = np.arange(len(slots))
        return Forward(
            pack_i32(rows),
            pack_i32([self.generation] * len(slots)),
            pack_i32([0] * len(others) + [4 * len(stored)]),
            pack_i32([4 * count for count in written]),
            bytes([EXPLICIT] * len(slots)),
            pack_i64([1] * (4 * len(pages))),
            pack_i32(np.repeat(rows, held)),
            pack_i32([index for count in held for index in range(count)]),
            pack_i32(pages[: len(others)] + stored + pages[len(others) :]),
            [],
            pack_i32(slots),
        )

    def wrong(self, band: int, ids: list[int]) -> list[int]:
        """Those of the ids whose units do not hold their own stamp in every byte."""
        units = self.runner.device.arena.units(band)[self.worker.executor.tables[band][ids]]
        stamps = (np.array(ids, dtype=np.uint8) * 3 + band + 1)[:, None]
        return [one for one, same in zip(ids, (units == stamps).all(axis=1).tolist(), strict=True) if not same]


def test_a_forward_waits_for_the_copy_that_reads_what_it_writes() -> None:
    """The wait comes after the step's effects and before the forward; once the use is released there is none."""
    bands = Bands()
    slots, pages = bands.take(1, 2)
    bands.step(pages, slots)
    column = np.array(pages[:1], dtype=np.int32)
    bands.ops.append(bands.chain.backup(1, [None, column, None], [None, np.array([3]), None]))
    bands.step(pages, slots)
    bands.step(pages, slots)
    bands.end(1)
    bands.step(pages, slots)
    assert bands.log == [
        ("forward", 1),
        ("backup", 1, WINDOW),
        ("wait copy", 1),
        ("forward", 2),
        ("forward", 3),
        ("release", 1),
        ("forward", 4),
    ]
    assert bands.worker.executor.tables[FULL][0] == bands.worker.executor.tables[WINDOW][0] == 0


def test_a_load_brings_back_what_a_backup_took() -> None:
    """Bytes of all three bands go to the host, their units are freed and reused, and come back under other ids."""
    bands = Bands()
    slots, pages = bands.take(1, 2)
    bands.step(pages, slots)
    parts = [np.array(ids, dtype=np.int32) for ids in (slots, pages, pages)]
    places = [np.array([5]), np.array([0, 1]), np.array([6, 2])]
    bands.ops.append(bands.chain.backup(1, parts, places))
    bands.step()
    bands.end(1)
    bands.free(state=slots, window=pages, full=pages)
    bands.step()
    other_slots, other = bands.take(2, 3)
    bands.step(other, other_slots)
    fresh_slots, fresh = bands.take(1, 2)
    parts = [np.array(ids, dtype=np.int32) for ids in (fresh_slots, fresh, fresh)]
    bands.ops.append(bands.chain.load(2, parts, places))
    bands.step()
    bands.end(2)
    bands.step()
    tables, arena = bands.worker.executor.tables, bands.runner.device.arena
    for band, old, new in ((STATE, slots, fresh_slots), (WINDOW, pages, fresh), (FULL, pages, fresh)):
        assert (arena.units(band)[tables[band][new]] == (np.array(old) * 3 + band + 1)[:, None]).all()


def test_unbound_slots_read_as_the_padding_slot() -> None:
    """Its unit lies right below the chain's first state unit; a freed slot reads as it again."""
    bands = Bands()
    slots, _ = bands.take(2, 0)
    bands.step()
    table = bands.worker.executor.tables[STATE]
    assert table[slots].tolist() == [3, 4]
    assert set(np.delete(table, slots).tolist()) == {2}
    bands.free(state=slots)
    bands.step()
    assert set(table.tolist()) == {2}


def test_only_the_slots_that_a_forward_writes_stay_under_it() -> None:
    """A flush moves the slot that no forward in flight writes; the written one waits until it was processed."""
    bands = Bands()
    slots, pages = bands.take(4, 4)
    bands.step(pages, slots)
    bands.free(state=slots[:2])
    bands.step()
    bands.step(pages, slots[2:3])
    bands.ops.append(Flush(8))
    bands.step(processed=1)
    assert bands.log[-1] == ("move", STATE, 1)
    bands.ops.append(Flush(8))
    bands.step()
    assert bands.log[-1] == ("move", STATE, 1)
    assert not bands.wrong(STATE, slots[2:])


@pytest.mark.parametrize("seed", range(3))
def test_what_was_written_stays_through_moves_of_all_bands(seed: int) -> None:
    """200 random steps in an arena that is nearly full: every live unit holds what was last written to it."""
    rng = random.Random(seed)
    bands = Bands()
    held: list[tuple[list[int], list[int], list[int]]] = []  # slots, pages with a window unit, pages without
    for _ in range(200):
        if len(held) > 2 and rng.random() < 0.5:
            slots, inside, outside = held.pop(rng.randrange(len(held)))
            bands.free(state=slots, window=inside, full=inside + outside)
        if held and rng.random() < 0.5:
            _, inside, outside = rng.choice(held)
            retired = [inside.pop(0) for _ in range(len(inside) // 2)]
            outside += retired
            bands.free(window=retired)
        if rng.random() < 0.2:
            bands.ops.append(Flush(rng.randint(1, 5)))
        want, count = rng.randint(1, 2), rng.randint(2, 5)
        if bands.chain.refusal((want, count, count)) is None:
            slots, pages = bands.take(want, count)
            held.append((slots, list(pages), []))
            bands.step(pages, slots, bands.newest if rng.random() < 0.5 else bands.processed)
        else:
            bands.step()
        for slots, inside, outside in held:
            assert not bands.wrong(STATE, slots)
            assert not bands.wrong(WINDOW, inside)
            assert not bands.wrong(FULL, inside + outside)
    assert {entry[1] for entry in bands.log if entry[0] == "move"} == {STATE, WINDOW, FULL}
    assert not bands.runner.device.arena.data[:768].any()
