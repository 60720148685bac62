"""Loading a part of a model: every parameter is cut the moment it was read, one at a time.

Owns the hook into the loader of `transformers`, which still reads, renames and joins the tensors of a checkpoint. Must
never hold a whole model: peak memory is this rank's part and the largest parameter (the stacked experts of one layer).
Invariant: a parameter of another stage keeps its shape and has no memory (`meta`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from daemon.rank.errors import RankError
from daemon.rank.layout import Layout
from daemon.rank.shard.sharding import Sharding

NO_READ_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"  # without it `transformers` reads whole files in the background
LOADING = threading.Lock()  # the loader is changed while it runs, and switches that all threads see


def load_parts(
    directory: Path, dtype: torch.dtype, attention: str, layout: Layout, foreign: Callable[[str], bool]
) -> tuple[Any, Sharding]:
    """The model of a directory on the CPU with this rank's part of the weights, and how it is split.

    `attention` names the attention function. Parameters for whose name `foreign` is true stay without memory; the
    caller puts something in the place of their modules. Raises UnsupportedModel where the tensor ranks do not divide.
    """
    from transformers import AutoModelForCausalLM

    part = _Part(layout, foreign)
    with LOADING, _hooked(part):
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, attn_implementation=attention
        ).eval()
    if part.sharding is None:
        raise RankError(f"{directory} holds no weights that the model knows; the directory is not a complete model")
    part.sharding.fit(model)
    return model, part.sharding


class _Part:
    """What happens to each parameter; the plan is made when the first one comes, from shapes."""

    def __init__(self, layout: Layout, foreign: Callable[[str], bool]) -> None:
        self._layout = layout
        self._foreign = foreign
        self.sharding: Sharding | None = None

    def take(self, model: Any, name: str, tensor: Tensor, info: Any) -> bool:
        """Keep this rank's part of a parameter; False where there is nothing to do but what the loader does."""
        if self.sharding is None:
            self.sharding = Sharding(model, self._layout)
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        known = getattr(owner, attribute, None)
        if known is None or known.shape != tensor.shape:
            return False  # the loader has a word for it
        if self._foreign(name):
            known._is_hf_initialized = True  # nothing to initialize
        else:
            own = self.sharding.cut(name, tensor)
            if own is tensor:
                return False
            kept: Any = own if attribute in owner._buffers else nn.Parameter(own, requires_grad=False)
            kept._is_hf_initialized = True
            setattr(owner, attribute, kept)
        info.missing_keys.discard(name)
        return True


@contextmanager
def _hooked(part: _Part) -> Iterator[None]:
    """Let the loader's last step per parameter go through `part`."""
    import transformers.core_model_loading

    loader: Any = transformers.core_model_loading
    original = getattr(loader, "set_param_for_module", None)
    if original is None:
        raise RankError(f"transformers {transformers.__version__} loads weights in a way that is not known; use 5.24")

    def set_param(model: Any, name: str, value: Any, info: Any, quantizer: Any) -> None:
        if not part.take(model, name, value, info):
            original(model, name, value, info, quantizer)

    before = os.environ.get(NO_READ_AHEAD)
    os.environ[NO_READ_AHEAD] = "1"
    loader.set_param_for_module = set_param
    try:
        yield
    finally:
        loader.set_param_for_module = original
        if before is None:
            del os.environ[NO_READ_AHEAD]
        else:
            os.environ[NO_READ_AHEAD] = before
