"""Exit codes: how the processes of the daemon end, and the error that carries a code.

Owns the closed set of codes with one sentence each. Invariant: 0 means that everything accepted was ended in order and
the journal was closed; anything lost gives another code, whatever signal follows.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `bandmaster serve`, `bandmaster daemon` and their children."""

    CLEAN = 0
    INTERNAL = 1
    USAGE = 2
    RANK = 3
    JOURNAL = 4
    IN_USE = 5
    BOOT = 6
    CHILD = 7
    MODEL = 8
    INTERRUPTED = 130


EXIT_TEXT: dict[Exit, str] = {
    Exit.CLEAN: "stopped in order: every accepted request has its end, the journal is closed",
    Exit.INTERNAL: "an actor of the daemon failed, its trace is in `logs/crash-ACTOR.txt` of the run directory; or its "
    "loop hung, and all stacks are in `logs/hang.txt`; requests go on in the next life",
    Exit.USAGE: "a setting or argument was refused, by a rank at the latest when it loads; nothing was served",
    Exit.RANK: "ranks were lost more often than `--epoch-restarts-max` allows; every request ended with reason fault",
    Exit.JOURNAL: "the journal is damaged, busy or could not be written; requests go on in the next life",
    Exit.IN_USE: "the run directory belongs to processes that are alive; they are named",
    Exit.BOOT: "the ranks did not become ready in time or could not agree",
    Exit.CHILD: "a supervised process, or the supervisor of this one, ended when nobody had asked it to",
    Exit.MODEL: "the model is unsupported or could not be prepared",
    Exit.INTERRUPTED: "a signal came while the model was being prepared: nothing had been started, nothing was served",
}


class DaemonError(Exception):
    """Something ends this process; `code` is its exit code and the text says what, the value and what to do."""

    def __init__(self, code: Exit, text: str) -> None:
        super().__init__(text)
        self.code = code


def exit_table() -> str:
    """The codes as a markdown table, for the docs."""
    rows = [f"| {code.value} | {code.name.lower()} | {EXIT_TEXT[code]} |" for code in Exit]
    return "\n".join(["| code | name | meaning |", "| - | - | - |", *rows])
