"""Recurrent ops of a GPU: the Triton kernels, in the order that `states.RecurrentStates` calls them.

Owns that table only; the caller's current stream orders the kernels.
"""

from __future__ import annotations

from daemon.rank.states import StateOps
from kernels.state_conv_triton import conv_chunks, conv_update
from kernels.state_delta_triton import delta_chunks, delta_update
from kernels.state_mamba2_triton import mamba2_chunks, mamba2_update

TRITON_OPS = StateOps(
    conv_update, conv_chunks, mamba2_update, mamba2_chunks, delta_update, delta_chunks, cut_blocks=False
)
