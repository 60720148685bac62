"""Small random models of every family, one seed: what parity is shown on where no weights can be had.

Owns their configs. Must never depend on a download. Run as a script it writes them:
`python -m tools.tiny_models DIR NAME...` (no name: all).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from daemon.rank.convert import quiet_transformers

# Random weights wide enough that the best token is not always the same one.
SPREAD = 0.2
COMMON: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": SPREAD,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name -> (config class, changes to COMMON)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied-bias": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 12}),
    "phi3": ("Phi3Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}
SLIDING, FULL, LINEAR, CONV = "sliding_attention", "full_attention", "linear_attention", "conv"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 1024,
}
LONG: dict[str, Any] = {"max_position_embeddings": 4096, "num_hidden_layers": 4, "tie_word_embeddings": False}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
DENSE_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
DELTA: dict[str, Any] = DENSE_DELTA | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# Models that store more than full-attention K/V; name -> (config class, changes to COMMON | LONG).
HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-window": ("MistralConfig", {"sliding_window": 40}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "layer_types": [SLIDING, FULL] * 2},
    ),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 32, "attn_logit_softcapping": 5.0},
    ),
    "olmo3": ("Olmo3Config", {"sliding_window": 16, "layer_types": [SLIDING, FULL, SLIDING, SLIDING]}),
    "cohere2": ("Cohere2Config", {"sliding_window": 64, "layer_types": [SLIDING, FULL] * 2, "logit_scale": 1.0}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
        },
    ),
    "bamba": ("BambaConfig", MAMBA | {"attn_layer_indices": [1, 3]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        MAMBA
        | {
            "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
            "position_embedding_type": "rope",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.5,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "num_hidden_layers": 6,
            "layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR, FULL],
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        MAMBA
        | {
            "mamba_d_ssm": 96,
            "num_hidden_layers": 3,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 1.3],
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 1.2,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "mlp_multipliers": [0.9, 1.2],
            "embedding_multiplier": 1.3,
            "lm_head_multiplier": 0.9,
        },
    ),
    "falcon_h1-plain": ("FalconH1Config", MAMBA | {"mamba_d_ssm": 96, "num_hidden_layers": 2}),
    "qwen3_next": ("Qwen3NextConfig", DELTA | {"layer_types": [LINEAR, FULL, LINEAR, LINEAR]}),
    "lara_mini": (
        "LaraMiniConfig",
        DELTA | {"num_hidden_layers": 5, "layer_types": [LINEAR, SLIDING, LINEAR, FULL, SLIDING], "sliding_window": 24},
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", DENSE_DELTA | {"layer_types": [LINEAR, FULL, LINEAR, LINEAR]}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", DELTA | {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": [CONV, FULL, CONV, FULL],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": [CONV, FULL, CONV, FULL],
            "conv_L_cache": 3,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm3": (
        "Lfm3Config",
        {
            "num_hidden_layers": 5,
            "layer_types": [CONV, SLIDING, FULL, CONV, SLIDING],
            "conv_L_cache": 7,
            "head_dim": 16,
            "sliding_window": 20,
        },
    ),
}
NAMES = [*TINY, *HYBRID]


def tiny_config(name: str, **more: Any) -> Any:
    """The config of a model of `TINY` or `HYBRID`, with changes."""
    quiet_transformers()
    import transformers

    class_name, changes = TINY[name] if name in TINY else HYBRID[name]
    common = COMMON if name in TINY else COMMON | LONG
    return getattr(transformers, class_name)(**(common | changes | more))


def tiny_model(directory: Path, name: str, **more: Any) -> Path:
    """Save a random model of `TINY` or `HYBRID` under `directory`; returns its path. `more` changes its config.

    Vectors of hybrid models (norms, biases, decays, sinks) are moved off their initial constants.
    """
    config = tiny_config(name, **more)
    torch.manual_seed(5)
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    if name in HYBRID:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += SPREAD * torch.randn_like(parameter)
    place = directory / name
    model.save_pretrained(place)
    return place


if __name__ == "__main__":
    for wanted in sys.argv[2:] or NAMES:
        sys.stdout.write(f"{tiny_model(Path(sys.argv[1]), wanted)}\n")
