"""`python -m daemon.rank`: one rank process for one epoch, started by the daemon or by `bandmaster rank`.

Owns arguments, keys, logging and the exit code. The token that proves who started it comes in BANDMASTER_RANK_TOKEN, so
that it is in no process list. It is killed when its parent dies, whatever it is doing. SIGINT is left to the daemon: a
terminal's Ctrl-C reaches the whole group, and the daemon decides how its ranks end.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
import trio

from daemon.exits import DaemonError
from daemon.faults import Faults, planted
from daemon.processes import TOKEN_VARIABLE, die_with_parent
from daemon.rank.command_line import EXIT_FAULT, EXIT_USAGE, JOIN_TIMEOUT_S, add_connection
from daemon.rank.errors import RankError
from daemon.rank.faults import FaultyStream
from daemon.rank.loop import Place, RankLoop
from ipc.errors import IpcError
from ipc.keys import load_client_keys
from ipc.rank_stream import RankStream
from ipc.sockets import flush_and_end

FLUSH_MS = 200  # for what was said last, where the daemon is still there to hear it


def configure_logs(place: Place) -> None:
    """JSON lines on stderr; every line carries stage and rank."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(stage=place.stage, rank=place.rank)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments: where the daemon listens, and which rank this is."""
    parser = argparse.ArgumentParser(prog="python -m daemon.rank", description="One rank of a Bandmaster daemon.")
    parser.add_argument("--endpoint", required=True, help="where the daemon's rank socket is, as ipc:// or tcp://")
    parser.add_argument("--stage", type=int, default=0, help="pipeline stage")
    parser.add_argument("--rank", type=int, default=0, help="tensor rank within the stage")
    parser.add_argument("--join-timeout", type=float, default=JOIN_TIMEOUT_S, metavar="S", help="to be taken in [60]")
    add_connection(parser)
    parser.add_argument("--token", default="", help=f"token for Join; better given in {TOKEN_VARIABLE}")
    return parser.parse_args(argv)


def open_stream(arguments: argparse.Namespace, token: str, faults: Faults) -> RankStream:
    """The stream to the daemon, one that does wrong where a fault asks for it; raises IpcError for keys or endpoint."""
    keys = load_client_keys(Path(arguments.keys), arguments.client) if arguments.keys else None
    kind = FaultyStream if faults.at("step", "report") else RankStream
    stream = kind(
        arguments.endpoint,
        stage=arguments.stage,
        rank=arguments.rank,
        token=token,
        keys=keys,
        insecure=arguments.insecure,
    )
    if isinstance(stream, FaultyStream):
        stream.faults = faults
    return stream


async def serve(arguments: argparse.Namespace, token: str, faults: Faults) -> int:
    """Connect and serve one epoch; returns the exit code. What the stream refuses ends the rank with a logged line."""
    code = EXIT_FAULT
    try:
        stream = open_stream(arguments, token, faults)
    except IpcError as error:
        structlog.get_logger("rank").error("cannot connect", error=str(error))
        return EXIT_USAGE
    try:
        code = await RankLoop(stream, Place(arguments.stage, arguments.rank), faults, arguments.join_timeout).run()
    except* (IpcError, RankError, trio.TooSlowError) as group:
        structlog.get_logger("rank").error("cannot go on", errors=[repr(error) for error in group.exceptions])
    finally:
        await stream.aclose()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank for one epoch; returns its exit code (`command_line`)."""
    die_with_parent(signal.SIGKILL)
    arguments = parse(argv)
    place = Place(arguments.stage, arguments.rank)
    configure_logs(place)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    token = arguments.token or os.environ.pop(TOKEN_VARIABLE, "")
    try:
        faults = planted(f"rank-{place.stage}-{place.rank}", os.environ)
    except DaemonError as error:
        structlog.get_logger("rank").error("cannot go on", errors=[str(error)])
        return EXIT_FAULT
    return trio.run(serve, arguments, token, faults)


if __name__ == "__main__":
    code = main()
    flush_and_end(FLUSH_MS)
    # The work thread may be inside a forward that nobody waits for any more: leave without joining it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
