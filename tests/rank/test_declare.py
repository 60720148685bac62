"""Declarations: what a config says each layer stores is what the model of `transformers` really keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocator.decl import MHA, Full, Layer, Part, State, StateLife, StateTensor, Window
from allocator.plan import plan_storage
from daemon.rank.convert import quiet_transformers
from daemon.rank.declare import KINDS, STATE_RULES, check_declared, declare, describe, layer_types, split_heads
from daemon.rank.errors import RankError, UnsupportedModel
from daemon.rank.support import REFUSED_FAMILIES, check_supported
from tests.rank.models import COMMON, HYBRID, LONG, NAMES, TINY
from tests.tidy.source import ROOT


def config_of(name: str, **changes: object) -> Any:
    """The config of a tiny model."""
    quiet_transformers()
    import transformers

    class_name, fields = TINY[name] if name in TINY else HYBRID[name]
    common = COMMON if name in TINY else COMMON | LONG
    return getattr(transformers, class_name)(**(common | fields | changes))


def kept_by_transformers(config: Any) -> list[Layer]:
    """What the model's own cache holds after two forwards, layer by layer: real tensors, without the config's help."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    cache = transformers.DynamicCache(config=config)
    with torch.inference_mode():
        for tokens in ([[3, 4, 5, 6, 7]], [[8]]):
            model(input_ids=torch.tensor(tokens), cache=cache, use_cache=True)
    layers = []
    kept: Any
    for kept in cache.layers:
        parts: list[Part] = []
        if getattr(kept, "keys", None) is not None:
            (_, heads, tokens_kept, k_dim), v_dim = kept.keys.shape, kept.values.shape[-1]
            assert tokens_kept == 6
            window = getattr(kept, "sliding_window", None)
            dtype = str(kept.keys.dtype).removeprefix("torch.")
            parts.append(Part(MHA(heads, k_dim, v_dim, dtype), Window(window) if window else Full()))
        tensors = []
        if getattr(kept, "conv_states", None) and kept.conv_states[0] is not None:
            # The cache keeps the newest input too, which the next step does not need.
            _, channels, width = kept.conv_states[0].shape
            tensors.append(StateTensor("conv", (channels, width - 1), "bfloat16"))
        if getattr(kept, "recurrent_states", None) and kept.recurrent_states[0] is not None:
            tensors.append(StateTensor("scan", tuple(kept.recurrent_states[0].shape[1:]), "float32"))
        if tensors:
            parts.append(Part(State(tuple(tensors)), StateLife(256)))
        layers.append(Layer(tuple(parts)))
    return layers


@pytest.mark.parametrize("name", NAMES)
def test_a_declaration_is_what_the_model_keeps(name: str) -> None:
    """Heads, dims, windows, state tensors and layers that store nothing, for every family."""
    config = config_of(name)
    check_supported(config)
    layers = declare(config, "bfloat16", 256)
    found = kept_by_transformers(config)
    check_declared(layers, found)
    assert len(layers) == len(layer_types(config))
    assert any(layer.parts for layer in layers)
    plan_storage(layers, 16)


def test_every_recurrent_family_has_a_tiny_model() -> None:
    """A row of the table of recurrent families cannot be added without a model that tests it."""
    tested = {config_of(name).model_type for name in HYBRID}
    assert set(STATE_RULES) <= tested
    assert set(KINDS) == {kind for name in NAMES for kind in layer_types(config_of(name))}


# model, tp -> (K/V heads, conv channels, scan heads) of one rank; a scan of 0 heads: none
SPLITS = [
    ("bamba", 2, (1, 3 * 16 + 2 * 1 * 16, 3)),
    ("bamba", 6, (1, 1 * 16 + 2 * 1 * 16, 1)),
    ("falcon_h1", 3, None),
    ("nemotron_h", 2, (1, 3 * 16 + 2 * 16, 3)),
    ("lara_mini", 2, (1, 2 * 1 * 16 + 2 * 24, 2)),
    ("qwen3_next", 4, None),
    ("lfm2", 2, (1, 24, 0)),
    ("lfm3", 6, (1, 8, 0)),
    ("gemma2", 3, None),
]


@pytest.mark.parametrize(("name", "tp", "want"), SPLITS)
def test_heads_and_groups_are_split_or_refused(name: str, tp: int, want: tuple[int, int, int] | None) -> None:
    """Heads are divided; K/V heads and groups too, or replicated where there are fewer than ranks; else by name."""
    config = config_of(name)
    if want is None:
        with pytest.raises(UnsupportedModel, match=rf"cannot be split over tp={tp}; tp may be 1, 2"):
            declare(config, "bfloat16", 256, tp)
        return
    parts = [part for layer in declare(config, "bfloat16", 256, tp) for part in layer.parts]
    assert {part.geometry.kv_heads for part in parts if isinstance(part.geometry, MHA)} == {want[0]}
    states = [{t.name: t.shape for t in part.geometry.tensors} for part in parts if isinstance(part.geometry, State)]
    for state in states:
        assert state["conv"][0] == want[1]
        assert state.get("scan", (0,))[0] == want[2]


def test_a_split_is_exact_for_every_number_of_ranks() -> None:
    """Whatever divides: ranks together hold all heads and at least all groups, and no rank's heads need a group that
    another rank has."""
    for heads in range(1, 25):
        for groups in (g for g in range(1, heads + 1) if heads % g == 0):
            able = []
            for tp in range(1, heads + 1):
                try:
                    local, shared = split_heads("m", "heads", heads, groups, tp)
                except UnsupportedModel:
                    continue
                able.append(tp)
                of_rank = [{head * groups // heads for head in range(r * local, (r + 1) * local)} for r in range(tp)]
                assert local * tp == heads
                assert all(len(needed) == shared for needed in of_rank)
            assert 1 in able
            assert set(able) >= {tp for tp in (2, 4) if groups % tp == 0}


def test_intervals_and_dtypes() -> None:
    """Conv states take the model's dtype, scans keep float32; no interval is a grid of one token."""
    for interval, grid in ((0, 1), (256, 256)):
        (state,) = declare(config_of("lara_mini"), "float16", interval)[0].parts
        assert state.lifetime == StateLife(grid)
        assert isinstance(state.geometry, State)
        assert [tensor.dtype for tensor in state.geometry.tensors] == ["float16", "float32"]


def test_a_window_only_model_keeps_an_owner_without_bytes() -> None:
    """Every layer of it slides: one window band, and the owner with zero unit bytes."""
    plan = plan_storage(declare(config_of("mistral-window"), "bfloat16", 0), 16)
    assert [(band.geometry.name, bool(band.geometry.unit_bytes)) for band in plan.bands] == [
        ("window:40", True),
        ("full", False),
    ]


def test_a_wrong_declaration_stops_the_boot() -> None:
    """The error names the layer, what was declared and what was found; a difference of the grid alone is none."""
    good = declare(config_of("lara_mini"), "bfloat16", 256)
    check_declared(good, declare(config_of("lara_mini"), "bfloat16", 0))
    for at, change in (
        (1, {"sliding_window": 25}),
        (0, {"linear_num_value_heads": 2}),
        (1, {"num_key_value_heads": 3}),
    ):
        other = declare(config_of("lara_mini", **change), "bfloat16", 256)
        with pytest.raises(RankError) as caught:
            check_declared(good, other)
        assert str(caught.value).startswith(f"layer {at}: declared")
        assert describe(good[at]) in str(caught.value)
        assert describe(other[at]) in str(caught.value)
    with pytest.raises(RankError, match="5 layers are declared from the config, but the loaded model has 4"):
        check_declared(good, good[:-1])


def refused(class_name: str, max_model_len: int = 0, **fields: object) -> str:
    """The refusal of a config."""
    quiet_transformers()
    import transformers

    with pytest.raises(UnsupportedModel) as caught:
        check_supported(getattr(transformers, class_name)(**fields), max_model_len)
    return str(caught.value)


FAMILY_CLASSES = {
    "jamba": "JambaConfig",
    "recurrent_gemma": "RecurrentGemmaConfig",
    "zamba": "ZambaConfig",
    "zamba2": "Zamba2Config",
    "zaya": "ZayaConfig",
    "kimi_linear": "KimiLinearConfig",
    "inkling2": "Inkling2Config",
    "bert-generation": "BertGenerationConfig",
    "diffllama": "DiffLlamaConfig",
    "hrm_text": "HrmTextConfig",
    "dory": "DoryConfig",
    "doge": "DogeConfig",
    "nemotron": "NemotronConfig",
}


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_families_that_are_not_right_are_refused_by_name(family: str) -> None:
    """With the reason of the table."""
    assert refused(FAMILY_CLASSES[family]) == f"{family} is not supported: {REFUSED_FAMILIES[family]}"


def test_the_page_on_models_names_all_of_them() -> None:
    """`docs/models.md`: every recurrent family, every tested one, every refused one with the reason of the table."""
    page = (ROOT / "docs" / "models.md").read_text()
    assert all(f"* `{family}`: {reason}\n" in page for family, reason in REFUSED_FAMILIES.items())
    tested = {config_of(name).model_type for name in NAMES}
    assert {family for family in tested | set(STATE_RULES) if f"`{family}`" not in page} == set()


def test_one_head_for_all_queries() -> None:
    """GPT-BigCode names its one K/V head by a switch."""
    quiet_transformers()
    import transformers

    config = transformers.GPTBigCodeConfig(n_layer=2, n_head=6, n_embd=48, vocab_size=211, n_inner=80, n_positions=64)
    check_declared(declare(config, "bfloat16", 0), kept_by_transformers(config))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
# config class, fields, what the refusal says
FEATURES: list[tuple[str, dict[str, object], str]] = [
    (
        "Llama4TextConfig",
        {"num_hidden_layers": 2},
        "layer 0 is chunked_attention; attention in chunks is not supported",
    ),
    (
        "Llama4TextConfig",
        {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
        "layer 3 is without rope and attn_temperature_tuning is on",
    ),
    ("OlmoHybridConfig", {}, "layer 0 is linear_attention; the recurrent state of this family is not implemented"),
    ("Gemma3nTextConfig", {}, "layers that share another layer's K/V"),
    ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "attention to later tokens"),
    ("Gemma3TextConfig", {"sliding_window": None}, "layer 0 slides, but the config names no sliding_window"),
    ("Gemma3TextConfig", {"rope_parameters": {"full_attention": DYNAMIC}}, "set --max-model-len to at most 64"),
    ("MiniMaxConfig", {}, "the recurrent state of this family is not implemented"),
    ("DeepseekV3Config", {}, "latent (MLA) attention"),
    ("BertConfig", {}, "bert is an encoder, whose tokens attend to later ones"),
    ("FuyuConfig", {}, "fuyu: the config names no num_hidden_layers"),
    ("RwkvConfig", {}, "rwkv: the config names no num_attention_heads"),
    ("Dots3NoteTextConfig", {}, "latent (MLA) attention"),
    ("Lfm2Config", {"layer_types": ["conv"], "num_hidden_layers": 1, "conv_L_cache": 1}, "a convolution of width 1"),
]


@pytest.mark.parametrize(("class_name", "fields", "text"), FEATURES, ids=[row[2][-40:] for row in FEATURES])
def test_features_that_are_not_implemented_are_refused_by_name(
    class_name: str, fields: dict[str, object], text: str
) -> None:
    """From the config alone, with the layer or the field that asks for it."""
    assert text in refused(class_name, 128, **fields)
