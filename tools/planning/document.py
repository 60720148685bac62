"""The plan as plain values: what `bandmaster plan --json` prints, and what the tables are made from.

Owns the names of the fields. Must never compute a price: it arranges what `prices` returns. Bytes are those of one
tensor rank of a stage; `total_bytes` add up the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allocator.capacity import Demand
from daemon.boot_notes import boot_notes, slots_per_request
from ipc.messages import ModelFacts
from tools.planning.mix import MixLine
from tools.planning.prices import (
    Held,
    Mixed,
    Price,
    held,
    price,
    price_mix,
    total_bytes,
    unpadded_bytes,
)
from tools.planning.stages import Plan, Stage

HELD_AT = (300, 1300, 5000)
"""Lengths at which bytes held are compared with bytes needed."""


def plan_document(plan: Plan, lengths: Sequence[int], mix: Sequence[MixLine]) -> dict[str, Any]:
    """Everything the plan says; `lengths` in tokens, those beyond the model's are left out."""
    longest = plan.model.max_model_len
    reached = sorted({tokens for tokens in (*lengths, longest) if tokens <= longest})
    document = {
        "model": plan.model.path,
        "model_type": plan.model.config.model_type,
        "dtype": plan.model.dtype,
        "layers": len(plan.model.layers),
        "tp": plan.ask.tp,
        "pp": plan.ask.pp,
        "page_size": plan.settings.page_size,
        "max_model_len": longest,
        "max_running_requests": plan.settings.max_running_requests,
        "max_num_batched_tokens": plan.settings.max_num_batched_tokens,
        "checkpoint_interval": plan.checkpoint_interval,
        "budget_bytes": plan.budget_bytes,
        "budget_from": plan.budget_from,
        "virtual_pages": plan.geometry.virtual_pages,
        "virtual_slots": plan.geometry.virtual_slots,
        "stages": [_stage(plan, stage) for stage in plan.stages],
        "requests": [_request(plan, price(plan, tokens)) for tokens in reached],
        "held_over_needed": [_held(held(plan, tokens)) for tokens in HELD_AT if tokens <= longest],
        "notes": [*plan.model.notes, *_notes(plan)],
    }
    if mix:
        document["mix"] = {"lines": [_mix_line(line) for line in mix], "moments": _moments(plan, mix)}
    return document


def _stage(plan: Plan, stage: Stage) -> dict[str, Any]:
    sizing, storage = stage.sized.sizing, stage.sized.plan
    bands = []
    for band, units, plain in zip(storage.bands, sizing.targets, unpadded_bytes(stage), strict=True):
        geometry = band.geometry
        layers = sorted({view.layer for view in band.planes})
        row: dict[str, Any] = {
            "band": geometry.name,
            "layers": layers,
            "unit_bytes": geometry.unit_bytes,
            "unpadded_bytes": plain,
            "target_units": units,
            "target_bytes": units * geometry.unit_bytes,
        }
        if geometry.kind == "state":
            row["wanted_units"] = slots_per_request(plan.settings) * plan.settings.max_running_requests
        else:
            row["token_bytes"] = plain // plan.settings.page_size
        bands.append(row)
    return {
        "stage": stage.index,
        "first_layer": stage.layers.start,
        "last_layer": stage.layers.stop - 1,
        "arena_bytes": sizing.geometry.arena_bytes,
        "chain_start_bytes": sizing.geometry.chain_start_bytes,
        "bands": bands,
    }


def _by_band(plan: Plan, units: Demand) -> dict[str, int]:
    return {band.name: count for band, count in zip(plan.geometry.stages[0].bands, units, strict=True)}


def _stage_bytes(plan: Plan, units: Demand) -> list[dict[str, int]]:
    return [
        {band.name: count * band.unit_bytes for count, band in zip(units, stage.bands, strict=True)}
        for stage in plan.geometry.stages
    ]


def _request(plan: Plan, priced: Price) -> dict[str, Any]:
    cost = priced.cost
    return {
        "tokens": priced.tokens,
        "units": _by_band(plan, cost.rest),
        "checkpoint_units": _by_band(plan, cost.checkpoint),
        "tail_units": _by_band(plan, cost.tail),
        "stage_bytes": _stage_bytes(plan, cost.rest),
        "total_bytes": total_bytes(plan, cost.rest),
        "checkpoint_bytes": total_bytes(plan, cost.checkpoint),
        "tail_bytes": total_bytes(plan, cost.tail),
        "at_once": priced.at_once,
        "runs_out_first": priced.first._asdict(),
    }


def _held(row: Held) -> dict[str, Any]:
    return {**row._asdict(), "ratio": round(row.ratio, 4)}


def _mix_line(line: MixLine) -> dict[str, Any]:
    weight = line.weight.numerator if line.weight.denominator == 1 else float(line.weight)
    return {**line._asdict(), "weight": weight}


def _moments(plan: Plan, mix: Sequence[MixLine]) -> list[dict[str, Any]]:
    return [_moment(plan, mixed) for mixed in price_mix(plan, mix)]


def _moment(plan: Plan, mixed: Mixed) -> dict[str, Any]:
    return {
        "moment": mixed.moment,
        "at_once": mixed.at_once,
        "units": _by_band(plan, mixed.units),
        "shared_units": _by_band(plan, mixed.shared),
        "stage_bytes": _stage_bytes(plan, mixed.units),
        "total_bytes": total_bytes(plan, mixed.units),
        "runs_out_first": mixed.first._asdict(),
    }


def _notes(plan: Plan) -> list[str]:
    """What the daemon would say at boot of these sizes."""
    model = plan.model
    facts = ModelFacts(model.path, model.config.model_type, 0, model.max_model_len, model.dtype)
    return [note.values["what"] for note in boot_notes(plan.settings, plan.geometry, facts) if note.warns]
