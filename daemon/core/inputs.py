"""Inputs: everything the core reads, in past tense. The closed set: what is not here cannot influence a decision.

Owns the input records. Must never hold anything the journal cannot record. Time is an int64 of nanoseconds inside the
input (`now_ns`); only `Ticked` makes the core schedule.
"""

from __future__ import annotations

import msgspec

from allocator.geometry import Geometry
from ipc.messages import Accepted, Finished, Generate, ModelFacts, RequestLogprobs, RowLogprobs


class Arrived(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A front end sent a request; `seed` was drawn by the daemon and is used when the client gave none."""

    now_ns: int
    frontend: str
    generate: Generate
    seed: int


class Aborted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Someone ended a request, all its choices; `by` is client, frontend or operator."""

    now_ns: int
    frontend: str
    id: str
    by: str


class FinishAsked(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A front end found a stop string: the choice ends with reason stop after `output_tokens` output tokens."""

    now_ns: int
    frontend: str
    id: str
    choice: int
    output_tokens: int


class Acknowledged(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A front end has seen these ids end; their outcome need not be kept any longer."""

    now_ns: int
    frontend: str
    ids: list[str]


class FrontEndLost(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A front end was silent for its grace period: its requests are aborted."""

    now_ns: int
    frontend: str


class Resumed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A front end came back holding `tokens` (int64 column), all output of a choice that had reached it."""

    now_ns: int
    frontend: str
    id: str
    choice: int
    tokens: bytes


class Reported(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Step `seq` is complete on all ranks and their digests agree; columns list the sampled rows (see `Report`)."""

    now_ns: int
    epoch: int
    seq: int
    rows: bytes
    generations: bytes
    tokens: bytes
    logprobs: list[RowLogprobs] = []


class TransferEnded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A host or network transfer is over, by proof."""

    now_ns: int
    transfer: int
    outcome: str


class ExtentsFixed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A stage's ranks agree on the lowest and highest fixed byte of a band (-1, -1: none)."""

    now_ns: int
    stage: int
    band: int
    lowest_byte: int
    highest_byte: int


class FlushAsked(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The compaction worker asks for an opportunistic flush of at most `moves_max` moves per band."""

    now_ns: int
    moves_max: int


class EpochBegan(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """All ranks hold an empty arena of this geometry; steps start again from seq 1."""

    now_ns: int
    epoch: int
    geometry: Geometry
    facts: ModelFacts


class EpochEnded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Device memory is gone: a rank died, a digest differed or an invariant broke.

    With `recovers` another epoch will follow: what holds something waits again, its output kept. Without, every live
    request ends with reason fault.
    """

    now_ns: int
    epoch: int
    why: str
    recovers: bool = False


class Controlled(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An operator's order: `drain` (admit nothing new), `stop` (end everything now), `drain_expired`, `flush_cache`,
    `snapshot` (the next step asks the ranks for their part of one).
    """

    now_ns: int
    order: str


class JournalDegraded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The journal can no longer promise durability: nothing new is accepted until it can (`durable` true)."""

    now_ns: int
    durable: bool
    what: str


class RecoveredChoice(msgspec.Struct, array_like=True, frozen=True):
    """One choice of a recovered group: its output so far (int64 column), and its end if it has one.

    `logprobs` are those of the prompt that were delivered, then one entry per output token;
    `prompt_logprobs_next` is the first prompt position whose were not. `started`: it had a row once, and found
    `cached_tokens` in the cache then (the rest as in `Finished`). `losses` epochs in a row died while it had a row and
    got hardly further; `furthest_tokens` of prompt and output are the most that it ever got to. `confirmed` of its
    output tokens no client can hold otherwise (-1: all of them): those behind were computed by a life to which the
    client never came back, in place of others that the machine had lost.
    """

    tokens: bytes
    ended: Finished | None = None
    logprobs: list[RequestLogprobs] = []
    prompt_logprobs_next: int = 1
    retractions: int = 0
    started: bool = False
    cached_tokens: int = 0
    matched_tokens: int = 0
    hit_cut: str = ""
    losses: int = 0
    furthest_tokens: int = 0
    confirmed: int = -1


class RecoveredGroup(msgspec.Struct, array_like=True, frozen=True):
    """One accepted request of an earlier life that has not ended, or whose end was not acknowledged.

    Where all choices have ended, `generate` is without its prompt and stop ids, and `digest` stands for its content.
    """

    frontend: str
    generate: Generate
    seed: int
    accepted: Accepted
    arrived_ns: int
    choices: list[RecoveredChoice]
    digest: bytes = b""


class Recovered(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What an earlier life of the daemon left: the groups that go on, and the next free number of a request.

    It may come in parts, in the order of numbers, so that none is too large for a record: `left` parts follow.
    """

    now_ns: int
    groups: list[RecoveredGroup]
    next_request: int
    left: int = 0


class Ticked(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One scheduler iteration may run now."""

    now_ns: int


Input = (
    Arrived
    | Aborted
    | FinishAsked
    | Acknowledged
    | FrontEndLost
    | Resumed
    | Reported
    | TransferEnded
    | ExtentsFixed
    | FlushAsked
    | EpochBegan
    | EpochEnded
    | Controlled
    | JournalDegraded
    | Recovered
    | Ticked
)
