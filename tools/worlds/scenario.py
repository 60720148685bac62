"""`bandmaster scenario FILE ...`: scenario files, compared with what their commands lead to, or rewritten.

Owns the format of the files and the command. Must never change anything in a file but its logs. Exit codes: 0 every
file says what happens; 1 one does not; 2 a file is no scenario.

    # what this shows
    world page_size=4 pages=16          commands, one a line; see `tools.worlds.stage`
    send a prompt=12 max=4
    run
    ----
    1 admitted a row=0 ...              what was decided, exactly; a blank line ends it
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools import result_files
from tools.worlds.stage import BadCommand, Stage

RULE = "----"
CLEAN, DIFFERENT, USAGE = 0, 1, 2


class BadScenario(Exception):
    """A file that is no scenario: the line, and what is wrong with it."""


@dataclass
class Block:
    """The lines before a log as they stand in the file, commands and others, and the log that is expected of them."""

    first_line: int
    lines: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def commands(self) -> Iterator[tuple[int, str]]:
        """Number and text of every line that is a command."""
        for at, line in enumerate(self.lines, self.first_line):
            if line.strip() and not line.startswith("#"):
                yield at, line


def parse(text: str) -> list[Block]:
    """The blocks of a file; lines behind the last log are a block that expects none."""
    blocks, in_log = [Block(1)], False
    for number, line in enumerate(text.splitlines(), 1):
        if line == RULE and not in_log:
            in_log = True
        elif in_log and line.strip():
            blocks[-1].expected.append(line)
        elif in_log:
            blocks.append(Block(number + 1))
            in_log = False
        else:
            blocks[-1].lines.append(line)
    return blocks


def rewritten(text: str) -> str:
    """The file with the logs that its commands really lead to; raises BadScenario, and whatever a check raises."""
    stage, parts = Stage(), list[str]()
    for block in parse(text):
        stage.log = []
        asked = list(block.commands())
        for number, line in asked:
            try:
                stage.do(line)
            except BadCommand as error:
                raise BadScenario(f"line {number}, {line!r}: {error}") from error
        if asked:
            parts.append("\n".join([*block.lines, RULE, *stage.log]))
        elif any(line.strip() for line in block.lines):
            parts.append("\n".join(block.lines).strip("\n"))
    try:
        stage.close()
    except BadCommand as error:
        raise BadScenario(f"at its end: {error}") from error
    return "\n\n".join(parts) + "\n"


def difference(text: str, actual: str) -> str:
    """Where a file differs from what it should say, as a diff; empty where it does not."""
    lines = difflib.unified_diff(text.splitlines(), actual.splitlines(), "in the file", "what happens", lineterm="")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare or rewrite the files; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bandmaster scenario", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="scenario files")
    parser.add_argument("--rewrite", action="store_true", help="write into the files what really happens")
    options = parser.parse_args(argv)
    different = 0
    for path in options.files:
        try:
            text = path.read_text(encoding="utf-8")
            actual = rewritten(text)
        except (OSError, UnicodeDecodeError, BadScenario) as error:
            sys.stderr.write(f"bandmaster scenario: {path}: {error}\n")
            return USAGE
        if text == actual:
            continue
        different += 1
        if options.rewrite:
            try:
                result_files.put(path, actual)
            except OSError as error:
                sys.stderr.write(f"bandmaster scenario: {path} cannot be rewritten: {error}\n")
                return USAGE
        sys.stdout.write(f"{path}{' was rewritten' if options.rewrite else ''}\n{difference(text, actual)}\n")
    sys.stdout.write(f"{len(options.files) - different} of {len(options.files)} scenarios as written\n")
    return DIFFERENT if different and not options.rewrite else CLEAN


if __name__ == "__main__":
    sys.exit(main())
