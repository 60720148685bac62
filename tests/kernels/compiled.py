"""Runs in a process of its own, without a GPU: compiles every kernel ahead of time and prints what it takes.

One line per kernel and target: `name sm_80 registers 96 stack 0 local 0`. The sizes are those of the embedded model;
attention is compiled for the widest and oddest heads too, with every rule on.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import attention_block, attention_decode, attention_prefill, sampling, store_rows, units
from kernels.reference import UNIFORM_STEP

TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32)}


class Kernel(NamedTuple):
    """A kernel, the types of its run-time arguments in order, and its compile-time values."""

    function: Any
    types: str
    constants: dict[str, object]


PAGE, KV_HEADS, GROUP, LAYERS = 16, 3, 3, 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def attention(kernel: str, dim: int, dtype: str, rules: bool, group: int = GROUP) -> Kernel:
    """Decode or extend attention over heads of `dim`, with windows, soft caps and sinks or without."""
    item = DTYPES[dtype].itemsize
    unit = -(-2 * LAYERS * PAGE * KV_HEADS * dim * item // 256) * 256 // item
    view = torch.empty(2, unit, dtype=DTYPES[dtype])[:, : PAGE * KV_HEADS * dim].unflatten(1, (PAGE, KV_HEADS, dim))
    keys, queries = attention_block.blocks(view, view)
    lanes = attention_block.lanes(dim)
    shared: dict[str, object] = {"PAGE": PAGE, "GROUP": group, "KEYS": keys, "K_DIM": dim, "V_DIM": dim}
    shared |= {"K_BLOCK": lanes, "V_BLOCK": lanes, "WINDOWED": rules, "CAPPED": rules, "UPCAST": False}
    shared |= attention_block.strides("K", view) | attention_block.strides("V", view)
    pointer = f"*{dtype}"
    if kernel == "decode":
        types = f"{pointer} {pointer} {pointer} *i32 *i32 *i32 *fp32 *fp32 *fp32 fp32 i32 fp32 i32 i32 i32 i32"
        block = max(16, triton.next_power_of_2(group))
        return Kernel(
            attention_decode._partial, types, shared | {"SPLIT": 512, "GROUP_BLOCK": block, "HEADS": KV_HEADS * group}
        )
    types = f"{' '.join([pointer] * 4)} *i32 *i32 {pointer} *i32 *i32 *i32 *i32 *i32 fp32 i32 fp32 i32 i32 i32 i32 i32"
    return Kernel(attention_prefill._extend, types, shared | {"TILE": queries, "SINKS": rules})


HEADS = [(64, "bf16", False), (64, "fp32", True), (72, "fp16", True), (128, "bf16", True), (96, "fp32", True)]
WIDE_HEADS = [(256, "bf16", True), (256, "fp32", True)]
KERNELS = {
    **{
        f"{kernel}-{dim}-{dtype}{'-rules' * rules}": attention(kernel, dim, dtype, rules)
        for kernel in ("decode", "extend")
        for dim, dtype, rules in HEADS + WIDE_HEADS
    },
    "decode-64-bf16-group-16": attention("decode", 64, "bf16", True, 16),
    "combine": Kernel(
        attention_decode._combine,
        "*fp32 *fp32 *fp32 *bf16 *bf16 i32",
        {"HEADS": 9, "V_DIM": 256, "V_BLOCK": 256, "SPLITS": attention_decode.SPLITS, "SINKS": True},
    ),
    "store": Kernel(
        store_rows._store, "*bf16 *bf16 *i32 *i32 i32 i32 i32 i32 i32", {"HEADS": 3, "DIM": 64, "BLOCK": 256}
    ),
    "zero": Kernel(units._zero, "*i64 *i32 i32", {"BLOCK": units.BLOCK_WORDS}),
    "copy": Kernel(units._copy, "*i64 *i32 *i32 i32", {"BLOCK": units.BLOCK_WORDS}),
    "update": Kernel(units._update, "*i32 *i32 *i32 i32", {"BLOCK": units.BLOCK_PAIRS}),
    "sample": Kernel(
        sampling._sample,
        "*bf16 *i32 *fp32 *fp32 *i32 *fp32 *i64 i32 i32",
        {"STEP": UNIFORM_STEP, "BLOCK": sampling.BLOCK_MAX, "LIMITED": True, "LOWEST": sampling.LOWEST},
    ),
}


def source_of(kernel: Kernel) -> ASTSource:
    """The kernel with its argument types; pointers are aligned to 16 bytes, as torch's are, where it asks."""
    names = [name for name in kernel.function.arg_names if name not in kernel.constants]
    types = kernel.types.split()
    assert len(names) == len(types), f"{kernel.function.__name__}: {len(names)} arguments, {len(types)} types"
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(kernel.constants, "constexpr")
    order = {name: index for index, name in enumerate(kernel.function.arg_names)}
    aligned = {(order[name],): [["tt.divisibility", 16]] for name in names if signature[name].startswith("*")}
    for parameter in kernel.function.params:
        if parameter.do_not_specialize_on_alignment:
            aligned.pop((parameter.num,), None)
    ordered = {name: signature[name] for name in kernel.function.arg_names}
    return ASTSource(fn=kernel.function, signature=ordered, constexprs=kernel.constants, attrs=aligned)


def usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack and local bytes, read from the binary by the bundled tool."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2]), int(found[3])


def compile_all(kernels: dict[str, Kernel]) -> int:
    """Compile everything for every target and print what each form takes."""
    for name, kernel in kernels.items():
        for target_name, target in TARGETS.items():
            compiled = triton.compile(source_of(kernel), target=target, options={"num_warps": 4})
            registers, stack, local = usage(compiled.asm["cubin"])
            print(f"{name} {target_name} registers {registers} stack {stack} local {local}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(compile_all(KERNELS))
