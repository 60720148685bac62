"""`python -m daemon`: one daemon process, from the command line to its exit code.

Owns the order of what can refuse to start: settings, run directory, journal. Must never exit 0 after anything but an
ordered end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import trio

from daemon.app import Daemon, exit_code_of
from daemon.clock import Clock, SystemClock
from daemon.config import load, recorded, unknown_variables
from daemon.endpoints import front_server
from daemon.exits import DaemonError, Exit
from daemon.fault_hooks import faulty_clock, faulty_storage
from daemon.faults import VARIABLE as FAULTS
from daemon.faults import Faults, planted
from daemon.faults import parse as parse_faults
from daemon.logs import open_log
from daemon.processes import collect_seldom, die_with_parent, hold_signals, ignore_signals
from daemon.run_dir import RunDir, default_path
from daemon.settings_table import Settings
from ipc.errors import EndpointError
from journal.errors import JournalBusy, JournalError
from journal.opening import open_journal
from journal.storage import DiskStorage
from journal.writer import JournalSettings

ABOUT = "The scheduler daemon: journal, core and ranks, without an HTTP front end."


def serve(
    settings: Settings, run_dir: RunDir, clock: Clock, log: Any, faults: Faults, lines_lost: Callable[[], int]
) -> Exit:
    """Open the journal of a claimed run directory and run one life on it; raises DaemonError when it cannot start."""
    storage = faulty_storage(DiskStorage(run_dir.journal), faults)
    front = front_server(settings, run_dir)
    rules = JournalSettings(policy=settings.journal_sync, segment_bytes=settings.journal_segment_bytes)
    try:
        writer, found = open_journal(storage, rules, bytes.fromhex(clock.token()))
    except JournalBusy as error:
        raise DaemonError(Exit.IN_USE, str(error)) from error
    except (JournalError, OSError) as error:
        raise DaemonError(Exit.JOURNAL, f"the journal in {run_dir.journal} cannot be opened: {error}") from error
    for note in found.notes:
        log.warning("JournalRepaired", note=note)
    log.info("JournalOpened", sequence=found.last_sequence, lives=found.lives, clean=found.clean)
    hold_signals()
    collect_seldom()
    try:
        return trio.run(Daemon(settings, run_dir, front, writer, clock, log, lines_lost).run, found)
    finally:
        ignore_signals()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a daemon; returns the exit code (`daemon.exits`)."""
    die_with_parent(signal.SIGHUP)
    try:
        settings = load("daemon", list(sys.argv[1:] if argv is None else argv), ABOUT)
        faults = planted("daemon", os.environ)
        run_dir = RunDir(default_path(settings))
        run_dir.prepare()
        run_dir.claim()
    except (DaemonError, EndpointError) as error:
        sys.stderr.write(f"bandmaster daemon: {error}\n")
        return exit_code_of(error)
    clock = faulty_clock(SystemClock(), faults)
    log, writer = open_log(settings.log_format, settings.log_level, run_dir.logs / "daemon.log", process="daemon")
    for line in unknown_variables(os.environ):
        log.warning("UnknownSetting", what=line)
    log.info("Starting", run_dir=str(run_dir.path), settings=recorded(settings))
    if everywhere := parse_faults(os.environ.get(FAULTS, "")):  # those of the ranks too: a forgotten one must not wait
        log.warning("FaultsPlanted", faults=[spec.text for spec in everywhere])
    try:
        code = serve(settings, run_dir, clock, log, faults, lambda: writer.lost)
    except (DaemonError, EndpointError) as error:
        log.error("CannotStart", error=str(error))
        code = exit_code_of(error)
    except Exception:
        log.exception("Failed", actor="daemon")
        code = Exit.INTERNAL
    log.info("Ended", code=int(code), meaning=code.name.lower())
    run_dir.release()
    writer.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
