"""Film: a journal's records, followed one by one into the columns that a page shows.

Owns what is noted per step, decision and mark. Must never feed a core: everything is what the journal says, and what
chains make of its steps. Invariants: positions count the steps that are shown; where a stage's digest is not the
rank's, one mark says so in each epoch; where no rank could apply a step, its epoch is not told on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allocator.columns import I32, i32
from allocator.geometry import Geometry
from allocator.ops import CopyState, Flush, Free, Op, Rebind, Take
from daemon.core.inputs import Arrived, EpochBegan, EpochEnded, Reported, Ticked
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from daemon.snapshots import restore_core
from ipc.messages import Step
from journal.reader import Record
from journal.records import INPUT_KINDS, Closed, Digested, Divergence, Kind, Opened
from journal.snapshots import Body, Header
from tools.view.arena import COUNTS, Arena
from tools.view.requests import Requests
from tools.view.units import BlockWriter, Mask
from tools.why.words import sentence

NS_PER_US = 1_000
STEP_COLUMNS = (
    *("sequence", "us", "took_us", "seq", "rows", "prefill_tokens", "decode_rows"),
    *("taken", "freed", "moved", "moved_bytes", "copied", "rebound", "flushes", "uses"),
)
"""`took_us` is 0 where no report came; units by op, over all bands; `moved` units of all stages."""
NOTED_COLUMNS = tuple(name for name in STEP_COLUMNS if name not in ("moved", "moved_bytes"))


@dataclass(slots=True)
class Stretch:
    """What is shown of one epoch: steps from position `first` to before `end`, and a column of counts for each band
    that a stage stores and each name in COUNTS.
    """

    life: int
    epoch: int
    geometry: Geometry
    first: int
    counts: list[array[int]]
    bands: list[tuple[int, int, int, int, int]]  # stage, band, capacity, anchor, direction of each that is stored
    end: int = -1
    why: str = ""


@dataclass(slots=True)
class Mark:
    """Something that happened between steps: at which position, when, at which record, of what kind, in words."""

    at: int
    us: int
    sequence: int
    kind: str
    text: str


def _column() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Decisions:
    """Columns of decisions; `texts` are sentences."""

    at: array[int] = field(default_factory=_column)
    us: array[int] = field(default_factory=_column)
    sequences: array[int] = field(default_factory=_column)
    requests: array[int] = field(default_factory=_column)
    by: array[int] = field(default_factory=_column)
    verdicts: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class Film:
    """Takes records in order, and shows those from `first_sequence` on; complete after `end`."""

    def __init__(self, first_sequence: int = 0) -> None:
        self.steps: dict[str, array[int]] = {name: _column() for name in STEP_COLUMNS}
        self.stretches: list[Stretch] = []
        self.marks: list[Mark] = []
        self.decisions = Decisions()
        self.requests = Requests()
        self.writer = BlockWriter()
        self.lives = 0
        self.records = 0
        self.last_sequence = 0
        self.start_ns = -1
        self._first_sequence = first_sequence
        self._shows = first_sequence <= 1
        self._config = CoreConfig()
        self._now_ns = 0
        self._arrived: Arrived | None = None
        self._arena: Arena | None = None
        self._epoch = 0
        self._names: list[list[str]] = []
        self._place: dict[int, int] = {}  # positions of this epoch's steps that have no report
        self._parted = False  # this epoch has its mark of digests that differ
        self._closed = True
        self._others: dict[int, Callable[[Record], None]] = {
            Kind.OPENED: self._opened,
            Kind.CLOSED: self._closed_life,
            Kind.DIVERGED: self._diverged,
            Kind.DIGESTED: self._digested,
            Kind.STEPPED: self._stepped,
            Kind.DECIDED: self._decided,
        }

    def resumed(self, header: Header, body: Body) -> None:
        """Begin behind a snapshot."""
        core = restore_core(body.core)
        state = core.state
        assert state.memory is not None, "a snapshot is taken at a step"
        assert state.facts is not None, "an epoch has its model's facts"
        self.lives, self._closed, self._config, self._epoch = 1, False, state.config, header.epoch
        arena = Arena(state.memory.geometry, state.facts, state.config, body.stages)
        for view in core.view()["requests"]:
            self.requests.known(view, 0, 0)
            if view["row"] >= 0:
                arena.took(view["request"], core.state.rows.held(view["row"]))
        arena.first_look(self.requests)
        self._began(arena)

    def take(self, record: Record) -> None:
        """Follow one record."""
        if not self._shows and record.sequence >= self._first_sequence:
            self._show(record)
        self.records += 1
        self.last_sequence = record.sequence
        known = self._others.get(record.kind)
        if known is not None:
            known(record)
        elif record.kind in INPUT_KINDS:
            self._input(record)

    def end(self, damage: Sequence[str]) -> None:
        """The records end here; `damage` is what was cut off behind them."""
        if not self._shows:
            self._show(None)
        for text in damage:
            self._mark("damage", text)
        if not damage and not self._closed:
            self._mark("end", "the records end here: the daemon still runs, was cut off, or more was not asked for")
        self._epoch_over("")

    @property
    def position(self) -> int:
        """How many steps are shown so far."""
        return len(self.steps["sequence"])

    @property
    def us(self) -> int:
        """The newest time, in us since the first record that is shown."""
        return max(0, (self._now_ns - self.start_ns) // NS_PER_US) if self.start_ns >= 0 else 0

    # --- kinds ---------------------------------------------------------------------------------------------------

    def _opened(self, record: Record) -> None:
        said: Any = record.decode()
        assert isinstance(said, Opened)
        if not self._closed:
            self._mark("cut", "the daemon was cut off")
        self._epoch_over("the daemon was cut off")
        self._time(said.now_ns)
        self.requests.daemon_ended(self.position, self.us)
        self.lives += 1
        self._config, self._closed = said.core, False
        self._mark("opened", f"life {self.lives} of the daemon begins")

    def _closed_life(self, record: Record) -> None:
        said: Any = record.decode()
        assert isinstance(said, Closed)
        self._time(said.now_ns)
        self._epoch_over("the daemon closed")
        self._closed = True
        self._mark("closed", f"the daemon closed: {said.why}")

    def _diverged(self, record: Record) -> None:
        said: Any = record.decode()
        assert isinstance(said, Divergence)
        self._time(said.now_ns)
        did = f", op {said.op}, {said.kind} of {said.band}: {said.left_did} against {said.right_did}"
        what = f"{said.what} of {said.left} and {said.right} differ{did if said.op >= 0 else ''}"
        self._mark("diverged", f"ranks parted at step {said.seq} of epoch {said.epoch}: {what}")
        self._parted = True

    def _input(self, record: Record) -> None:
        item: Any = record.decode()
        self._time(item.now_ns)
        if isinstance(item, Ticked):
            return
        if isinstance(item, Arrived):
            self._arrived = item
        elif isinstance(item, Reported) and item.epoch == self._epoch:
            at = self._place.pop(item.seq, None)
            if at is not None:
                self.steps["took_us"][at] = max(1, self.us - self.steps["us"][at])
        elif isinstance(item, EpochBegan):
            self._epoch_over("")
            self._epoch = item.epoch
            self._mark("began", f"epoch {item.epoch} begins")
            try:
                arena = Arena(item.geometry, item.facts, self._config)
            except Exception as error:
                self._mark("differs", f"no rank could have this arena: {type(error).__name__}: {error}")
                return
            self._began(arena)
        elif isinstance(item, EpochEnded):
            self._mark("ended", f"epoch {item.epoch} ended: {item.why}")
            self._epoch_over(item.why)

    def _decided(self, record: Record) -> None:
        said: Any = record.decode()
        assert isinstance(said, Decided)
        self._time(said.now_ns)
        self.requests.decided(said, self._arrived, self.position, self.us)
        if self._arena is not None:
            for request, holds in self.requests.changed:
                self._arena.held(request, holds)
        self.requests.changed.clear()
        if not self._shows:
            return
        column = self.decisions
        column.at.append(self.position)
        column.us.append(self.us)
        column.sequences.append(record.sequence)
        column.requests.append(said.request)
        column.by.append(said.by)
        column.verdicts.append(said.verdict)
        column.reasons.append(said.reason)
        column.texts.append(sentence(said, self._names))

    def _digested(self, record: Record) -> None:
        if self._parted or self._arena is None:
            return
        said: Any = record.decode()
        assert isinstance(said, Digested)
        ours = self._arena.layout(said.seq, said.stage) if said.epoch == self._epoch else None
        if ours is None or ours == said.layout:
            return
        self._parted = True
        what = f"stage {said.stage}, rank {said.rank} had another layout behind step {said.seq} than its steps lead to"
        self._mark("differs", what)

    def _stepped(self, record: Record) -> None:
        step: Any = record.decode()
        assert isinstance(step, Step)
        decodes = None if step.forward is None else self.requests.step(step.forward, self.position, self.us)
        arena = self._arena
        if arena is None or step.epoch != self._epoch:
            return
        try:
            arena.apply(step, self.requests)
        except Exception as error:
            self._mark("differs", f"no rank could apply step {step.seq}: {type(error).__name__}: {error}")
            self._epoch_over("a step that no rank could apply")
            return
        if self._shows:
            self._note(record, step, decodes)
        if arena.full or arena.steps >= self.writer.room:
            self._settle(arena)

    # --- inside --------------------------------------------------------------------------------------------------

    def _time(self, now_ns: int) -> None:
        """Times never go back: a clock that was set shows as a standstill."""
        self._now_ns = max(self._now_ns, now_ns)
        if self.start_ns < 0:
            self.start_ns = self._now_ns

    def _show(self, first: Record | None) -> None:
        """What follows is shown, `first` first; what was before is where it begins."""
        if self._arena is not None:
            self._arena.settle(self.requests)
        self._shows = True
        now_ns = getattr(first.decode(), "now_ns", None) if first is not None else None  # a step has no time
        if now_ns is not None:
            self._time(now_ns)
        self.requests.forget_before(self.us)
        self.start_ns = self._now_ns if self.start_ns >= 0 else -1  # behind a snapshot no time was heard yet
        self.marks.clear()
        if self._arena is not None:
            self._began(self._arena)

    def _mark(self, kind: str, text: str) -> None:
        if self._shows:
            self.marks.append(Mark(self.position, self.us, self.last_sequence, kind, text))

    def _began(self, arena: Arena) -> None:
        """An epoch's arena is shown from here on."""
        self._arena, self._parted = arena, False
        self._place.clear()
        self.requests.changed.clear()  # the arena knows who runs where it begins
        self._names = [[band.name for band in stage.bands] for stage in arena.geometry.stages]
        if not self._shows:
            return
        counts = [_column() for _ in range(len(arena.bands) * len(COUNTS))]
        bands = [
            (stage, band.index, band.units.capacity, band.units.anchor, band.units.direction)
            for stage, band in arena.bands
        ]
        self.stretches.append(Stretch(self.lives, self._epoch, arena.geometry, self.position, counts, bands))
        self.writer.begin(self.position, arena.frame())

    def _epoch_over(self, why: str) -> None:
        if self._arena is None:
            return
        self._settle(self._arena)
        self._arena, self._epoch = None, 0
        self.requests.changed.clear()
        if self._shows:
            self.writer.end()
            self.stretches[-1].end, self.stretches[-1].why = self.position, why

    def _settle(self, arena: Arena) -> None:
        """The steps of the arena's batch, which are noted already, get what they did to its units."""
        batch = arena.settle(self.requests)
        if not self._shows or not batch.steps:
            return
        self.writer.add(batch.steps, batch.changes)
        for column, counts in zip(self.stretches[-1].counts, batch.counts, strict=True):
            column.frombytes(counts.astype(np.int64).tobytes())
        for name, numbers in (("moved", batch.moved), ("moved_bytes", batch.moved_bytes)):
            self.steps[name].frombytes(numbers.tobytes())
        if not self.writer.room:
            self.writer.begin(self.position, arena.frame())

    def _note(self, record: Record, step: Step, decodes: Mask | None) -> None:
        """The columns of a step, but for what moves in it."""
        prefill = decoding = rows = 0
        if step.forward is not None and decodes is not None:
            rows, decoding = decodes.size, int(np.count_nonzero(decodes))
            prefill = int(i32(step.forward.counts)[~decodes].sum())
        self._place[step.seq] = self.position
        numbers = (record.sequence, self.us, 0, step.seq, rows, prefill, decoding, *op_units(step.ops))
        for name, number in zip(NOTED_COLUMNS, numbers, strict=True):
            self.steps[name].append(number)


def op_units(ops: Sequence[Op]) -> tuple[int, ...]:
    """Units that a step's ops take and free, states copied, units given to other pages, flushes, uses."""
    taken = freed = copied = rebound = flushes = uses = 0
    for op in ops:
        if isinstance(op, Take):
            taken += sum(len(part.ids) for part in op.parts) // I32.itemsize
        elif isinstance(op, Free):
            freed += sum(len(part.ids) for part in op.parts) // I32.itemsize
        elif isinstance(op, CopyState):
            copied += len(op.targets) // I32.itemsize
        elif isinstance(op, Rebind):
            rebound += len(op.targets) // I32.itemsize
        elif isinstance(op, Flush):
            flushes += 1
        else:
            uses += 1
    return taken, freed, copied, rebound, flushes, uses
