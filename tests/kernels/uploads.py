"""Which copies of host tensors to a device the host waits for, seen without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Uploads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down whether the host waits for each copy to a device of kind `meta`, which stands in for a GPU here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[bool] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._to_copy.default and torch.device(given.get("device", "cpu")).type == "meta":
            self.waits.append(not given.get("non_blocking", False))
        return func(*args, **given)
