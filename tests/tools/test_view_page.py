"""The page of `bandmaster view`: one file that needs nothing else, and shows in a browser what the film has."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from journal.reader import Walk
from journal.records import Kind
from journal.storage import DiskStorage
from tests.tidy.source import ROOT
from tests.tools.view_scenes import pressed, troubled
from tools.accounts.finding import Findings
from tools.accounts.journal_side import JournalCount
from tools.view import page
from tools.view.browser import NAMES, BrowserMissing, check_page, find_browser
from tools.view.command import Range, follow, main
from tools.view.film import STEP_COLUMNS
from tools.view.heat import ROWS
from tools.view.pack import bytes_of, read_columns


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three bands under pressure."""
    return pressed(tmp_path_factory.mktemp("page"), requests=16)


def made(journal: Path, out: Path, *arguments: str) -> str:
    """The page's text."""
    assert main([str(journal), "-o", str(out), *arguments]) == 0
    return out.read_text("utf-8")


def chunks(text: str) -> dict[str, bytes]:
    """The data in a page, by name."""
    found = re.findall(r'<script type="text/plain" id="c-([^"]+)">([^<]*)</script>', text)
    return {name: zlib.decompress(bytes_of(data)) for name, data in found}


def meta(text: str) -> dict[str, Any]:
    """What is not packed."""
    found = re.search(r'<script type="application/json" id="meta">(.*?)</script>', text, re.S)
    assert found is not None
    value: dict[str, Any] = json.loads(found[1])
    return value


def test_the_page_refers_to_nothing_outside_it(journal: Path, tmp_path: Path) -> None:
    """No address, no link, no import; and its own rules forbid every connection."""
    text = made(journal, tmp_path / "page.html")
    plain = re.sub(r'(<script type="text/plain"[^>]*>)[^<]*', r"\1", text)
    assert not re.findall(r"https?:|wss?://|//[a-z]|\bimport\b|@import|<link|<img|<iframe|\bfetch\(|XMLHttp", plain)
    assert not re.findall(r"<script[^>]+src=|url\(", plain)
    rules = re.search(r'Content-Security-Policy" content="([^"]+)"', plain)
    assert rules is not None
    assert "default-src 'none'" in rules[1]
    assert "connect-src" not in rules[1]


def test_the_page_has_what_the_film_has(journal: Path, tmp_path: Path) -> None:
    """Steps, requests, phases, decisions with their sentences and the picture come back out of the text."""
    text = made(journal, tmp_path / "page.html")
    film = follow(DiskStorage(journal), Range())[0]
    told, data = meta(text), chunks(text)
    steps = dict(zip(STEP_COLUMNS, read_columns(data["steps"]), strict=True))
    assert all(steps[name].tolist() == list(film.steps[name]) for name in STEP_COLUMNS)
    assert film.requests.lanes(film.position) == (told["runLanes"], told["lanes"])
    lives = list(film.requests.by_number())
    requests = list(read_columns(data["requests"]))
    assert requests[0].tolist() == [life.number for life in lives]
    assert requests[10].tolist() == [life.lane for life in lives]
    assert max(life.lane for life in lives) == told["lanes"] - 1
    assert data["ids"].decode().split("\n") == [life.id for life in lives]
    who, at, _, phase = read_columns(data["phases"])
    assert [lives[k].number for k in who] == film.requests.phases.requests
    assert at.tolist() == film.requests.phases.at
    assert phase.tolist() == film.requests.phases.phases
    verdicts = list(read_columns(data["decisions"]))[5]
    assert [told["verdicts"][k] for k in verdicts] == film.decisions.verdicts
    sentences = [line for name in data if name.startswith("texts") for line in data[name].decode().split("\n")]
    assert sentences == film.decisions.texts
    assert len(data["heat0"]) == 3 * ROWS * len(told["heat"]["steps"])
    counts = list(read_columns(data["counts0"]))
    assert [column.tolist() for column in counts] == [list(column) for column in film.stretches[0].counts]
    assert {f"units{k}" for k in range(len(told["blocks"]))} <= set(data)


def test_nothing_in_a_name_ends_the_data(tmp_path: Path) -> None:
    """A title or a note that looks like markup stays text."""
    film = follow(DiskStorage(troubled(tmp_path / "j")), Range())[0]
    out = tmp_path / "page.html"
    with out.open("w", encoding="utf-8") as file:
        page.write_page(film, "</script><b>", ["</script><script>alert(1)</script>"], 0, file)
    text = out.read_text("utf-8")
    assert "<b>" not in text.split("<body>")[0]
    assert "alert(1)" in meta(text)["notes"][0]
    assert "<script>alert" not in text


def test_the_program_is_part_of_the_package() -> None:
    """Every file of the program, and no other, stands beside it, and an installed package gets them."""
    here = ROOT / "tools" / "view"
    assert sorted(page.PROGRAM) == sorted(path.name for path in here.glob("*.js"))
    packaged = (ROOT / "pyproject.toml").read_text("utf-8")
    assert re.search(r'^"tools.view" = \["\*.js", "\*.css", "\*.html"\]', packaged, re.M)


def test_what_cannot_be_shown_is_said(journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No journal, no such request, a range behind the end, a file among the journal's: exit code 2 and a sentence."""
    for arguments, words in (
        ([str(tmp_path)], "no journal segments"),
        ([str(journal), "--request", "999"], "no request 999; it numbers them 1 to"),
        ([str(journal), "--from", "999999"], "no record to show"),
        ([str(journal), "--browser", "no-such-browser", "--check-browser"], "no browser: no-such-browser"),
        ([str(journal), "-o", str(journal / "page.html")], "inside the journal's directory"),
    ):
        out = [] if "-o" in arguments else ["-o", str(tmp_path / "page.html")]
        assert main([*arguments, *out]) == 2
        assert words in capsys.readouterr().err
    assert not (journal / "page.html").exists()


def test_a_torn_tail_is_shown_up_to_the_tear(journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has what stands before, and says what is cut off."""
    torn = Path(shutil.copytree(journal, tmp_path / "torn"))
    last = sorted(torn.glob("*.kvj"))[-1]
    last.write_bytes(last.read_bytes()[:-700])
    text = made(torn, tmp_path / "page.html", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["notes"]
    assert meta(text)["marks"][-1][3] == "damage"
    assert result["steps"] > 50


def test_a_page_may_open_on_a_request(journal: Path, tmp_path: Path) -> None:
    """--request: the page knows which one, and has its life."""
    told = meta(made(journal, tmp_path / "page.html", "--request", "5"))
    assert told["chosen"] == 5
    assert told["steps"] > 0


def test_a_request_is_a_choice_and_arrivals_are_counted_beside(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where an arrival has several choices, the page and the command tell both numbers: as many requests as `accounts`
    counts choices that were accepted, as many arrivals as decisions accepted some.
    """
    directory, count, accepted = troubled(tmp_path / "j"), JournalCount(Findings()), 0
    for record in Walk(DiskStorage(directory)).records():
        count.take(record)
        said: Any = record.decode()
        accepted += record.kind == Kind.DECIDED and said.verdict == "accepted"
    choices = sum(life.counts["accepted"] for life in count.lives)
    told = meta(made(directory, tmp_path / "page.html"))
    assert told["arrivals"] == accepted < choices
    assert f" {choices} requests (choices of {accepted} arrivals), " in capsys.readouterr().out
    assert meta(made(journal, tmp_path / "page.html"))["arrivals"] == 7
    assert " 7 requests, " in capsys.readouterr().out


def test_a_page_wider_than_its_window_is_found(journal: Path, tmp_path: Path) -> None:
    """`--check-browser` measures the page in narrow and wide windows; a line that does not break is told."""
    try:
        find_browser(None)
    except BrowserMissing:
        pytest.skip(f"no browser here: {', '.join(NAMES)}")
    film, out = follow(DiskStorage(journal), Range())[0], tmp_path / "page.html"
    text = made(journal, out)
    out.write_text(text.replace('<div id="say">', '<div style="width: 600px">wide</div><div id="say">'), "utf-8")
    assert check_page(out, film, None)["wrong"] == ["in a window of 400 pixels the page has 600"]


def test_a_browser_shows_what_the_film_has(journal: Path, tmp_path: Path) -> None:
    """Units, ids, takers and counts at steps all over the journal, out of the page's own program."""
    try:
        find_browser(None)
    except BrowserMissing:
        pytest.skip(f"no browser here: {', '.join(NAMES)}")
    for directory in (journal, troubled(tmp_path / "trouble")):
        film = follow(DiskStorage(directory), Range())[0]
        out = tmp_path / "page.html"
        with out.open("w", encoding="utf-8") as file:
            page.write_page(film, "a journal", [], 0, file)
        result = check_page(out, film, None)
        assert result["wrong"] == []
        assert result["compared"] == result["steps"] * len(film.stretches[0].bands) > 20
        broken = follow(DiskStorage(directory), Range())[0]
        column = broken.stretches[0].counts[0]
        column[0] += 1
        assert check_page(out, broken, None)["wrong"] == [
            f"step 1, stored band 0: live {column[0] - 1}, not {column[0]}"
        ]
    assert np.isfinite(result["frame_ms_max"])
