"""Which dtype a model runs in: the one asked for, or the best for this machine.

Owns the choice and its reason in words. On a GPU: the checkpoint's own half precision, else bfloat16. On a CPU:
bfloat16 where the processor multiplies it in hardware (AMX or AVX512_BF16: half the bytes of a decode step, which is
bound by reading weights), else float32, because without such instructions every bfloat16 product is converted first.
`bandmaster bench model --dtype float32` and `--dtype bfloat16` compare both on a machine.
"""

from __future__ import annotations

from pathlib import Path

import torch

from daemon.rank.errors import BadOption

BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in BY_NAME.items()}
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # the last is ARM's


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instruction-set flags of the first core; empty where the kernel does not say."""
    if not cpuinfo.is_file():
        return set()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def choose_dtype(asked: str, checkpoint: torch.dtype | None, device: str, flags: set[str]) -> tuple[torch.dtype, str]:
    """The dtype and why; `asked` is `auto` or a name. Raises BadOption for a name that is not known."""
    if asked != "auto":
        if asked not in BY_NAME:
            raise BadOption(f"dtype {asked!r} is not one of auto, {', '.join(BY_NAME)}")
        return BY_NAME[asked], "asked for"
    if device == "cuda":
        if checkpoint in (torch.float16, torch.bfloat16):
            return checkpoint, "the checkpoint's own"
        return torch.bfloat16, "half the bytes of the checkpoint's float32"
    hardware = [flag for flag in BF16_FLAGS if flag in flags]
    if hardware:
        return torch.bfloat16, f"this CPU multiplies bfloat16 in hardware ({hardware[0]})"
    return torch.float32, "this CPU has no bfloat16 instructions, so every product would be converted"
