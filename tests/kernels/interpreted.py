"""Runs in a process of its own with TRITON_INTERPRET=1: every kernel against its torch twin, one case per line.

Prints one line `name ok` or `name WRONG detail` for each case; an out-of-bounds access ends this process, not pytest's.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable

import numpy as np
import torch
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

NO_RESERVE = 0x4000  # Linux: address space without memory behind it until it is touched
PAIR = np.array([[4, 6], [9, 3]], dtype=np.int32)  # sources and targets


def paged(units_count: int, page: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """K and V views over one uint8 arena with a gap between units, as a rank lays them out; bytes between are noise."""
    chance = torch.Generator().manual_seed(seed)
    plane = page * kv_heads * dim * dtype.itemsize
    unit = -(-2 * plane // 256) * 256 + 256
    arena = torch.randint(0, 255, (units_count * unit,), dtype=torch.uint8, generator=chance)
    views = []
    for offset in (0, plane):
        typed = arena.view(dtype)
        strides = (unit // dtype.itemsize, kv_heads * dim, dim, 1)
        view = torch.as_strided(typed, (units_count, page, kv_heads, dim), strides, offset // dtype.itemsize)
        view.copy_(torch.randn(view.shape, generator=chance))
        views.append(view)
    return views[0], views[1]


def close(got: Tensor, want: Tensor, tolerance: float) -> str:
    """Empty when equal within the tolerance, else the largest error."""
    error = (got.float() - want.float()).abs().max().item() if got.numel() else 0.0
    return "" if error <= tolerance else f"largest error {error:.3e}, allowed {tolerance:.0e}"


def tables_of(lengths: list[int], page: int, units_count: int, seed: int) -> Tensor:
    """Random pages without repetition, 0 behind a row's end."""
    order = (torch.randperm(units_count - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    widest = -(-max(lengths) // page)
    rows = []
    for length in lengths:
        needed = -(-length // page)
        rows.append([order.pop() for _ in range(needed)] + [0] * (widest - needed))
    return torch.tensor(rows, dtype=torch.int32)


def decode(lengths: list[int], page: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, split: int) -> str:
    """Paged decode attention against the twin."""
    k, v = paged(40, page, kv_heads, dim, dtype, seed=1)
    tables = tables_of(lengths, page, 40, seed=2)
    q = torch.randn(len(lengths), heads, dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    counts = torch.tensor(lengths, dtype=torch.int32)
    got = attention_decode.attention_decode(q, k, v, tables, counts, 0.25, max(lengths), True, split)
    want = reference.paged_attention(q.float(), k.float(), v.float(), tables, counts - 1, torch.ones_like(counts), 0.25)
    return close(got, want, 2e-5 if dtype == torch.float32 else 2e-2)


def extend(rows: list[tuple[int, int]], page: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> str:
    """Paged extend attention of (start, count) rows against the twin."""
    k, v = paged(60, page, kv_heads, dim, dtype, seed=4)
    tables = tables_of([start + count for start, count in rows], page, 60, seed=5)
    starts, counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    offsets = (counts.cumsum(0) - counts).int()
    q = torch.randn(int(counts.sum()), heads, dim, generator=torch.Generator().manual_seed(6)).to(dtype)
    row_ids, firsts = attention_prefill.tiles_of(counts.tolist())
    tiles = (torch.tensor(row_ids, dtype=torch.int32), torch.tensor(firsts, dtype=torch.int32))
    got = attention_prefill.attention_prefill(q, k, v, tables, starts, counts, offsets, tiles, 0.3, upcast=True)
    want = reference.paged_attention(q.float(), k.float(), v.float(), tables, starts, counts, 0.3)
    return close(got, want, 2e-5 if dtype == torch.float32 else 2e-2)


def store(dtype: torch.dtype) -> str:
    """Rows land where the twin puts them and nowhere else."""
    mine, _ = paged(9, 5, 3, 7, dtype, seed=7)
    twin, _ = paged(9, 5, 3, 7, dtype, seed=7)
    values = torch.randn(4, 6, 7).to(dtype)[:, ::2]
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


def drawn(vocab: int, dtype: torch.dtype) -> str:
    """Tokens equal to the twin's, greedy rows among them."""
    logits = (torch.randn(5, vocab, generator=torch.Generator().manual_seed(8)) * 2).to(dtype)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 3.0, 1.0])
    keys = torch.tensor([[1, 2], [3, -4], [-(1 << 31), (1 << 31) - 1], [7, 8], [9, -10]], dtype=torch.int32)
    got, want = sampling.sample(logits, temperatures, keys), reference.sample(logits, temperatures, keys)
    return "" if torch.equal(got, want) else f"{got.tolist()} for {want.tolist()}"


def rank_attention(dtype: torch.dtype) -> str:
    """A rank's attention over a mixed batch: the GPU's version stores and attends as the CPU's does."""
    rows, page, heads, kv_heads, dim = [(12, 1), (0, 1), (33, 1), (0, 9), (20, 6)], 4, 6, 2, 16
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    tables = tables_of((starts + counts).tolist(), page, 60, seed=5).numpy()
    owner = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1] - starts, counts)
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
        write_slots=positions % page,
        bands=(BandPages(0 * starts, tables, tables[owner, positions // page].astype(np.int64), 0),),
        slots=none,
        sampled=none,
        carried=none,
        sampling=SamplingTable(1),
        page_size=page,
    )
    chance = torch.Generator().manual_seed(11)
    q = torch.randn(positions.size, heads, dim, generator=chance).to(dtype)
    new_k, new_v = (torch.randn(positions.size, kv_heads, dim, generator=chance).to(dtype) for _ in "kv")
    outputs = []
    for made in (lambda views: TritonAttention(views, upcast=True), HostAttention):
        k, v = paged(60, page, kv_heads, dim, dtype, seed=4)
        k[0], v[0] = 0, 0
        attention = made({0: LayerViews(k, v, k.flatten(1), v.flatten(1), kv_heads, 0)})
        attention.begin(batch)
        outputs.append((attention.run(0, q, new_k, new_v, AttentionSpec(0.3)), k, v))
    if not (torch.equal(outputs[0][1], outputs[1][1]) and torch.equal(outputs[0][2], outputs[1][2])):
        return "stored rows differ"
    return close(outputs[0][0], outputs[1][0], 2e-5 if dtype == torch.float32 else 2e-2)


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


CASES: dict[str, Callable[[], str]] = {
    "decode-one-key": lambda: decode([1], 4, 2, 1, 16, torch.float32, 512),
    "decode-weird": lambda: decode([1, 7, 45, 16], 3, 6, 2, 20, torch.float32, 512),
    "decode-split": lambda: decode([70, 9, 64], 4, 9, 3, 16, torch.float32, 32),
    "decode-bf16": lambda: decode([33, 5], 16, 4, 2, 32, torch.bfloat16, 512),
    "decode-f16": lambda: decode([33, 5], 16, 4, 4, 32, torch.float16, 16),
    "extend-fresh": lambda: extend([(0, 1), (0, 37)], 4, 2, 1, 16, torch.float32),
    "extend-prefix": lambda: extend([(11, 5), (64, 1), (3, 33)], 3, 6, 2, 20, torch.float32),
    "extend-bf16": lambda: extend([(6, 9)], 16, 4, 2, 32, torch.bfloat16),
    "store-f32": lambda: store(torch.float32),
    "store-bf16": lambda: store(torch.bfloat16),
    "units-small": lambda: move(256, [2, 3, 8], [5, 1, 4], [2, 7]),
    "units-odd": lambda: move(768, [6, 1], [2, 9], [1, 4]),
    "units-blocks": lambda: move(17 * 1024 + 256, [2, 3, 8], [5, 1, 4], [2, 7]),
    "units-repeated-source": lambda: move(2304, [3, 3, 3], [1, 7, 2], [4]),
    "units-many": many,
    "units-far-bytes": lambda: far(1 << 20, 1 << 31),
    "units-far-words": lambda: far(33 * 256, 1 << 34),
    "table-one": lambda: table(1),
    "table-block": lambda: table(units.BLOCK_PAIRS),
    "table-odd": lambda: table(2 * units.BLOCK_PAIRS + 77),
    "sample-f32": lambda: drawn(2500, torch.float32),
    "sample-bf16": lambda: drawn(37, torch.bfloat16),
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
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
