"""Random schedules over the toy model: everything that can happen to a request, in any order, as data that shrinks.

Owns how a schedule is drawn from a seed, run, judged and made smaller. Must never use anything but a schedule's own
numbers, so that a failing one runs again the same. Judgement: every token that a front end got is the one that a run of
that request alone, without any memory, gives; every request ends as it must; at rest nothing is held but by the cache,
and nothing after that was flushed.
"""

from __future__ import annotations

import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from allocator.capacity import Demand, StageWalk
from allocator.columns import pack_i64
from allocator.demand import Purpose, RequestSizes, request_demand
from allocator.geometry import StageGeometry
from allocator.ops import Rebind
from allocator.plan import UNIT_ALIGN_BYTES
from daemon.core.eviction import EVICTION_POLICIES
from daemon.core.limits import CoreConfig
from daemon.rank.modeled import ModeledRunner
from ipc.messages import RankSettings
from tools.inprocess import InProcess, Sent
from tools.toy_reference import Toy, mismatches

SHAPES: dict[str, tuple[bool, int, bool]] = {
    "full": (True, 0, False),
    "full+window": (True, 1, False),
    "full+state": (True, 0, True),
    "full+2 windows+state": (True, 2, True),
    "window": (False, 1, False),
    "window+state": (False, 1, True),
    "state": (False, 0, True),
}
"""Name -> full attention stores bytes, number of windows, state."""

PAGE_SIZES = (1, 16, 64)
NAMESPACES = ("", "", "", "salt:x", "lora:x")
ROOM_PPM = (1_000_000, 1_100_000, 1_300_000, 2_000_000, 5_000_000)
PRESSED_PPM = (1_200_000, 1_500_000, 2_000_000, 2_500_000)
TURNS_MAX = 20_000
ARENA_BYTES = 6 << 20  # to size id spaces by; the arena itself is as tight as the schedule says
LENGTH_MAX = 4096


class Ask(msgspec.Struct):
    """One request: the first `cut` tokens of request `parent` (prompt and output so far; -1: none), then `suffix`."""

    parent: int
    cut: int
    suffix: list[int]
    max_tokens: int
    namespace: str = ""
    store: bool = True
    pin_ms: int = 0


class Schedule(msgspec.Struct):
    """Everything about one run. `actions` are (what, number): see `_ACTS`; `room_ppm` is memory in largest requests."""

    seed: int
    shape: str
    windows: list[int]
    page_size: int
    chunk: int
    batched: int
    rows: int
    interval: int
    caching: bool
    state_cache: str
    overlap: bool
    reserve: str
    retracts_max: int
    room_ppm: int
    late_ppm: int
    eos_ppm: int
    asks: list[Ask]
    actions: list[tuple[str, int]]
    checkpoint_policy: str = "likely"
    mark_tokens: int = 0
    eviction_policy: str = "value"

    @property
    def toy(self) -> Toy:
        """The model."""
        full, _, state = SHAPES[self.shape]
        return Toy(full=full, windows=tuple(self.windows), state=state, eos_ppm=self.eos_ppm)


@dataclass
class Ran:
    """What one run did: counters of what happened, and why it failed (empty: it did not)."""

    failure: str = ""
    happened: Counter[str] = field(default_factory=Counter)


def draw(seed: int) -> Schedule:
    """The schedule of a seed; every third one is of many short prompts with long outputs, which pass what is there."""
    rng = random.Random(seed)
    shape = rng.choice(sorted(SHAPES))
    _, windows, state = SHAPES[shape]
    pressed = rng.random() < 0.34
    page_size = rng.choice(PAGE_SIZES[:2] if pressed else PAGE_SIZES)
    state_cache = "no_buffer" if state and page_size == 1 and rng.random() < 0.4 else "extra_buffer"
    longest = 12 if pressed else rng.choice([30, 90]) if page_size < 64 else 260
    asks = list(_asks(rng, longest, [50, 100, 140] if pressed else [1, 2, 9, 30]))
    kept = random.Random(f"kept {seed}")  # drawn apart, so that older numbers stay what they were
    for ask in asks:
        ask.store = kept.random() < 0.85
        ask.pin_ms = kept.choice([0, 0, 0, 5, 50]) if ask.store else 0
    return Schedule(
        seed=seed,
        shape=shape,
        windows=rng.sample([2, 3, 7, 16, 17, 40, 90], windows),
        page_size=page_size,
        chunk=rng.choice([16, 50, 200] if pressed else [1, 5, 16, 50, 200]),
        batched=rng.choice([8, 64, 256]),
        rows=rng.choice([4, 6] if pressed else [1, 2, 4, 6]),
        interval=page_size * rng.choice([1, 2, 4]) if page_size > 1 else rng.choice([1, 5, 16, 40]),
        caching=rng.random() < 0.9,
        state_cache=state_cache,
        overlap=rng.random() < 0.7,
        reserve="estimate" if pressed else rng.choice(["estimate", "full"]),
        retracts_max=rng.choice([1, 3, 8]),
        room_ppm=rng.choice(PRESSED_PPM if pressed else ROOM_PPM),
        late_ppm=rng.choice([200_000, 500_000, 900_000]),
        eos_ppm=rng.choice([0, 0, 30_000, 150_000]),
        asks=asks,
        actions=_actions(rng, len(asks), [0, 0, 6] if pressed else [0, 3, 12, 40]),
        checkpoint_policy=kept.choice(["likely", "likely", "grid"]),
        mark_tokens=kept.choice([0, 10, 40, 4096]),
        eviction_policy=kept.choice(EVICTION_POLICIES),
    )


def _asks(rng: random.Random, longest: int, outputs: list[int]) -> Iterator[Ask]:
    """Fresh prompts, resends, branches off earlier ones, and next turns that go on behind an earlier output."""
    spaces: list[str] = []
    for number in range(rng.randint(4, 12)):
        parent = rng.randrange(number) if number and rng.random() < 0.75 else -1
        cut = rng.choice([rng.randint(1, 2 * longest), 10**6, 10**6]) if parent >= 0 else 0
        fresh = rng.choice([0, 1, rng.randint(1, longest)]) if parent >= 0 else rng.randint(1, longest)
        suffix = [rng.randrange(32, 49152) for _ in range(fresh)]
        strangers = parent < 0 or rng.random() < 0.1
        spaces.append(rng.choice(NAMESPACES) if strangers else spaces[parent])
        yield Ask(parent, cut, suffix, rng.choice(outputs), spaces[-1])


def _actions(rng: random.Random, asks: int, pauses: list[int]) -> list[tuple[str, int]]:
    """Every request is submitted once, in order; between that whatever the weights of this schedule like."""
    weights = {"tick": 8, "report": 6, "churn": rng.choice([0, 1, 4]), "retract": rng.choice([0, 1, 3])}
    weights |= {"abort": rng.choice([0, 0, 1]), "flush": rng.choice([0, 1]), "flush_cache": rng.choice([0, 0, 1])}
    weights |= {"evict": rng.choice([0, 1, 2]), "finish": rng.choice([0, 0, 1])}
    names = [name for name, weight in weights.items() if weight]
    actions: list[tuple[str, int]] = []
    for number in range(asks):
        actions.append(("submit", number))
        for _ in range(rng.choice(pauses)):
            name = rng.choices(names, [weights[each] for each in names])[0]
            actions.append((name, rng.randrange(10**6)))
    return actions


# --- running ---------------------------------------------------------------------------------------------------------


def run(schedule: Schedule) -> Ran:
    """Run a schedule to its end and judge it; whatever goes wrong is its failure."""
    ran = Ran()
    try:
        _Run(schedule, ran).whole()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        ran.failure = f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    return ran


class _Run:
    """One schedule on one engine."""

    def __init__(self, schedule: Schedule, ran: Ran) -> None:
        self.schedule, self.ran = schedule, ran
        self.engine = engine_of(schedule)
        self.sent: dict[int, Sent] = {}
        self.aborted: set[str] = set()
        self.churned = False

    def whole(self) -> None:
        """All actions, then rest, then the checks."""
        for name, number in self.schedule.actions:
            _ACTS[name](self, number)
        self.engine.run(TURNS_MAX)
        self.engine.check_rest()
        self._count()
        for sent in self.sent.values():
            self._judge(sent)
        self.engine.flush_cache()
        self.engine.run(TURNS_MAX)
        self.engine.check_free()

    def submit(self, number: int) -> None:
        """Send request `number`, whose prompt may go on where an earlier one stands now."""
        ask = self.schedule.asks[number]
        parent = self.sent.get(ask.parent)
        prefix = [*parent.prompt, *parent.tokens][: ask.cut] if parent is not None else []
        prompt = [*prefix, *ask.suffix] or [32]
        stop_ids = pack_i64([self.schedule.toy.eos_id])
        self.sent[number] = self.engine.submit(
            prompt,
            ask.max_tokens,
            ask.namespace,
            stop_ids=stop_ids,
            store=ask.store,
            pin_ms=ask.pin_ms if self.schedule.caching else 0,
        )

    def tick(self, _: int) -> None:
        """One iteration, wanted or not."""
        if self.engine.wants_tick:
            self.engine.tick()

    def report(self, _: int) -> None:
        """The oldest report comes back."""
        if self.engine.flights:
            self.engine.report()

    def churn(self, number: int) -> None:
        """The balloon does something."""
        self.engine.churn(number)

    def retract(self, number: int) -> None:
        """One request that runs loses its memory."""
        running = [sent for sent in self.sent.values() if sent.number in self.engine.state.requests]
        if running:
            self.ran.happened["forced retractions"] += self.engine.retract(running[number % len(running)])

    def abort(self, number: int) -> None:
        """One live request ends from outside."""
        live = [sent for sent in self.sent.values() if sent.finished is None and not sent.refused]
        if live:
            self.aborted.add(live[number % len(live)].id)
            self.engine.abort(live[number % len(live)])

    def finish(self, number: int) -> None:
        """A front end finds a stop string in what one live request has said so far."""
        live = [sent for sent in self.sent.values() if sent.finished is None and sent.tokens]
        if live:
            self.aborted.add(live[number % len(live)].id)
            self.engine.finish_at(live[number % len(live)])

    def flush(self, number: int) -> None:
        """Opportunistic compaction."""
        self.engine.flush(1 + number % 32)

    def evict(self, number: int) -> None:
        """The cache loses half or all of one band's part."""
        bands = len(self.engine.bands)
        self.engine.evict_only(number % bands, 1 + number // bands % 2)

    def flush_cache(self, _: int) -> None:
        """The cache is emptied of what nobody reads."""
        self.engine.flush_cache()

    def _judge(self, sent: Sent) -> None:
        assert sent.refused is None, f"{sent.id} was refused: {sent.refused}"
        assert sent.finished is not None, f"{sent.id} has no end"
        wrong = mismatches(self.schedule.toy, sent.prompt, sent.tokens)
        assert not wrong, (
            f"{sent.id}: {len(sent.prompt)} prompt tokens, output token {wrong[0]} of {len(sent.tokens)} is wrong;"
            f" cached {sent.cached}, admissions {len(sent.admissions)}"
        )
        eos = self.schedule.toy.eos_id
        stops = eos in sent.tokens
        assert not stops or sent.tokens.index(eos) == len(sent.tokens) - 1, f"{sent.id} went on behind a stop token"
        if sent.id not in self.aborted:
            wanted, ended = "stop" if stops else "length", sent.finished
            assert ended.reason == wanted, f"{sent.id} ended by {ended.reason}, not {wanted}: {ended.detail}"
            assert stops or len(sent.tokens) == sent.max_tokens, f"{sent.id}: {len(sent.tokens)} of {sent.max_tokens}"

    def _count(self) -> None:
        happened, engine = self.ran.happened, self.engine
        happened["requests"] += len(self.sent)
        happened["aborted or stopped from outside"] += len(self.aborted)
        happened["ended by a stop token"] += sum(self.schedule.toy.eos_id in sent.tokens for sent in self.sent.values())
        happened["steps"] += self.engine.state.seq
        happened["retractions"] += engine.state.totals.retractions
        happened["parks"] += engine.state.totals.parks
        happened["balloon takes"] += engine.balloon.takes
        relief = engine.worker.chain.relief
        happened["relief moves"] += relief.moves
        happened["flush moves"] += relief.flush_moves
        for name, units in engine.copied().items():
            happened[f"copies {name.partition(':')[0]}"] += units
        for name, value in engine.core.gauges().items():
            if name.startswith(("evicted_units", "checkpoints_", "states_", "pins_")):
                happened[_plain(name)] += value
        happened["rebinds"] += sum(isinstance(op, Rebind) for step in engine.steps for op in step.ops)
        for sent in self.sent.values():
            for admitted in sent.admissions:
                happened["hits"] += admitted.numbers.get("cached_tokens", 0) > 0
                happened[f"cut by {admitted.reason.partition(':')[0] or 'nothing'}"] += 1


def _plain(gauge: str) -> str:
    """A gauge's name without the length of a window, so that schedules add up."""
    return re.sub(r":?_?\d+", "", gauge).removesuffix("_total").replace("_", " ")


_ACTS: dict[str, Callable[[_Run, int], None]] = {
    name: getattr(_Run, name)
    for name in ("submit", "tick", "report", "churn", "retract", "abort", "finish", "flush", "evict", "flush_cache")
}


def engine_of(schedule: Schedule) -> InProcess:
    """The engine that a schedule runs on; its arena holds `room_ppm` millionths of the largest request."""
    config = CoreConfig(
        page_size=schedule.page_size,
        max_running_requests=schedule.rows,
        max_batched_tokens=schedule.batched,
        chunked_prefill_size=schedule.chunk,
        overlap=schedule.overlap,
        reserve=schedule.reserve,
        retracts_max=schedule.retracts_max,
        enable_prefix_caching=schedule.caching,
        checkpoint_interval=schedule.interval,
        state_cache=schedule.state_cache,
        checkpoint_policy=schedule.checkpoint_policy,
        checkpoint_mark_tokens=schedule.mark_tokens,
        eviction_policy=schedule.eviction_policy,
    )
    grid = schedule.interval if schedule.caching and schedule.state_cache == "extra_buffer" else 0
    settings = RankSettings(
        model_path="",
        model_name="toy",
        dtype="auto",
        page_size=schedule.page_size,
        max_running_requests=schedule.rows,
        max_batched_tokens=schedule.batched,
        max_model_len=LENGTH_MAX,
        arena_bytes=ARENA_BYTES,
        mem_fraction_ppm=0,
        runner="modeled",
        threads=1,
        invariants=2,
        options=schedule.toy.options(),
        checkpoint_interval=grid,
    )
    runner = ModeledRunner(settings)
    prepared = runner.prepare()
    longest = _longest(schedule)
    sizes = RequestSizes(longest, 0, chunk_tokens=min(schedule.chunk, schedule.batched), checkpoint_interval=grid)
    one = request_demand(prepared.geometry.bands, schedule.page_size, sizes, Purpose.CEILING)
    wanted = tuple(-(-units * schedule.room_ppm // 1_000_000) for units in one)
    arena_bytes = least_arena(prepared.geometry, wanted)
    return InProcess(
        config,
        settings,
        runner,
        prepared=prepared,
        arena_bytes=arena_bytes,
        seed=schedule.seed,
        late=schedule.late_ppm / 1_000_000,
    )


def least_arena(stage: StageGeometry, wanted: Demand) -> int:
    """The smallest arena of the stage's bands that holds these units at once."""
    low, high = stage.chain_start_bytes // UNIT_ALIGN_BYTES, stage.arena_bytes // UNIT_ALIGN_BYTES
    while low < high:
        middle = (low + high) // 2
        arena = msgspec.structs.replace(stage, arena_bytes=middle * UNIT_ALIGN_BYTES)
        low, high = (low, middle) if StageWalk(arena).overlap_bytes(wanted) <= 0 else (middle + 1, high)
    return low * UNIT_ALIGN_BYTES


def _longest(schedule: Schedule) -> int:
    """The most tokens that any request of the schedule can store."""
    tokens: list[int] = []
    for ask in schedule.asks:
        prefix = min(ask.cut, tokens[ask.parent]) if ask.parent >= 0 else 0
        tokens.append(max(prefix + len(ask.suffix), 1) + ask.max_tokens)
    return max(tokens, default=1)


# --- making a failing one smaller ------------------------------------------------------------------------------------


def shrink(schedule: Schedule, tries: int = 400) -> tuple[Schedule, Ran]:
    """A smaller schedule that still fails, and how: fewer actions, fewer requests, shorter prompts and outputs."""
    best, ran = schedule, run(schedule)
    assert ran.failure, "only what fails is made smaller"
    left = tries
    improved = True
    while improved and left > 0:
        improved = False
        for smaller in _smaller(best):
            left -= 1
            tried = run(smaller)
            if tried.failure:
                best, ran, improved = smaller, tried, True
                break
            if left <= 0:
                break
    return best, ran


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Candidates, the boldest first."""
    actions, replace = schedule.actions, msgspec.structs.replace
    size = len(actions) // 2
    while size:
        for start in range(0, len(actions), size):
            yield replace(schedule, actions=actions[:start] + actions[start + size :])
        size //= 2
    for number, ask in enumerate(schedule.asks):
        for changed in (
            replace(ask, suffix=ask.suffix[: len(ask.suffix) // 2]),
            replace(ask, suffix=ask.suffix[:-1]),
            replace(ask, max_tokens=max(1, ask.max_tokens // 2)),
            replace(ask, max_tokens=max(1, ask.max_tokens - 1)),
            replace(ask, namespace=""),
        ):
            if changed != ask and (changed.suffix or changed.parent >= 0):
                yield replace(schedule, asks=[*schedule.asks[:number], changed, *schedule.asks[number + 1 :]])
    for field_name, plain in (("overlap", False), ("rows", 1), ("chunk", 200), ("batched", 256)):
        if getattr(schedule, field_name) != plain:
            yield replace(schedule, **{field_name: plain})
