"""Flags of the commands that read a journal: its directory, `--json`, and numbers of records and requests.

Owns their names, help and ranges, once for all. Must never open anything.
"""

from __future__ import annotations

import argparse
from typing import Any

from tools.ends import codes

DIRECTORY = "a journal directory, or a run directory that holds one"
FEW = 10_000
DIGITS_MAX = 19  # of a number of a record or a request


def reading_parser(command: str, about: str, **more: Any) -> argparse.ArgumentParser:
    """The parser of `bandmaster COMMAND`, whose help ends with the exit codes."""
    return argparse.ArgumentParser(prog=f"bandmaster {command}", description=about, epilog=codes(command), **more)


def add_directory(parser: argparse.ArgumentParser) -> None:
    """DIR."""
    parser.add_argument("directory", metavar="DIR", help=DIRECTORY)


def add_json(parser: argparse.ArgumentParser, about: str = "print one JSON object") -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help=about)


def few(text: str) -> int:
    """The type of an argument that is how many records are shown."""
    if not text.isdecimal() or len(text) > DIGITS_MAX or int(text) > FEW:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of records to show; 0 to {FEW:,} can be")
    return int(text)


def number(text: str) -> int:
    """The type of an argument that is the number of a record or a request."""
    if not text.isdecimal() or len(text) > DIGITS_MAX or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of a record or request; they are numbered from 1")
    return int(text)
