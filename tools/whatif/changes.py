"""Changes: `key=value` of a what-if, and the settings, core configuration and arenas that they make.

Owns which keys can be asked and how a value is read: as the flag of that name reads it, or `+25%` and `-10%` of what is
recorded. Must never guess: an unknown key, a value out of range, and what the model of a run cannot answer are refused
by name. Invariant: without changes the configuration and the arenas are the recorded ones, byte for byte.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any, NamedTuple

import msgspec

from allocator.errors import BudgetTooSmall
from allocator.geometry import BandGeometry, Geometry
from allocator.plan import UNIT_ALIGN_BYTES, BandPlan, StoragePlan, align_up, plan_storage
from allocator.sizing import Sizing, size_arena
from daemon.config import ConfigError, check_together, parse_value, render_value, resolve
from daemon.core.limits import CoreConfig
from daemon.core_settings import core_config
from daemon.layers import split_layers
from daemon.rank.modeled import read_options, toy_layers
from daemon.rank_settings import keeps_checkpoints, rank_settings
from daemon.settings_table import BY_KEY, Setting, Settings, rows_for
from tools.serve_flags import OTHER_ALIASES
from tools.whatif.errors import WhatIfError

PPM = 1_000_000
ARENA, PAGE = "arena_bytes", "page_size"
RELATIVE = re.compile(r"([+-])\s*([0-9]+(?:\.[0-9]+)?)\s*%")
RANKS = frozenset({"tensor_parallel_size", "pipeline_parallel_size", "pp_layers"})
WHY_NOT = {
    "mem_fraction": "how much memory would be free is not recorded; ask for arena_bytes, a size or like +25%",
    **dict.fromkeys(RANKS, "other ranks compute at another pace, and no report of theirs is recorded"),
    **dict.fromkeys(
        ("model", "dtype", "rank_runner", "rank_option", "threads"),
        "another model or device computes at another pace, and no report of it is recorded",
    ),
}
FROM_CORE = {
    "max_num_batched_tokens": lambda c: c.max_batched_tokens,
    "disable_overlap": lambda c: not c.overlap,
    "cache_quota": lambda c: c.cache_quota_ppm / PPM,
    "cache_quotas": lambda c: {name: f"{ppm / PPM:g}" for name, ppm in c.cache_quotas.items()},
    "pinned_max": lambda c: c.pinned_max_ppm / PPM,
    "enable_priority_preemption": lambda c: c.priority_preemption,
}
"""Settings whose field of the core's configuration has another name or unit; all others are called the same."""


class Change(NamedTuple):
    """One `key=value`; `attribute` is the setting's."""

    attribute: str
    text: str

    def __str__(self) -> str:
        return f"{self.attribute}={self.text}"


def _deciding() -> dict[str, Setting]:
    """Settings that end up in the core's configuration, and the arena, by attribute."""
    fields = {field.name for field in msgspec.structs.fields(CoreConfig)}
    rows = {row.attribute: row for row in rows_for("daemon")}
    return {name: row for name, row in rows.items() if name in fields | FROM_CORE.keys() | {ARENA}}


DECIDING = _deciding()


def parse_changes(texts: list[str]) -> list[Change]:
    """The changes that are asked; raises WhatIfError for a key that is unknown, undecided here, or named twice."""
    aliases = {alias.removeprefix("--"): row for row in DECIDING.values() for alias in row.aliases}
    aliases |= {name.removeprefix("--"): BY_KEY[key] for key, names in OTHER_ALIASES.items() for name in names}
    found: list[Change] = []
    for text in texts:
        name, equals, value = text.partition("=")
        key = name.strip().removeprefix("--").replace("_", "-")
        if not equals or not key:
            raise WhatIfError(f"{text!r} is no change; write KEY=VALUE, like arena_bytes=+25%")
        row = BY_KEY.get(key) or aliases.get(key)
        if row is None:
            near = difflib.get_close_matches(key, sorted(one.key for one in DECIDING.values()), n=1)
            hint = f"; did you mean {near[0].replace('-', '_')}?" if near else "."
            raise WhatIfError(f"{name}: there is no such setting{hint} These can be changed: {', '.join(DECIDING)}")
        if row.attribute not in DECIDING:
            why = WHY_NOT.get(row.attribute, "no decision of the scheduler reads it, so nothing would be otherwise")
            raise WhatIfError(f"{row.attribute} cannot be asked: {why}. These can: {', '.join(DECIDING)}")
        if any(one.attribute == row.attribute for one in found):
            raise WhatIfError(f"{row.attribute} is named twice")
        found.append(Change(row.attribute, value.strip()))
    return found


def settings_of(recorded: dict[str, str], core: CoreConfig) -> Settings:
    """The settings of a life: as its journal has them, or, where another program wrote it, what the core's say."""
    flags = {BY_KEY[key].attribute: text for key, text in recorded.items() if key in BY_KEY and text != ""}
    try:
        settings = resolve("daemon", {**flags, "model": ""}, {})
    except ConfigError:
        settings = Settings()
    if core_config(settings) == _flagged(core, settings):
        return settings
    return dataclasses.replace(settings, **{name: _from_core(core, name) for name in DECIDING if name != ARENA})


def changed_settings(settings: Settings, changes: list[Change], arena_bytes: int) -> Settings:
    """The settings with the changes; `arena_bytes` is what each rank has. Raises WhatIfError."""
    values: dict[str, Any] = {}
    for change in changes:
        row = DECIDING[change.attribute]
        now = arena_bytes if change.attribute == ARENA else getattr(settings, change.attribute)
        values[change.attribute] = _value(row, change.text, now)
    try:
        made = dataclasses.replace(settings, **values)
        check_together(dataclasses.replace(made, model="", chat_template=""))
    except ConfigError as error:
        raise WhatIfError(str(error)) from error
    return made


def _value(row: Setting, text: str, now: Any) -> Any:
    typed, relative = text, RELATIVE.fullmatch(text)
    if relative is not None:
        if row.kind not in ("int", "bytes", "fraction"):
            raise WhatIfError(f"{row.attribute}={text}: only numbers can be changed by a percentage")
        times = 1 + float(relative[1] + relative[2]) / 100
        text = f"{now * times:.6g}" if row.kind == "fraction" else str(max(round(now * times), 0))
    if row.attribute == ARENA:  # a simulated run's may be smaller than any flag allows; sizing says what it must hold
        row = dataclasses.replace(row, low=row.low if now >= row.low else 1, zero="")
    try:
        return parse_value(row, text, "what-if")
    except ConfigError as error:
        asked = f"{row.attribute}={typed}, of {render_value(row, now)}: " if typed != text else ""
        raise WhatIfError(f"{asked}{error}") from error


def check_servable(arena_bytes: int) -> None:
    """Raise WhatIfError for an arena that `bandmaster serve` would not take."""
    try:
        parse_value(DECIDING[ARENA], arena_bytes, "what-if --rerun")
    except ConfigError as error:
        raise WhatIfError(str(error)) from error


def changed_core(core: CoreConfig, before: Settings, after: Settings) -> CoreConfig:
    """A life's configuration with what differs between two settings."""
    old, new = core_config(before), core_config(after)
    names = [field.name for field in msgspec.structs.fields(CoreConfig)]
    return msgspec.structs.replace(
        core, **{name: getattr(new, name) for name in names if getattr(new, name) != getattr(old, name)}
    )


def _flagged(core: CoreConfig, settings: Settings) -> CoreConfig:
    """The configuration with what no flag says taken from the defaults."""
    names = {field.name for field in msgspec.structs.fields(CoreConfig)}
    said = set(DECIDING) | {"max_batched_tokens", "overlap", "cache_quota_ppm", "pinned_max_ppm", "priority_preemption"}
    defaults = core_config(settings)
    return msgspec.structs.replace(core, **{name: getattr(defaults, name) for name in names - said})


def _from_core(core: CoreConfig, attribute: str) -> Any:
    return FROM_CORE[attribute](core) if attribute in FROM_CORE else getattr(core, attribute)


# --- arenas -----------------------------------------------------------------------------------------------------------


def arena_bytes_of(geometry: Geometry) -> int:
    """Bytes of the largest arena, which is what a setting asks of every rank."""
    return max(stage.arena_bytes for stage in geometry.stages)


def changed_geometry(recorded: Geometry, before: Settings, after: Settings, model_len: int) -> Geometry:
    """The geometry that ranks would offer with the changed settings, by the sizing that they use.

    Without a change of arena, page size or what sizing reads it is the recorded one. Raises WhatIfError for an arena
    that holds less than one request.
    """
    read = (ARENA, PAGE, "max_running_requests", "max_num_batched_tokens", "checkpoint_interval", "max_model_len")
    keeps = keeps_checkpoints(before) != keeps_checkpoints(after)
    if not keeps and all(getattr(before, name) == getattr(after, name) for name in read):
        return recorded
    asked = after.arena_bytes if after.arena_bytes != before.arena_bytes else 0
    bands = _bands(recorded, after)
    sizes = [
        _size(units, asked or stage.arena_bytes, after, model_len)
        for stage, units in zip(recorded.stages, bands, strict=True)
    ]
    return Geometry(
        page_size=after.page_size,
        virtual_pages=min(size.virtual_pages for size in sizes),
        virtual_slots=min(size.virtual_slots for size in sizes),
        stages=[size.geometry for size in sizes],
    )


def _size(units: list[BandGeometry], arena_bytes: int, settings: Settings, model_len: int) -> Sizing:
    bands = [BandPlan(band, (), settings.checkpoint_interval if band.kind == "state" else 0) for band in units]
    try:
        return size_arena(
            StoragePlan(settings.page_size, bands),
            arena_bytes,
            max_running_requests=settings.max_running_requests,
            max_model_len=model_len,
            max_batched_tokens=settings.max_num_batched_tokens,
            slots_per_request=2 if keeps_checkpoints(settings) else 1,
        )
    except BudgetTooSmall as error:
        asked = render_value(BY_KEY["arena-bytes"], arena_bytes)
        raise WhatIfError(f"an arena of {asked} with pages of {settings.page_size} tokens: {error}") from error


def _bands(recorded: Geometry, after: Settings) -> list[list[BandGeometry]]:
    """The bands of each stage with pages of another number of tokens; slots of states stay as they are.

    A modeled rank's layers are known. Of others the recorded pages are scaled, what pads them to 256 bytes too.
    """
    if after.page_size == recorded.page_size:
        return [stage.bands for stage in recorded.stages]
    if after.rank_runner == "modeled":
        stages, settings = len(recorded.stages), rank_settings(after)
        layers = toy_layers(read_options(settings.options), after.checkpoint_interval, stages)
        split = split_layers(len(layers), settings.stage_layers or [0] * stages)
        every = [entry.layer for entry in layers]
        return [plan_storage(every, after.page_size, local).band_geometries() for local in split]
    return [[_scaled(band, recorded.page_size, after.page_size) for band in stage.bands] for stage in recorded.stages]


def _scaled(band: BandGeometry, before: int, after: int) -> BandGeometry:
    if band.kind == "state" or not band.unit_bytes:
        return band
    return msgspec.structs.replace(band, unit_bytes=align_up(-(-band.unit_bytes * after // before), UNIT_ALIGN_BYTES))
