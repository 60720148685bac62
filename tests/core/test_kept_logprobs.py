"""Log probabilities that are kept for clients that come back: counted as they are, and bounded."""

from __future__ import annotations

import heapq

import msgspec
import numpy as np
import pytest

from allocator.columns import pack_i64
from daemon.core import inputs, kept_logprobs, processing
from daemon.core.kept_logprobs import ENTRY_BYTES, NOT_KNOWN, PLACE_BYTES, size, size_of
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from daemon.core.state import CoreState
from ipc.messages import Continued, RequestLogprobs, Sampling
from tests.core.scenes import drive
from tests.core.test_lives import busy
from tests.core.world import World

CONFIG = CoreConfig(page_size=4, max_running_requests=3, max_batched_tokens=16, chunked_prefill_size=8)
SCORED = Sampling(temperature=0.0, logprobs=2, prompt_logprobs=2)
BOUND = "daemon.core.kept_logprobs.LIVE_BYTES_MAX"
TOKEN_BYTES = ENTRY_BYTES + 8 + 2 * 12  # with two alternatives


def held(world: World) -> dict[int, list[list[RequestLogprobs]]]:
    """What the core holds of choices of groups that go on, by their numbers."""
    state = world.core.state
    live = {number: [one.prompt_logprobs, one.output_logprobs] for number, one in state.requests.items()}
    ended = {
        group.accepted.first_request + choice: [entries, []]
        for group in state.groups.values()
        if group.live
        for choice, entries in group.logprobs.items()
    }
    return {number: lists for number, lists in (live | ended).items() if any(lists)}


def held_bytes(world: World) -> int:
    """The bytes of that, counted one by one."""
    return sum(size_of(entries) for lists in held(world).values() for entries in lists)


def counted(world: World, item: inputs.Input, out: Outputs) -> None:
    """A watcher: the core's own count is that, of each choice too, and what it need not look at again is lean."""
    kept, lists = world.core.state.kept_logprobs, held(world)
    assert kept.kept_bytes == held_bytes(world), type(item).__name__
    assert {number: holder.has_bytes for number, holder in kept.holders.items()} == {
        number: sum(map(size_of, both)) for number, both in lists.items()
    }
    for number, holder in kept.holders.items():
        for entries, lean in zip(lists[number], holder.lean, strict=True):
            assert lean <= len(entries)
            assert all(lean_already(entry) for entry in entries[:lean])


def lean_already(entry: RequestLogprobs) -> bool:
    return size(entry) == PLACE_BYTES or (entry.prompt_position >= 0 and entry.values.k == 0)


def chosen(entries: list[RequestLogprobs]) -> list[float]:
    return [value for entry in entries for value in np.frombuffer(entry.values.chosen, "<f4").tolist()]


def continued(out: Outputs) -> tuple[list[float], list[float]]:
    """What a client that comes back is told of its prompt and of its output."""
    message = out.replies[0].message
    assert isinstance(message, Continued)
    prompt = [entry for entry in message.logprobs if entry.prompt_position >= 0]
    return chosen(prompt), chosen(message.logprobs[len(prompt) :])


@pytest.mark.parametrize("bound_bytes", [kept_logprobs.LIVE_BYTES_MAX, 12 * TOKEN_BYTES])
@pytest.mark.parametrize("end", ["run", "abort", "lost", "adopt"])
def test_what_is_kept_is_counted_as_it_is(end: str, bound_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through prefill, retraction, ends of choices, restarts, forgetting, and clients that bring their own tokens."""
    monkeypatch.setattr(BOUND, bound_bytes)
    world = busy()
    world.watchers.append(counted)
    world.send("more", 20, 9, sampling=SCORED, n=2)
    drive(world, lambda: len(world.output("more")) >= 3 and world.quiet >= 4)
    world.restart(lost_inputs=4 if end == "adopt" else 0)
    assert held_bytes(world) > 0
    world.settle()
    assert ("adopted" in {one.reason for one in world.verdicts("resumed")}) == (end == "adopt")
    world.end_epoch()
    world.begin()
    if end == "abort":
        world.abort("more")
    if end == "lost":
        world.feed(inputs.FrontEndLost(world.now_ns, "fe"))
    for _ in range(400):
        world.turn()
    assert held_bytes(world) == 0


def test_beyond_the_bound_the_oldest_of_the_largest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was told at once misses nothing; who comes back for everything gets the newest, and all places."""
    bound_bytes = 24 * TOKEN_BYTES
    monkeypatch.setattr(BOUND, bound_bytes)
    world = World(CONFIG)
    world.watchers.append(counted)
    world.watchers.append(lambda world, item, out: within(world, bound_bytes))
    world.send("long", 3, 60, sampling=Sampling(temperature=0.0, logprobs=2))
    drive(world, lambda: len(world.output("long")) == 20)
    world.send("short", 3, 9, sampling=Sampling(temperature=0.0, logprobs=2))
    drive(world, lambda: len(world.output("short")) == 8)
    long, short = world.clients["fe", "long"], world.clients["fe", "short"]
    assert list(long.logprobs[0]) == long.tokens[0]
    told = world.core.gauges()["forgotten_logprobs_total"]
    assert told > 0
    everything = world.core.feed(inputs.Resumed(world.now_ns, "fe", "long", 0, b""))
    _, output = continued(everything)
    assert len(output) == len(long.tokens[0])
    assert output == [NOT_KNOWN] * told + [float(token) for token in long.tokens[0][told:]]
    _, output = continued(world.core.feed(inputs.Resumed(world.now_ns, "fe", "short", 0, b"")))
    assert output == [float(token) for token in short.tokens[0]], "it has less: nothing of it is forgotten"
    world.run()
    world.check_rest()


def within(world: World, bound_bytes: int) -> None:
    places = PLACE_BYTES * sum(client.accepted.max_tokens for client in world.clients.values())
    assert world.core.state.kept_logprobs.kept_bytes <= bound_bytes + places


def test_of_a_prompt_the_alternatives_are_forgotten_and_its_positions_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that comes back hears of every position, in order; those that are gone as not known."""
    monkeypatch.setattr(BOUND, 4 * ENTRY_BYTES)
    world = World(CONFIG)
    world.watchers.append(counted)
    world.send("a", 90, 9, sampling=SCORED)
    drive(world, lambda: len(world.output("a")) == 4)
    prompt, output = continued(world.core.feed(inputs.Resumed(world.now_ns, "fe", "a", 0, b"")))
    assert len(prompt) == 89
    gone = prompt.count(NOT_KNOWN)
    assert gone > 0
    assert prompt[:gone] == [NOT_KNOWN] * gone
    assert len(output) == 4
    world.run()
    world.check_rest()


def test_what_an_earlier_life_kept_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds behind the first input; what was not known before takes no room of its own."""
    world = World(CONFIG)
    world.send("a", 3, 60, sampling=Sampling(temperature=0.0, logprobs=2))
    drive(world, lambda: len(world.output("a")) == 40)
    monkeypatch.setattr(BOUND, 20 * TOKEN_BYTES)
    for _ in range(2):
        world.restart()
        assert world.core.state.kept_logprobs.kept_bytes == held_bytes(world) <= 20 * TOKEN_BYTES
    world.watchers.append(counted)
    _, output = continued(world.core.feed(inputs.Resumed(world.now_ns, "fe", "a", 0, b"")))
    gone = output.count(NOT_KNOWN)
    assert 20 <= gone < 40
    assert output[gone:] == [float(token) for token in world.output("a")[gone:]]


def test_a_bound_that_cannot_be_kept_is_not_tried_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt without alternatives cannot be made less: the choices are looked through again when an eighth of the
    bound was added, here every third or fourth time."""
    monkeypatch.setattr(BOUND, 8000)
    looked: list[int] = []
    whole = heapq.heapify

    def heapify(most: list[tuple[int, int]]) -> None:
        looked.append(len(most))
        whole(most)

    monkeypatch.setattr(heapq, "heapify", heapify)
    world = World(CONFIG)
    world.watchers.append(counted)
    world.send("a", 160, 60, sampling=Sampling(temperature=0.0, logprobs=0, prompt_logprobs=0))
    drive(world, lambda: len(world.output("a")) == 59)
    assert 10 < len(looked) <= 25
    assert held_bytes(world) > 8000 - 1000, "less than that cannot be had"
    world.run()
    world.check_rest()


def test_what_stays_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is kept, and however much was forgotten before: forgetting looks at the entries that go."""
    monkeypatch.setattr(BOUND, 60 * TOKEN_BYTES)
    world = World(msgspec.structs.replace(CONFIG, max_running_requests=8, max_batched_tokens=64), pages=400)
    world.watchers.append(counted)
    for number in range(5):
        world.send(f"r{number}", 3, 90, sampling=Sampling(temperature=0.0, logprobs=2))
    looked: list[RequestLogprobs] = []
    forgot: list[int] = []

    def count(entry: RequestLogprobs) -> int:
        looked.append(entry)
        return size(entry)

    bound = kept_logprobs.bound

    def watched(core: CoreState) -> None:
        looked.clear()
        before = core.totals.forgotten_logprobs
        with monkeypatch.context() as patch:
            patch.setattr(kept_logprobs, "size", count)
            bound(core)
        forgot.append(core.totals.forgotten_logprobs - before)
        assert len(looked) == 2 * forgot[-1], "as it was, and what stands there now"

    monkeypatch.setattr(processing, "bound", watched)
    world.run()
    assert sum(map(bool, forgot)) > 20
    world.check_rest()


def test_what_comes_behind_a_clients_own_tokens_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client brings fewer tokens than were forgotten: where those stood, there are others to forget."""
    monkeypatch.setattr(BOUND, 12 * TOKEN_BYTES)
    world = World(CONFIG)
    world.watchers.append(counted)
    world.send("a", 3, 60, sampling=Sampling(temperature=0.0, logprobs=2))
    drive(world, lambda: len(world.output("a")) == 20)
    (holder,) = world.core.state.kept_logprobs.holders.values()
    assert holder.lean[1] > 5
    world.core.feed(inputs.Resumed(world.now_ns, "fe", "a", 0, pack_i64([1, 2])))
    (holder,) = world.core.state.kept_logprobs.holders.values()
    assert (holder.lean, holder.has_bytes) == ((0, 2), 2 * PLACE_BYTES)
