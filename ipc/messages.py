"""Messages: everything that crosses a process boundary, defined once.

Owns the closed sets of messages between front ends, daemon and ranks. Must never hold behaviour beyond construction.
Hot-path messages carry columns (`allocator.columns`): little-endian bytes, one entry per row, never a list of objects.
Evolution: new fields go at the end with a default; fields are never reordered or retyped; a change that an old peer
cannot read, or does not answer as is waited for, raises `PROTOCOL_VERSION`. Token ids are int64, row numbers,
generations, positions and counts int32.

    front end -> daemon   Connect Generate Abort FinishAt Resume Acknowledge Ask
    daemon -> front end   Welcome Rejected Accepted Refused TokenBatch Finished Continued Answer
    daemon -> rank        Hello Begin Step Explain Stop
    rank -> daemon        Join Ready Report Explained Fault Heartbeat Left StandsBy
"""

from __future__ import annotations

import msgspec

from allocator.geometry import Geometry, StageGeometry
from allocator.ops import Op

PROTOCOL_VERSION = 2  # 2: Left, StandsBy


# --- shared values -------------------------------------------------------------------------------------------------


class ModelFacts(msgspec.Struct, frozen=True):
    """What the daemon and front ends must know of the model; read by the rank that loaded it."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    dtype: str
    eos_ids: list[int] = []


class Sampling(msgspec.Struct, frozen=True):
    """How output tokens are chosen. Neutral values switch a rule off; `seed` is None until the daemon draws one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int = -1  # -1: none; k: the chosen token's and the k best
    prompt_logprobs: int = -1


# --- front end -> daemon -------------------------------------------------------------------------------------------


class Connect(msgspec.Struct, tag=True, array_like=True):
    """First message on each connection of a front end; `frontend` is its own name, kept over reconnects.

    `process` names the one that speaks ("": it does not say) and `attempt` numbers its connections: an earlier one that
    arrives late does not take the name from a later one. `watches`: it only asks questions, and whoever counts on it is
    nobody. Orders are answered with not ok, whatever else it sends is rejected, the core never hears its name, and
    neither its name nor its place are a front end's.
    """

    frontend: str
    version: int = PROTOCOL_VERSION
    process: str = ""
    attempt: int = 0
    watches: bool = False


class Generate(msgspec.Struct, tag=True, array_like=True):
    """One request: `id` is the front end's own; `prompt` an int64 column; `n` choices share the prompt.

    `stop_ids` (int64 column) end a choice once it has `min_tokens` output tokens; `max_tokens` None means as many as
    fit. `clip` allows the output to be cut to what memory and the model's length can hold. `deadline_ms` counts from
    arrival, 0 is none. A higher `priority` is served earlier. `namespace` says who may share cached prefixes with whom:
    empty, or a kind and a value, like `salt:VALUE`: keys of different kinds are never equal. `store` False: what
    it computes is not kept for later requests. `pin_ms`: what it leaves in the cache goes last for so long; 0 is none.
    """

    id: str
    prompt: bytes
    sampling: Sampling
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_ids: bytes = b""
    n: int = 1
    priority: int = 0
    deadline_ms: int = 0
    clip: bool = False
    namespace: str = ""
    store: bool = True
    pin_ms: int = 0


class Abort(msgspec.Struct, tag=True, array_like=True):
    """End the request `id` (all its choices); harmless when it has ended."""

    id: str


class FinishAt(msgspec.Struct, tag=True, array_like=True):
    """The front end found a stop string: choice `choice` ends with reason stop after `output_tokens` output tokens."""

    id: str
    choice: int
    output_tokens: int


class Resume(msgspec.Struct, tag=True, array_like=True):
    """After a reconnect: the front end holds `tokens` (int64 column), all output of this choice that reached it."""

    id: str
    choice: int
    tokens: bytes


class Acknowledge(msgspec.Struct, tag=True, array_like=True):
    """These ids have ended and the front end will not ask for them again."""

    ids: list[str]


class Ask(msgspec.Struct, tag=True, array_like=True):
    """A question to the daemon (health, status, watch, life, metrics, ping) or an order (drain, flush, flush_cache).

    `ticket` returns in `Answer`.
    """

    what: str
    ticket: int = 0
    options: dict[str, int] = {}


FromFrontEnd = Connect | Generate | Abort | FinishAt | Resume | Acknowledge | Ask


# --- daemon -> front end -------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """The handshake's answer: the daemon's version, limits by name, and the model."""

    version: int
    facts: ModelFacts
    limits: dict[str, int]
    life: str  # names this life of the daemon


class Rejected(msgspec.Struct, tag=True, array_like=True):
    """A message that was not taken: malformed, oversized, unknown, or a version that does not match."""

    code: str
    message: str


class Accepted(msgspec.Struct, tag=True, array_like=True):
    """The request is in the journal, on disk. `first_request` numbers choice 0; choice k is `first_request + k`."""

    id: str
    first_request: int
    n: int
    max_tokens: int  # after clipping
    seed: int


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The request was not taken; nothing is held for it. `code` is a `RefusalCode`, `field` the field at fault."""

    id: str
    code: str
    message: str
    field: str = ""
    limit: int = 0
    value: int = 0
    retry_after_ms: int = 0


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of consecutive positions of one row, as columns; `k` alternatives each.

    `chosen` float32[p], `ranks` int32[p] (1 is the most likely), `top_ids` int64[p*k], `top_values` float32[p*k].
    """

    k: int
    chosen: bytes
    ranks: bytes
    top_ids: bytes
    top_values: bytes


class RequestLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of one choice; `prompt_position` is -1 for an output token, else the first position."""

    request: int
    prompt_position: int
    values: Logprobs


class TokenBatch(msgspec.Struct, tag=True, array_like=True):
    """New output tokens of one step for one front end: `requests` and `tokens` int64 columns, one entry each."""

    step: int
    requests: bytes
    tokens: bytes
    logprobs: list[RequestLogprobs] = []


class Finished(msgspec.Struct, tag=True, array_like=True):
    """The one terminal message of a choice. `reason` is an `EndReason`; `detail` says by whom or why, with numbers.

    `cached_tokens` of the prompt were not computed, because the prefix cache had them when the request first started.
    `matched_tokens` is how far full-attention pages alone matched, and `hit_cut` the band that ended the usable hit
    (`full`: the cache knows no more of this prompt, `window:TOKENS` or `state`: it knew more tokens, but not that part
    of them; empty: the whole prompt but its last token, or no cache was asked).
    """

    id: str
    choice: int
    request: int
    reason: str
    detail: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    matched_tokens: int = 0
    hit_cut: str = ""


class Continued(msgspec.Struct, tag=True, array_like=True):
    """The reply to a `Resume`: the choice goes on behind `output_tokens` tokens; `tokens` (int64) are all from there on
    that the daemon has, `logprobs` those of them. A choice that has ended is told its `Finished` next.
    """

    id: str
    choice: int
    request: int
    output_tokens: int
    tokens: bytes
    logprobs: list[RequestLogprobs] = []


class Answer(msgspec.Struct, tag=True, array_like=True):
    """The reply to an `Ask`: `ok`, and a JSON document or text in `body`."""

    ticket: int
    ok: bool
    body: str


ToFrontEnd = Welcome | Rejected | Accepted | Refused | TokenBatch | Finished | Continued | Answer


# --- daemon -> rank ------------------------------------------------------------------------------------------------


class RankSettings(msgspec.Struct):
    """What a rank needs to load its shard and size its arena. `arena_bytes` 0: by `mem_fraction_ppm` of free memory."""

    model_path: str
    model_name: str
    dtype: str
    page_size: int
    max_running_requests: int
    max_batched_tokens: int
    max_model_len: int  # 0: the model's own
    arena_bytes: int
    mem_fraction_ppm: int
    runner: str = "torch"  # or "modeled": no weights, tokens from a hash
    threads: int = 0  # 0: measured at boot
    invariants: int = 1
    options: dict[str, str] = {}
    checkpoint_interval: int = 0  # tokens between checkpoints of recurrent state; 0: requests own no checkpoint slot
    tensor_ranks: int = 1  # ranks of each stage, which hold shards of the same layers
    stage_layers: list[int] = []  # layers of each pipeline stage; empty: one stage that has them all
    rendezvous: str = ""  # where the ranks find each other, as `torch.distributed` spells it; empty: there is one rank
    collective_timeout_ms: int = 60_000  # a collective or a transfer between stages that takes longer is a fault


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The daemon takes the rank in for one epoch and tells it what to load."""

    epoch: int
    settings: RankSettings
    version: int = PROTOCOL_VERSION


class Begin(msgspec.Struct, tag=True, array_like=True):
    """All ranks are ready: the agreed geometry. The rank builds its physical chain and awaits steps from seq 1."""

    epoch: int
    geometry: Geometry


class RowSampling(msgspec.Struct, array_like=True, frozen=True):
    """Sampling of one row, sent with the first forward of each generation that samples or returns log probabilities.

    Noise is keyed by (`seed`, `choice`, absolute position of the sampled token). Until that position reaches
    `ban_before`, the ids of `banned` (int64 column) are not sampled. `prompt_ids` and `output_ids` (int64 columns) are
    the history that penalties read, empty when penalties are neutral.
    """

    row: int
    generation: int
    sampling: Sampling  # with its seed
    choice: int
    ban_before: int = 0
    banned: bytes = b""
    prompt_ids: bytes = b""
    output_ids: bytes = b""


SAMPLE = 1  # flag: sample a token after this row's last position
EXPLICIT = 2  # flag: the row's input tokens are in `tokens`; otherwise its input is its last sampled token


class Forward(msgspec.Struct, array_like=True, frozen=True):
    """One ragged batch as columns, decode rows first.

    `rows`, `generations`, `starts`, `counts` int32[n]; `flags` uint8[n]; `tokens` int64, the explicit tokens of all
    EXPLICIT rows in order. `table_rows`, `table_indexes`, `table_pages` int32[m]: virtual page-table entries that are
    new to the ranks (a row's whole table at admission, then only what changed). A row whose generation rose starts
    afresh: its old table, history and state are void. `slots` int32[n]: the virtual id of each row's working state slot
    (empty for a model without recurrent state). A row that starts at position 0 has no state yet, whatever its slot
    holds; any other continues from the state in its slot.
    """

    rows: bytes
    generations: bytes
    starts: bytes
    counts: bytes
    flags: bytes
    tokens: bytes
    table_rows: bytes
    table_indexes: bytes
    table_pages: bytes
    sampling: list[RowSampling]
    slots: bytes = b""


class Step(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One scheduler iteration as sent to every rank (`semantics`: one step). `seq` is dense within an epoch, from 1.

    `processed_through` is the seq of the newest forward whose result the core consumed (0: none). `logical` is the
    chained logical digest after this step's ops, as the daemon computed it.
    """

    epoch: int
    seq: int
    microbatch: int
    processed_through: int
    released: list[int]
    ops: list[Op]
    forward: Forward | None
    logical: bytes
    snapshot: bool = False  # the report brings the state of this rank's physical chain after this step


class Explain(msgspec.Struct, tag=True, array_like=True):
    """Digests differ at step `seq`: say what this rank did in the steps that it still knows."""

    seq: int


class Stop(msgspec.Struct, tag=True, array_like=True):
    """The epoch is over: finish nothing, report nothing more, say `Left`, exit 0.

    `again`: another epoch follows, and a rank that was started elsewhere joins once more.
    """

    why: str
    again: bool = False


ToRank = Hello | Begin | Step | Explain | Stop


# --- rank -> daemon ------------------------------------------------------------------------------------------------


class Join(msgspec.Struct, tag=True, array_like=True):
    """First message of a rank. `token` proves that this daemon started it."""

    stage: int
    rank: int
    pid: int
    token: str
    version: int = PROTOCOL_VERSION


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded and memory measured: this rank's own geometry, what it can hold, and the model's facts.

    `table` is the sizing table as text lines, for the log.
    """

    stage: int
    rank: int
    geometry: StageGeometry
    virtual_pages: int
    virtual_slots: int
    facts: ModelFacts
    versions: dict[str, str] = {}
    table: list[str] = []


class RowLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of one row of a step; `prompt_position` is -1 for its sampled token, else the first one."""

    row: int
    generation: int
    prompt_position: int
    values: Logprobs


class Report(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The result of one step on one rank. Columns list sampled rows only: `rows`, `generations` int32, `tokens` int64.

    The three digests are chained, 16 bytes. `forward_us` is the time from launch to the tokens being on the host;
    `bands` gives, per band, live, hole, pending and beyond units (int32[bands*4]).
    """

    epoch: int
    seq: int
    stage: int
    rank: int
    rows: bytes
    generations: bytes
    tokens: bytes
    logical: bytes
    layout: bytes
    sampled: bytes
    logprobs: list[RowLogprobs] = []
    forward_us: int = 0
    bands: bytes = b""
    snapshot: bytes = b""  # packed state of the stage, where the step asked for it; none over PACKED_BYTES_MAX
    effects: bytes = b""  # what was performed for each op (`ipc.digests.effects_column`)


class OpTrace(msgspec.Struct, array_like=True, frozen=True):
    """One op of a step as a rank realized it: its place and kind, and the effects in words, band by band."""

    index: int
    kind: str
    band: str
    effects: str


class StepTrace(msgspec.Struct, array_like=True, frozen=True):
    """One step as a rank applied it: both chained digests behind it, and what each op led to."""

    seq: int
    logical: bytes
    layout: bytes
    ops: list[OpTrace]


class Explained(msgspec.Struct, tag=True, array_like=True):
    """The reply to `Explain`: the newest steps that this rank applied, oldest first."""

    stage: int
    rank: int
    steps: list[StepTrace]


class Fault(msgspec.Struct, tag=True, array_like=True):
    """The rank cannot go on; it exits after sending this."""

    stage: int
    rank: int
    seq: int
    what: str
    trace: str


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """The rank's loop is alive: newest seq received, and newest seq reported."""

    stage: int
    rank: int
    received: int
    reported: int


class Left(msgspec.Struct, tag=True, array_like=True):
    """The last message of a rank: it read a Stop, `again` as that says, and ends.

    A Stop counts as heard when this comes, not when it was sent.
    """

    stage: int
    rank: int
    again: bool


class StandsBy(msgspec.Struct, tag=True, array_like=True):
    """Of whoever starts this rank's processes, on a connection of its own, again and again: it waits for the last word.

    It answers a Stop after which nothing comes with `Left`, also while there is no process of the rank.
    """

    stage: int
    rank: int
    token: str
    version: int = PROTOCOL_VERSION


FromRank = Join | Ready | Report | Explained | Fault | Heartbeat | Left | StandsBy
