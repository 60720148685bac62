"""plan: what a model stores, what requests of it cost and how many fit, from its config alone.

    bandmaster plan MODEL (--arena-bytes N | --mem-fraction F) [--tp N] [--pp N] [--mix FILE] [--json]

Owns the command line. Must never load a weight. Settings have the names, defaults and ranges of `bandmaster serve`.
Exit code 0; 2 for what cannot be planned, with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daemon.config import ConfigError, parse_value, resolve
from daemon.settings_table import BY_KEY
from tools.planning.document import plan_document
from tools.planning.errors import PlanError
from tools.planning.mix import read_mix
from tools.planning.show import show
from tools.planning.stages import Ask, make_plan
from tools.serve_flags import add_setting

USAGE = 2
LENGTHS = "512,2048,8192,32768"
OWN = ("tp", "pp", "pp_layers", "device_memory_bytes", "weights_bytes", "lengths", "mix", "json")
SETTINGS = (
    "arena-bytes",
    "mem-fraction",
    "dtype",
    "max-model-len",
    "page-size",
    "max-running-requests",
    "max-num-batched-tokens",
    "checkpoint-interval",
    "state-cache",
    "enable-prefix-caching",
)
"""The settings of `bandmaster serve` that change a plan."""


def build_parser() -> argparse.ArgumentParser:
    """The command line; absent settings stay absent, so that defaults follow what is given."""
    about = "What a model stores, what requests cost and how many fit, from its config alone."
    parser = argparse.ArgumentParser(
        prog="bandmaster plan", description=about, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="a directory with config.json, or such a file")
    for key in SETTINGS:
        add_setting(parser, key)
    add = parser.add_argument
    add("--tp", metavar="N", default="1", help="tensor ranks of each stage [1]")
    add("--pp", metavar="N", default="1", help="pipeline stages [1]")
    add("--pp-layers", metavar="N,N,...", default="", help="layers of each stage [as even as can be]")
    add("--device-memory-bytes", metavar="BYTES", default="0", help="memory of a rank's device [free here now]")
    add("--weights-bytes", metavar="BYTES", default="", help="bytes of all weights [counted from the config]")
    add("--lengths", metavar="N,N,...", default=LENGTHS, help=f"tokens of the requests that are priced [{LENGTHS}]")
    add("--mix", metavar="FILE", default="", help="a workload to price, one JSON object a line")
    add("--json", action="store_true", default=False, help="print one JSON object instead of tables")
    return parser


def ask_of(values: dict[str, Any]) -> Ask:
    """The plan's own flags as numbers; raises PlanError."""
    shown = values["pp_layers"]
    return Ask(
        tp=_count("--tp", values["tp"]),
        pp=_count("--pp", values["pp"]),
        pp_layers=tuple(_count("--pp-layers", part) for part in shown.split(",")) if shown else (),
        device_memory_bytes=_bytes("--device-memory-bytes", values["device_memory_bytes"]),
        weights_bytes=_bytes("--weights-bytes", values["weights_bytes"]) if values["weights_bytes"] else -1,
    )


def _count(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise PlanError(f"{flag}: {text!r} is not a whole number from 1 on")
    return int(text)


def _bytes(flag: str, text: str) -> int:
    row = BY_KEY["arena-bytes"]
    try:
        return 0 if text == "0" else int(parse_value(row, text, flag))
    except ConfigError:
        raise PlanError(
            f"{flag}: {text!r} is no size from {int(row.low or 0)} bytes on; write 80GiB or bytes"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """`bandmaster plan`."""
    values = vars(build_parser().parse_args(argv))
    flags = {name: value for name, value in values.items() if name not in OWN}
    try:
        ask = ask_of(values)
        lengths = [_count("--lengths", part) for part in values["lengths"].split(",")]
        plan = make_plan(resolve("daemon", flags, {}), ask)
        mix = read_mix(Path(values["mix"]), plan.model.max_model_len) if values["mix"] else []
        document = plan_document(plan, lengths, mix)
    except (PlanError, ConfigError) as error:
        sys.stderr.write(f"bandmaster plan: {error}\n")
        return USAGE
    if values["json"]:
        print(json.dumps(document))
    else:
        show(document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
