"""top's panels: numbers keep their width, strips their scale, rates their life; frames fit every screen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.reasons import Verdict
from daemon.watch import WatchedLife
from tests.tools.top_scenes import MIB, S, over_the_wire, row, stage, told, waiting, watched
from tools.top import arena, decisions, figures, palette, requests, speak
from tools.top.figures import state_of
from tools.top.history import SAMPLES_KEPT, History, Note, rates
from tools.top.page import Page, Wishes

BANDS = [["state", "full"]]


def seen(*answers: object) -> History:
    """A history of these answers."""
    history = History("here")
    for answer in answers:
        history.take(answer)  # type: ignore[arg-type]
    return history


def text(lines: list) -> str:  # type: ignore[type-arg]
    """Lines as plain text."""
    return "\n".join(line.plain for line in lines)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (palette.size(0), "0 B"),
        (palette.size(1023), "1.00 KiB"),
        (palette.size(3 * MIB), "3.00 MiB"),
        (palette.size(12.34 * 1024 * MIB), "12.3 GiB"),
        (palette.short(9999), "9,999"),
        (palette.short(10_000), "10.0k"),
        (palette.short(1_234_567), "1.23M"),
        (palette.rate(None), "-"),
        (palette.rate(0.034), "0.03"),
        (palette.rate(4321.5), "4,322"),
        (palette.share(1, 3), "33%"),
        (palette.share(1, 30), "3.3%"),
        (palette.share(1, 0), "-"),
        (palette.age(12_345), "12.3s"),
        (palette.age(3_600_000), "1h00m"),
        (palette.age(90 * 3_600_000), "3d18h"),
        (palette.milliseconds(2500), "2.50 s"),
        (palette.milliseconds(None), "-"),
        (palette.fit("abcdef", 4), "abc…"),
    ],
)
def test_numbers_in_few_characters(made: str, wanted: str) -> None:
    """Three figures and a unit."""
    assert made == wanted


@given(st.floats(0, 1e15), st.floats(0, 1e9))
def test_no_number_outgrows_its_column(count: float, milliseconds: float) -> None:
    """Whatever the value, its text keeps to the room that columns give it."""
    assert len(palette.size(count)) <= 8
    assert len(palette.short(count)) <= 6
    assert len(palette.rate(count)) <= 6
    assert len(palette.age(milliseconds)) <= 6
    assert len(palette.share(count, count + 1)) <= 4


def test_a_sparkline_ends_with_the_newest() -> None:
    """Heights follow the values on one scale; where nothing is known stands a dot; it is as wide as it was asked to."""
    line = palette.sparkline([1.0, None, 0.0, 3.5, 7.0], 6, "red")
    assert line.plain == " ▂·▁▄▇"
    assert palette.sparkline([1.0] * 9, 4, "red").cell_len == 4


# --- arena -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=12), st.integers(0, 200))
def test_cells_add_up_to_the_width(amounts: list[int], width: int) -> None:
    """What is there has a cell while there are enough; shares are off by no more than that costs the others."""
    given_cells = arena.cells(amounts, width)
    there = sum(amount > 0 for amount in amounts)
    assert sum(given_cells) == (width if there else 0)
    assert all(count == 0 for count, amount in zip(given_cells, amounts, strict=True) if not amount)
    if there and width >= there:
        assert all(count >= 1 for count, amount in zip(given_cells, amounts, strict=True) if amount)
        exact = [amount / sum(amounts) * width for amount in amounts]
        assert all(abs(count - share) <= there for count, share in zip(given_cells, exact, strict=True))


@given(st.tuples(*[st.integers(0, 500)] * 4), st.integers(0, 500))
def test_every_unit_is_one_thing(units: tuple[int, int, int, int], reclaimable: int) -> None:
    """Held and cached add up to live; a cache that is ahead of the ranks' counts hides nothing."""
    band = stage(full=(*units, reclaimable)).bands[1]
    counted = arena.units_of(band)
    assert counted.held + counted.cached == band.live
    assert counted.held >= 0
    assert counted.used + counted.beyond == sum(units)


def test_the_parts_of_a_stage_add_up_to_its_arena() -> None:
    """Held, cached, pending, holes and free bytes, with the fixed ones, are all there is."""
    one = stage()
    assert sum(arena.shares_bytes(one)) + one.fixed_bytes == one.arena_bytes
    assert arena.used_bytes(one) == 4096 + 10 * 16384 + 1024 * 4096


def test_strips_share_one_scale() -> None:
    """A band's strip has as many cells as it has in the stage's, within one; both are as wide as asked for."""
    one = stage()
    whole, part = arena.stage_strip(one, 80).plain, arena.band_strip(one, 1, 80).plain
    assert len(whole) == len(part) == 80
    for sign in (arena.CACHED, arena.LIVE):
        mine = arena.band_strip(one, 0, 80).plain.count(sign) + part.count(sign)
        assert abs(whole.count(sign) - mine) <= 2
    assert part.count(arena.CACHED) == round(600 * 4096 / (8 * MIB) * 80)


def test_the_arena_gives_up_its_bands_before_its_stages() -> None:
    """With room every band has a line; without, one line for each stage; a stage that stores nothing has no band."""
    stages = [stage(), stage()]
    assert text(arena.lines(stages, 78, 20)).count("full") == 2
    narrow = arena.lines(stages, 78, 4)
    assert len(narrow) == 3
    assert [line.plain[:7] for line in narrow[1:]] == ["stage 0", "stage 1"]
    assert "no memory yet" in text(arena.lines([], 78, 10))
    assert all(line.cell_len <= 118 for line in arena.lines(stages, 118, 20))


def test_the_figures_stand_under_their_titles() -> None:
    """Held, cached, pending, holes and beyond of a band, in units."""
    lines = arena.lines([stage()], 118, 20)
    assert lines[0].plain.split()[-7:] == ["used", "bytes", "held", "cached", "pending", "holes", "beyond"]
    assert lines[3].plain.split()[-8:] == ["50%", "4.00", "MiB", "400", "600", "16", "8", "900"]


# --- history ---------------------------------------------------------------------------------------------------------


def test_rates_are_over_the_daemons_own_time() -> None:
    """Differences of totals over the seconds between two answers; means only where something happened."""
    gauges = {"output_tokens_total": 1500, "prompt_tokens_total": 90, "forwards_total": 20, "accepted_total": 110}
    sums = {"forwards": 20, "forward_us": 180_000, "queried_tokens": 80, "cached_tokens": 20, "iterations": 40}
    before, after = watched(10.0), watched(12.0, gauges=gauges, sums=sums | {"core_ns": 8_000_000})
    found = rates(before, after)
    assert (found.output_tokens, found.prompt_tokens, found.accepted) == (250.0, 45.0, 5.0)
    assert (found.steps, found.step_ms, found.core_ms, found.hit_rate) == (10.0, 9.0, 0.2, 0.25)
    assert found.waited_ms is None


def test_numbers_are_smooth_and_samples_are_not() -> None:
    """The rate shown covers three seconds, each sample the time since the one before it."""
    answers = [watched(10.0 + k, gauges={"output_tokens_total": 1000 + 100 * k * k}) for k in range(5)]
    history = seen(*answers)
    assert history.series("output_tokens") == [100.0, 300.0, 500.0, 700.0]
    assert history.rates.output_tokens == (700 + 500 + 300) / 3
    for k in range(SAMPLES_KEPT + 50):
        history.take(watched(20.0 + k))
    assert len(history.samples) == SAMPLES_KEPT


def test_a_restarted_daemon_is_another_life() -> None:
    """Its totals begin at nothing, so no rate is made over the gap, and the decisions say what happened."""
    history = seen(watched(10.0), watched(11.0))
    history.lose("its process ended", 12 * S)
    history.lose("nobody answers there", 13 * S)
    assert state_of(history)[::2] == ("lost", "nobody answers there")
    history.take(watched(2.0, life="b" * 32, gauges={"output_tokens_total": 0}))
    assert history.lives == 2
    assert history.rates.output_tokens == 0.0
    notes = [entry.text for entry in history.told if isinstance(entry, Note)]
    assert notes == [
        "connection lost: its process ended",
        "the daemon was restarted: life aaaaaaaa is over, life bbbbbbbb goes on",
    ]
    assert state_of(history)[0] == "ready"


@pytest.mark.parametrize("width", [78, 118])
def test_totals_say_that_they_are_this_lifes(width: int) -> None:
    """And who goes on from earlier ones, where there is anybody and room for it; the line keeps to its width."""
    first = text(figures.rates(seen(watched(gauges={"recovered_total": 0})), width)[:1])
    assert "this life  100 accepted" in first
    assert "recovered" not in first
    after = text(figures.rates(seen(watched(gauges={"recovered_total": 213, "accepted_total": 0})), width)[:1])
    assert "this life  213 recovered  0 accepted" in after
    once = text(figures.rates(seen(watched(gauges={"retractions_total": 1})), width)[:1])
    assert "1 retraction  " in once
    long = dict.fromkeys(("recovered_total", "accepted_total", "refused_total", "retractions_total"), 999_900_000)
    line = figures.rates(seen(watched(gauges=long)), width)[0]
    assert line.cell_len == width
    assert line.plain.startswith("rates ")
    assert "this life  " in line.plain
    assert ("recovered" in line.plain) == (width > 100)


def test_the_same_daemon_again_and_a_new_epoch_are_told() -> None:
    """A break of the connection alone, and device memory that was lost."""
    history = seen(watched(10.0))
    history.lose("no answer within 5 s", 11 * S)
    history.take(watched(12.0))
    history.take(watched(13.0, epoch={"number": 2, "restarts": 1, "last_loss": "rank 0.0 exited"}))
    notes = [entry.text for entry in history.told if isinstance(entry, Note)]
    assert notes[1:] == [
        "connected again to the same daemon",
        "epoch 2: the device memory is new, after: rank 0.0 exited",
    ]
    assert history.lives == 1


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (watched(), "ready"),
        (watched(gauges={"draining": 1}, health={"ready": False, "reasons": ["ending: drain"]}), "draining"),
        (watched(epoch={"running": False}, health={"ready": False, "reasons": ["recovering"]}), "recovering"),
        (watched(health={"progress": False, "reasons": ["no token for 9 s"]}), "stalled"),
        (watched(health={"ready": False, "reasons": ["the journal is not durable"]}), "not ready"),
    ],
)
def test_the_state_in_a_word(answer: object, word: str) -> None:
    """What the daemon says of its health, with the reasons on a line of their own."""
    history = seen(answer)
    assert state_of(history)[0] == word
    page = Page(history, Wishes())
    lines = page.panel("head", 80, 3)
    assert word in lines[0].plain
    assert len(lines) == (1 if word == "ready" else 2)


# --- requests --------------------------------------------------------------------------------------------------------

ROWS = [
    row(1, age_ms=5000, output_tokens=5, pages=9),
    row(2, age_ms=9000, output_tokens=50, pages=3, retractions=2),
    row(3, age_ms=1000, output_tokens=20, pages=5, stage="parked_row", waits_for="memory", waits_numbers={}),
    waiting(4, 1),
    waiting(5, 0, "queue", ahead=0),
    row(6, age_ms=10, output_tokens=0, pages=1, stage="prefilling", scheduled_tokens=40),
]


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ("age", [2, 1, 5, 4, 3, 6]),
        ("tokens", [2, 3, 1, 4, 5, 6]),
        ("pages", [1, 3, 2, 6, 4, 5]),
        ("retractions", [2, 1, 3, 4, 5, 6]),
        ("waiting", [5, 4, 1, 2, 3, 6]),
        ("state", [3, 4, 5, 6, 1, 2]),
        ("newest", [6, 5, 4, 3, 2, 1]),
    ],
)
def test_orders(order: str, wanted: list[int]) -> None:
    """Each order of the table, and the other way round."""
    assert [entry.request for entry in requests.arrange(ROWS, order, "", BANDS)] == wanted
    assert [entry.request for entry in requests.arrange(ROWS, order, "", BANDS, True)] == wanted[::-1]


def test_every_order_is_tried() -> None:
    """The table above has them all, and each marks a column that exists."""
    titles = {column.title for column in requests.COLUMNS}
    assert {mark for mark, _ in requests.ORDERS.values()} <= titles
    assert len(requests.ORDERS) == 7


@pytest.mark.parametrize(
    ("wanted", "found"), [("0003", [3]), ("PARK", [3]), ("waiting", [4, 5]), ("batch", [4]), ("zzz", []), ("fe", 6)]
)
def test_filter(wanted: str, found: list[int] | int) -> None:
    """By a part of the id, the state, the reason or the front end, in any case of letters."""
    shown = [entry.request for entry in requests.arrange(ROWS, "newest", wanted, BANDS)]
    assert sorted(shown) == found if isinstance(found, list) else len(shown) == found


@pytest.mark.parametrize("width", [78, 100, 118, 158])
def test_columns_stand_still(width: int) -> None:
    """Every cell of a number ends below its title's end, whatever the row; no line is wider than the table."""
    titles = requests.head(6, 6, 6, "newest", False, "", width)[1].plain
    age_end = titles.index(" age ") + 4
    for entry in [*ROWS, row(123456, age_ms=10**9, prompt_tokens=10**6, output_tokens=99999, pages=65000)]:
        line = requests.line(entry, BANDS, width, selected=False).plain
        assert line[age_end] == " "
        assert line[age_end - 1] in "smh"
        assert len(line) <= width
    assert requests.line(ROWS[0], BANDS, width, selected=True).cell_len == width


def test_a_row_says_what_it_waits_for_or_how_far_it_is() -> None:
    """The queue's place and reason; the share of the output; the share of the prompt while that is computed."""
    last = {entry.request: requests.line(entry, BANDS, 158, False).plain for entry in ROWS}
    assert "2. a place in the batch" in last[4]
    assert "1. its turn in the queue" in last[5]
    assert "10% of 50" in last[1]
    assert "40 of 100 of its prompt" in last[6]


def test_what_is_not_told_is_counted() -> None:
    """A longer queue than one answer has, and a filter, are both said in the heading."""
    head = requests.head(900, 512, 3, "age", False, "abc", 118)[0].plain
    assert "3 of 900 live; 388 of the queue's end are not told" in head
    assert "/ abc" in head


# --- decisions -------------------------------------------------------------------------------------------------------


def test_decisions_are_newest_last_and_evictions_in_a_row_are_one_line() -> None:
    """Their units add up; another decision between them parts them."""
    history = seen(
        watched(
            decisions=[
                told(1, "evicted", reason="reclaim", units_full=5, units_state=1),
                told(2, "evicted", reason="reclaim", units_full=7),
                told(3, "parked", 4, "rows"),
                told(4, "evicted", reason="reclaim", units_full=1),
            ]
        )
    )
    lines = [line.plain for line in decisions.newest(history.told, BANDS, 10 * S, 118, 9, False)][1:]
    assert len(lines) == 3
    assert "12 full-attention pages" in lines[0]
    assert "2 times: " in lines[0]
    assert "#4" in lines[1]
    assert "1 full-attention page" in lines[2]
    assert lines[2].startswith(" 1.00s")


def test_routine_can_be_hidden() -> None:
    """What tells of scarcity, refusal or failure stays, notes too; a failed end is no routine."""
    entries = [
        *(told(1, "accepted", 1, n=1, prompt_tokens=4, max_tokens=5), told(2, "waits", 1, "rows", limit=4)),
        *(told(3, "ended", 2, "length", output_tokens=1, retractions=0, age_ms=5, prompt_tokens=3),),
        *(told(4, "ended", 3, "fault", output_tokens=1, retractions=0, age_ms=5, prompt_tokens=3),),
    ]
    lines = decisions.newest([*entries, Note(0, "lost", True)], BANDS, 10 * S, 118, 9, True)
    assert len(lines) == 4
    assert "without arrivals" in lines[0].plain
    assert [speak.is_routine(entry) for entry in entries] == [True, False, True, False]


def test_every_verdict_has_a_line() -> None:
    """No verdict of the core is left without a sentence or a colour, and no line outgrows the panel."""
    numbers = dict.fromkeys(("n", "prompt_tokens", "max_tokens", "row", "generation", "waited_ms", "tokens"), 3)
    numbers |= dict.fromkeys(("wanted_tokens", "pages", "times", "output_tokens", "retractions", "age_ms"), 3)
    numbers |= dict.fromkeys(("epoch", "held_tokens", "confirmed_tokens", "pin_ms", "chunk_tokens"), 3)
    numbers |= dict.fromkeys(("chunk_pages", "matched_tokens", "queried_tokens", "cached_tokens"), 3)
    for verdict in Verdict:
        reason = "length" if verdict == Verdict.ENDED else "never_fits" if verdict == Verdict.REFUSED else "rows"
        entry = told(1, verdict, 7, reason, **numbers)
        (line,) = decisions.newest([entry], BANDS, 10 * S, 78, 2, False)[1:]
        assert str(verdict) in line.plain
        assert line.cell_len <= 78


def test_a_decision_of_another_version_is_told_as_it_stands() -> None:
    """An unknown verdict, and a known one without its numbers, are lines all the same."""
    entries = [told(1, "polished", 7, "bright", shine=4), told(2, "ended", 8, "boredom"), told(3, "ended", 9, "length")]
    lines = [line.plain for line in decisions.newest(entries, BANDS, 10 * S, 78, 9, False)][1:]
    assert [words in line for words, line in zip(("bright", "boredom", "length"), lines, strict=True)] == [True] * 3


def test_a_life_in_lines() -> None:
    """Facts first, then each decision with the time since it came; a gap and another request's number are named."""
    events = [
        *(told(1, "accepted", 5, at_s=1, n=1, prompt_tokens=4, max_tokens=5), told(2, "waits", 5, "rows", 2, limit=4)),
        *(told(9, "parked", 6, "rows", 3.5),),
    ]
    live = waiting(5, 2)
    lines = decisions.life(WatchedLife(5, "cmpl-5", "fe", 4, 4 * S, live, events, 2, 6), 5, BANDS, 100, "/run/here")
    page = text(lines)
    assert "place 3 in the queue" in page
    assert "+1.000s  waits" in page
    assert "… 6 decisions" in page
    assert "+2.500s  #6 parked" in page
    assert "bandmaster why 5 /run/here" in page
    assert all(line.cell_len <= 100 for line in lines)
    assert "does not know request 5 any more" in text(decisions.life(None, 5, BANDS, 100, "/run/here"))


def test_wrapped_lines_lose_nothing() -> None:
    """Cut at spaces, none longer than the width, together the whole text."""
    from rich.text import Text

    whole = "one two three " * 9 + "averyveryverylongword" * 3
    lines = decisions.wrapped(Text(whole), 20)
    assert "".join(line.plain for line in lines) == whole
    assert all(line.cell_len <= 21 for line in lines)


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("size", [(40, 12), (80, 24), (100, 30), (160, 50), (220, 70)])
def test_a_frame_fits_its_screen(size: tuple[int, int], stages: int) -> None:
    """No line more and none wider than there is; requests keep some lines, at every size from 80x24 on."""
    width, height = size
    entries = [told(k, "waits", k, "rows", limit=4) for k in range(1, 90)]
    many = [row(k) for k in range(1, 60)]
    history = seen(watched(requests=many, stages=[stage()] * stages), watched(11.0, decisions=entries, requests=many))
    for empty in (History("here"), history):
        lines = Page(empty, Wishes()).frame(width, height)
        assert len(lines) <= height
        assert all(line.cell_len <= width for line in lines)
    if height >= 24:
        page = text(lines)
        assert "requests" in page
        assert "decisions" in page
        assert page.count("cmpl" if width >= 146 else "running") >= 4


def test_an_answer_survives_the_wire() -> None:
    """What the daemon encodes is what the view decodes."""
    answer = watched(requests=ROWS, decisions=[told(1, "waits", 4, "rows", limit=4)])
    assert over_the_wire(answer) == answer
