"""Hybrid families equal `transformers` in float32: windows, recurrent state, any chunking, stale memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from allocator.decl import Layer
from daemon.rank.declare import check_declared, declare
from daemon.rank.errors import RankError, UnsupportedModel
from daemon.rank.facts import read_files
from daemon.rank.mixers.mamba2 import Mamba2Mixer
from daemon.rank.mixers.table import MIXERS
from daemon.rank.model import GenericModel
from daemon.rank.products import can_pack
from tests.rank.models import HYBRID, Reference, tiny_model
from tests.rank.test_parity import TIE, compare, mixed, torch_driver
from tools.rank_driver import Driver

LENGTHS = (1, 2, 30, 64, 130)  # around chunk, page, window and kernel widths; windows are 16 to 64 tokens
CPU = torch.device("cpu")


LINEAR, FULL, SLIDING, CONV = "linear_attention", "full_attention", "sliding_attention", "conv"
# Forms that configs of these families take: other norms, biases, groups, kernels, experts and orders of layers.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("granitemoehybrid", {"position_embedding_type": None, "num_local_experts": 0, "num_experts_per_tok": 0}),
    ("bamba", {"mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 2}),
    ("bamba", {"mamba_n_groups": 6, "mamba_d_conv": 8, "attn_layer_indices": []}),
    ("nemotron_h", {"layers_block_type": ["mlp", LINEAR, "moe", LINEAR, FULL], "moe_latent_size": 24, "n_groups": 1}),
    ("falcon_h1", {"mamba_norm_before_gate": True, "mamba_d_ssm": None}),
    ("falcon_h1-plain", {"mamba_n_groups": 1, "projectors_bias": True, "mamba_proj_bias": True}),
    ("qwen3_next", {"linear_num_key_heads": 1, "linear_value_head_dim": 16, "mlp_only_layers": [0, 1]}),
    ("lara_mini", {"linear_num_key_heads": 4, "layer_types": [SLIDING, LINEAR, FULL, SLIDING, LINEAR]}),
    ("lfm2", {"layer_types": [CONV] * 4, "conv_bias": False}),
    ("lfm3", {"use_attention_gate": False, "use_sandwich_norm": False, "conv_bias": True, "sliding_window": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of this module are saved."""
    return tmp_path_factory.mktemp("hybrid")


def spoiled(driver: Driver) -> Driver:
    """The same driver with NaN in every unit of its arena: what was never written nor zeroed is never read."""
    start = driver.prepared.geometry.chain_start_bytes
    driver.runner.device.arena.data[start:] = 0xFF  # type: ignore[attr-defined]
    return driver


@pytest.mark.parametrize("name", HYBRID)
def test_every_hybrid_family_equals_transformers(place: Path, name: str) -> None:
    """Random chunks and decodes of five rows in one batch, twice over so that slots and pages are used again."""
    directory = tiny_model(place, name)
    reference = Reference(directory)
    rng = random.Random(3)
    driver = spoiled(torch_driver(directory, page_size=4, arena_bytes=16 << 20))
    for seed in (1, 2):
        prompts = [[rng.randrange(2, 211) for _ in range(length)] for length in LENGTHS]
        outputs = mixed(driver, prompts, 12, seed)
        assert len({token for output in outputs for token in output}) > 20, "the model is too uniform to compare"
        assert not compare(reference, prompts, outputs)


@pytest.mark.parametrize("name", ["bamba", "lfm3", "lara_mini", "gpt_oss"])
def test_any_chunk_size_gives_the_same_tokens(place: Path, name: str) -> None:
    """One prompt prefilled in chunks of one token, less than a convolution's kernel, a block, and whole."""
    directory = tiny_model(place, name)
    reference = Reference(directory)
    rng = random.Random(4)
    prompt = [rng.randrange(2, 211) for _ in range(101)]
    driver = spoiled(torch_driver(directory, page_size=16, arena_bytes=16 << 20))
    outputs = [driver.generate(0, prompt, 10, chunk) for chunk in (1, 2, 3, 5, 16, 17, 64, 100, 0)]
    assert not compare(reference, [prompt] * len(outputs), outputs)


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_forms_of_a_family_equal_a_plain_forward(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """Every token is the best of one forward without a cache: `generate` cannot run some of these at all."""
    directory = tiny_model(tmp_path, name, **changes)
    reference = Reference(directory)
    rng = random.Random(6)
    prompts = [[rng.randrange(2, 211) for _ in range(length)] for length in (1, 9, 70)]
    driver = spoiled(torch_driver(directory, page_size=16, arena_bytes=8 << 20))
    for prompt, output in zip(prompts, mixed(driver, prompts, 8, seed=1), strict=True):
        best = reference.logits(prompt + output)[len(prompt) - 1 : -1].topk(2)
        sure = best.values[:, 0] - best.values[:, 1] > TIE
        assert (best.indices[:, 0] == torch.tensor(output))[sure].all()
        assert sure.sum() > 6


def test_time_steps_are_clamped_wherever_a_prompt_is_cut(place: Path) -> None:
    """With a limit that binds: all cuts, decode steps too, give what one plain forward of `transformers` gives."""
    directory = tiny_model(place / "clamped", "nemotron_h", time_step_min=1.5)
    reference, free = Reference(directory), Reference(tiny_model(place, "nemotron_h"))
    rng = random.Random(5)
    prompt = [rng.randrange(2, 211) for _ in range(60)]
    driver = torch_driver(directory, page_size=16, arena_bytes=16 << 20)
    first, *others = [driver.generate(0, prompt, 12, chunk) for chunk in (0, 1, 7, 59)]
    assert others == [first] * 3
    assert reference.logits(prompt + first)[len(prompt) - 1 : -1].argmax(-1).tolist() == first
    assert first != free.generate(prompt, 12)[0], "the limit never bound"


def test_every_mixer_class_is_compared(place: Path) -> None:
    """Each row of the table of mixers occurs in one of the models above."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    seen = set()
    for name in HYBRID:
        config = transformers.AutoConfig.from_pretrained(tiny_model(place, name))
        with torch.device("meta"):
            seen |= {type(module).__name__ for module in auto.from_config(config).modules()}
    assert set(MIXERS) <= seen


@pytest.mark.parametrize("name", ["falcon_h1", "lara_mini", "nemotron_h"])
def test_the_probe_finds_what_is_declared(place: Path, name: str) -> None:
    """Layers with both, one or no kind of memory are found as declared, and a wrong declaration is refused."""
    files = read_files(tiny_model(place, name), name, 0)
    for dtype in (torch.float32, torch.bfloat16):
        model = GenericModel(files.directory, dtype, CPU)
        layers = declare(files.config, str(dtype).removeprefix("torch."), 256)
        check_declared(layers, model.layers)
        with pytest.raises(RankError, match="layer 0: declared"):
            check_declared([Layer(), *layers[1:]], model.layers)


def test_linear_layers_are_packed(place: Path) -> None:
    """Their plain weights are gone where this torch packs, and the tied embedding is still there."""
    directory = tiny_model(place / "tied", "lfm2", tie_word_embeddings=True)
    model = GenericModel(directory, torch.float32, CPU)
    linear = [module for module in model._model.modules() if type(module) is torch.nn.Linear]
    packs = can_pack(torch.zeros(4, 4))
    assert len(linear) > 20
    assert all(module.weight.is_meta == packs for module in linear)
    assert not model._model.get_input_embeddings().weight.is_meta


def test_an_unknown_activation_is_refused() -> None:
    """A mixer whose convolution is followed by anything but silu."""
    from transformers import BambaConfig
    from transformers.models.bamba.modeling_bamba import BambaMixer

    _, changes = HYBRID["bamba"]
    module = BambaMixer(BambaConfig(hidden_size=48, hidden_act="relu", **changes), 0)
    with pytest.raises(UnsupportedModel, match="layer 0: activation 'relu' behind the convolution of BambaMixer"):
        Mamba2Mixer(module)
