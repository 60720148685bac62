"""The prefix cache as a client sees it: cached tokens in every form of an answer, salts, and the order to empty it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.harness import assert_replays, client, completion, eventually, gauge, idle, modeled, serving, units
from tools.own_server import OwnServer, http_get

GRID = 64
HYBRID = modeled("--checkpoint-interval", str(GRID), "--invariants", "2", options={"windows": GRID, "state": 1})


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """A modeled server with state, a window and full attention; idle at the end, empty after a flush, and replayed."""
    with serving(tmp_path_factory.mktemp("hybrid") / "run", *HYBRID) as server:
        yield server
        eventually(lambda: idle(server), "what is live is what the cache holds")
        answer = httpx.post(f"{server.url}/flush_cache", trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        eventually(lambda: not any(v for n, v in units(server).items() if "live" in n or "pending" in n), "all is free")
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)


async def ask(server: OwnServer, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """A whole answer."""
    async with client(server) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def details(answer: dict[str, Any]) -> dict[str, Any]:
    """What the usage says of the prompt."""
    found: dict[str, Any] = answer["usage"]["prompt_tokens_details"]
    return found


async def test_a_hit_shows_in_the_usage_of_a_completion(hybrid: OwnServer) -> None:
    """The second equal prompt of 200 tokens goes on from token 192; its text is that of the first."""
    body = completion(8, prompt=200, seed=1, stream=False)
    first, second = await ask(hybrid, **body), await ask(hybrid, **body)
    assert details(first)["cached_tokens"] == 0
    assert details(first)["hits"] == [{"cached_tokens": 0, "matched_tokens": 0, "hit_cut": "full"}]
    assert details(second) == {
        "cached_tokens": 192,
        "hits": [{"cached_tokens": 192, "matched_tokens": 192, "hit_cut": None}],
    }
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]


def test_a_hit_shows_in_the_openai_client_streamed_and_not(hybrid: OwnServer) -> None:
    """A chat, the same chat streamed with usage, and its next turn: cached tokens grow, the last chunk has them."""
    api = openai.OpenAI(base_url=f"{hybrid.url}/v1", api_key="none", timeout=60)
    model = hybrid.model()
    messages: list[Any] = [{"role": "user", "content": "A long question about pages and windows. " * 12}]

    def whole(**fields: Any) -> Any:
        return api.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0, **fields)

    first = whole()
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    last: Any = None
    text = ""
    for chunk in whole(stream=True, stream_options={"include_usage": True}):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert last is None, "the usage comes last"
        last = chunk.usage
    prompt = first.usage.prompt_tokens
    expected = (prompt - 1) // GRID * GRID
    assert text == first.choices[0].message.content
    assert last.prompt_tokens_details.cached_tokens == expected > 0
    assert last.prompt_tokens_details.hits[0]["cached_tokens"] == expected


async def test_P6_equal_salts_share_and_others_do_not(hybrid: OwnServer) -> None:
    """Without a salt, with one, with another, and a salt that spells a kind: each misses first and hits after."""
    body = completion(4, prompt=150, seed=2, stream=False)
    salts: list[str | None] = [None, "x", "y", "salt:x", "lora:x"]
    for salt in salts:
        assert details(await ask(hybrid, **body, cache_salt=salt))["cached_tokens"] == 0, salt
    for salt in salts:
        assert details(await ask(hybrid, **body, cache_salt=salt))["cached_tokens"] == 128, salt


async def test_a_bad_salt_is_a_400_that_names_it(hybrid: OwnServer) -> None:
    """No string, empty, or too long: nothing reaches the daemon."""
    async with client(hybrid) as http:
        for salt in (5, "", "x" * 201, ["x"], True):
            answer = await http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2, "cache_salt": salt})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


async def test_several_prompts_and_choices_sum_up(hybrid: OwnServer) -> None:
    """Two prompts with two choices: cached tokens are those that were there before, each prompt once."""
    long, short = (completion(4, prompt=size, seed=3 + size)["prompt"] for size in (140, 70))
    fields: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    assert details(await ask(hybrid, prompt=[long, short], n=2, **fields))["cached_tokens"] == 0
    answer = await ask(hybrid, prompt=[long, short], n=2, **fields)
    assert details(answer)["cached_tokens"] == 128 + 64
    assert [hit["cached_tokens"] for hit in details(answer)["hits"]] == [128, 64]
    assert answer["usage"]["prompt_tokens"] == 210
    assert len(answer["choices"]) == 4


async def test_log_probabilities_of_a_prompt_are_computed_not_cached(hybrid: OwnServer) -> None:
    """An echo with log probabilities needs every position computed: no cache is asked, and they are all there."""
    body = completion(2, prompt=100, seed=4, stream=False)
    await ask(hybrid, **body)
    answer = await ask(hybrid, **body, echo=True, logprobs=1)
    assert details(answer) == {
        "cached_tokens": 0,
        "hits": [{"cached_tokens": 0, "matched_tokens": 0, "hit_cut": None}],
    }
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 102


async def test_X10_an_emptied_cache_misses(hybrid: OwnServer) -> None:
    """`POST /flush_cache` at idle says what was freed; the same prompt is computed again, to the same tokens."""
    body = completion(4, prompt=120, seed=5, stream=False)
    first = await ask(hybrid, **body)
    assert details(await ask(hybrid, **body))["cached_tokens"] == 64
    eventually(lambda: idle(hybrid), "idle")
    async with client(hybrid) as http:
        answer = await http.post("/flush_cache")
        assert (await http.get("/flush_cache")).status_code == 405
    assert answer.status_code == 200
    told = answer.json()
    assert told["flushed"] is True
    assert told["freed"]["full"] > 0
    assert not any(told["kept"].values())
    again = await ask(hybrid, **body)
    assert details(again)["cached_tokens"] == 0
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]


def test_the_caches_metrics_have_vllms_names(hybrid: OwnServer) -> None:
    """Queries and hits are counters in tokens; the series of the cuts and bands are there."""
    status, text = http_get(f"{hybrid.url}/metrics")
    assert status == 200
    for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "prefix_cache_lookups_total{cut="):
        assert f"\nbandmaster:{name}" in text
    assert gauge(hybrid, "prefix_cache_queries_total") >= gauge(hybrid, "prefix_cache_hits_total") > 0
    assert {name for name in hybrid.metrics() if name.startswith("bandmaster:cached_units{")} == {
        f'bandmaster:cached_units{{band="{band}"}}' for band in ("state", f"window:{GRID}", "full")
    }


async def test_without_the_cache_nothing_is_kept(tmp_path: Path) -> None:
    """`--no-enable-prefix-caching`: equal prompts are computed twice, no unit stays, a flush has nothing to do."""
    with serving(tmp_path / "run", *HYBRID, "--no-enable-prefix-caching") as server:
        body = completion(4, prompt=150, seed=6, stream=False)
        for _ in range(2):
            assert details(await ask(server, **body))["cached_tokens"] == 0
        eventually(lambda: not any(v for n, v in units(server).items() if "live" in n), "nothing is held")
        assert gauge(server, "prefix_cache_queries_total") == 0
        assert httpx.post(f"{server.url}/flush_cache", trust_env=False).status_code == 200
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)
