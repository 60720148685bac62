"""Flags of `bandmaster serve` in the parsers of other commands, with the same names, ranges and help.

Owns how a row of the settings table becomes an argument there. Must never parse a value: `daemon.config.resolve` does.
"""

from __future__ import annotations

import argparse
from typing import Any, Protocol

from daemon.settings_table import BY_KEY

OTHER_ALIASES = {"max-num-batched-tokens": ("--max-batched-tokens",)}


class Arguments(Protocol):
    """A parser, or a group of one."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


def add_setting(parser: Arguments, key: str, default: str = "") -> None:
    """One setting as a flag that stays absent when it is not given; `default` is said where it is not serve's own."""
    row = BY_KEY[key]
    own = f" [{default}]" if default else ""
    help_text = f"as of serve: {row.help}{own}".replace("%", "%%")
    if row.negation:
        against = help_text.replace("as of serve:", "as of serve, not to:", 1)
        parser.add_argument(row.negation, dest=row.attribute, action="store_const", const="false", help=against)
        return
    if row.kind == "switch":
        parser.add_argument(row.flag, dest=row.attribute, action="store_const", const="true", help=help_text)
        return
    metavar = "|".join(row.choices) or row.kind.upper()
    aliases = OTHER_ALIASES.get(key, row.aliases)
    if row.kind == "pairs":
        parser.add_argument(
            row.flag, *aliases, dest=row.attribute, action="append", metavar="KEY=VALUE", help=help_text
        )
    else:
        parser.add_argument(row.flag, *aliases, dest=row.attribute, metavar=metavar, help=help_text)
