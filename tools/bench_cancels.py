"""`bandmaster bench cancels`: many requests cancelled at once, and what streams that go on notice of it.

    bandmaster bench cancels                                1,000 cancels beside 32 kept streams, two pipeline stages
    bandmaster bench cancels --tp 2 --rounds 3              two tensor ranks in each stage, three crowds one by one
    bandmaster bench cancels --spread-ms 900                over most of a second: waiting requests start in between
    bandmaster bench cancels --http                         the crowd are HTTP clients that hang up

Starts a server of its own on modeled ranks; flags behind `--` go to `bandmaster serve`. Owns the command line. Must
never signal what it did not start. Exit code 0: every cancel ended its request once, no kept stream stalled or got
other tokens than without cancels, nothing is held at the end and the journal replays; 1: not all of this holds, and
what does not is printed behind MISSED; 2: usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from daemon.config import ConfigError, load
from tools.cancels import show
from tools.cancels.failed import Failed
from tools.cancels.round import Plan
from tools.cancels.run import Setting, run
from tools.faults.command import end_in_order, split
from tools.own_server import ServerFailed

DEPTH_OF_A_STAGE = 2  # modeled layers of each pipeline stage
STALL_MS = 500.0
RANGES = {  # option -> least, most
    "cancels": (1, 4000),
    "keep": (1, 64),
    "running": (2, 4096),
    "rounds": (1, 100),
    "delay_us": (0, 1_000_000),
    "seed": (0, 2**32 - 1),
    "spread_ms": (0, 1000),
    "stall_ms": (1, 600_000),
    "quiet": (0.1, 60),
    "patience": (1, 3600),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="bandmaster bench cancels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--cancels", type=int, default=1000, help="requests that are brought in and cancelled, all at once [1000]")
    add("--keep", type=int, default=32, help="streams that go on and are never cancelled [32]")
    add("--tp", default="1", help="tensor ranks of each stage, as of serve [1]")
    add("--pp", default="2", help="pipeline stages, as of serve [2]")
    add("--running", type=int, default=256, help="requests that run at once, the kept ones among them [256]")
    add("--spread-ms", type=float, default=0.0, help="send the cancels over so many milliseconds, 1000 at most [0]")
    add("--stall-ms", type=float, default=STALL_MS, help=f"the longest pause of a kept stream [{STALL_MS:g}]")
    add("--http", action="store_true", help="bring the requests in over HTTP; to cancel is to hang up")
    add("--rounds", type=int, default=1, help="crowds, one by one, against the same server [1]")
    add("--delay-us", type=int, default=2000, help="modeled time of a forward on each stage [2000]")
    add("--quiet", type=float, default=1.0, help="seconds of kept streams alone, before each crowd and behind it [1]")
    add("--patience", type=float, default=60.0, help="seconds that each part of a round may take [60]")
    add("--seed", type=int, default=1, help="of prompts and of the order of cancels [1]")
    add("--run-dir", type=Path, help="a fresh directory, which stays with journal and logs; default: one that goes")
    add("--json", action="store_true", help="print one object with a list `rows` instead of tables")
    return made


def plan_of(options: argparse.Namespace, serve: list[str], run_dir: Path) -> tuple[Setting, Plan]:
    """What to run; raises ValueError, OSError or ConfigError naming the wrong option."""
    for name, (least, most) in RANGES.items():
        value = getattr(options, name)
        if not least <= value <= most:
            shown = value if isinstance(value, int) else f"{value:g}"
            raise ValueError(f"--{name.replace('_', '-')} {shown}: it must be at least {least} and at most {most}")
    own = ["--tp", options.tp, "--pp", options.pp, "--rank-runner", "modeled"]
    own += ["--rank-option", f"delay_us={options.delay_us}", "--max-running-requests", str(options.running)]
    own += ["--max-queued-requests", str(options.cancels + options.keep)]
    settings = load("serve", [*own, *serve])
    own += ["--rank-option", f"depth={DEPTH_OF_A_STAGE * settings.pipeline_parallel_size}"]
    if settings.rank_runner != "modeled" or settings.endpoint:
        raise ValueError("behind -- there can be no --rank-runner and no --endpoint: ranks are modeled, and local")
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ValueError(f"--run-dir {run_dir}: it must be a directory that is empty, or not there yet")
    running = settings.max_running_requests
    if running <= options.keep:
        raise ValueError(
            f"--running {running}: --keep {options.keep} streams need a place each, and the crowd one more"
        )
    plan = Plan(
        cancels=options.cancels,
        keep=options.keep,
        running=running,
        seed=options.seed,
        spread_s=options.spread_ms / 1000,
        quiet_s=options.quiet,
        patience_s=options.patience,
    )
    setting = Setting(run_dir, (*own, *serve), options.rounds, options.http, options.stall_ms)
    return setting, plan


def main(argv: Sequence[str] | None = None) -> int:
    """0: no stall and nothing lost; 1: not; 2: usage."""
    own, serve = split(sys.argv[1:] if argv is None else argv)
    cli = parser()
    options = cli.parse_args(own)
    with tempfile.TemporaryDirectory(prefix="bandmaster-cancels-") as place:
        run_dir = (options.run_dir or Path(place) / "run").absolute()
        try:
            setting, plan = plan_of(options, serve, run_dir)
        except (ValueError, OSError, ConfigError) as error:
            cli.error(str(error))
        end_in_order()
        try:
            with show.progress() as told:
                result = run(setting, plan, told)
        except (Failed, ServerFailed, OSError) as error:
            if isinstance(error, ServerFailed) and error.refused:
                cli.error(error.refused)
            sys.stderr.write(f"bandmaster bench cancels: {error}\n")
            return 1
    if options.json:
        whole = {"rows": result.rows, "units": result.units, "replay": result.replay, "missed": result.missed}
        sys.stdout.write(json.dumps(whole) + "\n")
        for text in result.missed:
            sys.stderr.write(f"{show.MISSED}: {text}\n")
    else:
        show.print_result(Console(), result, " ".join(setting.serve), options.stall_ms)
    return int(bool(result.missed))


if __name__ == "__main__":
    sys.exit(main())
