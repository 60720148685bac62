"""The pools that `bandmaster bench allocator` measures, and its clock.

Owns the geometry of a pool, the chains that work on it, and the timing of one call at a time. Must never time what is
not the allocator's: choosing requests, building demands and keeping rows happen outside the clock. Invariant: every op
that the logical chain makes is applied by the physical chain, in order, so both are always in the same state.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from allocator.capacity import Demand
from allocator.columns import Int32s
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.logical.chain import LogicalChain, Taken
from allocator.logical.mirror import LogicalMirror
from allocator.ops import Flush, Free, Op, Take
from allocator.physical.chain import PhysicalChain

FULL_TOKEN_BYTES = 32
WINDOW_TOKEN_BYTES = 96
STATE_SLOT_BYTES = 1024
SLOTS_PER_REQUEST = 2
IN_FLIGHT = 2
FILL_PAGES = 4096
EVERYTHING = 2**30
NAMES = {1: "full", 2: "window+full", 3: "state+window+full"}

Parts = list[Int32s | None]


class Shape(NamedTuple):
    """A pool: bytes for `slots` tokens of every token band jointly, plus `state_slots` slots where it has state."""

    bands: int
    slots: int
    page_size: int
    state_slots: int

    @property
    def row(self) -> dict[str, Any]:
        """What identifies the pool in a result row."""
        return {"pool": NAMES[self.bands], "bands": self.bands, "slots": self.slots, "page_size": self.page_size}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the bands in chain order."""
        return ("state", "window", "full")[3 - self.bands :]

    def demand(self, state: int, window: int, full: int) -> Demand:
        """Units per band of this pool, in chain order; what it lacks is left out."""
        return (state, window, full)[3 - self.bands :]

    def parts(self, state: Int32s | None, window: Int32s | None, full: Int32s | None) -> Parts:
        """Ids per band of this pool, in chain order; what it lacks is left out."""
        return [state, window, full][3 - self.bands :]

    def geometry(self) -> Geometry:
        """One stage; the token bands' joint tokens and the state slots fill the chain exactly."""
        page = self.page_size
        units = (STATE_SLOT_BYTES, WINDOW_TOKEN_BYTES * page, FULL_TOKEN_BYTES * page)[3 - self.bands :]
        names = ("state", "window:1024", "full")[3 - self.bands :]
        bands = [
            BandGeometry(name, kind, unit, 1024 if kind == "window" else 0)  # type: ignore[arg-type]
            for name, kind, unit in zip(names, self.kinds, units, strict=True)
        ]
        start = max(units[-2:])
        if self.bands == 3:
            start = -(-start // STATE_SLOT_BYTES) * STATE_SLOT_BYTES + STATE_SLOT_BYTES
        arena = start + self.slots // page * sum(units[-2:]) + (self.bands == 3) * self.state_slots * STATE_SLOT_BYTES
        slots = arena // STATE_SLOT_BYTES if self.bands == 3 else 0
        return Geometry(page, arena // units[-1], slots, [StageGeometry(arena, start, bands)])


def units_of(ops: list[Op]) -> int:
    """Units that takes and frees name, over all bands."""
    parts = [part for op in ops if isinstance(op, Take | Free) for part in op.parts]
    return sum(len(part.ids) for part in parts) // np.dtype(np.int32).itemsize


class Times:
    """Samples per (side, op): wall and thread CPU nanoseconds, and units."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], list[tuple[int, int, int]]] = {}

    def add(self, side: str, op: str, wall_ns: int, cpu_ns: int, units: int) -> None:
        """Remembers one call."""
        self._samples.setdefault((side, op), []).append((wall_ns, cpu_ns, units))

    def clear(self) -> None:
        """Forgets everything: what came before was warm-up."""
        self._samples.clear()

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per side and op: median and p99 of CPU and wall microseconds."""
        for (side, op), samples in sorted(self._samples.items()):
            columns = np.array(samples, dtype=np.float64)
            row: dict[str, Any] = {"side": side, "op": op, "calls": len(samples)}
            row["units_p50"] = int(np.median(columns[:, 2]))
            for name, column in (("cpu_us", columns[:, 1]), ("wall_us", columns[:, 0])):
                row[f"{name}_p50"] = round(float(np.percentile(column, 50)) / 1e3, 2)
                row[f"{name}_p99"] = round(float(np.percentile(column, 99)) / 1e3, 2)
            yield row


class Timer:
    """Measures what runs between entry and exit, on the wall and on this thread's CPU."""

    __slots__ = ("_cpu", "_wall", "cpu_ns", "wall_ns")

    def __enter__(self) -> Timer:
        self._wall = time.perf_counter_ns()
        self._cpu = time.thread_time_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_ns = time.thread_time_ns() - self._cpu
        self.wall_ns = time.perf_counter_ns() - self._wall

    def add(self, other: Timer) -> None:
        """Counts what another one measured too."""
        self.wall_ns += other.wall_ns
        self.cpu_ns += other.cpu_ns

    def each(self, calls: int) -> tuple[int, int]:
        """Wall and CPU nanoseconds of one of so many equal calls."""
        return self.wall_ns // calls, self.cpu_ns // calls


class World:
    """A logical chain, a physical chain and, if wanted, a mirror, on one pool; every call timed into `times`.

    Ops go through `take` and `free` (or are appended to a step by hand) and reach the physical chain by `step`, in a
    step of their own each or together.
    """

    def __init__(self, shape: Shape, mirror: bool = False) -> None:
        self.shape = shape
        geometry = shape.geometry()
        self.stage = geometry.stages[0]
        self.logical = LogicalChain(geometry)
        self.physical = PhysicalChain(geometry, 0)
        self.mirror = LogicalMirror(geometry) if mirror else None
        self.times = Times()
        self.seq = 0
        self.uses = 0
        self.processed = 0
        self.in_flight: deque[int] = deque()

    def timed(self, side: str, op: str, units: int, call: Callable[[], Any]) -> Any:
        """What `call` returns, its time under this side and op."""
        with Timer() as timer:
            out = call()
        self.times.add(side, op, timer.wall_ns, timer.cpu_ns, units)
        return out

    # --- the logical side ----------------------------------------------------------------------------------------

    def take(self, op: str, demand: Demand) -> Taken | None:
        """Asks and takes, as a scheduler does, in one measured call; None when it is refused."""
        logical = self.logical
        with Timer() as timer:
            refused = logical.refusal(demand)
            taken = None if refused is not None else logical.take(demand)
        self.times.add("logical", op if taken else f"{op}_refused", timer.wall_ns, timer.cpu_ns, sum(demand))
        return taken

    def free(self, op: str, parts: Parts) -> Free:
        """Frees ids per band."""
        units = sum(part.size for part in parts if part is not None)
        freed: Free = self.timed("logical", op, units, lambda: self.logical.free(parts))
        return freed

    # --- the physical side ---------------------------------------------------------------------------------------

    def step(
        self,
        op: str,
        ops: list[Op],
        writes: Mapping[int, Int32s | None] | None = None,
        released: Sequence[int] = (),
    ) -> None:
        """One step with these ops; with `writes` also its forward, of which at most two are in flight.

        `op` names the time of `apply` alone (with `released`: of opening too); else opening, and always digest and
        launch, go under `step_frame`.
        """
        self.seq += 1
        seq, physical, units = self.seq, self.physical, units_of(ops)
        if writes is not None and len(self.in_flight) == IN_FLIGHT:
            self.processed = self.in_flight.popleft()
        self.timed("logical", "step_digest", units, lambda: self.logical.step_digest(seq, ops, released))
        if self.mirror is not None:
            self.timed("mirror", op, units, lambda: self.mirror.apply_step(seq, ops, released))  # type: ignore[union-attr]
        with Timer() as first:
            physical.begin_step(seq, self.processed, released)
        with Timer() as middle:
            physical.apply(ops)
        if released:
            middle.add(first)
        with Timer() as last:
            physical.end_step()
            if writes is not None:
                physical.launched(seq, writes)
        if ops or released:
            self.times.add("physical", op, middle.wall_ns, middle.cpu_ns, units)
        frame = "step_frame" if writes is None else "step_frame_with_launch"
        self.times.add("physical", frame, first.wall_ns + last.wall_ns, first.cpu_ns + last.cpu_ns, units)
        if writes is not None:
            self.in_flight.append(seq)

    def next_use(self) -> int:
        """A number for a use: they ascend."""
        self.uses += 1
        return self.uses

    def end_uses(self, op: str, uses: Sequence[int]) -> None:
        """Releases open uses, in a step of its own."""
        freed = self.timed("logical", op, 0, lambda: self.logical.end_uses(uses))
        self.step(op, [freed] if freed.parts else [], released=uses)

    def apply_alone(self, ops: list[Op]) -> Timer:
        """One step without a forward; the time of `apply`, for a caller that files it itself."""
        self.seq += 1
        self.logical.step_digest(self.seq, ops)
        self.physical.begin_step(self.seq, self.processed)
        with Timer() as timer:
            self.physical.apply(ops)
        self.physical.end_step()
        return timer

    def land(self) -> None:
        """Every forward in flight is processed: nothing pends afterwards."""
        if self.in_flight:
            self.processed = self.in_flight[-1]
            self.in_flight.clear()
            self.step("land", [])

    # --- whole pools ---------------------------------------------------------------------------------------------

    def fill(self) -> Int32s:
        """Takes every token page the pool holds, a few thousand at once, as prompts take them; their ids."""
        one, pages = self.shape.demand(0, 1, 1), []
        while left := self.logical.max_extra(None, one):
            k = min(left, FILL_PAGES)
            taken = self.take("fill", self.shape.demand(0, k, k))
            if taken is None:
                raise RuntimeError("what max_extra promised is refused")
            self.step("fill", [taken.op])
            pages.append(taken.ids[-1])
        return np.concatenate(pages)

    def empty(self) -> None:
        """Frees everything, lands every forward and hands all spans back."""
        self.land()
        parts = [self.logical.live_ids(band) for band in range(self.shape.bands)]
        self.step("empty", [self.free("empty", list(parts))])
        self.step("empty", [Flush(EVERYTHING)])

    # --- reading -------------------------------------------------------------------------------------------------

    def counts(self) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Live, hole, pending and beyond units, a row per band."""
        return self.physical.band_counts().reshape(-1, 4)

    def check(self) -> None:
        """Both chains are sound and agree."""
        self.logical.check()
        self.physical.check()
        held = tuple(int(live) for live in self.counts()[:, 0])
        if held != self.logical.live_units():
            raise RuntimeError(f"the chains disagree: {held} units live, {self.logical.live_units()} on the books")
