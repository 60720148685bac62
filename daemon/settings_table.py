"""The settings table: every flag, environment variable and configuration key of every process, declared once.

Owns names, types, defaults, ranges, units and help texts. Must never read an environment, a file or an argument:
`daemon.config` does. Invariant: a numeric setting has a range; the attribute name ends in its unit where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

Kind = Literal["text", "host", "path", "secret", "choice", "int", "fraction", "bytes", "seconds", "switch", "pairs"]

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
ALL = ("serve", "daemon", "frontend")
SERVER = ("serve", "daemon")
HTTP = ("serve", "frontend")


@dataclass(frozen=True)
class Setting:
    """One row of the table. `low` and `high` bound numbers; `zero` says what 0 means where 0 lies below `low`."""

    attribute: str
    flag: str
    kind: Kind
    default: Any
    help: str
    commands: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    zero: str = ""
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    positional: bool = False

    @property
    def key(self) -> str:
        """The name in a configuration file and in messages: the flag without its dashes."""
        return self.flag.removeprefix("--")

    @property
    def negation(self) -> str:
        """The flag that switches off a switch which is on by default; empty for every other row."""
        return f"--no-{self.key}" if self.kind == "switch" and self.default else ""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "BANDMASTER_" + self.key.upper().replace("-", "_")


UNITS = ("_bytes", "_s")


def _row(kind: Kind, default: Any, text: str, commands: tuple[str, ...], **rest: Any) -> Any:
    """A dataclass field that carries its row of the table."""
    made = {"kind": kind, "help": text, "commands": commands, **rest}
    if kind == "pairs":
        return field(default_factory=dict, metadata=made)
    return field(default=default, metadata=made)


@dataclass(frozen=True)
class Settings:
    """The settings of one process, validated; attributes are the rows of the table."""

    # --- the model
    model: str = _row(
        "path",
        "",
        "a Hugging Face directory (safetensors) or a GGUF file; empty: the embedded model",
        ALL,
        positional=True,
    )
    served_model_name: str = _row("text", "", "the model's name in the API; empty: taken from the model", ALL)
    dtype: str = _row(
        "choice",
        "auto",
        "arithmetic and storage type; auto: on a CPU bfloat16 where it has instructions for it, whatever the "
        "checkpoint's, else float32; on a GPU the checkpoint's half precision, else bfloat16",
        SERVER,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int = _row(
        "int",
        0,
        "most tokens of one request, prompt and output together",
        SERVER,
        low=2,
        high=1 << 24,
        zero="the model's own",
    )
    rank_runner: str = _row(
        "choice",
        "torch",
        "what computes in a rank: the real model, or `modeled`, which needs no weights and makes tokens from a hash",
        SERVER,
        choices=("torch", "modeled"),
    )
    rank_option: Mapping[str, str] = _row(
        "pairs",
        {},
        "an option of the rank's runner; may be repeated. torch: model_impl (auto, native, generic); device (auto, "
        "cpu, cuda); host_kernels (auto, torch, compiled). modeled, in whole numbers: vocab_size; max_model_len; "
        "first_token (sampled ids run from it to vocab_size - 1); eos_id and eos_ppm (the id that ends a row, how "
        "often in a million tokens); delay_us and token_delay_us (what a forward takes, and on top for each token); "
        "full and state (1 or 0: full attention and recurrent state have a band); windows (bands of windows, in "
        "tokens from 2 up, as 64+128); depth (blocks of one layer per band; 0: as few as do); deadly_id (a forward "
        "of that token kills its rank; 0: none); blind (1: tokens come from positions alone and nothing is stored)",
        SERVER,
    )
    threads: int = _row("int", 0, "compute threads of a rank", SERVER, low=1, high=1024, zero="measured at boot")

    # --- ranks
    tensor_parallel_size: int = _row(
        "int", 1, "tensor ranks of each stage: each holds a shard of every layer", SERVER, low=1, high=64,
        aliases=("--tp",),
    )  # fmt: skip
    pipeline_parallel_size: int = _row(
        "int", 1, "pipeline stages: each holds some of the layers", SERVER, low=1, high=64, aliases=("--pp",)
    )
    pp_layers: str = _row(
        "text", "", "layers of each stage, like `10,22`; empty: as even as can be (vLLM's VLLM_PP_LAYER_PARTITION)",
        SERVER,
    )  # fmt: skip
    rank_launch: str = _row(
        "choice",
        "spawn",
        "`spawn`: the daemon starts its ranks here; `wait`: they are started elsewhere (torchrun, Slurm, Ray) as "
        "`bandmaster rank` and join over `--ranks-endpoint`",
        SERVER,
        choices=("spawn", "wait"),
    )
    ranks_endpoint: str = _row(
        "text", "", "where ranks reach the daemon, `ipc://` or `tcp://`; empty: a socket in the run directory", SERVER
    )
    rendezvous: str = _row(
        "text", "", "HOST:PORT on the host of rank 0.0 where ranks find each other; empty: a file in the run directory",
        SERVER,
    )  # fmt: skip
    collective_timeout_s: float = _row(
        "seconds", 60.0, "time after which a collective or a transfer between stages is a fault", SERVER,
        low=1, high=3600,
    )  # fmt: skip
    epoch_restarts_max: int = _row(
        "int", 5, "restarts of all ranks after one was lost, within `--epoch-restart-window`; one more ends the daemon",
        SERVER, low=0, high=1_000_000,
    )  # fmt: skip
    epoch_restart_window_s: float = _row(
        "seconds", 600.0, "restarts of ranks longer ago do not count", SERVER, low=1, high=86_400
    )
    epoch_losses_max: int = _row(
        "int", 3, "a request ends with reason fault when all ranks were lost so often in a row while it ran, each time "
        "before it got 8 tokens further than ever, the last time while it ran alone", SERVER, low=1, high=1000,
        zero="never",
    )  # fmt: skip

    # --- memory
    arena_bytes: int = _row(
        "bytes", 0, "bytes of the arena of each rank", SERVER, low=MIB, high=256 * TIB, zero="by `--mem-fraction`"
    )
    mem_fraction: float = _row(
        "fraction", 0.5, "share of the memory that is free after the model was loaded that the arena takes", SERVER,
        low=0.01, high=0.98,
    )  # fmt: skip
    page_size: int = _row("int", 16, "tokens of one page", SERVER, low=1, high=4096)

    # --- the prefix cache
    enable_prefix_caching: bool = _row(
        "switch",
        True,
        "keep what requests computed of their tokens, for later requests that begin with the same ones",
        SERVER,
    )
    checkpoint_interval: int = _row(
        "int",
        256,
        "tokens between two kept states of a model with recurrent layers, a multiple of the page size; only there a "
        "later request can go on (SGLang's --mamba-track-interval)",
        SERVER,
        low=1,
        high=1 << 20,
    )
    state_cache: str = _row(
        "choice",
        "extra_buffer",
        "how recurrent state is cached: `extra_buffer` keeps it every checkpoint interval in a second slot of each "
        "request; `no_buffer` only at a request's end, without a second slot, and needs `--page-size 1`, the default "
        "then (SGLang's --mamba-radix-cache-strategy)",
        SERVER,
        choices=("extra_buffer", "no_buffer"),
    )
    eviction_policy: str = _row(
        "choice",
        "value",
        "what of the prefix cache goes first: what saves least computation per byte, was used longest ago, was used "
        "least often, is oldest, or has the lowest priority",
        SERVER,
        choices=("value", "lru", "lfu", "fifo", "priority"),
    )
    checkpoint_policy: str = _row(
        "choice",
        "likely",
        "which states of a model with recurrent layers are kept: where a later request is likely to go on, or at every "
        "checkpoint interval",
        SERVER,
        choices=("likely", "grid"),
    )
    checkpoint_mark_tokens: int = _row(
        "int",
        4096,
        "with `likely`, about how far apart the states of a prompt seen first are kept beside its end",
        SERVER,
        low=1,
        high=1 << 24,
        zero="none",
    )
    cache_quota: float = _row(
        "fraction",
        1.0,
        "most of the arena that what the prefix cache keeps of one namespace (`cache_salt`) may take",
        SERVER,
        low=0.0,
        high=1.0,
    )
    cache_quotas: Mapping[str, str] = _row(
        "pairs",
        {},
        "the same for one namespace by name, like `salt:VALUE=0.2`; may be repeated",
        SERVER,
    )
    pinned_max: float = _row(
        "fraction", 0.25, "most of the arena that pinned prefixes may take together", SERVER, low=0.0, high=1.0
    )

    # --- the scheduler
    max_running_requests: int = _row(
        "int", 64, "most requests that run at once", SERVER, low=1, high=65_536, aliases=("--max-num-seqs",)
    )
    max_queued_requests: int = _row(
        "int",
        1024,
        "most requests that wait; further ones are refused with a hint when to retry",
        SERVER,
        low=1,
        high=1_000_000,
    )
    max_num_batched_tokens: int = _row(
        "int", 2048, "token budget of one step, decode and prefill together", SERVER, low=1, high=1 << 20
    )
    chunked_prefill_size: int = _row(
        "int", 512, "most prompt tokens of one request in one step", SERVER, low=1, high=1 << 20
    )
    schedule_policy: str = _row(
        "choice",
        "priority",
        "order of the queue: as they came (a priority is refused then), longest cached prefix first, by priority, "
        "earliest deadline first, or fair shares of tokens between namespaces (`cache_salt`); equal ones by priority, "
        "then as they came",
        SERVER,
        choices=("fcfs", "lpm", "priority", "deadline", "fair"),
    )
    overtaken_max: int = _row(
        "int",
        4096,
        "a waiting request is overtaken by at most so many later ones, whatever the order",
        SERVER,
        low=0,
        high=1_000_000_000,
    )
    fair_quantum_tokens: int = _row(
        "int",
        4096,
        "with `--schedule-policy fair`, tokens that a namespace may take in its turn",
        SERVER,
        low=1,
        high=1 << 24,
    )
    enable_priority_preemption: bool = _row(
        "switch",
        False,
        "retract running requests of lower priority for a waiting one, where that lets it start",
        SERVER,
    )
    deadline_check: bool = _row(
        "switch",
        True,
        "refuse a request at once, and end a waiting one, whose deadline cannot be met by the fastest of recent steps",
        SERVER,
    )
    reserve: str = _row(
        "choice",
        "estimate",
        "admit by expected output, or only what fits at full length",
        SERVER,
        choices=("estimate", "full"),
    )
    disable_overlap: bool = _row("switch", False, "process each step before the next one is launched", SERVER)
    invariants: int = _row(
        "int",
        1,
        "broken invariants that are not fatal: 0 silent, 1 logged, 2 end the epoch, with a recount after every step",
        SERVER,
        low=0,
        high=2,
    )

    # --- the HTTP front end
    host: str = _row("host", "127.0.0.1", "address to listen on", HTTP)
    port: int = _row("int", 8000, "port to listen on", HTTP, low=1, high=65_535, zero="a free one")
    api_key: str = _row("secret", "", "key that clients must send as bearer token; empty: none asked", HTTP)
    chat_template: str = _row("path", "", "file with a Jinja chat template; empty: the model's own", HTTP)
    request_size_limit_bytes: int = _row(
        "bytes", 8 * MIB, "largest request body, and largest message of a front end", ALL, low=KIB, high=GIB
    )

    sse_keepalive_s: float = _row(
        "seconds",
        15.0,
        "silence after which a stream gets a comment, so that no proxy closes it while a daemon or rank comes back",
        HTTP,
        low=0.1,
        high=3600,
        zero="never",
    )

    # --- processes
    run_dir: str = _row(
        "path", "", "directory of journal, logs and sockets; empty: a private one under the user's state directory", ALL
    )
    endpoint: str = _row(
        "text", "", "where front ends reach the daemon, `ipc://` or `tcp://`; empty: a socket in the run directory", ALL
    )
    keys: str = _row("path", "", "directory of CURVE keys (`bandmaster keys`), needed for `tcp://`", ALL)
    client: str = _row("text", "frontend", "whose key in that directory a front end uses", HTTP)
    insecure: bool = _row("switch", False, "allow `tcp://` without keys: anyone who connects reads along", ALL)
    restarts_max: int = _row(
        "int", 20, "restarts of a dead or frozen daemon or front end within ten minutes; one more ends the server",
        ("serve",), low=0, high=1_000_000,
    )  # fmt: skip
    frontends: int = _row("int", 1, "front-end processes that share the port", ("serve",), low=1, high=64)
    drain_timeout_s: float = _row(
        "seconds",
        30.0,
        "how long SIGTERM lets running requests go on",
        ALL,
        low=0.1,
        high=86_400,
        zero="end them at once",
    )
    frontend_timeout_s: float = _row(
        "seconds",
        10.0,
        "silence after which a front end, or the daemon seen from one, counts as lost",
        ALL,
        low=2,
        high=3600,
    )
    daemon_return_s: float = _row(
        "seconds",
        60.0,
        "how long open requests wait for a daemon that gives no sign of life; one that boots is waited for",
        HTTP,
        low=1,
        high=3600,
        zero="they end at once",
    )
    rank_timeout_s: float = _row(
        "seconds", 10.0, "silence after which a rank counts as frozen", SERVER, low=2, high=3600
    )
    step_timeout_s: float = _row(
        "seconds", 300.0, "time after which a step without a report is a fault", SERVER, low=2, high=86_400
    )
    boot_timeout_s: float = _row("seconds", 600.0, "time for the ranks to load the model", SERVER, low=1, high=86_400)
    stall_timeout_s: float = _row(
        "seconds",
        15.0,
        "time without a scheduled token, with work waiting, after which health turns red",
        SERVER,
        low=1,
        high=3600,
    )

    # --- journal and logs
    journal_sync: Literal["always", "group", "os"] = _row(
        "choice",
        "group",
        "fsync before every send, before acceptances are acknowledged, or left to the operating system",
        SERVER,
        choices=("always", "group", "os"),
    )
    journal_segment_bytes: int = _row(
        "bytes", 64 * MIB, "size at which a journal segment ends", SERVER, low=MIB, high=4 * GIB
    )
    snapshot_bytes: int = _row(
        "bytes", 64 * MIB, "journal bytes after which a snapshot is written: a restart reads no more",
        SERVER, low=64 * KIB, high=256 * GIB, zero="none is written",
    )  # fmt: skip
    log_format: str = _row(
        "choice",
        "auto",
        "JSON lines, readable lines, or readable on a terminal only",
        ALL,
        choices=("json", "pretty", "auto"),
    )
    log_level: str = _row(
        "choice", "info", "least level that is logged", ALL, choices=("debug", "info", "warning", "error")
    )


def _setting(entry: Field[Any]) -> Setting:
    name = entry.name
    for unit in UNITS:
        if entry.metadata["kind"] in ("bytes", "seconds") and name != "arena_bytes" and name != "journal_segment_bytes":
            name = name.removesuffix(unit)
    default = {} if entry.metadata["kind"] == "pairs" else entry.default
    return Setting(attribute=entry.name, flag="--" + name.replace("_", "-"), default=default, **entry.metadata)


TABLE: tuple[Setting, ...] = tuple(_setting(entry) for entry in fields(Settings))
BY_KEY: dict[str, Setting] = {row.key: row for row in TABLE}


def rows_for(command: str) -> list[Setting]:
    """The rows that a command takes, in table order."""
    return [row for row in TABLE if command in row.commands]
