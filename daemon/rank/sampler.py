"""The sampler: from logits to tokens, one row at a time in meaning, all rows at once in fact.

Owns penalties' histories and the order of the rules. Must never let one row's result depend on another row. Order:
repetition, presence and frequency penalties; bans; temperature; min-p; top-k; top-p; Gumbel noise keyed by (seed,
choice, position); argmax. A row at temperature 0 takes the argmax after penalties and bans. Log probabilities are of
the raw logits, before any rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allocator.columns import Float32s, Int32s, Int64s, pack_i32, pack_i64
from daemon.rank.noise import row_keys
from daemon.rank.sampling_table import SamplingTable
from ipc.messages import Logprobs
from kernels.reference import gumbel
from kernels.upload import upload

HEAD = 1024  # candidates looked at before a whole row is sorted
LOGPROB_ROWS = 64  # positions whose whole log-softmax is held at once
NOISE_ROWS = 4  # rows of noise made at once: bounds the memory of a draw


class Limits(NamedTuple):
    """Of n drawn rows: `temperature` (above 0), `min_p`, `top_p` float32[n] and `top_k` int32[n]; 0 or 1: no limit."""

    temperature: Float32s
    min_p: Float32s
    top_k: Int32s
    top_p: Float32s


# Tokens int64[n] of logits [n, vocab], which may be changed, by their limits and noise keys int32[n, 2].
Draw = Callable[[Tensor, Limits, Tensor], Tensor]


class History(NamedTuple):
    """What penalties read of one row: `prompt` bool[vocab], `counts` int32[vocab] of output tokens."""

    generation: int
    prompt: Tensor
    counts: Tensor


class Sampler:
    """Samples rows of logits; keeps the histories of rows with penalties."""

    def __init__(self, vocab_size: int, device: torch.device, draw: Draw) -> None:
        self._draw_best = draw
        self._vocab = vocab_size
        self._device = device
        self._histories: dict[int, History] = {}
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def sample(
        self, logits: Tensor, rows: Int32s, generations: Int32s, positions: Int64s, table: SamplingTable
    ) -> Tensor:
        """int64[n] tokens for `logits` [n, vocab], left as they are; `positions` are those of the sampled tokens.

        Only rows with penalties, or below their `ban_before`, are copied and changed.
        """
        self._forget_reused(rows, generations)
        penalized = table.penalized[rows]
        changed = penalized | (positions < table.ban_before[rows])
        if not changed.any():
            return self._choose(logits, rows, positions, table)
        tokens = torch.empty(rows.size, dtype=torch.int64, device=self._device)
        plain, own = np.flatnonzero(~changed), np.flatnonzero(changed)
        if plain.size:
            tokens[self._on(plain)] = self._choose(logits, rows, positions, table, plain)
        places = self._on(own)
        values = logits[places].float()
        self._penalize(values, rows[own], generations[own], penalized[own], table)
        self._ban(values, rows[own], positions[own], table)
        tokens[places] = self._choose(values, rows[own], positions[own], table)
        for at in np.flatnonzero(penalized).tolist():
            # Not `counts[tokens[at]] += 1`, which waits for the token to reach the host.
            self._histories[int(rows[at])].counts.index_add_(0, tokens[at : at + 1], self._one)
        return tokens

    def _on(self, column: NDArray[Any]) -> Tensor:
        """The column on the device. An index must be there: torch would wait for the device to put it there itself."""
        return upload(torch.from_numpy(column), self._device)

    def _forget_reused(self, rows: Int32s, generations: Int32s) -> None:
        """Drop the histories of rows that belong to another generation now; what is left is bounded by the rows."""
        if not self._histories:
            return
        for row, generation in zip(rows.tolist(), generations.tolist(), strict=True):
            known = self._histories.get(row)
            if known is not None and known.generation != generation:
                del self._histories[row]

    def _penalize(
        self, logits: Tensor, rows: Int32s, generations: Int32s, penalized: NDArray[np.bool_], table: SamplingTable
    ) -> None:
        for at in np.flatnonzero(penalized).tolist():
            row = int(rows[at])
            history = self._history(row, int(generations[at]), table)
            values = logits[at]
            repetition = float(table.repetition[row])
            if repetition != 1.0:
                seen = history.prompt | (history.counts > 0)
                values[:] = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
            if table.frequency[row] or table.presence[row]:
                values -= float(table.frequency[row]) * history.counts
                values -= float(table.presence[row]) * (history.counts > 0)

    def _history(self, row: int, generation: int, table: SamplingTable) -> History:
        known = self._histories.get(row)
        if known is not None:
            assert known.generation == generation, "what another generation left was dropped"
            return known
        prompt_ids, output_ids = table.history[row]
        prompt = torch.zeros(self._vocab, dtype=torch.bool, device=self._device)
        prompt[self._on(prompt_ids.copy())] = True
        counts = self._on(np.bincount(output_ids, minlength=self._vocab).astype(np.int32))
        self._histories[row] = History(generation, prompt, counts)
        return self._histories[row]

    def _ban(self, logits: Tensor, rows: Int32s, positions: Int64s, table: SamplingTable) -> None:
        for at, row in enumerate(rows.tolist()):
            if positions[at] < table.ban_before[row]:
                logits[at, self._on(table.banned[row].copy())] = -math.inf

    def _choose(
        self,
        logits: Tensor,
        rows: Int32s,
        positions: Int64s,
        table: SamplingTable,
        only: NDArray[np.intp] | None = None,
    ) -> Tensor:
        """Tokens int64 of the batch's rows, or of its indexes `only`: argmax for greedy rows, a draw for the others."""
        chosen = np.arange(rows.size) if only is None else only
        temperatures = table.temperature[rows[chosen]]
        greedy, drawn = np.flatnonzero(temperatures == 0), np.flatnonzero(temperatures > 0)
        if not drawn.size:
            return _argmax_of(logits, self._on(chosen))
        tokens = torch.empty(chosen.size, dtype=torch.int64, device=self._device)
        if greedy.size:
            tokens[self._on(greedy)] = _argmax_of(logits, self._on(chosen[greedy]))
        keys = row_keys(table.seed[rows[chosen[drawn]]], table.choice[rows[chosen[drawn]]], positions[chosen[drawn]])
        pairs = self._on(keys.view(np.int32).reshape(-1, 2))
        for begin in range(0, drawn.size, NOISE_ROWS):
            some = drawn[begin : begin + NOISE_ROWS]
            at = chosen[some]
            own = rows[at]
            limits = Limits(temperatures[some], table.min_p[own], table.top_k[own], table.top_p[own])
            tokens[self._on(some)] = self._draw_best(
                logits[self._on(at)].float(), limits, pairs[begin : begin + NOISE_ROWS]
            )
        return tokens


def choose_on_host(logits: Tensor, limits: Limits, keys: Tensor) -> Tensor:
    """int64[n]: draws from `logits` float32[n, vocab], which is changed, by the limits and `keys` int32[n, 2]."""
    logits /= torch.from_numpy(limits.temperature)[:, None]
    keep_best(logits, limits)
    return draw_on_host(logits, keys)


def draw_on_host(scaled: Tensor, keys: Tensor) -> Tensor:
    """int64[n]: argmax of `scaled` float32[n, vocab] plus the noise of `keys` int32[n, 2]; `scaled` is changed."""
    scaled += gumbel(keys, scaled.shape[1])
    return argmax(scaled)


def argmax(logits: Tensor) -> Tensor:
    """int64[n]: index of the largest entry of each row, the first of equals.

    By numpy on a CPU, where it is the faster one: `python -m timeit -s 'import torch; x = torch.randn(16, 49152)'`
    with 'x.argmax(-1)' and with 'x.numpy().argmax(1)' compares them.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.float().numpy().argmax(1))
    return logits.argmax(-1)


def _argmax_of(logits: Tensor, at: Tensor) -> Tensor:
    """`argmax` of the rows `at`. Where they are most of the rows it is cheaper to look at all than to copy those."""
    return argmax(logits)[at] if 2 * at.numel() > logits.shape[0] else argmax(logits[at])


def keep_best(scaled: Tensor, limits: Limits) -> None:
    """Set to -inf what min-p, top-k and top-p drop, in place; `scaled` float32[n, vocab], after temperature."""
    vocab = scaled.shape[1]
    _, min_p, top_k, top_p = limits
    if (min_p > 0).any():
        floor = scaled.amax(-1) + torch.from_numpy(np.log(np.maximum(min_p, 1e-38))).to(scaled.device)
        scaled.masked_fill_(scaled < floor[:, None], -math.inf)
    for at in np.flatnonzero(((top_k > 0) & (top_k < vocab)) | (top_p < 1)).tolist():
        row = scaled[at]
        k = int(top_k[at]) if 0 < top_k[at] < vocab else vocab
        row.masked_fill_(row < _threshold(row, k, float(top_p[at])), -math.inf)


def _threshold(row: Tensor, k: int, p: float) -> Tensor:
    """The lowest logit kept: of the k best, the fewest whose probabilities reach `p` (renormalized over those k)."""
    size = min(max(HEAD, k) if k < row.shape[0] else HEAD, row.shape[0])
    while True:
        best = row.topk(size).values
        if k <= size:
            best = best[:k]
        if p >= 1:
            return best[-1]
        total = torch.logsumexp(best if k <= size else row, 0)
        reached = torch.exp(best - total).cumsum(0)
        within = int((reached < p).sum())
        if within < best.shape[0]:
            return best[within]
        if best.shape[0] == k or size == row.shape[0]:
            return best[-1]
        size = min(size * 8, row.shape[0])


def logprobs_of(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Log probabilities of `tokens` int64[p] under raw `logits` [p, vocab], their ranks, and the k best of each."""
    columns: list[list[NDArray[Any]]] = [[], [], [], []]
    for begin in range(0, tokens.shape[0], LOGPROB_ROWS):
        values = torch.log_softmax(logits[begin : begin + LOGPROB_ROWS].float(), -1)
        chosen = values.gather(1, tokens[begin : begin + LOGPROB_ROWS, None])
        ranks = (values > chosen).sum(-1) + 1
        best = values.topk(k)
        for column, part in zip(columns, (chosen, ranks, best.indices, best.values), strict=True):
            column.append(part.cpu().numpy().ravel())
    chosen_all, ranks_all, ids_all, values_all = (np.concatenate(column) for column in columns)
    return Logprobs(
        k=k,
        chosen=chosen_all.astype("<f4").tobytes(),
        ranks=pack_i32(ranks_all),
        top_ids=pack_i64(ids_all),
        top_values=values_all.astype("<f4").tobytes(),
    )
