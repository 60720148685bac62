"""The embedded model, served for real: a sensible answer, and tokens equal to those of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.harness import assert_replays, command, serving
from tools.own_server import OwnServer

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """The embedded model in float32."""
    with serving(tmp_path_factory.mktemp("model") / "run", "--dtype", "float32", "--arena-bytes", "512MiB") as server:
        yield server


@pytest.mark.timeout(300)
def test_a_streamed_chat_answers_sensibly(embedded: OwnServer) -> None:
    """Asked for the capital of France, the model says Paris, in a stream that ends by its own end token."""
    api = openai.OpenAI(base_url=f"{embedded.url}/v1", api_key="none", max_retries=0, timeout=120)
    stream = api.chat.completions.create(
        model=api.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    text, finish = "", None
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    assert "Paris" in text
    assert finish == "stop"
    assert "<|im_end|>" not in text


@pytest.mark.timeout(300)
def test_greedy_tokens_equal_those_of_transformers(embedded: OwnServer) -> None:
    """Prompts of many kinds, alone and at once, give the reference's tokens; ties would be listed."""
    done = command(
        "parity",
        "--url",
        embedded.url,
        "--prompts",
        "6",
        "--output-tokens",
        "10",
        "--together",
        "6",
        "--json",
        timeout_s=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["different"] == 0
    assert found["equal"] + found["flip"] == 12
    assert found["equal"] >= 10


def test_the_journal_of_a_real_model_replays(embedded: OwnServer, tmp_path: Path) -> None:
    """After the requests above and a SIGTERM, every step, decision and digest is reproduced."""
    assert embedded.stop() == 0, embedded.tail()
    assert_replays(embedded.run_dir)
