"""`bandmaster bench kernels`: what each kernel of this machine moves and computes a second, at stated shapes.

Owns the cases. On a CPU both host forms of attention (torch and, where it can be built, the compiled one) and the torch
forms of the rest; on a GPU the Triton kernels. Must never quote a rate alone: a measured copy and a measured product of
the same turn stand above, and what a case must read and write at least counts, not what it happens to touch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from daemon.rank.batch import BandPages, Batch
from daemon.rank.compiled import choose_library
from daemon.rank.compiled_attention import CompiledAttention
from daemon.rank.dtypes import BY_NAME
from daemon.rank.noise import row_keys
from daemon.rank.paged_attention import AttentionSpec, HostAttention, LayerViews, PagedAttention
from daemon.rank.sampler import draw_on_host
from daemon.rank.sampling_table import SamplingTable
from daemon.rank.states import TORCH_OPS, StateOps
from kernels import reference
from kernels.host_library import LANES
from kernels.state_rows import Chunks, Singles, plan_rows
from tools.tables import print_table

PAGE_SIZE = 16
COPY_BYTES = 64 << 20
PRODUCT_SIZE = 1024
UNIT_BYTES = 360 << 10  # a page of 16 tokens of 30 layers with 3 K/V heads of 64 in bfloat16
UNITS = 64
VOCABULARY = 49152


class Heads(NamedTuple):
    """A layer's heads: of queries, of keys and values, and their size."""

    queries: int
    stored: int
    dim: int


class Case(NamedTuple):
    """One kernel at one shape: bytes that it must move and operations that it must do at least."""

    kernel: str
    shape: str
    form: str
    work: Callable[[], object]
    moved_bytes: int
    flops: int


def batch_of(rows: list[tuple[int, int]], window: int) -> Batch:
    """A batch of (start, count) rows whose pages lie scattered; only what a window sees is listed."""
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    first = (np.maximum(starts + 1 - window, 0) // PAGE_SIZE if window else 0 * starts).astype(np.int32)
    pages = -(-(starts + counts) // PAGE_SIZE) - first
    order = np.random.default_rng(1).permutation(int(pages.sum())).astype(np.int32) + 1
    tables = np.zeros((len(rows), int(pages.max())), dtype=np.int32)
    taken = 0
    for row, count in enumerate(pages.tolist()):
        tables[row, :count] = order[taken : taken + count]
        taken += count
    owner = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, counts)
    write = tables[owner, positions // PAGE_SIZE - first[owner]].astype(np.int64)
    ids, none = np.arange(len(rows), dtype=np.int32), np.zeros(0, dtype=np.int64)
    bands = (BandPages(first, tables, write, window),)
    return Batch(1, ids, ids, starts, counts, offsets, none, positions, positions % PAGE_SIZE, bands, none, none, none,
                 SamplingTable(1), PAGE_SIZE)  # fmt: skip


def attention_forms(device: torch.device, views: dict[int, LayerViews]) -> Iterator[tuple[str, PagedAttention]]:
    """Every form of attention that this device has."""
    if device.type == "cuda":
        from daemon.rank.triton_ops import TritonAttention

        yield "triton", TritonAttention(views)
        return
    yield "torch", HostAttention(views)
    library, _ = choose_library("auto", views[0].k.dtype)
    if library is not None and views[0].k.shape[3] % LANES == 0:
        yield "compiled", CompiledAttention(library, views)


def attention_cases(device: torch.device, dtype: torch.dtype, heads: Heads) -> Iterator[Case]:
    """Decode rows, a window, a chunk, a chunk behind a prefix; each with the store of its new rows."""
    shapes: list[tuple[str, list[tuple[int, int]], int]] = [
        *((f"decode, {n} rows of {length}", [(length - 1, 1)] * n, 0) for n in (1, 8, 32) for length in (256, 2048)),
        ("decode, 32 rows of 2048, window 512", [(2047, 1)] * 32, 512),
        ("extend, 512", [(0, 512)], 0),
        ("extend, 512 behind 2048", [(2048, 512)], 0),
        ("extend, 512 behind 2048, window 512", [(2048, 512)], 512),
    ]
    item = dtype.itemsize
    for name, rows, window in shapes:
        batch = batch_of(rows, window)
        assert batch.bands[0] is not None, "its one band stores K and V"
        units = int(batch.bands[0].tables.max()) + 1
        arena = torch.zeros(units, 2, PAGE_SIZE, heads.stored, heads.dim, dtype=dtype, device=device).normal_()
        k, v = arena[:, 0], arena[:, 1]
        views = {0: LayerViews(k, v, k.flatten(1), v.flatten(1), heads.stored, 0)}
        tokens = int(batch.counts.sum())
        q = torch.randn(tokens, heads.queries, heads.dim, device=device).to(dtype)
        new = torch.randn(tokens, heads.stored, heads.dim, device=device).to(dtype)
        spec = AttentionSpec(heads.dim**-0.5, window)
        seen = sum(min(start + i + 1, window or start + i + 1) for start, count in rows for i in range(count))
        read = sum(min(start + count, (window or start) + count) for start, count in rows)
        kept = 2 * heads.stored * heads.dim * item
        moved = (read + tokens) * kept + 2 * tokens * heads.queries * heads.dim * item
        for form, attention in attention_forms(device, views):

            def work(attention: PagedAttention = attention, batch: Batch = batch, rest: Any = (q, new, spec)) -> object:
                attention.begin(batch)
                return attention.run(0, rest[0], rest[1], rest[1], rest[2])

            yield Case("attention", name, form, work, moved, 4 * seen * heads.queries * heads.dim)


def state_ops(device: torch.device) -> tuple[str, StateOps]:
    """The form of the recurrent kernels here."""
    if device.type == "cuda":
        from daemon.rank.triton_states import TRITON_OPS

        return "triton", TRITON_OPS
    return "torch", TORCH_OPS


def state_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Convolution, Mamba-2 and gated delta: updates of 32 rows, and chunks of 4 rows of 256 tokens."""
    form, ops = state_ops(device)
    heads, dim, width, taps = 8, 64, 128, 4
    channels = heads * dim + 2 * width
    for name, counts in (("32 rows of 1", [1] * 32), ("4 rows of 256", [256] * 4)):
        rows, tokens = len(counts), sum(counts)
        columns = (torch.full((rows,), 7), torch.tensor(counts), torch.arange(rows))
        plan = plan_rows(*columns, device, ops.cut_blocks)
        chosen = plan.singles if plan.singles is not None else plan.chunks

        def draw(*size: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(size, device=device).mul_(0.1).to(kind)

        x, weight = draw(tokens, channels, kind=dtype), draw(channels, taps, kind=dtype)
        conv = draw(rows, channels, taps - 1, kind=dtype)
        moved = 2 * (x.nbytes + conv.nbytes)
        conv_work = run_state(ops.conv_update, ops.conv_chunks, chosen, (x, conv), (weight, None, True), x.shape)
        yield Case("convolution", name, form, conv_work, moved, 2 * taps * x.numel())
        value, step, decay = draw(tokens, heads, dim, kind=dtype), draw(tokens, heads).abs(), -draw(heads).abs()
        b, c, skip = draw(tokens, 1, width, kind=dtype), draw(tokens, 1, width, kind=dtype), draw(heads)
        scan = draw(rows, heads, dim, width)
        moved = 2 * scan.nbytes + 2 * value.nbytes + 2 * b.nbytes
        scanned = (value, step, decay, b, c, skip, scan)
        scan_work = run_state(ops.mamba2_update, ops.mamba2_chunks, chosen, scanned, (), value.shape)
        yield Case("Mamba-2", name, form, scan_work, moved, 5 * tokens * heads * dim * width)
        key, query = draw(tokens, heads // 2, width), draw(tokens, heads // 2, width)
        memory = draw(rows, heads, width, dim)
        moved = 2 * memory.nbytes + 2 * value.nbytes + 2 * key.nbytes
        updated = (query, key, value, -step, step, memory)
        delta_work = run_state(ops.delta_update, ops.delta_chunks, chosen, updated, (), value.shape)
        yield Case("gated delta", name, form, delta_work, moved, 7 * tokens * heads * dim * width)


def run_state(
    update: Callable[..., Tensor],
    chunks: Callable[..., None],
    rows: Singles | Chunks | None,
    inputs: tuple[Tensor, ...],
    rest: tuple[object, ...],
    shape: torch.Size,
) -> Callable[[], object]:
    """The call for one kind of rows; a chunk's output is written into a tensor made before."""
    if isinstance(rows, Singles):
        return lambda: update(*inputs, rows, *rest)
    out = torch.zeros(shape, device=inputs[0].device)
    return lambda: chunks(*inputs, rows, *rest, out)


def other_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Sampling, and whole units of an arena: zeroed and copied."""
    logits = torch.randn(32, VOCABULARY, device=device).to(dtype)
    positions = np.arange(32, dtype=np.int64)
    keys = torch.from_numpy(row_keys(np.ones(32, np.uint64), np.zeros(32, np.int32), positions).view(np.int32))
    keys = keys.reshape(-1, 2).to(device)
    arena = torch.zeros(UNITS * UNIT_BYTES, dtype=torch.uint8, device=device)
    odd, even = (torch.arange(first, UNITS, 2, dtype=torch.int32, device=device) for first in (1, 0))
    if device.type == "cuda":
        from kernels import units
        from kernels.sampling import sample

        ones, form = torch.ones(32, device=device), "triton"
        drawn: Callable[[], object] = lambda: sample(logits, keys, ones)  # noqa: E731
        zero, copy = units.zero_units, units.copy_units
    else:
        drawn, form = (lambda: draw_on_host(logits.float(), keys)), "torch"
        zero, copy = reference.zero_units, reference.copy_units
    yield Case("sampling", f"32 rows of {VOCABULARY}", form, drawn, logits.nbytes, 0)
    half = odd.numel() * UNIT_BYTES
    yield Case(
        "zero units", f"{odd.numel()} of {UNIT_BYTES >> 10} KiB", form, lambda: zero(arena, odd, UNIT_BYTES), half, 0
    )
    copied: Callable[[], object] = lambda: copy(arena, even, odd, UNIT_BYTES)  # noqa: E731
    yield Case("copy units", f"{odd.numel()} of {UNIT_BYTES >> 10} KiB", form, copied, 2 * half, 0)


def baselines(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """A copy of memory and a square product: what this machine gives at this moment."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield Case("copy", f"{COPY_BYTES >> 20} MiB", "memcpy", lambda: target.copy_(source), 2 * COPY_BYTES, 0)
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device).to(dtype) for _ in range(2))
    shape = " x ".join([str(PRODUCT_SIZE)] * 3)
    yield Case("product", shape, "matmul", lambda: a @ b, 3 * a.nbytes, 2 * PRODUCT_SIZE**3)


def seconds_of(case: Case, device: torch.device) -> float:
    """One call, waited for."""
    began = time.perf_counter()
    case.work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def row_of(case: Case, taken_s: list[float]) -> dict[str, Any]:
    """The figures of one case from the seconds of all rounds."""
    median = statistics.median(taken_s)
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "form": case.form,
        "us": round(median * 1e6, 2),
        "gb_s": round(case.moved_bytes / median / 1e9, 3),
        "gflop_s": round(case.flops / median / 1e9, 3) if case.flops else None,
        "moved_bytes": case.moved_bytes,
        "flops": case.flops,
    }


@torch.inference_mode()
def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case once per round, in turns; medians."""
    device, dtype = torch.device(options.device), BY_NAME[options.dtype]
    if options.threads:
        torch.set_num_threads(options.threads)
    heads = Heads(*options.heads)
    cases = [*baselines(device, dtype), *attention_cases(device, dtype, heads)]
    cases += [*state_cases(device, dtype), *other_cases(device, dtype)]
    cases = [case for case in cases if not options.only or case.kernel in ("copy", "product", *options.only)]
    taken: list[list[float]] = [[] for _ in cases]
    for turn in range(options.rounds + 1):  # the first turn warms up and is not counted
        for case, found in zip(cases, taken, strict=True):
            seconds = seconds_of(case, device)
            if turn:
                found.append(seconds)
    return [row_of(case, found) for case, found in zip(cases, taken, strict=True)]


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The rows for a person."""
    table = Table("kernel", "shape", "form", "us", "GB/s", "GFLOP/s", title=title)
    for row in rows:
        flops = "" if row["gflop_s"] is None else f"{row['gflop_s']:.1f}"
        table.add_row(row["kernel"], row["shape"], row["form"], f"{row['us']:.0f}", f"{row['gb_s']:.1f}", flops)
    print_table(Console(), table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments."""
    made = argparse.ArgumentParser(prog="bandmaster bench kernels", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    made.add_argument("--dtype", default="bfloat16", choices=sorted(BY_NAME))
    made.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], metavar=("QUERIES", "STORED", "DIM"))
    made.add_argument("--rounds", type=int, default=7, help="turns; medians count")
    made.add_argument("--threads", type=int, default=0, help="torch's threads; 0: as torch chooses")
    made.add_argument("--only", nargs="*", default=[], help="names of kernels, such as attention, Mamba-2, sampling")
    made.add_argument("--json", action="store_true", help="one object with a list `rows`")
    return made.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    options = parse(argv)
    rows = measure(options)
    if options.json:
        sys.stdout.write(
            json.dumps({"device": options.device, "threads": torch.get_num_threads(), "rows": rows}) + "\n"
        )
    else:
        show(rows, f"{options.device}, {options.dtype}, {torch.get_num_threads()} threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
