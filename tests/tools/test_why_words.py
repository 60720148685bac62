"""The sentences of `why`: each row of the tables, from decisions of the real core, as a reader sees it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from allocator.capacity import FROZEN, ID_SPACE
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from daemon.core.passes import PassedOver
from daemon.core.reasons import EndReason, RefusalCode, Verdict
from daemon.core.requests import State
from tests.core.scenes import drive, stage
from tests.core.test_pressure import Disagreeing
from tests.core.world import World
from tests.tools import why_scenes as scenes
from tools.why.ends import ENDS, REFUSALS, Asks, narrow_stages, refused_because
from tools.why.nouns import amounts, milliseconds, ordinal, short
from tools.why.passes import passes_text
from tools.why.show import spoken
from tools.why.story import Asked, Noted, Passed, Story, Told, follow
from tools.why.waits import FOR, WAITS, for_what, waiting
from tools.why.words import SENTENCES, Aside, sentence

SENTENCES_FILE = Path(__file__).parent / "why_sentences.txt"
BANDS = [["state", "window:20", "full"]]
SHORT = {"units_short": 3, "stage": 0, "band": 1}
SILENT = {Verdict.IDLE, Verdict.STALLED}
"""Verdicts that no scene here has in a story: nothing lives when one is said, and the other takes a chain that lies."""


def stories(world: World, journal: scenes.Journaled) -> list[Story]:
    """Everybody who came, accepted or refused."""
    asked = [Asked(request=number) for number in scenes.numbers(journal)]
    asked += [Asked(id=one.id) for one in world.refusals]
    return follow(journal.records, asked).stories


def said(found: list[Story]) -> Iterator[tuple[str, str]]:
    """Every event's row in the tables, and its sentence."""
    for story in found:
        for event in story.events:
            if isinstance(event, Told):
                told = event.decided
                variant = ""
                if told.verdict == Verdict.ADMITTED:
                    variant = ", without its hit" if told.numbers.get("left_tokens") else ""
                    variant = ", no cache" if "queried_tokens" not in told.numbers else variant
                    variant = ", on trial" if told.numbers.get("losses") else variant
                    variant = ", not asked" if told.numbers.get("queried_tokens") == 0 and not variant else variant
                if told.verdict == Verdict.RETRACTED and told.request != story.request:
                    variant = ", for this one"
                yield " ".join(part for part in (told.verdict, told.reason) if part) + variant, spoken(story, event)
            elif isinstance(event, Passed):
                yield f"passed over: {event.over.reason}", passes_text(story, [event])
            else:
                assert isinstance(event, Noted)
                yield f"noted: {event.what}", event.text


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """Row -> the longest sentence that any scene has of it."""
    found: dict[str, str] = {}
    for make in scenes.MORE.values():
        for row, text in said(stories(*make())):
            if len(text) > len(found.get(row, "")):
                found[row] = text
    for path in scenes.SCENARIOS:
        for row, text in said(stories(*scenes.scenario(path))):
            found.setdefault(row, text)
    return found


def test_every_sentence_is_as_it_was_read(rows: dict[str, str]) -> None:
    """One sentence for each row, written down and read by people; `UPDATE=1` in front of pytest writes it anew."""
    text = "".join(f"{row}\n    {rows[row]}\n" for row in sorted(rows))
    if os.environ.get("UPDATE"):
        SENTENCES_FILE.write_text(text)
    assert text == SENTENCES_FILE.read_text()


@pytest.mark.parametrize("verdict", sorted(set(Verdict) - SILENT))
def test_the_core_brings_every_verdict_about(verdict: Verdict, rows: dict[str, str]) -> None:
    """Each has a row in the table, and a scene in which it belongs to somebody's story."""
    assert verdict in SENTENCES
    assert any(row.split(",")[0].split(" ")[0] == verdict for row in rows)


@pytest.mark.parametrize("code", sorted(set(RefusalCode) - {RefusalCode.UNKNOWN_REQUEST}))
def test_the_core_brings_every_refusal_about(code: RefusalCode, rows: dict[str, str]) -> None:
    """What is not known is no arrival's answer; all others are, and the client's own message stands behind ours."""
    assert code in REFUSALS
    assert rows[f"refused {code}"].startswith(f"refused ({code}): ")
    assert 'its client was told: "' in rows[f"refused {code}"]


@pytest.mark.parametrize("reason", sorted(set(EndReason) - {EndReason.MEMORY}))
def test_the_core_brings_every_end_about(reason: EndReason, rows: dict[str, str]) -> None:
    """Each with its text; the one for memory takes a chain that lies, below."""
    assert reason in ENDS
    assert rows[f"ended {reason}"].startswith(f"ended ({reason}): ")


@pytest.mark.parametrize("reason", sorted(set(WAITS) - {"report", "ranks"}))
def test_the_core_brings_every_wait_about(reason: str, rows: dict[str, str]) -> None:
    """`report` and `ranks` are what a live request is told by `status`; no pass says them."""
    assert reason in FOR
    assert rows[f"passed over: {reason}"].split(" for ")[0] in ("waits", "stands still")


def test_no_number_is_left_without_a_word(rows: dict[str, str]) -> None:
    """Names of numbers and of bands as the code has them are nobody's words."""
    for row, text in rows.items():
        bare = re.sub(r'"[^"]*"|\([^()]*\)', "", text)
        assert not re.search(r"\b[a-z]+_[a-z_]+\b", bare), f"{row}: {text}"
        assert not re.search(r"\bband\b|window:", bare), f"{row}: {text}"
        assert "spill" not in text, f"{row}: {text}"


def test_a_line_of_passes_says_in_words_how_numbers_moved() -> None:
    """Those of a parked prompt are of its newest climb, by their names in the code; nothing is told by such a name."""
    _, journal = scenes.few_rows()
    (story,) = follow(journal.records, Asked(request=1)).stories
    climbs = ({"reclaim_units": 1, "shrink_tokens": 4, **SHORT}, {"reclaim_units": 0, "shrink_tokens": 2, **SHORT})
    passes = [
        Passed(9, ms * 1_000_000, 0, PassedOver(ms, State.PARKED_CHUNK, "memory", numbers), 2)
        for ms, numbers in enumerate(climbs)
    ]
    text = passes_text(story, passes)
    assert "what the prefix cache can give went from 1 to 0" in text
    assert not re.search(r"\b[a-z]+_[a-z_]+\b", text), text


def test_the_end_for_memory_and_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take a chain that says no to everything for a while."""
    chain = Disagreeing(monkeypatch)
    world, journal = scenes.journaled(max_batched_tokens=8, max_running_requests=2)
    world.send("r", 20, 4)
    world.tick()
    world.report()
    chain.refuse = True
    world.tick()
    chain.refuse = False
    world.run()
    (story,) = follow(journal.records, Asked(request=1)).stories
    ended = story.events[-1]
    assert isinstance(ended, Told)
    assert spoken(story, ended).startswith(
        "ended (memory): it held all the memory that was in use and still needed more"
    )
    world, journal = scenes.journaled(
        CoreConfig(page_size=1, max_running_requests=1, stall_steps=5, overlap=False), caching=True
    )
    world.send("r", 3, 9)
    world.send("next", 3, 9)
    drive(world, lambda: stage(world, "r") == "running")
    chain.refuse = True
    world.run()
    follower = follow(journal.records, [Asked(request=1), Asked(request=2)])
    for story in follower.stories:
        (stalled,) = [one for one in story.events if isinstance(one, Told) and one.decided.verdict == Verdict.STALLED]
        text = spoken(story, stalled)
        assert text.startswith(
            "the scheduler could start nothing at all in 5 tries in a row, while 2 requests waited or "
        )


def test_whose_pages_were_evicted_is_told() -> None:
    """By number, as many as the decision counts at most, and only those who had pages of their own there."""
    world, journal = scenes.cached_crowd()
    evictions = [
        (story, event)
        for story in stories(world, journal)
        for event in story.events
        if isinstance(event, Told) and event.decided.verdict == Verdict.EVICTED
    ]
    named = [(story, event) for story, event in evictions if event.aside.left_by]
    assert len(named) > 5
    for story, event in named:
        assert sum(pages for _, pages in event.aside.left_by) <= event.decided.numbers.get("units_full", 0)
        for number, _ in event.aside.left_by:
            client, _ = world.by_request[number]
            assert client.accepted is not None
            assert number != story.request or any(
                one.request == number and one.verdict == "retracted" for one in world.decisions
            )
    assert any(event.aside.took[0] for _, event in named)


def retraction(numbers: dict[str, int]) -> Decided:
    """Of request 4 for request 9."""
    had = {"pages": 2, "tokens": 40, "cached_tokens": 16, "times": 1}
    return Decided(0, "retracted", 4, "memory", had | numbers, 9)


WORK = {"lost_tokens": 24, "units_state": 2, **SHORT}
WHY = {"candidates": 5, "protected": 1, "redo_tokens": 24, "own_priority": -5}
NEXT = {"next": 7, "next_redo_tokens": 3, "next_priority": 0}
GAVE = (
    "it gave back 2 full-attention pages and 2 recurrent-state slots; its output is kept; of its 40 computed tokens 16 "
    "stay in the prefix cache until evicted, and 24 must be computed again"
)
OTHERS: dict[str, tuple[Decided, Aside, str]] = {
    "quota": (
        Decided(0, "evicted", 0, "quota", {"units_state": 1, "units_full": 30}),
        Aside(),
        "the prefix cache evicted 30 full-attention pages and 1 recurrent-state slot because their namespace held more "
        "than its quota of the cache",
    ),
    "many": (
        Decided(0, "evicted", 0, "reclaim", {"units_full": 30}),
        Aside(left_by=((9, 8), (4, 7), (5, 6), (6, 5), (7, 3), (8, 1)), took=(0, 4)),
        "the prefix cache evicted 30 full-attention pages to make room for the step, which took 4 full-attention pages,"
        " none of them for this request; the full-attention pages had been left there by request 9 (8 pages), request 4"
        " (7 pages), request 5 (6 pages), request 6 (5 pages) and 2 other requests (4 pages)",
    ),
    "idle": (Decided(0, "idle", 0, "", {"rows": 0}), Aside(), "nothing is left to do; rows 0"),
    "old": (
        retraction({"unlocked_pages": 7, "times": 3}),
        Aside(),
        "retracted (preempted) for the 3rd time: it gives up its memory so that request 9 can go on; it gave back 2 "
        "full-attention pages, and 7 cached pages may be evicted now that it reads them no longer; its output is kept; "
        "of its 40 computed tokens 16 stay in the prefix cache until evicted, and 40 must be computed again",
    ),
    "lowest": (
        retraction(WORK | WHY | NEXT),
        Aside(),
        "retracted (preempted): it gives up its memory so that request 9 can go on; the next tokens of running requests"
        " lack 3 pages of the 20-token sliding window; why this one of 5 running requests: it has the lowest priority, "
        "-5 (next in line: request 7 with 0); 1 other had been retracted so often that it is spared; " + GAVE,
    ),
    "only": (
        retraction(WORK | WHY | {"candidates": 1, "next": 0, "protected": 2}),
        Aside(),
        "retracted (preempted): it gives up its memory so that request 9 can go on; the next tokens of running requests"
        " lack 3 pages of the 20-token sliding window; why this one: no other running request could be chosen; 2 others"
        " had been retracted so often that they are spared; " + GAVE,
    ),
    "later": (Decided(0, "later", 1, "why", {"some": 5}), Aside(), "later: why; some 5"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_scene_has(name: str) -> None:
    """Decisions of older journals, of several requests at once, and of versions to come: nothing is left out."""
    decided, aside, text = OTHERS[name]
    assert sentence(decided, [BANDS[0]], aside) == text


def test_places_and_kinds_are_named() -> None:
    """A single stage needs no name; ids and frozen bands are no stage; unknown kinds keep their name."""
    for numbers, bands, text in (
        ({"units_short": 3, "stage": 0, "band": 1}, BANDS, "3 pages of the 20-token sliding window"),
        ({"units_short": 3, "stage": 0, "band": 1}, BANDS * 2, "3 pages of the 20-token sliding window on pipeline "),
        ({"units_short": 1, "stage": 1, "band": 0}, BANDS * 2, "1 recurrent-state slot on pipeline stage 1"),
        ({"units_short": 2, "stage": ID_SPACE, "band": 2}, BANDS, "2 full-attention pages"),
        (
            {"units_short": 2, "stage": ID_SPACE, "band": 2},
            BANDS * 2,
            "2 full-attention pages on the pipeline stage with the least room",
        ),
        ({"units_short": 2, "stage": FROZEN, "band": 2}, BANDS, "2 full-attention pages (none may be taken until "),
        ({"units_short": 1, "stage": 4, "band": 9}, BANDS, "1 unit of band 9 on pipeline stage 4"),
        ({}, BANDS, ""),
    ):
        assert short(numbers, bands).startswith(text)
        assert bool(short(numbers, bands)) == bool(text)
    assert amounts({"units_new": 2, "units_full": 1, "units_short": 9}) == "1 full-attention page and 2 units of new"


def test_a_refusal_says_on_which_stage_how_much_of_what_is_short() -> None:
    """Of a stage that lacks bytes its number; where pages have no numbers left, the stages that set the limit."""
    lacks = {"value": 70, "limit": 40, "units_short": 3, "stage": 1, "band": 2}
    for asks, bands, more, text in (
        (Asks(70, 5), BANDS * 2, {}, "its prompt has 70 tokens, and the empty arena holds at most 40"),
        (Asks(70, 5), BANDS * 2, {}, "the empty arena is short of 3 full-attention pages on pipeline stage 1"),
        (
            Asks(30, 70),
            BANDS * 2,
            {},
            "it asks for 70 output tokens, and beside its prompt of 30 tokens the empty arena ",
        ),
        (Asks(70, 70), BANDS * 2, {}, "it asks for 70 tokens, and the empty arena holds at most 40"),
        (Asks(70, 5), BANDS, {"stage": 0}, "short of 3 full-attention pages on pipeline stage 0 (the only one)"),
        (Asks(70, 5, (0,)), BANDS * 2, {"stage": ID_SPACE}, "at least 3 full-attention pages on pipeline stage 0"),
        (
            Asks(70, 5, (0, 1)),
            BANDS * 2,
            {"stage": ID_SPACE},
            "at least 3 full-attention pages on pipeline stages 0 and ",
        ),
        (Asks(70, 5), BANDS, {"stage": ID_SPACE}, "at least 3 full-attention pages on pipeline stage 0 (the only one)"),
    ):
        assert text in "; ".join(refused_because("never_fits", lacks | more, asks, bands))


def test_the_narrow_stages_are_those_that_hold_the_fewest_pages() -> None:
    """Stages of different arenas: the smallest sets how many pages there are; one that stores no pages sets nothing."""

    def stage_of(arena_bytes: int, unit_bytes: int) -> StageGeometry:
        return StageGeometry(arena_bytes, 256, [BandGeometry("full", "full", unit_bytes)])

    for stages, narrow in (
        ([stage_of(2560, 256), stage_of(2560, 512)], (1,)),
        ([stage_of(2560, 512), stage_of(2560, 512)], (0, 1)),
        ([stage_of(2560, 0), stage_of(2560, 512)], (1,)),
    ):
        assert narrow_stages(Geometry(16, 4, 0, stages)) == narrow


def test_a_reason_that_no_row_knows_is_told_as_it_stands() -> None:
    """A later version's: nothing that was recorded is left out."""
    assert waiting("new", {"some": 5, **SHORT}, BANDS) == "new; 3 pages of the 20-token sliding window; some 5"
    assert for_what("queue:new") == "its turn behind a request that waited for new"


def test_durations_are_short() -> None:
    """As many digits as a reader needs; what is beyond is cut off, as in the milliseconds that decisions have."""
    cases = {0: "0 ms", 400_000: "0.4 ms", 7_000_000: "7 ms", 12_300_000: "12 ms", 9_999_000_000: "9,999 ms"}
    cases |= {12_340_000_000: "12.3 s", 250_000_000_000: "4 min 10 s"}
    cases |= {
        70_000: "under 0.1 ms",
        6_990_000: "6.9 ms",
        59_900_000: "59 ms",
        12_390_000_000: "12.3 s",
        250_900_000_000: "4 min 10 s",
    }
    assert {ns: milliseconds(ns) for ns in cases} == cases
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th")
    ]
