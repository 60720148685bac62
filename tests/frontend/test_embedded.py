"""The embedded model's real tokenizer and template, beside the libraries that define them."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.frontend.chat_template import ChatTemplate, find_template
from daemon.frontend.tokenizer import Tokenizer, load_tokenizer
from daemon.rank.convert import prepare_model
from tests.frontend.test_detokenizer import HARD, deltas
from tests.frontend.tokenizers_made import reference_decode

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 👩‍👩‍👧‍👦"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": " <|im_end|> c\n\n"},
    ],
]


@pytest.fixture(scope="module")
def directory() -> Path:
    """The prepared embedded model."""
    return prepare_model(None)


@pytest.fixture(scope="module")
def tokenizer(directory) -> Tokenizer:
    """Its tokenizer."""
    return load_tokenizer(directory)


@pytest.mark.model
def test_every_token_and_random_ids_decode_as_the_library_does(tokenizer):
    """All ids alone, and random runs of ids, special ones hidden or shown."""
    for token in range(len(tokenizer.pieces)):
        assert tokenizer.decode([token], False) == reference_decode(tokenizer, [token], False)
    rng = random.Random(11)
    for _ in range(1000):
        ids = [rng.randrange(len(tokenizer.pieces)) for _ in range(rng.randrange(40))]
        skip = rng.random() < 0.5
        assert "".join(deltas(tokenizer, ids, skip_special=skip)) == reference_decode(tokenizer, ids, skip)


@pytest.mark.model
@pytest.mark.parametrize("text", [*HARD, "한국어 ไทย हिन्दी العربية 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ½ ﬁ \U0010ffff"])
def test_texts_come_back_whole_at_every_cut(tokenizer, text):
    """Deltas have only whole characters and join to the one-shot decode, wherever the output ends (A1)."""
    ids = tokenizer.encode(text, False)
    for cut in range(len(ids) + 1):
        parts = deltas(tokenizer, ids[:cut])
        assert "".join(parts) == reference_decode(tokenizer, ids[:cut])
        assert not any("\ufffd" in part for part in parts[:-1])


@pytest.mark.model
@pytest.mark.parametrize("messages", CHATS)
def test_chats_are_tokenized_as_transformers_does(directory, tokenizer, messages):
    """Template and special tokens give the ids of `apply_chat_template`; plain text those of the call."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(directory)
    source = find_template(directory, tokenizer, "")
    for add in (True, False):
        text = ChatTemplate(source, tokenizer).render(messages, add, {})
        assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, False) == expected
    assert tokenizer.encode(messages[0]["content"], True) == reference(messages[0]["content"])["input_ids"]


def test_the_front_end_imports_no_tensor_library():
    """A front end starts fast and stays small: torch, transformers and the rank are not loaded."""
    code = "import daemon.frontend.__main__, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
