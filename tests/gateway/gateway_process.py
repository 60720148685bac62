"""A process with a gateway and a toy core, for tests that stop and kill it."""

from __future__ import annotations

import sys

import trio

from tests.gateway.harness import gateway
from tests.gateway.toy_core import ToyCore


async def main(endpoint: str) -> None:
    """Serve endless requests until killed."""
    async with gateway(endpoint) as world:
        await ToyCore(world, length=1_000_000_000).run()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
