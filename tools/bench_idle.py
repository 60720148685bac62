"""`bandmaster bench idle`: what a server costs while it has nothing to do.

Owns the measurement of processor time of all processes of a server of our own. Must never touch the server during the
measured time: a probe would be work.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import psutil
import trio
from rich.console import Console
from rich.table import Table

from tools.http_load import Load, run_load
from tools.own_server import OwnServer, ServerFailed
from tools.tables import print_table


def module_of(process: psutil.Process) -> str:
    """What a process runs: the module behind `-m`, else its name."""
    line = process.cmdline()
    return str(line[line.index("-m") + 1] if "-m" in line[:-1] else process.name())


def processor_s(process: psutil.Process) -> float:
    """User and system seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(server: OwnServer, seconds: float) -> list[dict[str, Any]]:
    """One row per process and one for all: seconds of processor time and percent of one core."""
    watched = server.processes()
    before = [processor_s(process) for process in watched]
    began = time.monotonic()
    time.sleep(seconds)
    wall_s = time.monotonic() - began
    rows = []
    for process, start_s in zip(watched, before, strict=True):
        used_s = processor_s(process) - start_s
        rows.append({"process": module_of(process), "pid": process.pid, "processor_s": round(used_s, 3)})
    rows.append({"process": "all", "pid": 0, "processor_s": round(sum(row["processor_s"] for row in rows), 3)})
    for row in rows:
        row |= {"percent_of_a_core": round(100 * row["processor_s"] / wall_s, 3), "seconds": round(wall_s, 1)}
    return rows


def main(argv: list[str]) -> int:
    """0 when it was measured (and, with --limit, was below it); 1 otherwise."""
    cli = argparse.ArgumentParser(prog="bandmaster bench idle", description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--seconds", type=float, default=60.0, help="how long to watch [60]")
    cli.add_argument("--settle", type=float, default=5.0, help="seconds between the last request and the watch [5]")
    cli.add_argument("--limit", type=float, default=0.0, help="fail above this percentage of one core; 0: no limit")
    cli.add_argument("--json", action="store_true", help="one object with a list `rows`")
    cli.add_argument("serve", nargs="*", help="behind `--`: flags of `bandmaster serve`")
    options = cli.parse_args(argv)
    if options.seconds <= 0 or options.settle < 0:
        cli.error(f"--seconds {options.seconds} must be above 0, --settle {options.settle} at least 0")
    try:
        with OwnServer(options.serve) as server:
            load = Load(server.url, server.model(), prompt_tokens=16, output_tokens=8)
            _, results = trio.run(run_load, load, range(2), 1)
            if any(result.error for result in results):
                raise ServerFailed(results[0].error)
            time.sleep(options.settle)
            rows = measure(server, options.seconds)
    except ServerFailed as error:
        sys.stderr.write(f"bandmaster bench idle: {error}\n")
        return 1
    if options.json:
        sys.stdout.write(json.dumps({"rows": rows}) + "\n")
    else:
        table = Table("process", "pid", "processor s", "% of a core", title=f"idle for {rows[-1]['seconds']} s")
        for row in rows:
            table.add_row(
                row["process"], str(row["pid"]), f"{row['processor_s']:.2f}", f"{row['percent_of_a_core']:.2f}"
            )
        print_table(Console(), table)
    return int(bool(options.limit) and rows[-1]["percent_of_a_core"] > options.limit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
