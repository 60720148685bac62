"""Results: where the rows and the plot of a simulation go.

Owns the meaning of `--per-request` and `--plot`, and their errors. Must never touch a target before the runs are over,
nor take for one what the command reads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tools import result_files
from tools.output import OutputLost, printing
from tools.simulate.errors import SimulateError
from tools.simulate.traffic import STDIN

STDOUT = "-"
FLAGS = {"per_request": "--per-request", "plot": "--plot"}


class Results(NamedTuple):
    """The targets, checked; None where nothing was asked for, `-` for standard output."""

    per_request: str | None = None
    plot: str | None = None

    @property
    def on_stdout(self) -> bool:
        """Whether standard output is one of them, so that nothing else may be printed there."""
        return STDOUT in self


def claim(values: Mapping[str, Any]) -> Results:
    """The targets of a command line, before anything is read or runs; raises SimulateError. Touches no file."""
    given = {name: values[name] for name in FLAGS if values[name] is not None}
    reads = {"the trace": values["trace"]} if values["trace"] != STDIN else {}
    if values["model"]:
        reads["--model"] = values["model"]
        reads["the config of --model"] = str(Path(values["model"]) / "config.json")
    for name, path in given.items():
        flag = FLAGS[name]
        if path == STDOUT:
            if values["json"]:
                raise SimulateError(f"{flag} - and --json both take standard output; give one of them a file")
            continue
        if not path:
            raise SimulateError(f"{flag} '' names no file")
        for what, read in reads.items():
            if result_files.same(Path(path), Path(read)):
                raise SimulateError(f"{flag} {path} is {what}, which is only read; name another file")
        try:
            result_files.probe(Path(path))
        except (OSError, ValueError) as error:
            raise SimulateError(f"{flag} {path} cannot be written: {error}") from error
    if len(given) == 2 and _one_place(*given.values()):
        raise SimulateError(f"--per-request and --plot both name {given['plot']}; give each its own")
    return Results(given.get("per_request"), given.get("plot"))


def _one_place(one: str, other: str) -> bool:
    if STDOUT in (one, other):
        return one == other
    return result_files.same(Path(one), Path(other))


def put(flag: str, path: str, text: str) -> None:
    """Write a result; raises SimulateError, without a text where the reader of standard output had enough."""
    try:
        if path == STDOUT:
            with printing():
                sys.stdout.write(text)
        else:
            result_files.put(Path(path), text)
    except OutputLost as error:
        raise SimulateError(str(error)) from error
    except OSError as error:
        raise SimulateError(f"{flag} {path} was not written: {error}") from error
