"""The simulated world under the name that tests use; it lives beside the commands that run simulated worlds."""

from tools.worlds.world import NEUTRAL, Client, World, expected_output, facts

__all__ = ["NEUTRAL", "Client", "World", "expected_output", "facts"]
