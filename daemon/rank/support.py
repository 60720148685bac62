"""What models this rank can run, read from the model's own config before any weight is loaded.

Owns the refusals: each names the feature of the config that is missing here. Must never load weights and never judge by
a list of model names where the config says enough. Invariant: what passes stores full-attention K/V in every layer
that stores anything, and calls its attention through the attention interface of `transformers`.
"""

from __future__ import annotations

from typing import Any

from daemon.rank.errors import UnsupportedModel

# What a layer kind would need here, by the name that `transformers` gives it.
MISSING_BY_LAYER_TYPE = {
    "sliding_attention": "sliding-window attention (window bands)",
    "chunked_attention": "chunked attention (window bands)",
    "linear_attention": "recurrent state (state bands)",
    "conv": "convolution state (state bands)",
    "hybrid": "attention and recurrent state in one layer (state bands)",
    "hybrid_sliding": "windowed attention and recurrent state in one layer (state and window bands)",
    "heavily_compressed_attention": "compressed attention",
    "compressed_sparse_attention": "compressed sparse attention",
    "mamba": "recurrent state (state bands)",
}
# Config fields that change attention in a way that our attention does not implement, when they are set.
MISSING_BY_FIELD = {
    "attn_logit_softcapping": "soft-capped attention scores",
    "alibi": "ALiBi position biases",
    "kv_sharing_modes": "layers that share another layer's K/V",
    "quantization_config": "weights quantized in a way of their own",
    "kv_lora_rank": "latent (MLA) attention",
}
ROPE_BY_LENGTH = ("dynamic", "longrope")  # frequencies depend on the longest row of a batch


def layer_types(config: Any) -> list[str]:
    """What each layer stores, as `transformers` itself decides it for its own caches."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    types, _ = get_layer_types_and_kwargs(config)
    return list(types)


def check_supported(config: Any, max_model_len: int = 0) -> None:
    """Raise UnsupportedModel naming what is missing; `max_model_len` 0 stands for the config's own length."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models are not supported; only decoders are")
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        raise UnsupportedModel(f"{name}: image and audio inputs are not supported; only text decoders are")
    for index, kind in enumerate(layer_types(config)):
        if kind != "full_attention":
            missing = MISSING_BY_LAYER_TYPE.get(kind, f"layers of kind {kind!r}")
            raise UnsupportedModel(f"{name}: layer {index} is {kind}; {missing} is not supported yet")
    for field, missing in MISSING_BY_FIELD.items():
        if getattr(config, field, None):
            raise UnsupportedModel(f"{name}: {field}={getattr(config, field)!r}; {missing} is not supported yet")
    _check_rope(config, max_model_len)
    _check_class(config)


def _check_rope(config: Any, max_model_len: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_BY_LENGTH:
        return
    original = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    length = max_model_len or config.max_position_embeddings
    if length > original:
        raise UnsupportedModel(
            f"{config.model_type}: rope type {kind!r} changes its frequencies beyond {original} tokens, which would "
            f"make stored K/V wrong; set --max-model-len to at most {original} (now {length})"
        )


def _check_class(config: Any) -> None:
    """The model class must exist and let its attention be replaced."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{config.model_type}: transformers has no causal language model for it")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{config.model_type}: {model_class.__name__} does not call attention through transformers' attention "
            "interface, so it cannot be given paged attention"
        )
