"""Which definition runs a model: the native one where it covers the family, else the generic one.

Owns the choice only; both definitions answer to `model.Model`.
"""

from __future__ import annotations

import torch

from daemon.rank.errors import BadOption, UnsupportedModel
from daemon.rank.facts import ModelFiles
from daemon.rank.model import GenericModel, Model
from daemon.rank.native_llama import NativeLlama, why_not_native
from kernels.host_library import HostLibrary

IMPLEMENTATIONS = ("auto", "native", "generic")


def load_model(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str,
    library: HostLibrary | None = None,
) -> tuple[Model, str]:
    """The loaded model and one sentence on the choice; raises UnsupportedModel when `native` does not cover it."""
    if implementation not in IMPLEMENTATIONS:
        raise BadOption(f"model_impl={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    why_not = why_not_native(files.config)
    if implementation == "native" and why_not:
        raise UnsupportedModel(f"model_impl=native: {why_not}")
    if implementation == "generic" or why_not:
        return GenericModel(files.directory, dtype, device), f"generic: {why_not or 'asked for'}"
    return NativeLlama(files.directory, files.config, dtype, device, library), f"native {files.config.model_type}"
