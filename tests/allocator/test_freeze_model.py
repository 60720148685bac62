"""Publications, their ends and late reports at random, beside a model that knows where every fixed unit really lies."""

from __future__ import annotations

import numpy as np

from allocator.capacity import Extent, Extents
from tests.allocator.logical_world import LogicalWorld
from tests.allocator.shapes import hybrid_geometry, ids, stage_of

START, ARENA = 2, 16
STAGES = ((1, 2, 1), (2, 0, 3))  # unit bytes of state, window and pages
BANDS = range(3)


class Placed:
    """One stage: where each live unit lies, by brute force over all pieces that the bands could have."""

    def __init__(self, sizes: tuple[int, ...], rng: np.random.Generator) -> None:
        self.sizes = sizes
        self.rng = rng
        self.at: list[dict[int, int]] = [{} for _ in BANDS]  # id -> first byte
        self.pieces = [(START, one, two, ARENA) for one in range(START, ARENA + 1) for two in range(one, ARENA + 1)]

    def places(self, band: int, low: int, high: int) -> list[int]:
        """First bytes of all units of a band inside a piece."""
        size = self.sizes[band]
        return list(range(-(-low // size) * size, high - size + 1, size)) if size else []

    def arrange(self, live: list[set[int]], fixed: list[set[int]]) -> bool:
        """Moves everything but the fixed units to a layout drawn from all that hold what is live; False: none does."""
        able = []
        for cuts in self.pieces:
            rooms = [set(self.places(band, cuts[band], cuts[band + 1])) for band in BANDS]
            stay = [{self.at[band][n] for n in fixed[band]} if self.sizes[band] else set() for band in BANDS]
            if all(not self.sizes[b] or (stay[b] <= rooms[b] and len(live[b]) <= len(rooms[b])) for b in BANDS):
                able.append((rooms, stay))
        if not able:
            return False
        rooms, stay = able[int(self.rng.integers(len(able)))]
        for band in BANDS:
            if self.sizes[band]:
                room = self.rng.permutation(sorted(rooms[band] - stay[band])).tolist()
                self.at[band] = {n: self.at[band][n] if n in fixed[band] else room.pop() for n in sorted(live[band])}
        return True

    def extents(self, fixed: list[set[int]]) -> tuple[Extent, ...]:
        """What a rank of this stage reports."""
        out: list[Extent] = []
        for band in BANDS:
            bytes_ = [self.at[band][n] for n in fixed[band]] if self.sizes[band] else []
            out.append((min(bytes_), max(bytes_) + self.sizes[band]) if bytes_ else None)
        return tuple(out)


class Run:
    """A random program; after every take the model must find a layout around what is truly fixed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        geometry = hybrid_geometry(*(stage_of(ARENA, START, sizes) for sizes in STAGES), pages=12, slots=12)
        self.world = LogicalWorld(geometry)
        self.stages = [Placed(sizes, self.rng) for sizes in STAGES]
        self.uses: dict[int, list[set[int]]] = {}
        self.sends: dict[int, list[set[int]]] = {}
        self.owned: list[set[int]] = [set() for _ in BANDS]
        self.fresh: set[int] = set()
        self.newest = self.last = 0
        self.reports: list[tuple[Extents, int]] = []
        self.late = self.takes = 0

    def fixed(self) -> list[set[int]]:
        """What is truly fixed: open publications and fixed sends."""
        return [set().union(*(use[band] for use in self.uses.values())) for band in BANDS]

    def settle(self) -> None:
        """The ranks place what is live now."""
        live = [set(self.world.chain.live_ids(band).tolist()) for band in BANDS]
        for stage in self.stages:
            assert stage.arrange(live, self.fixed()), "what the chain accepted has no layout around the fixed units"

    def some(self, most: int) -> list[set[int]]:
        """A few owned units."""
        return [
            {int(n) for n in self.rng.permutation(sorted(owned))[: int(self.rng.integers(0, most + 1))]}
            for owned in self.owned
        ]

    def take(self) -> None:
        """Slots, pages, and window units on some of these pages."""
        pages = int(self.rng.integers(0, 5))
        window = int(self.rng.integers(0, pages + 1))
        demand = (int(self.rng.integers(0, 4)), window, pages)
        if any(demand) and self.world.chain.refusal(demand) is None:
            bound = (None, ids(*range(window)), None)
            for band, column in enumerate(self.world.take(demand, bound)):
                self.owned[band] |= set(column.tolist())
            self.settle()
            self.takes += 1

    def free(self) -> None:
        """Some units, pages with the window units on them."""
        going = self.some(4)
        going[1] |= going[2] & self.owned[1]
        if any(going):
            self.world.free(*(ids(*sorted(part)) if part else None for part in going))
            self.owned = [mine - part for mine, part in zip(self.owned, going, strict=True)]

    def publish(self) -> None:
        """A loan, or a send that may be fixed later."""
        units = self.some(2)
        if any(units):
            self.last += 1
            parts = [ids(*sorted(part)) if part else None for part in units]
            if self.rng.random() < 0.3:
                self.world.do(self.world.chain.send(self.last, parts))
                self.sends[self.last] = units
            else:
                self.world.do(self.world.chain.publish(self.last, parts))
                self.uses[self.last] = units
                self.newest = self.last
            self.fresh.add(self.last)

    def fix(self) -> None:
        """A send is given up."""
        if self.sends:
            use = min(self.sends)
            self.world.do(self.world.chain.fix(use))
            self.uses[use] = self.sends.pop(use)
            self.newest = use
            self.fresh.add(use)

    def end(self) -> None:
        """A use is over, whether it was reported or not."""
        able = sorted({*self.uses, *self.sends} - self.fresh)
        if able:
            use = int(self.rng.choice(able))
            self.world.end(use)
            self.uses.pop(use, None)
            self.sends.pop(use, None)

    def step(self) -> None:
        """The step goes out; every stage will report its state at the end of it."""
        self.world.step()
        self.fresh.clear()
        self.settle()
        self.reports.append((tuple(stage.extents(self.fixed()) for stage in self.stages), self.newest))

    def report(self) -> None:
        """Some reports come, mostly in their order, some a second time and late."""
        for _ in range(int(self.rng.integers(0, 4))):
            if self.reports:
                at = int(self.rng.integers(min(2, len(self.reports))))
                self.late += self.reports[at][1] not in self.uses and self.reports[at][1] > 0
                self.world.chain.extents_fixed(*self.reports[at])
                if self.rng.random() < 0.8:
                    del self.reports[at]

    def finish(self) -> None:
        """All reports come: then what is refused is what does not fit around the extents of now."""
        self.step()
        for report in self.reports:
            self.world.chain.extents_fixed(*report)
        chain = self.world.chain
        known = chain.form
        assert known.caps is None, "the newest publication was reported: no freeze is left"
        for use in sorted({*self.uses, *self.sends}):
            self.world.end(use)
        assert chain.refusal((0, 0, 1)) == chain.form.refusal(chain.live_units(), (0, 0, 1))
        assert all(walk.last_high == 0 for walk in chain.form.walks)


def test_what_is_accepted_is_feasible_with_what_is_truly_fixed() -> None:
    """No take lacks a layout, no late report raises, and no freeze outlives the report of its newest publication."""
    takes = late = 0
    for seed in range(120):
        run = Run(seed)
        for action in run.rng.choice(
            ("take", "free", "publish", "fix", "end", "step", "report"),
            size=60,
            p=(0.3, 0.13, 0.06, 0.02, 0.09, 0.16, 0.24),
        ):
            getattr(run, str(action))()
        run.finish()
        takes += run.takes
        late += run.late
    assert takes > 500
    assert late > 100
