"""faults: kills, stops and misleads the processes of a server of its own, and judges what clients got.

    bandmaster faults list                                  strikes, points, actions, and what must come of each
    bandmaster faults run --run-dir DIR SPEC [SPEC ...]      one server with these faults planted (BANDMASTER_FAULTS)
    bandmaster faults run --run-dir DIR --each               every action in turn, a server each
    bandmaster faults campaign --run-dir DIR [--seed N] [--rounds N] [--only KIND,...]
                                                            kill -9 and kill -STOP of each process at random moments

Flags behind `--` go to `bandmaster serve`. Owns the command line. Must never signal what it did not start. Exit code 0:
nothing was lost, doubled or different, and the journal replays; 1: something was, each is printed; 2: usage.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from daemon.exits import DaemonError
from daemon.faults import Spec, parse
from tools.faults import show
from tools.faults.campaign import CampaignFailed, Plan, Result, run
from tools.faults.cases import Case, cases, run_case
from tools.faults.strikes import KINDS, parse_kinds, plan
from tools.faults.work import Sizes
from tools.own_server import ServerFailed
from tools.result_files import put

DEPTH_OF_A_STAGE = 2  # modeled layers of each pipeline stage
RESTARTS_MAX = 1_000_000  # of ranks and of processes, in a campaign
TIE_BOUND = 0.002  # of log probabilities in float32: what reductions in another order can move


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="bandmaster faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="list|run|campaign")
    commands.add_parser("list", help="strikes, points, actions, and what must come of each")
    planted = commands.add_parser("run", help="faults planted in the processes of one server, or every one in turn")
    planted.add_argument("specs", nargs="*", metavar="SPEC", help="PROCESS:POINT=NUMBER:ACTION[:OPTION=VALUE...]")
    planted.add_argument("--each", action="store_true", help="every action in turn, a server each")
    planted.add_argument("--only", default="", metavar="TEXT", help="with --each: those whose specification has it")
    struck = commands.add_parser("campaign", help="kill and stop each process at random moments under load")
    struck.add_argument("--rounds", type=int, default=20, help="strikes [20]")
    struck.add_argument("--only", default="", metavar="KIND,...", help=f"of {', '.join(KINDS)}, or a part of a name")
    for command in (planted, struck):
        _common(command)
    return made


def _common(made: argparse.ArgumentParser) -> None:
    made.add_argument("--run-dir", required=True, type=Path, help="a fresh directory; it stays, with journal and logs")
    made.add_argument("--seed", type=int, default=1, help="of prompts, moments and victims [1]")
    made.add_argument(
        "--clients", type=int, default=32, help="streaming clients: half over HTTP, half over ZeroMQ [32]"
    )
    made.add_argument("--tp", type=int, default=1, help="tensor ranks of each stage [1]")
    made.add_argument("--pp", type=int, default=1, help="pipeline stages [1]")
    made.add_argument("--model", default="", help="a model directory; default: the embedded model")
    made.add_argument("--rank-runner", default="modeled", choices=("modeled", "torch"), help="[modeled]")
    made.add_argument("--delay-us", type=int, default=4000, help="modeled time of a forward [4000]")
    made.add_argument("--output-tokens", default="100..400", metavar="LOW..HIGH", help="output of a request [100..400]")
    made.add_argument("--patience", type=float, default=120.0, help="seconds that a round may take [120]")
    made.add_argument("--tie-bound", type=float, default=TIE_BOUND, help=f"of log probabilities [{TIE_BOUND}]")
    made.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and those behind `--` for the server."""
    arguments = list(argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def bounds(text: str) -> tuple[int, int]:
    """LOW..HIGH as two positive numbers; ValueError."""
    low, _, high = text.partition("..")
    found = int(low), int(high or low)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(f"{text!r} is no LOW..HIGH of positive numbers")
    return found


def plan_of(options: argparse.Namespace, serve: list[str]) -> Plan:
    """The plan of the options; raises ValueError."""
    flags = [*([options.model] if options.model else []), "--tp", str(options.tp), "--pp", str(options.pp)]
    modeled = options.rank_runner == "modeled"
    if modeled:
        flags += ["--rank-runner", "modeled", "--rank-option", f"delay_us={options.delay_us}"]
        flags += ["--rank-option", f"depth={DEPTH_OF_A_STAGE * options.pp}"] if options.pp > 1 else []
    elif "--dtype" not in serve:
        flags += ["--dtype", "float32"]  # in bfloat16 every other output parts at a tie
    strikes: tuple[Any, ...] = ()
    if options.command == "campaign":
        if options.rounds < 1:
            raise ValueError(f"--rounds {options.rounds}: at least 1")
        kinds = parse_kinds(options.only) if options.only else KINDS
        strikes = tuple(plan(options.seed, options.rounds, kinds))
        for budget in ("--epoch-restarts-max", "--restarts-max"):  # of faults far apart, not of a strike a minute
            if budget not in serve:
                flags += [budget, str(RESTARTS_MAX)]
    if options.clients < 1:
        raise ValueError(f"--clients {options.clients}: at least 1")
    return Plan(
        run_dir=options.run_dir.absolute(),
        serve=(*flags, *serve),
        seed=options.seed,
        clients=options.clients,
        sizes=Sizes(output=bounds(options.output_tokens), sampled_one_in=4 if modeled else 0),
        strikes=strikes,
        patience_s=options.patience,
        ties_within=0.0 if modeled else options.tie_bound,
    )


def _told(row: dict[str, Any]) -> None:
    sys.stderr.write(show.line(row) + "\n")
    sys.stderr.flush()


def run_cases(options: argparse.Namespace, made: Plan) -> dict[str, Result]:
    """The undisturbed server, then one for each case; by the specifications of the case."""
    every = [case for case in cases(options.pp, options.tp) if options.only in case.specs]
    chosen = every if options.each else [Case(";".join(options.specs))]
    results: dict[str, Result] = {}
    sys.stderr.write("undisturbed\n")
    quiet = run(_below(made, "undisturbed"), _told)
    results["undisturbed"] = quiet
    for number, case in enumerate(chosen, start=1):
        sys.stderr.write(f"{case.specs}\n")
        results[case.specs] = run_case(made, case, number, quiet.outputs, _told)
        for text in [*results[case.specs].problems, *results[case.specs].rounds[-1]["bad"]]:
            sys.stderr.write(f"PROBLEM: {text}\n")
    return results


def _below(made: Plan, name: str) -> Plan:
    return replace(made, run_dir=made.run_dir / name)


def check_ranks(specs: list[Spec], stages: int, ranks: int) -> None:
    """Raises ValueError for a specification of a rank that the server will not have."""
    there = [f"rank-{stage}-{rank}" for stage in range(stages) for rank in range(ranks)]
    for spec in specs:
        if spec.process not in ("daemon", "rank-*", *there):
            allowed = ", ".join(there)
            raise ValueError(f"{spec.text}: there is no {spec.process} with --pp {stages} --tp {ranks}, only {allowed}")


def end_in_order() -> None:
    """SIGTERM is Ctrl-C here: the server ends with us."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


def main(argv: Sequence[str] | None = None) -> int:
    """0: everything as it must be; 1: not; 2: usage."""
    own, serve = split(sys.argv[1:] if argv is None else argv)
    cli = parser()
    options = cli.parse_args(own)
    console = Console()
    if options.command == "list":
        show.print_catalogue(console)
        return 0
    try:
        made = plan_of(options, serve)
        if options.command == "run" and bool(options.specs) == options.each:
            raise ValueError("name specifications, or --each")
        if options.command == "run":
            check_ranks(parse(";".join(options.specs)), options.pp, options.tp)
    except (ValueError, DaemonError) as error:
        cli.error(str(error))
    began = time.monotonic()
    end_in_order()
    try:
        results = {"campaign": run(made, _told)} if options.command == "campaign" else run_cases(options, made)
    except (CampaignFailed, ServerFailed, OSError) as error:
        sys.stderr.write(f"bandmaster faults {options.command}: {error}\n")
        return 1
    for name, result in results.items():
        show.print_result(console, result, f"{name}: {' '.join(made.serve)}, seed {made.seed}, {made.clients} clients")
    console.print(f"{time.monotonic() - began:.0f} s", highlight=False)
    if options.json:
        whole = {name: asdict(result) | {"clean": result.clean} for name, result in results.items()}
        put(options.json, json.dumps(whole, default=str, indent=1) + "\n")
    return 0 if all(result.clean for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
