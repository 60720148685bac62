"""`bandmaster what-if DIR KEY=VALUE ...`: the arrivals of a recorded run under other settings.

    bandmaster what-if DIR arena_bytes=+25%              a quarter more memory
    bandmaster what-if DIR schedule_policy=lpm --rerun   and the same arrivals on a real daemon beside it
    bandmaster what-if DIR                               how well a replay without changes hits what was recorded

Owns the command line. Must never write into the journal's directory. Exit code 0: answered; 1: the rerun failed, or the
answer could not be printed; 2: usage, or what cannot be asked; 4: a journal that is damaged or has no record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from journal.errors import JournalError
from tools.journal_files import Foreign, NoJournal, open_directory
from tools.output import OutputLost, printing
from tools.own_server import ServerFailed
from tools.whatif.answer import answer
from tools.whatif.changes import DECIDING, parse_changes
from tools.whatif.errors import WhatIfError
from tools.whatif.show import show

ANSWERED = 0
LOST = 1
USAGE = 2
DAMAGED = 4
REPLAYS, REPLAYS_MAX = 5, 1000


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Replay the arrivals of a recorded run under other settings, and compare."
    keys = f"KEY is one of: {', '.join(DECIDING)}. VALUE is as the flag of `bandmaster serve` reads it, or +25%, -10%."
    parser = argparse.ArgumentParser(prog="bandmaster what-if", description=about, epilog=keys)
    add = parser.add_argument
    add("directory", metavar="DIR", help="a journal directory, or a run directory that holds one")
    add("changes", nargs="*", metavar="KEY=VALUE", help="settings to change; none: only how well a replay hits")
    add(
        "--rerun",
        action="store_true",
        help="also send the same arrivals at the same times to a real daemon of our own with the changed settings, on "
        "the runner that recorded them: takes as long as the recorded run did",
    )
    add(
        "--replays",
        type=_count,
        default=REPLAYS,
        metavar="N",
        help="replays of each kind, each with other small delays, as they were seen; their mean is told and how far "
        f"they lie apart; 1: a single one without delays [{REPLAYS}]",
    )
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= REPLAYS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: 1 to {REPLAYS_MAX}")
    return int(text)


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr, drawn only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda part: bar.update(task, completed=part)


def main(argv: list[str] | None = None) -> int:
    """`bandmaster what-if`."""
    options = build_parser().parse_args(argv)
    try:
        changes = parse_changes(options.changes)
        storage = open_directory(options.directory)
        found = answer(options.directory, storage, changes, options.replays, options.rerun, progress)
        with printing():
            if options.json:
                print(json.dumps(found))
            else:
                show(found)
    except (WhatIfError, NoJournal) as error:
        return _failed(str(error), USAGE)
    except OutputLost as error:
        return _failed(str(error), LOST)
    except ServerFailed as error:
        return _failed(f"the rerun failed: {error}", LOST)
    except (Foreign, JournalError, msgspec.ValidationError, OSError) as error:
        return _failed(str(error), DAMAGED)
    return ANSWERED


def _failed(text: str, code: int) -> int:
    if text:
        print(f"bandmaster what-if: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
