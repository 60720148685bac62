"""A real hybrid model over HTTP: full attention, a window and recurrent layers in one, cached and cold alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import assert_replays, eventually, gauge, idle, serving
from tests.frontend.tokenizers_made import byte_level
from tests.rank.models import Reference, tiny_model
from tests.rank.test_parity import compare
from tools.own_server import OwnServer

FAMILY = "lara_mini"  # gated delta net, a window of 24, and full attention
VOCABULARY, GRID = 211, 64


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the family with a tokenizer beside it."""
    directory = tiny_model(tmp_path_factory.mktemp("model"), FAMILY)
    (directory / "tokenizer.json").write_text(byte_level()._tokenizer.to_str())
    return directory


@pytest.fixture(scope="module")
def server(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """Served in float32; idle and replayed at the end."""
    flags = ["--dtype", "float32", "--arena-bytes", "32MiB", "--invariants", "2"]
    flags += ["--checkpoint-interval", str(GRID), "--chunked-prefill-size", str(GRID)]
    with serving(tmp_path_factory.mktemp("served") / "run", str(place), *flags) as server:
        yield server
        eventually(lambda: idle(server), "what is live is what the cache holds")
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)


def tokens_and_cached(server: OwnServer, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    """Eight greedy tokens, and how many of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cold_and_cached_answers_equal_transformers(place: Path, server: OwnServer) -> None:
    """Cold, after a hit on the whole prompt, behind the last turn, on a fork, and under a salt: the same tokens."""
    draw = random.Random(5)
    prompt = [draw.randrange(3, VOCABULARY) for _ in range(300)]
    cold, cached = tokens_and_cached(server, prompt)
    assert cached == 0
    again, cached = tokens_and_cached(server, prompt)
    assert (again, cached) == (cold, 256)
    turn = [*prompt, *cold, *(draw.randrange(3, VOCABULARY) for _ in range(40))]
    longer, cached = tokens_and_cached(server, turn)
    assert cached == 256
    fork = [*prompt[:150], *(draw.randrange(3, VOCABULARY) for _ in range(30))]
    forked, cached = tokens_and_cached(server, fork)
    assert cached == 0, "nobody had parted there: no state was kept"
    third = [*prompt[:150], *(draw.randrange(3, VOCABULARY) for _ in range(30))]
    parted, cached = tokens_and_cached(server, third)
    assert cached == 128, "the second to come that way left one"
    salted, cached = tokens_and_cached(server, prompt, cache_salt="x")
    assert (salted, cached) == (cold, 0)
    compare(Reference(place), [prompt, turn, fork, third], [cold, longer, forked, parted])
    assert gauge(server, "prefix_cache_hits_total") == 256 + 256 + 128
