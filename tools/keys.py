"""`bandmaster keys DIR [CLIENT ...]`: make the CURVE keys that tcp endpoints need.

Owns the command line only; `ipc.keys` owns the files. Must never print a secret or overwrite a key.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ipc.errors import KeyFileError
from ipc.keys import make_keys


def main(argv: Sequence[str] | None = None) -> int:
    """Make the daemon's pair if it is missing and one pair per client; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bandmaster keys", description="Make CURVE keys for tcp endpoints.")
    parser.add_argument("directory", type=Path, help="where the keys lie; made 0700")
    parser.add_argument("client", nargs="*", default=["frontend"], help="names of clients that get a pair [frontend]")
    options = parser.parse_args(argv)
    try:
        written = make_keys(options.directory, options.client)
    except (KeyFileError, OSError) as error:
        sys.stderr.write(f"bandmaster keys: {error}\n")
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
