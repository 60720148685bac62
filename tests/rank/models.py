"""Small random models (`tools.tiny_models`) and the embedded one, for tests of the model paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from daemon.rank.convert import prepare_model, quiet_transformers
from tools.tiny_models import COMMON, HYBRID, LONG, NAMES, TINY, tiny_model

__all__ = ["COMMON", "HYBRID", "LONG", "NAMES", "TINY", "Reference", "embedded_model", "tiny_model"]


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
