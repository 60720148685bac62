"""Ranks: the half of a replay that stands for the ranks, from the recorded steps and reports alone.

Owns mirror, stages, digests and who holds what, of one epoch at a time. Must never look at the core: it may run in
another process. Invariant: a step is applied in the order in which a rank applies it, so its digests are a rank's.

    Stepped     applied to the mirror and every stage
    Reported    in the order of steps; its tokens are chained into the digest of what was sampled
    Digested    must be what mirror and stage had after that step, op by op, and the chain over the reported tokens;
                behind a Divergence it is what ended the epoch, and differs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from allocator.columns import I32, I64, Int32s, i32, i64
from allocator.geometry import Geometry
from allocator.ops import Op
from daemon.core.inputs import EpochBegan, EpochEnded, Reported
from daemon.core.limits import CoreConfig
from daemon.core.reasons import Verdict
from ipc.messages import ModelFacts, Step, StepTrace
from journal.difference import describe
from journal.divergence import at_record, diverged, requests_in_words
from journal.holders import Holders
from journal.reader import Record
from journal.records import Digested, Kind, Opened

STEPS_KEPT = 4096  # digests of so many steps wait for the ranks' reports
TRIES_MAX = 4_000_000  # single tokens that are tried to explain a digest of sampled tokens
EFFECTS_BYTES = 4  # per op in `Digested.effects`
ADMITTED = Verdict.ADMITTED.value.encode()
KINDS = frozenset(
    {Kind.OPENED, Kind.EPOCH_BEGAN, Kind.EPOCH_ENDED, Kind.REPORTED, Kind.STEPPED, Kind.DIGESTED, Kind.DIVERGED}
)


class Mirror(Protocol):
    """The logical chain as a rank follows it."""

    def apply_step(self, seq: int, ops: list[Op], released: Sequence[int]) -> bytes:
        """End the step's released uses and apply its ops; the chained logical digest."""


class Stage(Protocol):
    """One stage's physical chain as its ranks drive it."""

    effects: bytes
    """What a rank performs for each op of the newest step (`ipc.digests.effects_column`)."""

    def apply_step(self, step: Step) -> bytes:
        """Apply a whole step; the chained layout digest."""

    def explain(self, seq: int) -> StepTrace | None:
        """What each op of one of the newest steps led to, in words."""

    def table(self, row: int) -> Any:
        """The owner pages in a row's table, int32."""

    def counts(self) -> list[dict[str, Any]]:
        """Per band: name, and units live, hole, pending and beyond."""

    def state(self, mirror: Any) -> bytes:
        """What a rank of this stage, whose mirror is that one, says in a snapshot."""


@dataclass(frozen=True, slots=True)
class RankFactories:
    """How to make what the ranks are followed with. `sampled` is `ipc.digests.sampled_digest`."""

    mirror: Callable[[Geometry], Mirror]
    stage: Callable[[Geometry, int, CoreConfig, ModelFacts], Stage]
    sampled: Callable[[bytes, int, bytes, bytes, bytes], bytes]
    sampled_start: bytes


class States(NamedTuple):
    """What the ranks put into a snapshot: a part per stage, and the newest link of the sampled tokens."""

    stages: list[bytes]
    reported_seq: int
    sampled: bytes


class Overview(NamedTuple):
    """Where the ranks are: epoch and step (0: none), and per stage its bands with their counts of units."""

    epoch: int
    step: int
    stages: list[list[dict[str, Any]]]


@dataclass(slots=True)
class RankCounts:
    """What was reproduced of the ranks; `undigested` are steps that were reported without any rank's digest."""

    steps: int = 0
    digests: int = 0
    divergences: int = 0
    undigested: int = 0


class Link(NamedTuple):
    """What a step led to on the ranks: digests and performed effects by stage."""

    logical: bytes
    layouts: list[bytes]
    effects: list[bytes]
    ops: list[Op]


@dataclass(slots=True)
class Epoch:
    """Everything of one epoch that is rebuilt from its steps."""

    number: int
    mirror: Mirror
    stages: list[Stage]
    holders: Holders
    vocabulary: int
    seq: int = 0
    since: int = 0  # replay began behind this step
    parted: int = 0  # the step at which the daemon found that ranks had parted
    links: dict[int, Link] = field(default_factory=dict)
    digested: int = 0  # the newest step with a digest
    sampled_seq: int = 0
    sampled: dict[int, bytes] = field(default_factory=dict)
    said_sampled: dict[int, list[tuple[Record, Digested]]] = field(default_factory=dict)


class Ranks:
    """Takes the records that concern ranks, in order; raises Diverged at the first difference."""

    def __init__(self, factories: RankFactories) -> None:
        self.counts = RankCounts()
        self.notes: list[str] = []
        self.epoch: Epoch | None = None
        self._factories = factories
        self._config: CoreConfig
        self._takes: dict[int, Callable[[Record, Any], None]] = {
            Kind.OPENED: self._opened,
            Kind.EPOCH_BEGAN: self._began,
            Kind.EPOCH_ENDED: self._ended,
            Kind.REPORTED: self._reported,
            Kind.STEPPED: self._stepped,
            Kind.DECIDED: self._decided,
            Kind.DIGESTED: self._digested,
            Kind.DIVERGED: self._parted,
        }

    def begin_at(self, epoch: Epoch, config: CoreConfig) -> None:
        """Begin with an epoch as a snapshot has it."""
        self.epoch, self._config = epoch, config

    def take(self, record: Record, payload: Any = None) -> None:
        """Follow one record; `payload` saves its decoding."""
        take = self._takes.get(record.kind)
        if take is not None and (record.kind != Kind.DECIDED or ADMITTED in record.payload):
            take(record, record.decode() if payload is None else payload)

    def states(self) -> States:
        """What the ranks would say in a snapshot now."""
        epoch = self.epoch
        assert epoch is not None, "a snapshot is asked for by a step"
        newest = epoch.sampled.get(epoch.sampled_seq, self._factories.sampled_start)
        return States([stage.state(epoch.mirror) for stage in epoch.stages], epoch.sampled_seq, newest)

    def overview(self) -> Overview:
        """Where the ranks are now."""
        if self.epoch is None:
            return Overview(0, 0, [])
        return Overview(self.epoch.number, self.epoch.seq, [stage.counts() for stage in self.epoch.stages])

    def requests_of(self, step: Step, op: int, row: int) -> list[int]:
        """The requests that an op of a step which was not applied concerns, or the one on a row."""
        if self.epoch is None:
            return []
        if op < 0:
            return self.epoch.holders.of_row(row)
        holders = deepcopy(self.epoch.holders)  # the step may be the wrong one, and both sides are asked about
        holders.step(step)
        return holders.of_op(step.seq, op)

    def finish(self) -> None:
        """The records end here."""

    # --- one kind of record each ---------------------------------------------------------------------------------

    def _opened(self, record: Record, opened: Opened) -> None:
        self.epoch, self._config = None, opened.core

    def _began(self, record: Record, item: EpochBegan) -> None:
        make, config, shape = self._factories, self._config, item.geometry
        stages = [make.stage(shape, at, config, item.facts) for at in range(len(shape.stages))]
        holders = Holders(shape, config.max_running_requests)
        self.epoch = Epoch(item.epoch, make.mirror(shape), stages, holders, item.facts.vocab_size)

    def _ended(self, record: Record, item: EpochEnded) -> None:
        if self.epoch is not None and item.epoch == self.epoch.number:
            self.epoch = None

    def _decided(self, record: Record, decided: Any) -> None:
        if self.epoch is not None and decided.verdict == Verdict.ADMITTED:
            self.epoch.holders.admitted(decided)

    def _stepped(self, record: Record, step: Step) -> None:
        epoch = self.epoch
        if epoch is None or (step.epoch, step.seq) != (epoch.number, epoch.seq + 1):
            expected = f"epoch {epoch.number}, step {epoch.seq + 1}" if epoch else "no step outside an epoch"
            got = f"epoch {step.epoch}, step {step.seq}"
            raise diverged(record, "a step out of order", got, expected, step)
        epoch.holders.step(step)
        try:
            logical = epoch.mirror.apply_step(step.seq, step.ops, step.released)
            layouts = [stage.apply_step(step) for stage in epoch.stages]
        except Exception as error:
            shown = f"{type(error).__name__}: {error}"
            raise at_record(record, "no rank could apply this step", step, shown) from error
        if logical != step.logical:
            what = "the logical digest of the step's ops"
            raise diverged(record, what, step.logical.hex(), logical.hex(), step)
        epoch.seq = step.seq
        epoch.links[step.seq] = Link(logical, layouts, [stage.effects for stage in epoch.stages], step.ops)
        epoch.links.pop(step.seq - STEPS_KEPT, None)
        epoch.sampled.pop(step.seq - STEPS_KEPT, None)
        self.counts.steps += 1

    def _parted(self, record: Record, found: Any) -> None:
        """The daemon found here that ranks had parted: the digests that say so follow."""
        self.counts.divergences += 1
        did = f"; op {found.op}, {found.kind} of {found.band}: {found.left_did} against {found.right_did}"
        what = f"{found.what} of {found.left} and {found.right} differ{did if found.op >= 0 else ''}"
        about = ""
        if self.epoch is not None and found.epoch == self.epoch.number:
            self.epoch.parted = found.seq
            about = requests_in_words(self.epoch.holders.of_op(found.seq, found.op))
        self.notes.append(
            f"sequence {record.sequence}: ranks parted at step {found.seq} of epoch {found.epoch}, {what}"
            + (f" ({about})" if about else "")
        )

    def _digested(self, record: Record, said: Digested) -> None:
        epoch = self.epoch
        if epoch is None or said.epoch != epoch.number:
            return  # of an epoch that is over: its chains are gone
        if said.seq == epoch.parted:
            return  # of what the ranks then did nothing was used
        if said.seq <= epoch.since:
            return  # what a step before the snapshot led to is in the snapshot
        link = epoch.links.get(said.seq)
        if link is None or not 0 <= said.stage < len(epoch.stages):
            what = "a digest of a step or stage that is not there"
            got = f"step {said.seq}, stage {said.stage}"
            raise diverged(record, what, got, f"steps up to {epoch.seq}, {len(epoch.stages)} stages", said)
        who = f"stage {said.stage}, rank {said.rank}"
        if said.logical != link.logical:
            means = "the rank applied other ops than those that were sent, or lost one on the way"
            op = 0 if len(link.ops) == 1 else -1
            about = epoch.holders.of_op(said.seq, op)
            ours = link.logical.hex()
            raise diverged(record, f"the logical digest of {who}", said.logical.hex(), ours, said, None, op=op,
                           requests=about, means=means)  # fmt: skip
        self._check_layout(epoch, link, record, said, who)
        epoch.digested = max(epoch.digested, said.seq)
        epoch.said_sampled.setdefault(said.seq, []).append((record, said))
        self._check_sampled(epoch, said.seq)
        self.counts.digests += 1

    def _check_layout(self, epoch: Epoch, link: Link, record: Record, said: Digested, who: str) -> None:
        layout, effects = link.layouts[said.stage], link.effects[said.stage]
        if said.layout == layout and (said.effects == effects or not said.effects):
            return
        entry = _first_entry(said.effects, effects) if said.effects else -1
        op = entry - 1 if entry > 0 else -1
        about, path, did = epoch.holders.of_op(said.seq, op), "", "not known: this step is no longer kept"
        trace = epoch.stages[said.stage].explain(said.seq)
        if trace is not None:
            kind = "waits" if entry == 0 else ""
            words = [
                f"{one.band or 'all bands'}: {one.effects}"
                for one in trace.ops
                if (one.index == op if op >= 0 else one.kind.startswith(kind) and bool(kind))
            ]
            did = "; ".join(words) or "nothing"
        if entry == 0:
            path = "what the launch of the step before had to wait for"
        elif op >= 0:
            path = f"op {op}, {type(link.ops[op]).__name__}{_of(about)}" if op < len(link.ops) else f"op {op}"
        if entry < 0:
            did = layout.hex()
        what = f"the layout digest of {who}" if said.layout != layout else f"what {who} performed"
        recorded = said.layout.hex() if said.layout != layout else "something else, or nothing"
        means = _means(said.layout == layout, entry, bool(said.effects))
        raise diverged(record, what, recorded, did, said, None, path=path, op=op, requests=about, means=means)

    def _reported(self, record: Record, item: Reported) -> None:
        epoch = self.epoch
        if epoch is None or item.epoch != epoch.number:
            return
        if item.seq != epoch.sampled_seq + 1 or item.seq > epoch.seq:
            got, expected = f"step {item.seq}", f"step {epoch.sampled_seq + 1}, of {epoch.seq} that were sent"
            means = "it was reported before" if item.seq <= epoch.sampled_seq else "reports before it are missing"
            raise diverged(record, "a report out of order", got, expected, item,
                           requests=_known(epoch, item), means=means)  # fmt: skip
        assert len(epoch.sampled) <= STEPS_KEPT, f"{len(epoch.sampled)} digests are kept"
        before = epoch.sampled.get(item.seq - 1, self._factories.sampled_start)
        epoch.sampled[item.seq] = self._factories.sampled(before, item.seq, item.rows, item.generations, item.tokens)
        epoch.sampled_seq = item.seq
        self.counts.undigested += epoch.digested < item.seq and item.seq > epoch.since
        self._check_sampled(epoch, item.seq, item)

    def _check_sampled(self, epoch: Epoch, seq: int, item: Reported | None = None) -> None:
        """Both are there: the tokens of the input, and the ranks' digests of what they sampled."""
        if seq not in epoch.sampled:
            return
        for record, said in epoch.said_sampled.pop(seq, []):
            samples = said.stage == len(epoch.stages) - 1
            if said.sampled == (epoch.sampled[seq] if samples else b""):
                continue
            what = f"the digest of the tokens that stage {said.stage}, rank {said.rank} sampled"
            if not samples or item is None:
                ours = epoch.sampled[seq].hex() if samples else "empty: this stage does not sample"
                raise diverged(record, what, describe(said.sampled), ours, said)
            requests, means = self._blame(epoch, item, said.sampled)
            raise diverged(record, what, describe(said.sampled), epoch.sampled[seq].hex(), said,
                           requests=requests, means=means)  # fmt: skip

    def _blame(self, epoch: Epoch, item: Reported, theirs: bytes) -> tuple[list[int], str]:
        """Whose token in the report is not what the rank sampled: the one whose change gives the rank's digest."""
        tokens, rows = i64(item.tokens), i32(item.rows)
        numbers = epoch.holders.of_rows(rows, i32(item.generations))
        before = epoch.sampled.get(item.seq - 1, self._factories.sampled_start)
        known = [number for number in numbers if number]
        for place, generation in _generations(i32(item.generations)):
            changed = _with(item.generations, place, generation, I32.itemsize)
            if self._factories.sampled(before, item.seq, item.rows, changed, item.tokens) == theirs:
                own = epoch.holders.of_rows(rows[place : place + 1], np.array([generation], np.int32))
                means = (
                    f"the rank sampled it for generation {generation} of row {int(rows[place])}"
                    f" ({requests_in_words(own) or 'nobody'}), the report says {int(i32(item.generations)[place])}"
                )
                return [number for number in own if number] or known, means
        tried = 0
        for place, token in islice(_candidates(len(tokens), epoch.vocabulary), TRIES_MAX):
            tried += 1
            changed = _with(item.tokens, place, token, I64.itemsize)
            if self._factories.sampled(before, item.seq, item.rows, item.generations, changed) == theirs:
                means = (
                    f"the rank sampled token {token} on row {int(rows[place])} (request {numbers[place]}), the report"
                    f" that the core was fed says {int(tokens[place])}"
                )
                return [numbers[place]], means
        return known, f"no other single token explains it, {tried:,} were tried"


def _with(column: bytes, place: int, value: int, width: int) -> bytes:
    """A column with another entry."""
    return column[: place * width] + value.to_bytes(width, "little") + column[(place + 1) * width :]


def _generations(generations: Int32s) -> Iterator[tuple[int, int]]:
    """Every near change of a generation: place, and the generation there."""
    near = (1, -1, 2, -2)
    return ((place, had + by) for place, had in enumerate(generations.tolist()) for by in near if had + by > 0)


def _candidates(rows: int, vocabulary: int) -> Iterator[tuple[int, int]]:
    """Every single change of a token: place, and the token there."""
    return ((place, token) for place in range(rows) for token in range(vocabulary))


def _known(epoch: Epoch, item: Reported) -> list[int]:
    return [number for number in epoch.holders.of_rows(i32(item.rows), i32(item.generations)) if number]


def _first_entry(theirs: bytes, ours: bytes) -> int:
    """The first op's place in the columns that differs, 0 the waits of the launch before; -1: none does."""
    width = EFFECTS_BYTES
    for at in range(0, max(len(theirs), len(ours)), width):
        if theirs[at : at + width] != ours[at : at + width]:
            return at // width
    return -1


def _means(same_layout: bool, entry: int, noted: bool) -> str:
    """What follows of layout and effects together."""
    if same_layout:
        return "the rank's chain decided as replayed, but the rank did not perform all of it, or something else beside"
    if not noted:
        return "the rank noted no effects by op: which op it was is not known"
    if entry < 0:
        return "every op was performed as replayed, but spans or counts of units differ: a unit was lost or gained"
    return "the rank realized this op otherwise: units, moves or waits; every op before it is as replayed"


def _of(requests: Sequence[int]) -> str:
    return f" for {requests_in_words(requests)}" if requests else ""
