"""Trace: recorded traffic as a file of JSON lines, and the tokens that stand for it.

Owns the format and its errors. Must never guess a value: a line that is no request is refused with its number, the
field and what stood there. Fields that mean nothing here are named, not ignored in silence.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
    {"timestamp": 27482, "output_length": 52, "tokens": [1, 15043, 3186]}

`timestamp` in milliseconds, never falling; the first line arrives at time 0. `hash_ids` name the blocks of the prompt,
`block_tokens` tokens each, the last one maybe less: every token of a block is the block's own, so that two prompts are
equal as far as their blocks are. Invariant: no output token is a token of a prompt or of another request's output, so
that only what a trace says is shared is found in a cache.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from allocator.columns import Int64s
from daemon.core.arrival import DEADLINE_MS_MAX, NAME_CHARS_MAX, PRIORITY_MAX
from tools.simulate.errors import SimulateError

BLOCK_TOKENS = 512
LENGTH_MAX = 1 << 24  # tokens of a prompt or an output
TOKEN_MAX = (1 << 24) - 1
TIMESTAMP_MS_MAX = 1 << 53
SPAN_MS_MAX = 10 * 366 * 86_400_000  # ten years; the clock has nanoseconds
PIN_MS_MAX = DEADLINE_MS_MAX
STDIN = "-"
GZIP_MAGIC = b"\x1f\x8b"

REQUIRED = ("timestamp", "output_length")
FIELDS = (
    *REQUIRED,
    "input_length",
    "hash_ids",
    "tokens",
    "id",
    "namespace",
    "priority",
    "deadline_ms",
    "store",
    "pin_ms",
)


@dataclass(frozen=True, slots=True)
class Line:
    """One request. `units` are dense numbers of its blocks when `hashed`, else its tokens (int64 either way)."""

    number: int  # in the file, from 1
    at_ns: int  # behind the first line's arrival
    prompt_tokens: int
    output_tokens: int
    units: Int64s
    hashed: bool
    id: str
    namespace: str = ""
    priority: int = 0
    deadline_ms: int = 0
    store: bool = True
    pin_ms: int = 0


@dataclass(slots=True)
class Trace:
    """All requests of a file in the order of their arrival.

    Token ids: first the explicit ones below `blocks_from`, then one per distinct block, then one per request, which its
    output consists of. `unused` are names of fields that some line has and nothing here reads.
    """

    path: str
    block_tokens: int
    lines: list[Line]
    blocks_from: int
    blocks: int
    unused: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Token ids that occur."""
        return self.blocks_from + self.blocks + len(self.lines)

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(line.prompt_tokens for line in self.lines)

    @property
    def output_tokens(self) -> int:
        """Output tokens that all requests ask for."""
        return sum(line.output_tokens for line in self.lines)

    @property
    def longest(self) -> int:
        """The most tokens of one request, prompt and output."""
        return max(line.prompt_tokens + line.output_tokens for line in self.lines)

    def prompt(self, index: int) -> Int64s:
        """The tokens (int64) of a request's prompt."""
        line = self.lines[index]
        if not line.hashed:
            return line.units
        return np.repeat(line.units + self.blocks_from, self.block_tokens)[: line.prompt_tokens]

    def output_token(self, index: int) -> int:
        """What a request's output consists of."""
        return self.blocks_from + self.blocks + index


def read_trace(path: str, block_tokens: int = BLOCK_TOKENS, most: int = 0) -> Trace:
    """Read a file, plain or gzipped; of its requests the first `most` (0: all). Raises SimulateError."""
    reader = _Reader(path, block_tokens)
    for number, text in enumerate(_texts(path), 1):
        if text.strip():
            reader.add(number, text)
        if most and len(reader.lines) == most:
            break
    if not reader.lines:
        raise SimulateError(f"{path} has no lines; give one JSON object a line with {', '.join(REQUIRED)} and hash_ids")
    lines = reader.lines
    highest = max((int(line.units.max()) for line in lines if not line.hashed), default=-1)
    return Trace(path, block_tokens, lines, highest + 1, len(reader.blocks), tuple(sorted(reader.unused)))


def _texts(path: str) -> Iterable[bytes]:
    try:
        with Path("/dev/stdin" if path == STDIN else path).open("rb") as plain:  # opened once: it may be a pipe
            packed = plain.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
            yield from gzip.GzipFile(fileobj=plain) if packed else plain
    except (OSError, EOFError, zlib.error) as error:
        raise SimulateError(f"{path} cannot be read: {error}") from error


@dataclass(slots=True)
class _Reader:
    """Lines so far, and what only all of them together say: the numbers of blocks, the order of time."""

    path: str
    block_tokens: int
    lines: list[Line] = field(default_factory=list)
    blocks: dict[int, int] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    ids: dict[str, int] = field(default_factory=dict)
    first_ms: float = 0
    newest_ms: float = 0

    def add(self, number: int, text: bytes) -> None:
        """One more line of the file; raises SimulateError."""
        fields = self._fields(number, text)
        where = _Where(self.path, number, fields)
        at_ms = where.number("timestamp", 0, TIMESTAMP_MS_MAX)
        if self.lines and at_ms < self.newest_ms:
            previous = self.lines[-1].number
            where.refuse(f"timestamp {at_ms} is before line {previous}'s {self.newest_ms}; sort the file by timestamp")
        self.newest_ms = at_ms
        if not self.lines:
            self.first_ms = at_ms
        if at_ms - self.first_ms > SPAN_MS_MAX:
            late = f"timestamp {at_ms} is {at_ms - self.first_ms} behind the first one's {self.first_ms}; it may be"
            where.refuse(f"{late} {SPAN_MS_MAX}, ten years in milliseconds")
        units, prompt_tokens, hashed = self._prompt(where)
        line = Line(
            number=number,
            at_ns=round((at_ms - self.first_ms) * 1_000_000),
            prompt_tokens=prompt_tokens,
            output_tokens=where.whole("output_length", 1, LENGTH_MAX),
            units=units,
            hashed=hashed,
            id=where.text("id", f"line-{number}", 1),
            namespace=where.text("namespace", "", 0),
            priority=where.whole("priority", -PRIORITY_MAX, PRIORITY_MAX, 0),
            deadline_ms=where.whole("deadline_ms", 0, DEADLINE_MS_MAX, 0),
            store=where.truth("store", True),
            pin_ms=where.whole("pin_ms", 0, PIN_MS_MAX, 0),
        )
        if line.id in self.ids:
            where.refuse(f"id {line.id!r} is that of line {self.ids[line.id]}; give every request its own, or none")
        self.ids[line.id] = number
        self.lines.append(line)

    def _fields(self, number: int, text: bytes) -> dict[str, Any]:
        try:
            fields = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise SimulateError(f"{self.path}, line {number} is no JSON: {error}") from error
        except RecursionError:  # of the decoder, which bounds how deep it goes
            raise SimulateError(
                f"{self.path}, line {number} is nested too deeply; a request is one object whose values are numbers, "
                "texts, true, false, or a list of numbers"
            ) from None
        if not isinstance(fields, dict):
            shown = text.strip()[:40].decode(errors="replace")
            raise SimulateError(f"{self.path}, line {number} is no JSON object, but {shown!r}")
        missing = [name for name in REQUIRED if name not in fields]
        if missing:
            raise SimulateError(f"{self.path}, line {number} lacks {missing[0]}")
        self.unused |= fields.keys() - set(FIELDS)
        return fields

    def _prompt(self, where: _Where) -> tuple[Int64s, int, bool]:
        """Its blocks or tokens, how many tokens they are, and whether they are blocks."""
        fields = where.fields
        if ("tokens" in fields) == ("hash_ids" in fields):
            both = "both tokens and hash_ids" if "tokens" in fields else "neither tokens nor hash_ids"
            where.refuse(f"it has {both}; a prompt is told by one of them")
        if "tokens" in fields:
            tokens = where.column("tokens", 0, TOKEN_MAX)
            length = where.whole("input_length", 1, LENGTH_MAX, len(tokens))
            if length != len(tokens):
                where.refuse(f"input_length {length} is not the {len(tokens)} tokens that it has")
            return np.array(tokens, np.int64), length, False
        length = where.whole("input_length", 1, LENGTH_MAX)
        ids = where.column("hash_ids", -(2**63), 2**64 - 1)
        wanted = -(-length // self.block_tokens)
        if len(ids) != wanted:
            text = f"{len(ids)} hash_ids do not cover input_length {length}: {wanted} blocks of {self.block_tokens}"
            where.refuse(f"{text} tokens do; pass --block-tokens where blocks are of another size")
        blocks = self.blocks
        return np.array([blocks.setdefault(id, len(blocks)) for id in ids], np.int64), length, True


@dataclass(slots=True)
class _Where:
    """One line's fields, and the error that names file, line, field and value."""

    path: str
    line: int
    fields: dict[str, Any]

    def refuse(self, text: str) -> NoReturn:
        """Raise SimulateError with the place in front."""
        raise SimulateError(f"{self.path}, line {self.line}: {text}")

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number of a range."""
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(f"{name} must be a whole number from {low} to {high}, not {_shown(value)}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """A number of a range."""
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.refuse(f"{name} must be a number from {low} to {high}, not {_shown(value)}")
        return value

    def text(self, name: str, default: str, shortest: int) -> str:
        """A text of bounded length."""
        value = self.fields.get(name, default)
        if not isinstance(value, str) or not shortest <= len(value) <= NAME_CHARS_MAX:
            self.refuse(f"{name} must be a text of {shortest} to {NAME_CHARS_MAX} characters, not {_shown(value)}")
        return value

    def truth(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            self.refuse(f"{name} must be true or false, not {_shown(value)}")
        return value

    def column(self, name: str, low: int, high: int) -> Sequence[int]:
        """A list of whole numbers of a range, at least one."""
        values = self.fields[name]
        if not isinstance(values, list) or not values:
            self.refuse(f"{name} must be a list of at least one whole number, not {_shown(values)}")
        for index, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                self.refuse(f"{name}[{index}] must be a whole number from {low} to {high}, not {_shown(value)}")
        return values


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
