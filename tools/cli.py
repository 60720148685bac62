"""`bandmaster`: the one command; finds the subcommand and imports only its module.

Owns the table of subcommands. Must never import anything heavy: `bandmaster --help` answers at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand: its module, whose `main(argv)` returns the exit code, and what it does."""

    module: str
    about: str


INTERRUPTED = 130

COMMANDS: dict[str, Command] = {
    "serve": Command("daemon.launcher", "serve a model over the OpenAI API: everything, started and ended together"),
    "daemon": Command("daemon.__main__", "the scheduler daemon with its ranks, without HTTP"),
    "rank": Command("daemon.rank.remote", "a rank placed by torchrun, Slurm, Ray or by hand, here or on another host"),
    "frontend": Command("daemon.frontend.__main__", "an HTTP front end of a running daemon"),
    "plan": Command("tools.plan", "what a model stores, what requests cost and how many fit, from its config alone"),
    "simulate": Command(
        "tools.simulate.command", "the real core and prefix cache on a trace of traffic, without a model"
    ),
    "replay": Command(
        "tools.replay",
        "run a journal again: check every step, stop at a record, compare two journals; planted faults",
    ),
    "why": Command(
        "tools.why.command", "the life of a request from a journal, in sentences; which requests are worth asking for"
    ),
    "what-if": Command(
        "tools.whatif.command", "the arrivals of a recorded run under other settings, predicted, and run for real"
    ),
    "export": Command("tools.export.command", "a journal as JSON Lines, or as a trace for Perfetto"),
    "incident": Command("tools.incident.command", "one archive of a run for engineers elsewhere, without its prompts"),
    "view": Command("tools.view.command", "a journal as one HTML file: memory, requests and decisions at every step"),
    "verify": Command("tools.verify", "read a journal's checksums and links"),
    "accounts": Command(
        "tools.accounts.command", "what became of all requests, by journal, log and metrics: they must count the same"
    ),
    "trim": Command("tools.trim", "delete what a journal no longer needs, once two snapshots prove it"),
    "top": Command("tools.top.command", "a live view of a running daemon: arena, rates, requests, decisions"),
    "bench": Command(
        "tools.bench",
        "measure: the core, the allocator, the cache, serving, kernels, pressure; `bench --help` lists them",
    ),
    "parity": Command("tools.parity", "compare a server's greedy tokens with the reference implementation"),
    "keys": Command("tools.keys", "make CURVE keys for tcp endpoints"),
    "stress": Command("tools.stress", "random programs on the whole allocator with every byte checked; its mutants"),
    "explore": Command("tools.explore", "every sequence of actions on tiny arenas; capacity by brute force"),
    "trace": Command("tools.allocator_trace", "record what the allocator decides, or compare with a recording"),
    "worlds": Command("tools.worlds.command", "random workloads on tiny simulated worlds; the faults they must find"),
    "scenario": Command(
        "tools.worlds.scenario", "scenario files: commands to a simulated world, and what they lead to"
    ),
    "groups": Command(
        "tools.groups.command", "simulated groups of ranks that lag at random; divergences they must name"
    ),
    "faults": Command("tools.faults.command", "kill, stop and mislead a server's processes; judge what clients get"),
    "check": Command("tools.check", "format, lint, types and tests of a source tree"),
}


def usage() -> str:
    """The list of subcommands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: bandmaster COMMAND [ARGUMENTS]", "", *lines, "", "bandmaster COMMAND --help says more."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code, 2 for one that does not exist, 130 for one that Ctrl-C ended."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(usage() + "\n")
        return 0 if arguments else 2
    command = COMMANDS.get(arguments[0])
    if command is None:
        sys.stderr.write(f"bandmaster: there is no command {arguments[0]!r}\n\n{usage()}\n")
        return 2
    try:
        return int(importlib.import_module(command.module).main(arguments[1:]) or 0)
    except KeyboardInterrupt:
        sys.stderr.write(f"bandmaster {arguments[0]}: interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
