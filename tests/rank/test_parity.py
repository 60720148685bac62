"""Greedy tokens equal `transformers` in float32: chunked prefill and decode mixed, any page size, every family."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from allocator.columns import f32, i32, i64
from ipc.messages import Sampling
from tests.rank.models import TINY, Reference, embedded_model, tiny_model
from tools.rank_driver import Driver, settings

TIE = 1e-4
TEXT_TOKENS = [1, 5, 23, 64, 150, 301]  # prompt lengths, around page and chunk boundaries
NATIVE = ("llama", "llama-tied-bias", "llama3-rope", "llama-linear-rope", "mistral", "qwen2", "qwen3")


def torch_driver(directory: Path, **changes: object) -> Driver:
    """A driver over the torch runner in float32, on one thread."""
    values: dict[str, object] = {
        "runner": "torch",
        "model_path": str(directory),
        "dtype": "float32",
        "page_size": 16,
        "arena_bytes": 256 << 20,
        "max_batched_tokens": 512,
    }
    return Driver(settings(**(values | changes)))


def mixed(driver: Driver, prompts: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """All prompts together: random chunks, decodes of the rows that are ready, rows starting at different steps."""
    rng = random.Random(seed)
    given = [0] * len(prompts)
    waiting = list(range(len(prompts)))
    for row in waiting:
        driver.start(row)
    made: dict[int, list[int]] = {}
    while len(made) < len(prompts):
        work: list[tuple[int, list[int] | None, bool]] = []
        for row, prompt in enumerate(prompts):
            tokens = driver.rows[row].tokens[len(prompt) :]
            if given[row] == len(prompt) and len(tokens) < count:
                work.append((row, None, True))
            elif given[row] == len(prompt) and row not in made:
                made[row] = tokens
                driver.end(row)
        for row, prompt in enumerate(prompts):
            if given[row] < len(prompt) and rng.random() < 0.7:
                part = prompt[given[row] : given[row] + rng.randint(1, 90)]
                given[row] += len(part)
                work.append((row, part, given[row] == len(prompt)))
        driver.step(work)
    return [made[row] for row in range(len(prompts))]


def compare(reference: Reference, prompts: list[list[int]], outputs: list[list[int]]) -> list[str]:
    """Flips at near ties, one line each; any other difference fails."""
    flips = []
    for prompt, output in zip(prompts, outputs, strict=True):
        want, gaps = reference.generate(prompt, len(output))
        for at, (mine, theirs) in enumerate(zip(output, want, strict=True)):
            if mine != theirs:
                assert gaps[at] < TIE, (
                    f"prompt of {len(prompt)}, token {at}: {mine} is not {theirs}, gap {gaps[at]:.2e}"
                )
                flips.append(f"prompt of {len(prompt)}, token {at}: {mine} for {theirs}, gap {gaps[at]:.2e}")
                break
    return flips


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's directory."""
    return embedded_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def embedded_reference(embedded: Path) -> Reference:
    """The embedded model in `transformers`."""
    return Reference(embedded)


@pytest.fixture(scope="module")
def texts(embedded: Path) -> list[list[int]]:
    """Prompts of real text of the lengths in TEXT_TOKENS."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedded / "tokenizer.json"))
    text = (
        "The harbour master wrote down every ship: its name, its flag, the depth of its keel. At noon the café filled "
        "with sailors who spoke of Zürich, 東京 and São Paulo, and nobody counted the hours. def count(xs): return "
        "sum(1 for _ in xs)  # 🙂 "
    )
    ids = tokenizer.encode(text * 8).ids
    return [ids[5 * n : 5 * n + length] for n, length in enumerate(TEXT_TOKENS)]


@pytest.mark.model
@pytest.mark.parametrize(("implementation", "page_size"), [("native", 1), ("native", 16), ("generic", 16)])
def test_the_embedded_model_equals_transformers(
    embedded: Path, embedded_reference: Reference, texts: list[list[int]], implementation: str, page_size: int
) -> None:
    """Real weights, prompts of 1 to 301 tokens in one mixed batch; flips only where the two best logits nearly tie."""
    driver = torch_driver(embedded, page_size=page_size, options={"model_impl": implementation})
    assert driver.prepared.versions["model"].startswith(implementation)
    outputs = mixed(driver, texts, 16, seed=page_size)
    flips = compare(embedded_reference, texts, outputs)
    assert len(flips) <= 1, "\n".join(flips)


@pytest.mark.parametrize("name", TINY)
def test_every_family_equals_transformers(tmp_path: Path, name: str) -> None:
    """Random small models of each family, on every path that covers them."""
    directory = tiny_model(tmp_path, name)
    reference = Reference(directory)
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 211) for _ in range(length)] for length in (1, 7, 40, 100)]
    for implementation in ("native", "generic") if name in NATIVE else ("auto",):
        options = {"model_impl": implementation}
        driver = torch_driver(directory, page_size=4, arena_bytes=16 << 20, options=options)
        assert driver.prepared.versions["model"].startswith("native") == (implementation == "native")
        outputs = mixed(driver, prompts, 10, seed=1)
        assert len({token for output in outputs for token in output}) > 8, "the model is too uniform to compare"
        assert not compare(reference, prompts, outputs)


@pytest.mark.model
def test_log_probabilities_equal_transformers(
    embedded: Path, embedded_reference: Reference, texts: list[list[int]]
) -> None:
    """Prompt and output log probabilities over chunks: chosen, rank and best ids are those of one plain forward."""
    prompt = texts[3]
    driver = torch_driver(embedded)
    driver.start(0, Sampling(temperature=0.0, seed=0, logprobs=2, prompt_logprobs=2))
    items = driver.step([(0, prompt[:20], False)]).logprobs
    items += driver.step([(0, prompt[20:21], False)]).logprobs
    items += driver.step([(0, prompt[21:], True)]).logprobs
    items += driver.step([(0, None, True)]).logprobs
    tokens = driver.rows[0].tokens
    want = torch.log_softmax(embedded_reference.logits(tokens), -1)
    prompts = [item for item in items if item.prompt_position >= 0]
    assert [item.prompt_position for item in prompts] == [1, 20, 21]
    chosen = np.concatenate([f32(item.values.chosen) for item in prompts])
    ids = np.concatenate([i64(item.values.top_ids).reshape(-1, 2) for item in prompts])
    ranks = np.concatenate([i32(item.values.ranks) for item in prompts])
    expected = want[: len(prompt) - 1]
    mine = expected.gather(1, torch.tensor(prompt[1:])[:, None])
    np.testing.assert_allclose(chosen, mine[:, 0].numpy(), atol=2e-4)
    assert (ids == expected.topk(2).indices.numpy()).mean() > 0.99
    assert (ranks == ((expected > mine).sum(-1) + 1).numpy()).mean() > 0.95
    outputs = [item.values for item in items if item.prompt_position < 0]
    assert [int(i64(value.top_ids)[0]) for value in outputs] == tokens[len(prompt) :]
    at = want[len(prompt) - 1 :][torch.arange(2), torch.tensor(tokens[len(prompt) :])]
    np.testing.assert_allclose([f32(value.chosen)[0] for value in outputs], at.numpy(), atol=2e-4)


@pytest.mark.model
def test_half_precision_stays_close(embedded: Path, embedded_reference: Reference, texts: list[list[int]]) -> None:
    """In bfloat16 the reference ranks what we say among its best: the output stays sane."""
    driver = torch_driver(embedded, dtype="bfloat16")
    outputs = mixed(driver, texts, 12, seed=2)
    for prompt, output in zip(texts, outputs, strict=True):
        logits = embedded_reference.logits(prompt + output)[len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert float(behind.max()) < 1.0
