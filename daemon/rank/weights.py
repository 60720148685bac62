"""Weights: the tensors of a safetensors directory, whole or a rank's part of them.

Owns the open files. Must never read more of a tensor than the part that is asked for: peak memory is what was taken and
the largest part. Invariant: it knows which tensors nobody asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from daemon.rank.errors import RankError
from daemon.rank.shard.cuts import Cut, Take


class Weights:
    """Tensors of a safetensors directory by name, read as `dtype`; knows which nobody asked for."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        from safetensors import safe_open

        index = directory / "model.safetensors.index.json"
        if index.is_file():
            files = {directory / name for name in json.loads(index.read_text())["weight_map"].values()}
        else:
            files = set(directory.glob("*.safetensors"))
        self._dtype = dtype
        self._device = device
        self._places = {}
        for file in sorted(files):
            opened = safe_open(str(file), "pt")
            self._places.update(dict.fromkeys(opened.keys(), opened))
        self._unread = set(self._places)

    def get(self, name: str, cut: Cut | None = None) -> Tensor:
        """One tensor, or the part of it that `cut` leaves; raises RankError when it is missing."""
        tensor = self.find(name, cut)
        if tensor is None:
            raise RankError(f"the weights have no tensor {name}; the directory is not a complete model")
        return tensor

    def find(self, name: str, cut: Cut | None = None) -> Tensor | None:
        """One tensor, or the part of it that `cut` leaves; None when the model has none of this name."""
        if name not in self._places:
            return None
        self._unread.discard(name)
        tensor = self._read(name, cut)
        return tensor.to(self._device, self._dtype).contiguous()

    def _read(self, name: str, cut: Cut | None) -> Tensor:
        """A tensor of the files; of a range of rows or columns only these are read."""
        if not isinstance(cut, Take):
            whole: Tensor = self._places[name].get_tensor(name)
            return whole if cut is None else cut(whole)
        lazy = self._places[name].get_slice(name)
        return cut.gather(lazy.get_shape(), lambda a, b: lazy[a:b] if cut.dim == 0 else lazy[:, a:b])

    def join(self, names: list[str], cuts: Sequence[Take | None]) -> Tensor | None:
        """Several tensors, or parts of them, joined along their output rows; None when none of them exists."""
        found = [self.find(name, cut) for name, cut in zip(names, cuts, strict=True)]
        if all(tensor is None for tensor in found):
            return None
        missing = [name for name, tensor in zip(names, found, strict=True) if tensor is None]
        if missing:
            raise RankError(f"the weights have no tensor {missing[0]}, but have others of {names}")
        return torch.cat([tensor for tensor in found if tensor is not None]).contiguous()

    def unread(self, foreign: Callable[[str], bool] = lambda _: False) -> list[str]:
        """Names that nobody asked for, without buffers that are recomputed and what is `foreign`."""
        return sorted(n for n in self._unread if not n.endswith("rotary_emb.inv_freq") and not foreign(n))
