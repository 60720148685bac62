"""Sampling parameters of all rows as columns, so that a step reads them by one index per rule.

Owns the parameters only; noise, penalties and choice are the sampler's. Must never import torch. Invariant: a row that
was reset is neutral (greedy, no bans, no log probabilities) until `put` names it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Float32s, Int32s, Int64s, i64
from ipc.messages import RowSampling

_SEED_MASK = (1 << 64) - 1


class SamplingTable:
    """One column per parameter over rows [0, rows_max); `banned` and `history` only for rows that have some."""

    def __init__(self, rows_max: int) -> None:
        self.temperature: Float32s = np.zeros(rows_max, dtype=np.float32)
        self.top_p: Float32s = np.ones(rows_max, dtype=np.float32)
        self.top_k: Int32s = np.zeros(rows_max, dtype=np.int32)
        self.min_p: Float32s = np.zeros(rows_max, dtype=np.float32)
        self.repetition: Float32s = np.ones(rows_max, dtype=np.float32)
        self.presence: Float32s = np.zeros(rows_max, dtype=np.float32)
        self.frequency: Float32s = np.zeros(rows_max, dtype=np.float32)
        self.seed: NDArray[np.uint64] = np.zeros(rows_max, dtype=np.uint64)
        self.choice: Int32s = np.zeros(rows_max, dtype=np.int32)
        self.ban_before: Int32s = np.zeros(rows_max, dtype=np.int32)
        self.logprobs: Int32s = np.full(rows_max, -1, dtype=np.int32)
        self.prompt_logprobs: Int32s = np.full(rows_max, -1, dtype=np.int32)
        self.penalized: NDArray[np.bool_] = np.zeros(rows_max, dtype=np.bool_)
        self.banned: dict[int, Int64s] = {}
        self.history: dict[int, tuple[Int64s, Int64s]] = {}  # row -> prompt ids, output ids at `put`

    def reset(self, rows: Int32s) -> None:
        """Make rows neutral; their parameters follow with `put` before they sample."""
        self.temperature[rows] = 0.0
        self.logprobs[rows] = -1
        self.prompt_logprobs[rows] = -1
        self.ban_before[rows] = 0
        self.penalized[rows] = False
        for row in rows.tolist():
            self.banned.pop(row, None)
            self.history.pop(row, None)

    def put(self, item: RowSampling) -> None:
        """Set one row's parameters."""
        row, sampling = item.row, item.sampling
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = max(sampling.top_k, 0)
        self.min_p[row] = sampling.min_p
        self.repetition[row] = sampling.repetition_penalty
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        self.seed[row] = (sampling.seed or 0) & _SEED_MASK
        self.choice[row] = item.choice
        self.ban_before[row] = item.ban_before if item.banned else 0
        self.logprobs[row] = sampling.logprobs
        self.prompt_logprobs[row] = sampling.prompt_logprobs
        neutral = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
            1.0,
            0.0,
            0.0,
        )
        self.penalized[row] = not neutral
        if item.banned:
            self.banned[row] = i64(item.banned)
        if not neutral:
            self.history[row] = (i64(item.prompt_ids), i64(item.output_ids))
