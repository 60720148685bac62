"""Suspects: a request that is the death of its ranks ends, alone, and soon; nobody ends for a death it only saw."""

from __future__ import annotations

import msgspec
import pytest

from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.requests import ENOUGH_TOKENS
from daemon.core.suspects import standing
from daemon.settings_table import Settings
from tests.core.world import World
from tools.worlds.rank_double import FULL_ONLY, Shape

CONFIG = CoreConfig(
    page_size=4, max_running_requests=32, max_batched_tokens=256, chunked_prefill_size=16, checkpoint_interval=8
)
RESTARTS_MAX = Settings().epoch_restarts_max
COUNT = 32


def replace(**fields: object) -> CoreConfig:
    """The configuration with other fields."""
    return msgspec.structs.replace(CONFIG, **fields)


def crowd(config: CoreConfig, poison: int, deadly_at: int, pages: int = 600, **world: object) -> World:
    """32 requests, one of which is the death of its rank when that computes a position of it."""
    made = World(config, pages=pages, **world)  # type: ignore[arg-type]
    made.deadly["fe", f"r{poison}"] = deadly_at
    for number in range(COUNT):
        made.send(f"r{number}", [number, *range(1, 24 + number % 5)], 6)
    return made


def lost(world: World) -> int:
    """How many epochs died so far."""
    return sum(isinstance(item, inputs.EpochEnded) for item in world.inputs)


def serve(world: World, poison: int) -> None:
    """To the end: one request dies of itself and every other one gets its tokens, before the restarts are used up."""
    world.run()
    world.check_rest()
    reasons = {id: client.finished[0].reason for (_, id), client in world.clients.items()}
    assert reasons.pop(f"r{poison}") == "fault"
    assert set(reasons.values()) == {"length"}
    assert lost(world) <= RESTARTS_MAX - 1, "one to spare for a death that is nobody's fault"


@pytest.mark.parametrize("deadly_at", [0, 20, 26])  # its first chunk, its second, its own output
@pytest.mark.parametrize("poison", [0, 17, 31])
def test_one_of_many_kills_every_rank_and_only_that_one_ends(poison: int, deadly_at: int) -> None:
    """Wherever it stands in the queue and whatever of it is deadly."""
    world = crowd(CONFIG, poison, deadly_at)
    serve(world, poison)
    ended = world.finished(f"r{poison}")
    assert "3 epochs in a row were lost while it ran" in ended.detail
    assert "--epoch-losses-max 3" in ended.detail
    assert "a rank died" in ended.detail
    tried = [one for one in world.verdicts("admitted") if "losses" in one.numbers]
    assert tried[-1].numbers["losses"] == 2 or deadly_at == 26


@pytest.mark.parametrize(
    ("config", "world"),
    [
        (replace(overlap=False), {}),
        (replace(enable_prefix_caching=False), {}),
        (replace(max_running_requests=3), {}),
        (replace(priority_preemption=True, schedule_policy="deadline"), {}),
        (replace(schedule_policy="fair", fair_quantum_tokens=16, overtaken_max=1), {}),
        (replace(schedule_policy="lpm", max_batched_tokens=32), {}),
        (CONFIG, {"stages": 3}),
        (CONFIG, {"shape": Shape(windows=(12,), state=True), "pages": 1200}),
        (replace(reserve="full"), {"pages": 24}),
    ],
)
def test_under_every_policy_and_shape(config: CoreConfig, world: dict[str, object]) -> None:
    """No overlap, no cache, few rows, every order of the queue, pipeline stages, other bands, little memory."""
    world.setdefault("shape", FULL_ONLY)
    for deadly_at in (0, 20):
        serve(crowd(config, 9, deadly_at, **world), 9)  # type: ignore[arg-type]


def test_while_one_is_tried_nobody_else_has_a_row() -> None:
    """All are suspects behind two losses in vain; each runs alone until it got further, then all run together."""
    world = crowd(replace(max_batched_tokens=2048, chunked_prefill_size=64), 31, 0)
    for _ in range(2):
        world.tick()
        world.tick()  # sixteen start in each
        world.end_epoch()
        world.begin()
    del world.deadly["fe", "r31"]  # it was another's fault
    assert world.core.gauges()["suspects"] == COUNT
    together = 0
    while world.turn():
        gauges = world.core.gauges()
        if gauges["suspects"]:
            assert gauges["running"] + gauges["prefilling"] <= 1
        together = max(together, gauges["running"])
    assert together > COUNT // 2
    assert len([one for one in world.verdicts("requeued") if one.reason == "trial"]) == COUNT - 1
    waits = [one for one in world.verdicts("waits") if one.reason == "trial"]
    assert waits[0].numbers == {"suspects": COUNT, "tried": 1}
    world.check_rest()
    assert {client.finished[0].reason for client in world.clients.values()} == {"length"}


def test_a_choice_of_a_prompt_that_kills_takes_the_others_with_it() -> None:
    """What dies of a prompt dies of it in every choice: they are not all tried."""
    world = World(CONFIG)
    world.deadly["fe", "many"] = 3
    world.send("many", 9, 4, n=5)
    world.send("other", 9, 4)
    world.run()
    assert [world.finished("many", choice).reason for choice in range(5)] == ["fault"] * 5
    assert world.finished("other").reason == "length"
    assert lost(world) == 3


def reached(world: World) -> dict[int, int]:
    """How far each live request ever got, in tokens."""
    core = world.core._state
    return {number: standing(core, one)[1] for number, one in core.requests.items()}


def holders(world: World) -> list[int]:
    """Requests with a row."""
    return [number for number, one in world.core._state.requests.items() if one.row >= 0]


def test_kills_between_which_a_request_gets_further_end_nobody() -> None:
    """A rank dies again and again, whenever everybody got a little more; nobody is ever suspected."""
    world = World(CONFIG, pages=400)
    for number in range(6):
        world.send(f"r{number}", 60 + number, 60)
    deaths = 0
    while world.core.gauges()["live"]:
        before = reached(world)
        while world.turn():
            now, running = reached(world), holders(world)
            if running and all(now[number] >= before[number] + ENOUGH_TOKENS for number in running):
                break
        world.end_epoch()
        world.begin()
        deaths += 1
        assert world.core.gauges()["suspects"] == 0
    world.check_rest()
    assert deaths > RESTARTS_MAX
    assert {client.finished[0].reason for client in world.clients.values()} == {"length"}


@pytest.mark.parametrize(("most", "deaths"), [(1, 2), (2, 2), (3, 3), (6, 6)])
def test_how_many_deaths_it_takes(most: int, deaths: int) -> None:
    """As many as configured, the last one in a trial; a request that is alone anyway needs no more."""
    world = World(replace(epoch_losses_max=most))
    world.deadly["fe", "poison"] = 0
    world.send("poison", 9, 4)
    world.run()
    assert world.finished("poison").reason == "fault"
    assert lost(world) == deaths


def test_zero_never_ends_nor_tries_anybody() -> None:
    """Then ranks are started again as long as the daemon does."""
    world = World(replace(epoch_losses_max=0))
    world.deadly["fe", "poison"] = 0
    world.send("poison", 9, 4)
    for _ in range(60):
        world.turn()
    assert lost(world) > 10
    assert world.core.gauges()["live"] == 1
    assert world.core.gauges()["suspects"] == 0


def test_the_next_life_knows_what_died_under_whom() -> None:
    """Losses and how far a request ever got are taken over; that an earlier chunk comes back is no progress there."""
    world = World(CONFIG)
    world.deadly["fe", "poison"] = 20
    world.send("poison", 40, 4)
    while lost(world) < 2:
        world.turn()
    (left,) = world.core.recoverable()
    assert (left.choices[0].losses, left.choices[0].furthest_tokens) == (1, 16)
    world.restart()
    assert world.core.recoverable() == [left]
    world.begin()
    world.run()
    assert world.finished("poison").reason == "fault"
    assert lost(world) == 4


def test_what_waited_while_epochs_died_is_no_suspect() -> None:
    """Who had no row keeps its count; who is aborted or passes its deadline leaves the line."""
    world = crowd(replace(max_running_requests=2), 0, 0)
    while lost(world) < 2:
        world.turn()
    assert list(world.core._state.suspects) == [1, 2]
    assert world.core.view()["requests"][5]["losses"] == 0
    world.abort("r1")
    assert list(world.core._state.suspects) == [1]
    world.run()
    assert world.finished("r0").reason == "fault"


def serve_with_a_slow_poison(world: World, poison: int, gets: int) -> int:
    """To the end; a rank dies whenever this request got so much further in the epoch. How many times."""
    deaths, before = 0, reached(world)
    while world.turn() and deaths < 50:
        if poison in holders(world) and reached(world)[poison] >= before[poison] + gets:
            world.end_epoch()
            world.begin()
            deaths += 1
            before = reached(world)
    world.check_rest()
    return deaths


@pytest.mark.parametrize("gets", [1, 2, ENOUGH_TOKENS - 1])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_what_gets_a_little_further_each_time_before_it_kills_is_found_too(count: int, gets: int) -> None:
    """As what dies of decoding behind each prefill: it ends alone, within the restarts that there are."""
    world = World(CONFIG, pages=600)
    for number in range(count):
        world.send(f"r{number}", [number, *range(1, 24 + number)], 40)
    poison = world.clients["fe", f"r{count // 2}"].accepted.first_request
    while reached(world)[poison] < 24:  # its prompt is computed in an epoch that goes on
        world.turn()
    deaths = serve_with_a_slow_poison(world, poison, gets)
    reasons = {id: client.finished[0].reason for (_, id), client in world.clients.items()}
    assert reasons.pop(f"r{count // 2}") == "fault"
    assert set(reasons.values()) <= {"length"}
    assert 3 <= deaths <= RESTARTS_MAX - 1
    detail = world.finished(f"r{count // 2}").detail
    assert f"before it got {ENOUGH_TOKENS} tokens further, and in the last one nobody else ran" in detail


def test_what_gets_enough_further_each_time_is_never_tried() -> None:
    """Ranks that die now and then under a request that goes on in between say nothing about it."""
    world = World(CONFIG)
    world.send("long", 20, 120)
    deaths = serve_with_a_slow_poison(world, 1, ENOUGH_TOKENS)
    assert deaths > RESTARTS_MAX
    assert world.finished("long").reason == "length"
    assert not [one for one in world.verdicts("admitted") if "losses" in one.numbers]


@pytest.mark.parametrize("prompt", [1, 3, 20])
def test_a_trial_goes_on_until_enough(prompt: int) -> None:
    """Prompt positions that no epoch had reached count, and tokens; with eight of them the next one is tried."""
    world = World(replace(max_batched_tokens=2048, chunked_prefill_size=64))
    for name in ("a", "b"):
        world.send(name, prompt, 40)
    for _ in range(2):
        world.tick()
        world.end_epoch()
        world.begin()
    assert world.core.gauges()["suspects"] == 2
    while world.core.gauges()["suspects"] == 2:
        assert holders(world) in ([], [1])
        assert standing(world.core._state, world.core._state.requests[1])[1] < ENOUGH_TOKENS
        world.turn()
    assert reached(world)[1] == max(ENOUGH_TOKENS, prompt + 1)
    world.run()
    world.check_rest()
