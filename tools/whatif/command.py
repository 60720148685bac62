"""`bandmaster what-if DIR KEY=VALUE ...`: the arrivals of a recorded run under other settings.

    bandmaster what-if DIR arena_bytes=+25%                       a quarter more memory
    bandmaster what-if DIR schedule_policy=lpm --rerun            and the same arrivals on a real daemon beside it
    bandmaster what-if DIR                                        how well a replay without changes hits what was recorded

Owns the command line and the order of work. Must never write into the journal's directory. Exit code 0: answered; 1: the
answer could not be printed, or with `--within` a prediction is further off than that; 2: usage, or what cannot be asked;
4: a journal that is damaged or has no record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from allocator.geometry import Geometry
from daemon.core.limits import CoreConfig
from daemon.settings_table import Settings
from ipc.messages import ModelFacts
from journal.errors import JournalError
from tools.journal_files import Foreign, NoJournal, open_directory
from tools.output import OutputLost, printing
from tools.own_server import ServerFailed
from tools.whatif.account import Figures
from tools.whatif.changes import (
    DECIDING,
    Change,
    arena_bytes_of,
    changed_core,
    changed_geometry,
    changed_settings,
    parse_changes,
    settings_of,
)
from tools.whatif.errors import WhatIfError
from tools.whatif.recorded import Recorded, read_journal
from tools.whatif.rerun import rerun, sendings, settings_for
from tools.whatif.show import CHANGED, RECORDED, RERUN, UNCHANGED, document, show
from tools.whatif.traffic import NEVER, Traffic
from tools.whatif.world import Made, World

ANSWERED = 0
LOST = 1
USAGE = 2
DAMAGED = 4


class Asked(NamedTuple):
    """What a journal is asked: the settings of its newest life, and those with the changes."""

    found: Recorded
    before: Settings
    after: Settings
    changes: list[Change]

    def made(self, changed: bool) -> Made:
        """How the lives of a replay are set up."""
        after = self.after if changed else self.before

        def core(recorded: CoreConfig) -> CoreConfig:
            return changed_core(recorded, self.before, after)

        def geometry(recorded: Geometry, facts: ModelFacts) -> Geometry:
            length = min(after.max_model_len or facts.max_model_len, facts.max_model_len)
            return changed_geometry(recorded, self.before, after, length)

        return Made(core, geometry)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Replay the arrivals of a recorded run under other settings, and compare."
    keys = f"KEY is one of: {', '.join(DECIDING)}. VALUE is as the flag of `bandmaster serve` reads it, or +25%, -10%."
    parser = argparse.ArgumentParser(prog="bandmaster what-if", description=about, epilog=keys.replace("%", "%%"))
    add = parser.add_argument
    add("directory", metavar="DIR", help="a journal directory, or a run directory that holds one")
    add("changes", nargs="*", metavar="KEY=VALUE", help="settings to change; none: only how well a replay hits")
    add(
        "--rerun",
        action="store_true",
        help="also send the same arrivals at the same times to a real daemon of our own with the changed settings, on the "
        "runner that recorded them: takes as long as the recorded run did",
    )
    add("--json", action="store_true", help="print one JSON object")
    return parser


def answer(options: argparse.Namespace, changes: list[Change]) -> dict[str, Any]:
    """Read, replay twice, run for real if asked; raises WhatIfError, NoJournal, Foreign, JournalError, ServerFailed."""
    storage = open_directory(options.directory)
    with Traffic() as traffic:
        found = read_journal(storage, traffic)
        assert found.opened is not None
        before = settings_of(found.opened.settings, found.opened.core)
        geometry = found.geometries[-1]
        arena_bytes = arena_bytes_of(geometry)
        asked = Asked(found, before, changed_settings(before, changes, arena_bytes), changes)
        assert found.facts is not None
        arena_after = arena_bytes_of(asked.made(True).geometry(geometry, found.facts))
        runs, notes, pace = replay(asked)
        notes = [*found.notes, *notes]
        if options.rerun:
            runs[RERUN] = run_for_real(asked, arena_after, notes)
        facts = {
            "lives": found.lives,
            "epochs": found.epochs,
            "arena_bytes": {"recorded": arena_bytes, "changed": arena_after},
        }
    return document(options.directory, [str(one) for one in changes], facts, pace, runs, notes)


def replay(asked: Asked) -> tuple[dict[str, Figures], list[str], Any]:
    """The recorded figures and those of the replays, notes, and the pace of both."""
    found, traffic = asked.found, asked.found.traffic
    try:
        pace = found.samples.fit()
    except ValueError as error:
        raise WhatIfError(f"{error}: without one, nothing says how long forwards take") from error
    runs, notes = {RECORDED: found.account.figures()}, list[str]()
    for name in [UNCHANGED, *([CHANGED] if asked.changes else [])]:
        world = World(traffic, asked.made(name == CHANGED), pace)
        with _progress(f"replaying, {name}") as tell:
            runs[name] = world.run(tell).figures()
        if world.made_up_tokens:
            notes.append(
                f"{name}: {world.made_up_tokens:,d} output tokens are made up, since the recorded run did not get that "
                f"far: such outputs are taken to have {traffic.share:.0%} of what they may have, as the others had"
            )
        if runs[name]["live"] and traffic.complete:
            notes.append(f"{name}: {runs[name]['live']} requests can never go on; the figures stop there")
    if found.losses:
        notes.append(
            f"the ranks were lost {found.losses} times; so they are in the replays, at the same moments, and in no rerun"
        )
    return runs, notes, pace


def run_for_real(asked: Asked, arena_bytes: int, notes: list[str]) -> Figures:
    """The figures of a rerun, by its own journal."""
    traffic, figures = asked.found.traffic, list[Figures]()
    requests = sendings(traffic)
    settings = settings_for(asked.after, arena_bytes)
    until_ns = NEVER if traffic.complete else traffic.ended_ns - traffic.began_ns
    print(f"running for real, about {requests[-1].at_ns / 1e9:,.0f} s and what is left then", file=sys.stderr)

    def use(made: Recorded) -> None:
        figures.append(made.account.figures())
        there = arena_bytes_of(made.geometries[-1])
        if there != arena_bytes:
            notes.append(f"the rerun's arena has {there:,d} bytes, not {arena_bytes:,d}")
        other = _other_outputs(asked.found.traffic, made.traffic)
        if other:
            notes.append(f"{other:,d} outputs of the rerun have another length than they had when they were recorded")

    rerun(settings, requests, until_ns, use)
    return figures[0]


def _other_outputs(recorded: Traffic, again: Traffic) -> int:
    """How many known outputs came out with another length."""
    pairs = zip(recorded.made, recorded.state, again.made, again.state, strict=False)
    return sum(state == other == 1 and made != now for made, state, now, other in pairs)


class _progress:
    """A bar on stderr, drawn only on a terminal; inside it is called with the part that is done."""

    def __init__(self, what: str) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(what, total=1.0)

    def __enter__(self) -> Callable[[float], None]:
        self._bar.start()
        return lambda part: self._bar.update(self._task, completed=part)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def main(argv: list[str] | None = None) -> int:
    """`bandmaster what-if`."""
    options = build_parser().parse_args(argv)
    try:
        found = answer(options, parse_changes(options.changes))
        with printing():
            if options.json:
                print(json.dumps(found))
            else:
                show(found)
    except (WhatIfError, NoJournal) as error:
        print(f"bandmaster what-if: {error}", file=sys.stderr)
        return USAGE
    except OutputLost as error:
        if str(error):
            print(f"bandmaster what-if: {error}", file=sys.stderr)
        return LOST
    except ServerFailed as error:
        print(f"bandmaster what-if: the rerun failed: {error}", file=sys.stderr)
        return LOST
    except (Foreign, JournalError, msgspec.ValidationError, OSError) as error:
        print(f"bandmaster what-if: {error}", file=sys.stderr)
        return DAMAGED
    return ANSWERED


if __name__ == "__main__":
    raise SystemExit(main())
