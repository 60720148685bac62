"""The CPU's paged attention against the plain definition in float64, over ragged batches of every shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels import host_attention
from kernels.host_attention import attend, plan_attention
from kernels.reference import paged_attention

NOWHERE = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
# (start, count) of each row, in batch order
BATCHES = {
    "one query": [(0, 1)],
    "one long row": [(777, 1)],
    "equal rows": [(31, 1), (31, 1), (31, 1)],
    "unequal rows": [(0, 1), (5, 1), (63, 1), (64, 1), (200, 1)],
    "very unequal rows": [(900, 1), (3, 1), (880, 1), (4, 1), (2, 1), (300, 1)],
    "one chunk": [(0, 17)],
    "a chunk behind a prefix": [(45, 30)],
    "chunks over tiles": [(0, 300), (130, 129)],
    "decodes and chunks": [(12, 1), (90, 1), (33, 1), (0, 50), (64, 64), (7, 1)],
    "many rows": [(n * 3 % 41, 1) for n in range(40)],
}


def build(rows: list[tuple[int, int]], page: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Views with random pages, columns and tables of a batch; the sink page and unused pages hold large numbers."""
    chance = np.random.default_rng(len(rows))
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    needed = -(-(starts + counts) // page)
    total = int(needed.sum()) + 3
    order = chance.permutation(np.arange(1, total))
    tables = np.zeros((len(rows), int(needed.max())), dtype=np.int32)
    for row, pages in enumerate(needed):
        tables[row, :pages], order = order[:pages], order[pages:]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    generator = torch.Generator().manual_seed(7)
    k, v = (torch.randn(total, page, kv_heads, dim, generator=generator).to(dtype) for _ in "kv")
    k[0], v[0] = 0, 0  # the sink is zero
    return starts, counts, offsets, tables, k, v


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 20), (8, 1, 32), (16, 8, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [1, 16])
def test_equals_the_definition(name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, page: int) -> None:
    """Every batch, head layout, dtype and page size, to the rounding of the dtype."""
    starts, counts, offsets, tables, k, v = build(BATCHES[name], page, kv_heads, dim, dtype)
    plan = plan_attention(starts, counts, offsets, 0 * starts, tables, NOWHERE, page, 0, dtype)
    q = torch.randn(int(counts.sum()), heads, dim, generator=torch.Generator().manual_seed(9)).to(dtype)
    got = attend(plan, q, k.flatten(1), v.flatten(1), kv_heads, 0.2)
    tensors = (torch.from_numpy(tables), torch.from_numpy(starts), torch.from_numpy(counts))
    want = paged_attention(q.double(), k.double(), v.double(), *tensors, 0.2)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_groups_bound_padding_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal length are split so that neither padding nor one gather grows without bound; none is lost."""
    monkeypatch.setattr(host_attention, "GROUP_TOKENS_MAX", 4096)
    rows = [(n * 37 % 1500, 1) for n in range(60)]
    starts, counts, offsets, tables, _, _ = build(rows, 16, 1, 4, torch.float32)
    plan = plan_attention(starts, counts, offsets, 0 * starts, tables, NOWHERE, 16, 0, torch.float32)
    seen: list[int] = []
    for group in plan.groups:
        assert isinstance(group.queries, torch.Tensor)
        lengths = starts[group.queries.numpy()] + 1
        longest = lengths.max()
        assert 0 <= group.end - longest < 16
        assert longest * lengths.size <= 4096
        assert longest <= lengths.min() * host_attention.PADDING_MAX
        seen += group.queries.tolist()
    assert sorted(seen) == list(range(60))
