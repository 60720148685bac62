"""The compiled twins of the CPU's row operations and of decode attention: built once by the machine's C compiler.

Owns the build of `kernels/host/` and the calls into it. Must never decide whether it is used: without a compiler, or
where a build fails, `load` says why and the torch twins serve. Invariants: a library is keyed by its sources, compiler
and processor, comes under its final name by one rename, and is loaded only when whole and from a private directory;
threads are those of torch's own OpenMP runtime, which is in the process already, so both never run two pools.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).with_name("host")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
WIDE = "-mprefer-vector-width=512"  # x86 only; without it compilers halve the vectors
BUILD_TIMEOUT_S = 240  # it takes three; machines that boot many processes at once need more
DIGEST_BYTES = 32
LANES = 16  # rows are read in vectors of this many elements
BLOCK_FLOATS = 256 + LANES  # of one head's scores, as in rows.h
ALONE_MAX = 1 << 16  # elements below which a second thread costs more than it gives
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Unavailable(Exception):
    """There is no compiled library here; the text says why."""


class Attention(ctypes.Structure):
    """`struct attention` of host.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads", "dim", "value_dim", "page_size")),
        *((name, ctypes.c_void_p) for name in "qkv"),
        *((f"{name}_stride", ctypes.c_int64) for name in "qkv"),
        *((f"{name}_pages", ctypes.c_void_p) for name in "kv"),
        *((f"{name}_unit_stride", ctypes.c_int64) for name in "kv"),
        *((name, ctypes.c_void_p) for name in ("write_pages", "write_slots")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("queries", "begins", "ends", "tables")),
        ("table_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("sinks", "out", "scratch")),
        *((name, ctypes.c_int64) for name in ("scratch_floats", "threads")),
    )


class HostLibrary:
    """Calls into one built library; tensors are on the CPU, contiguous where nothing else is said."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"the compiled library does not load: {error}") from error
        whole, pointer, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
        signatures: dict[str, tuple[Any, ...]] = {
            "add_norm": (pointer, pointer, pointer, pointer, whole, whole, real, whole),
            "silu_mul": (pointer, pointer, whole, whole, whole),
            "rope": (pointer, pointer, pointer, pointer, whole, whole, whole, whole, whole),
            "soften_tile": (*(pointer, whole, whole, whole, whole, whole), real, real, pointer, pointer, whole),
            "attend": (pointer,),
        }
        self._calls: dict[tuple[str, torch.dtype], Any] = {}
        for name, arguments in signatures.items():
            for dtype, suffix in SUFFIXES.items():
                call = getattr(library, f"{name}_{suffix}", None)
                if call is None:
                    raise Unavailable(f"the compiled library {path} has no {name}_{suffix}; remove it")
                call.argtypes, call.restype = arguments, None
                self._calls[name, dtype] = call

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x += y where there is y, then x / sqrt(mean(x^2) + eps) * weight; x, y [T, size], size a multiple of 16."""
        out = torch.empty_like(x)
        rows, size = x.shape
        self._calls["add_norm", x.dtype](
            x.data_ptr(),
            None if y is None else y.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            eps,
            threads_for(x.numel()),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(g) * u of rows [g, u]: [T, 2 * size] to [T, size], size a multiple of 16."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._calls["silu_mul", gate_up.dtype](
            gate_up.data_ptr(), out.data_ptr(), rows, size, threads_for(gate_up.numel())
        )
        return out

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate pairs (i, i + d/2) of x [T, heads, d] in place; tables [positions, d]; d a multiple of 32.

        The heads of a token lie together; tokens may be further apart.
        """
        tokens, heads, dim = x.shape
        self._calls["rope", x.dtype](
            x.data_ptr(),
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            heads,
            dim,
            x.stride(0),
            threads_for(x.numel()),
        )

    def soften(
        self, products: Tensor, end: int, window: int, scale: float, softcap: float, sinks: Tensor | None
    ) -> None:
        """From products to weights in place: [heads, t, keys], query i sees keys before `end` + i, `window` of them.

        With window 0 all of them; `sinks` float32[heads] are one more logit without a key.
        """
        heads, queries, keys = products.shape
        threads = threads_for(products.numel())
        scratch = torch.empty(threads * (keys + 2 * LANES))
        self._calls["soften_tile", products.dtype](
            products.data_ptr(),
            heads,
            queries,
            keys,
            end,
            window,
            scale,
            softcap,
            None if sinks is None else sinks.data_ptr(),
            scratch.data_ptr(),
            threads,
        )

    def attend(self, arguments: Attention, dtype: torch.dtype) -> None:
        """Store new rows, then attend with single queries: see host.c."""
        self._calls["attend", dtype](ctypes.byref(arguments))


def threads_for(elements: int) -> int:
    """Threads that pay for so many elements."""
    return 1 if elements < ALONE_MAX else torch.get_num_threads()


def scratch_floats(heads: int, dim: int, value_dim: int) -> int:
    """Floats that one thread of `attend` needs."""
    return heads * (dim + value_dim + BLOCK_FLOATS + 2)


def load(cache: Path) -> HostLibrary:
    """The library for this machine, built into `cache` when it is not there; raises Unavailable."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("this machine has no C compiler")
    flags = [*FLAGS, *([WIDE] if platform.machine() in ("x86_64", "AMD64") else [])]
    sources = sorted(SOURCES.iterdir())
    version = _run([compiler, "--version"])
    parts = [*(source.read_bytes() for source in sources), " ".join(flags).encode(), version, _processor()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    target = cache / f"host-{key}.so"
    _require_private(cache)
    if not _is_whole(target):
        _build(compiler, flags, target)
    return HostLibrary(target)


def _require_private(cache: Path) -> None:
    """Code is loaded from here, so nobody else may write here; raises Unavailable."""
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = cache.stat()
    except OSError as error:
        raise Unavailable(f"the compiled library cannot be kept in {cache}: {error}") from error
    if state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise Unavailable(f"{cache} belongs to another user or is writable by others; no library is loaded from it")


def _is_whole(target: Path) -> bool:
    """Whether the file is there and ends with the digest of what is before: a cut or damaged one is built again."""
    try:
        data = target.read_bytes()
    except OSError:
        return False
    return len(data) > DIGEST_BYTES and hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _processor() -> bytes:
    """What `-march=native` depends on: flags of the first core, or the machine's name."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor().encode()
    kept = [line for line in info.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))]
    return "\n".join(kept[:2]).encode()


def _build(compiler: str, flags: list[str], target: Path) -> None:
    """Compile, link without the compiler's own OpenMP runtime, seal with a digest, and rename."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as place:
            object_file, library = os.path.join(place, "host.o"), os.path.join(place, "host.so")
            _run([compiler, *flags, "-c", str(SOURCES / "host.c"), "-o", object_file])
            _run([compiler, "-shared", object_file, "-o", library, "-lm"])
            with open(library, "r+b") as file:
                digest = hashlib.sha256(file.read()).digest()
                file.write(digest)  # behind the library's own bytes, where a loader does not look
                file.flush()
                os.fsync(file.fileno())
            os.replace(library, target)
    except OSError as error:
        raise Unavailable(f"the compiled library cannot be kept in {target.parent}: {error}") from error


def _run(command: list[str]) -> bytes:
    """Output of a command of the compiler; raises Unavailable with the end of what it said."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=BUILD_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise Unavailable(f"{command[0]} failed with {done.returncode}: {done.stderr.decode(errors='replace')[-300:]}")
    return done.stdout
