"""Signals around the life of a daemon: held until its receiver stands, without effect once that has closed."""

from __future__ import annotations

import subprocess
import sys

LIFE = """
import os, signal, sys
import trio
from daemon.processes import hold_signals, ignore_signals, take_signals

class AtTheVeryEnd:
    kill, pid, number = os.kill, os.getpid(), int(signal.SIGTERM)

    def __del__(self):
        self.__class__.kill(self.pid, self.number)

async def life():
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        take_signals()
        async for number in signals:
            print("order", signal.Signals(number).name)
            break

hold_signals()
os.kill(os.getpid(), signal.SIGTERM)
trio.run(life)
for number in (signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
print("ended in order")
ignore_signals()
sys.last = AtTheVeryEnd()  # goes when the interpreter clears its modules, after it has reset handlers
sys.exit(3)
"""


def test_an_early_signal_is_an_order_and_a_late_one_changes_no_exit_code() -> None:
    """What came before the receiver is delivered by it; what comes after it neither kills nor traces."""
    done = subprocess.run([sys.executable, "-c", LIFE], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["order SIGTERM", "ended in order"]
    assert done.stderr == ""
    assert done.returncode == 3
