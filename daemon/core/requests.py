"""Requests: what the core keeps of each accepted choice, and the one table of its life.

Owns `LIFE` (state x event -> state) and the records of requests and of the groups that arrived together. Must never
hold what changes every step: that lies in the columns of `rows`. Invariants: a request changes its state only through
`step_life`; after a terminal state no event is legal, so it ends exactly once.

    waiting --admit--> prefilling --prefilled--> running --finish--> finished
       ^                 | ^  |                    | ^  |
       |              park unpark               park unpark
       |                 v |  |                    v |  |
       |           parked_chunk                 parked_row          any live state --abort--> aborted
    retracted <---------retract---------------------'               any live state --fail---> failed

A row is lost by retraction for memory or priority, and when the epoch ends: one event, because either way all is given
back and the output stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from allocator.capacity import Demand
from allocator.columns import Int64s
from allocator.errors import InvariantBroken
from daemon.core.reasons import EndReason
from daemon.core.tree_nodes import Lock, Match
from ipc.messages import Accepted, Finished, Generate, RequestLogprobs, Sampling


class State(StrEnum):
    """Where an accepted choice stands."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    PARKED_CHUNK = "parked_chunk"
    RUNNING = "running"
    PARKED_ROW = "parked_row"
    RETRACTED = "retracted"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class Event(StrEnum):
    """What can happen to an accepted choice."""

    ADMIT = "admit"
    PREFILLED = "prefilled"
    PARK = "park"
    UNPARK = "unpark"
    RETRACT = "retract"
    FINISH = "finish"
    ABORT = "abort"
    FAIL = "fail"


QUEUED = frozenset({State.WAITING, State.RETRACTED})
HOLDING = frozenset({State.PREFILLING, State.PARKED_CHUNK, State.RUNNING, State.PARKED_ROW})
LIVE = QUEUED | HOLDING

LIFE: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMIT): State.PREFILLING,
    (State.RETRACTED, Event.ADMIT): State.PREFILLING,
    (State.PREFILLING, Event.PREFILLED): State.RUNNING,
    (State.PREFILLING, Event.PARK): State.PARKED_CHUNK,
    (State.PARKED_CHUNK, Event.UNPARK): State.PREFILLING,
    (State.RUNNING, Event.PARK): State.PARKED_ROW,
    (State.PARKED_ROW, Event.UNPARK): State.RUNNING,
    (State.PREFILLING, Event.RETRACT): State.RETRACTED,
    (State.PARKED_CHUNK, Event.RETRACT): State.RETRACTED,
    (State.RUNNING, Event.RETRACT): State.RETRACTED,
    (State.PARKED_ROW, Event.RETRACT): State.RETRACTED,
    **{(state, Event.FINISH): State.FINISHED for state in State if state in LIVE},
    **{(state, Event.ABORT): State.ABORTED for state in State if state in LIVE},
    **{(state, Event.FAIL): State.FAILED for state in State if state in LIVE},
}

END_EVENT: dict[EndReason, Event] = {
    EndReason.STOP: Event.FINISH,
    EndReason.LENGTH: Event.FINISH,
    EndReason.ABORT: Event.ABORT,
    EndReason.DEADLINE: Event.FAIL,
    EndReason.UNSCHEDULABLE: Event.FAIL,
    EndReason.MEMORY: Event.FAIL,
    EndReason.FAULT: Event.FAIL,
    EndReason.DRAINED: Event.FAIL,
}


def step_life(state: State, event: Event) -> State:
    """The state after `event`; raises InvariantBroken with both names when the table has no such row."""
    after = LIFE.get((state, event))
    if after is None:
        raise InvariantBroken("core.request_life", f"no event {event.value!r} in state {state.value!r}")
    return after


@dataclass(slots=True, eq=False)
class Group:
    """One accepted `Generate`: its choices share the prompt and the client's id.

    Cached prefixes are shared within its `namespace`; without `store` nothing it computes is cached, and what it leaves
    there is pinned for `pin_ns`. `prompt` and `stop_ids` (int64) are dropped when the last choice has ended, from
    `generate` too. `ended` holds the terminal message of each choice until the front end acknowledges the id, `outputs`
    its output (int64 column) and `logprobs` what was delivered of them, so that a client can come back for them.
    """

    frontend: int
    id: str
    digest: bytes
    generate: Generate
    accepted: Accepted
    prompt: Int64s
    stop_ids: Int64s
    sampling: Sampling
    live: int
    namespace: str = ""
    store: bool = True
    pin_ns: int = 0
    arrived_ns: int = 0
    ended: dict[int, Finished] = field(default_factory=dict)
    outputs: dict[int, bytes] = field(default_factory=dict)
    logprobs: dict[int, list[RequestLogprobs]] = field(default_factory=dict)


CAME_BACK = -1  # confirmed: in this life its client said what it holds
ENOUGH_TOKENS = 8  # further in one epoch than ever before: it is not what the ranks died of (`daemon.core.suspects`)
NEW = -2  # confirmed: accepted in this life; a client that sends it anew may hold anything, as `Resumed` then says


@dataclass(slots=True, eq=False)
class Request:
    """One accepted choice. Counts in tokens.

    `ceiling` are the most units it can ever hold per band, `steady` the most while no chunk of it is prefilled.

    `confirmed` is how much of its output no client can hold otherwise: what was sure when an earlier life ended, for as
    long as its client has not come back, else one of `NEW` and `CAME_BACK`. `prompt_logprobs` were delivered;
    `output_logprobs` has one entry per output token.

    `kept` are output tokens committed before the last whole tail of its row (int64 columns, oldest first); `sequence`
    is prompt plus kept output while it is prefilled, else None. `output_tokens` is exact only while it has no row.
    """

    number: int
    group: Group
    choice: int
    prompt_tokens: int
    max_output: int
    min_output: int
    ceiling: Demand
    steady: Demand
    priority: int
    arrived_ns: int
    deadline_ns: int
    state: State = State.WAITING
    row: int = -1
    kept: list[bytes] = field(default_factory=list)
    output_tokens: int = 0
    began_output: int = 0  # of those, how many it had when it got its row
    sequence: Int64s | None = None
    target_tokens: int = 0  # prompt tokens plus kept output: what prefill must cover in this generation
    scheduled_tokens: int = 0  # of those, how many are scheduled
    processed_tokens: int = 0  # of those, how many a processed forward wrote
    chunk_seq: int = 0  # the step of its newest chunk
    known_tokens: int = 0  # how much of the sequence the cache knew from others when it was last heard of
    continues: bool = False  # it started where an earlier turn ended
    lock: Lock | None = None  # what it holds of the prefix cache, while it has a row and there is a cache
    cached_tokens: int = 0  # how many were not computed when it was first admitted
    matched_tokens: int = 0  # how far full-attention pages alone matched then
    hit_cut: str = ""  # what ended that hit
    match: Match | None = None  # what the cache knew of its sequence when it was last asked, while it waits
    retractions: int = 0
    started: bool = False  # it had a row once
    reached_tokens: int = 0  # the most positions that it had scheduled when it lost a row
    prompt_logprobs_next: int = 1  # first prompt position whose log probability was not delivered yet
    prompt_logprobs: list[RequestLogprobs] = field(default_factory=list)
    output_logprobs: list[RequestLogprobs] = field(default_factory=list)
    confirmed: int = NEW
    last_wait: str = ""
    losses: int = 0  # epochs in a row that died while it had a row and got hardly further than before (`suspects`)
    furthest_tokens: int = 0  # how far it ever got: the last position that a report showed computed or sampled, plus 1
    advanced_in: int = 0  # the newest epoch in which it got further
    advanced_from: int = 0  # how far it had got when that epoch began

    @property
    def sequence_tokens(self) -> int:
        """Prompt and kept output of a request that has no row: what its prefill will cover."""
        return self.prompt_tokens + self.output_tokens

    @property
    def logprobs(self) -> list[RequestLogprobs]:
        """What was delivered of the prompt, then one entry per output token; the caller's own list."""
        return [*self.prompt_logprobs, *self.output_logprobs]

    @property
    def sure_tokens(self) -> int:
        """Output tokens that its client, should it come back, cannot hold otherwise; -1: nor anything behind them."""
        return 0 if self.confirmed == NEW else self.confirmed

    def advance(self, tokens: int, epoch: int) -> None:
        """A report of this epoch shows that it got so far."""
        if tokens > self.furthest_tokens:
            self.advanced_in, self.advanced_from = epoch, self.reached_before(epoch)
            self.furthest_tokens = tokens
            if tokens - self.advanced_from >= ENOUGH_TOKENS:
                self.losses = 0

    def reached_before(self, epoch: int) -> int:
        """How far it had got, in tokens, when this epoch, the newest one, began."""
        return self.advanced_from if self.advanced_in == epoch else self.furthest_tokens

    def hold(self, tokens: int) -> None:
        """A client brought output of it up to so many tokens: that it got so far is no progress of an epoch."""
        more = max(0, tokens - self.furthest_tokens)
        self.furthest_tokens += more
        self.advanced_from += more
