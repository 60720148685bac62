"""What the end-to-end tests share: servers with a modeled device, streams, waiting for what must become true.

Owns the patience of the tests. Must never wait for a fixed time where a condition can be asked for.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import trio

from tools.faults.rounds import units_left
from tools.own_server import ROOT, OwnServer

PATIENCE_S = 30.0
POLL_S = 0.02


def modeled(*flags: str, delay_us: int = 0, options: dict[str, int] | None = None) -> list[str]:
    """Flags of a server without weights: every forward takes `delay_us`, tokens come from a hash."""
    chosen = {"delay_us": delay_us, **(options or {})}
    pairs = [part for name, value in chosen.items() for part in ("--rank-option", f"{name}={value}")]
    return ["--rank-runner", "modeled", *pairs, *flags]


@contextlib.contextmanager
def serving(run_dir: Path, *flags: str) -> Iterator[OwnServer]:
    """A ready server; whatever is left of it at the end is killed."""
    server = OwnServer(list(flags), run_dir)
    try:
        yield server.start(120)
    finally:
        server.kill()


def eventually(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true value of the condition; fails naming `what` when it stays false."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {patience_s:g} s")
        time.sleep(POLL_S)
    return value


async def eventually_async(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """As `eventually`, for tests whose own streams must go on meanwhile; the condition runs in a thread."""
    deadline = trio.current_time() + patience_s
    while not (value := await trio.to_thread.run_sync(condition)):
        if trio.current_time() > deadline:
            raise AssertionError(f"{what}: not within {patience_s:g} s")
        await trio.sleep(POLL_S)
    return value


def gauge(server: OwnServer, name: str) -> float:
    """One sample of `/metrics` by its name without prefix, labels as written in the exposition."""
    return server.metrics()[f"bandmaster:{name}"]


def units(server: OwnServer) -> dict[str, float]:
    """Units per band, stage and state, as the ranks reported them last."""
    return {name: value for name, value in server.metrics().items() if name.startswith("bandmaster:units{")}


def idle(server: OwnServer) -> bool:
    """Whether nothing runs, waits or is in flight, and on each stage live or pending is what the prefix cache holds."""
    return not units_left(server)


def client(server: OwnServer) -> httpx.AsyncClient:
    """An HTTP client of the server, patient enough for a loaded machine."""
    return httpx.AsyncClient(base_url=server.url, timeout=httpx.Timeout(60), trust_env=False, limits=httpx.Limits())


def completion(tokens: int, prompt: int = 8, seed: int = 0, **fields: Any) -> dict[str, Any]:
    """The body of a streamed completion: `prompt` tokens in, exactly `tokens` out."""
    ids = [1000 + (seed * 131 + index * 7) % 20_000 for index in range(prompt)]
    body = {"prompt": ids, "max_tokens": tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return body | {"temperature": 0} | fields


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream; an event without `data: [DONE]` behind it is followed by `{"cut": true}`."""
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line[6:])
    yield {"cut": True}


async def collect(http: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """A whole stream as one value: `tokens`, `text`, `finish`, `error` (the error event, or how it broke off)."""
    found: dict[str, Any] = {"tokens": [], "text": "", "finish": None, "error": None}
    try:
        async with http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                return found | {"error": json.loads(await answer.aread())["error"]}
            async for event in events(answer):
                if "error" in event:
                    found["error"] = event["error"]
                elif event.get("cut"):
                    found["error"] = found["error"] or {"code": "cut"}
                for choice in event.get("choices", ()):
                    found["tokens"] += choice.get("token_ids") or []
                    found["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                    found["finish"] = choice.get("finish_reason") or found["finish"]
    except httpx.HTTPError as error:
        found["error"] = {"code": "transport", "message": repr(error)}
    return found


def command(*arguments: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    """Run `bandmaster ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tools.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def assert_replays(run_dir: Path) -> None:
    """`bandmaster replay check` reproduces everything that the journal holds."""
    done = command("replay", "check", str(run_dir / "journal"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def assert_gone(family: list[psutil.Process], run_dir: Path) -> None:
    """No process of the server lives, and no socket file is left."""
    eventually(lambda: not [process for process in family if alive(process)], "every process of the server ends")
    left = [path.name for path in run_dir.rglob("*") if path.is_socket()]
    assert not left, f"socket files left: {left}"


def alive(process: psutil.Process) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
