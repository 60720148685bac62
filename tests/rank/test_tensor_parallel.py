"""Tensor ranks together compute what one rank computes, for every family: logits, greedy tokens, bytes stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allocator.decl import MHA, State, dtype_bytes
from daemon.rank.convert import quiet_transformers
from daemon.rank.declare import check_tensor_ranks, declare
from daemon.rank.errors import UnsupportedModel
from daemon.rank.group import SoloGroup
from daemon.rank.model import GenericModel
from daemon.rank.torch_runner import TorchRunner
from ipc.messages import RankSettings
from tests.rank.models import COMMON, NAMES, TINY, tiny_model
from tools.group_driver import GroupDriver
from tools.rank_driver import Driver, settings
from tools.thread_group import ThreadGroup, run_ranks, thread_groups
from tools.tiny_models import tiny_config

BOUND = 2e-5
"""Largest difference of a logit, relative to the largest logit, in float32: sums over ranks run in another order."""
TIE = 1e-4
PROMPTS = ([(7 * i) % 199 + 2 for i in range(31)], [(5 * i) % 97 + 2 for i in range(11)])
CHUNK, OUTPUTS = 17, 5


def model_of(models: Path, name: str) -> Path:
    """A tiny model, its vectors (biases, norms) moved off their initial zeros and ones: a bias must count once."""
    place = models / name
    if place.is_dir():
        return place
    tiny_model(models, name)
    if name in TINY:
        import transformers

        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(place, dtype=torch.float32)
        torch.manual_seed(9)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(place)
    return place


class Ran:
    """What one rank made of the prompts: logits per row and sampled token, the tokens, bytes per page and slot."""

    def __init__(self, directory: Path, group: ThreadGroup | SoloGroup, **options: str) -> None:
        config = _settings(directory, options)
        runner = TorchRunner(config, group.layout, join=lambda *_: group)
        driver = Driver(config, runner)
        self.versions = driver.prepared.versions
        self.logits: list[torch.Tensor] = []
        model: Any = runner._model
        forward = model.forward

        def recording(*given: Any) -> torch.Tensor:
            logits: torch.Tensor = forward(*given)
            self.logits.append(logits.clone())
            return logits

        model.forward = recording
        _serve(driver)
        self.tokens = _outputs(driver)
        self.stored = [band.unit_bytes for band in driver.prepared.geometry.bands]


def _settings(directory: Path, options: dict[str, str]) -> RankSettings:
    changes = {"runner": "torch", "model_path": str(directory), "dtype": "float32", "arena_bytes": 32 << 20}
    return settings(**changes, options=options)


def _serve(driver: Driver) -> None:
    """The first prompt in chunks, the second at once: it decodes beside the chunks; then both decode."""
    for row in range(len(PROMPTS)):
        driver.start(row)
    for begin in range(0, len(PROMPTS[0]), CHUNK):
        part = PROMPTS[0][begin : begin + CHUNK]
        other = PROMPTS[1] if begin == 0 else None
        driver.step([(0, part, begin + CHUNK >= len(PROMPTS[0])), (1, other, True)])
    for _ in range(OUTPUTS):
        driver.step([(0, None, True), (1, None, True)])


def _outputs(driver: Driver) -> list[list[int]]:
    return [driver.rows[row].tokens[len(prompt) :] for row, prompt in enumerate(PROMPTS)]


def both(directory: Path, ranks: int, **options: str) -> tuple[Ran, list[Ran]]:
    """One rank alone, and `ranks` together."""
    alone = Ran(directory, SoloGroup(), **options)
    return alone, run_ranks(thread_groups(ranks=ranks), lambda group: Ran(directory, group, **options))


def check_equal(alone: Ran, together: list[Ran]) -> float:
    """Equal tokens, near logits, the same bits on every rank; returns the largest difference."""
    for other in together[1:]:
        assert other.tokens == together[0].tokens
        assert all(torch.equal(a, b) for a, b in zip(other.logits, together[0].logits, strict=True))
    worst = 0.0
    for a, b in zip(alone.logits, together[0].logits, strict=True):
        assert a.shape == b.shape
        if not a.numel():
            continue
        worst = max(worst, float((a - b).abs().max() / a.abs().max()))
        best = a.topk(2).values
        same = a.argmax(-1) == b.argmax(-1)
        tied = best[:, 0] - best[:, 1] < TIE * a.abs().max()
        assert bool((same | tied).all()), "the best token differs where there is no tie"
        if not bool(same.all()):
            return worst  # behind a flip at a tie the contexts differ
    assert worst < BOUND, f"logits differ by {worst:.1e} of the largest"
    assert together[0].tokens == alone.tokens
    return worst


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are made."""
    return tmp_path_factory.mktemp("tensor-parallel")


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_compute_what_one_computes(name: str, models: Path) -> None:
    """Chunks and decodes mixed: the same greedy tokens, logits within the bound, half the bytes per page and slot."""
    alone, together = both(model_of(models, name), 2)
    check_equal(alone, together)
    layers = [[_bytes(layer) for layer in declare(tiny_config(name), "float32", 0, tp)] for tp in (1, 2)]
    assert [half * 2 for half in layers[1]] == layers[0]
    assert all(half < whole for half, whole in zip(together[0].stored, alone.stored, strict=True) if whole)
    assert "whole on each" in together[0].versions["shard"]


@pytest.mark.parametrize("name", ["llama", "olmo3", "gpt_oss", "falcon_h1", "nemotron_h"])
def test_more_ranks_than_shared_heads(name: str, models: Path) -> None:
    """Six ranks, two K/V heads, two Mamba groups: three ranks share each of them, and norms over groups still hold."""
    alone, together = both(model_of(models, name), 6)
    check_equal(alone, together)
    kept = [part.geometry for layer in declare(tiny_config(name), "float32", 0, 6) for part in layer.parts]
    assert {geometry.kv_heads for geometry in kept if isinstance(geometry, MHA)} == {1}


@pytest.mark.parametrize("name", ["qwen3_next", "lara_mini"])
def test_more_ranks_than_key_heads(name: str, models: Path) -> None:
    """Four ranks and two key heads of a gated delta net: two ranks share each, with value heads of their own."""
    directory = tiny_model(models / "four", name, num_attention_heads=4)
    check_equal(*both(directory, 4))


@pytest.mark.parametrize("name", ["llama-tied-bias", "phi3", "olmo3", "gpt_oss", "lfm3"])
def test_heads_that_do_not_divide_are_filled_up(name: str, models: Path) -> None:
    """Nine heads on three K/V heads over two ranks, like the embedded model: one K/V head of zeros, equal outputs."""
    sizes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    alone, together = both(tiny_model(models / "nine", name, **sizes), 2)
    check_equal(alone, together)
    assert "K/V heads filled up from 3 to 4" in together[0].versions["shard"]
    stored = [part.geometry for layer in declare(tiny_config(name, **sizes), "float32", 0, 2) for part in layer.parts]
    assert {geometry.kv_heads for geometry in stored if isinstance(geometry, MHA)} == {2}


BOTH_WAYS = ["llama-tied-bias", "gpt_oss", "nemotron_h", "falcon_h1", "lara_mini"]


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_two_stages_of_two_ranks(name: str, models: Path) -> None:
    """Layers over stages and every layer over ranks: the tokens of one rank; the four ranks' reports agree."""
    directory = model_of(models, name)
    alone = Ran(directory, SoloGroup())
    driver = GroupDriver(_settings(directory, {}), 2, 2)
    _serve(driver)
    assert _outputs(driver) == alone.tokens


@pytest.mark.parametrize("implementation", ["generic", "native"])
def test_both_definitions_of_llama_split(implementation: str, models: Path) -> None:
    """The generic and the native definition, each beside itself alone."""
    alone, together = both(model_of(models, "qwen2"), 2, model_impl=implementation)
    check_equal(alone, together)
    assert alone.versions["model"].startswith(implementation)


def test_hidden_units_need_not_divide(models: Path) -> None:
    """80 hidden units over 6 ranks, and 211 vocabulary rows over 2: parts differ, outputs do not."""
    directory = tiny_model(models / "uneven", "llama", intermediate_size=72, vocab_size=199)
    check_equal(*both(directory, 6))


def test_ranks_that_do_not_divide_are_refused_before_weights_are_read(models: Path) -> None:
    """The refusal names what does not divide and the numbers of ranks that do, for the model as a whole."""
    with pytest.raises(UnsupportedModel, match=r"--tp 3.*6 attention heads in 2 groups.*--tp may be 1, 2, 6"):
        check_tensor_ranks(tiny_config("llama"), 3)
    with pytest.raises(UnsupportedModel, match=r"--tp 6.*4 value heads.*--tp may be 1, 2"):
        check_tensor_ranks(tiny_config("qwen3_next"), 6)
    directory = tiny_model(models / "unread", "llama")
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="--tp may be 1, 2, 6"):
        Ran(directory, thread_groups(ranks=3)[0])


def test_attention_without_a_rule_is_replicated_and_said_so(models: Path) -> None:
    """A model whose attention has a weight that no rule knows stores all K/V heads on every rank, and runs."""
    quiet_transformers()
    import transformers

    own: Any = transformers.BitNetConfig
    torch.manual_seed(3)
    transformers.BitNetForCausalLM(own(**COMMON)).save_pretrained(models / "bitnet")
    alone, together = both(models / "bitnet", 2)
    check_equal(alone, together)
    assert together[0].stored == alone.stored
    assert "over 2 ranks; whole on each: gate_proj, up_proj, down_proj, q_proj" in together[0].versions["shard"]


def test_a_rank_holds_its_part_only(models: Path) -> None:
    """Parameters of two ranks together are the model's, but for what is said to be whole; each part has own memory."""
    directory = model_of(models, "qwen3_moe")

    def held(group: ThreadGroup | SoloGroup) -> tuple[int, int]:
        model = GenericModel(directory, torch.float32, torch.device("cpu"), group)
        parameters = [p for p in model._model.parameters() if not p.is_meta]
        own = sum(p.untyped_storage().nbytes() for p in parameters)
        return own, sum(p.nbytes for p in parameters)

    whole, _ = held(SoloGroup())
    for own, named in run_ranks(thread_groups(ranks=2), held):
        assert own == named
        assert own < 0.53 * whole


def _bytes(layer: Any) -> int:
    total = 0
    for part in layer.parts:
        geometry = part.geometry
        if isinstance(geometry, State):
            total += sum(int(np.prod(t.shape)) * dtype_bytes(t.dtype) for t in geometry.tensors)
        else:
            total += geometry.kv_heads * (geometry.k_dim + geometry.v_dim) * dtype_bytes(geometry.dtype)
    return total
