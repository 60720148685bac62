"""Tracks: what a journal tells over time: a request's phases, the steps of each stage, decisions, memory.

Owns which record becomes which event. Must never hold more than what lives. Invariants: every phase that began ends, at
the latest with the life; a request is in one phase at a time.

    requests        a thread each: waits, prefill, decode, parked, waits again; its decisions as instants; an arrow from
                    who needed memory to who was retracted for it
    core            decisions about everybody, and how many requests are in which phase
    stage S         steps between the moment they were sent and the one when every rank had reported them, which is all
                    that a journal knows of a device's time; units of each band that are live, hole, pending and beyond
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from allocator.columns import i32
from daemon.core.inputs import Arrived, EpochBegan, EpochEnded, Reported
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from daemon.core.requests import State
from ipc.messages import Step
from journal.reader import Record
from journal.records import INPUT_KINDS, Closed, Divergence, Kind, Opened
from journal.snapshots import Body, Header
from tools.export.events import CORE, FIRST_STAGE, REQUESTS, Clock, Events
from tools.replica import factories

WAITS, PREFILL, DECODE, PARKED = "waits", "prefill", "decode", "parked"
AGAIN: dict[str, str] = {
    Verdict.RETRACTED: "waits again: retracted",
    Verdict.REQUEUED: "waits again: its ranks were lost",
    Verdict.RECOVERED: "waits again: the daemon was restarted",
    Verdict.RESUMED: "waits again: its client came back with other tokens",
}
BEGUN: dict[State, str] = {
    State.WAITING: WAITS,
    State.RETRACTED: AGAIN[Verdict.RETRACTED],
    State.PREFILLING: PREFILL,
    State.PARKED_CHUNK: PARKED,
    State.RUNNING: DECODE,
    State.PARKED_ROW: PARKED,
}
"""Phases of requests that a snapshot found in the midst of their lives."""
COUNTED = {WAITS: "waiting", PREFILL: "prefilling", DECODE: "decoding", PARKED: "parked"}
CORE_THREAD = 1


@dataclass(slots=True)
class Phase:
    """What a request does since `begin_ns`; `before` is what it did when it was parked."""

    name: str
    begin_ns: int
    args: dict[str, Any] = field(default_factory=dict)
    before: str = ""
    row: tuple[int, int] | None = None


@dataclass(slots=True)
class Flying:
    """A step that was sent, and the lane on which its slice lies."""

    begin_ns: int
    lane: int
    name: str
    args: dict[str, Any]


class Trace:
    """Takes records in order and writes events; `request` 0: of all requests. `arena`: units of bands are followed."""

    def __init__(self, events: Events, request: int = 0, arena: bool = True) -> None:
        self._events = events
        self._only = request
        self._arena = arena
        self._clock = Clock()
        self._life = ""
        self._config: CoreConfig | None = None
        self._arrived: Arrived | None = None
        self._phases: dict[int, Phase] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self._flying: dict[int, Flying] = {}
        self._stages: list[Any] = []
        self._bands = 0
        self._told: dict[tuple[int, str], dict[str, int]] = {}
        self._takes: dict[int, Callable[[Any], None]] = {
            Kind.OPENED: self._opened,
            Kind.ARRIVED: self._arrive,
            Kind.DECIDED: self._decided,
            Kind.STEPPED: self._stepped,
            Kind.REPORTED: self._reported,
            Kind.EPOCH_BEGAN: self._epoch_began,
            Kind.EPOCH_ENDED: self._epoch_ended,
            Kind.DIVERGED: self._diverged,
            Kind.CLOSED: self._closed,
        }
        events.name(CORE, CORE_THREAD, "core", "decisions about everybody")

    def begin_at(self, header: Header, body: Body) -> None:
        """Begin behind a snapshot: its requests are in the midst of what they do."""
        resumed = factories().resume(body)
        core: Any = resumed.core
        self._life, self._config = header.life, resumed.config
        self._begin_stages(list(resumed.stages))
        for number, request in core.state.requests.items():
            phase = Phase(BEGUN[request.state], 0, {"since": "before the journal begins"})
            if request.row >= 0:
                phase.row = (request.row, int(core.state.rows.generation[request.row]))
                self._rows[phase.row] = number
            phase.before = DECODE if request.state is State.PARKED_ROW else PREFILL
            self._begin(number, phase)

    def take(self, record: Record) -> None:
        """One record."""
        take = self._takes.get(record.kind)
        if take is not None:
            payload: Any = record.decode()
            if record.kind in INPUT_KINDS:
                self._clock.at(payload.now_ns)
            take(payload)
        elif record.kind in INPUT_KINDS:
            item: Any = record.decode()
            self._clock.at(item.now_ns)

    def end(self) -> dict[str, Any]:
        """The journal ends here: so does everything that goes on; what to say of the trace."""
        self._end_life("the journal ends here")
        about = "a step's slice goes from when it was sent to when all ranks had reported it"
        return {"made_by": "bandmaster export", "about": about}

    # --- lives and epochs ----------------------------------------------------------------------------------------

    def _opened(self, opened: Opened) -> None:
        self._end_life("the life ended")
        self._clock.at(opened.now_ns, anew=True)
        self._life, self._config = opened.life, opened.core
        self._core(f"life {opened.life} began", {"decision_version": opened.decision_version, **opened.versions})

    def _closed(self, closed: Closed) -> None:
        self._clock.at(closed.now_ns)
        self._core("closed in order", {"why": closed.why})
        self._end_life("the life ended")

    def _end_life(self, why: str) -> None:
        self._lose_steps(why)
        for number in list(self._phases):
            self._finish(number, {"then": why})
        self._rows.clear()
        self._arrived = None

    def _epoch_began(self, item: EpochBegan) -> None:
        self._core(f"epoch {item.epoch} began", {"model": item.facts.name})
        stages: list[Any] = []
        if self._arena and self._config is not None:
            make = factories().stage
            stages = [make(item.geometry, at, self._config, item.facts) for at in range(len(item.geometry.stages))]
        self._begin_stages(stages, len(item.geometry.stages))

    def _begin_stages(self, stages: list[Any], count: int = 0) -> None:
        self._stages = stages if self._arena else []
        self._bands = max(count, len(stages))
        self._told.clear()

    def _epoch_ended(self, item: EpochEnded) -> None:
        self._core(f"epoch {item.epoch} ended", {"why": item.why, "recovers": item.recovers})
        self._lose_steps("the epoch ended")
        self._rows.clear()
        self._begin_stages([])

    def _diverged(self, found: Divergence) -> None:
        args = {"what": found.what, "left": found.left, "right": found.right, "op": found.op, "kind": found.kind}
        self._core(f"ranks parted at step {found.seq}", args)

    def _core(self, name: str, args: dict[str, Any]) -> None:
        self._events.instant(CORE, CORE_THREAD, name, self._clock.now_ns, args)

    # --- requests ------------------------------------------------------------------------------------------------

    def _arrive(self, item: Arrived) -> None:
        self._arrived = item

    def _decided(self, decided: Decided) -> None:
        verdict, number = decided.verdict, decided.request
        args = {"reason": decided.reason, **decided.numbers} | ({"by": decided.by} if decided.by else {})
        if verdict == Verdict.ACCEPTED:
            self._accepted(decided)
            return
        if not number:
            self._core(verdict, args)
            return
        if verdict == Verdict.ENDED:
            self._told_of(number, f"ended: {decided.reason}", args)
            self._finish(number, {"then": decided.reason})
            return
        self._told_of(number, verdict, args)
        if verdict in AGAIN:
            self._again(decided, args)
        elif verdict == Verdict.ADMITTED:
            row = (decided.numbers.get("row", -1), decided.numbers.get("generation", 0))
            self._turn(number, Phase(PREFILL, self._clock.now_ns, args, row=row))
            self._rows[row] = number
        elif verdict in (Verdict.PARKED, Verdict.UNPARKED):
            self._park(number, verdict == Verdict.PARKED, args)
        self._count()

    def _accepted(self, decided: Decided) -> None:
        arrived, n = self._arrived, decided.numbers.get("n", 1)
        ids = {"id": arrived.generate.id, "frontend": arrived.frontend} if arrived is not None else {}
        for choice in range(n):
            args = {**ids, "choice": choice, **decided.numbers}
            self._begin(decided.request + choice, Phase(WAITS, self._clock.now_ns, args))
        self._count()

    def _again(self, decided: Decided, args: dict[str, Any]) -> None:
        """What the request held is gone, and it waits; an arrow from who needed it."""
        self._turn(decided.request, Phase(AGAIN[decided.verdict], self._clock.now_ns, args))
        if decided.verdict == Verdict.RETRACTED and decided.by in self._phases and self._only in (0, decided.request):
            self._events.arrow(REQUESTS, decided.by, decided.request, "retracted", self._clock.now_ns)

    def _park(self, number: int, parks: bool, args: dict[str, Any]) -> None:
        phase = self._phases.get(number)
        if phase is None or (phase.name == PARKED) == parks:
            return
        name = PARKED if parks else phase.before
        self._turn(number, Phase(name, self._clock.now_ns, args, phase.name, phase.row), keep_row=True)

    def _begin(self, number: int, phase: Phase) -> None:
        self._events.name(REQUESTS, number, "requests", f"request {number}")
        self._phases[number] = phase

    def _turn(self, number: int, phase: Phase, keep_row: bool = False) -> None:
        """One phase ends and another one begins."""
        self._write_phase(number, {})
        before = self._phases.pop(number, None)
        if before is not None and before.row is not None and not keep_row:
            self._rows.pop(before.row, None)
        self._begin(number, phase)

    def _finish(self, number: int, args: dict[str, Any]) -> None:
        self._write_phase(number, args)
        phase = self._phases.pop(number, None)
        if phase is not None and phase.row is not None:
            self._rows.pop(phase.row, None)
        self._events.forget(REQUESTS, number)
        self._count()

    def _write_phase(self, number: int, args: dict[str, Any]) -> None:
        phase = self._phases.get(number)
        if phase is not None and self._only in (0, number):
            self._events.slice(REQUESTS, number, phase.name, phase.begin_ns, self._clock.now_ns, phase.args | args)

    def _told_of(self, number: int, name: str, args: dict[str, Any]) -> None:
        if self._only in (0, number):
            self._events.instant(REQUESTS, number, name, self._clock.now_ns, args)

    def _count(self) -> None:
        phases = Counter(COUNTED.get(phase.name, "waiting") for phase in self._phases.values())
        self._tell(CORE, "requests", {name: phases[name] for name in COUNTED.values()})

    # --- steps ---------------------------------------------------------------------------------------------------

    def _stepped(self, step: Step) -> None:
        args: dict[str, Any] = {"epoch": step.epoch, "ops": len(step.ops)}
        name = f"step {step.seq}"
        if step.forward is not None:
            counts = i32(step.forward.counts)
            args |= {"rows": len(counts), "tokens": int(counts.sum()), "longest": int(counts.max(initial=0))}
        else:
            name += ", no forward"
        taken = {flying.lane for flying in self._flying.values()}
        lane = next(lane for lane in range(1, len(taken) + 2) if lane not in taken)
        self._flying[step.seq] = Flying(self._clock.now_ns, lane, name, args)
        for place, stage in enumerate(self._stages):
            stage.apply_step(step)
            for band in stage.counts():
                values = {what: units for what, units in band.items() if what != "band"}
                self._tell(FIRST_STAGE + place, str(band["band"]), values)

    def _reported(self, item: Reported) -> None:
        rows, generations = i32(item.rows).tolist(), i32(item.generations).tolist()
        for row in zip(rows, generations, strict=True):
            number = self._rows.get(row, 0)
            phase = self._phases.get(number)
            if phase is not None and phase.name == PREFILL:
                self._turn(number, Phase(DECODE, self._clock.now_ns, row=row), keep_row=True)
        self._land(item.seq, {"sampled": len(rows)})
        self._count()

    def _land(self, seq: int, args: dict[str, Any]) -> None:
        flying = self._flying.pop(seq, None)
        if flying is None:
            return
        for stage in range(max(self._bands, 1)):
            pid, process = FIRST_STAGE + stage, f"stage {stage}"
            self._events.name(pid, flying.lane, process, f"steps in flight, {flying.lane}")
            now_ns = self._clock.now_ns
            self._events.slice(pid, flying.lane, flying.name, flying.begin_ns, now_ns, flying.args | args)

    def _lose_steps(self, why: str) -> None:
        for seq in list(self._flying):
            self._land(seq, {"never_reported": why})

    def _tell(self, pid: int, name: str, values: dict[str, int]) -> None:
        """A counter where it changed."""
        if self._told.get((pid, name)) != values:
            self._told[pid, name] = values
            self._events.counter(pid, name, self._clock.now_ns, values)
