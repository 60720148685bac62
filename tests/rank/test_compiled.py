"""The CPU's compiled kernels beside their torch twins and dense attention, and what serves where they cannot be had."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from daemon.rank import compiled
from daemon.rank.batch import BandPages, Batch
from daemon.rank.compiled_attention import CompiledAttention
from daemon.rank.errors import BadOption
from daemon.rank.paged_attention import AttentionSpec, HostAttention, LayerViews
from daemon.rank.row_ops import CompiledRows, TorchRows, row_ops
from daemon.rank.sampling_table import SamplingTable
from kernels import host_library
from kernels.host_library import HostLibrary, Unavailable, load
from tests.kernels.scenes import Scene, Shape, dense_attention, make_scene

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}  # scores of chunks are rounded to bfloat16
BATCHES = {
    "one query": [(0, 1)],
    "long rows": [(777, 1), (255, 1), (256, 1), (511, 1)],
    "unequal rows": [(0, 1), (5, 1), (63, 1), (64, 1), (200, 1)],
    "decodes and chunks": [(12, 1), (90, 1), (0, 50), (33, 1), (64, 64), (7, 1)],
    "chunks alone": [(0, 17), (45, 30)],
}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the library was built into for this machine."""
    place = tmp_path_factory.mktemp("kernels")
    try:
        load(place)
    except Unavailable as error:
        pytest.skip(str(error))
    return place


@pytest.fixture(scope="session")
def library(built: Path) -> HostLibrary:
    """The library."""
    return load(built)


def views_of(scene: Scene, shape: Shape) -> LayerViews:
    """A layer's views of a scene's arena."""
    k, v = scene.k_view, scene.v_view
    return LayerViews(k, v, k.flatten(1), v.flatten(1), shape.kv_heads, 0)


def batch_of(scene: Scene, shape: Shape, window: int) -> Batch:
    """The scene as a batch of one band."""
    owner = np.repeat(np.arange(scene.starts.size), scene.counts)
    positions = np.arange(scene.offsets[-1]) - np.repeat(scene.offsets[:-1] - scene.starts, scene.counts)
    pages = scene.tables[owner, positions // shape.page - scene.first[owner]].astype(np.int64)
    none = np.zeros(0, dtype=np.int64)
    return Batch(
        seq=1,
        rows=np.arange(scene.starts.size, dtype=np.int32),
        generations=np.zeros(scene.starts.size, dtype=np.int32),
        starts=scene.starts,
        counts=scene.counts,
        offsets=scene.offsets,
        tokens=none,
        positions=positions,
        write_slots=positions % shape.page,
        bands=(BandPages(scene.first, scene.tables, pages, window),),
        slots=none,
        sampled=none,
        carried=none,
        sampling=SamplingTable(1),
        page_size=shape.page,
    )


def new_rows(scene: Scene, dense: list[Tensor]) -> Tensor:
    """The keys or values of the batch's own tokens, cut out of a wider row as a joined product leaves them."""
    rows = [data[start:] for data, start in zip(dense, scene.starts.tolist(), strict=True)]
    joined = torch.cat(rows)
    return torch.cat((joined, joined), 1)[:, : joined.shape[1]]


def check(library: HostLibrary, rows: list[tuple[int, int]], shape: Shape, spec: AttentionSpec) -> None:
    """Attend over a scene whose new tokens are not stored yet, beside dense attention; then look at what is stored."""
    scene = make_scene(rows, shape, spec.window)
    batch = batch_of(scene, shape, spec.window)
    pages, slots = batch.bands[0].write_pages, batch.write_slots  # type: ignore[union-attr]
    k, v = new_rows(scene, scene.keys), new_rows(scene, scene.values)
    for view in (scene.k_view, scene.v_view):
        view[torch.from_numpy(pages), torch.from_numpy(slots)] = torch.nan
    attention = CompiledAttention(library, {0: views_of(scene, shape)})
    attention.begin(batch)
    got = attention.run(0, scene.q, k, v, spec)
    want = dense_attention(scene, spec.scale, spec.window, spec.softcap, spec.sinks)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])
    assert torch.equal(scene.k_view[torch.from_numpy(pages), torch.from_numpy(slots)], k)
    assert torch.equal(scene.v_view[torch.from_numpy(pages), torch.from_numpy(slots)], v)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page"), [(9, 3, 64, 16), (8, 8, 32, 1), (24, 2, 128, 64)])
def test_attention_equals_dense(
    library: HostLibrary, name: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page: int
) -> None:
    """Groups of 1, 3 and 12 queries, pages of 1 to 64, decode rows among chunks: new rows stored first, then read."""
    check(library, BATCHES[name], Shape(heads, kv_heads, dim, dim, dtype, page), AttentionSpec(dim**-0.5))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("window", "softcap", "sunk"), [(1, 0.0, False), (5, 0.0, True), (130, 2.0, True), (0, 3.0, True)]
)
def test_windows_caps_and_sinks(
    library: HostLibrary, name: str, dtype: torch.dtype, window: int, softcap: float, sunk: bool
) -> None:
    """The same with windows that begin inside a page, soft caps and sinks; values wider than keys."""
    sinks = torch.linspace(-1.0, 3.0, 6) if sunk else None
    check(library, BATCHES[name], Shape(6, 2, 32, 48, dtype, 7), AttentionSpec(0.3, window, softcap, sinks))


def test_two_threads_give_what_one_gives(library: HostLibrary) -> None:
    """Rows are split over threads, not sums."""
    shape = Shape(9, 3, 64, 64, torch.bfloat16, 16)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        scene = make_scene(BATCHES["long rows"], shape, 0)
        attention = CompiledAttention(library, {0: views_of(scene, shape)})
        attention.begin(batch_of(scene, shape, 0))
        rows = new_rows(scene, scene.keys), new_rows(scene, scene.values)
        found.append(attention.run(0, scene.q, *rows, AttentionSpec(0.125)))
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_heads_that_are_no_whole_vectors_go_to_torch(library: HostLibrary) -> None:
    """A head of 20 elements is not read in vectors; the result is the torch twin's, bit for bit."""
    shape = Shape(4, 2, 20, 20, torch.float32, 4)
    scene = make_scene([(9, 1), (0, 5)], shape, 0)
    found = []
    for make in (lambda views: CompiledAttention(library, views), HostAttention):
        attention = make({0: views_of(scene, shape)})
        attention.begin(batch_of(scene, shape, 0))
        rows = new_rows(scene, scene.keys), new_rows(scene, scene.values)
        found.append(attention.run(0, scene.q, *rows, AttentionSpec(0.2)))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_row_operations_equal_torch(library: HostLibrary, dtype: torch.dtype, tokens: int) -> None:
    """Norm with and without a sum before it, rotation in place, gate: the same roundings, bit for bit in bfloat16
    but for sums whose order differs."""
    chance = torch.Generator().manual_seed(tokens)
    draw = lambda *size: (torch.randn(size, generator=chance) * 3).to(dtype)  # noqa: E731
    ours, theirs = CompiledRows(library), TorchRows()
    tolerance = {"atol": TOLERANCE[dtype], "rtol": 8e-3 if dtype == torch.bfloat16 else 1e-5}
    x, y, weight = draw(tokens, 96), draw(tokens, 96), draw(96)
    for added in (None, y):
        mine, other = x.clone(), x.clone()
        normed, expected = ours.add_norm(mine, added, weight, 1e-5), theirs.add_norm(other, added, weight, 1e-5)
        torch.testing.assert_close(normed, expected, **tolerance)
        assert torch.equal(mine, other)
    qkv, positions, cos, sin = draw(tokens, 5, 64), torch.arange(tokens) % 7, draw(7, 64), draw(7, 64)
    turned = theirs.turn(qkv[:, :4], positions, cos, sin)
    kept = qkv[:, 4].clone()
    got = ours.turn(qkv[:, :4], positions, cos, sin)
    torch.testing.assert_close(got, turned, **tolerance)
    assert torch.equal(qkv[:, 4], kept)
    gate_up = draw(tokens, 64)
    torch.testing.assert_close(ours.gate(gate_up), theirs.gate(gate_up.clone()), **tolerance)


def test_gates_far_from_zero(library: HostLibrary) -> None:
    """silu of very large and very small values: no infinity, no NaN, the limits of the function."""
    gate = torch.tensor([-1e4, -200.0, -100.0, -88.0, -87.0, -1e-30, 0.0, 1e-30, 87.0, 88.0, 89.0, 200.0, 1e4, 1, 2, 3])
    got = CompiledRows(library).gate(torch.cat((gate, torch.ones(16)))[None])[0]
    torch.testing.assert_close(got, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-30)


def test_sizes_decide_who_computes(library: HostLibrary) -> None:
    """Rows of whole vectors go to the library, others, other dtypes, and a missing library to torch."""
    bf16 = torch.bfloat16
    assert isinstance(row_ops(library, bf16, (576, 1536), 64), CompiledRows)
    for choice in (
        row_ops(None, bf16, (576,), 64),
        row_ops(library, torch.float16, (576,), 64),
        row_ops(library, bf16, (570,), 64),
        row_ops(library, bf16, (576,), 16),
    ):
        assert isinstance(choice, TorchRows)


def test_a_library_is_built_once(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second load finds the first one's file and builds nothing; no half-built file stays."""
    names = [path.name for path in built.iterdir()]
    assert len(names) == 1
    assert names[0].endswith(".so")
    monkeypatch.setattr(host_library, "_build", lambda *_: pytest.fail("built again"))
    load(built)


@pytest.mark.parametrize("damage", ["cut", "zeroed", "empty", "foreign", "none"])
def test_a_damaged_library_is_built_again(
    tmp_path: Path, built: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short, with a page of zeros, empty, or another file: it is not loaded, and the next one serves."""
    whole = next(built.iterdir())
    data = whole.read_bytes()
    kept = {
        "cut": data[: len(data) // 2],
        "zeroed": data[:4096] + bytes(4096) + data[8192:],
        "empty": b"",
        "foreign": b"\x7fELF" * 100,
        "none": data,
    }
    builds: list[Path] = []

    def build(compiler: str, flags: list[str], target: Path) -> None:
        target.unlink()
        target.write_bytes(data)
        builds.append(target)

    monkeypatch.setattr(host_library, "_build", build)
    (tmp_path / whole.name).write_bytes(kept[damage])
    x = torch.ones(1, 16)
    assert load(tmp_path).add_norm(x, None, torch.ones(16), 0.0).tolist() == [[1.0] * 16]
    assert builds == ([] if damage == "none" else [tmp_path / whole.name])


def test_nothing_is_loaded_from_a_directory_that_others_write(tmp_path: Path) -> None:
    """It would be their code."""
    tmp_path.chmod(0o777)
    with pytest.raises(Unavailable, match=r"writable by others|no C compiler"):
        load(tmp_path)


def test_a_larger_layer_between_two_of_one_plan(library: HostLibrary) -> None:
    """Layers of two bands whose heads differ: each call works in scratch memory that is alive."""
    small, large = Shape(2, 1, 16, 16, torch.float32, 16), Shape(64, 8, 256, 256, torch.float32, 16)
    scenes = [make_scene([(40, 1)], shape, 0, seed) for seed, shape in enumerate((small, large))]
    batches = [batch_of(scene, shape, 0) for scene, shape in zip(scenes, (small, large), strict=True)]
    views = [views_of(scene, shape) for scene, shape in zip(scenes, (small, large), strict=True)]
    attention = CompiledAttention(library, {0: views[0], 1: views[1]._replace(band=1), 2: views[0]})
    attention.begin(batches[0]._replace(bands=(batches[0].bands[0], batches[1].bands[0])))
    for layer, at in ((0, 0), (1, 1), (2, 0)):
        scene = scenes[at]
        got = attention.run(
            layer, scene.q, new_rows(scene, scene.keys), new_rows(scene, scene.values), AttentionSpec(0.2)
        )
        torch.testing.assert_close(got.double(), dense_attention(scene, 0.2, 0, 0.0, None), atol=1e-5, rtol=1e-5)
        alive = attention._scratch
        assert attention._plans[at, 0].arguments.scratch == alive.data_ptr()
        assert attention._plans[at, 0].arguments.scratch_floats <= alive.numel()


def test_without_a_compiler_torch_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` says why; `compiled` is refused; `torch` does not look."""
    monkeypatch.setenv("BANDMASTER_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled.choose_library("auto", torch.float32) == (None, "torch: this machine has no C compiler")
    with pytest.raises(BadOption, match="no C compiler"):
        compiled.choose_library("compiled", torch.float32)
    assert compiled.choose_library("torch", torch.float32) == (None, "torch: asked for")
    with pytest.raises(BadOption, match="fast"):
        compiled.choose_library("fast", torch.float32)


def test_a_dtype_without_compiled_kernels_is_torchs(library: HostLibrary) -> None:
    """The boot says so."""
    assert compiled.choose_library("auto", torch.float16) == (None, "torch: the compiled kernels have no float16")
    with pytest.raises(BadOption, match="float16"):
        compiled.choose_library("compiled", torch.float16)


def test_values_of_another_dtype_are_never_taken_as_the_arenas(library: HostLibrary) -> None:
    """float32 values for a bfloat16 arena are torch's to judge, and it refuses them."""
    shape = Shape(4, 2, 32, 32, torch.bfloat16, 16)
    scene = make_scene([(9, 1)], shape, 0)
    batch = batch_of(scene, shape, 0)
    k, v = new_rows(scene, scene.keys), new_rows(scene, scene.values)
    attention = CompiledAttention(library, {0: views_of(scene, shape)})
    attention.begin(batch)
    with pytest.raises(RuntimeError, match="dtype"):
        attention.run(0, scene.q, k, v.float(), AttentionSpec(0.2))


def test_a_compiler_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler printed is in the reason, and nothing is left in the cache."""
    fake = tmp_path / "bin" / "cc"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such flag" >&2\nexit 3\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(fake.parent))
    with pytest.raises(Unavailable, match="failed with 3: no such flag"):
        load(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
