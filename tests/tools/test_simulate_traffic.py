"""Traces: what a line means, what is refused, and which pages are the same."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allocator.geometry import BandGeometry
from tests.tidy.source import ROOT
from tests.tools.simulate_world import as_tokens, conversations, trace_of, write
from tools.simulate.errors import SimulateError
from tools.simulate.paths import everything, find_reuse
from tools.simulate.traffic import read_trace

GOOD = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [7, 8]}

REFUSED: list[tuple[dict[str, Any] | str, str]] = [
    ("{", "line 2 is no JSON: "),
    ("[" * 100_000, "line 2 is nested too deeply; a request is one object whose values are numbers"),
    ('{"timestamp": 6, "other": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2 is nested too deeply"),
    ("[1]", r"line 2 is no JSON object, but '\[1\]'"),
    ({"output_length": 1}, "line 2 lacks timestamp"),
    ({"timestamp": 6, "hash_ids": [1]}, "line 2 lacks output_length"),
    (GOOD | {"timestamp": 4}, "line 2: timestamp 4 is before line 1's 5; sort the file by timestamp"),
    (GOOD | {"timestamp": "6"}, "line 2: timestamp must be a number from 0 to 9007199254740992, not '6'"),
    (
        GOOD | {"timestamp": 5 + 10**15},
        "line 2: timestamp 1000000000000005 is 1000000000000000 behind the first one's 5; it may be 316224000000, ten",
    ),
    (GOOD | {"timestamp": -1}, "line 2: timestamp must be a number from 0 to"),
    (GOOD | {"input_length": 0}, "line 2: input_length must be a whole number from 1 to 16777216, not 0"),
    (GOOD | {"input_length": 700.5}, "line 2: input_length must be a whole number .* not 700.5"),
    (GOOD | {"input_length": True}, "line 2: input_length must be a whole number .* not True"),
    (GOOD | {"output_length": 0}, "line 2: output_length must be a whole number from 1 to 16777216, not 0"),
    (
        GOOD | {"hash_ids": [7]},
        "line 2: 1 hash_ids do not cover input_length 700: 2 blocks of 512 tokens do; pass --bl",
    ),
    (GOOD | {"hash_ids": []}, r"line 2: hash_ids must be a list of at least one whole number, not \[\]"),
    (GOOD | {"hash_ids": [7, "x"]}, r"line 2: hash_ids\[1\] must be a whole number .* not 'x'"),
    (GOOD | {"tokens": [1]}, "line 2: it has both tokens and hash_ids; a prompt is told by one of them"),
    ({"timestamp": 6, "output_length": 1}, "line 2: it has neither tokens nor hash_ids"),
    ({"timestamp": 6, "output_length": 1, "tokens": [-1]}, r"line 2: tokens\[0\] must be a whole number from 0 to"),
    (
        {"timestamp": 6, "output_length": 1, "tokens": [1, 2], "input_length": 3},
        "line 2: input_length 3 is not the 2 tokens that it has",
    ),
    (GOOD | {"id": "line-1"}, "line 2: id 'line-1' is that of line 1; give every request its own, or none"),
    (GOOD | {"id": ""}, "line 2: id must be a text of 1 to 256 characters, not ''"),
    (GOOD | {"namespace": 3}, "line 2: namespace must be a text of 0 to 256 characters, not 3"),
    (GOOD | {"priority": 10**7}, "line 2: priority must be a whole number from -1000000 to 1000000, not 10000000"),
    (GOOD | {"deadline_ms": -1}, "line 2: deadline_ms must be a whole number from 0 to"),
    (GOOD | {"store": 1}, "line 2: store must be true or false, not 1"),
    (GOOD | {"pin_ms": None}, "line 2: pin_ms must be a whole number from 0 to .* not None"),
]


@pytest.mark.parametrize(("row", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_a_line_that_is_no_request_is_refused(row: dict[str, Any] | str, said: str, tmp_path: Path) -> None:
    """The file, the line, the field, what stood there and what is allowed."""
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    with pytest.raises(SimulateError, match=said) as caught:
        read_trace(str(file))
    assert str(caught.value).startswith(f"{file}, ")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """Missing, empty, and damaged gzip."""
    with pytest.raises(SimulateError, match="cannot be read"):
        read_trace(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(SimulateError, match="has no lines; give one JSON object a line with timestamp, output_length"):
        read_trace(str(tmp_path / "empty"))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode() * 100)[:-20])
    with pytest.raises(SimulateError, match=r"cut.gz cannot be read"):
        read_trace(str(tmp_path / "cut.gz"))
    packed = gzip.compress(json.dumps(GOOD).encode() * 100)
    (tmp_path / "flipped.gz").write_bytes(packed[:12] + b"\xff" * 20 + packed[32:])
    with pytest.raises(SimulateError, match=r"flipped.gz cannot be read"):
        read_trace(str(tmp_path / "flipped.gz"))


def test_a_gzipped_file_is_the_same_trace(tmp_path: Path) -> None:
    """Whatever it is called."""
    rows = conversations(1, 9, 10)
    plain = write(tmp_path / "a", rows)
    (tmp_path / "b").write_bytes(gzip.compress(plain.read_bytes()))
    one, two = read_trace(str(plain)), read_trace(str(tmp_path / "b"))
    assert [one.prompt(k).tolist() for k in range(9)] == [two.prompt(k).tolist() for k in range(9)]
    assert (one.vocab_size, one.longest) == (two.vocab_size, two.longest)


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_may_be_a_pipe(packed: bool, tmp_path: Path) -> None:
    """What can be read only once is read once."""
    plain = write(tmp_path / "a", conversations(1, 9, 10))
    read, written = os.pipe()
    with open(written, "wb") as file:
        file.write(gzip.compress(plain.read_bytes()) if packed else plain.read_bytes())
    assert len(read_trace(f"/dev/fd/{read}").lines) == 9
    os.close(read)


def test_a_dash_is_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there be a file of that name."""
    monkeypatch.chdir(tmp_path)
    Path("-").write_text("no trace")
    program = "from tools.simulate.traffic import read_trace; print(len(read_trace('-').lines))"
    with write(tmp_path / "a", conversations(1, 9, 10)).open() as rows:
        done = subprocess.run([sys.executable, "-c", program], stdin=rows, cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == b"9\n"


def test_times_count_from_the_first_line_and_strange_fields_are_named(tmp_path: Path) -> None:
    """A trace that begins at an epoch's time begins at 0; fields that say nothing here are told."""
    rows = [GOOD | {"timestamp": 1.7e12, "turn": 1}, GOOD | {"timestamp": 1.7e12 + 1.5, "chat": 2}]
    trace = trace_of(tmp_path, rows)
    assert [line.at_ns for line in trace.lines] == [0, 1_500_000]
    assert trace.unused == ("chat", "turn")
    assert len(read_trace(trace.path, most=1).lines) == 1


def test_prompts_share_what_their_blocks_share_and_outputs_share_nothing(tmp_path: Path) -> None:
    """Equal tokens exactly as far as the blocks are equal; all ids lie inside the vocabulary, outputs' apart."""
    rows = [GOOD, GOOD | {"hash_ids": [7, 9]}, {"timestamp": 9, "output_length": 1, "tokens": [7, 0, 7]}]
    trace = trace_of(tmp_path, rows)
    first, second, third = (trace.prompt(k) for k in range(3))
    assert len(first) == 700
    assert np.array_equal(first[:512], second[:512])
    assert not (first[512:] == second[512:]).any()
    assert third.tolist() == [7, 0, 7]
    outputs = {trace.output_token(k) for k in range(3)}
    assert len(outputs) == 3
    assert not outputs & set(np.concatenate([first, second, third]).tolist())
    assert max(outputs) < trace.vocab_size
    assert not set(third.tolist()) & set(first.tolist())


@pytest.mark.parametrize("page", [64, 512, 48, 100])
@pytest.mark.parametrize("seed", range(3))
def test_reuse_is_what_comparing_all_prompts_finds(page: int, seed: int, tmp_path: Path) -> None:
    """Hits, when a page was computed last, and what holds everything, against the plainest search; blocks or tokens."""
    rows = conversations(seed, 30, 10)
    trace = trace_of(tmp_path, rows)
    interval = page * 3
    reuse = find_reuse(trace, page, interval)
    prompts = [trace.prompt(k).tolist() for k in range(len(rows))]
    previous, pages, grid, ends = [], set(), set(), set()
    for k, prompt in enumerate(prompts):
        most = (len(prompt) - 1) // page
        for at in range(most):
            whole = prompt[: (at + 1) * page]
            earlier = [j for j in range(k) if prompts[j][: (at + 1) * page] == whole]
            if not earlier:
                most = at
                break
            previous.append(earlier[-1])
        assert reuse.hit_pages[k] == most
        whole = prompt + [trace.output_token(k)] * (rows[k]["output_length"] - 1)
        pages |= {tuple(whole[:end]) for end in range(page, len(whole) + 1, page)}
        grid |= {tuple(whole[:end]) for end in range(interval, len(whole) + 1, interval)}
        ends |= {tuple(prompt[: len(prompt) // page * page]), tuple(whole[: len(whole) // page * page])} - {()}
    assert reuse.previous.tolist() == previous
    assert (reuse.pages, reuse.grid_points) == (len(pages), len(grid))
    assert sorted(reuse.ends.tolist()) == sorted(len(end) // page for end in ends)
    assert reuse.hit_tokens() == len(previous) * page
    bands = [
        BandGeometry("state", "state", 7),
        BandGeometry("window:200", "window", 5, 200),
        BandGeometry("full", "full", 3),
    ]
    total = everything(reuse, bands)
    window = sum(min(len(end) // page, -(-199 // page)) for end in ends)
    assert total.units == (len(grid), min(window, len(pages)), len(pages))
    assert total.total_bytes == 7 * total.units[0] + 5 * total.units[1] + 3 * total.units[2]
    again = find_reuse(trace_of(tmp_path, as_tokens(trace, rows)), page, interval)
    assert again.previous.tolist() == previous
    assert (again.pages, again.grid_points) == (reuse.pages, reuse.grid_points)


def test_namespaces_and_requests_that_are_not_stored_share_nothing(tmp_path: Path) -> None:
    """Another namespace finds nothing; what is not stored is found by nobody, though it finds."""
    later = GOOD | {"input_length": 1024}
    rows = [later, later | {"namespace": "salt:x"}, later | {"hash_ids": [7, 9], "store": False}, later]
    rows.append(later | {"hash_ids": [7, 9]})
    reuse = find_reuse(trace_of(tmp_path, rows), 512)
    assert reuse.hit_pages.tolist() == [0, 0, 1, 1, 1]
    assert reuse.previous.tolist() == [0, 2, 3]
