"""The prefix cache through the scheduler: incidents and user reports as scenarios, every step read by the rank double.

The double models KV and states by hashes of all tokens before them, so a hit that names a stale page, a window unit
that is gone or a state of other tokens fails in the step that reads it.
"""

from __future__ import annotations

from random import Random

import pytest

from allocator.columns import i64
from daemon.core import caching, inputs, pressure
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided, Outputs
from tests.core.rank_double import Shape
from tests.core.world import World, facts

STATE = Shape(state=True)
WINDOW = Shape(windows=(9,))
EVERYTHING = Shape(windows=(21, 6), state=True)
SHAPES = {"full": Shape(), "window": WINDOW, "state": STATE, "everything": EVERYTHING}


def world(shape: Shape = STATE, pages: int = 200, **fields: object) -> World:
    """A world with a prefix cache and checkpoints every eight tokens."""
    settings: dict[str, object] = {
        "page_size": 4,
        "max_running_requests": 6,
        "max_batched_tokens": 64,
        "chunked_prefill_size": 24,
        "checkpoint_interval": 8,
    }
    return World(CoreConfig(**(settings | fields)), pages, shape=shape)  # type: ignore[arg-type]


def tree_of(one: World):  # type: ignore[no-untyped-def]
    """The core's prefix tree."""
    memory = one.core._state.memory
    assert memory is not None
    assert memory.cache is not None
    return memory.cache


def admitted(one: World, number: int = -1) -> Decided:
    """An admission, the newest one by default."""
    return one.verdicts("admitted")[number]


def live_units(one: World) -> tuple[int, ...]:
    """Units live in the arena, per band."""
    memory = one.core._state.memory
    assert memory is not None
    return tuple(memory.live_units())


def evict(one: World, band: int) -> None:
    """Take every unread unit of one band's component away, as pressure could."""
    memory = one.core._state.memory
    assert memory is not None
    memory.give_back(tree_of(one).evict(lambda freed: False, only=band))
    memory.settle()


def retract(one: World, id: str) -> None:
    """Retract a request that has a row, as pressure would, and say so to the shell's double."""
    state, out = one.core._state, Outputs()
    request = state.requests[one.clients["fe", id].accepted.first_request]
    pressure.retract(state, request, 0, {}, one.now_ns, out)
    assert state.memory is not None
    state.memory.settle()
    one.decisions += out.decisions
    one.wants_tick = state.in_flight < 2


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt that shares nothing with others."""
    random = Random(seed)
    return [random.randrange(90) for _ in range(length)]


def turn(one: World, id: str, prompt: list[int], output: int = 4) -> Decided:
    """One request from arrival to end; its admission."""
    one.send(id, prompt, output)
    one.run()
    one.finished(id)
    return admitted(one)


# --- hits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_second_request_starts_behind_what_the_first_computed(shape: str, overlap: bool) -> None:
    """The tokens it need not compute are told to the client, and its output is that of a lone run."""
    one = world(SHAPES[shape], overlap=overlap)
    prompt = prompt_of(1, 40)
    turn(one, "cold", prompt)
    assert one.finished("cold").cached_tokens == 0
    warm = turn(one, "warm", [*prompt, 5, 6, 7])
    assert warm.numbers["cached_tokens"] == one.finished("warm").cached_tokens >= 40
    assert one.finished("warm").hit_cut in ("", "full")
    assert one.output("warm") == one.expected("warm")[0]
    one.check_rest()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_computes_each_token_about_once(shape: str) -> None:
    """Every turn carries all earlier ones; what a turn computes is what is new, and what lies behind a checkpoint."""
    one = world(SHAPES[shape], pages=400)
    history = prompt_of(2, 30)
    for number in range(6):
        found = turn(one, f"turn{number}", history, 9)
        if number:
            assert found.numbers["tokens"] - found.numbers["cached_tokens"] <= 5 + 9 + 8 + 4
        history = [*history, *one.output(f"turn{number}"), *prompt_of(number, 5)]
    one.check_rest()


def test_namespaces_share_nothing() -> None:
    """The same tokens under another salt are computed again; under the same one they are found."""
    one = world(Shape())
    for id, namespace, cached in (("a", "salt:x", 0), ("b", "lora:x", 0), ("c", "salt:x", 36), ("d", "", 0)):
        one.send(id, prompt_of(3, 37), 2, namespace=namespace)
        one.run()
        assert one.finished(id).cached_tokens == cached, id
    one.check_rest()


@pytest.mark.parametrize(("length", "cached"), [(63, 56), (64, 56), (65, 64), (57, 56), (56, 48)])
def test_the_last_grid_point_before_the_last_token_is_always_a_checkpoint(length: int, cached: int) -> None:
    """The same prompt again is found up to there, whatever its length and the chunks."""
    for chunk in (10, 24, 64):
        one = world(STATE, chunked_prefill_size=chunk)
        turn(one, "first", prompt_of(65, length), 1)
        assert turn(one, "again", prompt_of(65, length), 1).numbers["cached_tokens"] == cached
        one.check_rest()


@pytest.mark.parametrize("shape", SHAPES)
def test_asking_for_a_hit_and_waiting_changes_nothing(shape: str) -> None:
    """A request that waits looks again in every pass; the order of eviction does not hear of it."""
    one = world(SHAPES[shape])
    turn(one, "first", prompt_of(66, 40), 1)
    one.send("waits", prompt_of(66, 38), 1)
    core, tree = one.core._state, tree_of(one)
    request = core.requests[2]
    caching.drop(core, caching.hold(core, request, caching.look(core, request)))
    before = tree.content()
    found = caching.look(core, request)
    assert caching.look(core, request) is found, "the tree is not asked again while it would say the same"
    caching.drop(core, caching.hold(core, request, found))
    caching.drop(core, caching.hold(core, request, found, cold=True))
    assert tree.content() == before
    one.run()
    one.check_rest()


def test_owed_prompt_logprobs_are_computed_and_still_cached() -> None:
    """A request that wants the log probability of every prompt token finds nothing; the next one finds its pages."""
    one = world(Shape())
    prompt = prompt_of(4, 33)
    turn(one, "first", prompt)
    sampling = one.clients["fe", "first"].generate.sampling
    scored = type(sampling)(temperature=0.0, prompt_logprobs=0)
    one.send("scored", prompt, 2, sampling=scored)
    one.run()
    assert one.finished("scored").cached_tokens == 0
    assert turn(one, "third", prompt).numbers["cached_tokens"] == 32
    one.check_rest()


def test_equal_prompts_computed_at_once_end_up_as_one() -> None:
    """Requests that start together compute the same pages; the tree keeps one copy and every row goes on with it."""
    for shape in SHAPES.values():
        one = world(shape)
        prompt = prompt_of(5, 41)
        for number in range(4):
            one.send(f"r{number}", prompt, 12)
        one.run()
        assert tree_of(one).held()[-1] <= 13 + 4 * 4, "41 shared tokens, and four different outputs"
        one.check_rest()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [100, 300, 5000])
@pytest.mark.parametrize("windows", [(65,), (200, 65)])
def test_a_prompt_that_leaves_another_at_its_mark_finds_all_before_it(
    windows: tuple[int, ...], chunk: int, overlap: bool
) -> None:
    """Windows of a chunk move on before it is reported; the one before the last multiple of 512 tokens is cached."""
    config = CoreConfig(
        page_size=4, max_running_requests=6, max_batched_tokens=5000, chunked_prefill_size=chunk, overlap=overlap
    )
    for length in (513, 700, 1000, 1024, 1500):
        one = World(config, 1200, facts(97, 2000), shape=Shape(windows=windows))
        mark = (length - 1) // 512 * 512
        turn(one, "first", prompt_of(72, length), 90)
        found = turn(one, "next", [*prompt_of(72, length)[:mark], *prompt_of(73, 50)], 3)
        assert found.numbers["cached_tokens"] == mark
        assert one.output("next") == one.expected("next")[0]
        one.check_rest()


# --- what cuts a hit -------------------------------------------------------------------------------------------------


def test_P2_no_shared_prefix_and_no_usable_checkpoint_are_told_apart() -> None:
    """A prompt shorter than the interval is known but has no checkpoint; an unknown one is unknown."""
    one = world(STATE)
    turn(one, "short", prompt_of(6, 7), 1)
    again = turn(one, "again", prompt_of(6, 7), 1)
    assert (again.numbers["cached_tokens"], again.numbers["matched_tokens"], again.reason) == (0, 4, "state")
    other = turn(one, "other", prompt_of(7, 7), 1)
    assert (other.numbers["cached_tokens"], other.numbers["matched_tokens"], other.reason) == (0, 0, "full")
    assert (one.finished("again").hit_cut, one.finished("other").hit_cut) == ("state", "full")


@pytest.mark.parametrize(("band", "name"), [(0, "state"), (1, "window:21"), (2, "window:6")])
def test_P3_after_only_one_kind_was_evicted_the_hit_is_valid_in_all(band: int, name: str) -> None:
    """Without its states, or without its window units, a cached prefix is not used, and the output is a lone run's."""
    one = world(EVERYTHING)
    prompt = prompt_of(8, 50)
    turn(one, "cold", prompt)
    evict(one, band)
    found = turn(one, "again", prompt)
    assert found.numbers["cached_tokens"] == 0
    assert found.numbers["matched_tokens"] == 48
    assert found.reason == name
    assert one.output("again") == one.expected("again")[0]
    assert turn(one, "third", prompt).numbers["cached_tokens"] == 48, "what was missing was given again"
    one.check_rest()


def test_P7_the_counter_of_cached_tokens_equals_the_sum_in_the_journal() -> None:
    """Tokens skipped by reuse, as the decisions say, are the counter's, retractions and all."""
    one = world(EVERYTHING, pages=120)
    random = Random(7)
    for number in range(25):
        one.send(f"r{number}", prompt_of(random.randrange(3), random.randrange(10, 60)), random.randrange(1, 30))
        for _ in range(random.randrange(4)):
            one.tick() if one.wants_tick else one.run()
    one.run()
    told = sum(decision.numbers["cached_tokens"] for decision in one.verdicts("admitted"))
    assert told == one.core.gauges()["cached_tokens_total"] > 0
    first = {decision.request: decision for decision in reversed(one.verdicts("admitted"))}
    for number, (client, choice) in one.by_request.items():
        assert client.finished[choice].cached_tokens == first[number].numbers["cached_tokens"]
    one.check_rest()


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_P9_every_unit_has_one_owner_after_every_input(shape: str) -> None:
    """Forked prompts that overlap: live units are the cache's and the rows' own, band by band, whatever happens."""
    one = world(SHAPES[shape], pages=90)
    random = Random(shape)
    state = one.core._state
    for number in range(30):
        fork = prompt_of(9, 40)[: random.randrange(1, 41)] + prompt_of(random.randrange(4), random.randrange(1, 12))
        one.send(f"r{number}", fork, random.randrange(1, 20))
        for _ in range(random.randrange(6)):
            if one.reports_waiting and (not one.wants_tick or random.random() < 0.5):
                one.report()
            elif one.wants_tick:
                one.tick()
            tree = tree_of(one)
            tree.check([request.lock for request in state.requests.values() if request.lock is not None])
            own = [0] * len(live_units(one))
            for row, owner in enumerate(state.rows.owners):
                if owner is not None:
                    own = [a + len(b) for a, b in zip(own, state.rows.held(row), strict=True)]
            assert live_units(one) == tuple(a + b for a, b in zip(own, tree.held(), strict=True))
            assert tree.held() == tuple(a + b for a, b in zip(tree.locked(), tree.reclaimable(), strict=True))
    one.run()
    one.check_rest()


def test_P10_a_running_request_keeps_what_it_matched_and_nothing_after_its_end() -> None:
    """A match that ends inside a cached run: the rest of the run can be evicted, the matched part cannot."""
    one = world(Shape())
    turn(one, "long", prompt_of(10, 60))
    one.send("reader", [*prompt_of(10, 60)[:22], 1, 2, 3], 30)
    one.tick()
    assert admitted(one).numbers["cached_tokens"] == 20
    before = tree_of(one).held()
    evict(one, 0)
    assert before[0] > tree_of(one).held()[0] == tree_of(one).locked()[0] >= 5
    one.run()
    assert tree_of(one).open_locks == 0
    assert tree_of(one).locked() == (0,)
    one.check_rest()


@pytest.mark.parametrize("shape", SHAPES)
def test_P11_a_resumed_request_works_only_behind_its_new_hit(shape: str) -> None:
    """After a retraction its pages are still cached: the prefill that resumes it starts there, at whatever step."""
    for steps in range(1, 12):
        one = world(SHAPES[shape])
        one.send("victim", prompt_of(20, 40), 30)
        one.send("other", prompt_of(21, 20), 30)
        for _ in range(steps):
            one.tick() if one.wants_tick else one.report()
        retract(one, "victim")
        one.run()
        first, resumed = (decision for decision in one.verdicts("admitted") if decision.request == 1)
        assert first.numbers["cached_tokens"] == 0
        assert resumed.numbers["chunk_tokens"] <= resumed.numbers["tokens"] - resumed.numbers["cached_tokens"]
        if steps > 8:
            assert resumed.numbers["cached_tokens"] >= 40
        assert one.finished("victim").cached_tokens == 0, "usage tells what the first start found"
        one.check_rest()


def test_incident_12_an_impossible_demand_leaves_the_cache_alone() -> None:
    """A prompt that no arena of this size can serve is refused at once, and all cached tokens stay."""
    one = world(Shape(), pages=32)
    turn(one, "cached", prompt_of(12, 96), 1)
    held = tree_of(one).held()
    assert held == (24,)
    one.send("huge", prompt_of(13, 200), 4)
    assert [refusal.code for refusal in one.refusals] == ["never_fits"]
    one.run()
    assert tree_of(one).held() == held


def test_U2_one_unit_too_many_is_served_by_one_eviction() -> None:
    """An arena that the cache fills: a request that needs one page more than is free takes one page from it."""
    one = world(Shape(), pages=32, reserve="full")
    turn(one, "cached", prompt_of(14, 96), 1)
    turn(one, "next", prompt_of(15, 32), 5)
    assert one.core.gauges()["retractions_total"] == 0
    assert tree_of(one).held()[0] == 32, "nothing went that was not needed"
    one.check_rest()


@pytest.mark.parametrize("shape", [*SHAPES, "large state"])
def test_a_hit_never_makes_a_request_too_large(shape: str) -> None:
    """In the smallest arena that accepts it, a request that finds a part of itself cached is served all the same.

    What it found is held beside what it takes, a state for one step: where that is too much it starts cold.
    """
    kinds = SHAPES | {"large state": Shape(state=True, slot_bytes=16 * 256)}
    for length in (30, 40, 47):
        pages = next(n for n in range(8, 400) if not refused(world(kinds[shape], n), length))
        one = world(kinds[shape], pages)
        turn(one, "seed", prompt_of(64, 25), 1)
        found = turn(one, "whole", prompt_of(64, length), 26).numbers["cached_tokens"]
        assert one.finished("whole").reason == "length"
        assert found == (0 if shape == "large state" else 24)
        one.check_rest()


def refused(one: World, length: int) -> bool:
    """Whether a request of this length and 26 output tokens is refused by an empty arena."""
    one.send("asked", length, 26)
    return bool(one.refusals)


@pytest.mark.parametrize("shape", [*SHAPES, "dear window"])
def test_with_full_reserve_nobody_is_retracted_whoever_shares_what(shape: str) -> None:
    """Readers of one prefix share its pages for good, but each replaces its window by units of its own in the end."""
    kinds = SHAPES | {"dear window": Shape(windows=(65,), window_bytes=1024)}
    for pages in (150, 170, 250, 340):
        one = world(kinds[shape], pages, reserve="full", chunked_prefill_size=8)
        turn(one, "first", prompt_of(70, 80), 1)
        for number in range(6):
            one.send(f"r{number}", [*prompt_of(70, 80 - 4 * (number % 2)), *prompt_of(number, 3)], 60)
        one.run()
        assert one.core.gauges()["retractions_total"] == one.core.gauges()["parks_total"] == 0
        assert all(one.finished(f"r{number}").reason == "length" for number in range(6))
        one.check_rest()


def test_U1_cached_prefixes_shrink_for_requests_that_need_state_slots() -> None:
    """The arena is full of cached pages, none in use: short requests that each need slots all run, none retracted."""
    one = world(STATE, pages=100)
    for number in range(6):
        turn(one, f"fill{number}", prompt_of(30 + number, 60), 1)
    full = tree_of(one).held()
    for number in range(12):
        one.send(f"short{number}", prompt_of(50 + number, 6), 6)
    one.run()
    assert not one.verdicts("retracted")
    assert sum(tree_of(one).held()) < sum(full) + 12 * 4
    one.check_rest()


def test_incident_3_what_is_counted_as_reclaimable_is_payable() -> None:
    """States evicted under a reader, then the reader ends: the arena can be had whole, to the last unit."""
    one = world(STATE, pages=60)
    turn(one, "first", prompt_of(16, 40), 2)
    one.send("reader", [*prompt_of(16, 40)[:24], 9, 9, 9], 12)
    one.tick()
    evict(one, 0)
    evict(one, 1)
    one.run()
    turn(one, "large", prompt_of(17, 4 * 40), 4)
    assert one.finished("large").reason == "length"
    one.check_rest()


@pytest.mark.parametrize("shape", SHAPES)
def test_incident_17_a_retracted_reader_shares_again_and_locks_balance(shape: str) -> None:
    """Two requests share a prefix; one is retracted and resumed: the prefix is shared again, locks are as before."""
    one = world(SHAPES[shape])
    turn(one, "seed", prompt_of(18, 41), 1)
    for id in ("a", "b"):
        one.send(id, [*prompt_of(18, 40), ord(id) % 90], 60)
    for _ in range(6):
        one.tick() if one.wants_tick else one.report()
    tree = tree_of(one)
    both, locks = tree.locked(), tree.open_locks
    retract(one, "a")
    assert tree.open_locks == locks - 1
    assert tree.locked()[-1] <= both[-1]
    one.tick() if one.wants_tick else one.report()
    one.tick() if one.wants_tick else one.report()
    assert tree.open_locks == locks
    assert tree.locked()[-1] >= 10
    shared = [d.numbers["cached_tokens"] for d in one.verdicts("admitted") if d.request == 2]
    assert len(shared) == 2
    assert min(shared) >= 40
    one.run()
    assert not any(tree.locked())
    one.check_rest()


# --- state slots -----------------------------------------------------------------------------------------------------


def test_S1_a_request_waits_while_one_of_its_slots_is_missing() -> None:
    """All slots of a request or none: with one of two left the newcomer waits, holds none, and the others decode on."""
    one = world(Shape(state=True, slot_bytes=8 * 256), pages=8 * 3 + 16)
    one.send("first", prompt_of(60, 9), 20)
    for _ in range(3):
        one.tick()
        one.report()
    before = live_units(one)[0]
    one.send("second", prompt_of(61, 9), 20)
    for _ in range(4):
        one.tick()
        one.report()
    assert live_units(one)[0] <= before + 1, "at most a cached checkpoint more, no slot of the newcomer"
    assert [decision.reason for decision in one.verdicts("waits")][-1:] == ["memory"]
    one.run()
    assert len(one.output("first")) == len(one.output("second")) == 20
    one.check_rest()


def test_S2_a_checkpoint_without_a_slot_is_skipped_and_counted() -> None:
    """Memory for no third slot: checkpoints that cannot be given are passed over, and the request runs to its end."""
    one = world(Shape(state=True, slot_bytes=16 * 256), pages=16 * 2 + 15)
    turn(one, "only", prompt_of(62, 30), 26)
    totals = one.core.gauges()
    assert totals["checkpoints_kept_total"] >= 4
    assert totals["checkpoints_skipped_total"] >= 1
    assert one.finished("only").reason == "length"
    one.check_rest()


def test_S4_sessions_that_come_and_go_leave_every_slot() -> None:
    """After hundreds of sessions the arena, once flushed, is what it was at the start."""
    one = world(EVERYTHING, pages=150)
    for number in range(300):
        one.send(f"s{number}", prompt_of(number % 7, 5 + number % 23), 1 + number % 11)
        if number % 5 == 0:
            one.tick() if one.wants_tick else None
            one.abort(f"s{number}")
        one.run()
        assert tree_of(one).open_locks == 0
        assert live_units(one) == tree_of(one).held()
    evict(one, 3)
    evict(one, 0)
    assert live_units(one) == (0, 0, 0, 0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["extra_buffer", "no_buffer"])
def test_S7_hits_misses_retractions_and_resumes_in_any_order_equal_cold_runs(mode: str, overlap: bool) -> None:
    """States are rolling hashes: whatever a slot held before, each request computes what it would alone."""
    for seed in range(6):
        random = Random(seed)
        page_size = 4 if mode == "extra_buffer" else 1
        one = world(EVERYTHING, 90 * 4 // page_size, overlap=overlap, state_cache=mode, page_size=page_size)
        for number in range(20):
            prompt = prompt_of(random.randrange(3), random.randrange(4, 50)) + prompt_of(number, random.randrange(4))
            if number and random.random() < 0.5:
                one.run() if random.random() < 0.7 else None
                before = one.clients["fe", f"r{number - 1}"]
                prompt = [*i64(before.generate.prompt).tolist(), *before.tokens[0], *prompt[:5]]
            one.send(f"r{number}", prompt, random.randrange(1, 25))
            for _ in range(random.randrange(5)):
                if one.wants_tick and (not one.reports_waiting or random.random() < 0.6):
                    one.tick()
                elif one.reports_waiting:
                    one.report()
        one.run()
        one.check_rest()
        assert one.core.gauges()["cached_tokens_total"] > 0
        assert one.core.gauges()["checkpoints_given_total"] > 0


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_without_checkpoints_a_state_that_consumed_an_uncommitted_token_is_not_given(ahead: int) -> None:
    """A stop string found with steps in flight: the state behind tokens that nobody has seen goes with the row."""
    one = world(STATE, state_cache="no_buffer", page_size=1, pages=400)
    one.send("stopped", prompt_of(67, 20), 30)
    while len(one.output("stopped")) < 6 or one.reports_waiting:
        one.report() if one.reports_waiting else one.tick()
    for _ in range(ahead):
        one.tick()
    one.feed(inputs.FinishAsked(one.now_ns, "fe", "stopped", 0, 6))
    assert tree_of(one).held() == ((1, 25 + ahead) if ahead < 2 else (0, 25))
    one.run()
    going_on = [*prompt_of(67, 20), *one.output("stopped")[:6], 1, 2, 3]
    found = turn(one, "next", going_on, 3)
    assert found.numbers["cached_tokens"] == (25 + ahead if ahead < 2 else 0)
    one.check_rest()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("output", [1, 2, 9, 10, 17])
def test_a_request_that_ends_on_the_grid_leaves_its_state_there(output: int, overlap: bool) -> None:
    """Its working slot is the checkpoint: the next turn starts at the newest grid point it reached."""
    one = world(EVERYTHING, overlap=overlap)
    turn(one, "turn", prompt_of(71, 48), output)
    found = turn(one, "next", [*prompt_of(71, 48), *one.output("turn"), 1, 2], 2)
    assert found.numbers["cached_tokens"] == (48 + output - 1) // 8 * 8
    one.check_rest()


def test_a_gift_that_comes_late_is_whole() -> None:
    """No slot is free when a checkpoint is kept: the window behind it waits with it, and a hit there is usable."""
    one = world(Shape(windows=(9,), state=True, slot_bytes=16 * 256), checkpoint_interval=32)
    memory = one.core._state.memory
    assert memory is not None
    one.send("slow", prompt_of(68, 34), 90)
    one.tick()
    taken = memory.take(memory.demand(memory.chain.max_extra(memory.demand(9), memory.demand(1))))
    while one.core.gauges()["output_tokens_total"] < 22:
        one.tick() if one.wants_tick else one.report()
    assert one.core.gauges()["checkpoints_skipped_total"] == 1
    assert one.core.gauges()["checkpoints_given_total"] == 0
    evict(one, 1)
    memory.give_back(taken)
    while one.core.gauges()["output_tokens_total"] < 26:
        one.tick() if one.wants_tick else one.report()
    assert one.core.gauges()["checkpoints_given_total"] == 1
    row = one.core._state.requests[1].row
    first = int(one.core._state.rows.window_first[row, 0])
    assert first >= (int(one.core._state.rows.scheduled[row]) - 9 - 8) // 4, "what was held back is let go"
    one.send("hit", prompt_of(68, 34), 4)
    for _ in range(4):
        one.tick() if one.wants_tick else one.report()
    assert admitted(one).numbers["cached_tokens"] == 32
    one.run()
    one.check_rest()


@pytest.mark.parametrize("shape", ["window", "everything"])
def test_window_units_that_were_given_are_let_go_as_the_row_moves_on(shape: str) -> None:
    """They stay cached, but nobody holds them: memory can have them while the request still runs."""
    one = world(SHAPES[shape])
    one.send("long", prompt_of(69, 40), 70)
    most = 0
    while one.wants_tick or one.reports_waiting:
        one.tick() if one.wants_tick else one.report()
        if one.core.gauges()["output_tokens_total"] > 40 and one.core.gauges()["live"]:
            locked, held = tree_of(one).locked(), tree_of(one).held()
            windows = slice(1, -1) if shape == "everything" else slice(0, 1)
            assert sum(locked[windows]) <= (0 if shape == "window" else 6 + 2)
            most = max(most, sum(held[windows]))
    assert most > 0, "they are still there"
    one.check_rest()


def test_incident_20_the_window_behind_a_checkpoint_always_advances() -> None:
    """No slot is ever free for a gift: window units held stay within what was priced, and the request finishes."""
    shape = Shape(windows=(8,), state=True, slot_bytes=16 * 256)
    one = world(shape, pages=16 * 2 + 40, checkpoint_policy="grid")
    one.send("long", prompt_of(63, 10), 90)
    most = 0
    while one.wants_tick or one.reports_waiting:
        one.tick() if one.wants_tick else one.report()
        most = max(most, live_units(one)[1] - tree_of(one).reclaimable()[1])
    assert one.finished("long").reason == "length"
    assert most <= one.core._state.memory.ceiling(100)[1]  # type: ignore[union-attr]
    assert one.core.gauges()["checkpoints_skipped_total"] > 0
    one.check_rest()
