"""What can be asked of what-if, what is refused by name, and the arenas that a change makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from allocator.geometry import Geometry
from daemon.config import recorded, resolve
from daemon.core.limits import CoreConfig
from daemon.core_settings import core_config
from daemon.rank.modeled import ModeledRunner
from daemon.rank.runner import Prepared
from daemon.rank_settings import rank_settings
from daemon.settings_table import Settings
from tests.tools.whatif_runs import CONFIG, FULL, geometry_of, requests, serve
from tools.whatif.changes import (
    Change,
    arena_bytes_of,
    changed_core,
    changed_geometry,
    changed_settings,
    parse_changes,
    settings_of,
)
from tools.whatif.command import main
from tools.whatif.errors import WhatIfError

MIB = 1 << 20


def applied(*texts: str, before: Settings | None = None) -> Settings:
    """Settings with changes."""
    return changed_settings(before or Settings(), parse_changes(list(texts)), 64 * MIB)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["arena_byte=+25%"], "did you mean arena_bytes"),
        (["arena_bytes"], "write KEY=VALUE"),
        (["=3"], "write KEY=VALUE"),
        (["tensor_parallel_size=2"], "other ranks compute at another pace"),
        (["--pp=2"], "there is no such setting"),
        (["foo=1"], r"there is no such setting\. These can be changed: "),
        (["pipeline-parallel-size=2"], "other ranks compute at another pace"),
        (["mem_fraction=0.9"], "ask for arena_bytes"),
        (["rank_option=delay_us=1"], "another model or device"),
        (["host=0.0.0.0"], "no decision of the scheduler reads it"),
        (["page_size=8", "page-size=16"], "named twice"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(texts: list[str], words: str) -> None:
    """Keys that are unknown, decide nothing, or change what no report tells of."""
    with pytest.raises(WhatIfError, match=words):
        parse_changes(texts)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["page_size=0"], "1 to 4096"),
        (["schedule_policy=random"], "one of fcfs, lpm"),
        (["schedule_policy=+25%"], "only numbers"),
        (["arena_bytes=0"], "arena-bytes"),
        (["arena_bytes="], "allowed: 1MiB to 256TiB"),
        (["arena_bytes=-100%"], "arena-bytes"),
        (["arena_bytes=-200%"], "arena_bytes=-200%, of 64MiB: .*'0' is not allowed"),
        (["max_num_batched_tokens=8"], "below --max-running-requests"),
        (["page_size=48"], "no multiple of --page-size"),
        (["fair_quantum_tokens=100"], "nothing reads it"),
    ],
)
def test_a_value_out_of_range_is_refused(texts: list[str], words: str) -> None:
    """With the range, or with the setting that it does not go together with."""
    with pytest.raises(WhatIfError, match=words):
        applied(*texts)


@pytest.mark.parametrize(
    ("text", "attribute", "value"),
    [
        ("arena_bytes=+25%", "arena_bytes", 80 * MIB),
        ("arena_bytes=-10%", "arena_bytes", round(57.6 * MIB)),
        ("arena-bytes=8GiB", "arena_bytes", 8 << 30),
        ("max-num-seqs=7", "max_running_requests", 7),
        ("max_running_requests=+50%", "max_running_requests", 96),
        ("max_batched_tokens=4096", "max_num_batched_tokens", 4096),
        ("cache_quota=-50%", "cache_quota", 0.5),
        ("enable-priority-preemption=true", "enable_priority_preemption", True),
        ("cache_quotas=salt:a=0.2", "cache_quotas", {"salt:a": "0.2"}),
    ],
)
def test_values_are_read_as_flags_read_them(text: str, attribute: str, value: object) -> None:
    """Names with dashes or underscores, aliases, units and percentages."""
    assert getattr(applied(text), attribute) == value


def test_without_changes_everything_is_as_recorded() -> None:
    """A configuration that no flag made comes back, and so does the geometry."""
    odd = CoreConfig(page_size=4, max_running_requests=3, retracts_max=2, cache_quota_ppm=700_000, overlap=False)
    for core, said in ((odd, {}), (core_config(Settings()), recorded(Settings())), (odd, recorded(Settings()))):
        settings = settings_of(said, core)
        assert changed_core(core, settings, changed_settings(settings, [], MIB)) == core
        geometry = geometry_of(FULL, 40_960)
        assert changed_geometry(geometry, settings, settings, 4096) is geometry


def test_a_change_touches_its_field_alone() -> None:
    """What no flag says (retracts_max) stays as the journal has it."""
    core = CoreConfig(retracts_max=3, eviction_policy="lru")
    settings = settings_of({}, core)
    made = changed_core(core, settings, changed_settings(settings, [Change("overtaken_max", "5")], MIB))
    assert made == msgspec.structs.replace(core, overtaken_max=5)


def offered(settings: Settings) -> tuple[Prepared, Geometry]:
    """What a modeled rank offers under settings."""
    prepared = ModeledRunner(rank_settings(settings)).prepare()
    geometry = Geometry(settings.page_size, prepared.virtual_pages, prepared.virtual_slots, [prepared.geometry])
    return prepared, geometry


@pytest.mark.parametrize("options", ["full=1", "full=1,windows=64+128", "full=1,windows=64,state=1", "full=0,state=1"])
@pytest.mark.parametrize(
    "texts",
    [
        ["arena_bytes=+25%"],
        ["arena_bytes=-33%"],
        ["page_size=64"],
        ["max_running_requests=7"],
        ["page_size=32", "arena_bytes=5000000"],
        ["enable_prefix_caching=false", "arena_bytes=+1%"],
    ],
)
def test_a_changed_arena_is_what_a_rank_would_offer(options: str, texts: list[str]) -> None:
    """Bytes, units, and how many ids there are come out as the rank's own sizing has them."""
    before = resolve("daemon", {"rank_runner": "modeled", "rank_option": options, "arena_bytes": "2MiB"}, {})
    prepared, geometry = offered(before)
    after = changed_settings(before, parse_changes(texts), arena_bytes_of(geometry))
    _, truth = offered(after)
    assert changed_geometry(geometry, before, after, prepared.facts.max_model_len) == truth


def test_an_arena_that_holds_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the bytes that are missing, and exit code 2."""
    serve(CONFIG, geometry_of(FULL, 40_960), requests(1, 5), tmp_path)
    assert main([str(tmp_path), "arena_bytes=600"]) == 2
    assert "bytes" in capsys.readouterr().err


def test_a_rerun_needs_an_arena_that_serve_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A simulated run's small arena is refused before anything is started."""
    serve(CONFIG, geometry_of(FULL, 40_960), requests(1, 5), tmp_path)
    assert main([str(tmp_path), "--rerun"]) == 2
    assert "1MiB" in capsys.readouterr().err


def test_settings_are_those_of_the_journal() -> None:
    """What the daemon recorded is read back, the rank's options among it."""
    settings = dataclasses.replace(Settings(), rank_runner="modeled", rank_option={"delay_us": "5"}, page_size=32)
    assert settings_of(recorded(settings), core_config(settings)) == dataclasses.replace(settings, model="")
