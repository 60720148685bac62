"""Ends: how the commands that read a journal end, whatever it is that ends them.

Owns which error is which exit code, the words of each code, and the one line on standard error. Must never turn a
defect of the program into an exit code: what is not in the table stays a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from allocator.graph import GraphError
from journal.errors import JournalError
from tools.output import OutputLost

DONE = 0
NO = 1
USAGE = 2
DAMAGED = 4


class Refused(Exception):
    """What was asked for cannot be done, or there is no journal; the text says why and what to do."""


class Failed(Exception):
    """Something beside the journal failed, so that there is no answer; the text says what."""


class Unreadable(Exception):
    """What is there is no journal, or nothing of one can be read; the text says why."""


CODES: dict[type[Exception], int] = {
    Refused: USAGE,
    OutputLost: NO,
    Failed: NO,
    Unreadable: DAMAGED,
    JournalError: DAMAGED,
    GraphError: DAMAGED,  # of a state in a snapshot
    msgspec.MsgspecError: DAMAGED,  # of a record that another version wrote
    OSError: DAMAGED,  # of the journal's files: who writes elsewhere says so itself
}
"""The exit code of each error; the first that fits."""


class Meaning(NamedTuple):
    """What exit codes 0 and 1 say of a command; the others say the same of all."""

    yes: str
    no: str = ""


COMMANDS: dict[str, Meaning] = {
    "verify": Meaning("sound, or a torn end, which a crash leaves and opening cuts"),
    "replay check": Meaning("reproduced", "it diverged"),
    "replay until": Meaning("reproduced up to there", "it diverged"),
    "replay diff": Meaning("no difference", "they differ"),
    "why": Meaning("told"),
    "what-if": Meaning("answered", "the rerun failed"),
    "view": Meaning("the page was written", "the browser showed something else"),
    "export": Meaning("all of it was written"),
    "incident": Meaning("the archive is there, and its journal replays", "replay of its journal differs"),
    "accounts": Meaning("all sides agree, or every plant was found", "they do not agree, or a plant was missed"),
    "trim": Meaning("trimmed, or there was nothing to trim", "replay differs, and nothing was deleted"),
}
"""The commands that read a journal's directory."""

LOST = "what is told or written did not arrive"
OF_USAGE = "usage: what was asked for makes no sense or is not in the journal, or there is no journal"
OF_DAMAGE = "the journal is damaged or cannot be read"


def codes(name: str) -> str:
    """The exit codes of a command, for its `--help`."""
    yes, no = COMMANDS[name]
    return f"Exit code 0: {yes}; 1: {f'{no}, or ' if no else ''}{LOST}; 2: {OF_USAGE}; 4: {OF_DAMAGE}."


def page() -> str:
    """`docs/exit_codes.md`."""
    rows = [
        f"| `{name}` | {yes} | {f'{no}, or as below' if no else 'as below'} |" for name, (yes, no) in COMMANDS.items()
    ]
    return PAGE.format(rows="\n".join(rows), lost=LOST, usage=OF_USAGE, damage=OF_DAMAGE)


PAGE = """# Exit codes of the commands that read a journal

Made by `python -m tools.docs --write` from the table of `tools/ends.py`. Those of `serve` and its processes are in
[settings.md](settings.md#exit-codes).

| command | 0 | 1 |
| - | - | - |
{rows}

| code | of every command |
| - | - |
| 1 | {lost}: a full disk, which is said in one line, or a reader who had enough, of whom nothing is said |
| 2 | {usage} |
| 4 | {damage} |

Nothing, a file, a directory without segments and segments without a byte are no journal: 2. Segments that cannot be
read, or of which nothing is a journal's, are a damaged one: 4. A torn end is none. Ctrl-C: 130.
"""


def ended(command: str, run: Callable[[], int]) -> int:
    """Run a command; its exit code, or that of what ended it, which one line on standard error says."""
    try:
        return run()
    except tuple(CODES) as error:
        text = in_words(error)
        if text:
            print(f"bandmaster {command}: {text}", file=sys.stderr)
        return next(code for kind, code in CODES.items() if isinstance(error, kind))


def in_words(error: Exception) -> str:
    """What an error says, in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read: {error.strerror}"
    return " ".join(str(error).split("\n"))
