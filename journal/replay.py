"""Replay: feeds a journal's inputs to a fresh core and holds what was recorded against what comes out.

Owns the comparison and the rules of what may be missing where a journal was cut. Must never import the core or the
chains: factories are passed in. Invariants: the first difference stops the replay and is reported with both sides; a
life that was cut anywhere passes if everything up to its last record is reproduced.

    input record      fed to the core; its decisions and its step are expected from here on
    Decided, Stepped  must be the next expected ones, byte for byte; a step is applied to the mirror and every stage
    Digested          must be what mirror and stage had after that step, and the chain over the reported tokens;
                      behind a Divergence it is what ended the epoch, and differs
    Recovered         what the life before left, as its replayed core knows it (`journal.succession`)
    Snapshotted       core, mirror and stages must have had that state behind the step that asked for it, byte for byte
    Closed            nothing may be expected any more; the core's state digest and totals must be equal
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from allocator.geometry import Geometry
from allocator.ops import Op
from daemon.core.inputs import (
    Controlled,
    EpochBegan,
    EpochEnded,
    Input,
    Recovered,
    Reported,
    Ticked,
)
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from ipc.messages import ModelFacts, Step
from journal import records
from journal.difference import describe, first_difference
from journal.errors import JournalError
from journal.reader import Record
from journal.records import DECISION_VERSION, INPUT_KINDS, SCHEMA_VERSION, Closed, Digested, Kind, Opened, Snapshotted
from journal.segment import digest
from journal.snapshots import Body, Header, encode_body
from journal.succession import Core as Recoverable
from journal.succession import Succession

BODIES_KEPT = 2  # states that wait for the record of their snapshot
STEPS_KEPT = 4096  # digests of so many steps wait for the ranks' reports


class Core(Recoverable, Protocol):
    """What replay needs of a scheduler core."""

    def feed(self, item: Input) -> Outputs:
        """Apply one input."""

    def state_digest(self) -> bytes:
        """16 bytes over the state."""

    def gauges(self) -> dict[str, int]:
        """Counters by name."""

    def view(self) -> dict[str, Any]:
        """The state as plain values."""


class Mirror(Protocol):
    """The logical chain as a rank follows it."""

    def apply_step(self, seq: int, ops: list[Op], released: Sequence[int]) -> bytes:
        """End the step's released uses and apply its ops; the chained logical digest."""


class Stage(Protocol):
    """One stage's physical chain as its ranks drive it."""

    def apply_step(self, step: Step) -> bytes:
        """Apply a whole step; the chained layout digest."""

    def counts(self) -> list[dict[str, Any]]:
        """Per band: name, and units live, hole, pending and beyond."""

    def state(self, mirror: Any) -> bytes:
        """What a rank of this stage, whose mirror is that one, says in a snapshot."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What replay goes on with from a snapshot."""

    core: Core
    config: CoreConfig
    mirror: Mirror
    stages: list[Stage]


@dataclass(frozen=True, slots=True)
class Factories:
    """How to make what a life is replayed on. `sampled` is `ipc.digests.sampled_digest`, `sampled_start` its start.

    `core_state` writes a core's state down, `resume` makes core, mirror and stages out of a snapshot.
    """

    core: Callable[[CoreConfig], Core]
    mirror: Callable[[Geometry], Mirror]
    stage: Callable[[Geometry, int, CoreConfig, ModelFacts], Stage]
    sampled: Callable[[bytes, int, bytes, bytes, bytes], bytes]
    sampled_start: bytes
    core_state: Callable[[Any], bytes]
    resume: Callable[[Body], Resumed]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where replay and journal differ. Numbers are 0 where they do not apply, `op` is -1."""

    sequence: int
    file: str
    offset: int
    what: str
    recorded: str
    replayed: str
    path: str = ""
    epoch: int = 0
    step: int = 0
    op: int = -1
    request: int = 0
    row: int = -1


class Diverged(JournalError):
    """Carries a Divergence out of the replay of one record."""

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence
        super().__init__(divergence.what)


@dataclass(slots=True)
class Counts:
    """What was reproduced."""

    records: int = 0
    lives: int = 0
    inputs: int = 0
    steps: int = 0
    decisions: int = 0
    digests: int = 0
    snapshots: int = 0
    divergences: int = 0  # places where the ranks had parted, as the daemon found at the time
    unfinished: int = 0  # outputs that a cut-off life did not come to write
    last_sequence: int = 0


@dataclass(slots=True)
class _Expected:
    """An output the core gave: its bytes, the input it came of, and how many ticks had been fed by then."""

    payload: bytes
    input_sequence: int
    ticks: int


@dataclass(slots=True)
class _Epoch:
    """Everything of one epoch that is rebuilt from its steps."""

    number: int
    mirror: Mirror
    stages: list[Stage]
    seq: int = 0
    since: int = 0  # replay began behind this step
    parted: int = 0  # the step at which the daemon found that ranks had parted
    logical: dict[int, bytes] = field(default_factory=dict)
    layouts: dict[int, list[bytes]] = field(default_factory=dict)
    sampled_seq: int = 0
    sampled: dict[int, bytes] = field(default_factory=dict)
    said_sampled: dict[int, list[tuple[Record, Digested]]] = field(default_factory=dict)


class Replay:
    """Takes records one after the other; raises Diverged at the first difference."""

    def __init__(self, factories: Factories) -> None:
        self.counts = Counts()
        self.notes: list[str] = []
        self.core: Core | None = None
        self.epoch: _Epoch | None = None
        self._factories = factories
        self._decides = True  # this life's decisions were made by a core like ours
        self._expected: dict[Kind, deque[_Expected]] = {Kind.DECIDED: deque(), Kind.STEPPED: deque()}
        self._ticks = 0
        self._broke = ""  # the core raised on the last input: what
        self._followed = True  # the core of this life never raised
        self._succession = Succession()
        self._closed = False
        self._last: Record | None = None
        self._behind = 0  # the sequence that the snapshot covers from which replay began
        self._bodies: dict[int, bytes] = {}  # by sequence, states behind steps that asked for a snapshot
        self.snapshot: tuple[Snapshotted, bytes] | None = None  # the newest that was reproduced
        self._steps: dict[int, Callable[[Record], None]] = {
            Kind.OPENED: self._opened,
            Kind.DECIDED: self._decided,
            Kind.STEPPED: self._stepped,
            Kind.DIGESTED: self._digested,
            Kind.READIED: lambda record: None,  # which builds and threads the ranks have decides nothing
            Kind.DIVERGED: self._parted,
            Kind.SNAPSHOTTED: self._snapshotted,
            Kind.CLOSED: self._closed_life,
        }

    def begin_at(self, header: Header, body: Body) -> None:
        """Begin behind a snapshot; the next record is the one behind it."""
        resumed = self._factories.resume(body)
        self.core, self._config, self._behind = resumed.core, resumed.config, header.sequence
        epoch = _Epoch(header.epoch, resumed.mirror, resumed.stages, header.seq, header.seq)
        epoch.sampled_seq, epoch.sampled[body.reported_seq] = body.reported_seq, body.sampled
        self.epoch = epoch
        self.counts.lives, self.counts.last_sequence = 1, header.sequence

    def state_at(self, sequence: int) -> bytes | None:
        """The state behind a step that asked for a snapshot, as its body; only of the newest few."""
        return self._bodies.get(sequence)

    def take(self, record: Record) -> None:
        """Replay one record."""
        if self.core is None and record.kind != Kind.OPENED:
            raise Diverged(_diverged(record, "a life that does not begin with Opened", describe(record.decode()), ""))
        if self._closed and record.kind != Kind.OPENED:
            raise Diverged(_diverged(record, "a record behind Closed", describe(record.decode()), ""))
        self._steps.get(record.kind, self._input)(record)
        self.counts.records += 1
        self.counts.last_sequence = record.sequence
        self._last = record

    def end(self) -> None:
        """The records end here: check what the last life left open."""
        if self.core is None or self._last is None:
            return
        for kind, queue in self._expected.items():
            for expected in queue:
                if self._closed or self._ticks - expected.ticks > 1:
                    what = f"the record {kind.name} that input {expected.input_sequence} led to was never written"
                    shown = describe(records.decode(kind, expected.payload))
                    raise Diverged(_diverged(self._last, what, "nothing", shown))
            self.counts.unfinished += len(queue)
            queue.clear()

    # --- one kind of record each ---------------------------------------------------------------------------------

    def _opened(self, record: Record) -> None:
        self.end()
        opened = record.decode()
        assert isinstance(opened, Opened)
        if opened.schema_version > SCHEMA_VERSION:
            raise JournalError(
                f"life {opened.life} was written with record schema {opened.schema_version}, this version reads up to"
                f" {SCHEMA_VERSION}; use the version that wrote it: {opened.versions}"
            )
        self._succession.opened(self.core, self._decides and self._followed)
        self._decides, self._followed = opened.decision_version == DECISION_VERSION, True
        if not self._decides:
            versions = f"{opened.decision_version}, ours is {DECISION_VERSION}"
            self.notes.append(f"life {opened.life}: decisions are not compared, they are of version {versions}")
        self.core = self._factories.core(opened.core)
        self._config = opened.core
        self.epoch, self._ticks, self._broke, self._closed = None, 0, "", False
        self.counts.lives += 1

    def _input(self, record: Record) -> None:
        assert record.kind in INPUT_KINDS, f"kind {record.kind} is neither an input nor handled"
        item: Any = record.decode()
        self.counts.inputs += 1
        if isinstance(item, Ticked):
            self._ticks += 1
        if self._broke and not isinstance(item, EpochEnded | Controlled):
            what = "the replayed core broke on the input before this one, the recorded one went on"
            raise Diverged(_diverged(record, what, describe(item), self._broke))
        self._broke = ""
        if isinstance(item, Recovered):
            parted = self._succession.recovered(item)
            if parted is not None:
                raise Diverged(_diverged(record, "what a life took over from the one before", *parted))
        self._follow_epoch(record, item)
        if self._decides:
            self._feed(record, item)

    def _follow_epoch(self, record: Record, item: Input) -> None:
        if isinstance(item, EpochBegan):
            make, config = self._factories, self._config
            stages = [make.stage(item.geometry, at, config, item.facts) for at in range(len(item.geometry.stages))]
            self.epoch = _Epoch(item.epoch, make.mirror(item.geometry), stages)
        elif isinstance(item, EpochEnded) and self.epoch is not None and item.epoch == self.epoch.number:
            self.epoch = None
        elif isinstance(item, Reported) and self.epoch is not None and item.epoch == self.epoch.number:
            self._reported(record, item, self.epoch)

    def _feed(self, record: Record, item: Input) -> None:
        assert self.core is not None
        try:
            outputs = self.core.feed(item)
        except Exception as error:
            # The daemon ends the epoch when its core raises; the next input shows whether it did here too.
            self._broke, self._followed = f"{type(error).__name__}: {error}", False
            return
        for decision in outputs.decisions:
            self._expect(Kind.DECIDED, records.encode(decision), record)
        if outputs.step is not None:
            self._expect(Kind.STEPPED, records.encode(outputs.step), record)

    def _expect(self, kind: Kind, payload: bytes, record: Record) -> None:
        self._expected[kind].append(_Expected(payload, record.sequence, self._ticks))

    def _compare(self, record: Record) -> None:
        """The record must be the next output of its kind."""
        if not self._decides:
            return
        kind = Kind(record.kind)
        queue = self._expected[kind]
        if not queue:
            recorded = record.decode()
            what = f"a {kind.name} record that the replayed core did not make"
            after = f" (it broke: {self._broke})" if self._broke else ""
            raise Diverged(_diverged(record, what, describe(recorded), f"nothing{after}", recorded))
        expected = queue.popleft()
        if expected.payload != record.payload:
            recorded, replayed = record.decode(), records.decode(kind, expected.payload)
            what = f"{kind.name} differs; it comes of input {expected.input_sequence}"
            raise Diverged(_diverged(record, what, describe(recorded), describe(replayed), recorded, replayed))

    def _decided(self, record: Record) -> None:
        self._compare(record)
        self.counts.decisions += 1

    def _stepped(self, record: Record) -> None:
        self._compare(record)
        step: Any = record.decode()
        epoch = self.epoch
        if epoch is None or (step.epoch, step.seq) != (epoch.number, epoch.seq + 1):
            expected = f"epoch {epoch.number}, step {epoch.seq + 1}" if epoch else "no step outside an epoch"
            got = f"epoch {step.epoch}, step {step.seq}"
            raise Diverged(_diverged(record, "a step out of order", got, expected, step))
        try:
            logical = epoch.mirror.apply_step(step.seq, step.ops, step.released)
            layouts = [stage.apply_step(step) for stage in epoch.stages]
        except Exception as error:
            shown = f"{type(error).__name__}: {error}"
            raise Diverged(_diverged(record, "no rank could apply this step", describe(step), shown, step)) from error
        if logical != step.logical:
            what = "the logical digest of the step's ops"
            raise Diverged(_diverged(record, what, step.logical.hex(), logical.hex(), step))
        epoch.seq = step.seq
        epoch.logical[step.seq], epoch.layouts[step.seq] = logical, layouts
        for kept in (epoch.logical, epoch.layouts, epoch.sampled):
            kept.pop(step.seq - STEPS_KEPT, None)
        self.counts.steps += 1
        if step.snapshot and self._decides:
            self._bodies[record.sequence] = self._body(epoch)
            while len(self._bodies) > BODIES_KEPT:
                del self._bodies[next(iter(self._bodies))]

    def _body(self, epoch: _Epoch) -> bytes:
        """The state as the daemon and its ranks put it into a snapshot."""
        assert self.core is not None
        return encode_body(
            Body(
                self._factories.core_state(self.core),
                [stage.state(epoch.mirror) for stage in epoch.stages],
                epoch.sampled_seq,
                epoch.sampled.get(epoch.sampled_seq, self._factories.sampled_start),
                self.core.recoverable(),
                self.core.next_request,
            )
        )

    def _parted(self, record: Record) -> None:
        """The daemon found here that ranks had parted: the digests that say so follow."""
        found: Any = record.decode()
        self.counts.divergences += 1
        did = f"; op {found.op}, {found.kind} of {found.band}: {found.left_did} against {found.right_did}"
        what = f"{found.what} of {found.left} and {found.right} differ{did if found.op >= 0 else ''}"
        self.notes.append(
            f"sequence {record.sequence}: ranks parted at step {found.seq} of epoch {found.epoch}, {what}"
        )
        if self.epoch is not None and found.epoch == self.epoch.number:
            self.epoch.parted = found.seq

    def _digested(self, record: Record) -> None:
        said: Any = record.decode()
        epoch = self.epoch
        if epoch is None or said.epoch != epoch.number:
            return  # of an epoch that is over: its chains are gone
        if said.seq == epoch.parted:
            return  # of what the ranks then did nothing was used
        if said.seq <= epoch.since:
            return  # what a step before the snapshot led to is in the snapshot
        if said.seq not in epoch.logical or not 0 <= said.stage < len(epoch.stages):
            what = "a digest of a step or stage that is not there"
            got = f"step {said.seq}, stage {said.stage}"
            raise Diverged(_diverged(record, what, got, f"steps up to {epoch.seq}, {len(epoch.stages)} stages", said))
        ours = {"logical": epoch.logical[said.seq], "layout": epoch.layouts[said.seq][said.stage]}
        for name, our in ours.items():
            theirs = getattr(said, name)
            if theirs != our:
                what = f"the {name} digest of stage {said.stage}, rank {said.rank}"
                raise Diverged(_diverged(record, what, theirs.hex(), our.hex(), said))
        epoch.said_sampled.setdefault(said.seq, []).append((record, said))
        self._check_sampled(epoch, said.seq)
        self.counts.digests += 1

    def _reported(self, record: Record, item: Reported, epoch: _Epoch) -> None:
        if item.seq != epoch.sampled_seq + 1 or item.seq > epoch.seq:
            got, expected = f"step {item.seq}", f"step {epoch.sampled_seq + 1}, of {epoch.seq} that were sent"
            raise Diverged(_diverged(record, "a report out of order", got, expected, item))
        assert len(epoch.sampled) <= STEPS_KEPT, f"{len(epoch.sampled)} digests are kept"
        before = epoch.sampled.get(item.seq - 1, self._factories.sampled_start)
        epoch.sampled[item.seq] = self._factories.sampled(before, item.seq, item.rows, item.generations, item.tokens)
        epoch.sampled_seq = item.seq
        self._check_sampled(epoch, item.seq)

    def _check_sampled(self, epoch: _Epoch, seq: int) -> None:
        """Both are there: the tokens of the input, and the ranks' digests of what they sampled."""
        if seq not in epoch.sampled:
            return
        for record, said in epoch.said_sampled.pop(seq, []):
            samples = said.stage == len(epoch.stages) - 1
            if said.sampled != (epoch.sampled[seq] if samples else b""):
                what = f"the digest of the tokens that stage {said.stage}, rank {said.rank} sampled"
                ours = epoch.sampled[seq].hex() if samples else "empty: this stage does not sample"
                raise Diverged(_diverged(record, what, describe(said.sampled), ours, said))

    def _snapshotted(self, record: Record) -> None:
        said: Any = record.decode()
        if said.sequence <= self._behind or not self._decides:
            return
        body = self._bodies.pop(said.sequence, None)
        if body is None:
            got = f"record {said.sequence}"
            raise Diverged(_diverged(record, "a snapshot of a moment at which none was asked for", got, "no such step"))
        ours = digest(body)
        if ours != said.digest:
            what = f"the state in the snapshot behind record {said.sequence}"
            raise Diverged(_diverged(record, what, said.digest.hex(), ours.hex()))
        self.counts.snapshots += 1
        self.snapshot = (said, body)

    def _closed_life(self, record: Record) -> None:
        self._closed = True
        closed: Any = record.decode()
        assert isinstance(closed, Closed)
        assert self.core is not None
        self._last = record
        self.end()
        if not self._decides:
            return
        state, gauges = self.core.state_digest(), self.core.gauges()
        if closed.state != state:
            raise Diverged(_diverged(record, "the core's state digest at the end", closed.state.hex(), state.hex()))
        ours = {name: gauges.get(name, 0) for name in closed.totals}
        if closed.totals != ours:
            raise Diverged(_diverged(record, "the totals at the end", str(closed.totals), str(ours)))


def _diverged(
    record: Record,
    what: str,
    recorded: str,
    replayed: str,
    left: msgspec.Struct | None = None,
    right: msgspec.Struct | None = None,
) -> Divergence:
    """A Divergence at a record; with both structs also where they differ first."""
    path, op, row = "", -1, -1
    difference = first_difference(left, right) if left is not None and right is not None else None
    if difference is not None:
        path = f"{difference.path}: recorded {difference.recorded}, replayed {difference.replayed}"
        found = difference.op()
        op = -1 if found is None else found
        row = _row(left, difference.path)
    step = left if isinstance(left, Step | Digested | Reported) else None
    return Divergence(
        record.sequence,
        record.file,
        record.offset,
        what,
        recorded,
        replayed,
        path,
        step.epoch if step else 0,
        step.seq if step else 0,
        op,
        getattr(left, "request", 0),
        row,
    )


def _row(recorded: msgspec.Struct | None, path: str) -> int:
    """Row number of the forward's entry that a path leads to, or -1."""
    per_row = ("forward.generations[", "forward.starts[", "forward.counts[", "forward.flags[")
    if not isinstance(recorded, Step) or recorded.forward is None or not path.startswith(per_row):
        return -1
    at = 4 * int(path[path.index("[") + 1 : -1])
    return int.from_bytes(recorded.forward.rows[at : at + 4], "little")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found: `divergence` None means that everything was reproduced."""

    counts: Counts
    notes: list[str]
    divergence: Divergence | None
    replay: Replay


def check(
    journal: Iterable[Record],
    factories: Factories,
    until: int | None = None,
    progress: Callable[[Record], None] | None = None,
    start: tuple[Header, Body] | None = None,
) -> Verdict:
    """Replay a journal, or its records up to sequence `until`; stops at the first divergence.

    With `start` replay begins behind that snapshot, and records that it covers are passed over.
    """
    replay, behind = Replay(factories), 0
    if start is not None:
        replay.begin_at(*start)
        behind = start[0].sequence
    try:
        for record in journal:
            if record.sequence <= behind:
                continue
            if until is not None and record.sequence > until:
                break
            replay.take(record)
            if progress is not None:
                progress(record)
        replay.end()
    except Diverged as diverged:
        return Verdict(replay.counts, replay.notes, diverged.divergence, replay)
    return Verdict(replay.counts, replay.notes, None, replay)
