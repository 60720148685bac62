"""Small traces of conversations, and how they become files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tools.simulate.traffic import Trace, read_trace


def conversations(seed: int, requests: int, gap_ms: int, block: int = 512, talks: int = 6) -> list[dict[str, Any]]:
    """Requests of a few conversations under one system prompt: each turn repeats the last one's blocks, then adds."""
    rng = random.Random(seed)
    fresh = iter(range(1000, 10**9))
    system = [next(fresh)]
    turns: dict[int, list[int]] = {}
    rows = []
    for number in range(requests):
        talk = rng.randrange(talks)
        known = turns.get(talk, system)
        if len(known) > 8 or rng.random() < 0.1:
            known = system
        blocks = known + [next(fresh) for _ in range(rng.randint(1, 3))]
        turns[talk] = blocks
        length = len(blocks) * block - rng.choice([0, 1, block // 3, block - 1])
        row = {"timestamp": number * gap_ms, "input_length": length, "output_length": rng.randint(1, 40)}
        rows.append(row | {"hash_ids": blocks})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file with one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trace_of(path: Path, rows: list[dict[str, Any]], block: int = 512) -> Trace:
    """The rows as the command reads them."""
    return read_trace(str(write(path / "trace.jsonl", rows)), block)


def as_tokens(trace: Trace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same requests with explicit tokens instead of blocks."""
    return [
        {"timestamp": row["timestamp"], "output_length": row["output_length"], "tokens": trace.prompt(index).tolist()}
        for index, row in enumerate(rows)
    ]
