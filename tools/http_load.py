"""HTTP load: streams completions from an OpenAI-compatible server and takes the times of each.

Owns one streamed request and a closed loop of them. Must never retry or drop: a failed request is a row with its error.
Invariant: as many results as requests, in request order.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import trio

DATA, DONE = "data: ", "[DONE]"
CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 600.0
# Ids that every vocabulary has and that are no special tokens, for prompts whose length in tokens must be exact.
PROMPT_ID_LOW, PROMPT_ID_HIGH = 1000, 20_000


@dataclass(slots=True)
class Result:
    """One request: seconds since the loop began, output tokens, the gaps between deliveries per token, or an error."""

    index: int
    started_s: float = 0.0
    first_s: float = math.nan
    ended_s: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.first_s - self.started_s

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: to which server and model, prompts of exact length, outputs of exact length."""

    url: str
    model: str
    prompt_tokens: int = 128
    output_tokens: int = 64
    seed: int = 1
    api_key: str = ""
    ids: tuple[int, int] = (PROMPT_ID_LOW, PROMPT_ID_HIGH)
    shared_tokens: int = 0  # that every prompt begins with, before its own `prompt_tokens`
    extras: bool = True  # ignore_eos and return_token_ids, which servers without extensions refuse

    def prompt(self, index: int) -> list[int]:
        """Prompt `index`: the shared tokens, then its own random ones, so that no two share more."""
        shared, own = random.Random(f"{self.seed}/shared"), random.Random(f"{self.seed}/{index}")
        common = [shared.randrange(*self.ids) for _ in range(self.shared_tokens)]
        return common + [own.randrange(*self.ids) for _ in range(self.prompt_tokens)]

    def body(self, index: int) -> dict[str, Any]:
        """The JSON body of request `index`."""
        made: dict[str, Any] = {
            "model": self.model,
            "prompt": self.prompt(index),
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.extras:
            made |= {"ignore_eos": True, "return_token_ids": True}
        return made

    def client(self, connections: int) -> httpx.AsyncClient:
        """A client with a connection for each worker."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
        )


def take_event(result: Result, event: dict[str, Any], now_s: float) -> None:
    """Account for one event of a stream; several tokens may share one."""
    if "error" in event:
        result.error = str(event["error"].get("message", event["error"]))
    counts = event.get("usage") or {}
    if counts:
        result.output_tokens = int(counts.get("completion_tokens", result.output_tokens))
        result.prompt_tokens = int(counts.get("prompt_tokens", result.prompt_tokens))
        details = counts.get("prompt_tokens_details") or {}
        result.cached_tokens = int(details.get("cached_tokens") or result.cached_tokens)
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or ()
        result.token_ids += ids
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
        tokens = len(ids) or int(bool(choice.get("text")))
        if not tokens:
            continue
        if math.isnan(result.first_s):
            result.first_s = now_s
        else:
            result.gaps_s += [(now_s - result.ended_s) / tokens] * tokens
        result.ended_s = now_s


async def stream_one(client: httpx.AsyncClient, body: dict[str, Any], result: Result, now: Callable[[], float]) -> None:
    """Send one streamed completion and fill in its result; failures are in `result.error`."""
    result.started_s = now()
    finished = False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                result.error = f"HTTP {answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}"
            else:
                async for line in answer.aiter_lines():
                    if line.startswith(DATA):
                        finished = line[len(DATA) :] == DONE
                        if not finished:
                            take_event(result, json.loads(line[len(DATA) :]), now())
    except httpx.HTTPError as error:
        result.error = result.error or f"{type(error).__name__}: {error}"
    result.ended_s = now()
    if not finished and not result.error:
        result.error = "the stream ended without [DONE]"


async def run_load(
    load: Load, indices: Sequence[int], concurrency: int, progress: Callable[[], None] = lambda: None
) -> tuple[float, list[Result]]:
    """Seconds of the whole run, and the results: `concurrency` workers, each sends its next when its last has ended."""
    results = [Result(index) for index in indices]
    queue = iter(results)
    bodies = {result.index: load.body(result.index) for result in results}
    began = time.monotonic()

    def now() -> float:
        return time.monotonic() - began

    async with load.client(concurrency) as client, trio.open_nursery() as nursery:

        async def work() -> None:
            for result in queue:
                await stream_one(client, bodies[result.index], result, now)
                progress()

        for _ in range(min(concurrency, len(results))):
            nursery.start_soon(work)
    return now(), results


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; nan of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def summary(wall_s: float, results: Sequence[Result], concurrency: int) -> dict[str, Any]:
    """One row: throughput over the whole run, percentiles of the requests that ended well, times in ms."""
    good = [result for result in results if not result.error]
    row: dict[str, Any] = {
        "concurrency": concurrency,
        "requests": len(results),
        "errors": len(results) - len(good),
        "wall_s": round(wall_s, 3),
        "output_tokens": sum(result.output_tokens for result in good),
        "output_tok_s": round(sum(result.output_tokens for result in good) / wall_s, 2) if wall_s else 0.0,
        "cached_share": round(sum(r.cached_tokens for r in good) / max(1, sum(r.prompt_tokens for r in good)), 4),
    }
    samples = {
        "ttft_ms": [result.ttft_s for result in good if not math.isnan(result.first_s)],
        "itl_ms": [gap for result in good for gap in result.gaps_s],
        "e2e_ms": [result.e2e_s for result in good],
    }
    for name, values in samples.items():
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            value = percentile(values, share)
            row[f"{name}_{label}"] = None if math.isnan(value) else round(value * 1000, 2)
    return row
