"""A seeded serving trace over one pool: admit, decode all running requests, retire windows, finish.

Owns the trace. Must never let a chosen order depend on anything but the seed and on what was refused. Every step of the
trace decodes one token for each running request, at random positions in their pages; requests finish at random and
others are admitted in their place, so that holes are everywhere, as after hours of serving.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from allocator.columns import Int32s
from allocator.ops import Flush, Op
from tools.allocator_bench.world import SLOTS_PER_REQUEST, Shape, Timer, World

FLUSH_MOVES_MAX = 64
WARM_STEPS = 8
RETIRE_EVERY_TOKENS = 128
FINISH_CHANCE = 0.25


class Request:
    """A running request: its row, tokens held, tokens whose window is retired, and its state slots."""

    __slots__ = ("length", "retired", "row", "state")

    def __init__(self, row: int, length: int, state: Int32s | None) -> None:
        self.row, self.length, self.retired, self.state = row, length, 0, state


class Trace:
    """`running` requests on one pool; with `together` the ops of an iteration share one step, else each has its own."""

    def __init__(self, shape: Shape, running: int, seed: int, together: bool = False, mirror: bool = False) -> None:
        self.world = World(shape, mirror)
        self.shape, self.together = shape, together
        self.random = random.Random(seed)
        page, share = shape.page_size, shape.slots // running
        self.window = max(page, share // 2 // page * page)
        self.retire_every = min(RETIRE_EVERY_TOKENS, self.window)
        self.mean = max(page, int(share * 0.9))
        self.longest = 2 * self.mean + 64 + 2 * page
        self.pages = np.zeros((running, self.longest // page + 2), dtype=np.int32)
        self.rows = list(range(running))
        self.requests: list[Request] = []
        self.refused = 0
        self.ops: list[Op] = []

    def run(self, steps: int, budget_s: float) -> dict[str, Any]:
        """Fills the pool, warms up, then at most `steps` measured iterations; what the rows have in common."""
        self._admit_all()
        self._retire()
        for _ in range(WARM_STEPS):
            self._iteration()
        self.world.times.clear()
        self.refused = 0
        deadline = time.monotonic() + budget_s
        done = 0
        while done < steps and time.monotonic() < deadline:
            self._iteration()
            done += 1
        self.world.check()
        return {"steps": done, "window_tokens": self.window, "mean_tokens": self.mean, "refused": self.refused}

    # --- one iteration -------------------------------------------------------------------------------------------

    def _iteration(self) -> None:
        while self.random.random() < FINISH_CHANCE and len(self.requests) > 1:
            self._finish(self.random.choice(self.requests))
        for request in [request for request in self.requests if request.length + 2 >= self.longest]:
            self._finish(request)
        self._admit_all()
        decoded = self._decode()
        self._retire()
        self._send("flush", Flush(FLUSH_MOVES_MAX))
        self._launch(decoded)

    def _admit_all(self) -> None:
        while self.rows and self._admit():
            pass

    def _admit(self) -> bool:
        page = self.shape.page_size
        length = max(page, int(self.mean * self.random.uniform(0.5, 1.5)) - 32)
        pages = -(-length // page)
        slots = SLOTS_PER_REQUEST if self.shape.bands == 3 else 0
        taken = self.world.take("admit_take", self.shape.demand(slots, pages, pages))
        if taken is None:
            self.refused += 1
            return False
        row = self.rows.pop()
        self.pages[row, :pages] = taken.ids[-1]
        self.requests.append(Request(row, length, taken.ids[0] if slots else None))
        self._send("admit_take", taken.op)
        return True

    def _finish(self, request: Request) -> None:
        page, held = self.shape.page_size, self.pages[request.row]
        pages = held[: -(-request.length // page)].copy()
        windows = pages[request.retired // page :]
        op = self.world.free("finish_free", self.shape.parts(request.state, windows, pages))
        self.rows.append(request.row)
        self.requests.remove(request)
        self._send("finish_free", op)

    def _decode(self) -> bool:
        """One token for every running request; False when the pages for it were refused and one had to go."""
        page = self.shape.page_size
        growing = [request for request in self.requests if request.length % page == 0]
        if growing:
            taken = self.world.take("decode_take", self.shape.demand(0, len(growing), len(growing)))
            if taken is None:
                self.refused += 1
                self._finish(max(self.requests, key=lambda request: request.length))
                return False
            rows = [request.row for request in growing]
            self.pages[rows, [request.length // page for request in growing]] = taken.ids[-1]
            self._send("decode_take", taken.op)
        for request in self.requests:
            request.length += 1
        return True

    def _retire(self) -> None:
        """One window pass of a step: whole pages that fell behind their request's window."""
        page = self.shape.page_size
        if self.shape.bands == 1:
            return
        going: list[Int32s] = []
        for request in self.requests:
            if request.length - self.window < request.retired + self.retire_every:
                continue
            floor = (request.length - self.window) // page * page
            if floor > request.retired:
                going.append(self.pages[request.row, request.retired // page : floor // page])
                request.retired = floor
        if going:
            ids = np.concatenate(going)
            op = self.world.free("retire_free", self.shape.parts(None, ids, None))
            self._send("retire_free", op)

    # --- steps ---------------------------------------------------------------------------------------------------

    def _send(self, name: str, op: Op) -> None:
        if self.together:
            self.ops.append(op)
        else:
            self.world.step(name, [op])

    def _launch(self, decoded: bool) -> None:
        """The step whose forward writes every running request's last page and working slot."""
        page = self.shape.page_size
        if not decoded or not self.requests:
            self.world.step("iteration", self._drain())
            return
        rows = [request.row for request in self.requests]
        last = self.pages[rows, [(request.length - 1) // page for request in self.requests]]
        writes: dict[int, Int32s | None] = {band: last for band, kind in enumerate(self.shape.kinds) if kind != "state"}
        if self.shape.bands == 3:
            writes[0] = np.array([request.state[0] for request in self.requests if request.state is not None], np.int32)
        self.world.step("iteration", self._drain(), writes)

    def _drain(self) -> list[Op]:
        ops, self.ops = self.ops, []
        return ops


def timer_cost_us() -> tuple[float, float]:
    """What the clock itself adds to each figure: wall and CPU microseconds, medians of many empty measurements."""
    wall, cpu = [], []
    for _ in range(2000):
        with Timer() as timer:
            pass
        wall.append(timer.wall_ns)
        cpu.append(timer.cpu_ns)
    return round(float(np.median(wall)) / 1e3, 2), round(float(np.median(cpu)) / 1e3, 2)
