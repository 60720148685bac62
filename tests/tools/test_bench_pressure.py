"""`bandmaster bench pressure` and `bench oversubscription`: the published table is met, the curve has no cliff."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import pytest

from tools import bench, bench_oversubscription, bench_pressure
from tools.pressure.curve import FAMILIES, SHAPES, Point, arena_of, load_of, problems, prompts_of, working_set_bytes
from tools.pressure.curve import run as run_point
from tools.pressure.episode import Episode, config_of, run, traffic
from tools.pressure.mapping import (
    CONDITIONS,
    INKLING,
    MELLUM,
    PAGE_TOKENS,
    arena_bytes,
    geometry,
)
from tools.pressure.show import Verdict
from tools.simulate.engine import Times

PUBLISHED_ARENAS = [(MELLUM, 398_196_736), (INKLING, 105_906_176)]


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    """All 48 rows under the default policies."""
    return [run(condition, config_of()) for condition in CONDITIONS]


# --- the table itself -----------------------------------------------------------------------------------------------


def test_the_table_is_the_published_one() -> None:
    """48 different rows whose sums, conditions and arenas are the published ones."""
    assert len(set(CONDITIONS)) == len(CONDITIONS) == 48
    assert len({one.name for one in CONDITIONS}) == 48
    assert sum(one.before for one in CONDITIONS) == 57_856
    assert sum(one.after for one in CONDITIONS) == 68_480
    assert sum(one.model is MELLUM for one in CONDITIONS) == 32
    for model, size in PUBLISHED_ARENAS:
        assert arena_bytes(model, 8192) == size
    for one in CONDITIONS:
        assert one.before <= one.after <= one.possible
        assert one.after % PAGE_TOKENS == one.possible % PAGE_TOKENS == 0


def test_the_arena_is_no_larger_than_published() -> None:
    """Sinks and padding lie inside the published bytes, so the chain has those units less."""
    for model, size in PUBLISHED_ARENAS:
        arena = geometry(model, 8192)
        (stage,) = arena.stages
        assert stage.arena_bytes == size
        sinks = max(band.unit_bytes for band in model.bands if band.kind != "state")
        slots = [band.unit_bytes for band in model.bands if band.kind == "state"]
        assert sinks <= stage.chain_start_bytes < sinks + 2 * max(slots, default=1)
        assert arena.page_size == PAGE_TOKENS


def test_no_two_prompts_share_a_page() -> None:
    """The only pages an episode can find again are those of its two hot prompts."""
    for condition in (CONDITIONS[0], CONDITIONS[16 + 8], CONDITIONS[-1]):
        served = traffic(condition)
        assert len(served) == condition.cold + 4
        prompts = dict(served)
        first_pages = [prompt[:PAGE_TOKENS].tobytes() for name, prompt in served if not name.endswith("again")]
        assert len(set(first_pages)) == condition.cold + 2
        for name in "AB":
            assert np.array_equal(prompts[name], prompts[f"{name} again"])
        assert [name for name, _ in served[-2:]] == (
            ["A again", "B again"] if condition.order == "oldest" else ["B again", "A again"]
        )


# --- what is shown --------------------------------------------------------------------------------------------------


def test_no_row_is_below_the_published_one(episodes: list[Episode]) -> None:
    """Every one of the 48 rows keeps at least what the published change keeps."""
    assert not [f"{one.condition.name}: {one.cached_tokens}" for one in Verdict(episodes).below]


def test_the_sum_is_a_page_above(episodes: list[Episode]) -> None:
    """Over all rows at least one page more of the hot prompts is found again."""
    verdict = Verdict(episodes)
    assert verdict.sum_tokens >= verdict.after_tokens + PAGE_TOKENS
    assert verdict.holds


def test_without_pressure_nothing_is_evicted(episodes: list[Episode]) -> None:
    """A row that evicted nothing lost nothing, and none finds more than there is."""
    calm = [one for one in episodes if not any(one.evicted)]
    assert calm
    assert all(one.cached_tokens == one.condition.possible for one in calm)
    assert all(one.cached_tokens <= one.condition.possible for one in episodes)


def test_tokens_are_found_or_computed(episodes: list[Episode]) -> None:
    """Every prompt token was found in the cache or scheduled once: nobody was retracted."""
    for one in episodes:
        prompts = sum(served.prompt_tokens for served in one.served)
        found = sum(served.cached_tokens for served in one.served)
        assert one.computed_tokens == prompts - found, one.condition.name


def test_a_revisit_finds_what_was_usable_before_it(episodes: list[Episode]) -> None:
    """What the look at the cache said is what the next request of that prompt finds."""
    for one in episodes:
        for before, again in zip(one.served[-3:], one.served[-2:], strict=False):
            assert again.cached_tokens == before.usable["AB".index(again.name[0])], (one.condition.name, again.name)


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "priority"])
def test_every_policy_keeps_the_whole_prompt_where_it_fits(policy: str) -> None:
    """Rows without pressure are the same under every policy, and no policy breaks an invariant under pressure."""
    for condition in CONDITIONS:
        if condition.cold in (1, 7, 12) and condition.order == "recent":
            one = run(condition, config_of(policy))
            assert any(one.evicted) or one.cached_tokens == condition.possible, condition.name


def test_the_command_compares(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has rows and verdicts; the table names every row in full; `--check` says 1 where a policy is below."""
    narrow = ["--only", "Mellum/4096/1024/3", "--policy", "value,lru"]
    assert bench.main(["pressure", "--json", "--check", *narrow]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [row["order"] for row in told["rows"]] == ["oldest", "recent"]
    assert [verdict["policy"] for verdict in told["verdicts"]] == ["value", "lru"]
    assert all(row["value"] >= row["after"] for row in told["rows"])
    assert bench_pressure.main([*narrow, "--explain"]) == 0
    shown = capsys.readouterr().out
    for text in ("Mellum", "full+window", "1,408", "usable", "cold 3", "B again", "possible"):
        assert text in shown, text
    assert "\u2026" not in shown


def test_a_row_below_is_named() -> None:
    """A policy that is below one row fails the check and the row is named with both numbers."""
    condition = CONDITIONS[0]
    good = run(condition, config_of())
    bad = good._replace(cached_tokens=condition.after - PAGE_TOKENS)
    assert Verdict([good]).holds
    assert not Verdict([good, bad]).holds
    assert f"{condition.name} {condition.after - PAGE_TOKENS} < {condition.after}" in Verdict([good, bad]).text()


# --- the curve ------------------------------------------------------------------------------------------------------

LOADS = {name: load_of(name, rows=8 if name == "growing" else 16, slack=2, seed=3) for name in SHAPES}
SLICE = [
    ("mixed", "full", (0.8, 1.2, 2.0)),
    ("mixed", "full+window+state", (0.8, 1.2, 2.0)),
    ("growing", "full+window", (1.2, 1.6)),
    ("shared", "full+window+state", (1.2, 2.0)),
]


@pytest.fixture(scope="module")
def points() -> list[Point]:
    """A slice of the curve: few requests; every load, every family, both reservations."""
    return [
        run_point(family, reserve, x, LOADS[load], Times())
        for load, family, places in SLICE
        for reserve in ("estimate", "full")
        for x in places
    ]


def test_the_curve_has_no_cliff(points: list[Point]) -> None:
    """H10: throughput is never below 95% of the full reservation, falls no faster than the memory, retractions are
    bounded, and every request finishes."""
    assert list(problems(points)) == []


def test_full_reservation_never_retracts(points: list[Point]) -> None:
    """Who admits only what fits at its longest takes nothing back and computes nothing twice."""
    for one in points:
        if one.reserve == "full":
            assert one.retractions == one.recomputed_tokens == 0, one


PAYS = [
    ("mixed", "full", 2.0, 1.3),
    ("mixed", "full+window+state", 2.0, 1.15),
    ("growing", "full+window", 1.6, 1.5),
    ("shared", "full+window+state", 2.0, 1.1),
]


@pytest.mark.parametrize(("load", "family", "over", "least"), PAYS)
def test_over_commitment_pays(points: list[Point], load: str, family: str, over: float, least: float) -> None:
    """With outputs half as long as allowed, the estimate runs more at once than the full reservation, and delivers so
    many times as much; an estimate that never relaxes does not."""
    estimate, full = (
        next(p for p in points if p[:4] == (load, family, reserve, over)) for reserve in ("estimate", "full")
    )
    assert estimate.running_mean > full.running_mean
    assert estimate.tokens_per_s > least * full.tokens_per_s


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prefixes_are_found_where_there_is_room(family: str) -> None:
    """In an arena twice as large as what runs, every request but the first of each group finds the shared prefix."""
    shape, load = SHAPES["shared"], LOADS["shared"]
    possible = 100 * shape.shared * (len(load.prompts) - shape.groups) / int(load.prompts.sum())
    one = run_point(family, "estimate", 0.5, load, Times())
    assert 0.98 * possible <= one.cached_percent <= possible + 0.001


def test_the_arena_is_the_working_set_over_the_point() -> None:
    """Bytes behind the sink times the oversubscription are the working set, to one page."""
    for load, bands in product(LOADS.values(), FAMILIES.values()):
        for x in (0.8, 1.0, 2.0):
            (stage,) = arena_of(bands, load, x).stages
            chain = stage.arena_bytes - stage.chain_start_bytes
            assert -x <= chain * x - working_set_bytes(bands, load) <= 2 * x * stage.bands[-1].unit_bytes


def test_a_load_shares_what_it_says() -> None:
    """Prompts have the lengths of their load; only those of one group share a prefix, and no more than it."""
    for name, load in LOADS.items():
        shape, prompts = SHAPES[name], list(prompts_of(load))
        assert [len(prompt) for prompt in prompts] == load.prompts.tolist()
        for (i, one), (k, other) in product(enumerate(prompts[:20]), enumerate(prompts[:20])):
            if i < k:
                same = next((at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
                assert same == (shape.shared if (k - i) % shape.groups == 0 else 0)


def test_a_cliff_is_found(points: list[Point]) -> None:
    """Halved throughput at one point, a request retracted too often or lost is each said in a sentence."""
    good = [one for one in points if (one.load, one.family) == ("mixed", "full")]
    worse: list[tuple[str, dict[str, Any]]] = [
        ("falls to", {"tokens_per_s": good[1].tokens_per_s / 2}),
        ("below 0.95 of reserve full's", {"tokens_per_s": good[1].tokens_per_s / 2}),
        ("above 3 times reserve full's", {"tpot_ms_p99": 100 * good[1].tpot_ms_p99}),
        ("was retracted 9 times", {"retractions_most": 9}),
        ("requests finished", {"finished": good[1].requests - 1}),
    ]
    for text, change in worse:
        changed = [good[0], good[1]._replace(**change), *good[2:]]
        assert any(text in line for line in problems(changed)), text


def test_the_curve_command(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has a row per point and reservation; the table shows both beside each other."""
    small = ["--running", "4", "--points", "1,1.5", "--family", "full+window", "--load", "mixed"]
    assert bench.main(["oversubscription", "--json", *small]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["reserve"], row["oversubscription"]) for row in told["rows"]] == [
        ("estimate", 1.0),
        ("estimate", 1.5),
        ("full", 1.0),
        ("full", 1.5),
    ]
    assert bench_oversubscription.main(small) == 0
    shown = capsys.readouterr().out
    assert "mixed, full+window" in shown
    assert "the promise holds at every point" in shown
    assert "1.50" in shown
    assert "\u2026" not in shown


INVALID = [
    (bench_pressure.main, "--policy", "value,newest"),
    (bench_pressure.main, "--only", "Llama"),
    (bench_pressure.main, "--checkpoints", "none"),
    (bench_oversubscription.main, "--points", "1,x"),
    (bench_oversubscription.main, "--points", "0.01"),
    (bench_oversubscription.main, "--family", "state"),
    (bench_oversubscription.main, "--load", "chat"),
    (bench_oversubscription.main, "--step-us", "0"),
    (bench_oversubscription.main, "--decode-us", "-1"),
    (bench_oversubscription.main, "--running", "0"),
    (bench_oversubscription.main, "--slack", "0"),
    (bench_oversubscription.main, "--policy", "newest"),
    (bench_oversubscription.main, "--seed", "-1"),
]


@pytest.mark.parametrize(("main", "option", "value"), INVALID)
def test_wrong_arguments_are_refused(main: Any, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An argument out of range is named before anything runs."""
    with pytest.raises(SystemExit) as ended:
        main([option, value])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err
