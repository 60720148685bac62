"""Replay: feeds a journal's inputs to a fresh core and holds what was recorded against what comes out.

Owns the comparison and the rules of what may be missing where a journal was cut. Must never import the core or the
chains: factories are passed in. Invariants: the first difference stops the replay and is reported with both sides; a
life that was cut anywhere passes if everything up to its last record is reproduced.

    input record      fed to the core; its decisions and its step are expected from here on, before the next input
    Decided, Stepped  must be the next expected ones, byte for byte
    Stepped, Reported, Digested, Divergence
                      also go to the ranks' half (`journal.ranks`), which may run in another process
    Recovered         what the life before left, as its replayed core knows it (`journal.succession`)
    Snapshotted       core, mirror and stages must have had that state behind the step that asked for it, byte for byte
    Closed            nothing may be expected any more; the core's state digest and totals must be equal
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from allocator.geometry import Geometry
from daemon.core.inputs import Controlled, EpochEnded, Input, Recovered
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from ipc.messages import ModelFacts, Step
from journal import records
from journal.difference import describe
from journal.divergence import Diverged, Divergence, diverged
from journal.errors import JournalDamaged, JournalError
from journal.holders import Holders
from journal.ranks import ADMITTED, KINDS, Epoch, Mirror, Overview, RankCounts, RankFactories, Ranks, Stage, States
from journal.reader import Record
from journal.records import DECISION_VERSION, INPUT_KINDS, SCHEMA_VERSION, Closed, Kind, Opened, Snapshotted
from journal.segment import digest
from journal.snapshots import Body, Header, encode_body
from journal.succession import Core as Recoverable
from journal.succession import Succession

BODIES_KEPT = 2  # states that wait for the record of their snapshot


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


class RanksHalf(Protocol):
    """The ranks' half, here or in another process; see `journal.ranks.Ranks`. Any call may raise Diverged."""

    counts: RankCounts
    notes: list[str]

    def take(self, record: Record, payload: Any = None) -> None:
        """Follow one record."""

    def states(self) -> States:
        """What the ranks would say in a snapshot now."""

    def overview(self) -> Overview:
        """Where the ranks are now."""

    def requests_of(self, step: Step, op: int, row: int) -> list[int]:
        """The requests that an op of a step concerns that is about to come, or the one on a row."""

    def finish(self) -> None:
        """The records end here; `counts` and `notes` are complete."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What replay goes on with from a snapshot."""

    core: Core
    config: CoreConfig
    mirror: Mirror
    stages: list[Stage]
    geometry: Geometry
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Factories(RankFactories):
    """How to make what a life is replayed on.

    `core_state` writes a core's state down, `resume` makes core, mirror and stages out of a snapshot.
    """

    core: Callable[[CoreConfig], Core]
    core_state: Callable[[Any], bytes]
    resume: Callable[[Body], Resumed]


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
    undigested: int = 0  # steps that were reported without any rank's digest
    last_sequence: int = 0


@dataclass(slots=True)
class _Expected:
    """An output the core gave: its bytes, and the input it came of."""

    payload: bytes
    input_sequence: int


class Replay:
    """Takes records one after the other; raises Diverged at the first difference. `ranks`: the other half."""

    def __init__(self, factories: Factories, ranks: RanksHalf | None = None) -> None:
        self.counts = Counts()
        self.notes: list[str] = []
        self.core: Core | None = None
        self.ranks: RanksHalf = Ranks(factories) if ranks is None else ranks
        self._factories = factories
        self._decides = True  # this life's decisions were made by a core like ours
        self._expected: dict[Kind, deque[_Expected]] = {Kind.DECIDED: deque(), Kind.STEPPED: deque()}
        self._compared: dict[Kind, bytes] = {}  # the newest output of either kind
        self._step: Step | None = None  # the newest that the core made
        self._at = (0, 0)  # epoch and step that the newest input led to, else the newest before
        self._broke = ""  # the core raised on the last input: what
        self._followed = True  # the core of this life never raised
        self._succession = Succession()
        self._vouched: Record | None = None  # the digest in front of the report that must follow
        self._closed = False
        self._last: Record | None = None
        self._behind = 0  # the sequence that the snapshot covers from which replay began
        self._bodies: dict[int, bytes] = {}  # by sequence, states behind steps that asked for a snapshot
        self.snapshot: tuple[Snapshotted, bytes] | None = None  # the newest that was reproduced
        self._takes: dict[int, Callable[[Record], Any]] = {
            Kind.OPENED: self._opened,
            Kind.DECIDED: self._decided,
            Kind.STEPPED: self._stepped,
            Kind.DIGESTED: self._digested,
            Kind.READIED: lambda record: None,  # which builds and threads the ranks have decides nothing
            Kind.DIVERGED: lambda record: None,
            Kind.SNAPSHOTTED: self._snapshotted,
            Kind.CLOSED: self._closed_life,
        }

    @property
    def epoch(self) -> Epoch | None:
        """The ranks' epoch, where their half runs in this process."""
        assert isinstance(self.ranks, Ranks), "the ranks' half is in another process"
        return self.ranks.epoch

    def begin_at(self, header: Header, core: Core) -> None:
        """Begin behind a snapshot, whose ranks' half begins there too; the next record is the one behind it."""
        self.core, self._behind = core, header.sequence
        self.counts.lives, self.counts.last_sequence = 1, header.sequence

    def state_at(self, sequence: int) -> bytes | None:
        """The state behind a step that asked for a snapshot, as its body; only of the newest few."""
        return self._bodies.get(sequence)

    def take(self, record: Record) -> None:
        """Replay one record."""
        if self.core is None and record.kind != Kind.OPENED:
            raise diverged(record, "a life that does not begin with Opened", describe(record.decode()), "")
        if self._closed and record.kind != Kind.OPENED:
            raise diverged(record, "a record behind Closed", describe(record.decode()), "")
        if self._vouched is not None:
            self._follows(record, self._vouched)
        if record.kind == Kind.REPORTED:  # its place among reports is looked at first
            item: Any = record.decode()
            self.ranks.take(record, item)
            self._input(record, item)
        else:
            self._dispatch(record)
        self.counts.records += 1
        self.counts.last_sequence = record.sequence
        self._last = record

    def _dispatch(self, record: Record) -> None:
        take = self._takes.get(record.kind)
        payload = self._input(record) if take is None else take(record)
        if record.kind in KINDS or (record.kind == Kind.DECIDED and ADMITTED in record.payload):
            self.ranks.take(record, payload)
        if self._step is not None and record.kind == Kind.STEPPED:
            self._keep_state(record, self._step)

    def _follows(self, record: Record, digested: Record) -> None:
        """Behind the digests of a step comes its report, or the end of the epoch that they tell of."""
        if record.kind == Kind.DIGESTED:
            return
        self._vouched = None
        if record.kind not in (Kind.REPORTED, Kind.EPOCH_ENDED, Kind.OPENED, Kind.CLOSED, Kind.DIVERGED):
            said: Any = digested.decode()
            what = f"the report of step {said.seq} is missing: its digests are there, and it should follow them"
            raise diverged(
                record, what, describe(record.decode()), f"Reported(epoch={said.epoch}, seq={said.seq})", said
            )

    def end(self) -> None:
        """The records end here: what the last input led to may be missing."""
        if self.core is None or self._last is None:
            return
        self._require_none(self._last, after_last=True)
        for queue in self._expected.values():
            self.counts.unfinished += len(queue)
            queue.clear()

    def finish(self) -> None:
        """Both halves are through; raises what the ranks' half found."""
        try:
            self.ranks.finish()
        finally:
            self._add_up(self.ranks.counts)

    def _add_up(self, theirs: RankCounts) -> None:
        self.counts.steps, self.counts.digests = theirs.steps, theirs.digests
        self.counts.divergences, self.counts.undigested = theirs.divergences, theirs.undigested
        self.notes += self.ranks.notes
        if theirs.undigested:
            self.notes.append(f"{theirs.undigested:,} steps have no rank's digest: what ranks did there is not checked")

    # --- one kind of record each; what it decoded is returned ------------------------------------------------------

    def _opened(self, record: Record) -> Opened:
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
        self._broke, self._closed, self._step, self._at = "", False, None, (0, 0)
        self._compared.clear()
        self.counts.lives += 1
        return opened

    def _digested(self, record: Record) -> None:
        self._require_none(record)
        self._vouched = record

    def _input(self, record: Record, decoded: Any = None) -> Input:
        assert record.kind in INPUT_KINDS, f"kind {record.kind} is neither an input nor handled"
        item: Any = record.decode() if decoded is None else decoded
        if not isinstance(item, Recovered):  # its parts may be written one behind the other
            self._require_none(record)
        self.counts.inputs += 1
        if self._broke and not isinstance(item, EpochEnded | Controlled):
            what = "the replayed core broke on the input before this one, the recorded one went on"
            raise diverged(record, what, describe(item), self._broke)
        self._broke = ""
        if isinstance(item, Recovered):
            parted = self._succession.recovered(item)
            if parted is not None:
                about = [parted.request] if parted.request else []
                sides = (parted.recorded, parted.replayed)
                what = "what a life took over from the one before"
                raise diverged(record, what, *sides, path=parted.path, requests=about)
        if self._decides:
            self._feed(record, item)
        return item  # type: ignore[no-any-return]

    def _feed(self, record: Record, item: Input) -> None:
        assert self.core is not None
        try:
            outputs = self.core.feed(item)
        except Exception as error:
            # The daemon ends the epoch when its core raises; the next input shows whether it did here too.
            self._broke, self._followed = f"{type(error).__name__}: {error}", False
            return
        decided, sequence = self._expected[Kind.DECIDED], record.sequence
        for decision in outputs.decisions:
            decided.append(_Expected(records.encode(decision), sequence))
        if outputs.step is not None:
            self._step, self._at = outputs.step, (outputs.step.epoch, outputs.step.seq)
            self._expected[Kind.STEPPED].append(_Expected(records.encode(outputs.step), sequence))

    def _require_none(self, record: Record, after_last: bool = False) -> None:
        """Before the next input everything that the last one led to is written; a life may be cut within that."""
        if (after_last and not self._closed) or not (self._expected[Kind.DECIDED] or self._expected[Kind.STEPPED]):
            return
        kind, queue = next((kind, queue) for kind, queue in self._expected.items() if queue)
        expected = records.decode(kind, queue[0].payload)
        what = f"the record {kind.name} that input {queue[0].input_sequence} led to was never written"
        nothing = f"{describe(record.decode())} stands where it should have been"
        raise self._placed(diverged(record, what, nothing, describe(expected), requests=self._about(expected)))

    def _about(self, output: Any) -> list[int]:
        """The requests of an output that is missing."""
        if isinstance(output, Step):
            return self.ranks.requests_of(output, 0, -1) if output.ops else []
        return [output.request] if output.request else []

    def _compare(self, record: Record) -> None:
        """The record must be the next output of its kind."""
        kind = Kind(record.kind)
        queue = self._expected[kind]
        if queue and queue[0].payload == record.payload:
            self._compared[kind] = queue.popleft().payload
            return
        recorded: Any = record.decode()
        twice = "; it is the one before once more" if record.payload == self._compared.get(kind) else ""
        if not queue:
            what = f"a {kind.name} record that the replayed core did not make{twice}"
            after = f" (it broke: {self._broke})" if self._broke else ""
            raise self._parted(record, what, recorded, None, f"nothing{after}")
        expected = queue.popleft()
        replayed = records.decode(kind, expected.payload)
        later = any(other.payload == record.payload for other in queue)
        lost = "; the one that should stand here was never written, the one behind it is here" if later else ""
        what = f"{kind.name} differs; it comes of input {expected.input_sequence}{lost}{twice}"
        raise self._parted(record, what, recorded, replayed, describe(replayed))

    def _parted(self, record: Record, what: str, recorded: Any, replayed: Any, shown: str) -> Diverged:
        """Both sides of an output, with the requests that it is about."""
        found = diverged(record, what, describe(recorded), shown, recorded, replayed)
        about = list(found.divergence.requests)
        if isinstance(recorded, Step):
            for step in (replayed, recorded):
                if isinstance(step, Step):
                    about += self.ranks.requests_of(step, found.divergence.op, found.divergence.row)
        elif replayed is not None and replayed.request:
            about.append(replayed.request)
        about = list(dict.fromkeys(about))
        found = Diverged(replace(found.divergence, request=about[0] if about else 0, requests=tuple(about)))
        return self._placed(found)

    def _placed(self, found: Diverged) -> Diverged:
        """With the step that it belongs to, where its record names none."""
        one = found.divergence
        return found if one.step else Diverged(replace(one, epoch=self._at[0], step=self._at[1]))

    def _decided(self, record: Record) -> None:
        if self._decides:
            self._compare(record)
        self.counts.decisions += 1

    def _stepped(self, record: Record) -> Step | None:
        if not self._decides:
            self._step = None
            return None
        self._compare(record)
        return self._step  # equal bytes, equal steps

    def _keep_state(self, record: Record, step: Step) -> None:
        """The state as the daemon and its ranks put it into a snapshot, where the step asks for one."""
        if not (step.snapshot and self._decides):
            return
        assert self.core is not None
        core = self._factories.core_state(self.core)
        groups, next_request = self.core.recoverable(), self.core.next_request
        stages, reported_seq, sampled = self.ranks.states()
        self._bodies[record.sequence] = encode_body(Body(core, stages, reported_seq, sampled, groups, next_request))
        while len(self._bodies) > BODIES_KEPT:
            del self._bodies[next(iter(self._bodies))]

    def _snapshotted(self, record: Record) -> None:
        said: Any = record.decode()
        if said.sequence <= self._behind or not self._decides:
            return
        body = self._bodies.pop(said.sequence, None)
        if body is None:
            got = f"record {said.sequence}"
            raise diverged(record, "a snapshot of a moment at which none was asked for", got, "no such step")
        ours = digest(body)
        if ours != said.digest:
            what = f"the state in the snapshot behind record {said.sequence}"
            raise self._placed(diverged(record, what, said.digest.hex(), ours.hex()))
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
            what = "the core's state digest at the end"
            raise self._placed(diverged(record, what, closed.state.hex(), state.hex()))
        ours = {name: gauges.get(name, 0) for name in closed.totals}
        if closed.totals != ours:
            names = [name for name, total in closed.totals.items() if total != ours[name]]
            theirs, here = (", ".join(f"{name} {one[name]}" for name in names) for one in (closed.totals, ours))
            raise self._placed(diverged(record, "the totals at the end", theirs, here))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found: `divergence` None means that everything was reproduced, as far as it could be read.

    `damage`: the journal cannot be read on behind what was replayed. `overview`: where the ranks were then.
    """

    counts: Counts
    notes: list[str]
    divergence: Divergence | None
    replay: Replay
    overview: Overview
    damage: JournalDamaged | None = None


def started(factories: Factories, start: tuple[Header, Body] | None) -> tuple[Ranks, Core | None]:
    """The ranks' half at its beginning, and the core that goes with it: behind a snapshot, or before the first life."""
    ranks = Ranks(factories)
    if start is None:
        return ranks, None
    header, body = start
    resumed = factories.resume(body)
    holders = Holders(resumed.geometry, resumed.config.max_running_requests)
    for one in resumed.core.view()["requests"]:
        if one["row"] >= 0:
            holders.enter(one["request"], one["row"], one["generation"], resumed.stages[0].table(one["row"]))
    epoch = Epoch(header.epoch, resumed.mirror, resumed.stages, holders, resumed.facts.vocab_size)
    epoch.seq = epoch.since = header.seq
    epoch.sampled_seq, epoch.sampled[body.reported_seq] = body.reported_seq, body.sampled
    ranks.begin_at(epoch, resumed.config)
    return ranks, resumed.core


def check(
    journal: Iterable[Record],
    factories: Factories,
    until: int | None = None,
    progress: Callable[[Record], None] | None = None,
    start: tuple[Header, Body] | None = None,
    elsewhere: Callable[[Ranks], RanksHalf] | None = None,
) -> Verdict:
    """Replay a journal, or its records up to sequence `until`; stops at the first divergence.

    With `start` replay begins behind that snapshot, and records that it covers are passed over. `elsewhere` may put the
    ranks' half into another process. What cannot be read any more is `damage`, behind what was replayed.
    """
    ranks, core = started(factories, start)
    replay, behind = Replay(factories, ranks if elsewhere is None else elsewhere(ranks)), 0
    if start is not None and core is not None:
        replay.begin_at(start[0], core)
        behind = start[0].sequence
    divergence, damage = None, None
    try:
        try:
            for record in journal:
                if record.sequence <= behind:
                    continue
                if until is not None and record.sequence > until:
                    break
                replay.take(record)
                if progress is not None:
                    progress(record)
        except JournalDamaged as error:
            damage = error
        if damage is None:
            replay.end()
    except Diverged as found:
        divergence = found.divergence
    try:
        replay.finish()
    except Diverged as found:  # the ranks' half is never ahead of the core's
        if divergence is None or found.divergence.sequence <= divergence.sequence:
            divergence = found.divergence
    if divergence is not None:
        replay.counts.last_sequence = divergence.sequence - 1  # the core's half may have been ahead
    return Verdict(replay.counts, replay.notes, divergence, replay, replay.ranks.overview(), damage)
