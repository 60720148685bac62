"""Scene: two lives of a small daemon under pressure, recorded with ranks that perform their effects, and one fault.

Owns the traffic, the recording and the account of who holds which id, which is taken from the core's own tables. Must
never look at what replay looks at. Invariant: without a fault the journal is reproduced whole.
"""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from allocator.columns import i32, pack_i64
from allocator.effects import Effect
from allocator.geometry import BandGeometry, Geometry
from allocator.ops import Op, Take
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from daemon.core.scheduler import SchedulerCore
from daemon.rank.device import HostDevice
from daemon.rank.executor import Executor
from daemon.snapshots import core_state
from ipc.digests import effects_column
from ipc.messages import Generate, ModelFacts, Sampling, Step
from journal import records, segment, snapshots
from journal.records import DECISION_VERSION, Kind, Snapshotted
from journal.snapshots import Body, Header, encode_body
from tools.replica import StageReplica
from tools.simulate.engine import Engine, Times, one_stage
from tools.simulate.recording import Recording

PAGE = 4
BANDS = [
    BandGeometry("state", "state", 512),
    BandGeometry("window:16", "window", 128, 16),
    BandGeometry("full", "full", 128),
]
ARENA_BYTES = 26_000
FACTS = ModelFacts("planted", "none", 512, 256, "none", [1])
CONFIG = CoreConfig(
    page_size=PAGE,
    max_running_requests=10,
    max_batched_tokens=48,
    chunked_prefill_size=24,
    checkpoint_interval=16,
    schedule_policy="fcfs",
    epoch_losses_max=0,
)
SEGMENT_BYTES = 24 << 10
SYNC_STEPS = 32
AFTER_TURNS = 12  # a fault had time to show
TOKEN = 7  # what every request samples
STRIKE_STEP = 60  # faults come from this step on


class Over(Exception):
    """The fault ended the epoch: a rank could not go on."""


def takes_pages(op: Op) -> bool:
    """Whether an op takes owner pages: whose table they enter is known at once."""
    return isinstance(op, Take) and op.parts[-1].band == len(BANDS) - 1


@dataclass(slots=True)
class Truth:
    """What is false, as the fault itself knows it. Numbers are 0, op and offset -1 where they do not apply."""

    step: int = 0
    op: int = -1
    request: int = 0
    sequence: int = 0
    rule: str = ""
    file: str = ""
    offset: int = -1


class Fault:
    """One thing that is false; `truth` is set when it happened. Hooks that a fault does not need change nothing.

    A class is called as its fault is: `WrongPage` is `wrong-page`; its first line says what is false, for people.
    """

    name = ""
    about = ""
    needs_op = False  # that the op is named, whichever it is
    tolerated = False  # replay goes on, and says so
    lives = 1  # how many the scene needs; the last is closed in order
    turns = 60  # of each life, at most
    snapshot = False  # that one is asked for

    def __init_subclass__(cls) -> None:
        said = (cls.__doc__ or "").partition("\n")[0].removesuffix(".")
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()
        cls.about = said[:1].lower() + said[1:]

    def __init__(self) -> None:
        self.truth: Truth | None = None

    def core(self, scene: Scene) -> AbstractContextManager[None]:
        """Change what the core is made of, while the life is recorded."""
        return nullcontext()

    def rank(self, scene: Scene, rank: WorkingRank) -> None:
        """Change a rank before its epoch begins."""

    def record(self, scene: Scene, payload: Any) -> list[Any]:
        """What is written in place of a record."""
        return [payload]

    def files(self, scene: Scene, directory: Path) -> None:
        """Change the files, when all is written."""


class WorkingRank(StageReplica):
    """A stage's rank with an executor on an arena: what it says is what it performed."""

    def __init__(self, geometry: Geometry, config: CoreConfig, facts: ModelFacts) -> None:
        super().__init__(geometry, 0, config, facts)
        stage = geometry.stages[0]
        self.chain = self._chain
        self.device = HostDevice(stage)
        resting = [self._chain.resting_unit(band) for band in range(len(stage.bands))]
        self.executor = Executor(geometry, 0, self.device, resting, notes=True)
        self.step: Step | None = None
        self.op = -1  # the op whose effects are decided or performed now

    def apply_step(self, step: Step) -> bytes:
        """As a rank does it: ops, effects, digest, launch."""
        self.step = step
        self._chain.begin_step(step.seq, step.processed_through, step.released)
        ends: list[int] = []
        applied = self._chain.apply(self.numbered(step.ops), ends)
        late = ends[0]
        for place, effect in enumerate(applied):
            self.op = bisect.bisect_right(ends, place + late) - 1
            self.perform(effect)
        self.effects = effects_column(self.executor.take_performed(), ends)
        layout = self._chain.end_step()
        if step.forward is not None:
            self._rows.apply(step.forward)
            written = self._rows.written_ids(step.forward, self._bands, self._page_size)
            self.executor.execute(self._chain.launched(step.seq, written))
            self.device.record_forward(step.seq)
        return layout

    def numbered(self, ops: list[Op]) -> list[Op]:
        """The ops; while the chain goes through them `op` is the one that it is at."""
        rank = self

        class Numbered(list[Op]):
            def __iter__(self) -> Iterator[Op]:
                for rank.op, op in enumerate(super().__iter__()):
                    yield op

        return Numbered(ops)

    def perform(self, effect: Effect) -> None:
        """Perform one effect."""
        self.executor.execute([effect])


class PlantedRecording(Recording):
    """Writes what the fault makes of each record, and a snapshot where a step asks for one."""

    def __init__(self, scene: Scene, directory: Path) -> None:
        super().__init__(directory, CONFIG, {"planted": scene.fault.name}, SEGMENT_BYTES)
        self.scene = scene
        self._true = self._writer
        self._writer = _Through(scene, self._true)  # type: ignore[assignment]

    @property
    def mirror(self) -> Any:
        """The logical chain as the ranks follow it."""
        return self._mirror

    def _begin(self, geometry: Geometry, facts: ModelFacts) -> None:
        super()._begin(geometry, facts)
        self.scene.recording = self
        rank = WorkingRank(geometry, CONFIG, facts)
        self._stages = [rank]
        self.scene.rank = rank
        self.scene.fault.rank(self.scene, rank)

    def before(self, item: inputs.Input) -> None:
        """See Recording."""
        self.scene.look()
        super().before(item)

    def after(self, out: Outputs) -> None:
        """See Recording."""
        self.scene.look()
        if out.step is not None:
            self.scene.step = out.step.seq
        try:
            super().after(out)
        except Exception as error:
            if self.scene.fault.truth is None:
                raise
            self._true.flush()
            raise Over(f"{type(error).__name__}: {error}") from error
        if out.step is not None and out.step.snapshot:
            self._snapshot(out.step)
        if out.step is not None and out.step.seq % SYNC_STEPS == 0:
            self._true.sync()

    def _snapshot(self, step: Step) -> None:
        core, sequence, life = self.scene.core, self._true.last_sequence, "planted"
        assert self._mirror is not None, "a snapshot is of an epoch"
        parts = [stage.state(self._mirror) for stage in self._stages]
        reported = self._said[0][1] - 1
        body = encode_body(
            Body(core_state(core), parts, reported, self._sampled, core.recoverable(), core.next_request)
        )
        header = Header(
            self._true.journal_id,
            life,
            DECISION_VERSION,
            sequence,
            step.epoch,
            step.seq,
            len(body),
            segment.digest(body),
        )
        name, size = snapshots.write(self._storage, header, body)
        self._writer.append(Snapshotted(name, size, header.digest, sequence))
        self._writer.flush()


class _Through:
    """A journal writer behind the fault."""

    def __init__(self, scene: Scene, writer: Any) -> None:
        self._scene, self._writer = scene, writer

    def append(self, payload: msgspec.Struct) -> int:
        """One record, or what became of it."""
        self._scene.sequence = self._writer.last_sequence
        for made in self._scene.fault.record(self._scene, payload):
            self._scene.sequence = self._writer.append(made)
        return self._scene.sequence

    def append_all(self, payloads: Any) -> int:
        """Several."""
        for payload in payloads:
            self.append(payload)
        return self._scene.sequence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


@dataclass(slots=True)
class Scene:
    """Makes the journal of one fault in a directory."""

    fault: Fault
    directory: Path
    step: int = 0
    life: int = 0
    sequence: int = 0
    owners: dict[tuple[str, int], int] = field(default_factory=dict)  # last holder of page and slot ids
    tenants: dict[tuple[int, int], int] = field(default_factory=dict)  # request by row and generation
    engine: Engine | None = None
    rank: WorkingRank | None = None
    recording: Any = None

    def make(self) -> Truth:
        """Record two lives, the first cut off, the second closed; what is false in them."""
        left: inputs.Recovered | None = None
        for life in range(1, self.fault.lives + 1):
            self.life = life
            self.owners.clear()
            self.tenants.clear()
            try:
                with self.fault.core(self), PlantedRecording(self, self.directory) as recording:
                    left = self._live(recording, left)
            except Over:
                break
        self.fault.files(self, self.directory)
        assert self.fault.truth is not None, f"{self.fault.name} found no occasion"
        return self.fault.truth

    @property
    def core(self) -> SchedulerCore:
        """The life's core."""
        if self.engine is None:
            raise AssertionError("no life has begun")
        return self.engine.core

    @property
    def ripe(self) -> bool:
        """Whether a fault of the running life may happen now."""
        return self.fault.truth is None and self.step >= STRIKE_STEP

    def look(self) -> None:
        """Note who holds which id, by the core's own tables."""
        if self.engine is None:
            return
        rows = self.core.state.rows
        for row, owner in enumerate(rows.owners):
            if owner is not None:
                self.tenants[row, int(rows.generation[row])] = owner.number
                for page in rows.table[row, : rows.pages[row]].tolist():
                    self.owners["page", page] = owner.number
                for slot in rows.slots[row].tolist():
                    self.owners["slot", slot] = owner.number

    def holders(self, op: Any) -> list[int]:
        """The requests that an op of parts concerns."""
        found = []
        for part in op.parts:
            kind = "slot" if BANDS[part.band].kind == "state" else "page"
            found += [self.owners.get((kind, id), 0) for id in i32(part.ids).tolist()]
        return sorted({number for number in found if number})

    # --- inside --------------------------------------------------------------------------------------------------

    def _live(self, recording: PlantedRecording, left: inputs.Recovered | None) -> inputs.Recovered:
        self.engine, self.step = None, 0
        engine = Begun(
            left, CONFIG, one_stage(BANDS, PAGE, ARENA_BYTES), FACTS, Times(), recording=recording, scene=self
        )
        rng = random.Random(self.life)
        stems = [[rng.randrange(2, 500) for _ in range(40)] for _ in range(3)]
        ids: list[str] = []
        over = 0
        for turn in range(self.fault.turns):
            if rng.random() < 0.4:
                stem = rng.choice(stems)[: rng.randrange(8, 40)]
                prompt = stem + [rng.randrange(2, 500) for _ in range(rng.randrange(1, 40))]
                # Most stop early, so that memory is promised to more than it can hold when the others do not.
                stops = pack_i64([TOKEN]) if rng.random() < 0.6 or turn % 80 < 40 else b""
                ids.append(f"life{self.life}-{len(ids)}")
                generate = Generate(
                    ids[-1],
                    pack_i64(prompt),
                    Sampling(temperature=0.0),
                    max_tokens=90,
                    min_tokens=rng.randrange(1, 6),
                    stop_ids=stops,
                    clip=True,
                )
                engine.submit(generate, TOKEN)
            if ids and rng.random() < 0.03:
                engine.abort(rng.choice(ids))
            if self.fault.snapshot and turn == self.fault.turns // 2:
                engine.control("snapshot")
            engine.advance(engine.now_ns + rng.randrange(1, 9) * 3_000_000)
            over += self.fault.truth is not None
            if over > AFTER_TURNS:
                break
        engine.run()
        if self.life == self.fault.lives:
            recording.close(engine.now_ns, "the scene is over", engine.core)
        return inputs.Recovered(engine.now_ns, engine.core.recoverable(), engine.core.next_request)


class Begun(Engine):
    """An engine whose core takes over what the life before left, before its epoch begins."""

    def __init__(self, left: inputs.Recovered | None, *arguments: Any, scene: Scene, **more: Any) -> None:
        self._left, self._scene = left, scene
        super().__init__(*arguments, **more)

    def feed(self, item: inputs.Input) -> Outputs:
        """See Engine."""
        self._scene.engine = self
        if self._left is not None:
            left, self._left = self._left, None
            super().feed(records.decode(Kind.RECOVERED, records.encode(left)))  # type: ignore[arg-type]
        return super().feed(item)

    def _acknowledge_ended(self) -> None:
        """Ends stay, for the next life to take over."""
        self._acknowledge.clear()
