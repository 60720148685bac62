"""Requests: the life of every request as phases, from what a journal recorded about it.

Owns who is on which row, who holds memory, and the lanes in which a page draws lives. Must never need a core: a journal
of another decision version has the same records. Positions are numbers of steps: at position p, p steps were before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from allocator.columns import Int32s, i32
from daemon.core.inputs import Arrived
from daemon.core.outputs import Decided
from daemon.core.reasons import WAITS_AGAIN, Verdict
from ipc.messages import EXPLICIT, SAMPLE, Forward
from tools.view.units import Mask


class Phase(IntEnum):
    """What a request does from here on."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    PARKED = 3
    RETRACTED = 4  # waits again, what it held was taken
    REQUEUED = 5  # waits again, the epoch ended under it
    AWAY = 6  # the daemon is down
    OVER = 7


FIRST_ROWS = 64  # columns by row grow from here
LANES_MAX = 160  # more are too thin to be told apart

HOLDS = (Phase.PREFILL, Phase.DECODE, Phase.PARKED)

GO_TO: dict[str, Phase] = {
    Verdict.ADMITTED: Phase.PREFILL,
    Verdict.PARKED: Phase.PARKED,
    **dict.fromkeys(WAITS_AGAIN, Phase.WAITING),  # from the queue, behind whatever it has by now
    Verdict.RETRACTED: Phase.RETRACTED,
    Verdict.REQUEUED: Phase.REQUEUED,
    Verdict.ENDED: Phase.OVER,
}
"""Where a decision about a request takes it; UNPARKED takes it back to where it was."""


@dataclass(slots=True)
class Life:
    """One request. `end_at` is -1 while it has no end; `out` are output tokens, -1 where no end says how many."""

    number: int
    id: str
    frontend: str
    prompt_tokens: int
    max_tokens: int
    at: int
    us: int
    end_at: int = -1
    end_us: int = -1
    end: str = ""
    out: int = -1
    retractions: int = 0
    cached_tokens: int = 0
    held_at: int = -1  # where it was admitted first
    lane: int = 0
    queue_lane: int = -1
    phase: Phase = Phase.WAITING
    before_park: Phase = Phase.PREFILL
    row: int = -1


@dataclass(slots=True)
class Phases:
    """Columns, in the order of time: request number, position, time (us), phase."""

    requests: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    us: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)


class Requests:
    """All requests of a journal, in its order."""

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}
        self.phases = Phases()
        self.active = np.zeros(1024, np.bool_)  # by number: holds memory as a running request
        self.changed: list[tuple[int, bool]] = []  # who began or ended to hold memory; the reader takes and clears it
        self._on_row: dict[int, Life] = {}
        self._number_on = np.zeros(FIRST_ROWS, np.int32)  # by row: its request, 0: none
        self._prefilling = np.zeros(FIRST_ROWS, np.bool_)  # by row
        self._sampled = np.zeros(FIRST_ROWS, np.bool_)  # by row: its request sampled since it has the row

    def decided(self, decided: Decided, arrived: Arrived | None, at: int, us: int) -> None:
        """A decision about a request; `arrived` is the newest arrival."""
        if decided.verdict == Verdict.ACCEPTED and arrived is not None:
            for choice in range(decided.numbers.get("n", 1)):
                self._came(decided, arrived, decided.request + choice, at, us)
            return
        life = self.lives.get(decided.request)
        if life is None:
            return
        numbers = decided.numbers
        if decided.verdict == Verdict.ADMITTED:
            self._sit(life, numbers["row"])
            if life.held_at < 0:  # later starts find its own tokens too
                life.cached_tokens = numbers.get("cached_tokens", 0)
        elif decided.verdict == Verdict.RETRACTED:
            life.retractions += 1
        elif decided.verdict == Verdict.ENDED:
            life.end, life.end_at, life.end_us = decided.reason, at, us
            life.out = numbers.get("output_tokens", -1)
        if decided.verdict == Verdict.UNPARKED:
            self._go(life, life.before_park, at, us)
        elif (phase := GO_TO.get(decided.verdict)) is not None:
            self._go(life, phase, at, us)

    def known(self, view: dict[str, object], at: int, us: int) -> None:
        """A request of a core that was resumed from a snapshot, as `SchedulerCore.view` tells it."""
        number, row, stage = int(str(view["request"])), int(str(view["row"])), str(view["stage"])
        prompt, most = int(str(view["prompt_tokens"])), int(str(view["max_output"]))
        life = Life(number, str(view["id"]), str(view["frontend"]), prompt, most, at, us)
        self.lives[number] = life
        if row >= 0:
            self._sit(life, row)
        told = {"prefilling": Phase.PREFILL, "running": Phase.DECODE, "retracted": Phase.RETRACTED}
        phase = Phase.PARKED if stage.startswith("parked") else told.get(stage, Phase.WAITING)
        life.before_park = Phase.PREFILL if stage == "parked_chunk" else Phase.DECODE
        self._go(life, phase, at, us)

    def step(self, forward: Forward, at: int, us: int) -> Mask:
        """A step's rows: which of them decode. A row does once it has sampled; where its input comes from does not say,
        since stages get their tokens spelled out.
        """
        rows, flags = i32(forward.rows), np.frombuffer(forward.flags, np.uint8)
        self._make_rows(int(rows.max(initial=0)))
        decodes: Mask = self._sampled[rows] | ((flags & EXPLICIT) == 0)
        self._sampled[rows[(flags & SAMPLE) != 0]] = True
        for row in rows[decodes & self._prefilling[rows]].tolist():
            self._go(self._on_row[row], Phase.DECODE, at, us)
        return decodes

    def on_rows(self, rows: Int32s) -> Int32s:
        """The numbers of the requests on these rows, 0 where none is known."""
        self._make_rows(int(rows.max(initial=0)))
        return self._number_on[rows]

    def daemon_ended(self, at: int, us: int) -> None:
        """The daemon's life is over: nobody has a row, and who has no end is away."""
        for life in self.lives.values():
            if life.phase != Phase.OVER and life.phase != Phase.AWAY:
                self._go(life, Phase.AWAY, at, us)

    def lanes(self, last: int) -> tuple[int, int]:
        """Give every life the lowest lane that is free from its arrival to its end; how many lanes there are, twice.

        Where that takes more than LANES_MAX, a life has its lane from its first admission on, and one behind all those
        (`queue_lane`) while it waits for that: the first count is then of the lanes without the queue's.
        """
        end = last + 1
        for life in self.lives.values():
            life.queue_lane = -1
        lives = sorted(self.lives.values(), key=lambda life: (life.at, life.number))
        given, count = packed_lanes([(life.at, end if life.end_at < 0 else life.end_at) for life in lives])
        if count <= LANES_MAX:
            for life, lane in zip(lives, given, strict=True):
                life.lane = lane
            return count, count
        ran = sorted((life for life in lives if life.held_at >= 0), key=lambda life: (life.held_at, life.number))
        given, count = packed_lanes([(life.held_at, end if life.end_at < 0 else life.end_at) for life in ran])
        for life, lane in zip(ran, given, strict=True):
            life.lane = lane
        until = [life.held_at if life.held_at >= 0 else end if life.end_at < 0 else life.end_at for life in lives]
        given, queue = packed_lanes([(life.at, over) for life, over in zip(lives, until, strict=True)])
        for life, lane in zip(lives, given, strict=True):
            life.queue_lane = count + lane
            if life.held_at < 0:
                life.lane = life.queue_lane
        return count, count + queue

    def forget_before(self, now_us: int) -> None:
        """What is shown begins here: ended requests and earlier phases are dropped; times count from here on."""
        self.lives = {number: life for number, life in self.lives.items() if life.phase != Phase.OVER}
        self.phases = Phases()
        for life in self.lives.values():
            life.at, life.us, life.held_at = 0, life.us - now_us, min(life.held_at, 0)
            self._note(life, 0, 0)

    def by_number(self) -> Iterator[Life]:
        """All lives in the order of their numbers."""
        for number in sorted(self.lives):
            yield self.lives[number]

    def arrivals(self) -> int:
        """What the requests came as: choices of one arrival follow each other, and each is a request."""
        came = [(life.frontend, life.id, life.us, life.number) for life in self.by_number()]
        return sum(
            one[:3] != before[:3] or one[3] != before[3] + 1
            for one, before in zip(came, [("", "", -1, -1), *came], strict=False)
        )

    # --- inside --------------------------------------------------------------------------------------------------

    def _came(self, decided: Decided, arrived: Arrived, number: int, at: int, us: int) -> None:
        generate = arrived.generate
        prompt = len(generate.prompt) // 8
        self.lives[number] = Life(
            number, generate.id, arrived.frontend, prompt, decided.numbers.get("max_tokens", 0), at, us
        )
        self._note(self.lives[number], at, us)

    def _sit(self, life: Life, row: int) -> None:
        self._stand(life)
        life.row = row
        self._make_rows(row)
        self._on_row[row], self._number_on[row], self._sampled[row] = life, life.number, False

    def _stand(self, life: Life) -> None:
        if life.row >= 0:
            self._prefilling[life.row] = False
            if self._on_row.get(life.row) is life:
                del self._on_row[life.row]
                self._number_on[life.row] = 0
        life.row = -1

    def _make_rows(self, most: int) -> None:
        size = self._sampled.size
        if most >= size:
            more = max(most, size)
            self._number_on = np.concatenate([self._number_on, np.zeros(more, np.int32)])
            self._prefilling = np.concatenate([self._prefilling, np.zeros(more, np.bool_)])
            self._sampled = np.concatenate([self._sampled, np.zeros(more, np.bool_)])

    def _go(self, life: Life, phase: Phase, at: int, us: int) -> None:
        if phase == Phase.PARKED and life.phase != Phase.PARKED:
            life.before_park = life.phase
        life.phase = phase
        if phase not in HOLDS:
            self._stand(life)
        elif life.row >= 0:
            self._prefilling[life.row] = phase == Phase.PREFILL
        self._hold(life.number, phase in HOLDS)
        if phase in HOLDS and life.held_at < 0:
            life.held_at = at
        self._note(life, at, us)

    def _hold(self, number: int, holds: bool) -> None:
        if number >= self.active.size:
            self.active = np.concatenate([self.active, np.zeros(max(number, self.active.size), np.bool_)])
        if bool(self.active[number]) != holds:
            self.active[number] = holds
            self.changed.append((number, holds))

    def _note(self, life: Life, at: int, us: int) -> None:
        columns = self.phases
        columns.requests.append(life.number)
        columns.at.append(at)
        columns.us.append(us)
        columns.phases.append(int(life.phase))


def packed_lanes(spans: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """The lowest free lane of each span (in the order of their begins), and how many lanes that takes."""
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    given, lanes = list[int](), 0
    for begin, end in spans:
        while taken and taken[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free:
            heapq.heappush(free, lanes)
            lanes += 1
        lane = heapq.heappop(free)
        given.append(lane)
        heapq.heappush(taken, (max(end, begin + 1), lane))
    return given, lanes
