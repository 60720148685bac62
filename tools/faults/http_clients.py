"""HTTP clients of a campaign: what a user of the API sees while processes die behind it.

Owns one streamed completion. Must never hide a broken stream: what came on it is kept, and only then it asks anew, as a
user would. A 503 is an answer to a request that was not accepted, and is asked again.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import trio

from tools.faults.work import Story

DATA, DONE = "data: ", "[DONE]"
TOLD = "daemon_lost"  # a front end that ends with its launcher says so before it breaks the connection
AGAIN_S = 0.1
READ_TIMEOUT_S = 300.0


def open_client(url: str, connections: int) -> httpx.AsyncClient:
    """A client with a connection for each task."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(READ_TIMEOUT_S), limits=limits, trust_env=False)


async def follow(http: httpx.AsyncClient, story: Story, round_: int, may_break: Callable[[], bool]) -> None:
    """Ask until the story is over; `may_break` says whether a broken connection has a cause that excuses it."""
    body = story.task.body(round_)
    while not story.over:
        try:
            whole = await _once(http, story, body)
        except httpx.HTTPError as error:
            whole, text = False, f"{type(error).__name__}: {error}"
        else:
            text = "the stream ended without [DONE]"
        if story.error.startswith(TOLD) and may_break():
            whole, story.error = False, ""
        if story.over:
            return
        if not whole:
            if not may_break() and story.tokens:
                story.error = text
                return
            if story.tokens:
                story.cut()
            else:
                story.turned_away += 1
        await trio.sleep(AGAIN_S)


async def _once(http: httpx.AsyncClient, story: Story, body: dict[str, object]) -> bool:
    """One try; False when the connection ended before the stream did."""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code == 503:
            story.turned_away += 1
            return True
        if answer.status_code != 200:
            story.error = f"HTTP {answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}"
            return True
        reason = ""
        async for line in answer.aiter_lines():
            if line == DATA + DONE:
                story.finish = reason or "none"
                return True
            if line.startswith(DATA):
                reason = _take(story, json.loads(line[len(DATA) :])) or reason
                if story.error:
                    return True
    return False


def _take(story: Story, event: dict[str, object]) -> str:
    """Account for one event; the finish reason if it has one."""
    error, choices = event.get("error"), event.get("choices")
    if isinstance(error, dict):
        story.error = f"{error.get('code')}: {error.get('message')}"
    reason = ""
    for choice in choices if isinstance(choices, list) else ():
        if ids := choice.get("token_ids"):
            story.take(list(ids))
        reason = choice.get("finish_reason") or reason
    return reason
