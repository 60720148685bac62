"""top: a live view of a running daemon: its arena, rates, requests and decisions.

    bandmaster top [RUN_DIR|ENDPOINT]        look at it; `?` tells the keys
    bandmaster top RUN_DIR --once            one frame as text
    bandmaster top RUN_DIR --json            one answer as JSON, with the rates of one interval
    bandmaster top RUN_DIR --svg FILE        the picture as a file, after `--after` seconds

Owns where the daemon is found. Must never start, stop or slow one. Exit code 0; 1: it cannot be watched, or its answer
could not be printed; 2: usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio
from rich.console import Console

from daemon.run_dir import RunDir
from ipc.endpoints import check_tcp, unix_path
from ipc.errors import DaemonLost, EndpointError, KeyFileError
from ipc.keys import load_client_keys
from tools.output import OutputLost, printing
from tools.top.feed import NoAnswer, Place, first
from tools.top.history import History
from tools.top.page import LINES_LEAST, WIDTH_LEAST, Page, Wishes, too_small
from tools.top.requests import ORDERS

FAILED, USAGE = 1, 2
WIDTH_MOST, LINES_MOST = 500, 300


class NotFound(Exception):
    """No daemon can be meant; the text says what to name."""


class NoTerminal(Exception):
    """There is nothing to draw on, or nobody to press keys; the text says what prints without."""


def run_directories() -> list[Path]:
    """Run directories in the user's state directory whose daemon lives."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "bandmaster"
    return sorted(path for path in state.glob("*") if path.is_dir() and RunDir(path).owner())


def endpoint_of(where: str | None) -> tuple[str, str]:
    """The endpoint that a run directory, an endpoint or nothing means, and its name for people; raises NotFound."""
    if where and "://" in where:
        host, _, port = where.partition("://")[2].rpartition(":")
        if where.startswith("tcp://") and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise NotFound(f"{where} is no endpoint: tcp://HOST:PORT, with a port from 1 to 65535")
        return where, where
    if where is None:
        found = run_directories()
        if len(found) != 1:
            which = ", ".join(map(str, found)) if found else "no run directory in the state directory has a live daemon"
            raise NotFound(f"name the run directory or the endpoint of the daemon to watch: {which}")
        where = str(found[0])
    directory = Path(where).absolute()
    if not where or not directory.is_dir():
        raise NotFound(
            f"{where or repr(where)} is no run directory; an endpoint looks like ipc://PATH or tcp://HOST:PORT"
        )
    return RunDir(directory).front_endpoint, where


def place_of(options: argparse.Namespace) -> Place:
    """Where to look, by the arguments; raises NotFound, KeyFileError and EndpointError."""
    endpoint, name = endpoint_of(options.where)
    keys = load_client_keys(Path(options.keys), options.client) if options.keys else None
    check_tcp(endpoint, keys is not None, options.insecure)  # here: behind it are threads and a screen
    unix_path(endpoint)
    return Place(endpoint, name, keys, options.insecure)


# --- one frame -----------------------------------------------------------------------------------------------------


def observed(place: Place, interval_s: float) -> History:
    """What two answers tell; raises DaemonLost and NoAnswer."""
    history = History(place.name)
    for watched in trio.run(first, place, interval_s):
        history.take(watched)
    return history


def as_json(history: History) -> dict[str, Any]:
    """The newest answer as plain values with names, and the rates."""
    watched = history.watched
    assert watched is not None, "it was observed"
    document: dict[str, Any] = msgspec.to_builtins(watched)
    document["requests"] = [_named(row) for row in watched.requests]
    document["decisions"] = [{"serial": told.serial, **_named(told.decided)} for told in watched.decisions]
    document["rates"] = {name: getattr(history.rates, name) for name in history.rates.__slots__}
    return document


def _named(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def show_once(history: History, wishes: Wishes, width: int, height: int) -> None:
    """One frame; in colours where the output is a terminal."""
    console = Console(width=width, highlight=False)
    for line in Page(history, wishes).frame(width, height):
        line.rstrip()
        console.print(line, soft_wrap=True)


# --- arguments -----------------------------------------------------------------------------------------------------


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    numbers = width.isdecimal() and height.isdecimal()
    if not numbers or too_small(int(width), int(height)) or int(width) > WIDTH_MOST or int(height) > LINES_MOST:
        sizes = f"{WIDTH_LEAST}x{LINES_LEAST} to {WIDTH_MOST}x{LINES_MOST}"
        raise argparse.ArgumentTypeError(f"{text!r} is no COLUMNSxLINES from {sizes}")
    return int(width), int(height)


def _seconds(least: float, most: float) -> Callable[[str], float]:
    """A reader of seconds within bounds."""

    def read(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not least <= seconds <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from {least:g} to {most:g}")
        return seconds

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bandmaster top", description="A live view of a running daemon.")
    about = "its run directory, or its endpoint; without one: the only run directory that has a live daemon"
    parser.add_argument("where", nargs="?", metavar="RUN_DIR|ENDPOINT", help=about)
    parser.add_argument(
        "--interval", type=_seconds(0.1, 60), default=1.0, metavar="SECONDS", help="ask so often [default 1]"
    )
    parser.add_argument("--sort", choices=list(ORDERS), default=next(iter(ORDERS)), help="the table's order")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only requests whose line contains it")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print one frame and end")
    form.add_argument("--json", action="store_true", help="print one answer as JSON and end")
    form.add_argument("--svg", default="", metavar="FILE", help="write the picture after --after seconds and end")
    parser.add_argument(
        "--after", type=_seconds(0.1, 3600), default=10.0, metavar="SECONDS", help="for --svg [default 10]"
    )
    parser.add_argument(
        "--size", type=_size, metavar="COLUMNSxLINES", help="for --once and --svg [default the terminal's]"
    )
    parser.add_argument("--keys", default="", metavar="DIR", help="directory with the client's keys, for tcp endpoints")
    parser.add_argument("--client", default="client", metavar="NAME", help="whose keys of that directory")
    parser.add_argument("--insecure", action="store_true", help="tcp without keys")
    return parser


def need_terminal() -> None:
    """Raise NoTerminal unless keys can be read and the picture drawn: `textual` reads stdin and draws on stderr."""
    streams = (("standard input", sys.stdin), ("standard output", sys.stdout), ("standard error", sys.stderr))
    without = [name for name, stream in streams if stream is None or not stream.isatty()]
    if without:
        raise NoTerminal(
            f"the live view needs a terminal; not one: {', '.join(without)}. --once prints one frame as text, --json "
            "one answer as JSON, --svg FILE writes the picture"
        )


def _run(options: argparse.Namespace, place: Place) -> int:
    width, height = options.size or shutil.get_terminal_size((100, 40))
    wishes = Wishes(order=options.sort, wanted=options.filter)
    if options.once or options.json:
        history = observed(place, options.interval)
        with printing():
            if options.json:
                print(json.dumps(as_json(history)))
            else:
                show_once(history, wishes, width, height)
        return 0
    from tools.top.app import Top  # only here: what prints a frame need not wait for the whole of it

    app = Top(place, options.interval, wishes)
    if options.svg:
        app.picture(Path(options.svg), options.after)
        app.run(headless=True, size=(width, height))
    else:
        app.run()
    if app.failed:
        print(f"bandmaster top: {app.failed}", file=sys.stderr)
    return app.return_code or 0


def main(argv: Sequence[str] | None = None) -> int:
    """Look at a daemon; the exit code."""
    options = _parser().parse_args(argv)
    try:
        if not (options.once or options.json or options.svg):
            need_terminal()
        return _run(options, place_of(options))
    except (NoTerminal, NotFound, KeyFileError, EndpointError) as error:
        print(f"bandmaster top: {error}", file=sys.stderr)
        return USAGE
    except OutputLost as error:
        if str(error):
            print(f"bandmaster top: {error}", file=sys.stderr)
        return FAILED
    except (DaemonLost, NoAnswer, trio.TooSlowError) as error:
        print(f"bandmaster top: {error}", file=sys.stderr)
        return FAILED
