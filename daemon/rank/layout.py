"""Layout: where one rank stands among the stages and tensor ranks of its epoch. Plain data, without torch."""

from __future__ import annotations

from typing import NamedTuple


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
