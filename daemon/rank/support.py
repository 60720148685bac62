"""What models this rank can run, read from the model's own config before any weight is loaded.

Owns the refusals: each names the feature of the config that is missing here. Must never load weights, and judges by a
family's name only where the config does not say enough. Invariant: what passes can be declared (`declare`) and calls
its attention through the attention interface of `transformers`.
"""

from __future__ import annotations

from typing import Any

from daemon.rank.declare import STATE_RULES, declare, layer_types
from daemon.rank.errors import UnsupportedModel

# Families whose config looks as if they would run, by `model_type`; all were found by running their code.
REFUSED_FAMILIES = {
    "jamba": "its mixer computes other states when a prompt is prefilled in chunks",
    "recurrent_gemma": "it keeps its recurrent state inside its modules, where no request's memory can hold it",
    "zamba": "its attention blocks shared by several layers are not implemented",
    "zamba2": "its attention blocks shared by several layers are not implemented",
    "zaya": "its compressed convolutional attention, with states beside K/V, is not implemented",
    "kimi_linear": "its delta attention with a gate per channel, beside latent (MLA) attention, is not implemented",
    "inkling2": "its layers with several recurrent states each are not implemented",
    "bert-generation": "it is an encoder, whose tokens attend to later ones",
    "diffllama": "its layers attend twice with one set of keys and two of values",
    "hrm_text": "it runs its layers several times for a token, each time with K/V of their own",
    "dory": "it runs its layers in loops that share K/V",
    "doge": "its attention hides keys by what they hold",
    "nemotron": "its layers do not hand down to their attention what a ragged batch passes",
}
# Layer kinds that are refused with more than their name.
MISSING_BY_LAYER_TYPE = {
    "chunked_attention": "attention in chunks",
    "heavily_compressed_attention": "compressed attention",
    "compressed_sparse_attention": "compressed sparse attention",
    "hybrid_sliding": "windowed attention and several recurrent states in one layer",
}
# Config fields that change what is stored or attended in a way that is not implemented, when they are set.
MISSING_BY_FIELD = {
    "alibi": "ALiBi position biases",
    "kv_sharing_modes": "layers that share another layer's K/V",
    "num_kv_shared_layers": "layers that share another layer's K/V",
    "use_bidirectional_attention": "attention to later tokens",
    "quantization_config": "weights quantized in a way of their own",
    "kv_lora_rank": "latent (MLA) attention",
}
ROPE_BY_LENGTH = ("dynamic", "longrope")  # frequencies depend on the longest row of a batch


def check_supported(config: Any, max_model_len: int = 0) -> None:
    """Raise UnsupportedModel naming what is missing; `max_model_len` 0 stands for the config's own length."""
    name = config.model_type
    if name in REFUSED_FAMILIES:
        raise UnsupportedModel(f"{name} is not supported: {REFUSED_FAMILIES[name]}")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models are not supported; only decoders are")
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        raise UnsupportedModel(f"{name}: image and audio inputs are not supported; only text decoders are")
    if not hasattr(config, "num_hidden_layers"):
        raise UnsupportedModel(f"{name}: the config names no num_hidden_layers; only plain text decoders are supported")
    for index, kind in enumerate(layer_types(config)):
        if kind in MISSING_BY_LAYER_TYPE:
            raise UnsupportedModel(f"{name}: layer {index} is {kind}; {MISSING_BY_LAYER_TYPE[kind]} is not supported")
    for field, missing in MISSING_BY_FIELD.items():
        value = next((value for layer in config.per_layer_config if (value := getattr(layer, field, None))), None)
        if value:
            raise UnsupportedModel(f"{name}: {field}={value!r}; {missing} is not supported yet")
    _check_rope(config, max_model_len)
    _check_positions(config)
    declare(config, "float32", 0)
    _check_class(config)


def _check_rope(config: Any, max_model_len: int) -> None:
    """One set of rope parameters, or one per layer kind."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type", "default")
        if kind not in ROPE_BY_LENGTH:
            continue
        original = int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)
        length = max_model_len or config.max_position_embeddings
        if length > original:
            raise UnsupportedModel(
                f"{config.model_type}: rope type {kind!r} changes its frequencies beyond {original} tokens, which "
                f"would make stored K/V wrong; set --max-model-len to at most {original} (now {length})"
            )


def _check_positions(config: Any) -> None:
    """Positions must be those that a layer is handed: a ragged batch holds the ends and middles of many rows."""
    rotated = getattr(config, "no_rope_layers", None) or ()  # 0 for a layer without rope
    if config.model_type == "llama4_text" and config.attn_temperature_tuning and not all(rotated):
        raise UnsupportedModel(
            f"llama4_text: layer {list(rotated).index(0)} is without rope and attn_temperature_tuning is on; it scales "
            "its queries by positions that it counts from the start of the batch, so only rows alone would be right"
        )


def _check_class(config: Any) -> None:
    """The model class must exist and let its attention be replaced."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        raise UnsupportedModel(
            f"{config.model_type} is an encoder, whose tokens attend to later ones; only decoders are supported"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{config.model_type}: transformers has no causal language model for it")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # Families with a row of their own were read: they call the interface, but most do not say so.
    if config.model_type not in STATE_RULES and not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{config.model_type}: {model_class.__name__} does not call attention through transformers' attention "
            "interface, so it cannot be given paged attention"
        )
