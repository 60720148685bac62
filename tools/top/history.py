"""History: what a watcher has seen so far: the newest answer, rates between answers, decisions, the daemon's lives.

Owns the arithmetic over consecutive answers. Must never ask or draw. Invariants: a rate is the difference of two totals
of one life over the daemon's own time between them, never over ours; a new life starts from nothing, and says so.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from daemon.recent import Told
from daemon.watch import Watched

SAMPLES_KEPT = 240
DECISIONS_KEPT = 2000
SMOOTH_NS = 3_000_000_000  # numbers are rates over so much time, sparklines over one sample
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened per second between two answers; None: nothing of that kind did, so there is no such number."""

    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    accepted: float = 0.0
    refused: float = 0.0
    ended: float = 0.0
    steps: float = 0.0
    retractions: float = 0.0
    evicted_units: float = 0.0
    step_ms: float | None = None  # from launch to tokens, mean of the steps with a forward
    core_ms: float | None = None  # scheduling and journal encoding, mean of the iterations
    waited_ms: float | None = None  # from arrival to the first admission, mean
    hit_rate: float | None = None  # of the tokens looked up in the prefix cache


@dataclass(frozen=True, slots=True)
class Note:
    """Something that befell the connection itself, told among the decisions."""

    now_ns: int
    text: str
    bad: bool


@dataclass(slots=True)
class History:
    """Everything that the panels draw from. `lost`: why there is no daemon at the moment; empty while there is."""

    where: str
    watched: Watched | None = None
    lost: str = "connecting"
    lives: int = 0
    rates: Rates = field(default_factory=Rates)
    samples: deque[Rates] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    told: deque[Told | Note] = field(default_factory=lambda: deque(maxlen=DECISIONS_KEPT))
    _behind: deque[Watched] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def bands(self) -> list[list[str]]:
        """Names of the bands by stage and place."""
        return [[band.name for band in stage.bands] for stage in self.watched.stages] if self.watched else []

    def lose(self, reason: str, now_ns: int) -> None:
        """There is no daemon at the moment."""
        if not self.lost and reason:
            self.told.append(Note(now_ns, f"connection lost: {reason}", bad=True))
        self.lost = reason

    def take(self, watched: Watched) -> None:
        """The next answer."""
        before = self.watched
        if before is None or before.life != watched.life:
            self._begin(before, watched)
        elif self.lost:
            self.told.append(Note(watched.now_ns, "connected again to the same daemon", bad=False))
        elif before.epoch["number"] != watched.epoch["number"]:
            text = f"epoch {watched.epoch['number']}: the device memory is new, after: {watched.epoch['last_loss']}"
            self.told.append(Note(watched.now_ns, text, bad=True))
        self.lost = ""
        self.told.extend(watched.decisions)
        if self._behind and watched.now_ns > self._behind[-1].now_ns:
            self.samples.append(rates(self._behind[-1], watched))
            while len(self._behind) > 1 and self._behind[1].now_ns <= watched.now_ns - SMOOTH_NS:
                self._behind.popleft()
            self.rates = rates(self._behind[0], watched)
        self._behind.append(watched)
        self.watched = watched

    def _begin(self, before: Watched | None, watched: Watched) -> None:
        self.lives += 1
        self._behind.clear()
        self.rates = Rates()
        if before is not None:
            text = f"the daemon was restarted: life {before.life[:8]} is over, life {watched.life[:8]} goes on"
            self.told.append(Note(watched.now_ns, text, bad=True))

    def copy(self) -> History:
        """What was seen until now; what comes later does not change it."""
        kept = copy.copy(self)
        kept.told, kept.samples = self.told.copy(), self.samples.copy()
        return kept

    def series(self, name: str) -> list[float | None]:
        """One number of every sample, oldest first."""
        return [getattr(sample, name) for sample in self.samples]


def rates(before: Watched, after: Watched) -> Rates:
    """What happened between two answers of one life."""
    seconds = (after.now_ns - before.now_ns) / NS_PER_S

    def gained(names: Iterable[str]) -> int:
        return sum(after.gauges.get(name, 0) - before.gauges.get(name, 0) for name in names)

    def summed(name: str) -> int:
        return after.sums.get(name, 0) - before.sums.get(name, 0)

    def mean(total: str, count: str, unit: float = 1.0) -> float | None:
        return summed(total) / summed(count) / unit if summed(count) else None

    evicted = [name for name in after.gauges if name.startswith("evicted_units_")]
    return Rates(
        output_tokens=gained(["output_tokens_total"]) / seconds,
        prompt_tokens=gained(["prompt_tokens_total"]) / seconds,
        cached_tokens=summed("cached_tokens") / seconds,
        accepted=gained(["accepted_total"]) / seconds,
        refused=gained(["refused_total"]) / seconds,
        ended=gained(["finished_total", "aborted_total", "failed_total"]) / seconds,
        steps=gained(["forwards_total"]) / seconds,
        retractions=gained(["retractions_total"]) / seconds,
        evicted_units=gained(evicted) / seconds,
        step_ms=mean("forward_us", "forwards", 1000),
        core_ms=mean("core_ns", "iterations", 1e6),
        waited_ms=mean("waited_ms", "first_admitted"),
        hit_rate=mean("cached_tokens", "queried_tokens"),
    )
