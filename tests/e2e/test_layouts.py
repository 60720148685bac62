"""A real hybrid model on two stages of two tensor ranks, as four processes: the same tokens as transformers."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.harness import assert_replays, eventually, serving, units
from tests.frontend.tokenizers_made import byte_level
from tests.rank.models import Reference, tiny_model
from tests.rank.test_parity import compare
from tools.own_server import OwnServer

FAMILY = "lara_mini"  # gated delta net, a window of 24, and full attention, in five layers
VOCABULARY, GRID = 211, 64
LENGTHS = (3, 40, 90, 150, 220, 300)


def emptied(server: OwnServer) -> bool:
    """Whether the cache could be flushed, and nothing is live or pends then, summed over the stages."""
    flushed = httpx.post(f"{server.url}/flush_cache", timeout=60, trust_env=False).status_code == 200
    held = [count for name, count in units(server).items() if 'state="live"' in name or 'state="pending"' in name]
    return flushed and not any(held)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_processes_say_what_transformers_says(tmp_path: Path) -> None:
    """Mixed prompts at once, cold and cached, float32 and greedy; idle at the end, every stage's journal replays."""
    place = tiny_model(tmp_path, FAMILY)
    (place / "tokenizer.json").write_text(byte_level()._tokenizer.to_str())
    draw = random.Random(8)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    flags = ["--tp", "2", "--pp", "2", "--pp-layers", "3,2", "--dtype", "float32", "--arena-bytes", "32MiB"]
    flags += ["--checkpoint-interval", str(GRID), "--chunked-prefill-size", str(GRID), "--invariants", "2"]
    with serving(tmp_path / "run", str(place), *flags) as server:

        def ask(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=100, trust_env=False)
            assert answer.status_code == 200, answer.text
            return list(answer.json()["choices"][0]["token_ids"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            cold, cached = (list(pool.map(ask, prompts)) for _ in range(2))
        eventually(lambda: emptied(server), "with the cache flushed nothing is live on any stage")
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)
    compare(Reference(place), [*prompts, *prompts], [*cold, *cached])
