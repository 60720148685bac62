"""Faults of the core: what it decides otherwise than its inputs say.

Owns the changes to the core of one life, undone when it is over: replay runs the core as it is. The truth is the step
that the decision belongs to and the request that it is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec

from daemon.core import inputs, order, pressure
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import Verdict
from daemon.core.requests import Request
from daemon.core.scheduler import SchedulerCore
from tools.planted.scene import Fault, Scene, Truth


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute is another one for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class CoreFault(Fault):
    """Sees what the core is fed and what it gives."""

    def core(self, scene: Scene) -> AbstractContextManager[None]:
        """See Fault."""
        feed = SchedulerCore.feed

        def fed(core: SchedulerCore, item: inputs.Input) -> Outputs:
            return self.feed(scene, lambda one: feed(core, one), item)

        return replaced(SchedulerCore, "feed", fed)

    def feed(self, scene: Scene, feed: Any, item: inputs.Input) -> Outputs:
        """In place of the core's own."""
        raise NotImplementedError

    def at(self, scene: Scene, out: Outputs, request: int) -> None:
        """It happened, in the step that comes of it."""
        self.truth = Truth(scene.step if out.step is None else out.step.seq, request=request)


class WrongVictim(CoreFault):
    """The core retracts another request than the rule says."""

    turns = 160

    def core(self, scene: Scene) -> AbstractContextManager[None]:
        """See Fault."""
        cheapest = pressure._cheapest

        def dearest(core: Any) -> Any:
            found = cheapest(core)
            owners = [core.rows.owners[row] for row in core.rows.going().tolist()]
            others = [one for one in owners if one is not None and found is not None and one is not found[0]]
            if found is None or not scene.ripe or not others:
                return found
            self.truth = Truth(core.seq + 1, request=others[-1].number)
            return others[-1], found[1]

        return replaced(pressure, "_cheapest", dearest)


def youngest_first(request: Request) -> tuple[int]:
    """The other way round."""
    return (-request.number,)


class WrongAdmission(CoreFault):
    """The core starts the youngest waiting request first."""

    turns = 160

    def core(self, scene: Scene) -> AbstractContextManager[None]:
        """See Fault."""

        @contextmanager
        def backwards() -> Iterator[None]:
            true = order.POLICIES["fcfs"]
            order.POLICIES["fcfs"] = lambda config: order.Sorted(youngest_first)
            try:
                with super(WrongAdmission, self).core(scene):
                    yield
            finally:
                order.POLICIES["fcfs"] = true

        return backwards()

    def feed(self, scene: Scene, feed: Any, item: inputs.Input) -> Outputs:
        """See CoreFault."""
        out: Outputs = feed(item)
        if self.truth is None:
            waiting = [request.number for request in scene.core.state.queue]
            for decided in out.decisions:
                told = decided.verdict in (Verdict.ADMITTED, Verdict.WAITS)
                if told and any(number < decided.request for number in waiting):
                    self.at(scene, out, decided.request)
                    break
        return out


class ClockRead(CoreFault):
    """The core stamps an arrival by a clock of its own, 7 ms later than the input says."""

    def feed(self, scene: Scene, feed: Any, item: inputs.Input) -> Outputs:
        """See CoreFault."""
        if not isinstance(item, inputs.Arrived) or not scene.ripe:
            out: Outputs = feed(item)
            return out
        out = feed(msgspec.structs.replace(item, now_ns=item.now_ns + 7_000_000))
        self.at(scene, out, out.decisions[0].request)
        return out


class OutputFault(CoreFault):
    """The core gives something else than it decided; what it keeps for itself stays true."""

    def feed(self, scene: Scene, feed: Any, item: inputs.Input) -> Outputs:
        """See CoreFault."""
        out: Outputs = feed(item)
        for place, decided in enumerate(out.decisions):
            made = self.decided(decided) if scene.ripe else None
            if made is not None:
                out.decisions[place] = made
                self.at(scene, out, decided.request)
                break
        return out

    def decided(self, decided: Decided) -> Decided | None:
        """The decision in place of this one, if it is the one."""
        raise NotImplementedError


class WrongReason(OutputFault):
    """The core says that a request ended by its length, when a stop id ended it."""

    def decided(self, decided: Decided) -> Decided | None:
        """See OutputFault."""
        ended = decided.verdict == Verdict.ENDED and decided.reason == "stop"
        return msgspec.structs.replace(decided, reason="length") if ended else None


class DoubleCount(OutputFault):
    """The core counts cached tokens of an admission twice."""

    def decided(self, decided: Decided) -> Decided | None:
        """See OutputFault."""
        cached = decided.numbers.get("cached_tokens", 0) if decided.verdict == Verdict.ADMITTED else 0
        numbers = decided.numbers | {"cached_tokens": 2 * cached}
        return msgspec.structs.replace(decided, numbers=numbers) if cached else None


FAULTS: tuple[type[Fault], ...] = (WrongVictim, WrongAdmission, ClockRead, WrongReason, DoubleCount)
