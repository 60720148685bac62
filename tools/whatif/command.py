"""`bandmaster what-if DIR KEY=VALUE ...`: the arrivals of a recorded run under other settings.

    bandmaster what-if DIR arena_bytes=+25%              a quarter more memory
    bandmaster what-if DIR schedule_policy=lpm --rerun   and the same arrivals on a real daemon beside it
    bandmaster what-if DIR                               how well a replay without changes hits what was recorded

Owns the command line. Must never write into the journal's directory. Exit codes: `tools.ends`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tools.ends import DONE, Failed, ended
from tools.journal_files import open_directory
from tools.output import tell
from tools.own_server import ServerFailed
from tools.reading_flags import add_directory, add_json, reading_parser
from tools.whatif.answer import answer
from tools.whatif.changes import DECIDING, parse_changes
from tools.whatif.show import show

REPLAYS, REPLAYS_MAX = 5, 1000


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Replay the arrivals of a recorded run under other settings, and compare."
    keys = f"KEY is one of: {', '.join(DECIDING)}. VALUE is as the flag of `bandmaster serve` reads it, or +25%, -10%."
    parser = reading_parser("what-if", about)
    parser.epilog = f"{keys} {parser.epilog}"
    add = parser.add_argument
    add_directory(parser)
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
    add_json(parser)
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

    def run() -> int:
        changes = parse_changes(options.changes)
        storage = open_directory(options.directory)
        try:
            found = answer(options.directory, storage, changes, options.replays, options.rerun, progress)
        except ServerFailed as error:
            raise Failed(f"the rerun failed: {error}") from error
        tell(options.json, lambda: found, lambda: show(found))
        return DONE

    return ended("what-if", run)


if __name__ == "__main__":
    raise SystemExit(main())
