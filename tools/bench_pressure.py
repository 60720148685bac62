"""`bandmaster bench pressure`: what stays of two hot prompts while cold ones pass, beside a published table of 48 rows.

Owns the command. Must never serve anything itself. Each row is one episode on the real core, chain and prefix tree
with the published geometry and no model: page 128, chunks of 512, 32 output tokens, checkpoints every 128. Exit code 0;
2 for bad arguments; with `--check` 1 if the first policy is below any row, or its sum not a page above the published.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from daemon.core.eviction import EVICTION_POLICIES
from daemon.core.limits import CHECKPOINT_POLICIES
from tools.pressure.episode import Episode, config_of, run
from tools.pressure.mapping import CONDITIONS, Condition
from tools.pressure.show import Verdict, episode_table, mapping_rows, mapping_table
from tools.tables import print_table

LEGEND = (
    "before, after: the published table, without and with what it is published for; then the policies that ran here; "
    "possible: if nothing of the hot prompts were lost; see docs/bench_pressure.md"
)
DEFAULT_POLICIES = ",".join(EVICTION_POLICIES)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bandmaster bench pressure", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--policy", default=DEFAULT_POLICIES, help=f"eviction policies, comma-separated [{DEFAULT_POLICIES}]")
    add("--checkpoints", default="likely", choices=CHECKPOINT_POLICIES, help="the checkpoint policy [likely]")
    add("--only", default="", metavar="TEXT", help="rows whose MODEL/CAP/HOT/COLD/ORDER contains this")
    add("--explain", action="store_true", help="request by request: found, evicted, held, what of A and B was usable")
    add("--check", action="store_true", help="exit 1 where the first policy is below the published table")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def measure(conditions: list[Condition], policies: list[str], checkpoints: str) -> list[Episode]:
    """Every row under every policy, with a progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    episodes: list[Episode] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(conditions) * len(policies))
        for policy in policies:
            for condition in conditions:
                progress.update(task, description=f"{policy} {condition.name}")
                episodes.append(run(condition, config_of(policy, checkpoints)))
                progress.advance(task)
    return episodes


def main(argv: list[str] | None = None) -> int:
    """Run the rows, print a table, or with `--json` one object with lists `rows` and `verdicts`."""
    parser = build_parser()
    options = parser.parse_args(argv)
    policies = list(dict.fromkeys(options.policy.split(",")))
    unknown = [policy for policy in policies if policy not in EVICTION_POLICIES]
    if unknown:
        parser.error(f"--policy {unknown[0]!r} is none of {', '.join(EVICTION_POLICIES)}")
    conditions = [one for one in CONDITIONS if options.only in one.name]
    if not conditions:
        parser.error(f"--only {options.only!r} names no row; rows are like {CONDITIONS[0].name}")
    episodes = measure(conditions, policies, options.checkpoints)
    verdicts = [Verdict([one for one in episodes if one.policy == policy]) for policy in policies]
    if options.json:
        told = [
            {
                "policy": verdict.policy,
                "checkpoints": options.checkpoints,
                "rows_below": [one.condition.name for one in verdict.below],
                "rows_above": len(verdict.above),
                "sum_tokens": verdict.sum_tokens,
                "published_tokens": verdict.after_tokens,
                "possible_tokens": verdict.possible_tokens,
                "holds": verdict.holds,
            }
            for verdict in verdicts
        ]
        print(json.dumps({"rows": mapping_rows(episodes), "verdicts": told}))
    else:
        console = Console()
        for one in episodes if options.explain else ():
            print_table(console, episode_table(one))
        print_table(console, mapping_table(episodes, policies))
        for verdict in verdicts:
            console.print(verdict.text(), highlight=False, soft_wrap=True)
        console.print(LEGEND, style="dim", highlight=False, soft_wrap=True)
    return int(options.check and not verdicts[0].holds)


if __name__ == "__main__":
    sys.exit(main())
