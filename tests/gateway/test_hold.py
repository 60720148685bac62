"""Hold-back: an acceptance waits for the disk, and what belongs to its request waits behind it; nothing else does."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np

from daemon.core.outputs import Reply, TokenColumns
from daemon.gateway_hold import HoldBack, Released
from ipc.messages import Accepted, Finished, Logprobs, Refused, RequestLogprobs
from tests.gateway.harness import accepted, columns, finished

Event = tuple[str, int]  # ("accepted" | "token" | "finished", value), of one request


def test_an_acceptance_waits_for_its_sequence() -> None:
    """Not one record earlier; and what was never held leaves at once."""
    hold = HoldBack()
    assert not hold.reply(accepted(0, "a", 1), 10)
    assert hold.durable(9) == []
    assert hold.durable(10) == [accepted(0, "a", 1)]
    assert hold.hold_from is None
    assert hold.reply(accepted(0, "b", 2), 10)  # already on disk
    assert hold.reply(Reply(0, Refused("c", "queue_full", "full")), 99)


def test_tokens_and_end_wait_behind_their_acceptance_and_nobody_elses() -> None:
    """Request 1 is on disk and flows; request 2's token and end stay behind its acceptance, in order."""
    hold = HoldBack()
    assert hold.reply(accepted(0, "a", 1), 0)
    assert not hold.reply(accepted(0, "b", 2), 5)
    now = hold.tokens(columns(1, [(0, 1, 11), (0, 2, 22)]))
    assert (now.requests.tolist(), now.tokens.tolist()) == ([1], [11])
    assert hold.reply(finished(0, "a", 1), 6)
    assert not hold.reply(finished(0, "b", 2), 6)
    first, second, third = hold.durable(5)
    assert first == accepted(0, "b", 2)
    assert isinstance(second, TokenColumns)
    assert second.tokens.tolist() == [22]
    assert third == finished(0, "b", 2)
    assert len(hold) == 0


def test_a_repeated_acceptance_of_a_durable_request_does_not_wait() -> None:
    """A front end that asks again about an old id gets its answer at once; about a held one, behind the first."""
    hold = HoldBack()
    assert hold.reply(accepted(0, "a", 1), 0)
    assert not hold.reply(accepted(0, "b", 2), 5)
    assert hold.reply(accepted(0, "a", 1), 6)
    assert not hold.reply(accepted(0, "b", 2), 7)
    assert hold.durable(5) == [accepted(0, "b", 2), accepted(0, "b", 2)]


def test_log_probabilities_of_a_held_request_wait_too() -> None:
    """Also those of a prompt, which come without a token."""
    values = Logprobs(0, b"", b"", b"", b"")
    hold = HoldBack()
    assert not hold.reply(accepted(0, "a", 3), 5)
    mine, others = RequestLogprobs(3, 1, values), RequestLogprobs(2, 1, values)
    now = hold.tokens(columns(1, [], [mine, others]))
    assert now.logprobs == [others]
    _, later = hold.durable(5)
    assert isinstance(later, TokenColumns)
    assert later.logprobs == [mine]


def test_any_interleaving_keeps_each_requests_order_and_loses_nothing() -> None:
    """Random lives of many requests against random progress of the disk: per request the events come out complete and
    in order, never before the acceptance is durable, and never later than they must."""
    for seed in range(200):
        rng = random.Random(seed)
        hold, sequence, synced, newest = HoldBack(), 0, 0, 0
        accepted_at: dict[int, int] = {}
        running: list[int] = []
        wanted: dict[int, list[Event]] = defaultdict(list)
        got: dict[int, list[Event]] = defaultdict(list)

        def leave(items: list[Released], got: dict[int, list[Event]] = got) -> None:
            for item in items:
                for number, event in events_of(item):
                    got[number].append(event)

        for step in range(60):
            sequence += rng.randrange(1, 4)
            for _ in range(rng.randrange(3)):
                newest += rng.randrange(1, 3)
                accepted_at[newest] = sequence
                running.append(newest)
                wanted[newest].append(("accepted", 0))
                reply = accepted(0, str(newest), newest)
                leave([reply] if hold.reply(reply, sequence) else [])
            chosen = [number for number in running if rng.random() < 0.6]
            for number in chosen:
                wanted[number].append(("token", step))
            leave([hold.tokens(columns(step, [(0, number, step) for number in chosen]))])
            for number in [number for number in running if rng.random() < 0.15]:
                running.remove(number)
                wanted[number].append(("finished", 0))
                reply = finished(0, str(number), number)
                leave([reply] if hold.reply(reply, sequence) else [])
            if rng.random() < 0.4:
                synced = rng.randrange(synced, sequence + 1)
                leave(hold.durable(synced))
            for number, events in wanted.items():
                assert got[number] == (events if accepted_at[number] <= synced else []), (seed, step, number)
        leave(hold.durable(sequence))
        assert {number: events for number, events in got.items() if events} == wanted
        assert len(hold) == 0
        assert hold.hold_from is None


def events_of(item: Released) -> list[tuple[int, Event]]:
    """(request, event) pairs of something that left."""
    if isinstance(item, TokenColumns):
        assert len(item.requests) == len(np.unique(item.requests))
        return [
            (request, ("token", token))
            for request, token in zip(item.requests.tolist(), item.tokens.tolist(), strict=True)
        ]
    message = item.message
    if isinstance(message, Accepted):
        return [(message.first_request, ("accepted", 0))]
    assert isinstance(message, Finished)
    return [(message.request, ("finished", 0))]
