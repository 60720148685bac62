"""`bandmaster simulate`: what it measures, how its results look, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.tools.simulate_world import conversations, write
from tools import cli
from tools.simulate import command, scene
from tools.simulate.engine import Engine, Miscounted
from tools.simulate.plot import BOTTOM, PANEL_HEIGHT, PANEL_WIDTH, TOP
from tools.simulate.timeline import BUCKETS, FIRST_WIDTH_NS, Timeline

FULL = ("--band", "full=1000/page")
WINDOW = ("--band", "window:1024=600/page")
STATE = ("--band", "state:512=4000/slot")
FAMILIES = {"full": FULL, "window": (*FULL, *WINDOW), "state": (*FULL, *WINDOW, *STATE)}
FCFS = ("--schedule-policy", "fcfs")  # which refuses a priority
APART_MS = 60_000  # every request is done before the next one comes
PUBLISHED = Path(__file__).parent / "published"


def simulate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The document of a simulation that accounts for everything."""
    assert command.main([*map(str, arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    for run in document["runs"]:
        core = run["core"]
        assert run["error"] == ""
        assert run["unanswered"] == 0
        assert core["received"] == core["refused"] + core["accepted"] == document["trace"]["requests"]
        assert core["accepted"] == core["finished"] + core["aborted"] + core["failed"] == sum(run["ends"].values())
        assert core["refused"] == sum(run["refusals"].values())
        assert core["output_tokens"] == run["output_tokens"]
        if not run["refusals"] and set(run["ends"]) == {"length"}:
            assert run["output_tokens"] == document["trace"]["output_tokens"]
    return document


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty turns of a few conversations, one at a time."""
    return write(tmp_path / "trace.jsonl", conversations(1, 60, APART_MS))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", scene.EVICTIONS)
def test_with_room_for_everything_it_finds_what_an_infinite_cache_does(
    family: str, policy: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests far apart in time, more bytes than all of it takes, a checkpoint everywhere: token for token."""
    arguments = (*FAMILIES[family], "--arena-fraction", "150%", "--policy", f"{policy}/grid")
    document = simulate(capsys, trace, *arguments)
    (run,) = document["runs"]
    assert run["cached_tokens"] == document["infinite"]["tokens"] == document["arenas"][0]["bound_tokens"] > 0
    assert run["evicted_bytes"] == dict.fromkeys(run["evicted_bytes"], 0)
    assert run["hit_rate"] == run["cached_tokens"] / document["trace"]["input_tokens"]
    assert run["computed_prompt_tokens"] == document["trace"]["input_tokens"] - run["cached_tokens"]


@pytest.mark.parametrize("family", FAMILIES)
def test_under_pressure_no_policy_passes_the_bound(
    family: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every policy beside the others in one command: below the bound, which falls with the arena."""
    arguments = (*FAMILIES[family], "--arena-fraction", "12%,30%", "--policy", ",".join(scene.EVICTIONS))
    document = simulate(capsys, trace, *arguments)
    bounds = {arena["arena"]: arena["bound_tokens"] for arena in document["arenas"]}
    assert 0 < bounds["12%"] <= bounds["30%"] <= document["infinite"]["tokens"]
    assert [(run["arena"], run["policy"]) for run in document["runs"]] == [
        (arena, policy) for arena in ("12%", "30%") for policy in scene.EVICTIONS
    ]
    sizes = {arena["arena"]: arena["arena_bytes"] for arena in document["arenas"]}
    for run in document["runs"]:
        assert 0 < run["cached_tokens"] <= bounds[run["arena"]]
        assert sum(run["evicted_bytes"].values()) > 0
        assert max(run["peak_bytes"].values()) <= sizes[run["arena"]]
        assert all(run["peak_busy_bytes"][band] <= peak for band, peak in run["peak_bytes"].items())


def test_the_per_request_file_has_what_the_sums_are_made_of(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each request of each run, times from its arrival; requests that a burst holds up wait."""
    burst = write(tmp_path / "burst.jsonl", conversations(2, 40, 1))
    file = tmp_path / "rows.jsonl"
    arguments = ("--arena-fraction", "40%", "--policy", "lru,fifo", "--per-request", file)
    document = simulate(capsys, burst, *FULL, *arguments, "--max-running-requests", 4)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2 * 40
    for run in document["runs"]:
        mine = [row for row in rows if row["policy"] == run["policy"]]
        assert [row["line"] for row in mine] == list(range(1, 41))
        assert sum(row["cached_tokens"] for row in mine) == run["cached_tokens"]
        assert sum(row["output_tokens"] for row in mine) == run["output_tokens"]
        assert sum(row["recomputed_tokens"] for row in mine) == run["recomputed_tokens"]
        assert {row["outcome"] for row in mine} == {"length"}
        assert all(0 <= row["queued_ms"] < row["first_token_ms"] <= row["ended_ms"] for row in mine)
        assert max(row["queued_ms"] for row in mine) == run["queued_ms"]["p100"] > 0


def test_the_clock_is_the_one_that_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One request: a forward for its prompt, one for each further token; and arrivals as fast as asked."""
    row = {"timestamp": 0, "input_length": 1000, "output_length": 11, "hash_ids": [1, 2]}
    file = write(tmp_path / "one.jsonl", [row, row | {"timestamp": 10_000}])
    rows = tmp_path / "rows"
    arguments = ("--step-us", "2000", "--prefill-us", "3", "--decode-us", "500", "--speed", "2")
    document = simulate(capsys, file, *FULL, "--arena-bytes", "1MiB", *arguments, "--per-request", rows)
    first, second = (json.loads(line) for line in rows.read_text().splitlines()[:2])
    assert (first["first_token_ms"], first["ended_ms"]) == (2 + 3, 2 + 3 + 10 * 2.5)
    assert second["cached_tokens"] == 960
    assert second["first_token_ms"] == 2 + 40 * 0.003
    assert document["runs"][0]["simulated_s"] == 5 + 0.00212 + 0.025
    assert document["time_model"] == {"step_us": 2000, "prefill_us": 3, "decode_us": 500, "speed": 2}


def test_a_speed_that_takes_more_than_ten_years_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the least that this trace allows, before anything runs; the longest that is allowed runs."""
    row = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}
    file = write(tmp_path / "t", [row, row | {"timestamp": 10**9}])
    assert command.main([str(file), *FULL, "--speed", "1e-6"]) == 2
    said = "--speed 1e-6: the last request would come after more than ten years; a trace of 1,000,000,000 ms needs at"
    assert f"{said} least 0.00316" in capsys.readouterr().err
    (run,) = simulate(capsys, file, *FULL, "--speed", "0.0032", "--arena-bytes", "1MiB", "--policy", "lru")["runs"]
    assert run["simulated_s"] > 9 * 365 * 86_400


def test_what_never_fits_is_refused_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt above the arena: refused, in the denominator of the hit rate, and the rest is served."""
    small = {"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}
    file = write(tmp_path / "t", [small, small | {"input_length": 512 * 300, "hash_ids": list(range(300))}, small])
    document = simulate(capsys, file, *FULL, "--arena-bytes", "1MiB", "--policy", "lru")
    (run,) = document["runs"]
    assert run["refusals"] == {"never_fits": 1}
    assert run["ends"] == {"length": 2}
    assert run["hit_rate"] == run["cached_tokens"] / (512 * 302)


def test_what_a_line_says_of_a_request_reaches_the_core(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Namespaces, do-not-store, deadlines and priorities of the trace, under settings of `serve`."""
    row = {"input_length": 1024, "output_length": 40, "hash_ids": [1, 2]}
    rows: list[dict[str, Any]] = [
        row | {"store": False},
        row,  # finds nothing: the first was not stored
        row | {"namespace": "salt:x"},
        row | {"deadline_ms": 1},
        row,
    ]
    rows = [line | {"timestamp": APART_MS * at} for at, line in enumerate(rows)]
    rows += [row | {"timestamp": APART_MS * 9, "hash_ids": [9, k], "priority": k % 3, "id": f"p{k}"} for k in range(9)]
    file = write(tmp_path / "t", rows)
    out = tmp_path / "rows"
    arguments = (*FULL, "--arena-bytes", "1MiB", "--policy", "lru", "--per-request", out, "--no-deadline-check")
    arguments = (*arguments, "--cache-quotas", "salt:x=0.5")
    simulate(capsys, file, *arguments, "--max-running-requests", 1, "--no-bound")
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["cached_tokens"] for one in told[:5]] == [0, 0, 0, 960, 960]
    assert [one["outcome"] for one in told[:5]] == ["length", "length", "length", "deadline", "length"]
    served = sorted(told[5:], key=lambda one: one["queued_ms"])
    assert [int(one["id"][1:]) % 3 for one in served[1:]] == [2, 2, 2, 1, 1, 1, 0, 0]
    document = simulate(capsys, file, *arguments, "--schedule-policy", "fcfs")
    assert document["runs"][0]["refusals"] == {"bad_parameter": 6}
    assert document["settings"]["deadline_check"] is False
    assert document["settings"]["cache_quotas"] == {"salt:x": 500_000}


def test_jobs_change_nothing_but_time(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes find what one finds, figure for figure; so does a second time."""
    arguments = (trace, *FAMILIES["state"], "--arena-fraction", "20%", "--policy", "lru,value")
    documents = [simulate(capsys, *arguments, "--jobs", jobs) for jobs in (1, 2, 1)]
    for document in documents:
        for run in document["runs"]:
            del run["wall_s"], run["core_us_per_step"]
    assert documents[0] == documents[1] == documents[2]


@pytest.mark.parametrize(("name", "interval"), [("gemma-2-9b", 0), ("nemotron-nano-9b-v2", 256)])
def test_a_model_is_as_wide_as_its_plan_says(
    name: str, interval: int, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unit bytes from a config are those of `bandmaster plan`, and so is the checkpoint grid."""
    model = PUBLISHED / f"{name}.config.json"
    document = simulate(capsys, trace, "--model", model, "--arena-bytes", "8GiB", "--no-bound", "--page-size", 16)
    assert cli.main(["plan", str(model), "--arena-bytes", "8GiB", "--page-size", "16", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["stages"][0]["bands"]
    told = [(row["band"], row["unit_bytes"]) for row in document["shape"]["bands"]]
    assert told == [(row["band"], row["unit_bytes"]) for row in planned]
    assert document["shape"]["checkpoint_interval"] == interval
    assert document["runs"][0]["cached_tokens"] > document["arenas"][0]["bound_tokens"] == 0


def test_requests_beyond_the_model_are_told_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A note before, a refusal in the run."""
    row = {"timestamp": 0, "input_length": 8300, "output_length": 4, "hash_ids": list(range(17))}
    model = PUBLISHED / "gemma-2-9b.config.json"
    file = write(tmp_path / "t", [row, row | {"input_length": 512, "hash_ids": [1]}])
    document = simulate(capsys, file, "--model", model, "--arena-bytes", "8GiB", "--policy", "lru")
    assert "requests of more than the model's 8,192 tokens are refused" in document["notes"]
    assert document["runs"][0]["refusals"] == {"prompt_too_long": 1}


def test_refusals_are_explained_and_times_of_nothing_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was served: no time is told as if it were short, and each code of refusal has the first one's reason."""
    monkeypatch.setenv("COLUMNS", "200")
    row = {"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}
    file = write(tmp_path / "t", [row, row | {"priority": 3}, row | {"input_length": 51200, "hash_ids": [*range(100)]}])
    arguments = (file, *FULL, "--no-bound", "--policy", "lru,value", "--max-model-len", 600, *FCFS)
    (first, second) = simulate(capsys, *arguments)["runs"]
    assert first["refusals"] == {"bad_parameter": 1, "prompt_too_long": 1}
    assert first["first_refused"] == second["first_refused"]
    assert first["first_refused"]["bad_parameter"]["line"] == 2
    assert first["first_refused"]["prompt_too_long"]["line"] == 3
    assert command.main([*map(str, arguments)]) == 0
    text = capsys.readouterr().out
    assert text.count("refused, bad_parameter, first on line 2: ") == 1
    assert "priority" in text[text.index("first on line 2") :].splitlines()[0]
    file = write(tmp_path / "t", [row | {"priority": 1}] * 2)
    (run,) = simulate(capsys, file, *FULL, "--no-bound", "--policy", "lru", *FCFS)["runs"]
    assert set(run["queued_ms"].values()) == set(run["first_token_ms"].values()) == {None}
    assert command.main([str(file), *FULL, "--no-bound", "--policy", "lru", *FCFS]) == 0
    assert re.search(r"2 bad_parameter( +│ +[0-9]+){3}( +│ +-){4} ", capsys.readouterr().out)


def test_a_quota_of_a_namespace_that_nobody_has_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A note names it and the namespaces that there are; those of somebody are no news."""
    row = {"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}
    file = write(tmp_path / "t", [row, row | {"namespace": "salt:a"}])
    arguments = (*FULL, "--no-bound", "--policy", "lru", "--cache-quotas", "salt:a=0.1", "--cache-quotas", "a=0.2")
    notes = simulate(capsys, file, *arguments)["notes"]
    assert notes == ["--cache-quotas a: no request is in this namespace; the trace has '', 'salt:a'"]


def test_tables_align_and_say_what_they_show(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line of a table is as long as its frame; policies, bound, clock and bands are named."""
    monkeypatch.delenv("COLUMNS", raising=False)
    arguments = [str(trace), *FAMILIES["state"], "--arena-fraction", "20%", "--policy", "value,lru,value/grid"]
    assert cli.main(["simulate", *arguments]) == 0
    text = capsys.readouterr().out
    for word in ("value/grid", "offline bound", "infinite cache", "peak window:1024", "bytes/hit token", "5000 us"):
        assert word in text
    lines = [line for line in text.splitlines() if line and line[0] in "┏┃┡│├└"]
    assert len({len(line) for line in lines}) == 3, "one width for each table"
    ratio = re.search(r"lru +│ +[\d.]+% │ +[\d.]+% │ +[\d.]+% │ +1.000x", text)
    assert ratio is not None


def test_the_plot_shows_every_run_inside_its_panel(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Valid SVG, a panel for each run, no area outside the arena."""
    file = tmp_path / "plot.svg"
    arguments = ("--arena-fraction", "12%,40%", "--policy", "lru,value", "--plot", file)
    simulate(capsys, trace, *FAMILIES["state"], *arguments)
    root = ElementTree.fromstring(file.read_text())
    space = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{space}g")
    assert len(panels) == 4
    names = [panel.findall(f"{space}text")[0].text for panel in panels]
    assert names == ["12%, lru", "12%, value", "40%, lru", "40%, value"]
    for panel in panels:
        areas = panel.findall(f"{space}polygon")
        assert len(areas) >= 3, "bands that are used are drawn"
        points = [tuple(map(float, point.split(","))) for area in areas for point in area.attrib["points"].split()]
        assert all(0 <= x <= PANEL_WIDTH for x, _ in points)
        assert all(TOP - 0.1 <= y <= PANEL_HEIGHT - BOTTOM + 0.1 for _, y in points)
    assert int(root.attrib["width"]) == 2 * PANEL_WIDTH


def test_a_timeline_keeps_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    """However long it gets: the newest moment of each stretch stays, peaks are exact, gaps repeat what was before."""
    timeline, end = Timeline(1), 40 * BUCKETS
    for k in range(end):
        timeline.add(k * FIRST_WIDTH_NS, (k % 1000,), (k % 10,))
    live, idle = timeline.filled()
    assert len(live) <= BUCKETS
    width = timeline.width_ns // FIRST_WIDTH_NS
    newest = [min((bucket + 1) * width, end) - 1 for bucket in range(len(live))]
    assert live[:, 0].tolist() == [k % 1000 for k in newest]
    assert idle[:, 0].tolist() == [k % 10 for k in newest]
    assert (timeline.peak.tolist(), timeline.peak_busy.tolist()) == ([999], [990])
    gaps = Timeline(1)
    gaps.add(0, (5,), (0,))
    gaps.add(3 * FIRST_WIDTH_NS, (7,), (0,))
    assert gaps.filled()[0][:, 0].tolist() == [5, 5, 5, 7]


def test_a_run_that_does_not_account_for_everything_fails_the_command(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, the run and what was wrong; the other runs are shown all the same."""
    check = Engine.check_rest

    def broken(engine: Engine) -> None:
        check(engine)
        if engine.config.eviction_policy == "lru":
            raise Miscounted("a request is missing")

    monkeypatch.setattr(Engine, "check_rest", broken)
    assert command.main([str(trace), *FULL, "--policy", "value,lru"]) == 1
    shown = capsys.readouterr()
    assert "bandmaster simulate: 20% lru: Miscounted at broken: a request is missing\n" in shown.err
    assert "20% lru failed: Miscounted" in shown.out
    assert "value" in shown.out


REFUSED: list[tuple[tuple[str, ...], str]] = [
    ((), "neither --band nor --model describe what is stored; give one of them"),
    ((*FULL, "--model", "x"), "--band and --model both describe what is stored"),
    (("--band", "ful=1"), "--band 'ful=1' is not full=BYTES/PAGE, window:TOKENS=BYTES/PAGE or state:INTERVAL"),
    (("--band", "full:3=1"), "--band full:3=1: full attention has no number; write full=1/page"),
    (("--band", "full=x/page"), "--band full=x/page: 'x' is no size; write bytes, or 512KiB, 7MiB"),
    (("--band", "full=1/inch"), "--band full=1/inch: 'inch' is not page, token or a number of tokens"),
    (("--band", "full=1/128"), "1 bytes for 128 tokens are no whole number of bytes for a page of 64"),
    ((*FULL, *FULL), "--band full=1000/page: the band full is there already; give each once"),
    ((*WINDOW,), "--band: full is missing (window:1024 given); a model of windows only has full=0/page"),
    (("--band", "full=0/page"), "--band: no band has a byte, so nothing ever fills an arena"),
    ((*FULL, "--band", "window=1"), "window: needs the tokens of the window, 1 to 16777216, not nothing"),
    ((*FULL, "--band", "state:0=1"), "state: needs the tokens between two checkpoints, 1 to 16777216, not '0'"),
    ((*FULL, "--band", "state:64=1/page"), "a state's bytes are those of a slot; write 1/slot, not 1/page"),
    ((*FULL, "--band", "state:65=1"), "--checkpoint-interval 65 is no multiple of --page-size 64"),
    ((*FULL, *STATE, "--checkpoint-interval", "64"), "--checkpoint-interval 64: --band state:512 has it already"),
    ((*FULL, "--tp", "2"), "--tp 2 divides a model's layers; --band has the bytes of one rank already"),
    ((*FULL, "--arena-bytes", "1"), "--arena-bytes '1' is no size of at least 1,048,576 bytes; write 80GiB"),
    ((*FULL, "--arena-bytes", "1GiB", "--arena-fraction", "5%"), "both say how large arenas are; give one of them"),
    ((*FULL, "--arena-fraction", "0%"), "--arena-fraction '0%' is no part above 0, like 5% or 0.05"),
    ((*FULL, "--arena-fraction", "5%,5%"), "--arena-fraction '5%,5%': 5% is there twice"),
    ((*FULL, "--arena-fraction", "5%,"), "--arena-fraction '5%,': an entry is empty"),
    ((*FULL, "--arena-fraction", "5%,,"), "--arena-fraction '5%,,': an entry is empty"),
    ((*FULL, "--arena-fraction", ""), "--arena-fraction '': it is empty"),
    ((*FULL, "--arena-bytes", ""), "--arena-bytes '': it is empty"),
    ((*FULL, "--arena-bytes", "1GiB", "--arena-fraction", ""), "both say how large arenas are; give one of them"),
    ((*FULL, "--policy", ""), "--policy '': it is empty"),
    ((*FULL, "--policy", "lru,,"), "--policy 'lru,,': an entry is empty"),
    ((*FULL, "--arena-fraction", "0.0001%"), "arena 0.0001%: an arena of"),
    ((*FULL, "--policy", "best"), "--policy 'best' is none of value, lru, lfu, fifo, priority, with /likely or /grid"),
    ((*FULL, "--policy", "lru/some"), "--policy 'lru/some' is none of"),
    ((*FULL, "--step-us", "-1"), "--step-us: '-1' is no number from 0 to"),
    ((*FULL, "--speed", "0"), "--speed: '0' is no number from 1e-06 to"),
    ((*FULL, "--speed", "nan"), "--speed: 'nan' is no number from"),
    ((*FULL, "--requests", "x"), "--requests: 'x' is no whole number from 1 to"),
    ((*FULL, "--requests", "0"), "--requests: '0' is no whole number from 1 to"),
    ((*FULL, "--requests", "9" * 5000), "is no whole number from 1 to"),
    ((*FULL, "--block-tokens", "256"), "hash_ids do not cover input_length"),
    ((*FULL, "--jobs", "0"), "--jobs: '0' is no whole number from 1 to 1024"),
    ((*FULL, "--page-size", "0"), "--page-size (flag): '0' is not allowed; allowed: 1 to 4096"),
    ((*FULL, "--max-batched-tokens", "100", "--max-running-requests", "200"), "--max-num-batched-tokens 100 is below"),
    ((*FULL, "--plot", "/no/such/place.svg"), "--plot /no/such/place.svg cannot be written"),
    ((*FULL, "--per-request", "/no/such/place"), "--per-request /no/such/place cannot be written"),
    ((*FULL, "--per-request", "/"), "--per-request / cannot be written: [Errno 21] Is a directory"),
    ((*FULL, "--per-request", ""), "--per-request '' names no file"),
    ((*FULL, "--plot", "-", "--json"), "--plot - and --json both take standard output; give one of them a file"),
    ((*FULL, "--plot", "-", "--per-request", "-"), "--per-request and --plot both name -; give each its own"),
    (("--model", "/no/such/model"), "/no/such/model"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[said[:50] for _, said in REFUSED])
def test_what_cannot_be_simulated_is_refused_before_anything_runs(
    arguments: tuple[str, ...], said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag, the value, what is allowed; exit code 2, nothing on standard output."""
    assert command.main([str(trace), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("bandmaster simulate: ")
    assert said in shown.err
