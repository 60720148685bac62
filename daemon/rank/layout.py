"""Layout: where one rank stands among the stages and tensor ranks of its epoch, and on its machine.

Owns the order of ranks. Must never import torch: modeled ranks have layouts too.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from daemon.rank.errors import BadOption
from ipc.messages import RankSettings


class Layout(NamedTuple):
    """Where a rank stands: `stage` of `stages`, `rank` of the `ranks` tensor ranks of its stage."""

    stage: int
    stages: int
    rank: int
    ranks: int

    @property
    def first(self) -> bool:
        """It embeds the tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """It makes logits and samples."""
        return self.stage == self.stages - 1

    @property
    def total(self) -> int:
        """Ranks of all stages."""
        return self.stages * self.ranks

    @property
    def number(self) -> int:
        """This rank's place in the order of all ranks: stage by stage, tensor ranks of a stage side by side."""
        return self.stage * self.ranks + self.rank


SOLO = Layout(0, 1, 0, 1)
"""The only rank."""


def layout_of(settings: RankSettings, stage: int, rank: int) -> Layout:
    """Where the rank that joined as (`stage`, `rank`) stands by these settings; raises BadOption."""
    layout = Layout(stage, max(len(settings.stage_layers), 1), rank, settings.tensor_ranks)
    if not (0 <= stage < layout.stages and 0 <= rank < layout.ranks):
        raise BadOption(
            f"stage {stage} rank {rank}: this daemon has {layout.stages} stages (--pp) of {layout.ranks} tensor ranks "
            "(--tp); start as many ranks, and tell them the same --tp"
        )
    told = all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if layout.total > 1 and settings.rendezvous.startswith("env://") and not told:
        raise BadOption(
            f"{layout.total} ranks that are started elsewhere must know where they meet: pass --rendezvous HOST:PORT, "
            "on the host of rank 0.0, to the daemon, or set MASTER_ADDR and MASTER_PORT for every rank"
        )
    if layout.total > 1 and not settings.rendezvous:
        raise BadOption(f"{layout.total} ranks without a place where they find each other; pass --rendezvous HOST:PORT")
    return layout


def local_ranks(layout: Layout) -> int:
    """How many ranks share this machine: by LOCAL_WORLD_SIZE, which launchers set, else all."""
    return _count("LOCAL_WORLD_SIZE", layout.total, low=1)


def local_number(layout: Layout) -> int:
    """This rank's place among those of its machine: by LOCAL_RANK, which launchers set, else among all."""
    return _count("LOCAL_RANK", layout.number, low=0)


def _count(variable: str, default: int, low: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < low:
        raise BadOption(f"{variable}={text!r} in the environment of this rank is no number from {low} on")
    return int(text)
