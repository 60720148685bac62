"""The CPU's paged attention against dense attention in float64, over ragged batches of every shape."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import host_attention, reference
from kernels.host_attention import Scratch, attend, plan_attention
from tests.kernels.scenes import Scene, Shape, dense_attention, make_scene

NOWHERE = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
SCRATCH = Scratch()  # one for all tests, as a rank has one for all steps
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
# window, soft cap, sinks: each alone and together; windows of one key, smaller and larger than a page, a tile, a row
RULES = [
    (0, 0.0, True),
    (0, 3.0, False),
    (1, 0.0, False),
    (5, 0.0, False),
    (64, 0.0, False),
    (130, 2.0, True),
    (2000, 0.0, False),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products on several threads wait for each other where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sinks_of(heads: int) -> Tensor:
    """Sinks that weigh as much as a few keys."""
    return torch.linspace(-1.0, 3.0, heads)


def run(scene: Scene, shape: Shape, scale: float, window: int, softcap: float, sinks: Tensor | None) -> Tensor:
    """Plan and attend as a rank does."""
    places = (scene.starts, scene.counts, scene.offsets, scene.first, scene.tables)
    plan = plan_attention(*places, NOWHERE, shape.page, window, shape.dtype)
    pages = (scene.k_view.flatten(1), scene.v_view.flatten(1))
    return attend(plan, scene.q, *pages, shape.kv_heads, SCRATCH, scale, softcap, sinks)


def compare(scene: Scene, shape: Shape, scale: float, window: int, softcap: float, sinks: Tensor | None) -> None:
    """Equal to dense attention, to the rounding of the dtype."""
    got = run(scene, shape, scale, window, softcap, sinks)
    assert got.dtype == shape.dtype
    want = dense_attention(scene, scale, window, softcap, sinks)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 20), (8, 1, 32), (16, 8, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [1, 16])
def test_equals_dense_attention(name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, page: int) -> None:
    """Every batch, head layout, dtype and page size."""
    shape = Shape(heads, kv_heads, dim, dim, dtype, page)
    compare(make_scene(BATCHES[name], shape, 0), shape, 0.2, 0, 0.0, None)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("window", "softcap", "sunk"), RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "page"), [(6, 2, 1), (6, 2, 16), (8, 8, 7), (5, 1, 128)])
def test_windows_caps_and_sinks_equal_dense_attention(
    name: str, window: int, softcap: float, sunk: bool, dtype: torch.dtype, heads: int, kv_heads: int, page: int
) -> None:
    """A window band lists visible pages only; all else in the arena is NaN."""
    shape = Shape(heads, kv_heads, 24, 16, dtype, page)
    scene = make_scene(BATCHES[name], shape, window)
    compare(scene, shape, 0.3, window, softcap, sinks_of(heads) if sunk else None)


@pytest.mark.parametrize("window", [3, 40])
def test_a_window_inside_a_wider_band(window: int) -> None:
    """A layer that sees less than its band keeps gathers only what it sees, in a window band and in the full one."""
    shape = Shape(4, 2, 16, 16, torch.float32, 4)
    for kept in (0, 50):
        scene = make_scene(BATCHES["decodes and chunks"], shape, kept)
        compare(scene, shape, 0.25, window, 0.0, None)
        places = (scene.starts, scene.counts, scene.offsets, scene.first, scene.tables)
        plan = plan_attention(*places, NOWHERE, 4, window, torch.float32)
        rows = sum(
            len(range(*group.queries.indices(99))) if isinstance(group.queries, slice) else group.queries.numel()
            for group in plan.groups
        )
        assert rows == 4
        assert sum(group.pages.numel() for group in plan.groups) <= rows * (window // 4 + 2)


@pytest.mark.parametrize("seed", range(60))
def test_random_batches_equal_dense_attention(seed: int) -> None:
    """Anything together: lengths, chunks, windows, pages, heads, dtypes; the torch twin agrees too."""
    chance = random.Random(seed)
    kv_heads, size = chance.choice([1, 2, 3, 8]), chance.choice([1, 2, 7, 16])
    dims = [chance.choice([8, 20, 72, 80, 96]) for _ in "kv"]
    dtype = chance.choice([torch.float32, torch.bfloat16, torch.float16])
    shape = Shape(kv_heads * size, kv_heads, *dims, dtype, chance.choice([1, 2, 5, 16, 64, 128]))
    singles = [(chance.choice([0, 3, 70, 400, chance.randrange(900)]), 1) for _ in range(chance.randrange(6))]
    chunks = [(chance.choice([0, 11, 300]), chance.randrange(2, 200)) for _ in range(chance.randrange(not singles, 3))]
    window = chance.choice([0, 1, 2, 17, 64, 128, 1000])
    rules = (window, chance.choice([0.0, 0.0, 5.0]), sinks_of(shape.heads) if chance.random() < 0.4 else None)
    scene = make_scene(singles + chunks, shape, window, seed)
    scale = float(shape.k_dim) ** -0.5
    compare(scene, shape, scale, *rules)
    tensors = [torch.from_numpy(column) for column in (scene.tables, scene.first, scene.starts, scene.counts)]
    twin = reference.paged_attention(scene.q.double(), scene.k_view, scene.v_view, *tensors, scale, *rules)
    torch.testing.assert_close(twin, dense_attention(scene, scale, *rules), atol=1e-12, rtol=1e-12)


def test_long_capped_chunks_are_computed_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that torch's fused kernel does not make are held for some queries at a time only."""
    monkeypatch.setattr(host_attention, "SCORES_MAX", 2000)
    shape = Shape(6, 2, 16, 16, torch.float32, 16)
    scene = make_scene([(100, 1), (37, 200)], shape, 0)
    compare(scene, shape, 0.3, 0, 2.0, sinks_of(6))


def test_groups_bound_padding_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal length are split so that neither padding nor one gather grows without bound; none is lost."""
    monkeypatch.setattr(host_attention, "GROUP_TOKENS_MAX", 4096)
    scene = make_scene([(n * 37 % 1500, 1) for n in range(60)], Shape(1, 1, 4, 4, torch.float32, 16), 0)
    places = (scene.starts, scene.counts, scene.offsets, scene.first, scene.tables)
    plan = plan_attention(*places, NOWHERE, 16, 0, torch.float32)
    seen: list[int] = []
    for group in plan.groups:
        assert isinstance(group.queries, torch.Tensor)
        lengths = scene.starts[group.queries.numpy()] + 1
        longest = lengths.max()
        assert 0 <= group.end - longest < 16
        assert longest * lengths.size <= 4096
        assert longest <= lengths.min() * host_attention.PADDING_MAX
        seen += group.queries.tolist()
    assert sorted(seen) == list(range(60))
