"""State: everything the core knows, in one place, and the steps that wait for their report.

Owns the containers and their cheap bookkeeping; policies in the neighbouring modules read and change it. Must never
hold anything that is not derived from the inputs. Invariants: `counts` agrees with the state of every live request;
received = refused + accepted and accepted + recovered = finished + aborted + failed + live, always.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from allocator.capacity import Demand
from allocator.checks import Checks
from allocator.columns import Int32s, Int64s
from allocator.errors import InvariantBroken
from allocator.geometry import Geometry
from daemon.core.due import Due
from daemon.core.expected import Expected
from daemon.core.grid import Kind
from daemon.core.kept_logprobs import Kept
from daemon.core.limits import CoreConfig
from daemon.core.memory import Memory, minus
from daemon.core.order import WaitingQueue
from daemon.core.outputs import Decided
from daemon.core.pace import Pace
from daemon.core.requests import HOLDING, QUEUED, Event, Group, Request, State, step_life
from daemon.core.rows import Rows, RowTable
from ipc.messages import ModelFacts

ENDED_GROUPS_MAX = 16384  # ended ids kept for a front end that does not acknowledge them
ENDED_BYTES_MAX = 256 * 1024 * 1024  # of their outputs and log probabilities
LOST_FRONTENDS_MAX = 1024  # names of lost front ends that are kept for the case that they come back
NOBODY = np.zeros(0, np.intp)


@dataclass(slots=True)
class Totals:
    """Counters of one life. `received` to `failed` count choices; tokens are counted when scheduled or committed.

    `recovered` choices were accepted in an earlier life and had not ended; `requeued` counts those that the end of an
    epoch, or of their trial, sent back to the queue, each time; `resumed` choices for which a front end came back.

    `retracted_tokens` a retraction threw away, `recomputed_tokens` were scheduled again by requests that had them
    before; `climbs` of the relief ladder, `preemptions` are retractions for a request of higher priority;
    `forgotten_logprobs` are tokens whose log probabilities took too much memory while they were kept for a return.
    """

    received: int = 0
    refused: int = 0
    accepted: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    repeated: int = 0
    recovered: int = 0
    requeued: int = 0
    resumed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    surplus_tokens: int = 0
    retractions: int = 0
    retracted_tokens: int = 0
    parks: int = 0
    cached_tokens: int = 0
    checkpoints_kept: int = 0
    checkpoints_given: int = 0
    checkpoints_skipped: int = 0
    cache_flushes: int = 0
    stalls: int = 0
    steps: int = 0
    forwards: int = 0
    passes: int = 0
    climbs: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    forgotten_logprobs: int = 0


@dataclass(slots=True)
class Flight:
    """A step that was sent and not reported. All columns list its sampled rows, in the order of the forward.

    `final` are positions in those columns whose token is the last one by length; `scored` are rows and generations that
    end with this step without sampling. `chunks` are row, generation and end of each prefill chunk, `hits` the rows and
    generations whose state this step copies from the cache. `releases` is the row table's count at launch: equal later
    means that nothing is stale. `launched_ns` is when its tick was, `prompt_tokens` how many its chunks have.
    """

    seq: int
    forward: bool
    releases: int
    rows: Rows = field(default_factory=lambda: NOBODY)
    generations: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    frontends: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    requests: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    rows_column: bytes = b""
    generations_column: bytes = b""
    final: Rows = field(default_factory=lambda: NOBODY)
    scored: tuple[tuple[int, int], ...] = ()
    chunks: tuple[tuple[int, int, int], ...] = ()
    hits: tuple[tuple[int, int], ...] = ()
    launched_ns: int = 0
    prompt_tokens: int = 0
    microbatch: int = 0


@dataclass(slots=True)
class Gift:
    """A kept state that waits to be given: how many tokens it consumed, the forward that ended there, why it is wanted.

    `refused`: no slot was to be had for it yet.
    """

    position: int
    seq: int
    kind: Kind
    refused: bool = False


@dataclass(slots=True)
class Helpless:
    """A waiting request for which nobody could give way: when that was asked, and what there was then.

    `asked_pass` is the pass by number, `rows` what `CoreState.row_changes` said, `pause_passes` how long the question
    is not asked again whatever changes.
    """

    request: int
    asked_pass: int
    rows: tuple[int, int, int]
    pause_passes: int


class CoreState:
    """The containers; see the module. `memory` and `facts` are None until the first epoch began."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.running_max = min(config.max_running_requests, config.max_batched_tokens)
        if self.running_max < 1 or config.chunked_prefill_size < 1 or config.page_size < 1:
            raise ValueError("max_running_requests, max_batched_tokens, chunked_prefill_size and page_size start at 1")
        self.frontends: list[str] = []  # by index; empty where the name was given up
        self.lost_frontends: dict[int, None] = {}  # indexes of lost ones whose names are kept, first lost first
        self.frontend_index: dict[str, int] = {}
        self.groups: dict[tuple[int, str], Group] = {}
        self.ended_groups: dict[tuple[int, str], Group] = {}
        self.requests: dict[int, Request] = {}
        self.next_request = 1
        self.queue = WaitingQueue(config)
        self.counts: dict[State, int] = dict.fromkeys(State, 0)
        self.totals = Totals()
        self.checkpoints_given = [0] * len(Kind)  # of `totals.checkpoints_given`, by kind
        self.checkpoints_hit = [0] * len(Kind)  # requests that started from a cached state, by its kind
        self.deadlines = Due()
        self.facts: ModelFacts | None = None
        self.stop_uses = np.zeros(0, np.int32)  # per token id: live groups that stop at it; empty without a model
        self.ended_bytes = 0  # of outputs and log probabilities kept of `ended_groups`
        self.kept_logprobs = Kept()  # of all other groups
        self.measure: Memory | None = None  # what arrivals are priced by: the epoch's memory, or the last one's
        self.draining = False
        self.snapshot_wanted = False  # the next step asks the ranks for their part of a snapshot
        self.degraded = ""
        self.reset_epoch()

    def reset_epoch(self) -> None:
        """Forget the device: rows, memory, steps in flight. Live requests must wait, or have ended."""
        self.epoch = 0
        self.seq = 0
        self.reported_seq = 0
        self.processed_through = 0
        self.told_through = 0  # processed_through as the newest step carried it
        self.flights: deque[Flight] = deque()
        self.in_flight = 0
        self.in_flight_max = 0
        self.microbatches = 1
        self.forming = 0  # the micro-batch that is being formed
        self.launched = [0]  # by micro-batch where there are several, the step of its newest forward
        self.flying = [False]  # likewise, whether that is in flight
        self.memory: Memory | None = None
        self.rows = RowTable(self.running_max, self.config.page_size)
        self.resident: Request | None = None
        self.suspects: dict[int, None] = {}  # requests that are still to be tried in this epoch, or are, in that order
        self.trial: Request | None = None  # the one of them that has a row, and nobody else
        self.parked_rows: list[Request] = []
        self.relief: dict[str, Decided] = {}  # by kind of need, what the relief ladder did last while it is short
        self.skipped: dict[int, tuple[str, dict[str, int]]] = {}  # by request, why the newest pass passed it over
        self.told_evicted: tuple[Demand, Demand] = ((), ())  # units taken from the cache that decisions have told of
        self.gifts: dict[int, Gift] = {}  # by row, states that wait to be given, in the order of their forwards
        self.changed: dict[int, list[int]] = {}  # by row, the page-table entries that the ranks must hear of again
        self.steady: Demand = ()  # sum of `steady` over requests that have a row
        self.expected = Expected(full=self.config.reserve == "full")
        self.pace = Pace(min(self.config.chunked_prefill_size, self.config.max_batched_tokens))
        self.throttled_steps = 0
        self.helpless: Helpless | None = None  # the newest request that preemption could not help
        self.flush_moves = 0
        self.busy = False  # something happened since the last idle step
        self.blocked = False  # the last tick could schedule nothing and nothing has changed since
        self.stalled_ticks = 0
        self.stall_retry_ns = 0  # a second behind the tick that was counted last; when to ask for a tick, no decision
        self.queue_moved_ns = 0  # the newest admission, or when the queue got its first request, if that was later
        self.admit_interval_ns = 0  # mean time between admissions while requests waited

    def begin_epoch(self, epoch: int, geometry: Geometry, facts: ModelFacts, checks: Checks) -> None:
        """All ranks hold an empty arena of this geometry."""
        memory = Memory(geometry, checks, self.config)
        windows = [tokens for _, tokens in memory.windows]
        self.epoch, self.memory, self.facts, self.measure = epoch, memory, facts, memory
        stages, overlap = len(geometry.stages), self.config.overlap
        self.microbatches = stages + 1 if stages > 1 and overlap else 1
        self.in_flight_max = max(self.microbatches, 1 + overlap)
        self.launched, self.flying = [0] * self.microbatches, [False] * self.microbatches
        page_size, slots_each = self.config.page_size, memory.slots_each
        self.rows = RowTable(self.running_max, page_size, windows, slots_each, self.microbatches, stages > 1)
        self.steady = memory.none
        self.told_evicted = (memory.none, memory.none)
        self.stop_uses = np.zeros(facts.vocab_size, np.int32)
        for group in self.groups.values():
            if group.live:
                self.stop_uses[group.stop_ids] += 1

    @property
    def live(self) -> int:
        """Accepted choices that have not ended."""
        return len(self.requests)

    @property
    def waiting(self) -> int:
        """Live choices that hold nothing."""
        return sum(self.counts[state] for state in sorted(QUEUED))

    @property
    def holding(self) -> int:
        """Live choices that have a row."""
        return sum(self.counts[state] for state in sorted(HOLDING))

    def row_changes(self) -> tuple[int, int, int]:
        """Equal to what it was: nobody got a row or gave one back since, and the same request is partly prefilled."""
        return self.rows.releases, self.rows.used_count, self.resident.number if self.resident is not None else 0

    def intern(self, frontend: str) -> int:
        """The front end's index, the same as long as it is not lost."""
        index = self.frontend_index.get(frontend)
        if index is None:
            index = len(self.frontends)
            self.frontend_index[frontend] = index
            self.frontends.append(frontend)
        self.lost_frontends.pop(index, None)
        return index

    def lose_frontend(self, index: int) -> None:
        """It holds nothing any more. Of the lost only so many names are kept, and no index is ever given twice.

        An output that is still on its way to a lost front end so can reach nobody else.
        """
        self.lost_frontends.pop(index, None)
        self.lost_frontends[index] = None
        if len(self.lost_frontends) > LOST_FRONTENDS_MAX:
            oldest = next(iter(self.lost_frontends))
            del self.lost_frontends[oldest]
            del self.frontend_index[self.frontends[oldest]]
            self.frontends[oldest] = ""

    def group_of(self, frontend: str, id: str) -> Group | None:
        """The known group of this front end and id, live or ended."""
        index = self.frontend_index.get(frontend)
        return None if index is None else self.groups.get((index, id))

    def choices_of(self, group: Group) -> list[Request]:
        """The live choices of a group, in order."""
        first = group.accepted.first_request
        numbers = range(first, first + group.accepted.n)
        return [self.requests[number] for number in numbers if number in self.requests]

    def move(self, request: Request, event: Event) -> None:
        """The only place where a request changes its state."""
        after = step_life(request.state, event)
        assert self.counts[request.state] > 0, "the state that a request leaves is counted"
        self.counts[request.state] -= 1
        self.counts[after] += 1
        request.state = after

    def output_of(self, request: Request) -> bytes:
        """All committed output of a live request (int64 column), wherever it lies."""
        if request.row < 0:
            return b"".join(request.kept)
        return b"".join([*request.kept, self.rows.newest_output(request.row).tobytes()])

    def enter(self, request: Request, now_ns: int) -> None:
        """A choice was accepted, or is taken over from an earlier life: it is live and waits."""
        assert request.number not in self.requests, "numbers are given once"
        self.requests[request.number] = request
        self.counts[request.state] += 1
        self.queue_up(request, now_ns)
        self.busy, self.blocked = True, False

    def queue_up(self, request: Request, now_ns: int) -> None:
        """Put a request that holds nothing into the queue; the time before, with nobody waiting, counts for nothing."""
        if not len(self.queue):
            self.queue_moved_ns = now_ns
        self.queue.add(request)

    def release_row(self, request: Request) -> Demand:
        """Take back everything a request holds, at once; returns how many units of each band that is."""
        assert self.memory is not None, "only an epoch has rows"
        self.gifts.pop(request.row, None)
        held = self.rows.release(request)
        self.memory.give_back(held)
        self.steady = minus(self.steady, request.steady)
        self.expected.left(request.group.namespace, request.max_output - request.began_output)
        self.queue.charge(request.group.namespace, request.output_tokens - request.began_output)
        excess = [len(ids) - most for ids, most in zip(held, request.ceiling, strict=True)]
        assert max(excess) <= 0, "a request never holds more than its ceiling"
        assert min(self.steady) >= 0, "what is promised was added before"
        if self.resident is request:
            self.resident = None
        if self.trial is request:
            self.trial = None
        if request.output_tokens > request.began_output:
            request.advance(request.sequence_tokens, self.epoch)
        if request in self.parked_rows:
            self.parked_rows.remove(request)
        request.sequence = None
        request.target_tokens = request.scheduled_tokens = request.processed_tokens = 0
        return tuple(len(ids) for ids in held)

    def due_ns(self) -> int | None:
        """When the next deadline of a live request is to be looked at, or None."""
        return self.deadlines.first_ns()

    def check_empty(self) -> None:
        """Where nobody has a row, or is live, nothing may be held; raises InvariantBroken with what is left."""
        if self.memory is not None:
            self.memory.check_idle()
        left = {
            "rows": self.rows.used_count,
            "decoding": int(np.count_nonzero(self.rows.decoding)),
            "queued": len(self.queue) - self.live,
            "counted": self.waiting + self.holding - self.live,
            "promised_units": sum(self.steady),
            "resident": int(self.resident is not None),
            "stop_ids": 0 if self.live else int(np.count_nonzero(self.stop_uses)),
            "changed": len(self.changed),
            "gifts": len(self.gifts),
            "units": sum(self.memory.live_units()) - self.memory.cached_units() if self.memory is not None else 0,
        }
        leaked = {name: count for name, count in left.items() if count}
        if leaked:
            raise InvariantBroken("core.leak_at_idle", f"nobody has a row and still held: {leaked}")
