"""What a model directory says of itself: config, lengths, end-of-text ids.

Owns the reading of config.json and generation_config.json. Must never read weights. Invariant: a length longer than the
model's own is refused, never stretched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from daemon.rank.convert import quiet_transformers
from daemon.rank.errors import BadOption, RankError
from daemon.rank.support import check_supported
from ipc.messages import ModelFacts


class ModelFiles(NamedTuple):
    """A checked model directory; `dtype` is the checkpoint's own, None when it does not say."""

    directory: Path
    config: Any
    name: str
    max_model_len: int
    vocab_size: int
    eos_ids: list[int]
    dtype: torch.dtype | None

    def facts(self, dtype: str) -> ModelFacts:
        """What the daemon and front ends must know."""
        architectures = getattr(self.config, "architectures", None) or [self.config.model_type]
        return ModelFacts(self.name, architectures[0], self.vocab_size, self.max_model_len, dtype, self.eos_ids)


def read_files(directory: Path, name: str, max_model_len: int) -> ModelFiles:
    """Read and check a directory; raises UnsupportedModel or BadOption before any weight is read."""
    quiet_transformers()
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():
        raise RankError(f"{directory} has no config.json; prepare it with `python -m daemon.rank.convert`")
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    own = int(config.max_position_embeddings)
    if max_model_len > own:
        raise BadOption(f"max_model_len={max_model_len} is more than the model's {own} positions; give at most {own}")
    length = max_model_len or own
    check_supported(config, length)
    dtype = getattr(config, "dtype", None)
    return ModelFiles(
        directory,
        config,
        name or default_name(directory),
        length,
        int(config.vocab_size),
        eos_ids(directory, config),
        dtype,
    )


def default_name(directory: Path) -> str:
    """The name of a model that was not given one: its GGUF file's, else its directory's."""
    origin = directory / "bandmaster.json"
    if origin.is_file():
        return Path(json.loads(origin.read_text())["source"]).stem
    return directory.resolve().name


def eos_ids(directory: Path, config: Any) -> list[int]:
    """End-of-text ids, ascending: those of generation_config.json, else of the config."""
    found: Any = None
    file = directory / "generation_config.json"
    if file.is_file():
        found = json.loads(file.read_text()).get("eos_token_id")
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return []
    return sorted({int(one) for one in (found if isinstance(found, list) else [found])})
