"""The load generator's arithmetic: what a stream's events say about time and tokens."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import trio

from tools.http_load import Load, Result, percentile, run_load, summary, take_event


def token_event(*ids: int, finish: str | None = None) -> dict[str, Any]:
    """An event that carries tokens."""
    return {"choices": [{"text": "x" * len(ids), "token_ids": list(ids), "finish_reason": finish}]}


def test_events_become_times_per_token() -> None:
    """The first event gives the first token's time; a later one's distance is shared by the tokens it brings."""
    result = Result(0, started_s=10.0)
    take_event(result, token_event(1, 2), 10.5)
    take_event(result, token_event(3), 10.6)
    take_event(result, token_event(4, 5, finish="length"), 11.0)
    take_event(result, {"choices": [], "usage": {"completion_tokens": 5}}, 11.1)
    assert result.ttft_s == pytest.approx(0.5)
    assert result.gaps_s == pytest.approx([0.1, 0.2, 0.2])
    assert (result.output_tokens, result.token_ids, result.finish_reason) == (5, [1, 2, 3, 4, 5], "length")


def test_text_without_ids_counts_as_one_token_and_an_error_is_kept() -> None:
    """Servers without extensions are measured by their events; an error event marks the request."""
    result = Result(0)
    take_event(result, {"choices": [{"text": "a"}]}, 1.0)
    take_event(result, {"choices": [{"text": "b"}]}, 1.5)
    take_event(result, {"error": {"message": "gone"}}, 1.6)
    assert result.gaps_s == [0.5]
    assert result.error == "gone"


def test_percentiles_are_nearest_rank() -> None:
    """Values that were measured, never interpolated; nan of nothing."""
    assert percentile([3, 1, 2, 4], 0.5) == 2
    assert percentile([3, 1, 2, 4], 0.99) == 4
    assert percentile([7], 0.01) == 7
    assert math.isnan(percentile([], 0.5))


def test_a_summary_leaves_failed_requests_out_of_the_times() -> None:
    """Tokens and percentiles are of the good ones, the failed are counted."""
    good = Result(0, started_s=0.0, first_s=0.1, ended_s=1.0, output_tokens=10, gaps_s=[0.1] * 9)
    row = summary(2.0, [good, Result(1, error="HTTP 500")], 2)
    assert (row["requests"], row["errors"], row["output_tok_s"]) == (2, 1, 5.0)
    assert (row["ttft_ms_p50"], row["itl_ms_p99"], row["e2e_ms_p50"]) == (100.0, 100.0, 1000.0)


def test_prompts_are_their_own_and_repeatable() -> None:
    """The same index gives the same prompt, another index another from its first page on, both of exact length."""
    load = Load("http://x", "m", prompt_tokens=40)
    assert load.prompt(3) == load.prompt(3)
    assert load.prompt(3)[:16] != load.prompt(4)[:16]
    assert len(load.prompt(3)) == 40


class Handler(BaseHTTPRequestHandler):
    """Streams as many tokens as asked for; refuses every prompt that begins with the id in `bad`."""

    bad = 0
    busy = 0
    busiest = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        """One completion."""
        cls = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with cls.lock:
            cls.busy += 1
            cls.busiest = max(cls.busiest, cls.busy)
        try:
            if body["prompt"][0] == cls.bad:
                self.send_response(429)
                self.end_headers()
                self.wfile.write(b'{"error": {"message": "full"}}')
                return
            self.send_response(200)
            self.end_headers()
            for token in range(body["max_tokens"]):
                self.wfile.write(b"data: " + json.dumps(token_event(token)).encode() + b"\n\n")
            self.wfile.write(b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % body["max_tokens"])
            self.wfile.write(b"data: [DONE]\n\n")
        finally:
            with cls.lock:
                cls.busy -= 1

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def url() -> Iterator[str]:
    """A server of the standard library on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Handler.bad = Handler.busiest = 0
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_run_keeps_order_and_concurrency(url: str) -> None:
    """Every request has its result, in order; never more at once than asked for; a refusal is that row's error."""
    load = Load(url, "m", prompt_tokens=4, output_tokens=7)
    Handler.bad = load.prompt(2)[0]
    advanced: list[int] = []
    wall_s, results = trio.run(run_load, load, range(9), 3, lambda: advanced.append(1))
    assert wall_s > 0
    assert [result.index for result in results] == list(range(9))
    assert [result.index for result in results if result.error] == [2]
    assert "429" in results[2].error
    assert all(result.token_ids == list(range(7)) for result in results if not result.error)
    assert Handler.busiest <= 3
    assert len(advanced) == 9


def test_nobody_listening_is_an_error_in_the_row() -> None:
    """A connection that fails ends that request, not the run."""
    _, results = trio.run(run_load, Load("http://127.0.0.1:9", "m", prompt_tokens=1), range(2), 2)
    assert all("ConnectError" in result.error for result in results)
