"""A small random model of a family that a server can serve: `bench serve --family`.

Owns its length and the tokenizer it gets. Must never be used where text means something: token i is one byte.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tools.tiny_models import NAMES, tiny_model

POSITIONS = 4096  # longest sequence
UNUSED_IDS = 10  # special tokens have low ids


def family_model(place: Path, name: str) -> tuple[Path, tuple[int, int]]:
    """Its directory under `place`, and the token ids that prompts may use; raises ValueError for an unknown family."""
    if name not in NAMES:
        raise ValueError(f"--family {name}: one of {', '.join(NAMES)}")
    directory = tiny_model(place, name, max_position_embeddings=POSITIONS)
    vocab_size = int(json.loads((directory / "config.json").read_text())["vocab_size"])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {letters[i] if i < len(letters) else f"{letters[0]}{i}": i for i in range(vocab_size)}
    made = Tokenizer(models.BPE(known, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    return directory, (UNUSED_IDS, vocab_size)
