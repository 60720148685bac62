"""What tools print: whole on narrow terminals, and no traceback where it does not arrive."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.tidy.source import ROOT
from tests.tools.simulate_world import conversations, write
from tools.tables import print_table

HEADS = ("arena", "policy", "bytes", *(f"figure {k}" for k in range(9)))


def printed(width: int, terminal: bool) -> str:
    """A table of three rows on a console."""
    table = Table(title="all of it")
    for head in HEADS:
        table.add_column(head, no_wrap=True)
    for policy in ("value", "lru", "fifo"):
        table.add_row("20%", policy, *(f"{policy}-{k}-figure" for k in range(10)))
    file = io.StringIO()
    print_table(Console(file=file, width=width, force_terminal=terminal, color_system=None), table)
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_table_wider_than_the_terminal_is_turned_over(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer than the terminal; every figure is there, in the order of the rows."""
    monkeypatch.delenv("COLUMNS", raising=False)
    text = printed(width, terminal=True)
    assert max(map(len, text.splitlines())) <= width
    for policy in ("value", "lru", "fifo"):
        places = [text.index(f"{policy}-{k}-figure") for k in range(10)]
        assert places == sorted(places)
    assert text.startswith("\nall of it\n")
    assert all(head in text for head in HEADS)


@pytest.mark.parametrize("width", [16, 20, 27])
def test_a_table_of_which_no_row_fits_is_lines(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each name and its figure, row after row; words and figures are whole, no line is longer."""
    monkeypatch.setenv("COLUMNS", str(width))
    text = printed(width, terminal=False)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    whole = " ".join(text.split())
    assert whole.count("arena: 20%") == 3
    places = [
        whole.index(f"figure {k}: {policy}-{k + 1}-figure") for policy in ("value", "lru", "fifo") for k in range(9)
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(("width", "form"), [(120, "table"), (70, "table"), (50, "beside"), (24, "lines")])
def test_prose_is_wrapped_between_words(width: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its column while that can be read, else behind its name; markup is none, what is no prose stays whole."""
    monkeypatch.setenv("COLUMNS", str(width))
    table = Table("file", "offset")
    table.add_column("what", overflow="fold")
    words = "damage to records that were on disk since sound ones follow"
    table.add_row("0000000001.kvj", "1234567", words)
    table.add_row("0000000002.kvj", "", words)
    file = io.StringIO()
    print_table(Console(file=file, width=width, color_system=None), table)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert sum("0000000001.kvj" in line for line in lines) == 1
    text = file.getvalue().translate(str.maketrans("┃│┏┓┡┩└┘━─┴┬┳╇┻", " " * 15))
    assert all(text.count(word) >= 2 for word in words.split())
    if form == "table":
        assert "1234567" in next(line for line in lines if "0000000001" in line)
    else:
        head = {"beside": "what    damage to records", "lines": "what: damage to records"}[form]
        assert sum(line.startswith(head) for line in lines) == 2
        assert sum(line.startswith("offset") for line in lines) == 1


def test_columns_count_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets the table as wide as it is; with COLUMNS it is a terminal of that width."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, printed(80, terminal=False).splitlines())) > 150
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, printed(80, terminal=False).splitlines())) <= 80


@pytest.mark.parametrize("arguments", [["--json"], [], ["--per-request", "-"]])
@pytest.mark.parametrize("where", ["full", "closed"])
def test_output_that_does_not_arrive_is_an_error_in_words(arguments: list[str], where: str, tmp_path: Path) -> None:
    """A full disk is named; a reader who has enough is no error to speak of; both exit 1, and files are written."""
    trace = write(tmp_path / "trace.jsonl", conversations(1, 6, 10))
    command = [sys.executable, "-m", "tools.cli", "simulate", str(trace), "--band", "full=1000/page", *arguments]
    command += ["--no-bound", "--policy", "lru", "--plot", str(tmp_path / "plot")]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=open("/dev/full", "wb") if where == "full" else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        if process.stdout is not None:
            process.stdout.close()
            process.stdout = None
        _, said = process.communicate(timeout=100)
    assert process.returncode == 1
    full = "bandmaster simulate: standard output cannot be written: No space left on device\n"
    assert said == (full if where == "full" else "")
    assert (tmp_path / "plot").read_text().startswith("<svg")
