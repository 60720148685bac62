"""Small tokenizers made on the spot: byte-level BPE, and a sentencepiece-like one with byte tokens."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from daemon.frontend.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the stop sign says stop",
    "user assistant system hello world, how are you? I am fine, thank you.",
    "naïve café, Ärger, 你好世界, привет мир, 👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "one two three four five six seven eight nine ten",
]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def byte_level() -> Tokenizer:
    """Byte-level BPE with three special tokens and some merges; ids 0-2 are special."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS * 3, trainer)
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    return Tokenizer(fast.to_str(), config)


@functools.cache
def byte_fallback() -> Tokenizer:
    """A sentencepiece-like vocabulary: words, letters and the 256 byte tokens; texts lose one leading space."""
    words = ["▁hello", "▁world", "▁stop", "▁", "ab", *"abcdefghijklmnopqrstuvwxyzé"]
    names = ["<unk>", "<s>", "</s>", *[f"<0x{value:02X}>" for value in range(256)], *words]
    vocabulary = {name: index for index, name in enumerate(names)}
    fast = Fast(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(fast.to_str(), {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})


def reference_decode(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> str:
    """What the tokenizers library itself decodes."""
    return tokenizer._tokenizer.decode(ids, skip_special_tokens=skip_special)
