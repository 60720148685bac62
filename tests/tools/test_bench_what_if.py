"""`bandmaster bench what-if`: its traffic is what it says, its table has the calibration, its real runs are limited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from allocator.geometry import BandGeometry
from daemon.core.limits import CoreConfig
from daemon.settings_table import Settings
from tests.tools.whatif_runs import geometry_of, serve
from tools import bench_what_if
from tools.bench_what_if import WORLDS, blind_tokens, ending, parse, table, told_once
from tools.simulate.engine import Times
from tools.whatif import rerun
from tools.whatif.account import Figures
from tools.whatif.documents import Documents, draw_documents
from tools.whatif.errors import WhatIfError
from tools.whatif.rerun import Run, Sending, run_all
from tools.whatif.rows import CHANGED, PACED, RECORDED, RERUN, UNCHANGED
from tools.whatif.show import document

WORLD = WORLDS["documents"]
CONFIG = CoreConfig(
    page_size=bench_what_if.PAGE_TOKENS,
    max_running_requests=int(WORLD.flags["max_running_requests"]),
    max_batched_tokens=8192,
    chunked_prefill_size=2048,
    priority_preemption=True,
)
BANDS = [BandGeometry("full", "full", bench_what_if.PAGE_BYTES)]
TIMES = Times(WORLD.delay_us * 1000, WORLD.token_delay_us * 1000, WORLD.token_delay_us * 1000)


def simulated(seed: int, pages: int = 512, **changed: Any) -> Figures:
    """The figures of the world's traffic on a simulated device that says what blind ranks say."""
    traffic = []
    for one in ending(draw_documents(Documents(), seed), WORLD.output_tokens, seed):
        leaves = {"leaves_ms": (one.hang_up_ns - one.at_ns) // 10**6} if one.hang_up_ns > 0 else {}
        traffic.append((one.at_ns, one.generate, 0, leaves))
    config = msgspec.structs.replace(CONFIG, **changed)
    geometry = geometry_of(BANDS, bench_what_if.PAGE_BYTES * (pages + 1), config)
    return serve(config, geometry, traffic, None, TIMES, lambda seeds, positions: blind_tokens(positions))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_matters_what_the_cache_keeps_of_documents(seed: int) -> None:
    """Another eviction policy finds more than a tenth less; requests wait, and some are retracted, under both."""
    value, lru = simulated(seed), simulated(seed, eviction_policy="lru")
    assert lru["cached_tokens"] < 0.9 * value["cached_tokens"]
    assert min(value["retractions"], lru["retractions"]) > 20
    assert min(value["waiting_ms"]["mean"], lru["waiting_ms"]["mean"]) > 5_000


def test_arena_order_and_rows_matter_too() -> None:
    """So that no prediction is right by saying what was recorded."""
    recorded = simulated(2)
    assert simulated(2, 640)["cached_tokens"] > 1.05 * recorded["cached_tokens"]
    assert simulated(2, 384)["cached_tokens"] < 0.9 * recorded["cached_tokens"]
    assert simulated(2, schedule_policy="lpm")["waiting_ms"]["mean"] < 0.9 * recorded["waiting_ms"]["mean"]
    assert simulated(2, max_running_requests=24)["waiting_ms"]["mean"] < 0.9 * recorded["waiting_ms"]["mean"]


def test_the_traffic_hangs_on_the_seed_alone() -> None:
    """The same seed draws the same, another one something else; clients leave after they came."""
    one, other = draw_documents(Documents(), 4), draw_documents(Documents(), 5)
    assert one == draw_documents(Documents(), 4)
    assert one != other
    assert len(one) == Documents().requests
    assert [sending.at_ns for sending in one] == sorted(sending.at_ns for sending in one)
    leaving = [sending for sending in one if sending.hang_up_ns >= 0]
    assert leaving
    assert all(sending.hang_up_ns > sending.at_ns for sending in leaving)


def test_what_is_not_given_is_the_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    """Each world has traffic and delays of its own; what is given stands."""
    assert parse(["--world", "documents"]).token_delay_us == WORLD.token_delay_us
    assert parse([]).delay_us == WORLDS["talks"].delay_us
    assert parse(["--world", "documents", "--token-delay-us", "7", "--requests", "9"]).requests == 9
    with pytest.raises(SystemExit):
        parse(["--together", "0"])
    assert "--together 0: at least 1" in capsys.readouterr().err


def figures(cached_tokens: int) -> Figures:
    """Figures of a run that found so much."""
    plain: dict[str, Any] = dict.fromkeys(
        ("requests", "refused", "computed_prompt_tokens", "retractions", "parks", "evicted_units", "steps"), 100
    )
    times = dict.fromkeys(("mean", "p50", "p99"), 200.0)
    plain |= {"hit_rate": 0.5, "output_tokens": 10, "output_tokens_per_s": 8.0}
    plain |= {"waiting_ms": times, "first_token_ms": times, "request_ms": times}
    return Figures(plain | {"cached_tokens": cached_tokens})


def test_the_table_begins_with_what_a_replay_without_changes_misses() -> None:
    """It is marked there, and makes the bar of the prediction as wide."""
    runs = {RECORDED: 1000, UNCHANGED: 900, CHANGED: 2000, RERUN: 1850, PACED: 1600}
    facts = {"arena_bytes": {"recorded": 1, "changed": 1}}
    found = document("dir", ["eviction_policy=lru"], facts, {}, {name: figures(of) for name, of in runs.items()}, [])
    columns = [list(column.cells) for column in table([found]).columns]
    rows = list(zip(*columns, strict=True))
    assert rows[0][:6] == ("nothing", "prompt tokens found in the cache", "1,000", "900", "1,000", "-10.0% !")
    (asked,) = [row for row in rows if row[0] == "eviction_policy=lru"]
    assert asked[2:] == ("1,000", "2,000 \u00b110%", "1,850", "+8.1%", "1,600", "-13.5% !")


def test_a_note_of_every_question_is_told_once_and_one_of_its_own_with_the_change() -> None:
    """A reader of the last table alone sees whose doubt it is."""
    documents = [{"changes": [name], "notes": ["both", *own]} for name, own in (("a=1", []), ("b=2", ["mine"]))]
    assert told_once(documents) == ["both", "b=2: mine"]


def a_run(name: int, use: Any = None) -> Run:
    """One that the fakes below know by its number."""
    return Run(Settings(port=name), [], -1, use or (lambda made: None))


def test_so_many_run_side_by_side_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is served and read once."""
    running, most, served, read = 0, 0, list[int](), list[Any]()

    async def fake(settings: Settings, requests: list[Sending], directory: Path, until_ns: int) -> Path:
        nonlocal running, most
        running += 1
        most = max(most, running)
        served.append(settings.port)
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        running -= 1
        return directory

    monkeypatch.setattr(rerun, "_serve", fake)
    monkeypatch.setattr(rerun, "_read_run", lambda run_dir, use: use(run_dir))
    run_all([a_run(number, read.append) for number in range(7)], together=3)
    assert most == 3
    assert sorted(served) == list(range(7))
    assert len({str(path) for path in read}) == 7


def test_a_run_that_fails_is_one_error_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would never end by themselves."""

    async def fake(settings: Settings, requests: list[Sending], directory: Path, until_ns: int) -> Path:
        if settings.port == 2:
            raise WhatIfError("the rerun lost its daemon")
        await trio.sleep_forever()
        return directory

    monkeypatch.setattr(rerun, "_serve", fake)
    with pytest.raises(WhatIfError, match="lost its daemon"):
        run_all([a_run(number) for number in range(4)], together=4)
