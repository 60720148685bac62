"""Small random models and the embedded one, for tests of the model paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from daemon.rank.convert import prepare_model, quiet_transformers

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


def tiny_model(directory: Path, name: str) -> Path:
    """Save a random model of `TINY` under `directory`; returns its path."""
    quiet_transformers()
    import transformers

    class_name, changes = TINY[name]
    config = getattr(transformers, class_name)(**(COMMON | changes))
    torch.manual_seed(5)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    place = directory / name
    model.save_pretrained(place)
    return place


def embedded_model(fallback_cache: Path) -> Path:
    """The embedded model, converted in the user's cache where there is one, else under `fallback_cache`."""
    if "BANDMASTER_CACHE" not in os.environ and not (Path.home() / ".cache").is_dir():
        os.environ["BANDMASTER_CACHE"] = str(fallback_cache)
    return prepare_model(None)


class Reference:
    """Greedy `generate` of `transformers` in float32, with the gap between the two best logits of every step."""

    def __init__(self, directory: Path) -> None:
        quiet_transformers()
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model = model.eval()
        self._made: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """`count` tokens, and for each the best logit minus the second best. The longest answer is kept."""
        known = self._made.get(tuple(prompt), ([], []))
        if len(known[0]) < count:
            known = self._made[tuple(prompt)] = self._generate(prompt, count)
        return known[0][:count], known[1][:count]

    def _generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        import transformers

        configs: Any = transformers.GenerationConfig
        ids = torch.tensor([prompt])
        config = configs(do_sample=False, max_new_tokens=count, pad_token_id=0)
        self._model.generation_config = configs()
        made = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack([step[0].float() for step in made.logits]).topk(2).values
        return made.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] in one forward."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.float()
