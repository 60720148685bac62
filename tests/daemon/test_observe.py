"""Observe: one canonical line per ended choice, counters that agree with what happened, failures that touch nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import trio

from daemon.core.account import Account
from daemon.core.inputs import Arrived, Input, Recovered, RecoveredChoice, RecoveredGroup, Resumed, Ticked
from daemon.core.outputs import Decided, Outputs, Reply, TokenColumns
from daemon.mailbox import Collated, Iteration
from daemon.metrics import Metrics
from daemon.observe import Observer
from ipc.messages import Accepted, Finished, Generate, Refused, Sampling
from tests.daemon.doubles import TrioClock

S = 1_000_000_000


class NotedLog:
    """A logger that keeps its lines; `broken` makes one level raise."""

    def __init__(self, broken: str = "") -> None:
        self.lines: list[dict[str, Any]] = []
        self.broken = broken

    def __getattr__(self, level: str) -> Any:
        def write(event: str, **values: Any) -> None:
            if level == self.broken:
                raise OSError("sink is full")
            self.lines.append({"level": level, "event": event, **values})

        return write

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == name]


class Scene:
    """An observer whose iterations the test makes."""

    def __init__(self, broken: str = "") -> None:
        self.log = NotedLog(broken)
        self.metrics = Metrics()
        self.found: list[str] = []
        _, observed = trio.open_memory_channel[Iteration](1)
        self.observer = Observer(self.metrics, TrioClock(), self.log, observed, self.found)

    def show(self, item: Input, outputs: Outputs) -> None:
        self.observer.take(Iteration(item.now_ns, [item], [outputs], [Collated([], None)], 7, 1000, 2000))  # type: ignore[arg-type]

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"bandmaster:{name}", labels) or 0.0


def arrived(at: int) -> Arrived:
    return Arrived(at, "fe", Generate("a", b"", Sampling(), n=2), 1)


def accepted() -> Outputs:
    decided = Decided(10 * S, "accepted", 1, "", {"n": 2, "prompt_tokens": 5, "max_tokens": 8})
    return Outputs([decided], [Reply(0, Accepted("a", 1, 2, 8, 5))])


def tokens(*requests: int) -> TokenColumns:
    numbers = np.array(requests, np.int64)
    return TokenColumns(1, np.zeros(len(requests), np.int32), numbers, numbers, [])


def told_again(request: int, reason: str = "length") -> Outputs:
    return Outputs(replies=[Reply(0, Finished("a", request - 1, request, reason, "8 output tokens", 5, 8))])


def finished(request: int, reason: str = "length") -> Outputs:
    return Outputs([Decided(1, "ended", request, reason, {})], told_again(request, reason).replies)


def test_one_line_per_ended_choice() -> None:
    """Two choices of one request: two lines with queue time, time to first token, tokens and reason; none repeated."""
    scene = Scene()
    scene.show(arrived(10 * S), accepted())
    scene.show(
        Ticked(11 * S), Outputs(decisions=[Decided(11 * S, "admitted", 1, ""), Decided(11 * S, "admitted", 2, "")])
    )
    scene.show(Ticked(13 * S), Outputs(tokens=tokens(1)))
    scene.show(Ticked(14 * S), Outputs(tokens=tokens(1, 2), decisions=[Decided(14 * S, "admitted", 1, "")]))
    scene.show(Ticked(15 * S), finished(1))
    scene.show(Ticked(15 * S), told_again(1))
    scene.show(Ticked(16 * S), finished(2, "abort"))
    lines = scene.log.events("Finished")
    assert [(line["request"], line["reason"]) for line in lines] == [(1, "length"), (2, "abort")]
    first = {name: lines[0][name] for name in ("queue_ms", "first_token_ms", "total_ms", "output_tokens", "frontend")}
    assert first == {"queue_ms": 1000, "first_token_ms": 3000, "total_ms": 5000, "output_tokens": 8, "frontend": "fe"}
    assert scene.value("request_success_total", finished_reason="length") == 1
    assert scene.value("request_success_total", finished_reason="abort") == 1
    assert scene.value("request_queue_time_seconds_count") == 2
    assert scene.value("daemon_time_to_first_token_seconds_sum") == 7


def test_an_end_before_any_token_says_so() -> None:
    """A request that never ran has no queue time and no first token, rather than zeros."""
    scene = Scene()
    scene.show(arrived(10 * S), accepted())
    scene.show(Ticked(12 * S), finished(2, "abort"))
    line = scene.log.events("Finished")[0]
    assert (line["queue_ms"], line["first_token_ms"], line["total_ms"]) == (None, None, 2000)


def test_decisions_are_lines_with_their_numbers() -> None:
    """M2: a retraction names its victim, reason and numbers; a stall is an error; a refusal names field and limit."""
    scene = Scene()
    retracted = Decided(1, "retracted", 4, "memory", {"pages": 3, "tokens_lost": 40}, by=2)
    scene.show(Ticked(1), Outputs([retracted, Decided(1, "stalled", 0, "livelock", {"live": 1})]))
    refused = Refused("a", "prompt_too_long", "", "prompt", 64, 65)
    decided = Decided(2, "refused", 0, "prompt_too_long", {"n": 2, "limit": 64, "value": 65})
    scene.show(arrived(2), Outputs([decided], [Reply(0, refused)]))
    line = scene.log.events("Retracted")[0]
    assert (line["request"], line["by"], line["reason"], line["pages"]) == (4, 2, "memory", 3)
    assert scene.log.events("Stalled")[0]["level"] == "error"
    line = scene.log.events("Refused")[0]
    assert (line["field"], line["limit"], line["value"], line["n"]) == ("prompt", 64, 65, 2)
    assert len(scene.log.events("Refused")) == 1, "the decision and the reply are one refusal"


async def test_X8_a_metric_that_throws_touches_nothing(autojump_clock: trio.testing.MockClock) -> None:
    """With a broken metric every iteration is still taken, one error line a minute is written, and it is counted."""
    scene = Scene()

    def explode(value: float) -> None:
        raise RuntimeError("metric sink")

    scene.metrics.core_time.observe = explode  # type: ignore[method-assign, assignment]
    for at in range(100):
        scene.show(Ticked(at), Outputs())
    assert len(scene.log.events("ObserveFailed")) == 1
    assert scene.value("observe_failures_total") == 100
    await trio.sleep(61)
    scene.show(Ticked(200), Outputs())
    assert len(scene.log.events("ObserveFailed")) == 2


def admitted(at: int, request: int, cut: str, queried: int, cached: int, matched: int) -> Outputs:
    numbers = {"queried_tokens": queried, "cached_tokens": cached, "matched_tokens": matched}
    return Outputs(decisions=[Decided(at, "admitted", request, cut, numbers)])


def test_P2_what_ended_a_hit_is_counted_apart() -> None:
    """No shared prefix, no usable checkpoint and no usable window are different series; lost tokens have their kind."""
    scene = Scene()
    scene.show(arrived(S), accepted())
    scene.show(Ticked(2 * S), admitted(2 * S, 1, "full", 100, 0, 0))
    scene.show(Ticked(2 * S), admitted(2 * S, 2, "state", 100, 0, 64))
    cuts = {cut: scene.value("prefix_cache_lookups_total", cut=cut) for cut in ("full", "state", "none", "window:64")}
    assert cuts == {"full": 1, "state": 1, "none": 0, "window:64": 0}
    assert scene.value("prefix_cache_unusable_tokens_total", cut="state") == 64
    assert scene.value("prefix_cache_unusable_tokens_total", cut="full") == 0
    assert (scene.value("prefix_cache_queries_total"), scene.value("prefix_cache_hits_total")) == (200, 0)


def test_P7_every_token_skipped_is_counted_once() -> None:
    """First admissions count as in vLLM; what a retracted request finds again is counted apart, and nothing is lost."""
    scene = Scene()
    scene.show(arrived(S), accepted())
    scene.show(Ticked(2 * S), admitted(2 * S, 1, "", 33, 32, 32))
    scene.show(Ticked(3 * S), admitted(3 * S, 2, "window:64", 33, 16, 32))
    scene.show(Ticked(4 * S), admitted(4 * S, 1, "full", 48, 47, 47))
    scene.show(Ticked(5 * S), Outputs(decisions=[Decided(5 * S, "admitted", 1, "")]))  # no cache was asked
    assert (scene.value("prefix_cache_queries_total"), scene.value("prefix_cache_hits_total")) == (66, 48)
    resumed = scene.value("prefix_cache_resumed_queries_total"), scene.value("prefix_cache_resumed_hits_total")
    assert resumed == (48, 47)
    assert scene.value("prefix_cache_lookups_total", cut="none") == 1
    assert scene.value("prefix_cache_unusable_tokens_total", cut="window:64") == 16


def test_a_line_says_what_was_cached_and_what_cut_it() -> None:
    """The canonical line has cached tokens, how far tokens were known, and the kind that ended the hit."""
    scene = Scene()
    scene.show(arrived(S), accepted())
    end = Finished("a", 0, 1, "length", "", 33, 8, 16, 32, "state")
    scene.show(Ticked(2 * S), Outputs([Decided(2 * S, "ended", 1, "length", {})], [Reply(0, end)]))
    line = scene.log.events("Finished")[0]
    assert (line["cached_tokens"], line["matched_tokens"], line["hit_cut"]) == (16, 32, "state")


def test_the_cache_is_shown_per_band() -> None:
    """What it holds and what is reclaimable are gauges, what was taken back and checkpoints are counters."""
    scene = Scene()
    first = {"cached_units_full": 9, "cached_units_window:64": 4, "reclaimable_units_full": 5}
    first |= {"evicted_units_full_total": 7, "checkpoints_given_total": 2, "checkpoints_skipped_total": 1}
    scene.metrics.set_core(first)
    scene.metrics.set_core(first | {"cached_units_full": 3, "evicted_units_full_total": 13})
    assert (scene.value("cached_units", band="full"), scene.value("cached_units", band="window:64")) == (3, 4)
    assert scene.value("reclaimable_units", band="full") == 5
    assert scene.value("evicted_units_total", band="full") == 13
    assert (scene.value("checkpoints_given_total"), scene.value("checkpoints_skipped_total")) == (2, 1)


def test_checkpoints_are_told_by_kind() -> None:
    """Which kinds of checkpoints were given and which of them were hit: what a smaller or larger grid would change."""
    scene = Scene()
    scene.metrics.set_core({"states_given_turn_total": 4, "states_given_mark_total": 9, "states_hit_turn_total": 3})
    scene.metrics.set_core({"states_given_turn_total": 6, "states_given_mark_total": 9, "states_hit_turn_total": 5})
    assert scene.value("checkpoints_given_by_kind_total", kind="turn") == 6
    assert scene.value("checkpoints_given_by_kind_total", kind="mark") == 9
    assert scene.value("checkpoints_hit_by_kind_total", kind="turn") == 5


def test_totals_follow_the_core() -> None:
    """Counters take the core's totals over; gauges its present values."""
    scene = Scene()
    scene.metrics.set_core({"running": 3, "output_tokens_total": 10, "retractions_total": 1})
    scene.metrics.set_core({"running": 1, "output_tokens_total": 25, "retractions_total": 1})
    assert scene.value("num_requests_decoding") == 1
    assert scene.value("generation_tokens_total") == 25
    assert scene.value("num_preemptions_total") == 1


def test_the_account_is_of_one_written_iteration() -> None:
    """Counters and gauges of requests are the core's behind the record that `journal_sequence` names, never ahead."""
    scene = Scene()
    account = Account(received=5, refused=1, accepted=4, finished=1, live=3, waiting=1, holding=2)
    scene.observer.take(Iteration(1, [], [], sequence=40, account=account))
    scene.metrics.set_core({"received_total": 9, "waiting": 7, "running": 7, "live": 14})
    assert scene.value("journal_sequence") == 40
    assert (scene.value("requests_received_total"), scene.value("requests_refused_total")) == (5, 1)
    assert scene.value("num_requests_live") == 3
    assert scene.value("num_requests_running") == 2, "as in vLLM, prefilling ones included"
    assert scene.value("num_requests_waiting") == 1
    scene.observer.take(Iteration(2, [], [], sequence=41))
    assert (scene.value("journal_sequence"), scene.value("requests_received_total")) == (41, 5), "nothing was fed"


def test_a_request_that_is_sent_again_is_counted_once() -> None:
    """Its acceptance and the ends that are told again make no line and no count, also when all of it had ended."""
    scene = Scene()
    scene.show(arrived(10 * S), accepted())
    scene.show(Ticked(15 * S), finished(1))
    scene.show(Ticked(15 * S), finished(2, "stop"))
    again = [Reply(0, Accepted("a", 1, 2, 8, 5)), *told_again(1).replies, *told_again(2, "stop").replies]
    scene.show(arrived(20 * S), Outputs(replies=again))
    assert len(scene.log.events("Accepted")) == 1
    assert [line["request"] for line in scene.log.events("Finished")] == [1, 2]
    assert scene.value("request_success_total", finished_reason="length") == 1


def test_requests_of_an_earlier_life_have_their_line() -> None:
    """What a life takes over ends with a line and a count; waits that were told then are not told again."""
    scene = Scene()
    generate, first = Generate("a", b"", Sampling(), n=3), Accepted("a", 7, 3, 8, 5)
    ended = Finished("a", 0, 7, "length", "", 5, 8)
    choices = [RecoveredChoice(b"", ended), RecoveredChoice(bytes(8), started=True), RecoveredChoice(b"")]
    group = RecoveredGroup("fe", generate, 5, first, 10 * S, choices)
    numbers = [Decided(20 * S, "recovered", number, "") for number in (8, 9)]
    scene.show(Recovered(20 * S, [group], 10), Outputs(numbers))
    for number in (8, 9):
        scene.show(Ticked(22 * S), Outputs([Decided(22 * S, "admitted", number, "")], tokens=tokens(8, 9)))
    for number in (8, 9):
        end = Finished("a", number - 7, number, "length", "", 5, 8)
        scene.show(Ticked(23 * S), Outputs([Decided(23 * S, "ended", number, "length")], [Reply(0, end)]))
    lines = scene.log.events("Finished")
    assert [(line["request"], line["frontend"], line["total_ms"]) for line in lines] == [
        (8, "fe", 13000),
        (9, "fe", 13000),
    ]
    assert [(line["queue_ms"], line["first_token_ms"]) for line in lines] == [(None, None), (12000, 12000)]
    assert scene.value("request_success_total", finished_reason="length") == 2
    assert scene.value("request_queue_time_seconds_count") == 1
    assert scene.value("daemon_time_to_first_token_seconds_count") == 1


def test_who_comes_back_for_nothing_is_not_refused() -> None:
    """A `Resume` for what is not known is answered `Refused`, but no request arrived: another line, no count."""
    scene = Scene()
    unknown = Refused("a", "unknown_request", "", "id")
    scene.show(Resumed(1, "fe", "a", 0, b""), Outputs(replies=[Reply(0, unknown)]))
    assert not scene.log.events("Refused")
    assert [line["code"] for line in scene.log.events("NotResumed")] == ["unknown_request"]


async def test_a_line_that_fails_costs_no_count(autojump_clock: trio.testing.MockClock) -> None:
    """With a log that takes nothing every end is counted all the same."""
    scene = Scene(broken="info")
    scene.show(arrived(S), accepted())
    scene.show(Ticked(2 * S), finished(1))
    assert scene.value("request_success_total", finished_reason="length") == 1
    assert scene.value("observe_failures_total") == 2


async def test_a_failure_costs_its_own_lines(autojump_clock: trio.testing.MockClock) -> None:
    """Behind a line that could not be written the same iteration goes on, and so do those that come."""
    scene = Scene()

    def once(event: str, **values: Any) -> None:
        del scene.log.__dict__["info"]
        raise OSError("sink is full")

    scene.log.__dict__["info"] = once
    other = Outputs([Decided(S, "accepted", 3, "", {"n": 1, "prompt_tokens": 5, "max_tokens": 8})])
    arrivals: list[Input] = [arrived(S), Arrived(S, "fe", Generate("b", b"", Sampling()), 1)]
    scene.observer.take(Iteration(S, arrivals, [accepted(), other], [], 7, 1000, 2000))
    scene.show(Ticked(2 * S), finished(9))  # of one whose arrival was not taken in at all
    scene.show(Ticked(3 * S), finished(3))
    lines = [(line["event"], line["request"], line.get("total_ms")) for line in scene.log.lines[1:]]
    assert lines == [("Accepted", 3, None), ("Finished", 9, None), ("Finished", 3, 2000)]
    assert scene.observer.recent.serial == 4
    assert scene.value("observe_failures_total") == 1


def test_lines_name_the_record_behind_which_they_are_true() -> None:
    """`Accepted`, `Refused` and `Finished` have the newest record of their iteration."""
    scene = Scene()
    scene.show(arrived(S), accepted())
    scene.show(Ticked(2 * S), finished(1))
    lines = [*scene.log.events("Accepted"), *scene.log.events("Finished")]
    assert [line["sequence"] for line in lines] == [7, 7]
    assert (lines[0]["request"], lines[0]["n"], lines[0]["id"]) == (1, 2, "a")


def test_units_are_told_by_stage() -> None:
    """What the cache holds is held on every stage: a reader compares it with each, and a sum would be too much."""
    scene = Scene()
    scene.metrics.set_bands([{"full": (5, 2, 1, 92)}, {"full": (5, 0, 1, 44), "state": (1, 0, 0, 7)}])
    assert scene.value("units", band="full", stage="0", state="hole") == 2
    assert scene.value("units", band="full", stage="1", state="beyond") == 44
    text = scene.metrics.exposition()
    assert 'bandmaster:units{band="full",stage="0",state="live"} 5.0' in text
    assert 'band="state",stage="0"' not in text, "a stage tells nothing of a band that it does not store"


def test_a_broken_invariant_is_one_line() -> None:
    """What the core's checks found is logged once and taken out."""
    scene = Scene()
    scene.found.append("capacity.observe_only_read: read by admission")
    scene.show(Ticked(1), Outputs())
    scene.show(Ticked(2), Outputs())
    assert [line["what"] for line in scene.log.events("InvariantBroken")] == [
        "capacity.observe_only_read: read by admission"
    ]
    assert scene.found == []
