"""Where the ranks of a test's group stand, and ports at which they can meet.

Must never import torch: tests of modeled ranks run without.
"""

from __future__ import annotations

import socket

from daemon.rank.layout import Layout


def layouts(stages: int, ranks: int) -> list[Layout]:
    """Every place of a group, in rank order."""
    return [Layout(stage, stages, rank, ranks) for stage in range(stages) for rank in range(ranks)]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listened at just now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
