"""Cancels: the books of a crowd, the pauses, what the journal has, and what is called a stall or lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from rich.console import Console

from allocator.columns import i64, pack_i32, pack_i64
from daemon.core.inputs import Aborted, Arrived, Reported
from daemon.core.outputs import Decided
from ipc.messages import Accepted, Finished, Generate, Refused, Sampling, TokenBatch
from journal.reader import Record
from journal.records import KIND_OF, encode
from tools.cancels import asks, kept, trail
from tools.cancels.books import Books
from tools.cancels.kept import Kept
from tools.cancels.pauses import Span, figures, pauses, steps_between
from tools.cancels.result import Bounds, row_of
from tools.cancels.round import Mark, Seen
from tools.cancels.run import Result
from tools.cancels.show import held, print_result
from tools.cancels.trail import Trail

MS = 1_000_000


# --- what is asked


def test_the_same_requests_can_be_asked_again() -> None:
    """By seed, round and place alone; no two prompts begin alike, and some of a crowd take several steps."""
    first, second = asks.crowd(1, 1, 20), asks.crowd(1, 1, 20)
    assert first == second
    others = [*first, *asks.crowd(1, 2, 20), *asks.crowd(2, 1, 20), *asks.kept(1, 1, 20)]
    assert len({tuple(i64(ask.prompt)[:4].tolist()) for ask in others}) == 80
    assert len({ask.id for ask in [*first, *asks.crowd(1, 2, 20), *asks.kept(1, 1, 20)]}) == 60
    assert sum(len(i64(ask.prompt)) >= asks.LONG[0] for ask in first) == 10
    assert {ask.sampling.temperature for ask in asks.kept(1, 1, 4)} == {0.0, 0.8}
    assert sorted(asks.order(1, 1, 50)) == list(range(50))
    assert asks.order(1, 1, 50) != asks.order(1, 2, 50)


def test_a_repeated_request_finds_nothing_of_the_first() -> None:
    """Prompt and sampling are the same, name and cache key are not, and it ends where the first did."""
    ask = asks.kept(1, 1, 2)[1]
    repeated = asks.again(ask, 17)
    assert (repeated.prompt, repeated.sampling) == (ask.prompt, ask.sampling)
    assert (repeated.max_tokens, repeated.id != ask.id, repeated.namespace != ask.namespace) == (17, True, True)


# --- what a crowd is told


def told(*messages: Any) -> Books:
    """The books of a crowd of a and b, both accepted, behind these messages."""
    books = Books(["a", "b"])
    for message in (accepted("a", 1), accepted("b", 2), *messages):
        books.take(message, 1.5)
    return books


def accepted(id_: str, number: int) -> Accepted:
    return Accepted(id_, number, 1, 100, 7)


def tokens(*numbers: int) -> TokenBatch:
    return TokenBatch(1, pack_i64(numbers), pack_i64(numbers))


def end(id_: str, reason: str = "abort", output: int = 0) -> Finished:
    return Finished(id_, 0, {"a": 1, "b": 2}[id_], reason, "", 3, output)


def test_a_crowd_that_was_answered_once_each() -> None:
    """Nothing is wrong, and the counts are those of the messages."""
    books = told(tokens(1, 2), tokens(1), end("a", output=2), end("b", output=1))
    assert books.problems() == []
    assert (books.accepted, books.answered, books.ended, books.decoding, books.last_end_s) == (2, 2, 2, 0, 1.5)
    assert told(tokens(2)).decoding == 1


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([end("a")], "1 of 2 were not answered: b"),
        ([end("a"), end("b"), end("b")], "1 of 2 were told more than one end: b"),
        ([end("a"), end("b", "length")], "1 of 2 ended otherwise than by their cancel: b"),
        ([end("a"), end("b"), tokens(2)], "1 of 2 got tokens behind their end: b"),
        ([tokens(1), end("a", output=2), end("b")], "1 of 2 got other numbers of tokens than their end says: a"),
        ([end("a"), Refused("b", "queue_full", "full")], "1 of 2 were refused: b"),
        ([end("a"), end("b"), accepted("c", 3)], "1 messages of type Accepted about nothing asked"),
        ([end("a"), end("b"), tokens(9)], "1 messages of type TokenBatch about nothing asked"),
    ],
)
def test_whatever_a_crowd_should_not_be_told_is_found(messages: list[Any], words: str) -> None:
    """One thing that is wrong is one sentence that names it."""
    assert words in told(*messages).problems()


# --- pauses


def test_a_pause_belongs_to_where_it_ends() -> None:
    """Whole, so that a stall which begins just before a span is not cut in two short ones."""
    stream = [0.0, 1.0, 5.0, 6.0]
    assert pauses([stream], Span("first", 0.0, 2.0)) == [1.0]
    assert pauses([stream], Span("second", 2.0, 7.0)) == [4.0, 1.0]
    assert pauses([stream, [2.5, 2.75, 3.0], []], Span("between", 2.0, 3.0)) == [0.25, 0.25]
    assert steps_between([[(0, 3), (10, 6), (20, 13)]], Span("late", 12, 30)) == [7]
    assert figures([], 1.0) == {"p50": 0.0, "p99": 0.0, "max": 0.0}
    assert figures([0.001, 0.003, 0.002], 0.001) == {"p50": 2.0, "p99": 2.98, "max": 3.0}


# --- the journal


def records(*payloads: msgspec.Struct) -> list[Record]:
    return [Record(at, KIND_OF[type(one)], encode(one), "", 0) for at, one in enumerate(payloads, 1)]


def arrived(id_: str, at: int, frontend: str = "crowd") -> Arrived:
    return Arrived(at, frontend, Generate(id_, pack_i64([5]), Sampling()), 1)


def decided(what: str, number: int, at: int, reason: str = "", **numbers: int) -> Decided:
    return Decided(at, what, number, reason, numbers)


def reported(seq: int, at: int, *rows: int) -> Reported:
    return Reported(at, 1, seq, pack_i32(rows), pack_i32([1] * len(rows)), pack_i64(rows))


STORY = (
    arrived("k", 1, "keeper"), decided("accepted", 1, 1), decided("admitted", 1, 2, row=0, generation=1),
    arrived("a", 3), decided("accepted", 2, 3), decided("admitted", 2, 4, row=1, generation=1),
    arrived("b", 3), decided("accepted", 3, 3), decided("admitted", 3, 6, row=2, generation=1),
    arrived("c", 3), decided("accepted", 4, 3),
    reported(1, 5, 0, 1), reported(2, 7, 0),
    Aborted(8, "crowd", "a", "client"), decided("ended", 2, 8, "abort"),
    Aborted(8, "crowd", "b", "client"), decided("ended", 3, 8, "abort"),
    Aborted(8, "crowd", "c", "client"), decided("ended", 4, 8, "abort"),
    reported(3, 9, 0, 1),
)  # fmt: skip


def test_the_journal_says_in_which_state_each_cancel_met_its_request() -> None:
    """One decoded, one was in its prompt, one waited; tokens of the keeper alone are noted, with their steps."""
    found = Trail(records(*STORY), "keeper")
    crowd = found.crowd(Span("round", 3, 8))
    assert [one.id for one in crowd] == ["a", "b", "c"]
    assert trail.states(crowd) == {"decoding": 1, "prefilling": 1, "waiting": 1}
    assert trail.problems(crowd, 3) == []
    (keeper,) = found.kept(["k", "nobody"])
    assert keeper.tokens == [(5, 1), (7, 2), (9, 3)]
    assert found.steps(6, 9) == 1


@pytest.mark.parametrize(
    ("left_out", "added", "words"),
    [
        ("Aborted:a", (), "in the journal 1 of 3 were never cancelled: a"),
        ("ended:4", (), "in the journal 1 of 3 have no end: c"),
        ("", (decided("ended", 3, 9, "abort"),), "in the journal 1 of 3 ended more than once: b"),
        ("ended:3", (decided("ended", 3, 9, "length"),), "in the journal 1 of 3 ended otherwise: b"),
        ("Arrived:c", (), "the journal has 2 requests of 3"),
    ],
)
def test_what_the_journal_lacks_is_found(left_out: str, added: Sequence[Any], words: str) -> None:
    """A cancel that did not reach the core, an end too few or too many."""

    def name(item: Any) -> str:
        if isinstance(item, Arrived):
            return f"Arrived:{item.generate.id}"
        return f"{item.verdict}:{item.request}" if isinstance(item, Decided) else f"Aborted:{getattr(item, 'id', '')}"

    found = Trail(records(*(item for item in STORY if name(item) != left_out), *added), "keeper")
    assert words in trail.problems(found.crowd(Span("round", 3, 8)), 3)


# --- the verdict


def one_round(arrivals_ms: Sequence[int], steps: Sequence[int], again: Sequence[int] = (7, 8)) -> dict[str, Any]:
    """A round of one kept stream and a crowd of one; spans are 100 ms each, sending took 10 ms."""
    one, other = (Kept(Generate("k", pack_i64([5]), Sampling())) for _ in range(2))
    one.tokens, one.end, other.tokens, other.end = [7, 8], "stop", list(again), "length"
    one.arrivals_s = [at / 1000 for at in arrivals_ms]
    seen = Seen(1, [one], [other], accepted=1)
    for name, at in (("alone", 0), ("crowd", 100), ("cancels", 200), ("sent", 210), ("after", 300), ("over", 400)):
        seen.marks[name] = Mark(at / 1000, at * MS)
    books = Books(["a"])
    books.take(accepted("a", 1), 0.15)
    books.take(end("a"), 0.25)
    story = [
        arrived("k", 0, "keeper"), decided("accepted", 1, 0), decided("admitted", 1, 0, row=0, generation=1),
        *(reported(seq, at * MS, 0) for seq, at in zip(steps, arrivals_ms, strict=True)),
        arrived("a", 150 * MS), decided("accepted", 2, 150 * MS),
        Aborted(205 * MS, "crowd", "a", "client"), decided("ended", 2, 205 * MS, "abort"),
    ]  # fmt: skip
    return row_of(seen, books, [], Trail(records(*story), "keeper"), Bounds(1, 150.0))


def test_a_round_without_problems() -> None:
    """Figures of every span, and nothing to say against it."""
    row = one_round([0, 50, 110, 190, 250, 310, 390, 410], range(1, 9))
    assert row["problems"] == []
    assert (row["answered"], row["ended"], row["kept_equal"], row["sending_s"]) == (1, 1, 1, 0.01)
    assert row["answered_s"] == 0.05
    assert row["longest_ms"] == 80.0
    assert [row["pauses"][name]["steps"] for name in ("alone", "crowd", "cancels", "after")] == [2, 2, 1, 2]
    assert row["waiting_at_cancel"] == 1
    assert held([row], 150.0).startswith("held: 1 cancels")


def test_the_longest_pause_says_from_when_it_counts() -> None:
    """The crowd's own may be longer, and is told beside."""
    row = one_round([0, 140, 190, 250, 310, 371], range(1, 7))
    told = held([row], 150.0)
    assert told == (
        "held: 1 cancels, each ended once; from the first cancel on no kept stream paused longer than 61 of 150 ms; "
        "before it 140 ms, which are not judged"
    )


@pytest.mark.parametrize(
    ("arrivals", "steps", "again", "words"),
    [
        ([0, 50, 110, 190, 350, 410], range(1, 7), (7, 8), "paused for 160 ms during or behind the cancels"),
        ([0, 50, 110, 190, 250, 410], range(1, 7), (7, 8), "paused for 160 ms during or behind the cancels"),
        (
            [0, 50, 110, 190, 250, 310],
            [1, 2, 3, 4, 9, 10],
            (7, 8),
            "waited 5 steps for a token, before it waited 1 at most",
        ),
        ([0, 50, 110, 190, 250, 310], range(1, 7), (7, 9), "differs from itself without cancels at token 1"),
        ([0, 50, 110, 190, 250, 310], range(1, 7), (7,), "differs from itself without cancels in length: 2 and 1"),
    ],
)
def test_a_stall_or_another_output_is_missed(
    arrivals: list[int], steps: Sequence[int], again: Sequence[int], words: str
) -> None:
    """Too long a pause during or behind the cancels, a turn that was missed, tokens that are others."""
    row = one_round(arrivals, steps, again)
    (problem,) = row["problems"]
    assert words in problem
    console = Console(width=200)
    with console.capture() as capture:
        print_result(
            console, Result([row], {"full": dict.fromkeys(("boot", "free", "reclaimable", "emptied"), 1)}), "", 1
        )
    assert f"MISSED: round 1: {problem}" in capture.get()


def test_a_pause_before_the_cancels_is_no_stall() -> None:
    """What the crowd's arrival costs is told, and is not what is asked here."""
    row = one_round([0, 170, 190, 250, 310, 390], range(1, 7))
    assert row["problems"] == []
    assert row["pauses"]["crowd"]["seen_ms"]["max"] == 170.0


def test_kept_streams_that_end_by_themselves_are_found() -> None:
    """One that was lost says why; one that ended otherwise, how."""
    good, lost, early = (Kept(Generate(name, pack_i64([5]), Sampling())) for name in ("g", "l", "e"))
    good.end, lost.problem, early.end = "stop", "l lost the daemon: gone", "abort"
    assert kept.problems([good, lost, early], "stop") == [
        "l lost the daemon: gone",
        "e ended with abort behind 0 tokens",
    ]
