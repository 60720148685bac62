"""The sampler: each rule against its definition, rows independent of their neighbours, noise with the right shape."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allocator.columns import f32, i32, i64, pack_i64
from daemon.rank.noise import row_keys
from daemon.rank.sampler import Limits, Sampler, argmax, choose_on_host, keep_best, logprobs_of
from daemon.rank.sampling_table import SamplingTable
from ipc.messages import RowSampling, Sampling
from kernels import reference
from kernels.reference import gumbel
from tests.kernels.uploads import Uploads

VOCAB = 300
CPU = torch.device("cpu")


def table_of(*rows: Sampling, **more: object) -> SamplingTable:
    """A table with these rows; `more` are fields of every RowSampling."""
    table = SamplingTable(len(rows))
    for row, sampling in enumerate(rows):
        values: dict[str, object] = {"choice": 0} | more
        table.put(RowSampling(row, 0, sampling, **values))  # type: ignore[arg-type]
    return table


def draw(table: SamplingTable, logits: torch.Tensor, position: int, rows: list[int] | None = None) -> list[int]:
    """One sampled token for each row of the table (or of `rows`), all at one position."""
    chosen = np.array(range(len(logits)) if rows is None else rows, dtype=np.int32)
    positions = np.full(chosen.size, position, dtype=np.int64)
    sampler = Sampler(logits.shape[1], CPU, choose_on_host)
    return sampler.sample(logits, chosen, np.zeros_like(chosen), positions, table).tolist()


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    """Logits with a realistic spread."""
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_first_of_equals(dtype: torch.dtype) -> None:
    """Ties go to the lower id, as `torch.argmax` does for one row."""
    logits = torch.zeros(3, 9, dtype=dtype)
    logits[1, 4] = logits[1, 7] = 2
    logits[2, 8] = 1
    assert argmax(logits).tolist() == [0, 4, 8]


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Each row of a mixed batch samples what it samples alone, whatever rules its neighbours have."""
    rows = [
        Sampling(temperature=0.0, seed=1),
        Sampling(temperature=0.7, seed=2),
        Sampling(temperature=1.3, seed=3, top_k=5),
        Sampling(temperature=1.0, seed=4, top_p=0.6),
        Sampling(temperature=1.0, seed=5, min_p=0.2),
        Sampling(temperature=0.9, seed=6, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4),
        Sampling(temperature=2.0, seed=7),
    ]
    table = table_of(*rows, prompt_ids=pack_i64([3, 4]), output_ids=pack_i64([5, 5, 6]))
    logits = random_logits(len(rows))
    for position in range(5):
        together = draw(table, logits, position)
        alone = [draw(table, logits[row : row + 1], position, [row])[0] for row in range(len(rows))]
        assert together == alone


def test_noise_depends_on_seed_choice_and_position_only() -> None:
    """Equal keys give equal tokens; each of the three numbers changes the key."""
    keys = row_keys(
        np.array([1, 1, 2, 1], dtype=np.uint64),
        np.array([0, 1, 0, 0], dtype=np.int32),
        np.array([9, 9, 9, 10], dtype=np.int64),
    )
    assert len(set(keys.tolist())) == 4
    table = table_of(Sampling(temperature=1.0, seed=8), Sampling(temperature=1.0, seed=8))
    flat = torch.zeros(2, VOCAB)
    tokens = [draw(table, flat, position) for position in range(40)]
    assert all(first == second for first, second in tokens)
    assert len({first for first, _ in tokens}) > 30


def test_draws_follow_the_softmax() -> None:
    """Over many seeds the frequencies are the probabilities, within four standard errors each."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    n = 20_000
    keys = row_keys(np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.int32), np.full(n, 77, dtype=np.int64))
    pairs = torch.from_numpy(keys.view(np.int32).reshape(-1, 2))
    picks = (probabilities.log() + gumbel(pairs, 5)).argmax(-1)
    found = torch.bincount(picks, minlength=5) / n
    error = (probabilities * (1 - probabilities) / n).sqrt()
    assert bool(((found - probabilities).abs() < 4 * error).all()), found


def test_gumbel_noise_has_the_right_moments() -> None:
    """Mean Euler's constant, variance pi^2 / 6, no infinities, over every token id of large vocabularies."""
    keys = torch.tensor([[1, 2], [-5, 1 << 30]], dtype=torch.int32)
    noise = gumbel(keys, 100_000)
    assert bool(noise.isfinite().all())
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.02


def kept(scaled: torch.Tensor, sampling: Sampling) -> set[int]:
    """Ids that survive the rules of one row."""
    row = scaled.clone()[None]
    table = table_of(sampling)
    keep_best(row, Limits(table.temperature, table.min_p, table.top_k, table.top_p))
    return set(torch.isfinite(row[0]).nonzero()[:, 0].tolist())


def expected(scaled: torch.Tensor, sampling: Sampling) -> set[int]:
    """The definition: min-p, then top-k, then top-p over what is left, written with a full sort."""
    probabilities = torch.softmax(scaled.double(), -1)
    alive = probabilities >= sampling.min_p * probabilities.max()
    order = torch.argsort(scaled, descending=True)
    order = order[alive[order]]
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    left = probabilities[order] / probabilities[order].sum()
    before = left.cumsum(0) - left
    return set(order[before < sampling.top_p].tolist())


@pytest.mark.parametrize("top_k", [0, 1, 7, 299, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_rules_keep_what_their_definition_keeps(top_k: int, top_p: float, min_p: float) -> None:
    """Every combination equals the sorted definition, on a CPU and in the kernel's twin; the best token is kept."""
    for seed in range(4):
        scaled = random_logits(1, seed)[0]
        sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
        got = kept(scaled, sampling)
        assert got == expected(scaled, sampling)
        assert int(scaled.argmax()) in got
        limits = (torch.tensor([value]) for value in (min_p, top_k, top_p))
        assert set(reference.keep_best(scaled[None], *limits)[0].nonzero()[:, 0].tolist()) == got


def test_top_p_beyond_the_first_candidates() -> None:
    """A flat distribution over a large vocabulary needs more than the first candidates looked at."""
    scaled = torch.linspace(0, 1, 30_000)
    assert kept(scaled, Sampling(top_p=0.9)) == expected(scaled, Sampling(top_p=0.9))


def test_penalties_follow_their_definition() -> None:
    """Repetition over prompt and output, presence and frequency over output only, updated as tokens come."""
    sampling = Sampling(temperature=0.0, seed=0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    table = table_of(sampling, prompt_ids=pack_i64([0, 1]), output_ids=pack_i64([2, 2]))
    sampler = Sampler(6, CPU, choose_on_host)
    rows, zero = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    logits = torch.tensor([[4.0, -1.0, 6.0, 2.2, 1.9, -9.0]])
    # 0: 4/2; 1: -1*2; 2: 6/2 - 0.5 - 2*0.25 = 2.0; 3 is untouched and best
    first = sampler.sample(logits, rows, zero, np.array([10]), table)
    # then 3: 2.2/2 - 0.5 - 0.25; best are 0 and 2 at 2.0, the first of equals
    second = sampler.sample(logits, rows, zero, np.array([11]), table)
    assert (first.tolist(), second.tolist()) == ([3], [0])
    # then 0: 2.0 - 0.75; 2 is best; then 2: 3 - 0.5 - 0.75; 4 is best
    assert [int(sampler.sample(logits, rows, zero, np.array([at]), table)) for at in (12, 13)] == [2, 4]
    assert logits[0, 0] == 4.0


def test_a_new_generation_reads_its_own_history() -> None:
    """Penalties of a reused row start from the history that came with the new generation."""
    sampling = Sampling(temperature=0.0, seed=0, presence_penalty=2.0)
    table = table_of(sampling, output_ids=pack_i64([1]))
    sampler = Sampler(4, CPU, choose_on_host)
    rows = np.zeros(1, dtype=np.int32)
    logits = torch.tensor([[1.0, 2.0, 0.0, 0.0]])
    assert sampler.sample(logits, rows, np.array([0], dtype=np.int32), np.array([3]), table).tolist() == [0]
    table.put(RowSampling(0, 1, sampling, 0, output_ids=pack_i64([0])))
    assert sampler.sample(logits, rows, np.array([1], dtype=np.int32), np.array([3]), table).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_hold_until_their_position(temperature: float) -> None:
    """A banned id is never sampled before `ban_before` and may be from there on."""
    sampling = Sampling(temperature=temperature, seed=3)
    table = table_of(sampling, ban_before=20, banned=pack_i64([7, 9]))
    logits = torch.zeros(1, 12)
    logits[0, 7], logits[0, 9] = 60.0, 50.0
    assert not {draw(table, logits, at)[0] for at in range(20)} & {7, 9}
    assert draw(table, logits, 20) == [7]


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every new tensor of a vocabulary's size or more that operators make, but for those in `known`'s storage."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = [known]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() >= VOCAB:
            storages = {one.untyped_storage().data_ptr() for one in self.kept}
            if out.untyped_storage().data_ptr() not in storages:
                self.kept.append(out)
                self.elements += out.numel()
        return out


@pytest.mark.parametrize("banned_rows", [1, 3])
def test_bans_cost_only_while_and_where_they_hold(banned_rows: int) -> None:
    """Below `ban_before` the banned rows alone are copied; from there on nothing is, and no row's logits change."""
    table = table_of(*[Sampling(temperature=0.0, seed=1)] * 16)
    for row in range(banned_rows):
        table.put(RowSampling(row, 0, Sampling(temperature=0.0, seed=1), 0, ban_before=20, banned=pack_i64([7])))
    logits = random_logits(16)
    logits[:, 7] = 90.0
    before = logits.clone()
    with Made(logits) as held:
        assert draw(table, logits, 19).count(7) == 16 - banned_rows
    with Made(logits) as over:
        assert draw(table, logits, 20) == [7] * 16
    assert (held.elements, over.elements) == (banned_rows * VOCAB, 0)
    assert torch.equal(logits, before)


def test_sampling_waits_for_no_device() -> None:
    """Greedy, drawn, penalized and banned rows together: keys, indexes and histories are uploaded without a wait."""
    plain, drawn = Sampling(temperature=0.0, seed=1), Sampling(temperature=1.0, seed=2)
    table = table_of(plain, drawn, Sampling(temperature=1.0, seed=3, presence_penalty=0.5), plain)
    table.ban_before[3], table.banned[3] = 20, np.array([7, 9])
    device = torch.device("meta")
    for rows in ([0, 1], [0, 1, 2, 3]):
        places = np.array(rows, dtype=np.int32)
        sampler = Sampler(VOCAB, device, lambda logits, *_: torch.empty(len(logits), dtype=torch.int64, device=device))
        logits = torch.empty(len(rows), VOCAB, device=device)
        with Uploads() as uploads:
            sampler.sample(logits, places, np.zeros_like(places), np.full(len(rows), 9, dtype=np.int64), table)
        assert len(uploads.waits) > len(rows)
        assert not any(uploads.waits)


def test_histories_of_rows_that_are_gone_are_dropped() -> None:
    """A row that samples in a new generation, with penalties or without, leaves no history of the old one behind."""
    penalized = Sampling(temperature=0.0, seed=0, presence_penalty=2.0)
    table = table_of(penalized, penalized)
    sampler = Sampler(VOCAB, CPU, choose_on_host)
    rows, positions = np.arange(2, dtype=np.int32), np.array([3, 3])
    sampler.sample(random_logits(2), rows, np.zeros(2, dtype=np.int32), positions, table)
    left = [weakref.ref(history.counts) for history in sampler._histories.values()]
    table.reset(rows)
    table.put(RowSampling(0, 1, Sampling(temperature=0.0, seed=0), 0))
    table.put(RowSampling(1, 1, penalized, 0))
    sampler.sample(random_logits(2), rows, np.ones(2, dtype=np.int32), positions, table)
    assert [one() for one in left] == [None, None]
    assert list(sampler._histories) == [1]


def test_log_probabilities_are_of_the_raw_logits() -> None:
    """Chosen, rank and best ids of a log-softmax; k may be 0."""
    logits = random_logits(3)
    tokens = torch.tensor([5, int(logits[1].argmax()), 0])
    want = torch.log_softmax(logits, -1)
    values = logprobs_of(logits, tokens, 4)
    np.testing.assert_allclose(f32(values.chosen), want[torch.arange(3), tokens].numpy(), rtol=1e-6)
    assert i32(values.ranks)[1] == 1
    assert i32(values.ranks)[0] == int((want[0] > want[0, 5]).sum()) + 1
    assert i64(values.top_ids).reshape(3, 4).tolist() == want.topk(4).indices.tolist()
    assert logprobs_of(logits, tokens, 0).top_ids == b""
    many = logprobs_of(logits.repeat(50, 1), tokens.repeat(50), 2)
    np.testing.assert_array_equal(f32(many.chosen).reshape(50, 3), np.tile(f32(values.chosen), (50, 1)))
    assert i64(many.top_ids).size == 300
