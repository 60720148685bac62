"""Runs in a process of its own with TRITON_INTERPRET=1: every kernel against its torch twin, one case per line.

Prints one line `name ok` or `name WRONG detail` for each case; an out-of-bounds access ends this process, not pytest's.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allocator.columns import pack_i32, pack_i64
from allocator.effects import Bind, Copy, HostRead, HostWrite, Zero
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from daemon.rank.batch import BandPages, Batch
from daemon.rank.device import HostDevice
from daemon.rank.executor import Executor
from daemon.rank.host_pool import HostPool
from daemon.rank.paged_attention import AttentionSpec, HostAttention, LayerViews
from daemon.rank.sampling_table import SamplingTable
from daemon.rank.triton_ops import TritonAttention, TritonUnits
from kernels import attention_decode, attention_prefill, reference, sampling, store_rows, units
from kernels.attention_block import blocks
from tests.kernels.scenes import Scene, Shape, dense_attention, make_scene, planes

NO_RESERVE = 0x4000  # Linux: address space without memory behind it until it is touched
PAIR = np.array([[4, 6], [9, 3]], dtype=np.int32)  # sources and targets


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WORST: dict[torch.dtype, float] = {}  # largest error of any attention case, for the report


class Rules(NamedTuple):
    """How a layer attends; `sunk`: with sinks."""

    window: int = 0
    softcap: float = 0.0
    sunk: bool = False

    def sinks(self, heads: int) -> Tensor | None:
        """Sinks that weigh as much as a few keys."""
        return torch.linspace(-1.0, 3.0, heads) if self.sunk else None


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> str:
    """Empty when equal within the rounding of the dtype (bfloat16 is truncated here), else the largest error."""
    tolerance = 2e-5 if dtype == F32 else 2e-2
    error = (got.double() - want.double()).abs().max().item() if got.numel() else 0.0
    WORST[dtype] = max(WORST.get(dtype, 0.0), error)
    return "" if error <= tolerance else f"largest error {error:.3e}, allowed {tolerance:.0e}"


def ints(*columns: NDArray[np.integer]) -> list[Tensor]:
    """int32 copies of host columns."""
    return [torch.from_numpy(column.astype(np.int32)) for column in columns]


def decode(lengths: list[int], shape: Shape, rules: Rules = Rules(), split: int = 512) -> str:
    """Paged decode attention against dense attention in float64."""
    made = make_scene([(length - 1, 1) for length in lengths], shape, rules.window, seed=1)
    return decode_scene(made, shape, rules, split)


def decode_scene(made: Scene, shape: Shape, rules: Rules, split: int) -> str:
    """A scene whose rows have one query each."""
    longest = int((made.starts + made.counts).max())
    tables, first, contexts = ints(made.tables, made.first, made.starts + made.counts)
    sinks = rules.sinks(shape.heads)
    views = (made.k_view, made.v_view)
    got = attention_decode.attention_decode(
        made.q, *views, tables, first, contexts, longest, 0.25, rules.window, rules.softcap, sinks, True, split
    )
    return close(got, dense_attention(made, 0.25, rules.window, rules.softcap, sinks), shape.dtype)


def extend(rows: list[tuple[int, int]], shape: Shape, rules: Rules = Rules()) -> str:
    """Paged extend attention of (start, count) rows against dense attention in float64."""
    return extend_scene(make_scene(rows, shape, rules.window, seed=2), shape, rules)


def extend_scene(made: Scene, shape: Shape, rules: Rules) -> str:
    """A scene whose rows have any number of queries."""
    tables, first, starts, counts, offsets = ints(made.tables, made.first, made.starts, made.counts, made.offsets[:-1])
    row_ids, firsts = attention_prefill.tiles_of(made.counts.tolist(), blocks(made.k_view, made.v_view)[1])
    tiles = (torch.tensor(row_ids, dtype=torch.int32), torch.tensor(firsts, dtype=torch.int32))
    sinks = rules.sinks(shape.heads)
    views, places = (made.k_view, made.v_view), (tables, first, starts, counts, offsets, tiles)
    got = attention_prefill.attention_prefill(
        made.q, *views, *places, 0.3, rules.window, rules.softcap, sinks, upcast=True
    )
    return close(got, dense_attention(made, 0.3, rules.window, rules.softcap, sinks), shape.dtype)


def store(dtype: torch.dtype) -> str:
    """Rows land where the twin puts them and nowhere else."""
    shape = Shape(3, 3, 7, 7, dtype, 5)
    mine, twin = (planes(9, shape, torch.Generator().manual_seed(7))[0] for _ in range(2))
    for view in (mine, twin):
        view.copy_(torch.arange(view.numel()).view(view.shape))
    values = torch.randn(4, 6, 7, generator=torch.Generator().manual_seed(8)).to(dtype)[:, ::2]
    pages, slots = torch.tensor([3, 8, 3, 1], dtype=torch.int32), torch.tensor([4, 0, 1, 2], dtype=torch.int32)
    store_rows.store_rows(mine, values, pages, slots)
    reference.store_rows(twin, values, pages, slots)
    return "" if torch.equal(mine, twin) else "other elements than the twin's"


def move(unit_bytes: int, sources: list[int], targets: list[int], zeroed: list[int]) -> str:
    """Copy and zero whole units, byte for byte; 24 bytes at the end belong to no unit."""
    count = max(*sources, *targets, *zeroed) + 2
    start = torch.randint(1, 255, (unit_bytes * count + 24,), dtype=torch.uint8)
    mine, twin = start.clone(), start.clone()
    columns = [torch.tensor(ids, dtype=torch.int32) for ids in (sources, targets, zeroed)]
    for arena, module in ((mine, units), (twin, reference)):
        module.copy_units(arena, columns[0], columns[1], unit_bytes)
        module.zero_units(arena, columns[2], unit_bytes)
    if not torch.equal(mine[:unit_bytes], start[:unit_bytes]):
        return "unit 0 was written"
    return "" if torch.equal(mine, twin) else "other bytes than the twin's"


def many() -> str:
    """Every second unit of 900 to the one behind it, in a shuffled order, then a third of them zeroed."""
    order = torch.randperm(449, generator=torch.Generator().manual_seed(9)) * 2 + 1
    return move(256, order.tolist(), (order + 1).tolist(), order[:150].tolist())


def far(unit_bytes: int, arena_bytes: int) -> str:
    """Units behind `arena_bytes`: addresses are 64 bits wide. What lies before them is never touched."""
    first = arena_bytes // unit_bytes + 1
    region = mmap.mmap(-1, (first + 3) * unit_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    arena = torch.frombuffer(region, dtype=torch.uint8)
    unit = [arena[(first + at) * unit_bytes : (first + at + 1) * unit_bytes] for at in range(3)]
    unit[0].copy_(torch.randint(1, 255, (unit_bytes,), dtype=torch.uint8))
    unit[2].fill_(7)
    one = torch.tensor([first], dtype=torch.int32)
    units.copy_units(arena, one, one + 1, unit_bytes)
    units.zero_units(arena, one + 2, unit_bytes)
    if not torch.equal(unit[0], unit[1]) or not unit[0].all():
        return "the far unit was not copied"
    if unit[2].any():
        return "the far unit was not zeroed"
    return "unit 0 was written" if arena[:unit_bytes].any() else ""


def far_planes(shape: Shape, units: int) -> tuple[Tensor, Tensor]:
    """K and V views of zeros whose units lie 2^27 elements apart: those from 32 on cannot be reached by 32 bits, which
    lead to the ones from 0 on. Memory stands only behind what is touched."""
    unit, item = 1 << 27, shape.dtype.itemsize
    region = mmap.mmap(-1, units * unit * item, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    arena, begin, views = torch.frombuffer(region, dtype=shape.dtype), 0, []
    for dim in (shape.k_dim, shape.v_dim):
        strides = (unit, shape.kv_heads * dim, dim, 1)
        views.append(arena.as_strided((units, shape.page, shape.kv_heads, dim), strides, begin))
        begin += shape.page * shape.kv_heads * dim
    return views[0], views[1]


def far_attention(rows: list[tuple[int, int]]) -> str:
    """Rows whose pages lie beyond 2^32 elements, stored and attended: as decode steps where each has one query."""
    shape = Shape(4, 2, 16, 32, F16, 4)
    made = make_scene(rows, shape, 0, seed=5)
    views = far_planes(shape, 33 + int(made.tables.max()))
    (tables,) = ints(made.tables + 32)  # every page, the unused entries too: no kernel reads those
    for view, dense in ((views[0], made.keys), (views[1], made.values)):
        for ids, data in zip(tables, dense, strict=True):
            position = torch.arange(data.shape[0])
            store_rows.store_rows(view, data, ids[position // shape.page], (position % shape.page).int())
        if view[:32].any():
            return "a near page was written"
    far = made._replace(tables=tables.numpy(), k_view=views[0], v_view=views[1])
    return decode_scene(far, shape, Rules(), 512) if made.counts.max() == 1 else extend_scene(far, shape, Rules())


def table(count: int) -> str:
    """An id table updated in `count` places; all others keep what they had."""
    chance = torch.Generator().manual_seed(10)
    mine = torch.randint(0, 1 << 30, (3 * count + 1,), dtype=torch.int32, generator=chance)
    twin = mine.clone()
    virtual = (torch.randperm(3 * count, generator=chance)[:count] + 1).int()
    physical = torch.randint(0, 1 << 30, (count,), dtype=torch.int32, generator=chance)
    for one, module in ((mine, units), (twin, reference)):
        module.update_table(one, virtual, physical)
    return "" if torch.equal(mine, twin) else "other entries than the twin's"


def drawn(vocab: int, dtype: torch.dtype, limits: tuple[float, int, float] | None = None, rows: int = 5) -> str:
    """Tokens equal to the twin's, greedy rows among them; `limits`: min-p, top-k and top-p of some of the rows."""
    chance = torch.Generator().manual_seed(8)
    logits = (torch.randn(rows, vocab, generator=chance) * 2).to(dtype)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 3.0, 1.0]).repeat(rows // 5)
    keys = torch.randint(-(1 << 31), (1 << 31) - 1, (rows, 2), generator=chance).int()
    keys[:5] = torch.tensor([[1, 2], [3, -4], [-(1 << 31), (1 << 31) - 1], [7, 8], [9, -10]])
    columns: list[Tensor] = []
    if limits is not None:
        columns = [torch.tensor([limits[at]] * (rows - 1) + [(0.0, 0, 1.0)[at]]) for at in range(3)]
        columns[1] = columns[1].int()
    got = sampling.sample(logits, keys, temperatures, *columns)
    want = reference.sample(logits, keys, temperatures, *columns)
    return "" if torch.equal(got, want) else f"{got.tolist()} for {want.tolist()}"


def rank_batch(rows: list[tuple[int, int]], shape: Shape, windows: tuple[int, ...]) -> tuple[list[Scene], Batch]:
    """A rank's batch of (start, count) rows over bands with these windows, and every band's scene."""
    scenes = [make_scene(rows, shape, window, seed=4) for window in windows]
    starts, counts, offsets = scenes[0][:3]
    owner = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1] - starts, counts)
    bands = []
    for made, window in zip(scenes, windows, strict=True):
        pages = made.tables[owner, positions // shape.page - made.first[owner]].astype(np.int64)
        bands.append(BandPages(made.first, made.tables, pages, window))
    none = np.zeros(0, dtype=np.int64)
    batch = Batch(
        seq=1,
        rows=np.arange(len(rows), dtype=np.int32),
        generations=starts,
        starts=starts,
        counts=counts,
        offsets=offsets,
        tokens=positions,
        positions=positions,
        write_slots=positions % shape.page,
        bands=tuple(bands),
        slots=none,
        sampled=none,
        carried=none,
        sampling=SamplingTable(1),
        page_size=shape.page,
    )
    return scenes, batch


def rank_attention(dtype: torch.dtype) -> str:
    """A rank's attention over a mixed batch in a full and a window band: the GPU's version stores and attends as the
    CPU's does, in both, and where a layer sees less than its band keeps."""
    scenes, batch = rank_batch([(12, 1), (0, 1), (33, 1), (0, 9), (20, 6)], Shape(6, 2, 16, 16, dtype, 4), (0, 10))
    chance = torch.Generator().manual_seed(11)
    new_k, new_v = (torch.randn(batch.positions.size, 2, 16, generator=chance).to(dtype) for _ in "kv")
    sinks = torch.linspace(-1.0, 2.0, 6)
    specs = [AttentionSpec(0.3), AttentionSpec(0.3, 10, 4.0, sinks), AttentionSpec(0.3, 7)]
    answers = []
    for made_by in (lambda views: TritonAttention(views, upcast=True), HostAttention):
        views = {}
        for layer, band in enumerate((0, 1, 1)):
            k, v = (view.clone() for view in scenes[band][5:7])
            views[layer] = LayerViews(k, v, k.flatten(1), v.flatten(1), 2, band)
        attention = made_by(views)
        attention.begin(batch)
        found = [attention.run(layer, scenes[0].q, new_k, new_v, spec) for layer, spec in enumerate(specs)]
        answers.append((found, [one for view in views.values() for one in view[:2]]))
    mine, theirs = answers
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine[1], theirs[1], strict=True)):
        return "stored rows differ"
    errors = [close(a, b, dtype) for a, b in zip(mine[0], theirs[0], strict=True)]
    return next(filter(None, errors), "")


def rank_units() -> str:
    """A rank's effects on two bands: the GPU's units leave the bytes, slots and tables that the CPU's device leaves."""
    stage = StageGeometry(256 * 12, 512, [BandGeometry("state", "state", 512), BandGeometry("full", "full", 256)])
    start = np.random.default_rng(3).integers(0, 255, 256 * 12, dtype=np.uint8)
    data = torch.from_numpy(start.copy())
    pools = [HostPool(stage, 3), HostPool(stage, 3)]
    mine, theirs = TritonUnits(stage, data, pools[0]), HostDevice(stage, start.copy(), pools[1])
    ids = Geometry(4, 9, 4, [stage])
    executor = Executor(ids, 0, theirs, [0, 0])
    mine.open_tables([np.zeros(5, dtype=np.int32), np.zeros(10, dtype=np.int32)])
    mine.to_host(1, 1, PAIR[0], np.array([2, 0]))
    mine.copy(1, *PAIR)
    mine.copy(0, *PAIR[:, :1] // 3)
    mine.zero(1, PAIR[0])
    mine.zero(1, PAIR[0, :0])
    mine.bind(1, PAIR[0], PAIR[1])
    mine.bind(1, PAIR[0, :0], PAIR[0, :0])
    mine.from_host(2, 1, PAIR[0, ::-1], np.array([2, 0]))
    sources, targets, slots = pack_i32(PAIR[0]), pack_i32(PAIR[1]), pack_i64([2, 0])
    executor.execute(
        [
            HostRead(1, 1, sources, slots),
            Copy(1, sources, targets),
            Copy(0, pack_i32(PAIR[0, :1] // 3), pack_i32(PAIR[1, :1] // 3)),
            Zero(1, sources),
            Bind(1, sources, targets),
            HostWrite(2, 1, pack_i32(PAIR[0, ::-1]), slots),
        ]
    )
    if not np.array_equal(data.numpy(), theirs.arena.data):
        return "other bytes than the CPU's"
    if not np.array_equal(pools[0].rows(1), pools[1].rows(1)):
        return "other host slots than the CPU's"
    return "" if np.array_equal(mine.tables[1].numpy(), executor.tables[1]) else "another id table than the CPU's"


def shape(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, page: int, v_dim: int = 0) -> Shape:
    """A layer's shape; values are as wide as keys unless told."""
    return Shape(heads, kv_heads, dim, v_dim or dim, dtype, page)


CASES: dict[str, Callable[[], str]] = {
    "decode-one-key": lambda: decode([1], shape(2, 1, 16, F32, 4)),
    "decode-odd": lambda: decode([1, 7, 45, 16], shape(6, 2, 20, F32, 3, 36)),
    "decode-split": lambda: decode([70, 9, 64], shape(9, 3, 16, F32, 4), split=32),
    "decode-bf16": lambda: decode([33, 5], shape(4, 2, 32, BF16, 16)),
    "decode-f16": lambda: decode([33, 5], shape(4, 4, 32, F16, 16), split=16),
    "decode-window": lambda: decode([1, 7, 45, 16], shape(6, 2, 72, F32, 3), Rules(window=5)),
    "decode-window-one": lambda: decode([1, 9], shape(2, 2, 16, F32, 4), Rules(window=1)),
    "decode-window-split": lambda: decode([90, 71, 70, 3], shape(2, 1, 80, F32, 16), Rules(window=70), split=32),
    "decode-window-in-a-page": lambda: decode([130, 128, 6], shape(2, 1, 16, F32, 128), Rules(window=5)),
    "decode-window-wider": lambda: decode([9, 20], shape(2, 1, 16, F32, 1), Rules(window=64)),
    "decode-sinks": lambda: decode([40, 1], shape(16, 1, 96, F32, 16), Rules(sunk=True), split=16),
    "decode-cap": lambda: decode([40, 3], shape(32, 2, 16, F32, 16), Rules(softcap=3.0)),
    "decode-all-bf16": lambda: decode([50, 17], shape(16, 1, 64, BF16, 64), Rules(9, 20.0, True), split=16),
    "decode-256-f32": lambda: decode([21, 40], shape(4, 2, 256, F32, 16), Rules(20)),
    "decode-256-f16": lambda: decode([21, 40], shape(4, 2, 256, F16, 16), Rules(16, 0.0, True)),
    "decode-many-splits": lambda: decode([700, 3, 257], shape(2, 1, 16, F32, 4), Rules(sunk=True), split=16),
    "decode-many-splits-no-sinks": lambda: decode([530, 1], shape(2, 1, 20, F32, 16, 36), split=16),
    "extend-fresh": lambda: extend([(0, 1), (0, 37)], shape(2, 1, 16, F32, 4)),
    "extend-prefix": lambda: extend([(11, 5), (64, 1), (3, 33)], shape(6, 2, 20, F32, 3, 36)),
    "extend-bf16": lambda: extend([(6, 9)], shape(4, 2, 32, BF16, 16)),
    "extend-window": lambda: extend([(11, 5), (64, 1), (3, 40)], shape(2, 1, 72, F32, 3), Rules(window=5)),
    "extend-window-one": lambda: extend([(0, 3), (9, 34)], shape(2, 2, 16, F32, 4), Rules(window=1)),
    "extend-window-in-a-page": lambda: extend([(126, 4), (5, 2)], shape(1, 1, 16, F32, 128), Rules(window=3)),
    "extend-window-wider": lambda: extend([(9, 20), (0, 2)], shape(2, 1, 16, F32, 1), Rules(window=64)),
    "extend-window-block": lambda: extend([(70, 65)], shape(1, 1, 16, F32, 16), Rules(window=33)),
    "extend-sinks": lambda: extend([(9, 12), (0, 1)], shape(4, 1, 96, F32, 16), Rules(sunk=True)),
    "extend-cap": lambda: extend([(0, 34)], shape(2, 1, 80, F32, 16), Rules(softcap=3.0)),
    "extend-all-bf16": lambda: extend([(20, 35)], shape(2, 1, 64, BF16, 64), Rules(9, 20.0, True)),
    "extend-128-f32": lambda: extend([(20, 35)], shape(2, 2, 128, F32, 16), Rules(9, 20.0, True)),
    "extend-256-f32": lambda: extend([(20, 18)], shape(2, 1, 256, F32, 16), Rules(9)),
    "extend-256-f16": lambda: extend([(20, 5)], shape(2, 1, 256, F16, 16), Rules(16, 0.0, True)),
    "store-f32": lambda: store(torch.float32),
    "store-bf16": lambda: store(torch.bfloat16),
    "units-small": lambda: move(256, [2, 3, 8], [5, 1, 4], [2, 7]),
    "units-odd": lambda: move(768, [6, 1], [2, 9], [1, 4]),
    "units-blocks": lambda: move(17 * 1024 + 256, [2, 3, 8], [5, 1, 4], [2, 7]),
    "units-repeated-source": lambda: move(2304, [3, 3, 3], [1, 7, 2], [4]),
    "units-many": many,
    "units-far-bytes": lambda: far(1 << 20, 1 << 31),
    "units-far-words": lambda: far(33 * 256, 1 << 34),
    "decode-far": lambda: far_attention([(12, 1), (5, 1)]),
    "extend-far": lambda: far_attention([(6, 3), (0, 5)]),
    "table-one": lambda: table(1),
    "table-block": lambda: table(units.BLOCK_PAIRS),
    "table-odd": lambda: table(2 * units.BLOCK_PAIRS + 77),
    "sample-f32": lambda: drawn(2500, torch.float32),
    "sample-bf16": lambda: drawn(37, torch.bfloat16),
    "sample-min-p": lambda: drawn(700, F32, (0.2, 0, 1.0), 20),
    "sample-top-k": lambda: drawn(700, F32, (0.0, 5, 1.0), 20),
    "sample-top-k-equals": lambda: drawn(700, BF16, (0.0, 17, 1.0), 20),
    "sample-top-k-all": lambda: drawn(60, F32, (0.0, 60, 1.0), 10),
    "sample-top-p": lambda: drawn(700, F32, (0.0, 0, 0.6), 20),
    "sample-top-p-none": lambda: drawn(60, F32, (0.0, 0, 0.0), 10),
    "sample-limits": lambda: drawn(5000, F32, (0.01, 40, 0.9), 10),
    "sample-limits-bf16": lambda: drawn(4097, BF16, (0.05, 300, 0.5), 5),
    "rank-attention-f32": lambda: rank_attention(torch.float32),
    "rank-attention-bf16": lambda: rank_attention(torch.bfloat16),
    "rank-units": rank_units,
}


def main() -> int:
    """Run the cases named, or all; 1 when one is wrong."""
    wrong = 0
    for name in sys.argv[1:] or CASES:
        detail = CASES[name]()
        print(f"{name} WRONG {detail}" if detail else f"{name} ok", flush=True)
        wrong += bool(detail)
    for dtype, error in WORST.items():
        print(f"largest error {dtype} {error:.2e}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
