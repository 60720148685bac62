"""Scene: what a command line asks to simulate, checked: trace, bands, arenas, policies, clock and settings.

Owns the meaning of the flags and their errors. Must never run anything. Settings have the names, ranges and meanings of
`bandmaster serve`; where another default makes a simulation of much traffic useful, `OWN_DEFAULTS` says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from daemon.config import ConfigError, parse_value, resolve
from daemon.core.limits import CoreConfig
from daemon.core_settings import core_config
from daemon.settings_table import BY_KEY, Settings
from ipc.messages import ModelFacts
from tools.simulate.engine import Times, chain_start_bytes, one_stage
from tools.simulate.errors import SimulateError
from tools.simulate.results import Results, claim
from tools.simulate.run import Job, with_policy
from tools.simulate.shape import Shape, shape_of_bands, shape_of_model
from tools.simulate.traffic import LENGTH_MAX, SPAN_MS_MAX, Trace, read_trace

SETTINGS = (
    "page-size",
    "checkpoint-interval",
    "state-cache",
    "enable-prefix-caching",
    "checkpoint-mark-tokens",
    "cache-quota",
    "cache-quotas",
    "pinned-max",
    "dtype",
    "max-model-len",
    "max-running-requests",
    "max-queued-requests",
    "max-num-batched-tokens",
    "chunked-prefill-size",
    "schedule-policy",
    "overtaken-max",
    "fair-quantum-tokens",
    "enable-priority-preemption",
    "deadline-check",
    "reserve",
    "disable-overlap",
    "invariants",
)
"""The settings of `bandmaster serve` that a simulation reads."""

OWN_DEFAULTS = {
    "page-size": "64",
    "max-num-batched-tokens": "8192",
    "chunked-prefill-size": "8192",
    "max-running-requests": "256",
    "max-queued-requests": "1000000",
}
EVICTIONS = BY_KEY["eviction-policy"].choices
CHECKPOINTS = BY_KEY["checkpoint-policy"].choices
FRACTION_MAX = 100.0
NS_PER_US_MAX = 10**9
SPEED_MIN, SPEED_MAX = 1e-6, 10**6
REQUESTS_MAX = 1 << 40
NAMED_MAX = 5  # namespaces in a note
DIGITS_MAX = 30  # of a whole number, far above every range here


class Arena(NamedTuple):
    """One size to simulate: its name, all its bytes, and those of its chain."""

    name: str
    arena_bytes: int
    chain_bytes: int


@dataclass(frozen=True)
class Scene:
    """A checked command line; `grid` is the checkpoint interval where states are kept on one, else 0."""

    trace: Trace
    shape: Shape
    config: CoreConfig
    settings: Settings
    times: Times
    speed: float
    policies: tuple[tuple[str, str], ...]
    sizes: tuple[int, ...]
    fractions: tuple[tuple[str, float], ...]
    at_a_time: int
    results: Results
    notes: list[str] = field(default_factory=list)
    arena_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.config.page_size

    @property
    def caching(self) -> bool:
        """Whether there is a prefix cache."""
        return self.config.enable_prefix_caching

    @property
    def grid(self) -> int:
        """Tokens between two places where a state may be kept; 0: anywhere, or there is none."""
        keeps = self.shape.interval and self.config.state_cache == "extra_buffer" and self.caching
        return self.shape.interval if keeps else 0

    def arenas(self, everything_bytes: int) -> list[Arena]:
        """All sizes, given what everything takes; raises SimulateError where one holds no unit of each band."""
        start = chain_start_bytes(self.shape.bands)
        wanted = [(_size_name(size), size) for size in self.sizes]
        wanted += [(name, start + math.ceil(part * everything_bytes)) for name, part in self.fractions]
        arenas = []
        for name, size in wanted:
            try:
                one_stage(self.shape.bands, self.page_size, size)
            except ValueError as error:
                raise SimulateError(f"arena {name}: {error}") from error
            self.arena_bytes[name] = size
            arenas.append(Arena(name, size, size - start))
        return arenas

    def jobs(self, everything_bytes: int) -> list[Job]:
        """Every arena under every policy."""
        longest = self.shape.max_model_len or self.trace.longest
        if self.config.max_model_len:
            longest = min(longest, self.config.max_model_len)
        facts = ModelFacts("simulated", self.shape.origin, self.trace.vocab_size, longest, "none")
        return [
            Job(
                arena=arena.name,
                policy=_policy_name(eviction, checkpoints),
                config=with_policy(self.config, eviction, checkpoints),
                geometry=one_stage(self.shape.bands, self.page_size, arena.arena_bytes),
                facts=facts,
                times=self.times,
                speed=self.speed,
                invariants=self.settings.invariants,
                journal=self.results.journal,
            )
            for arena in self.arenas(everything_bytes)
            for eviction, checkpoints in self.policies
        ]


def make_scene(values: Mapping[str, Any]) -> Scene:
    """From the parsed command line; raises SimulateError, and ConfigError for a setting of `bandmaster serve`."""
    flags = {
        BY_KEY[key].attribute: values[BY_KEY[key].attribute] for key in SETTINGS if BY_KEY[key].attribute in values
    }
    policies = tuple(_policy(text) for text in _several("--policy", values["policy"]))
    sizes, fractions = _arena_sizes(values)
    results = claim(values)
    if results.journal and len(policies) * (len(sizes) + len(fractions)) > 1:
        raise SimulateError("--journal takes one run; give one arena and one --policy")
    shape, settings = _shape_and_settings(values, flags)
    block = _whole("--block-tokens", values["block_tokens"], 1, LENGTH_MAX)
    trace = read_trace(values["trace"], block, _requests(values["requests"]))
    speed = _number("--speed", values["speed"], SPEED_MIN, SPEED_MAX)
    span_ms = trace.lines[-1].at_ns / 1e6
    if span_ms / speed > SPAN_MS_MAX:
        least = f"a trace of {span_ms:,.0f} ms needs at least {span_ms / SPAN_MS_MAX:.3g}"
        raise SimulateError(
            f"--speed {values['speed']}: the last request would come after more than ten years; {least}"
        )
    notes = list(shape.notes)
    if trace.unused:
        notes.append(f"these fields of the trace say nothing here: {', '.join(trace.unused)}")
    config = core_config(settings)
    notes += _idle_quotas(trace, config)
    if shape.max_model_len and trace.longest > shape.max_model_len:
        notes.append(f"requests of more than the model's {shape.max_model_len:,d} tokens are refused")
    return Scene(
        trace=trace,
        shape=shape,
        config=config,
        settings=settings,
        times=Times(*(_time_ns(f"--{name}-us", values[f"{name}_us"]) for name in ("step", "prefill", "decode"))),
        speed=speed,
        policies=policies,
        sizes=sizes,
        fractions=fractions,
        at_a_time=_whole("--jobs", values["jobs"], 1, 1024),
        results=results,
        notes=notes,
    )


def _idle_quotas(trace: Trace, config: CoreConfig) -> list[str]:
    """A note for every quota of a namespace in which no request is."""
    there = sorted({line.namespace for line in trace.lines})
    named = ", ".join(map(repr, there[:NAMED_MAX])) + (" and others" if len(there) > NAMED_MAX else "")
    return [
        f"--cache-quotas {name}: no request is in this namespace; the trace has {named}"
        for name in config.cache_quotas
        if name not in there
    ]


def _requests(text: str | None) -> int:
    """How many of the trace, 0: all."""
    return 0 if text is None else _whole("--requests", text, 1, REQUESTS_MAX)


def _shape_and_settings(values: Mapping[str, Any], flags: dict[str, Any]) -> tuple[Shape, Settings]:
    """The bands, and the settings with the checkpoint grid that a band named."""
    if bool(values["band"]) == bool(values["model"]):
        both = "--band and --model both" if values["model"] else "neither --band nor --model"
        raise SimulateError(f"{both} describe what is stored; give one of them")
    flags = {**_own_defaults(flags), **flags}
    if values["model"]:
        settings = resolve("daemon", flags, {})
        tp = _whole("--tp", values["tp"], 1, 1024)
        keeps = settings.enable_prefix_caching and settings.state_cache == "extra_buffer"
        arguments = (settings.dtype, settings.page_size, settings.checkpoint_interval, keeps, tp)
        return shape_of_model(values["model"], *arguments), settings
    if values["tp"] != "1":
        raise SimulateError(f"--tp {values['tp']} divides a model's layers; --band has the bytes of one rank already")
    page_size = int(parse_value(BY_KEY["page-size"], flags["page_size"], "flag"))
    shape = shape_of_bands(values["band"], page_size)
    if shape.interval:
        if "checkpoint_interval" in flags:
            raise SimulateError(
                f"--checkpoint-interval {flags['checkpoint_interval']}: --band state:{shape.interval} has it already"
            )
        flags["checkpoint_interval"] = str(shape.interval)
    return shape, resolve("daemon", flags, {})


def _own_defaults(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults for what is not given; those that a given one bounds follow it, as they do in `serve`."""
    own = {BY_KEY[key].attribute: value for key, value in OWN_DEFAULTS.items()}
    budget = str(flags.get("max_num_batched_tokens", "")).strip()
    if budget.isdecimal():
        for name in ("chunked_prefill_size", "max_running_requests"):
            own[name] = str(min(int(own[name]), int(budget)))
    if flags.get("state_cache") == "no_buffer":
        own["page_size"] = "1"
    return own


def _policy(text: str) -> tuple[str, str]:
    eviction, slash, checkpoints = text.partition("/")
    if eviction not in EVICTIONS or (slash and checkpoints not in CHECKPOINTS):
        raise SimulateError(
            f"--policy {text!r} is none of {', '.join(EVICTIONS)}, with /{' or /'.join(CHECKPOINTS)} behind it or not"
        )
    return eviction, checkpoints or CHECKPOINTS[0]


def _policy_name(eviction: str, checkpoints: str) -> str:
    return eviction if checkpoints == CHECKPOINTS[0] else f"{eviction}/{checkpoints}"


def _arena_sizes(values: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[tuple[str, float], ...]]:
    given, parts = values["arena_bytes"], values["arena_fraction"]
    if given is not None and parts is not None:
        raise SimulateError("--arena-bytes and --arena-fraction both say how large arenas are; give one of them")
    row = BY_KEY["arena-bytes"]
    sizes = []
    for text in _several("--arena-bytes", given) if given is not None else ():
        try:
            sizes.append(int(parse_value(row, text, "flag")))
        except ConfigError:
            sizes.append(0)
        if not sizes[-1]:
            raise SimulateError(
                f"--arena-bytes {text!r} is no size of at least {int(row.low or 0):,d} bytes; write 80GiB"
            )
    if sizes:
        return tuple(sizes), ()
    wanted = map(_fraction, _several("--arena-fraction", "20%" if parts is None else parts))
    return (), tuple((_fraction_name(part), part) for part in wanted)


def _fraction(text: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value <= FRACTION_MAX:
        raise SimulateError(
            f"--arena-fraction {text!r} is no part above 0, like 5% or 0.05, and at most {FRACTION_MAX:g}"
        )
    return value


def _fraction_name(part: float) -> str:
    return f"{part * 100:g}%"


def _size_name(size: int) -> str:
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size % factor == 0 and size >= factor:
            return f"{size // factor:,d} {unit}"
    return f"{size:,d} B"


def _several(flag: str, text: str) -> list[str]:
    """Comma-separated entries, at least one, none empty and none twice."""
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise SimulateError(f"{flag} {text!r}: {'an entry' if text.strip() else 'it'} is empty")
    doubled = [part for at, part in enumerate(parts) if part in parts[:at]]
    if doubled:
        raise SimulateError(f"{flag} {text!r}: {doubled[0]} is there twice")
    return parts


def _whole(flag: str, text: str, low: int, high: int) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > DIGITS_MAX or not low <= int(digits) <= high:
        raise SimulateError(f"{flag}: {text!r} is no whole number from {low} to {high}")
    return int(digits)


def _number(flag: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise SimulateError(f"{flag}: {text!r} is no number from {low:g} to {high:g}")
    return value


def _time_ns(flag: str, text: str) -> int:
    return round(_number(flag, text, 0, NS_PER_US_MAX) * 1000)
