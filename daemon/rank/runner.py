"""The border between the step worker and what computes: everything a runner must offer, and nothing of how.

Owns the interface and its small result types. Must never import torch: the modeled runner shares this border. Two
implementations exist: `modeled` (tokens from a hash, no weights) and `torch` (a real model).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from allocator.columns import Int64s
from allocator.geometry import Geometry, StageGeometry
from daemon.rank.batch import Batch
from daemon.rank.device import Device
from daemon.rank.layout import layout_of
from ipc.messages import ModelFacts, RankSettings, RowLogprobs


class Prepared(NamedTuple):
    """What a rank can hold once its model is loaded: the content of `Ready`."""

    geometry: StageGeometry
    virtual_pages: int
    virtual_slots: int
    facts: ModelFacts
    versions: dict[str, str]
    table: list[str]


class Outcome(NamedTuple):
    """Result of one forward: one token for each sampling row of the batch, in batch order, and the wanted logprobs."""

    tokens: Int64s
    logprobs: list[RowLogprobs]


class Launched(Protocol):
    """A forward that was launched; its effects on the arena are ordered before those of any later launch."""

    def due_in_s(self) -> float:
        """0 when `outcome` would not wait, else when to look again; read only to avoid a wait, never to decide."""

    def outcome(self) -> Outcome:
        """The sampled tokens, waiting for the device if it must."""


class Runner(Protocol):
    """A model on one device: prepared once, begun once per epoch, then one `launch` per forward, in seq order."""

    device: Device  # of the epoch that began last

    def prepare(self) -> Prepared:
        """Load the model and measure memory. Slow; raises RankError naming what is wrong."""

    def begin(self, geometry: Geometry, stage: int) -> None:
        """Open a device with an arena of the agreed geometry, all zero."""

    def expect(self, tokens: int) -> None:
        """A forward of so many tokens comes behind those expected before: make ready for what it will receive."""

    def launch(self, batch: Batch) -> Launched:
        """Run one ragged batch: write its K/V, attend, sample; the last sampled tokens stay with the runner."""


def open_runner(settings: RankSettings, stage: int, rank: int, epoch: int = 1) -> Runner:
    """The runner that `settings.runner` names, for one rank of an epoch; raises RankError for an unknown name.

    torch is imported only here.
    """
    layout = layout_of(settings, stage, rank)
    if settings.runner == "modeled":
        from daemon.rank.modeled import ModeledRunner

        return ModeledRunner(settings, layout, epoch)
    if settings.runner == "torch":
        from daemon.rank.torch_runner import TorchRunner

        return TorchRunner(settings, layout, epoch)
    from daemon.rank.errors import RankError

    raise RankError(f"unknown runner {settings.runner!r}; there are 'torch' and 'modeled'")
