"""Results: where the rows and the plot of a simulation go.

Owns the meaning of `--per-request`, `--plot` and `--journal`, and their errors. Must never touch a file before the runs
are over, nor take for one what the command reads.
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
    journal: str = ""

    @property
    def on_stdout(self) -> bool:
        """Whether standard output is one of them, so that nothing else may be printed there."""
        return STDOUT in (self.per_request, self.plot)


def claim(values: Mapping[str, Any]) -> Results:
    """The targets of a command line, before anything is read or runs; raises SimulateError. No file is touched."""
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
    return Results(given.get("per_request"), given.get("plot"), _journal(values["journal"]))


def _journal(path: str | None) -> str:
    """A directory that holds nothing yet and is made where it is missing; empty where none was asked for."""
    if path is None:
        return ""
    directory = Path(path)
    if not path or path == STDOUT:
        raise SimulateError(f"--journal {path!r} names no directory")
    try:
        result_files.probe_folder(directory)
        if any(directory.iterdir()):
            raise SimulateError(f"--journal {path} is not empty; a run gets a directory of its own")
    except (OSError, ValueError) as error:
        raise SimulateError(f"--journal {path} cannot be written: {error}") from error
    return path


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
