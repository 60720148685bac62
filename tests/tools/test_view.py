"""`bandmaster view`: what a page is given is what the journal's steps lead to, unit by unit and request by request."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from allocator.columns import i32, pack_i32
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.ops import Flush, Free, Part, Publish, Take
from allocator.physical.units import BEYOND, LIVE
from daemon.core.inputs import Arrived
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from ipc.messages import Forward, Generate, ModelFacts, Sampling, Step
from journal.reader import Walk
from journal.records import Kind
from journal.snapshots import snapshot_names
from journal.storage import DiskStorage
from tests.tools.view_scenes import DATED_NS, Dated, pressed, stages_behind_steps, troubled
from tools.replay import replay_directory
from tools.trim import main as trim
from tools.view import arena
from tools.view.arena import COUNTS, Arena
from tools.view.command import Range, follow, main, range_of
from tools.view.film import STEP_COLUMNS, Film
from tools.view.heat import POINTS, ROWS, ActiveAt, boards, heat, pieces
from tools.view.pack import Column, bytes_of, pack_columns, read_columns, text_of
from tools.view.requests import HOLDS, Life, Phase, Requests
from tools.view.units import FIXED, MOVED, BlockReader, BlockWriter, Board


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three bands under pressure."""
    return pressed(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def film(journal: Path) -> Film:
    """All of it."""
    return follow(DiskStorage(journal), Range())[0]


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lives, three epochs, two stages."""
    return troubled(tmp_path_factory.mktemp("trouble"))


@pytest.mark.parametrize("differences", [False, True])
@pytest.mark.parametrize("most", [1, 255, 70_000, 1 << 31, 1 << 46])
def test_columns_come_back(differences: bool, most: int) -> None:
    """Values of every width, of either sign, as they are and as differences."""
    rng = random.Random(most)
    columns = [[rng.randint(low, most) for _ in range(size)] for low in (0, -most) for size in (0, 1, 300)]
    chunk = pack_columns(Column(values, differences) for values in columns)
    assert [column.tolist() for column in read_columns(chunk)] == columns


@pytest.mark.parametrize("size", range(12))
def test_chunks_come_back_out_of_text(size: int) -> None:
    """Bytes of every length, and nothing in the text that ends a script."""
    data = random.Random(size).randbytes(size) + bytes(range(256)) * size
    text = text_of(data)
    assert bytes_of(text) == data
    assert "<" not in text


def test_a_column_that_a_page_cannot_hold_is_refused() -> None:
    """A page computes in doubles: 48 bits are kept, and no more."""
    with pytest.raises(ValueError, match="50 bits"):
        pack_columns([Column([1 << 49])])


@pytest.mark.parametrize("scene", ["journal", "trouble"])
def test_every_unit_of_every_step_is_the_replicas(scene: str, request: pytest.FixtureRequest) -> None:
    """Blocks read back give each unit's state and holder behind each step, and counts and spans are the chains'."""
    directory: Path = request.getfixturevalue(scene)
    film = follow(DiskStorage(directory), Range())[0]
    steps = np.arange(film.position)
    truth = {seen.sequence: seen for seen in stages_behind_steps(directory)}
    assert film.position == len(truth) > 100
    for at, stretch, board in boards(film, steps):
        seen = truth[film.steps["sequence"][at]]
        for place, (states, holders, counts, span) in enumerate(seen.bands):
            assert np.array_equal(board.codes[place], states), f"step {at}, band {place}"
            assert np.array_equal(board.ids[place], holders), f"step {at}, band {place}"
            named = dict(zip(COUNTS, _counts(stretch, place, at), strict=True))
            assert tuple(named[name] for name in COUNTS[:6]) == counts
            assert (named["begin"], named["end"]) == span


def test_any_step_of_a_block_can_be_gone_to(film: Film) -> None:
    """Applied at once, or step by step, a block leads to the same board."""
    block, stretch = film.writer.blocks[0], film.stretches[0]
    sizes = [band[2] for band in stretch.bands]
    slow, slowly = Board.empty(sizes), BlockReader(block, len(sizes))
    for number in range(block.steps + 1):
        slowly.apply(slow, number)
        if number % 37 == 0 or number == block.steps:
            fast = Board.empty(sizes)
            BlockReader(block, len(sizes)).apply(fast, number)
            for ours, theirs in ((fast.codes, slow.codes), (fast.ids, slow.ids), (fast.takers, slow.takers)):
                assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scene", ["journal", "trouble"])
def test_cached_units_are_those_whose_taker_does_not_run(scene: str, request: pytest.FixtureRequest) -> None:
    """The count that follows the changes is a recount of the board, at every step."""
    assert _recounted(follow(DiskStorage(request.getfixturevalue(scene)), Range())[0]) > 100


@pytest.mark.parametrize("scene", ["journal", "trouble"])
@pytest.mark.parametrize("steps", [1, 7])
def test_steps_are_told_alike_in_batches_of_every_length(
    scene: str, steps: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared step by step or many at once: the same changes in the same blocks, counts and moves."""
    directory: Path = request.getfixturevalue(scene)
    usual = follow(DiskStorage(directory), Range())[0]
    monkeypatch.setattr(arena, "BATCH_STEPS", steps)
    other = follow(DiskStorage(directory), Range())[0]
    assert other.writer.blocks == usual.writer.blocks
    assert other.steps == usual.steps
    for one, another in zip(other.stretches, usual.stretches, strict=True):
        assert one.counts == another.counts


def test_a_slot_that_is_freed_and_taken_in_one_step_is_anothers() -> None:
    """At the place where it was: nothing of the unit differs but who took it, and the count of those left behind."""
    bands = [BandGeometry("state", "state", 64), BandGeometry("full", "full", 64)]
    shape = Geometry(4, 64, 8, [StageGeometry(64 * 65, 128, bands)])
    memory = Arena(shape, ModelFacts("double", "none", 100, 64, "float32", [7]), CoreConfig())
    requests, slot = Requests(), [Part(0, pack_i32([3]))]
    for number in (1, 2):
        requests.lives[number] = Life(number, f"r{number}", "f", 1, 1, 0, 0)
        requests.decided(Decided(1, "admitted", number, "", {"row": number, "generation": 1}), None, 0, 0)
    takes = [Take([*slot, Part(1, pack_i32([page]))]) for page in (1, 2)]
    for seq, ops in enumerate(([takes[0]], [Free(slot), takes[1]], [Flush(0)]), 1):
        if seq == 3:
            requests.decided(Decided(1, "ended", 2, "stop", {}), None, 2, 2)
        for request, holds in requests.changed:
            memory.held(request, holds)
        requests.changed.clear()
        row, one, none = (pack_i32([number]) for number in (seq, 1, 0))
        forward = Forward(row, one, none, one, b"\0", b"", row, none, row, [], slot[0].ids)
        memory.apply(Step(1, seq, 0, 0, [], list(ops), forward if seq < 3 else None, b""), requests)
    batch = memory.settle(requests)
    assert batch.changes[0].counts.tolist() == [1, 1, 0]
    assert batch.changes[0].takers.tolist() == [1, 2]
    assert batch.counts[COUNTS.index("cached")].tolist() == [0, 0, 1]


def test_takers_are_the_requests_whose_tables_name_the_page(journal: Path, film: Film) -> None:
    """A page that a row got with a step's take is that row's request's; every page has a taker."""
    steps = {record.sequence: record for record in Walk(DiskStorage(journal)).records() if record.kind == Kind.STEPPED}
    known = seen = 0
    for at, stretch, board in boards(film, np.arange(film.position)):
        step: Any = steps[film.steps["sequence"][at]].decode()
        shapes = stretch.geometry.stages[0].bands
        full = next(place for place, band in enumerate(stretch.bands) if shapes[band[1]].kind == "full")
        live = board.codes[full] == LIVE
        known += int(np.count_nonzero(board.takers[full][live]))
        seen += int(np.count_nonzero(live))
        parts = [part for op in step.ops if isinstance(op, Take) for part in op.parts]
        taken = {id for part in parts if part.band == stretch.bands[full][1] for id in i32(part.ids).tolist()}
        if step.forward is None or not taken:
            continue
        whose = dict(zip(board.ids[full][live].tolist(), board.takers[full][live].tolist(), strict=True))
        rows = i32(step.forward.table_rows).tolist()
        pages = i32(step.forward.table_pages).tolist()
        for row, page in zip(rows, pages, strict=True):
            if page in taken and page in whose:
                assert whose[page] in _running_at(film, at), f"page {page} of row {row}"
    assert known == seen > 1000


def test_moves_are_told_with_where_they_came_from(film: Film) -> None:
    """Under pressure units move, and each that moved was live elsewhere behind the step before."""
    block, stretch = film.writer.blocks[0], film.stretches[0]
    columns = list(read_columns(_plain(block)))
    counts, positions, codes, ids, _ = (
        columns[k : k + len(stretch.bands)] for k in range(0, len(columns), len(stretch.bands))
    )
    moved = sum(int(np.count_nonzero(column == MOVED)) for column in codes)
    assert moved == sum(film.steps["moved"][: block.steps]) > 0
    sizes = [band[2] for band in stretch.bands]
    before, reader = Board.empty(sizes), BlockReader(block, len(sizes))
    starts = [np.concatenate([[0], np.cumsum(column)]) for column in counts]
    lives = [np.cumsum((column == LIVE) | (column >= FIXED)) for column in codes]
    for number in range(1, block.steps + 1):
        reader.apply(before, number - 1)
        for place in range(len(sizes)):
            for change in range(int(starts[place][number]), int(starts[place][number + 1])):
                if codes[place][change] == MOVED:
                    id = int(ids[place][lives[place][change] - 1])
                    source = np.flatnonzero((before.ids[place] == id) & (before.codes[place] == LIVE))
                    assert source.size == 1
                    assert source[0] != positions[place][change]


def test_a_published_unit_is_fixed_until_its_use_is_released() -> None:
    """Live units at addresses that a peer knows are told apart, and counted."""
    bands = [BandGeometry("full", "full", 64)]
    shape = Geometry(4, 64, 0, [StageGeometry(64 * 65, 64, bands)])
    memory = Arena(shape, ModelFacts("double", "none", 100, 64, "float32", [7]), CoreConfig())
    requests = Requests()
    parts = [Part(0, pack_i32([2, 3]))]
    script: list[tuple[list[int], list[Any]]] = [
        ([], [Take([Part(0, pack_i32([1, 2, 3]))])]),
        ([], [Publish(1, parts)]),
        ([1], [Flush(4)]),
        ([], [Free([Part(0, pack_i32([1, 2, 3]))])]),
    ]
    for seq, (released, ops) in enumerate(script, 1):
        memory.apply(Step(1, seq, 0, 0, released, ops, None, b""), requests)
    batch = memory.settle(requests)
    assert batch.counts[COUNTS.index("fixed")].tolist() == [0, 2, 0, 0]
    assert batch.counts[COUNTS.index("live")].tolist() == [3, 3, 3, 0]
    assert batch.changes[0].counts.tolist() == [3, 2, 2, 3]
    assert batch.changes[0].codes[3:7].tolist() == [FIXED, FIXED, LIVE, LIVE]


def test_the_picture_is_the_board_at_its_addresses(film: Film) -> None:
    """Shares of rows, at random steps, recounted address by address."""
    shown = pieces(film.stretches)
    picture = heat(film, shown)
    rng, active = random.Random(5), ActiveAt(film)
    steps = sorted(rng.sample(picture.steps, 25))
    total = sum(end - begin for begin, end in shown[0])
    for at, stretch, board in boards(film, np.asarray(steps)):
        holding, column = active.at(at), picture.steps.index(at)
        for row in rng.sample(range(ROWS), 12):
            used = cached = hole = 0
            for point in range(row * POINTS, (row + 1) * POINTS):
                address = shown[0][0][0] + (2 * point + 1) * total // (2 * ROWS * POINTS)
                for place, (_, band, capacity, anchor, direction) in enumerate(stretch.bands):
                    unit = address // stretch.geometry.stages[0].bands[band].unit_bytes
                    position = (unit - anchor) * direction
                    if 0 <= position < capacity and board.codes[place][position] != BEYOND:
                        code, taker = board.codes[place][position], board.takers[place][position]
                        used += int(code == LIVE and holding[taker])
                        cached += int(code == LIVE and not holding[taker])
                        hole += int(code == 1)
            first, second = (int(picture.planes[0][k, row, column]) for k in (0, 1))
            assert (first >> 4, first & 15, second >> 4) == (used, cached, hole), f"step {at}, row {row}"
    assert len(shown[0]) == 1, "nothing is left out of an arena that is full"


def test_phases_are_what_decisions_and_rows_say(film: Film) -> None:
    """Every request waits, is prefilled, decodes and ends, in this order, with what the pressure does between."""
    by_request: dict[int, list[int]] = {}
    for number, phase in zip(film.requests.phases.requests, film.requests.phases.phases, strict=True):
        by_request.setdefault(number, []).append(phase)
    assert set(by_request) == set(film.requests.lives)
    assert len(by_request) > 30
    for number, phases in by_request.items():
        assert phases[0] == Phase.WAITING
        assert phases[1] == Phase.PREFILL
        assert phases[-1] == Phase.OVER, f"request {number}"
        retracted = film.requests.lives[number].retractions
        assert phases.count(Phase.RETRACTED) == retracted
        assert phases.count(Phase.PREFILL) >= 1 + retracted
    assert any(Phase.DECODE in phases for phases in by_request.values())


def test_decode_rows_and_prompt_tokens_add_up_to_what_was_computed(journal: Path, film: Film) -> None:
    """Over all steps: prompt tokens as the core counted them, and one row for each further token."""
    closed: Any = [record.decode() for record in Walk(DiskStorage(journal)).records()][-1]
    assert sum(film.steps["prefill_tokens"]) == closed.totals["prompt_tokens_total"]
    assert sum(film.steps["decode_rows"]) >= closed.totals["output_tokens_total"] - len(film.requests.lives)
    assert all(took > 0 for took in film.steps["took_us"])


def test_who_comes_back_with_other_tokens_waits_and_holds_nothing() -> None:
    """Its row is given back with the decision `resumed`; what the cache had stays that of the first start."""
    requests = Requests()
    arrived = Arrived(1, "fe", Generate("a", bytes(8 * 12), Sampling()), 0)
    row = {"row": 3, "generation": 1, "tokens": 12, "cached_tokens": 4}
    decisions = [
        ("accepted", {"n": 1, "max_tokens": 9}),
        ("admitted", row),
        ("resumed", {"held_tokens": 2, "output_tokens": 5, "confirmed_tokens": 0}),
        ("admitted", row | {"generation": 2, "tokens": 14, "cached_tokens": 12}),
    ]
    phases, held = [], []
    for at, (verdict, numbers) in enumerate(decisions):
        requests.decided(Decided(1, verdict, 1, "", numbers), arrived, at, at)
        phases.append(requests.lives[1].phase)
        held.append(bool(requests.active[1]))
    assert phases == [Phase.WAITING, Phase.PREFILL, Phase.WAITING, Phase.PREFILL]
    assert held == [False, True, False, True]
    assert requests.lives[1].cached_tokens == 4


def test_lanes_hold_one_life_at_a_time(film: Film) -> None:
    """No two lives share a lane at one position, and no lane is empty."""
    lanes, every = film.requests.lanes(film.position)
    assert lanes == every
    taken: dict[int, list[tuple[int, int]]] = {}
    for life in film.requests.by_number():
        taken.setdefault(life.lane, []).append((life.at, max(life.end_at, life.at + 1)))
    assert sorted(taken) == list(range(lanes))
    for spans in taken.values():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_a_long_queue_has_lanes_of_its_own() -> None:
    """Behind the lanes of those that run; who is never admitted has no other."""
    requests = Requests()
    for number in range(1, 401):
        held = number * 10 if number % 50 else -1
        requests.lives[number] = Life(number, f"r{number}", "f", 1, 1, number, 0, number * 10 + 35, 0, held_at=held)
    running, every = requests.lanes(5000)
    assert running == 4
    assert 300 < every - running <= 400
    for life in requests.lives.values():
        assert (life.lane < running) == (life.held_at >= 0)
        assert running <= life.queue_lane < every


def test_lives_epochs_and_deaths_are_marked(trouble: Path) -> None:
    """In their order, with the epochs' steps beside each other, and nobody on a row behind them."""
    film = follow(DiskStorage(trouble), Range())[0]
    assert [mark.kind for mark in film.marks] == [
        "opened",
        "began",
        "ended",
        "began",
        "cut",
        "opened",
        "began",
        "closed",
    ]
    assert "the world ends it" in film.marks[2].text
    assert [(one.life, one.epoch) for one in film.stretches] == [(1, 1), (1, 2), (2, 1)]
    borders = [(one.first, one.end) for one in film.stretches]
    assert borders[0][0] == 0
    assert borders[-1][1] == film.position
    assert all(end == begin for (_, end), (begin, _) in pairwise(borders))
    at = film.marks[5].at
    away = [n for n, p, ph in _phases(film) if p == at and ph == Phase.AWAY]
    back = [n for n, p, ph in _phases(film) if p == at and ph == Phase.WAITING]
    assert set(away) & set(back), "who was away is taken over"
    assert any(ph == Phase.REQUEUED for _, _, ph in _phases(film))


def test_a_part_is_the_same_part_of_the_whole(journal: Path, film: Film) -> None:
    """--from and --to: steps, decisions and boards of the range are those of the whole journal."""
    first, last = film.steps["sequence"][80], film.steps["sequence"][200]
    part = follow(DiskStorage(journal), Range(first, last))[0]
    assert list(part.steps["sequence"]) == list(film.steps["sequence"][80:201])
    for name in STEP_COLUMNS:
        if name not in ("us", "took_us"):
            assert list(part.steps[name]) == list(film.steps[name][80:201]), name
    whole = {at: board for at, _, board in _copies(film, range(80, 201, 10))}
    for at, _, board in _copies(part, range(0, 121, 10)):
        other = whole[at + 80]
        assert all(np.array_equal(a, b) for a, b in zip(board.codes, other.codes, strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(board.takers, other.takers, strict=True))
    inside = [at for at, n in enumerate(film.decisions.sequences) if first <= n <= last]
    assert list(part.decisions.sequences) == [film.decisions.sequences[at] for at in inside]
    assert part.decisions.texts == [film.decisions.texts[at] for at in inside]
    assert all(life.end_at != 0 or life.at == 0 for life in part.requests.lives.values())


def test_the_life_of_a_request_is_inside_its_range(journal: Path, film: Film) -> None:
    """--request: the range has its acceptance and its end."""
    shown = range_of(DiskStorage(journal), 20)
    told = film.decisions
    mine = [told.sequences[at] for at, number in enumerate(told.requests) if number == 20]
    assert shown.first <= min(mine)
    assert max(mine) <= shown.last
    part = follow(DiskStorage(journal), shown)[0]
    assert part.requests.lives[20].end_at >= 0


def test_snapshots_that_are_later_are_not_worth_a_note(tmp_path: Path) -> None:
    """A sound journal is shown from its start where none is before the part; replay, if asked for one, says so."""
    directory = troubled(tmp_path / "j", snapshot_bytes=18_000)
    for shown in (Range(1, 20), Range(2)):
        assert follow(DiskStorage(directory), shown)[1] == []
    notes = replay_directory(str(directory), 5, from_snapshot=True).notes
    assert notes == ["there is no snapshot behind a record before 5: replay begins at the start"]


def test_a_trimmed_journal_is_shown_from_its_snapshot(tmp_path: Path) -> None:
    """What is behind a snapshot is shown as in the whole journal, with the same units, takers and requests."""
    directory = troubled(tmp_path / "j", snapshot_bytes=18_000)
    whole = follow(DiskStorage(directory), Range())[0]
    assert trim([str(directory)]) in (0, 1)
    part, notes = follow(DiskStorage(directory), Range())
    if part.position == whole.position:
        part, notes = follow(DiskStorage(directory), Range(whole.steps["sequence"][-30]))
    cut = whole.position - part.position
    assert cut > 0
    assert any("begins at the snapshot" in note for note in notes)
    assert _recounted(part) > 0
    assert list(part.steps["sequence"]) == list(whole.steps["sequence"][cut:])
    full = {at: board for at, _, board in _copies(whole, range(cut, whole.position))}
    for at, _, board in _copies(part, range(part.position)):
        other = full[at + cut]
        for ours, theirs in ((board.codes, other.codes), (board.ids, other.ids)):
            assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_times_of_a_trimmed_journal_count_from_the_first_record_that_is_shown(tmp_path: Path) -> None:
    """A real clock counts from 1970, and a snapshot says no time: the page's times begin at its first record all the
    same, also where a range begins there or behind it.
    """
    directory, page = troubled(tmp_path / "j", snapshot_bytes=18_000, made=Dated), tmp_path / "page.html"
    whole = follow(DiskStorage(directory), Range())[0]
    assert trim([str(directory)]) in (0, 1)
    times = {r.sequence: getattr(r.decode(), "now_ns", None) for r in Walk(DiskStorage(directory)).records()}
    times = {at: now_ns for at, now_ns in times.items() if now_ns is not None}
    oldest, *_, newest = snapshot_names(DiskStorage(directory).names())
    for first, behind in ((0, oldest), (newest + 1, newest), (newest + 40, newest)):
        film = follow(DiskStorage(directory), Range(first))[0]
        shown = [now_ns for at, now_ns in times.items() if at >= (first or behind + 1)]
        before = [now_ns for at, now_ns in times.items() if behind < at <= first]
        assert film.start_ns == (before[-1] if before else shown[0]) > DATED_NS
        assert film.us == (shown[-1] - film.start_ns) // 1_000 < 1_000_000
        late = (film.start_ns - whole.start_ns) // 1_000
        assert list(film.steps["us"]) == [us - late for us in whole.steps["us"][-film.position :]]
        assert main([str(directory), "-o", str(page), *(["--from", str(first)] if first else [])]) == 0
    assert b"2096-10-02T" in page.read_bytes()


def test_a_rank_that_lays_out_otherwise_is_marked(tmp_path: Path) -> None:
    """A recorded layout digest that the steps do not lead to is marked once in its epoch, at its place."""
    film, wrong = Film(), 0
    directory = troubled(tmp_path / "j")
    for record in Walk(DiskStorage(directory)).records():
        if record.kind == Kind.DIGESTED:
            said: Any = record.decode()
            wrong += 1
            if wrong in (20, 21, 22):
                forged = msgspec.structs.replace(said, layout=bytes(16))
                record = record._replace(payload=msgspec.msgpack.encode(forged))
        film.take(record)
    film.end([])
    differs = [mark for mark in film.marks if mark.kind == "differs"]
    assert len(differs) == 1
    assert "another layout" in differs[0].text


def test_a_step_that_cannot_be_applied_ends_its_arena_and_not_the_page(tmp_path: Path) -> None:
    """A take of an id twice is marked, its epoch is not told on, and the next one is."""
    film, count = Film(), 0
    directory = troubled(tmp_path / "j")
    for record in Walk(DiskStorage(directory)).records():
        if record.kind == Kind.STEPPED:
            step: Any = record.decode()
            count += 1
            if count == 12:
                twice = [Take([Part(0, pack_i32([1]))]), Take([Part(0, pack_i32([1]))])]
                record = record._replace(payload=msgspec.msgpack.encode(msgspec.structs.replace(step, ops=twice)))
        film.take(record)
    film.end([])
    assert [mark.kind for mark in film.marks if mark.kind == "differs"] == ["differs"]
    assert film.stretches[0].end == 11
    assert film.stretches[1].end > film.stretches[1].first == 11


def test_blocks_end_before_they_are_large() -> None:
    """A writer without a step has no block; full ones say so."""
    writer = BlockWriter()
    writer.begin(0, [])
    assert writer.room == 1024
    for _ in range(16):
        writer.add(64, [])
    assert writer.room == 0
    writer.end()
    assert [(block.first, block.steps) for block in writer.blocks] == [(0, 1024)]


# --- inside ----------------------------------------------------------------------------------------------------------


def _counts(stretch: Any, place: int, at: int) -> list[int]:
    columns = stretch.counts[place * len(COUNTS) : (place + 1) * len(COUNTS)]
    return [int(column[at - stretch.first]) for column in columns]


def _recounted(film: Film) -> int:
    """Counts the units that are left behind once more, on the board, at every step; how many there are over all."""
    active, some = ActiveAt(film), 0
    for at, stretch, board in boards(film, np.arange(film.position)):
        holding = active.at(at)
        for place in range(len(stretch.bands)):
            live = (board.codes[place] == LIVE) | (board.codes[place] == FIXED)
            takers = board.takers[place][live]
            cached = int(np.count_nonzero(~holding[takers]))
            assert cached == dict(zip(COUNTS, _counts(stretch, place, at), strict=True))["cached"], f"step {at}"
            some += cached
    return some


def _plain(block: Any) -> bytes:
    return zlib.decompress(block.squeezed)


def _phases(film: Film) -> list[tuple[int, int, int]]:
    columns = film.requests.phases
    return list(zip(columns.requests, columns.at, columns.phases, strict=True))


def _running_at(film: Film, at: int) -> set[int]:
    phase: dict[int, int] = {}
    for number, position, code in _phases(film):
        if position <= at:
            phase[number] = code
    return {number for number, code in phase.items() if code in HOLDS}


def _copies(film: Film, steps: Any) -> list[tuple[int, Any, Board]]:
    """Boards that stay as they are."""
    return [
        (
            at,
            stretch,
            Board([c.copy() for c in board.codes], [i.copy() for i in board.ids], [t.copy() for t in board.takers]),
        )
        for at, stretch, board in boards(film, np.asarray(list(steps)))
    ]
