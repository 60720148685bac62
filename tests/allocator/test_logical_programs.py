"""Random programs on the logical chain and its mirror, beside a model made of plain sets."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from allocator.columns import Int32s
from allocator.errors import AllocatorError
from tests.allocator.logical_world import LogicalWorld
from tests.allocator.shapes import hybrid_geometry, ids, stage_of

STATE, LONG, SHORT, FULL = range(4)
WINDOWS = (LONG, SHORT)
ARENA = 8 * 121
GEOMETRY = hybrid_geometry(stage_of(ARENA, 8, (8, 8, 8, 8)), pages=40, slots=6)
# Where the ranks say that published units lie: places that leave room for everything this program takes.
PLACES = ((8, 16), (320, 328), (560, 568), (ARENA - 8, ARENA))


class Model:
    """What must be so, in sets: owned units per band, those that wait, and what each open use names."""

    def __init__(self) -> None:
        self.owned: list[set[int]] = [set() for _ in range(4)]
        self.waiting: list[set[int]] = [set() for _ in range(4)]
        self.held: dict[int, list[set[int]]] = {}
        self.published: dict[int, list[set[int]]] = {}  # and sends that are fixed
        self.receives: set[int] = set()  # those of the published that a peer writes
        self.sent: dict[int, list[set[int]]] = {}
        self.other: set[int] = set()

    def open(self) -> set[int]:
        """All uses that are not over."""
        return {*self.held, *self.published, *self.sent, *self.other}

    def fixed(self, band: int) -> set[int]:
        """Units that some peer may know, or that a send fixes."""
        return set().union(*(use[band] for use in self.published.values()))

    def received(self, band: int) -> set[int]:
        """Units that a peer may be writing."""
        return set().union(*(self.published[use][band] for use in self.receives))

    def kept(self, band: int) -> set[int]:
        """Units that no take may get before some use is over."""
        return self.fixed(band).union(*(use[band] for use in self.sent.values()))

    def reserved(self, band: int) -> set[int]:
        """Units that wait for a peer's rows."""
        return set().union(*(use[band] for use in self.held.values()))

    def lowest(self, band: int, count: int, limit: int) -> list[int]:
        """The ids that a take must get."""
        used = self.owned[band] | self.waiting[band]
        return [n for n in range(1, limit + 1) if n not in used][:count]

    def free(self, parts: list[set[int]]) -> list[list[int]]:
        """Frees; per band what the ranks hear of."""
        heard: list[set[int]] = [set() for _ in range(4)]
        for band in range(4):
            self.owned[band] -= parts[band]
            stays = parts[band] & self.kept(band)
            if band == FULL:
                stays |= parts[band] & (self.waiting[LONG] | self.waiting[SHORT])
            self.waiting[band] |= stays
            heard[band] = parts[band] - stays
        return [sorted(part) for part in heard if part]

    def end(self, uses: Iterable[int]) -> list[tuple[int, list[int]]]:
        """Uses are over; (band, ids) that go."""
        for use in uses:
            self.published.pop(use, None)
            self.held.pop(use, None)
            self.sent.pop(use, None)
            self.receives.discard(use)
            self.other.discard(use)
        out: list[tuple[int, list[int]]] = []
        for band in range(4):
            going = self.waiting[band] - self.kept(band)
            if band == FULL:
                going -= self.waiting[LONG] | self.waiting[SHORT]
            self.waiting[band] -= going
            if going:
                out.append((band, sorted(going)))
        return out

    def rebind(self, band: int, pairs: dict[int, int]) -> None:
        """Units go by other pages."""
        self.owned[band] = {pairs.get(n, n) for n in self.owned[band]}
        for use in (*self.published.values(), *self.sent.values()):
            use[band] = {pairs.get(n, n) for n in use[band]}


class Program:
    """One seeded run; the world compares chain and mirror at every step, this compares both with the model."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.world = LogicalWorld(GEOMETRY)
        self.model = Model()
        self.uses = 0
        self.fresh: list[int] = []  # uses that cannot end in this step
        self.newest = 0  # publication
        self.reports: list[tuple[list[tuple[int, int] | None], int]] = []
        self.fixes = 0
        self.refused = 0
        self.waited = 0

    def some(self, from_: Iterable[int], most: int) -> set[int]:
        """A few of these, maybe none."""
        choice = sorted(from_)
        count = min(len(choice), int(self.rng.integers(0, most + 1)))
        return {int(n) for n in self.rng.permutation(choice)[:count]}

    def parts(self, sets: list[set[int]]) -> list[Int32s | None]:
        """Sets as parts of a call, in any order."""
        return [ids(*self.rng.permutation(sorted(part)).tolist()) if part else None for part in sets]

    def free_units(self, band: int) -> set[int]:
        """Owned, and nobody's but the owner's."""
        return self.model.owned[band] - self.model.reserved(band)

    def take(self) -> None:
        """Pages with windows on some of them and on some older pages, and slots, jointly."""
        world, model = self.world, self.model
        pages = int(self.rng.integers(0, 5))
        minted = model.lowest(FULL, pages, 40)
        demand, bound, onto, wanted = [int(self.rng.integers(0, 2)), 0, 0, pages], [None] * 4, [None] * 4, {}
        for band in WINDOWS:
            chosen = sorted(self.some(range(pages), 5))
            older = sorted(self.some(model.owned[FULL] - model.owned[band] - model.waiting[band], 2))
            bound[band], onto[band] = ids(*chosen), ids(*older)
            demand[band] = len(chosen) + len(older)
            wanted[band] = sorted([minted[index] for index in chosen if index < len(minted)] + older)
        asked = tuple(demand)
        if not any(asked):
            return
        if world.chain.refusal(asked) is not None:
            before = world.chain.state_digest()
            with pytest.raises(AllocatorError):
                world.chain.take(asked, bound, onto)
            assert world.chain.state_digest() == before
            self.refused += 1
            return
        wanted[STATE], wanted[FULL] = model.lowest(STATE, demand[STATE], 6), minted
        taken = world.take(asked, bound, onto)
        for band in range(4):
            assert taken[band].tolist() == wanted[band]
            model.owned[band] |= set(wanted[band])

    def free(self) -> None:
        """Some units of every band; an owner page only without the window units that stay."""
        parts = [self.some(self.free_units(band), 4) for band in range(4)]
        parts[FULL] -= {n for band in WINDOWS for n in self.model.owned[band] - parts[band]}
        if any(parts):
            assert self.world.free(*self.parts(parts)) == self.model.free(parts)

    def begin(self) -> None:
        """A use of any kind, of some units of some bands."""
        kind = str(self.rng.choice(["hold", "publish", "send", "backup", "load"]))
        sets = [self.some(self.free_units(band), 3) for band in range(4)]
        if kind in ("hold", "load"):
            sets = [part - self.model.fixed(band) for band, part in enumerate(sets)]
        else:
            sets = [part - self.model.received(band) for band, part in enumerate(sets)]
        if not any(sets):
            return
        chain = self.world.chain
        self.uses += int(self.rng.integers(1, 3))
        parts = self.parts(sets)
        if kind in ("backup", "load"):
            slots = [None if part is None else np.arange(part.size) for part in parts]
            self.world.do((chain.backup if kind == "backup" else chain.load)(self.uses, parts, slots))
        else:
            self.world.do(getattr(chain, kind)(self.uses, parts))
        model = self.model
        if kind in ("backup", "load"):
            model.other.add(self.uses)
        else:
            {"hold": model.held, "publish": model.published, "send": model.sent}[kind][self.uses] = sets
        if kind == "publish":
            self.newest = self.uses
        self.fresh.append(self.uses)

    def fix(self) -> None:
        """A send is given up waiting for."""
        if self.model.sent:
            use = int(self.rng.choice(sorted(self.model.sent)))
            self.world.do(self.world.chain.fix(use))
            self.model.published[use] = self.model.sent.pop(use)
            self.newest = use
            self.fresh.append(use)
            self.fixes += 1

    def publish_held(self) -> None:
        """A receive that is held becomes known to its peer."""
        ready = [use for use in self.model.held if use not in self.fresh]
        ready = [u for u in ready if not any(s & self.model.fixed(b) for b, s in enumerate(self.model.held[u]))]
        if ready:
            use = int(self.rng.choice(ready))
            sets = self.model.held.pop(use)
            self.world.do(self.world.chain.publish(use, self.parts(sets)))
            self.model.published[use] = sets
            self.model.receives.add(use)
            self.newest = use
            self.fresh.append(use)

    def end(self) -> None:
        """Some open uses are over."""
        ready = self.model.open() - set(self.fresh)
        going = sorted(self.some(ready, 2))
        if going:
            assert self.world.end(*going) == self.model.end(going)

    def rebind(self) -> None:
        """Window units go to pages that have none."""
        band = int(self.rng.choice(WINDOWS))
        sources = sorted(self.some(self.free_units(band), 2))
        bare = sorted(self.model.owned[FULL] - self.model.owned[band] - self.model.waiting[band])
        targets = [int(n) for n in self.rng.permutation(bare)[: len(sources)]]
        sources = sources[: len(targets)]
        if sources:
            self.world.do(self.world.chain.rebind(band, ids(*sources), ids(*targets)))
            self.model.rebind(band, dict(zip(sources, targets, strict=True)))

    def copy(self) -> None:
        """A state is copied to slots that nobody else may write."""
        targets = sorted(self.some(self.free_units(STATE) - self.model.fixed(STATE), 2))
        sources = sorted(self.model.owned[STATE] - self.model.received(STATE) - set(targets))
        if targets and sources:
            chosen = self.rng.choice(sources, size=len(targets))
            self.world.do(self.world.chain.copy_state(ids(*chosen.tolist()), ids(*targets)))

    def step(self) -> None:
        """The step is sent; the ranks report, and some of the reports on their way are consumed."""
        self.world.step()
        self.fresh = []
        published = [any(use[band] for use in self.model.published.values()) for band in range(4)]
        places = [place if fixed else None for place, fixed in zip(PLACES, published, strict=True)]
        self.reports.append((places, self.newest))
        for _ in range(int(self.rng.integers(0, len(self.reports) + 1))):
            self.world.fixed(*self.reports.pop(0))

    def check(self) -> None:
        """Chain, mirror and model agree on every unit."""
        chain, model = self.world.chain, self.model
        for band in range(4):
            assert chain.live_ids(band).tolist() == sorted(model.owned[band] | model.waiting[band])
        assert chain.quarantined() == tuple(map(len, model.waiting))
        self.waited = max(self.waited, sum(chain.quarantined()))
        assert set(chain.open_uses()) == model.open()

    def finish(self) -> None:
        """Everything ends; nothing is left on either side."""
        self.step()
        self.world.end(*sorted(self.model.open()))
        self.model.end(self.model.open())
        parts = self.parts(self.model.owned)
        if any(part is not None for part in parts):
            self.world.free(*parts)
        self.world.step()
        self.world.chain.check_idle()
        self.world.mirror.check_idle()


ACTIONS = ("take", "free", "begin", "publish_held", "fix", "end", "rebind", "copy", "step")


def test_random_programs() -> None:
    """Ids, quarantine, releases and digests are as the model says, after every one of 120 actions; all ends clean."""
    refused = waited = fixed = 0
    for seed in range(30):
        program = Program(seed)
        for action in program.rng.choice(ACTIONS, size=120, p=(0.24, 0.16, 0.13, 0.06, 0.02, 0.11, 0.06, 0.04, 0.18)):
            getattr(program, str(action))()
            program.check()
        program.finish()
        assert program.uses > 5
        refused += program.refused
        waited += program.waited > 1
        fixed += program.fixes
    assert refused > 50
    assert waited > 15
    assert fixed > 10
