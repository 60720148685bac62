"""`bandmaster export --format perfetto`: the trace follows the format's rules and tells what the journal says."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from daemon.core.outputs import Decided
from journal.reader import read_records
from journal.records import Kind
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.journal.world import World, two_lives
from tests.tools.why_scenes import crowd
from tools import replay, trim
from tools.export import command
from tools.export.events import CORE, FIRST_STAGE, REQUESTS

SMALL = JournalSettings(segment_bytes=16 << 10)
NAMED = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
Trace = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lives on two stages, the first with lost ranks and cut off."""
    return two_lives(tmp_path_factory.mktemp("lived"), (4, 5), (60, 30, 40), arrivals=0.5, closes=False, settings=SMALL)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More requests than memory: some are parked, some are retracted for others."""
    return crowd()[1].write(tmp_path_factory.mktemp("crowded")) / "journal"


def traced(directory: Path, place: Path, *options: str, code: int = 0) -> Trace:
    """The events of a trace, each of a form that the format knows."""
    target = place / "trace.json"
    assert command.main([str(directory), "--format", "perfetto", "-o", str(target), *options]) == code
    document = json.loads(target.read_text())
    assert document.keys() == {"displayTimeUnit", "traceEvents", "otherData"}
    for event in document["traceEvents"]:
        check_form(event)
    return list(document["traceEvents"])


def check_form(event: dict[str, Any]) -> None:
    """The fields that a reader needs of each phase of event."""
    kind = event["ph"]
    assert (type(event["pid"]), type(event["name"])) == (int, str)
    if kind == "M":
        assert event["name"] in NAMED
        return
    assert event["ts"] >= 0
    if kind == "C":
        assert {type(value) for value in event["args"].values()} == {int}
        return
    assert event["tid"] > 0
    assert {"X": event.get("dur", -1) >= 0, "i": event.get("s") == "t", "s": event.get("id", 0) > 0}.get(kind, True)
    assert kind in ("X", "i", "s", "f")
    assert kind != "f" or event["bp"] == "e"


def slices(events: Trace) -> dict[tuple[int, int], list[tuple[float, float, str]]]:
    """By thread, begin, end and name in the order of time."""
    found: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return {thread: sorted(there) for thread, there in found.items()}


def decided(directory: Path, *verdicts: str) -> list[Decided]:
    found: list[Any] = [one.decode() for one in read_records(DiskStorage(directory)) if one.kind == Kind.DECIDED]
    return [one for one in found if one.verdict in verdicts]


def test_slices_of_a_thread_do_not_overlap_and_every_thread_has_a_name(lived: Path, tmp_path: Path) -> None:
    """So a viewer can nest them, and a person knows what they are."""
    events = traced(lived, tmp_path)
    for there in slices(events).values():
        for (_, end, _), (begin, _, _) in pairwise(there):
            assert begin >= end - 1e-6
    threads = {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xisf"}
    names = {(event["pid"], event["tid"]): event["args"] for event in events if event["name"] == "thread_name"}
    assert threads <= names.keys()
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in events} <= processes | {FIRST_STAGE, FIRST_STAGE + 1}


def test_a_request_is_in_one_phase_from_its_arrival_to_its_end(lived: Path, tmp_path: Path) -> None:
    """Every accepted request of the journal has a track without a gap; lost ranks and a restart are named."""
    events = traced(lived, tmp_path)
    tracks = {tid: there for (pid, tid), there in slices(events).items() if pid == REQUESTS}
    accepted = {one.request + k for one in decided(lived, "accepted") for k in range(one.numbers["n"])}
    assert tracks.keys() == accepted
    lives = next(event["ts"] for event in events if event["name"] == "life second began")
    for there in tracks.values():
        for (_, end, _), (begin, _, _) in pairwise(there):
            assert begin == pytest.approx(end) or end <= lives <= begin
    names = [name for there in tracks.values() for _, _, name in there]
    for verdict, name in (
        ("requeued", "waits again: its ranks were lost"),
        ("recovered", "waits again: the daemon was restarted"),
    ):
        assert names.count(name) == len(decided(lived, verdict)) > 0
    assert names.count("decode") <= names.count("prefill")
    assert "decode" in names


def test_every_step_is_a_slice_on_each_stage_and_counters_end_at_the_replica(lived: Path, tmp_path: Path) -> None:
    """Steps that were lost with their epoch too; units of every band are those that a replay ends with."""
    events = traced(lived, tmp_path)
    steps = sum(one.kind == Kind.STEPPED for one in read_records(DiskStorage(lived)))
    for stage in (FIRST_STAGE, FIRST_STAGE + 1):
        there = [name for (pid, _), found in slices(events).items() if pid == stage for _, _, name in found]
        assert len(there) == steps
    last: dict[tuple[int, str], Any] = {}
    for event in events:
        if event["ph"] == "C":
            last[event["pid"], event["name"]] = event["args"]
    state = replay.state_of(replay.replay_directory(str(lived)))
    for place, bands in enumerate(state["stages"]):
        for band in bands:
            assert last[FIRST_STAGE + place, band["band"]] == {k: v for k, v in band.items() if k != "band"}
    gauges = state["core"]["gauges"]
    assert last[CORE, "requests"]["waiting"] == 0, "what still lived was ended with the journal"
    assert gauges["live"] > 0
    without = traced(lived, tmp_path, "--no-arena")
    assert slices(without) == slices(events)
    assert not [event for event in without if event["ph"] == "C" and event["pid"] >= FIRST_STAGE]


def test_an_arrow_leads_from_who_needed_memory_to_who_gave_way(crowded: Path, tmp_path: Path) -> None:
    """Both of its ends lie in slices of the two requests; who was parked or retracted has phases that say so."""
    events = traced(crowded, tmp_path)
    where = slices(events)
    arrows = defaultdict(dict[str, dict[str, Any]])
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
    retracted = [(one.by, one.request) for one in decided(crowded, "retracted") if one.by]
    assert [(pair["s"]["tid"], pair["f"]["tid"]) for pair in arrows.values()] == retracted
    assert retracted, "nobody was retracted for somebody"
    for pair in arrows.values():
        for event in pair.values():
            there = where[REQUESTS, event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end, _ in there)
    names = [name for (pid, _), there in where.items() if pid == REQUESTS for _, _, name in there]
    assert names.count("waits again: retracted") == len(decided(crowded, "retracted"))
    assert names.count("parked") == len(decided(crowded, "parked")) > 0


def test_one_request_or_a_range(lived: Path, tmp_path: Path) -> None:
    """The track of the request alone, whole; of a range what ended in it."""
    everything = traced(lived, tmp_path)
    number = decided(lived, "requeued")[0].request
    alone = traced(lived, tmp_path, "--request", str(number))
    tracks = slices(alone)
    assert [tid for pid, tid in tracks if pid == REQUESTS] == [number]
    assert tracks[REQUESTS, number] == slices(everything)[REQUESTS, number]
    last = max(one.sequence for one in read_records(DiskStorage(lived)))
    part = traced(lived, tmp_path, "--from", str(last // 2), "--to", str(last // 2 + 200))
    timed = [event for event in part if event["ph"] != "M"]
    assert 0 < len(timed) < len([event for event in everything if event["ph"] != "M"]) / 2
    assert command.main([str(lived), "--format", "perfetto", "--kind", "decided"]) == 2


def test_a_trimmed_journal_begins_in_the_midst(tmp_path: Path) -> None:
    """Requests that lived at its snapshot have their phases from there on, and counters are right."""
    journal = tmp_path / "journal"
    world = World(DiskStorage(journal), 3, "a", JournalSettings(segment_bytes=12 << 10), snapshot_bytes=18_000)
    while world.keeper.written < 3 or world.keeper.complete:
        world.iterate()
    for _ in range(20):
        world.iterate()
    world.writer.close()
    assert trim.main([str(journal)]) == 0
    events = traced(journal, tmp_path)
    tracks = slices(events)
    assert any("since" in event["args"] for event in events if event["ph"] == "X")
    assert any(name == "decode" for (pid, _), there in tracks.items() if pid == REQUESTS for _, _, name in there)
    last = {(event["pid"], event["name"]): event["args"] for event in events if event["ph"] == "C"}
    state = replay.state_of(replay.replay_directory(str(journal)))
    assert last[FIRST_STAGE, "full"]["live"] == state["stages"][0][0]["live"]


def test_a_trace_of_a_damaged_journal_is_whole(lived: Path, tmp_path: Path) -> None:
    """Up to the damage; packed by the suffix as JSON Lines are."""
    journal = Path(shutil.copytree(lived, tmp_path / "journal"))
    hit = next(one for one in read_records(DiskStorage(journal)) if one.sequence > 300)
    data = bytearray((journal / hit.file).read_bytes())
    data[hit.offset + 36] ^= 1
    (journal / hit.file).write_bytes(data)
    assert len(traced(journal, tmp_path, code=4)) > 100
    target = tmp_path / "trace.json.gz"
    assert command.main([str(lived), "--format", "perfetto", "-o", str(target)]) == 0
    assert json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
