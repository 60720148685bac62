"""Reference: greedy `generate` of `transformers` on a model directory, the thing that our output is compared with.

Owns one loaded model. Must never share code with the ranks: an error there must not be found again here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

THREADS_TRIED = (1, 2, 4)
TRIAL_TOKENS = 8


class Reference:
    """A causal language model of `transformers`, on the CPU; token ids in, token ids out."""

    def __init__(self, directory: str | Path, dtype: str = "float32") -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        logging.disable_progress_bar()

        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=getattr(torch, dtype), local_files_only=True
        )
        self._model.eval()
        self._model.generation_config = GenerationConfig()  # nothing of the model's own defaults: greedy and neutral
        eos = self._model.config.eos_token_id
        self.eos_ids: list[int] = [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [int(eos)]

    @property
    def threads(self) -> int:
        """Compute threads."""
        return int(self._torch.get_num_threads())

    def choose_threads(self, prompt: Sequence[int]) -> None:
        """Keep the number of threads that generates fastest here, so that the comparison is with its best."""
        took_s = {}
        for threads in THREADS_TRIED:
            if threads <= (os.cpu_count() or 1):
                self._torch.set_num_threads(threads)
                self.generate(prompt, 1, stop_at_eos=False)
                began = time.monotonic()
                self.generate(prompt, TRIAL_TOKENS, stop_at_eos=False)
                took_s[threads] = time.monotonic() - began
        self._torch.set_num_threads(min(took_s, key=lambda threads: took_s[threads]))

    def generate(self, prompt: Sequence[int], tokens: int, stop_at_eos: bool = True) -> list[int]:
        """At most `tokens` greedy output ids, the end token included when it came."""
        from transformers import GenerationConfig

        eos = (self.eos_ids or None) if stop_at_eos else None
        config = GenerationConfig(
            do_sample=False, max_new_tokens=tokens, eos_token_id=eos, pad_token_id=(self.eos_ids or [0])[0]
        )
        ids = self._torch.tensor([list(prompt)], dtype=self._torch.int64)
        with self._torch.inference_mode():
            made = self._model.generate(ids, attention_mask=self._torch.ones_like(ids), generation_config=config)
        return [int(token) for token in made[0, len(prompt) :]]

    def margins(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """For each output token: the reference's best logit there minus that token's, 0 where it is the best."""
        ids = self._torch.tensor([[*prompt, *output]], dtype=self._torch.int64)
        with self._torch.inference_mode():
            logits = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        best = logits.max(dim=-1).values
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return [float(value) for value in best - chosen]
