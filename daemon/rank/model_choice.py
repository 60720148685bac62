"""Which definition runs a model: the native one where it covers the family, else the generic one.

Owns the choice only; both definitions answer to `model.Model`.
"""

from __future__ import annotations

import torch

from daemon.rank.errors import BadOption, UnsupportedModel
from daemon.rank.facts import ModelFiles
from daemon.rank.group import Group
from daemon.rank.model import SOLO_GROUP, GenericModel, Model
from daemon.rank.native_llama import NativeLlama, why_not_native
from kernels.host_library import HostLibrary

IMPLEMENTATIONS = ("auto", "native", "generic")


def load_model(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str,
    library: HostLibrary | None = None,
    group: Group = SOLO_GROUP,
    layers: range | None = None,
) -> tuple[Model, str]:
    """This rank's part of the loaded model and one sentence on the choice; `layers` None: all.

    Raises UnsupportedModel when `native` does not cover it, and for ranks that do not divide it.
    """
    if implementation not in IMPLEMENTATIONS:
        raise BadOption(f"model_impl={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    why_not = why_not_native(files.config)
    if implementation == "native" and why_not:
        raise UnsupportedModel(f"model_impl=native: {why_not}")
    if implementation == "generic" or why_not:
        return GenericModel(files.directory, dtype, device, group, layers), f"generic: {why_not or 'asked for'}"
    native = NativeLlama(files.directory, files.config, dtype, device, library, group, layers)
    return native, f"native {files.config.model_type}"
