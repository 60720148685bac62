"""Faults of the records: what is written is not what happened, in frames that are sound.

Owns the changes to the stream of records. Must never change what core and ranks do. The truth is the step and a
request, or the record that is false.
"""

from __future__ import annotations

from typing import Any

import msgspec

from allocator.columns import i32, pack_i32, pack_i64
from allocator.ops import Free
from daemon.core import inputs
from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from ipc.messages import Step
from journal.records import Closed, Digested, Snapshotted
from tools.planted.scene import Fault, Scene, Truth, takes_pages


class RecordFault(Fault):
    """Changes, drops or moves one record of a kind."""

    kind: type[msgspec.Struct]

    def record(self, scene: Scene, payload: Any) -> list[Any]:
        """See Fault."""
        made = self.change(scene, payload) if isinstance(payload, self.kind) and scene.ripe else None
        return [payload] if made is None else made

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """What stands in its place; None: another one is the one."""
        raise NotImplementedError


def tenants_of(scene: Scene, report: inputs.Reported) -> list[int]:
    """Whose tokens a report has, in its order: by row and generation, for a row may have another tenant by now."""
    return [
        scene.tenants.get(key, 0)
        for key in zip(i32(report.rows).tolist(), i32(report.generations).tolist(), strict=True)
    ]


def forward_of(step: Step, **columns: bytes) -> Step:
    """A step with other columns of its forward."""
    assert step.forward is not None, "a forward is changed"
    return msgspec.structs.replace(step, forward=msgspec.structs.replace(step.forward, **columns))


class DroppedDecision(RecordFault):
    """An admission is not in the journal."""

    kind = Decided

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        if payload.verdict != Verdict.ADMITTED:
            return None
        self.truth = Truth(scene.step, request=payload.request)
        return []


class DoubledDecision(RecordFault):
    """The end of a request stands twice."""

    kind = Decided

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        if payload.verdict != Verdict.ENDED:
            return None
        self.truth = Truth(request=payload.request)
        return [payload, payload]


class ChangedNumber(RecordFault):
    """A number of a decision was changed."""

    kind = Decided

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        if payload.verdict != Verdict.ADMITTED:
            return None
        self.truth = Truth(scene.step, request=payload.request)
        return [msgspec.structs.replace(payload, numbers=payload.numbers | {"waited_ms": 4711})]


class SkippedStep(RecordFault):
    """A step is not in the journal."""

    kind = Step

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        if not payload.ops:
            return None
        self.truth = Truth(payload.seq)
        return []


class DoubleFree(RecordFault):
    """A step frees the same pages twice."""

    kind = Step

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        for place, op in enumerate(payload.ops):
            if isinstance(op, Free) and scene.holders(op):
                self.truth = Truth(payload.seq, place + 1, scene.holders(op)[0])
                ops = [*payload.ops[: place + 1], op, *payload.ops[place + 1 :]]
                return [msgspec.structs.replace(payload, ops=ops)]
        return None


class WrongId(RecordFault):
    """A take names another virtual page than the lowest free one."""

    kind = Step

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        for place, op in enumerate(payload.ops):
            if takes_pages(op):
                ids = i32(op.parts[-1].ids).copy()
                ids[-1] += 3
                part = msgspec.structs.replace(op.parts[-1], ids=pack_i32(ids))
                other = msgspec.structs.replace(op, parts=[*op.parts[:-1], part])
                about = scene.holders(op)[0]
                self.truth = Truth(payload.seq, place, about)
                return [msgspec.structs.replace(payload, ops=[*payload.ops[:place], other, *payload.ops[place + 1 :]])]
        return None


class WrongTable(RecordFault):
    """The page table of one request gets a page of another."""

    kind = Step

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        forward = payload.forward
        if forward is None or not forward.table_pages:
            return None
        pages = i32(forward.table_pages).copy()
        about = scene.owners["page", int(pages[-1])]
        others = [page for (kind, page), owner in scene.owners.items() if kind == "page" and owner != about]
        pages[-1] = others[-1]
        self.truth = Truth(payload.seq, request=about)
        return [forward_of(payload, table_pages=pack_i32(pages))]


class WrongStart(RecordFault):
    """A row decodes from another position than it stopped at."""

    kind = Step

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        forward = payload.forward
        if forward is None:
            return None
        starts = i32(forward.starts).copy()
        starts[0] -= 1
        owner = scene.core.state.rows.owners[int(i32(forward.rows)[0])]
        if owner is None or starts[0] < 0:
            return None
        self.truth = Truth(payload.seq, request=owner.number)
        return [forward_of(payload, starts=pack_i32(starts))]


class WrongToken(RecordFault):
    """The core was told another token than the rank sampled."""

    kind = inputs.Reported

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        tokens, tenants = list(memoryview(payload.tokens).cast("q")), tenants_of(scene, payload)
        if len(tokens) < 2 or not tenants[1]:
            return None
        tokens[1] += 5
        self.truth = Truth(payload.seq, request=tenants[1])
        return [msgspec.structs.replace(payload, tokens=pack_i64(tokens))]


class StaleGeneration(RecordFault):
    """A report's token is put down to the tenant that the row had before."""

    kind = inputs.Reported

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        generations = i32(payload.generations).copy()
        for place, tenant in enumerate(tenants_of(scene, payload)):
            if tenant and generations[place] > 1:
                generations[place] -= 1
                self.truth = Truth(payload.seq, request=tenant)
                return [msgspec.structs.replace(payload, generations=pack_i32(generations))]
        return None


class MovedReport(RecordFault):
    """A report, with its digest, stands where it did not come."""

    kind = inputs.Reported
    again = False  # it stands in its place too

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Any] = []
        self._digest: Any = None

    def record(self, scene: Scene, payload: Any) -> list[Any]:
        """See Fault."""
        if isinstance(payload, Digested):
            self._digest = payload
        if self._held and isinstance(payload, inputs.Reported):
            held, self._held = self._held, []
            return [payload, *held]
        if isinstance(payload, inputs.Reported) and scene.ripe and payload.rows:
            tenant = tenants_of(scene, payload)[0]
            if tenant:
                self.truth = Truth(payload.seq, request=self._told(tenant))
                self._held = [payload]
                return [payload] if self.again else []
        return [payload]

    def _told(self, number: int) -> int:
        return number if self.again else 0


class ReorderedReport(MovedReport):
    """Two reports stand the other way round."""


class DuplicateReport(MovedReport):
    """A report stands a second time, behind the next one."""

    again = True


class LostReport(RecordFault):
    """A report that the core was fed is not in the journal."""

    kind = inputs.Reported

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        if not payload.rows:
            return None
        self.truth = Truth(payload.seq)
        return []


class LostArrival(RecordFault):
    """An arrival that the core was fed is not in the journal."""

    kind = inputs.Arrived

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        self.truth = Truth(request=scene.core.next_request)
        return []


class ChangedPrompt(RecordFault):
    """A prompt in the journal has another last token."""

    kind = inputs.Arrived

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        generate = payload.generate
        prompt = generate.prompt[:-8] + pack_i64([499 if generate.prompt[-8:] != pack_i64([499]) else 498])
        self.truth = Truth(request=scene.core.next_request)
        return [msgspec.structs.replace(payload, generate=msgspec.structs.replace(generate, prompt=prompt))]


class OtherSnapshot(RecordFault):
    """A snapshot is of another state than that behind its step."""

    snapshot = True
    turns = 70
    kind = Snapshotted

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """The digest of a state that has seen one tick more."""
        self.truth = Truth(scene.step, sequence=scene.sequence + 1)
        return [msgspec.structs.replace(payload, digest=scene.core.state_digest())]


class ForgedRecovered(RecordFault):
    """A life takes over one token less of a request than the life before left."""

    kind = inputs.Recovered
    lives = 2
    turns = 20

    def record(self, scene: Scene, payload: Any) -> list[Any]:
        """See Fault; it is a life's first input."""
        if self.truth is not None or not isinstance(payload, inputs.Recovered):
            return [payload]
        place = next(at for at, group in enumerate(payload.groups) if group.choices[0].tokens)
        group = payload.groups[place]
        choice = msgspec.structs.replace(group.choices[0], tokens=group.choices[0].tokens[:-8])
        forged = msgspec.structs.replace(group, choices=[choice, *group.choices[1:]])
        self.truth = Truth(request=group.accepted.first_request, sequence=scene.sequence + 1)
        groups = [*payload.groups[:place], forged, *payload.groups[place + 1 :]]
        return [msgspec.structs.replace(payload, groups=groups)]


class ForeignRecord(RecordFault):
    """A decision of the life before stands in this one."""

    kind = Decided
    lives = 2

    def __init__(self) -> None:
        super().__init__()
        self._foreign: Any = None

    def change(self, scene: Scene, payload: Any) -> list[Any] | None:
        """See RecordFault."""
        if scene.life == 1:
            self._foreign = payload if payload.verdict == Verdict.ADMITTED else self._foreign
            return None
        self.truth = Truth(request=self._foreign.request, sequence=scene.sequence + 1)
        return [self._foreign, payload]


class WrongTotals(RecordFault):
    """A life's totals at its end count a token too much."""

    kind = Closed

    def record(self, scene: Scene, payload: Any) -> list[Any]:
        """See Fault."""
        if not isinstance(payload, Closed):
            return [payload]
        self.truth = Truth(scene.step, sequence=scene.sequence + 1)
        totals = payload.totals | {"output_tokens_total": payload.totals["output_tokens_total"] + 1}
        return [msgspec.structs.replace(payload, totals=totals)]


FAULTS: tuple[type[Fault], ...] = (
    DroppedDecision,
    DoubledDecision,
    ChangedNumber,
    SkippedStep,
    DoubleFree,
    WrongId,
    WrongTable,
    WrongStart,
    WrongToken,
    StaleGeneration,
    ReorderedReport,
    DuplicateReport,
    LostReport,
    LostArrival,
    ChangedPrompt,
    OtherSnapshot,
    ForgedRecovered,
    ForeignRecord,
    WrongTotals,
)
