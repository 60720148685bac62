"""What the command lines of a rank share: how it reaches the daemon, and its exit codes.

Owns those flags and numbers. Must never import anything heavy: `bandmaster rank` waits with it.
"""

from __future__ import annotations

import argparse

JOIN_TIMEOUT_S = 60.0

EXIT_STOPPED = 0
EXIT_FAULT = 1
EXIT_USAGE = 2  # no daemon can be reached with these arguments, endpoint or keys: another try would end alike
EXIT_ORPHANED = 3  # the daemon or the parent process is gone
EXIT_AGAIN = 4  # stopped, and another epoch follows
EXIT_NOT_JOINED = 5  # no daemon took this rank in


def add_connection(parser: argparse.ArgumentParser) -> None:
    """The flags that say how to reach the daemon over tcp."""
    parser.add_argument("--keys", default="", help="directory of CURVE keys (`bandmaster keys`), needed for tcp://")
    parser.add_argument("--client", default="rank", help="whose key in that directory this rank uses [rank]")
    parser.add_argument("--insecure", action="store_true", help="allow tcp:// without keys")
