"""The page-safety harness: scheduler-level operations on one logical chain and two ranks with other timing.

A program is a list of (operation, number, number); the numbers choose among what is possible at that point, so every
list is a legal program and shrinks well. After every step: conservation, equal effects and digests on both ranks, the
byte checks of `DeviceModel`, and the logical digest on the mirror.
"""

from __future__ import annotations

import numpy as np

from allocator.checks import STRICT, Checks
from allocator.columns import Int32s
from allocator.effects import canonical_bytes
from allocator.logical.chain import LogicalChain
from allocator.logical.mirror import LogicalMirror
from allocator.ops import Flush, Op
from allocator.physical.chain import PhysicalChain
from tests.allocator.device_model import DeviceModel
from tests.allocator.worlds import full_geometry

Program = list[tuple[str, int, int]]
OPERATIONS = ("admit", "grow", "end", "trim", "flush", "forward", "quiet", "process")
WEIGHTS = (5, 4, 3, 3, 4, 6, 2, 3)
UNIT_BYTES = 8


def random_program(seed: int, length: int) -> Program:
    """A seeded program; each seed also draws its own weights, so that some runs lack an operation."""
    rng = np.random.default_rng(seed)
    weights = np.array(WEIGHTS, dtype=float) * (rng.random(len(WEIGHTS)) > 0.15) * rng.uniform(0.3, 1, len(WEIGHTS))
    weights[OPERATIONS.index("forward")] += 1
    kinds = rng.choice(len(OPERATIONS), size=length, p=weights / weights.sum())
    numbers = rng.integers(0, 1000, size=(length, 2))
    return [(OPERATIONS[kind], int(a), int(b)) for kind, (a, b) in zip(kinds, numbers, strict=True)]


class Harness:
    """Requests that hold pages, two ranks, at most two forwards in flight."""

    def __init__(self, units: int, seed: int = 0) -> None:
        self.geometry = full_geometry(units, UNIT_BYTES, tail_bytes=seed % UNIT_BYTES)
        self.logical = LogicalChain(self.geometry, Checks(STRICT))
        self.mirror = LogicalMirror(self.geometry, Checks(STRICT))
        self.ranks = [PhysicalChain(self.geometry, 0, Checks(STRICT)) for _ in range(2)]
        self.devices = [DeviceModel(self.geometry, 0, 0, seed + i, lazy) for i, lazy in enumerate((0.97, 0.4))]
        self.requests: dict[int, list[int]] = {}
        self.ops: list[Op] = []
        self.seq = 0
        self.processed = 0
        self.in_flight: list[int] = []
        self._next = 1
        self._value = 0
        self._all_pages = np.arange(1, self.geometry.virtual_pages + 1, dtype=np.int32)

    def run(self, program: Program) -> None:
        """Runs a program, then ends everything and checks that free equals boot."""
        for operation, a, b in program:
            getattr(self, f"_{operation}")(a, b)
        self.finish()

    # --- operations ----------------------------------------------------------------------------------------------

    def _admit(self, a: int, b: int) -> None:
        pages = min(1 + a % 6, self.logical.max_extra())
        if pages:
            self.requests[self._next] = self._take(pages)
            self._next += 1

    def _grow(self, a: int, b: int) -> None:
        request = self._pick(a)
        if request and self.logical.max_extra():
            self.requests[request] += self._take(1)

    def _end(self, a: int, b: int) -> None:
        request = self._pick(a)
        if request:
            self._free(self.requests.pop(request))

    def _trim(self, a: int, b: int) -> None:
        """Gives some of a request's pages back, as a retraction or a tree would."""
        request = self._pick(a)
        if request and len(self.requests[request]) > 1:
            pages = self.requests[request]
            cut = 1 + b % (len(pages) - 1)
            self.requests[request], going = pages[:cut], pages[cut:]
            self._free(going)

    def _flush(self, a: int, b: int) -> None:
        self.ops.append(Flush(a % 7))

    def _forward(self, a: int, b: int) -> None:
        """Sends a step whose forward reads the pages of some requests and writes into the last page of each."""
        if len(self.in_flight) == 2:
            self._process(0, 0)
        chosen = [n for i, n in enumerate(sorted(self.requests)) if (a >> (i % 8)) & 1 or i == b % 8]
        reads = [page for n in chosen for page in self.requests[n]]
        writes = []
        for n in chosen:
            self._value = self._value % 255 + 1
            writes.append((self.requests[n][-1], (a + n) % UNIT_BYTES, self._value))
        self._step()
        for chain, device in zip(self.ranks, self.devices, strict=True):
            device.launch(self.seq, reads, writes)
            chain.launched(self.seq, {0: np.array([page for page, _, _ in writes], dtype=np.int32)})
        self.in_flight.append(self.seq)
        self._check()

    def _quiet(self, a: int, b: int) -> None:
        """Sends a step without a forward."""
        self._step()

    def _process(self, a: int, b: int) -> None:
        if self.in_flight:
            self.processed = self.in_flight.pop(0)

    # --- steps and checks ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Ends everything; then free equals boot on the logical chain and on every rank."""
        for request in sorted(self.requests):
            self._free(self.requests[request])
        self.requests.clear()
        while self.in_flight:
            self._process(0, 0)
        self._step()
        self._step()
        self.logical.check_idle()
        self.mirror.check_idle()
        for chain in self.ranks:
            chain.check_idle()
        assert self.logical.max_extra() == self.logical.most_ever()

    def _step(self) -> None:
        self.seq += 1
        ops, self.ops = self.ops, []
        wanted = self.logical.step_digest(self.seq, ops)
        assert self.mirror.apply_step(self.seq, ops) == wanted, "rank_divergence: logical digest"
        effects: list[bytes] = []
        layouts: list[bytes] = []
        for chain, device in zip(self.ranks, self.devices, strict=True):
            chain.begin_step(self.seq, self.processed)
            device.processed(self.processed)
            done = chain.apply(ops)
            device.execute(done)
            effects.append(canonical_bytes(done))
            layouts.append(chain.end_step())
        assert effects[0] == effects[1], "rank_divergence: effects"
        assert layouts[0] == layouts[1], "rank_divergence: layout digest"
        self._check()

    def _check(self) -> None:
        live = self.logical.live_units()[0]
        for chain, device in zip(self.ranks, self.devices, strict=True):
            chain.check()
            device.check(self._physical(chain))
            counts = chain.band_counts()
            assert counts[0] == live - self._unsent(), "live units differ from the logical count"
            assert counts.sum() == self.logical.most_ever(), "a unit is missing"

    def _unsent(self) -> int:
        """Units that ops not sent yet change: takes add, frees subtract."""
        delta = 0
        for op in self.ops:
            if not isinstance(op, Flush):
                sign = 1 if type(op).__name__ == "Take" else -1
                delta += sign * sum(len(part.ids) // 4 for part in op.parts)
        return delta

    def _physical(self, chain: PhysicalChain) -> Int32s:
        return chain.physical(0, self._all_pages)

    def _pick(self, number: int) -> int:
        alive = sorted(self.requests)
        return alive[number % len(alive)] if alive else 0

    def _take(self, pages: int) -> list[int]:
        taken = self.logical.take((pages,))
        self.ops.append(taken.op)
        return [int(page) for page in taken.ids[0]]

    def _free(self, pages: list[int]) -> None:
        self.ops.append(self.logical.free([np.array(pages, dtype=np.int32)]))
