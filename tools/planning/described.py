"""The model as its config describes it: what it stores, how long it may run, how many parameters it has.

Owns the reading of config.json. Must never read weights. Invariant: what `bandmaster serve` would refuse is said with
the same words; what cannot even be declared is a PlanError.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from allocator.decl import Layer
from daemon.rank.convert import quiet_transformers
from daemon.rank.declare import declare, layer_types
from daemon.rank.errors import RankError
from daemon.rank.support import check_supported
from tools.planning.errors import PlanError

DECISIVE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
"""Fields that every config file of a model has, under these names or the family's own."""
LAYER_LISTS = frozenset({"hybrid_override_pattern", "layer_types", "layers_block_type"})
"""Fields that say how many layers there are by naming each."""


class Described(NamedTuple):
    """A model's config and what follows from it; `notes` are for the reader of the plan."""

    path: str
    config: Any
    layers: list[Layer]  # of one tensor rank
    kinds: list[str]  # of the layers, as `transformers` names them
    dtype: str
    max_model_len: int
    notes: list[str]


def describe_model(path: str, dtype: str, max_model_len: int, checkpoint_interval: int, tp: int) -> Described:
    """Read a directory with config.json, or such a file; `dtype` auto: the config's own; raises PlanError."""
    whole = read_config(Path(path))
    config, notes = _text_part(whole)
    if assumed := _assumed(config, _fields(Path(path)), whole is not config):
        defaults = ", ".join(f"{name} {getattr(config, name)}" for name in assumed)
        notes.append(f"the config does not say {defaults}: these are defaults of transformers for {config.model_type}")
    own = int(getattr(config, "max_position_embeddings", 0) or 0)
    if not own:
        raise PlanError(f"{path}: the config names no max_position_embeddings; add it")
    if max_model_len > own:
        raise PlanError(f"--max-model-len {max_model_len} is more than the model's {own} positions; give at most {own}")
    length = max_model_len or own
    chosen = dtype
    if dtype == "auto":
        chosen = str(config.dtype or "bfloat16").removeprefix("torch.")
        why = "the checkpoint's own" if config.dtype else "the config names none"
        notes.append(f"dtype {chosen}: {why}; serve may choose another for its device, --dtype fixes it")
    try:
        check_supported(config, length)
    except RankError as error:
        notes.append(f"serve refuses this model: {error}")
    try:
        layers = declare(config, chosen, checkpoint_interval, tp)
        return Described(path, config, layers, layer_types(config), chosen, length, notes)
    except RankError as error:
        raise PlanError(str(error)) from error
    except AttributeError as error:
        raise PlanError(f"{path}: the config of {config.model_type} lacks a field: {error}") from error


def read_config(path: Path) -> Any:
    """The `transformers` config of a directory or a JSON file; raises PlanError saying what is wrong with it."""
    quiet_transformers()
    from transformers import CONFIG_MAPPING, AutoConfig

    fields, file = _fields(path), _file(path)
    if "model_type" not in fields:
        raise PlanError(f"{file} has no model_type; give the config.json of a model")
    name = str(fields["model_type"])
    if name not in CONFIG_MAPPING:
        raise PlanError(f"{file}: model_type {name!r} is not one that transformers knows")
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except Exception as error:  # a config class raises whatever its checks raise
        raise PlanError(f"{file}: {name} cannot be made of these fields: {error}") from error


def _file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _fields(path: Path) -> dict[str, Any]:
    """What the file says; raises PlanError where it is no JSON object."""
    file = _file(path)
    if not file.is_file():
        raise PlanError(f"{file} does not exist; give a directory with config.json, or such a file")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise PlanError(f"{file} is no JSON file: {error}") from error
    except RecursionError:
        raise PlanError(f"{file} is nested too deeply; give the config.json of a model") from None
    if not isinstance(fields, dict):
        raise PlanError(f"{file} is no JSON object; give the config.json of a model")
    return fields


def _assumed(config: Any, fields: dict[str, Any], nested: bool) -> list[str]:
    """Names of fields that decide what is stored and that the file leaves to the library's defaults."""
    said = set(fields)
    if nested:
        said |= {name for value in fields.values() if isinstance(value, dict) for name in value}
    if said & LAYER_LISTS:
        said.add("num_hidden_layers")
    return [
        name for name in DECISIVE if hasattr(config, name) and not {name, config.attribute_map.get(name, name)} & said
    ]


def _text_part(config: Any) -> tuple[Any, list[str]]:
    """The text decoder of a model with other inputs, and the note on it."""
    text = config.get_text_config()
    if text is config:
        return config, []
    what = f"serve refuses this model: {config.model_type} takes images or audio, which are not supported"
    return text, [f"{what}; this is the plan of its text decoder alone"]


def count_parameters(config: Any) -> int:
    """Parameters of the causal language model, from shapes alone: nothing is allocated, nothing is read."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            auto: Any = AutoModelForCausalLM
            model = auto.from_config(config)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise PlanError(f"the weights cannot be counted ({error}); say how many with --weights-bytes") from error
    return sum(parameter.numel() for parameter in model.parameters())
