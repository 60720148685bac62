"""Stages of a plan: layers over pipeline stages, each stage's storage and arena, and the geometry of all.

Owns the split of layers and the byte budget of a rank. Must never size anything by rules of its own: it calls what a
rank calls at boot. Invariant: the geometry is the one that a daemon would agree on with ranks of these budgets.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from allocator.capacity import CapacityForm
from allocator.decl import dtype_bytes
from allocator.geometry import Geometry
from daemon.layers import LayersError, parse_layers, split_layers
from daemon.rank.errors import RankError
from daemon.rank.sizes import Sized, plan_and_size
from daemon.rank_settings import rank_settings
from daemon.settings_table import Settings
from tools.planning.described import Described, count_parameters, describe_model
from tools.planning.errors import PlanError

NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Ask:
    """What the plan is asked for beside the settings of `bandmaster serve`. Bytes 0: to be found out."""

    tp: int = 1
    pp: int = 1
    pp_layers: tuple[int, ...] = ()
    device_memory_bytes: int = 0
    weights_bytes: int = -1  # of the whole model; -1: counted from the config


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its layers, and what one of its tensor ranks plans."""

    index: int
    layers: range
    sized: Sized


@dataclass(frozen=True)
class Plan:
    """A planned model: everything that prices are computed from."""

    model: Described
    settings: Settings
    ask: Ask
    budget_bytes: int  # of each rank
    budget_from: str
    stages: list[Stage]
    geometry: Geometry

    @property
    def form(self) -> CapacityForm:
        """The capacity question over the bytes of all stages; ids never run out before the running requests do."""
        return CapacityForm(msgspec.structs.replace(self.geometry, virtual_pages=NO_LIMIT, virtual_slots=NO_LIMIT))

    @property
    def checkpoint_interval(self) -> int:
        """Tokens between checkpoints of a request that owns a checkpoint slot; 0: none does."""
        has_state = any(band.kind == "state" for band in self.geometry.stages[0].bands)
        return rank_settings(self.settings).checkpoint_interval if has_state else 0


def make_plan(settings: Settings, ask: Ask) -> Plan:
    """Plan all stages; raises PlanError, with the table of terms where the memory is below the floor."""
    rank = rank_settings(settings)
    model = describe_model(settings.model, settings.dtype, settings.max_model_len, rank.checkpoint_interval, ask.tp)
    try:
        split = split_layers(len(model.layers), parse_layers(",".join(map(str, ask.pp_layers)), ask.pp))
    except LayersError as error:
        raise PlanError(str(error)) from error
    budget, origin = _budget(settings, ask, model)
    stages = []
    for index, layers in enumerate(split):
        try:
            sized = plan_and_size(model.layers, rank, model.max_model_len, budget, layers)
        except RankError as error:
            raise PlanError(f"stage {index}: {error}") from error
        stages.append(Stage(index, layers, sized))
    geometry = Geometry(
        page_size=settings.page_size,
        virtual_pages=min(stage.sized.sizing.virtual_pages for stage in stages),
        virtual_slots=min(stage.sized.sizing.virtual_slots for stage in stages),
        stages=[stage.sized.sizing.geometry for stage in stages],
    )
    return Plan(model, settings, ask, budget, origin, stages, geometry)


def _budget(settings: Settings, ask: Ask, model: Described) -> tuple[int, str]:
    """Bytes of the arena of each rank, and where they come from."""
    if settings.arena_bytes:
        return settings.arena_bytes, "--arena-bytes"
    memory, whose = ask.device_memory_bytes, "--device-memory-bytes"
    if not memory:
        memory, whose = _this_machine()
    weights, counted = ask.weights_bytes, "--weights-bytes"
    if weights < 0:
        parameters = count_parameters(model.config)
        weights = parameters * dtype_bytes(model.dtype)
        counted = f"{parameters:,d} parameters of the config in {model.dtype}"
    each = -(-weights // (ask.tp * ask.pp))
    if each >= memory:
        raise PlanError(
            f"the weights of a rank take {each:,d} bytes ({counted}, over {ask.tp * ask.pp} ranks) and its device has "
            f"{memory:,d} ({whose}); raise --tp or --pp, or --device-memory-bytes"
        )
    budget = (memory - each) * round(settings.mem_fraction * 1_000_000) // 1_000_000
    return budget, (
        f"--mem-fraction {settings.mem_fraction:g} of what {each:,d} bytes of weights ({counted}, evenly over "
        f"{ask.tp * ask.pp} ranks) leave of {memory:,d} bytes ({whose})"
    )


def _this_machine() -> tuple[int, str]:
    """Free bytes of this machine's device, and which that is."""
    from daemon.rank.backend import open_backend

    backend = open_backend("auto")
    return backend.free_bytes(), f"free now on this machine's {backend.torch_device.type} device"
