"""The engine of a simulation: its clock, its account of requests, and arenas of exact size."""

from __future__ import annotations

import pytest

from allocator.checks import STRICT, Checks
from allocator.columns import pack_i64
from allocator.geometry import BandGeometry
from allocator.logical.chain import LogicalChain
from daemon.core.limits import CoreConfig
from ipc.messages import Generate, Refused
from tools.simulate.engine import GREEDY, Engine, Miscounted, Stuck, Times, arena_bytes_for, one_stage

FULL = [BandGeometry("full", "full", 1000)]
ALL = [
    BandGeometry("state", "state", 700),
    BandGeometry("window:8", "window", 300, 8),
    BandGeometry("full", "full", 1000),
]
TIMES = Times(step_ns=1000, prefill_ns=10, decode_ns=100)


def engine(pages: int = 64, bands: list[BandGeometry] = FULL, **settings: object) -> Engine:
    """A small engine with room for so many units of each band, checked after every step."""
    config = CoreConfig(
        **{  # type: ignore[arg-type]
            "page_size": 4,
            "max_running_requests": 8,
            "max_batched_tokens": 64,
            "chunked_prefill_size": 64,
            "checkpoint_interval": 8,
            **settings,
        }
    )
    geometry = one_stage(bands, config.page_size, arena_bytes_for(bands, (pages,) * len(bands)))
    return Engine(config, geometry, times=TIMES, checks=Checks(STRICT), keep_decisions=True)


def ask(id: str, tokens: int, output: int, first: int = 0) -> Generate:
    """A request whose prompt counts up."""
    return Generate(id, pack_i64(range(first, first + tokens)), GREEDY, max_tokens=output)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_lone_request_takes_what_its_forwards_take(overlap: bool) -> None:
    """The prompt's forward, then one per further token; the host takes no time, launched early or not."""
    world = engine(overlap=overlap)
    world.now_ns = 500
    world.submit(ask("a", 10, 5))
    world.run()
    sent = world.sent["a"]
    assert (sent.arrived_ns, sent.admitted_ns) == (500, 500)
    assert sent.first_token_ns == 500 + 1000 + 10 * 10
    assert sent.ended_ns == sent.first_token_ns + 4 * (1000 + 100)
    assert (sent.tokens, sent.ends, world.busy_ns) == (5, {0: "length"}, sent.ended_ns - 500)
    world.check_rest()


def test_time_passes_between_arrivals_and_never_back() -> None:
    """`advance` does what is due until then and no more."""
    world = engine()
    world.submit(ask("a", 10, 5))
    world.advance(1099)
    assert world.sent["a"].tokens == 0
    world.advance(1100)
    assert (world.sent["a"].tokens, world.now_ns) == (1, 1100)
    with pytest.raises(ValueError, match="time does not go back to 1099"):
        world.advance(1099)
    world.run()
    world.check_rest()


def test_what_a_request_finds_is_its_own_tokens_only() -> None:
    """A second turn finds the first one's prompt; nobody finds another request's output."""
    world = engine()
    for id, tokens in (("a", 21), ("b", 21), ("c", 41)):
        world.submit(ask(id, tokens, 9))
        world.run()
    assert [world.sent[id].cached_tokens for id in "abc"] == [0, 20, 20]
    world.check_rest()


def test_a_deadline_that_passes_while_nothing_happens_is_noticed() -> None:
    """The engine wakes the core when it asks for it: the request ends at its deadline, not later."""
    world = engine(deadline_check=False)
    world.times = TIMES._replace(step_ns=300_000)
    world.submit(Generate("a", pack_i64(range(10)), GREEDY, max_tokens=200, deadline_ms=1))
    world.run()
    sent = world.sent["a"]
    assert sent.ends == {0: "deadline"}
    assert sent.ended_ns == 1_000_000
    world.check_rest()


@pytest.mark.parametrize("bands", [FULL, ALL], ids=["full", "all"])
def test_pressure_is_counted(bands: list[BandGeometry]) -> None:
    """More than fits at once: retractions, what is computed again, and every request ends once with all its tokens."""
    world = engine(pages=30, bands=bands, max_running_requests=6)
    for k in range(12):
        world.submit(ask(f"r{k}", 9, 60, first=100 * k))
        world.advance(world.now_ns + 3000)
    world.run()
    world.check_rest()
    assert sum(sent.retractions for sent in world.sent.values()) == world.core.gauges()["retractions_total"] > 0
    again = sum(sent.recomputed_tokens for sent in world.sent.values())
    assert world.prompt_tokens == world.core.gauges()["prompt_tokens_total"]
    assert again > 0
    assert all(sent.tokens == 60 for sent in world.sent.values())
    assert world.decided["ended", "length"] == 12


def test_refusals_and_aborts_are_accounted_for() -> None:
    """Refused, aborted and finished ones add up to what was submitted."""
    world = engine(pages=8, max_queued_requests=2)
    answers = [world.submit(ask(f"r{k}", 9 if k else 90, 5, first=100 * k)) for k in range(5)]
    assert [isinstance(answer, Refused) for answer in answers] == [True, False, False, True, True]
    world.abort("r1")
    world.run()
    world.check_rest()
    assert world.sent["r1"].ends == {0: "abort"}
    assert world.sent["r2"].ends == {0: "length"}
    assert world.answered == 5


def test_an_account_that_does_not_hold_is_said() -> None:
    """A token too many, an end too few: the check names both sides."""
    world = engine()
    world.submit(ask("a", 5, 3))
    world.run()
    world.sent["a"].tokens += 1
    with pytest.raises(Miscounted, match=r"\[1, 0, 1, 4\] seen here, \[1, 0, 1, 3\] by the core"):
        world.check_rest()


def test_a_lost_report_is_found() -> None:
    """With nothing to come and a request live the run says so instead of ending."""
    world = engine()
    world.submit(ask("a", 5, 3))
    world.advance(1)
    world._due.clear()
    with pytest.raises(Stuck, match="1 requests are live and nothing is to come"):
        world.run()


def test_an_id_comes_once() -> None:
    """The account is by id."""
    world = engine()
    world.submit(ask("a", 5, 3))
    with pytest.raises(ValueError, match="'a' was submitted before"):
        world.submit(ask("a", 5, 3))


@pytest.mark.parametrize("units", [(1, 1, 1), (3, 5, 7), (16, 40, 64), (128, 51, 64)])
def test_an_arena_holds_exactly_what_it_is_made_for(units: tuple[int, ...]) -> None:
    """The counts fit it together, and not with a byte less."""
    for bands in (ALL, ALL[1:], ALL[2:]):
        counts = units[-len(bands) :]
        size = arena_bytes_for(bands, counts)
        geometry = one_stage(bands, 4, max(size, arena_bytes_for(bands, (1,) * len(bands))))
        assert LogicalChain(geometry, Checks(STRICT)).never_fits(counts) is None
        if counts != (1,) * len(bands):
            smaller = one_stage(bands, 4, size - 1)
            assert LogicalChain(smaller, Checks(STRICT)).never_fits(counts) is not None


def test_an_arena_below_one_unit_each_is_refused() -> None:
    """Both sizes are named."""
    with pytest.raises(ValueError, match=r"1,999 bytes does not hold one unit of each band: 2,000 bytes do"):
        one_stage(FULL, 4, 1999)
