"""Processes of a command that a terminal's Ctrl-C leaves to the command itself.

Owns how they are started. Must never let one see SIGINT, not even while it imports: it would print a traceback.
"""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start_deaf(process: BaseProcess) -> None:
    """Start a process in which SIGINT is blocked from its first instruction on."""
    resource_tracker.ensure_running()  # by itself it would start with the first process, and unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
