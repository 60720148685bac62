"""The other routes: models, tokenize, health, metrics, keys, request ids, limits, unknown paths."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from daemon.frontend.metrics import Metrics
from daemon.metrics import Metrics as DaemonMetrics
from ipc.errors import DaemonLost
from ipc.messages import Answer
from tests.frontend.double import MAX_MODEL_LEN, MODEL, http_client, make_service, says

TEXT = "/v1/completions"


async def test_models_are_listed_and_found():
    """One model under its served name, slashes allowed; another name is a 404 in the API's shape."""
    service, _ = make_service(says("x"), served_name="org/tiny")
    async with http_client(service) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/org/tiny")).json()
        missing = await client.get(f"/v1/models/{MODEL}")
    assert listed["data"] == [one]
    assert (one["id"], one["object"], one["max_model_len"], one["root"]) == ("org/tiny", "model", MAX_MODEL_LEN, MODEL)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_detokenize_are_inverse():
    """Text to ids with their strings and back; special tokens in the text are tokens, and come back."""
    service, _ = make_service(says("x"))
    text = "héllo <|im_end|> wörld"
    async with http_client(service) as client:
        tokenized = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        back = (await client.post("/detokenize", json={"tokens": tokenized["tokens"]})).json()
        chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})).json()
    assert back == {"prompt": text}
    assert (tokenized["count"], tokenized["max_model_len"]) == (len(tokenized["tokens"]), MAX_MODEL_LEN)
    assert (2 in tokenized["tokens"], "<|im_end|>" in tokenized["token_strs"]) == (True, True)
    assert service.tokenizer.decode(chat["tokens"], False).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/tokenize", "/detokenize"])
async def test_keys_are_asked_for(path):
    """Without or with a wrong key every API path is a 401, whatever the method; with any of the keys it is not."""
    service, _ = make_service(says("x"), api_keys=("first", "second"))
    async with http_client(service) as client:
        wrong = [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}, {"authorization": "Bearer "}]
        for headers in wrong:
            response = await client.post(path, json={}, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in ("first", "second"):
            response = await client.post(path, json={}, headers={"authorization": f"Bearer {key}"})
            assert response.status_code in (400, 405)
        for open_path in ("/health", "/health/live", "/metrics", "/version"):
            assert (await client.get(open_path)).status_code == 200


async def test_request_ids_are_kept_or_made():
    """A well-formed id comes back; a malformed one is replaced; errors and unknown paths carry one too."""
    service, _ = make_service(says("x"), api_keys=("key",))
    async with http_client(service) as client:
        given = await client.get("/version", headers={"x-request-id": "abc-1.2:3"})
        strange = await client.get("/version", headers={"x-request-id": "a b\tc"})
        refused = await client.post(TEXT, json={}, headers={"x-request-id": "mine"})
        unknown = await client.get("/nope", headers={"authorization": "Bearer key"})
    assert given.headers["x-request-id"] == "abc-1.2:3"
    assert len(strange.headers["x-request-id"]) == 32
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")
    assert (unknown.status_code, len(unknown.headers["x-request-id"])) == (404, 32)


async def test_unknown_paths_and_methods_are_in_the_apis_shape():
    """404 and 405 as the API has errors."""
    service, _ = make_service(says("x"))
    async with http_client(service) as client:
        unknown = await client.post("/v1/embeddings", json={})
        method = await client.get(TEXT)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "allow" in method.headers


async def test_bodies_over_the_limit_are_413():
    """One byte over the limit is refused on every path that takes a body, at the limit it is not."""
    service, daemon = make_service(says("x"), body_limit_bytes=1000)
    async with http_client(service) as client:
        for path in (TEXT, "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = await client.post(path, content=b" " * 1001)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        body = b'{"prompt": "x"}'
        response = await client.post(TEXT, content=body + b" " * (1000 - len(body)))
    assert (response.status_code, len(daemon.streams)) == (200, 1)


async def test_a_body_that_does_not_arrive_is_408(autojump_clock):
    """A client that sends half a body is answered when the patience is over."""
    service, _ = make_service(says("x"))

    async def slow():
        yield b"{"
        await trio.sleep_forever()

    async with http_client(service, timeout=None) as client:
        response = await client.post(TEXT, content=slow())
    assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")


@pytest.mark.parametrize(
    ("answer", "live", "ready", "progress"),
    [
        (Answer(1, True, '{"live": true, "ready": true, "progress": true}'), True, True, True),
        (Answer(1, False, '{"live": true, "ready": false, "progress": true}'), True, False, True),
        (Answer(1, False, '{"live": true, "ready": true, "progress": false}'), True, False, False),
        (Answer(1, True, '{"live": false, "ready": false}'), False, False, False),
        (DaemonLost("gone"), False, False, False),
        (trio.TooSlowError(), False, False, False),
    ],
)
async def test_health_is_the_daemons_word_or_red(answer, live, ready, progress):
    """Ready and live are what the daemon says; no answer is red; the document is the same on all paths (X1)."""
    service, daemon = make_service(says("x"))
    daemon.answers["health"] = answer
    async with http_client(service) as client:
        responses = [await client.get(path) for path in ("/health", "/health/ready", "/health/live")]
        assert [r.status_code for r in responses] == [200 if ready else 503] * 2 + [200 if live else 503]
        body = responses[0].json()
        assert (body["live"], body["ready"], body["progress"]) == (live, ready, progress)
        assert all(r.json() == body for r in responses)
        assert ("why" in body) == isinstance(answer, BaseException)
        service.drain()
        assert (await client.get("/health")).json()["status"] == "draining"
        assert (await client.get("/health")).status_code == 503


async def test_metrics_join_ours_and_the_daemons():
    """One exposition with both; without a daemon ours alone, with daemon_up 0."""
    service, daemon = make_service(says("one two", per_event=2))
    other = DaemonMetrics()
    daemon.answers["metrics"] = Answer(1, True, other.exposition())
    async with http_client(service) as client:
        await client.post(TEXT, json={"prompt": "x"})
        both = {family.name: family for family in text_string_to_metric_families((await client.get("/metrics")).text)}
        daemon.answers["metrics"] = DaemonLost("gone")
        alone = (await client.get("/metrics")).text
    assert {"bandmaster:num_requests_running", "bandmaster:time_to_first_token_seconds"} <= set(both)
    counts = {s.name: s.value for s in both["bandmaster:time_to_first_token_seconds"].samples}
    assert counts["bandmaster:time_to_first_token_seconds_count"] == 1
    assert "bandmaster:daemon_up 0.0" in alone
    assert 'bandmaster:daemon_client_events{event="resumed"} 5.0' in alone
    assert 'bandmaster:http_responses_total{route="/v1/completions",status="200"} 1.0' in alone
    assert 'bandmaster:http_request_ends_total{end="ok",route="completions"} 1.0' in alone


def test_no_metric_has_two_owners():
    """The front end's and the daemon's families are disjoint, so the joined text is valid."""
    ours = {family.name for family in Metrics().registry.collect()}
    theirs = {family.name for family in DaemonMetrics().registry.collect()}
    assert not ours & theirs


def test_latencies_are_measured_from_the_events():
    """TTFT from arrival, the distance of later tokens by their number, the mean per token, with a clock of our own."""
    now = [100.0]
    metrics = Metrics(lambda: now[0])
    clock = metrics.clock()
    for at, tokens in ((100.5, 1), (100.7, 2), (100.8, 0), (101.0, 3)):
        now[0] = at
        clock.tokens(tokens)
    clock.ended()

    def total(histogram):
        samples = {s.name.rsplit("_", 1)[1]: s.value for s in histogram.collect()[0].samples}
        return samples["count"], pytest.approx(samples["sum"])

    assert total(metrics.time_to_first_token) == (1, 0.5)
    assert total(metrics.inter_token_latency) == (2, 0.1 + 0.1)
    assert total(metrics.time_per_output_token) == (1, 0.5 / 5)
    assert total(metrics.e2e_latency) == (1, 1.0)


async def test_the_version_of_a_tree_that_is_not_installed(monkeypatch):
    """It is the project file's, never an unknown one."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    service, _ = make_service(says("x"))
    async with http_client(service) as client:
        told = (await client.get("/version")).json()["version"]
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f'version = "{told}"' in project.read_text().splitlines()


FLUSHED = '{"flushed": true, "freed": {"full": 7}, "kept": {"full": 0}}'
READ = '{"flushed": false, "freed": {"full": 3}, "kept": {"full": 4}, "read_by": ["a"]}'


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (Answer(1, True, FLUSHED), 200, None),
        (Answer(1, False, READ), 409, None),
        (Answer(1, False, '{"blocked_by": "booting: there is no memory yet"}'), 503, "not_flushed"),
        (Answer(1, False, "unknown question 'flush_cache'; known: ping"), 503, "not_flushed"),
        (DaemonLost("gone"), 503, "daemon_lost"),
        (trio.TooSlowError(), 503, "daemon_slow"),
    ],
)
async def test_X10_a_flush_of_the_cache_is_done_or_says_why_not(answer, status, code):
    """Success with what was freed, failure with who reads, or an error in the API's shape; never a mere 200."""
    service, daemon = make_service(says("x"), api_keys=("key",))
    daemon.answers["flush_cache"] = answer
    async with http_client(service) as client:
        assert (await client.post("/flush_cache")).status_code == 401, "a key is asked for like on the API"
        response = await client.post("/flush_cache", headers={"authorization": "Bearer key"})
        assert (await client.get("/flush_cache", headers={"authorization": "Bearer key"})).status_code == 405
    assert response.status_code == status
    if code is None:
        assert response.json() == json.loads(answer.body)
    else:
        assert response.json()["error"]["code"] == code


async def test_monitors_are_no_load():
    """An idle server says so to whoever asks: neither /health nor /metrics counts the question itself."""
    service, _ = make_service(says("x"))
    async with http_client(service) as client:
        health = (await client.get("/health")).json()
        metrics = (await client.get("/metrics")).text
    assert health["open_requests"] == 0
    assert "http_open_requests 0.0" in metrics
