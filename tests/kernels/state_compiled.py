"""Runs in a process of its own, without a GPU: compiles the kernels over states ahead of time, as `compiled` does.

The sizes are those of published models: Mamba-2 heads of 64 with 128 states, delta heads of 128 x 128, 4 and 7 taps.
"""

from __future__ import annotations

import sys

from kernels import state_conv_triton, state_delta_triton, state_mamba2_triton
from kernels.state_mamba2_triton import PRECISION
from tests.kernels.compiled import Kernel, compile_all

CONV: dict[str, object] = {"TAPS": 4, "BIAS": True, "SILU": True, "BLOCK": state_conv_triton.CHANNELS}
SCAN: dict[str, object] = {"SIZE": 16, "DIM": 64, "WIDTH": 128, "DIM_BLOCK": state_mamba2_triton.DIMS}
DELTA: dict[str, object] = {"SIZE": 2, "K_DIM": 128, "V_DIM": 128, "V_BLOCK": state_delta_triton.VALUES}
MAMBA = "*bf16 *fp32 *fp32 *bf16 *bf16 *bf16 *fp32 *i64 *u8"
GATED = "*fp32 *fp32 *bf16 *fp32 *fp32 *fp32 *i64 *u8"
KERNELS = {
    "conv-update": Kernel(state_conv_triton._update, "*bf16 *bf16 *i64 *u8 *bf16 *bf16 *bf16 i32 i32 i32 i32", CONV),
    "conv-chunks": Kernel(
        state_conv_triton._convolve,
        "*bf16 *bf16 *i64 *u8 *i64 *i64 *bf16 *bf16 *bf16 i32 i32 i32 i32 i32",
        CONV | {"TAPS": 7, "TOKENS": state_conv_triton.TILE},
    ),
    "conv-keep": Kernel(
        state_conv_triton._keep,
        "*bf16 *bf16 *i64 *u8 *i64 *i64 i32 i32 i32 i32",
        {"TAPS": 7, "BLOCK": state_conv_triton.CHANNELS},
    ),
    "mamba2-update": Kernel(
        state_mamba2_triton._update,
        f"{MAMBA} *fp32 i32 i32 i32 i32 i32 i32 i32 i32 i32",
        SCAN | {"WIDTH_BLOCK": 128},
    ),
    "mamba2-scan": Kernel(
        state_mamba2_triton._scan,
        f"{MAMBA} *i64 *i64 *fp32 i32 i32 i32 i32 i32 i32 i32 i32 i32",
        SCAN | {"TOKENS": state_mamba2_triton.BLOCK, "LANES": state_mamba2_triton.LANES, "PRECISE": PRECISION},
    ),
    "delta-update": Kernel(
        state_delta_triton._update,
        f"{GATED} *fp32 i32 i32 i32 i32 i32",
        DELTA | {"K_BLOCK": 128},
    ),
    "delta-chunk": Kernel(
        state_delta_triton._chunk,
        f"{GATED} *i64 *i64 *fp32 i32 i32 i32 i32 i32",
        DELTA | {"TOKENS": state_delta_triton.BLOCK, "LANES": state_delta_triton.LANES, "PRECISE": PRECISION},
    ),
}


if __name__ == "__main__":
    sys.exit(compile_all(KERNELS))
