"""Relief: the ladder that is climbed when what the next step needs does not fit, and what is told of it.

Owns the climb over a table of rungs and its verdict; the rungs are in `pressure`. Must never admit anything.
Invariants: the climb stops at the first rung behind which the step fits; a rung that gives less than was asked, or
nothing, falls through to the next; the last one always leaves a step that fits; one decision per climb says what every
rung that ran gave.

    relief 0 "reclaim > spill: no tier > throttle > retract"
             {units_short: 3, stage: 0, band: 1, reclaim_units: 0, spill_units: 0, throttle_steps: 4, ...}

A climb is told when it changed something, and otherwise once per change of the rungs that ran: a chunk that stays
parked is not told in every step. What the newest climb of each kind found stays in `CoreState.relief` until a step of
that kind fits without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

from allocator.capacity import CapacityRefusal
from daemon.core.budget import shortage
from daemon.core.memory import Memory
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import Verdict
from daemon.core.requests import Request
from daemon.core.state import CoreState

SKIPS_TOLD_MAX = 4  # passed-over requests that a report of a livelock names


class Gave(NamedTuple):
    """What a rung that ran gave, in numbers by name; `note` says why it could give nothing."""

    numbers: dict[str, int]
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Need:
    """What the next step needs and lacks. `refusal` is the newest answer of memory; None: the step fits now.

    `asked` says in numbers what was asked for; `request` is whose chunk it is, 0 for rows, of which `by` is the oldest;
    `acted`: a rung changed something.
    """

    kind: ClassVar[str]

    core: CoreState
    now_ns: int
    out: Outputs
    refusal: CapacityRefusal | None
    asked: dict[str, int]
    request: int = 0
    by: int = 0
    acted: bool = False

    @property
    def memory(self) -> Memory:
        """The memory of the epoch."""
        assert self.core.memory is not None, "only an epoch has pressure"
        return self.core.memory

    @property
    def refused(self) -> CapacityRefusal:
        """Why the step does not fit, while it does not."""
        assert self.refusal is not None, "a rung runs while the step does not fit"
        return self.refusal

    def tell(self, verdict: Verdict, request: Request, numbers: dict[str, int]) -> None:
        """Decide about one request for want of memory."""
        self.out.decisions.append(Decided(self.now_ns, verdict, request.number, "memory", numbers))


N = TypeVar("N", bound=Need)


@dataclass(frozen=True, slots=True)
class Rung(Generic[N]):
    """A rung by name. `run` returns what it gave, or None where it does not apply; it asks again what it changed."""

    name: str
    run: Callable[[N], Gave | None]


def climb(need: N, ladder: Sequence[Rung[N]]) -> None:
    """Climb until the step fits; tell what was done."""
    core = need.core
    core.totals.climbs += 1
    numbers = need.asked | shortage(need.refused)
    ran: list[str] = []
    for rung in ladder:
        gave = rung.run(need)
        if gave is None:
            continue
        ran.append(f"{rung.name}: {gave.note}" if gave.note else rung.name)
        numbers |= {f"{rung.name}_{what}": number for what, number in gave.numbers.items()}
        if need.refusal is None:
            break
    assert need.refusal is None, "the last rung leaves a step that fits"
    decided = Decided(need.now_ns, Verdict.RELIEF, need.request, " > ".join(ran), numbers, need.by)
    told = core.relief.get(need.kind)
    core.relief[need.kind] = decided
    if need.acted or told is None or told.reason != decided.reason:
        need.out.decisions.append(decided)


def fits(core: CoreState, kind: str) -> None:
    """What is needed of this kind fits without the ladder: what the last climb found holds no longer."""
    core.relief.pop(kind, None)


def last_verdicts(core: CoreState) -> tuple[str, dict[str, int]]:
    """What the ladder and the newest pass found last, in words and numbers, for the report of a livelock."""
    words, numbers = [], dict[str, int]()
    for kind, told in sorted(core.relief.items()):
        words.append(f"{kind}: {told.reason}")
        numbers |= {f"{kind}_{name}": number for name, number in told.numbers.items()}
    for number, (reason, _) in list(core.skipped.items())[:SKIPS_TOLD_MAX]:
        words.append(f"request {number} waits: {reason}")
    for _, found in list(core.skipped.values())[:1]:
        numbers |= {f"waits_{name}": value for name, value in found.items()}
    return "; ".join(words), numbers
