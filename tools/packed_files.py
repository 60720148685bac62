"""Packed files: which compression the suffix of a file's name asks for.

Owns the suffixes. Must never write under the name of a compression what is not compressed so.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import zstandard

from tools.ends import Refused

GZIP_LEVEL = 6
ZSTD_LEVEL = 6

PACKERS: dict[str, Callable[[IO[bytes]], AbstractContextManager[Any]]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file, mode="wb", compresslevel=GZIP_LEVEL, mtime=0),
    ".zst": lambda file: zstandard.ZstdCompressor(level=ZSTD_LEVEL).stream_writer(file, closefd=False),
    ".bz2": lambda file: bz2.open(file, "wb"),  # noqa: SIM115
    ".xz": lambda file: lzma.open(file, "wb"),  # noqa: SIM115
}
# fmt: off
OTHERS = frozenset((
    ".7z", ".br", ".bz", ".cab", ".lrz", ".lz", ".lz4", ".lzh", ".lzma", ".lzo", ".rar", ".snappy", ".sz", ".tbz",
    ".tbz2", ".tgz", ".txz", ".tzst", ".z", ".zip", ".zl", ".zz",
))
# fmt: on
"""Suffixes of compressions that nothing here writes."""


def suffix_of(path: Path, written: frozenset[str] = frozenset(PACKERS)) -> str:
    """The suffix of those that are `written`, empty for one that means no compression; raises Refused for another."""
    suffix = path.suffix.lower()
    if suffix in written:
        return suffix
    if suffix in OTHERS or suffix in PACKERS:
        raise Refused(f"{path}: nothing is packed as {path.suffix} here; choose {', '.join(sorted(written))}")
    return ""


@contextmanager
def packed(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    """What takes the bytes of a file that is open, packed as its name says; raises Refused."""
    suffix = suffix_of(path)
    if not suffix:
        yield file
        return
    with PACKERS[suffix](file) as packer:
        yield packer
