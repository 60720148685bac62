"""Show: the accounts as tables and as one JSON object.

Owns the words. Must never judge: what agrees was decided by the check.
"""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from daemon.core.account import Account
from tools.accounts.check import IN_LOG, LifeResult, Result
from tools.tables import print_table

COLUMNS = {
    "received": "re-\nceived",
    "refused": "re-\nfused",
    "accepted": "ac-\ncepted",
    "recovered": "taken\nover",
    "finished": "fin-\nished",
    "aborted": "abor-\nted",
    "failed": "\nfailed",
    "live": "\nlive",
}
"""Fields of an account, and their heads in a table of 80 columns."""
FINDINGS_SHOWN = 20


def show(console: Console, result: Result) -> None:
    """A row per life, three where its accounts differ; then what was found and what should be known."""
    title = "all choices, as counted by J(ournal), L(og) and M(etrics, last scrape)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for head in ["\nlife", "\nby", *COLUMNS.values(), "\nscrapes", "\nend"]:
        table.add_column(head, justify="left" if head in ("\nby", "\nend") else "right", no_wrap=True)
    for life in result.lives:
        for by, account in sides(life):
            numbers = [f"{getattr(account, name):,}" for name in COLUMNS]
            table.add_row(str(life.number), by, *numbers, f"{life.scrapes:,}", end_of(life))
    if len(result.lives) > 1:
        whole = total(result)
        table.add_section()
        table.add_row("all", "J", *(f"{whole[name]:,}" for name in COLUMNS), f"{result.scrapes:,}", "")
    print_table(console, table)
    for note in result.findings.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False, highlight=False)
    for found in result.findings.kept[:FINDINGS_SHOWN]:
        where = f"life {found.life}, behind record {found.sequence:,}" if found.life else "no life"
        console.print(f"{found.between}: {where}: {found.text}", soft_wrap=True, markup=False, style="red")
    console.print(verdict(result), soft_wrap=True, markup=False, highlight=False)


def end_of(life: LifeResult) -> str:
    """How a life ended, in a word."""
    return "clean" if life.closed else "lives" if life.goes_on else "cut"


def sides(life: LifeResult) -> list[tuple[str, Account]]:
    """Who counted what of a life: one entry where all that could be compared is equal."""
    agreed, others = "J", list[tuple[str, Account]]()
    if life.log is not None and any(getattr(life.log, name) != getattr(life.account, name) for name in IN_LOG):
        others.append(("L", life.log))
    elif life.log is not None:
        agreed += "L"
    if life.metrics is not None and life.metrics != life.account:
        others.append(("M", life.metrics))
    elif life.metrics is not None:
        agreed += "M"
    return [(agreed, life.account), *others]


def total(result: Result) -> dict[str, int]:
    """Over all lives: what was taken over is no new request, and only the last life still has live ones."""
    whole = {name: sum(getattr(life.account, name) for life in result.lives) for name in COLUMNS}
    whole["recovered"] = sum(life.reopened for life in result.lives)
    whole["live"] = result.lives[-1].account.live if result.lives else 0
    return whole


def verdict(result: Result) -> str:
    """One sentence."""
    lives = f"{len(result.lives)} {'life' if len(result.lives) == 1 else 'lives'}"
    read = f"{result.records:,} records, {result.lines:,} lines, {result.scrapes:,} scrapes of {lives}"
    if result.agrees:
        what = "received = refused + accepted and accepted + recovered = finished + aborted + failed + live"
        where = "behind every scrape and at the end of every life" if result.scrapes else "at the end of every life"
        return f"agreed: {what}, and the same numbers, {where} ({read})"
    return f"DIFFERS: {result.findings.count:,} times ({read})"


def as_json(result: Result) -> dict[str, Any]:
    """Everything as plain values."""
    return {
        "agrees": result.agrees,
        "records": result.records,
        "lines": result.lines,
        "scrapes": result.scrapes,
        "turned_away": result.door,
        "lives": [
            {
                "number": life.number,
                "life": life.life,
                "journal": life.account._asdict(),
                "log": life.log._asdict() if life.log is not None else None,
                "last_scrape": life.metrics._asdict() if life.metrics is not None else None,
                "ends": life.ends,
                "scrapes": life.scrapes,
                "end": end_of(life),
                "reopened": life.reopened,
                "lines_lost": life.lines_lost,
            }
            for life in result.lives
        ],
        "all": total(result),
        "findings": [found._asdict() for found in result.findings.kept],
        "findings_count": result.findings.count,
        "notes": result.findings.notes,
    }
