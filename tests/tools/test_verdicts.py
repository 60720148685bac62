"""Which decisions let a request wait again: said in one place, and every tool that follows requests knows them all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from daemon.core.inputs import Arrived, Resumed, Ticked
from daemon.core.outputs import Decided, Outputs, Reply
from daemon.core.reasons import WAITS_AGAIN, Verdict
from ipc.messages import Accepted, Generate, Sampling
from journal import records
from journal.reader import Record
from journal.records import KIND_OF
from tools.export import tracks
from tools.export.events import REQUESTS, Events
from tools.view import requests as view
from tools.whatif.account import Account

MS = 1_000_000
ROW = {"row": 3, "generation": 1, "tokens": 12, "cached_tokens": 4}


def test_every_tool_knows_every_verdict_behind_which_a_request_waits() -> None:
    """The table with words of its own has a row for each; the one with phases no other row that says so."""
    assert tracks.AGAIN.keys() == WAITS_AGAIN
    waiting = {view.Phase.WAITING, view.Phase.RETRACTED, view.Phase.REQUEUED}
    assert {verdict for verdict, phase in view.GO_TO.items() if phase in waiting} == WAITS_AGAIN


def said(verdict: str, **numbers: int) -> Decided:
    return Decided(0, verdict, 1, "", numbers)


def arrived(now_ns: int) -> Arrived:
    return Arrived(now_ns, "fe", Generate("a", bytes(8 * 12), Sampling()), 0)


@pytest.mark.parametrize("verdict", sorted(WAITS_AGAIN))
def test_the_trace_shows_that_it_waits_until_it_is_admitted_again(verdict: Verdict) -> None:
    """Between the two it does not decode, and the counter of who waits has it."""
    written: list[bytes] = []
    trace = tracks.Trace(Events(written.append))
    back: Any = Resumed(30 * MS, "fe", "a", 0, bytes(16)) if verdict == Verdict.RESUMED else Ticked(30 * MS)
    items: list[Any] = [arrived(10 * MS), said("accepted", n=1), Ticked(20 * MS), said("admitted", **ROW)]
    items += [back, said(verdict), Ticked(70 * MS), said("admitted", **ROW)]
    items += [Ticked(90 * MS), said("ended")]
    for at, item in enumerate(items, 1):
        trace.take(Record(at, KIND_OF[type(item)], records.encode(item), "", 0))
    about = trace.end()
    assert about["made_by"] == "bandmaster export"
    events = [json.loads(line.strip(b",")) for line in b"".join(written).splitlines() if b'"ph"' in line]
    slices = [one for one in events if one["ph"] == "X" and one["pid"] == REQUESTS]
    assert [(one["name"], one["dur"]) for one in slices] == [
        ("waits", 10_000), ("prefill", 10_000), (tracks.AGAIN[verdict], 40_000), ("prefill", 20_000),
    ]  # fmt: skip
    waiting = [one["args"]["waiting"] for one in events if one["ph"] == "C" and one["name"] == "requests"]
    assert waiting == [1, 0, 1, 0, 0]


@pytest.mark.parametrize("verdict", sorted(WAITS_AGAIN))
def test_what_if_counts_that_waiting(verdict: Verdict) -> None:
    """10 ms before its first start, and 40 ms behind the decision."""
    account = Account()
    accepted = Reply(0, Accepted("a", 1, 1, 4, 1))
    account.take(arrived(10 * MS), Outputs([said("accepted", n=1)], [accepted]))
    account.take(Ticked(20 * MS), Outputs([said("admitted", **ROW)]))
    account.take(Ticked(30 * MS), Outputs([said(verdict)]))
    account.take(Ticked(70 * MS), Outputs([said("admitted", **ROW)]))
    waiting = account.figures()["waiting_ms"]
    assert waiting["mean"] == pytest.approx(50)
