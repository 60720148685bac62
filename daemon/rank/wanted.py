"""Which positions of a batch need logits, and the log probabilities that are reported of them.

Owns the logits held over from a prompt chunk's last position to the chunk after it, which has the token they predict.
Must never ask for logits that nobody reads. Invariant: a chunk reports log probabilities of its own tokens only, so
every prompt position but the first of the sequence is reported exactly once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from allocator.columns import Int64s
from daemon.rank.batch import Batch
from daemon.rank.sampler import logprobs_of
from ipc.messages import RowLogprobs


class Wanted(NamedTuple):
    """`indexes` int64: batch positions whose logits are computed; `sampled` int64[k]: where in them each sampling row's
    last position is; `prompts`: (row of the batch, first place in `indexes`) of rows that report their prompt."""

    indexes: Int64s
    sampled: Int64s
    prompts: list[tuple[int, int]]


def wanted_positions(batch: Batch) -> Wanted:
    """The last position of each sampling row, or every position of a chunk that reports its prompt."""
    asks = batch.sampling.prompt_logprobs[batch.rows] >= 0
    asks[batch.decoding] = False
    lasts = batch.offsets[1:] - 1
    if not asks.any():
        return Wanted(lasts[batch.sampled], np.arange(batch.sampled.size), [])
    sampled = np.zeros(batch.rows.size, dtype=np.bool_)
    sampled[batch.sampled] = True
    parts, at, where, prompts = [], 0, [], []
    for i in np.flatnonzero(asks | sampled).tolist():
        first = int(batch.offsets[i]) if asks[i] else int(lasts[i])
        part = np.arange(first, int(lasts[i]) + 1)
        if asks[i]:
            prompts.append((i, at))
        at += part.size
        parts.append(part)
        if sampled[i]:
            where.append(at - 1)
    return Wanted(np.concatenate(parts), np.array(where, dtype=np.int64), prompts)


class LogprobReports:
    """Makes `RowLogprobs`; holds one row of logits per running prompt that is reported."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Tensor]] = {}  # row -> generation, logits of its last position

    def of_prompts(self, batch: Batch, wanted: Wanted, logits: Tensor) -> list[RowLogprobs]:
        """Of each reporting chunk's own tokens; `logits` [len(wanted.indexes), vocab]."""
        found = []
        for i, place in wanted.prompts:
            row, generation, start = int(batch.rows[i]), int(batch.generations[i]), int(batch.starts[i])
            count = int(batch.counts[i])
            own = logits[place : place + count]
            tokens = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]]).to(logits.device)
            before = self._held.pop(row, None)
            self._held[row] = (generation, own[-1].clone())
            if before is not None and before[0] == generation and start > 0:
                predicting, first = torch.cat((before[1][None], own[:-1])), start
            else:
                predicting, first, tokens = own[:-1], start + 1, tokens[1:]
            if tokens.numel():
                k = int(batch.sampling.prompt_logprobs[row])
                found.append(RowLogprobs(row, generation, first, logprobs_of(predicting, tokens, k)))
        return found

    def of_outputs(self, batch: Batch, wanted: Wanted, logits: Tensor, tokens: Tensor) -> list[RowLogprobs]:
        """Of each sampled token whose row asks; `tokens` int64[k] in the order of `batch.sampled`."""
        found = []
        for at, i in enumerate(batch.sampled.tolist()):
            row = int(batch.rows[i])
            self._held.pop(row, None)
            k = int(batch.sampling.logprobs[row])
            if k >= 0:
                one = logits[wanted.sampled[at]][None]
                found.append(RowLogprobs(row, int(batch.generations[i]), -1, logprobs_of(one, tokens[at : at + 1], k)))
        return found
