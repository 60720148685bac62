"""Incremental detokenization: the deltas joined are the one-shot decode, and no character is ever shown half."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.frontend.detokenizer import Detokenizer
from daemon.frontend.pieces import UnsupportedTokenizer, build_pieces
from tests.frontend.tokenizers_made import byte_fallback, byte_level, reference_decode

HARD = ["naïve café", "你好，世界", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽 ok", "a\u0301\u0302", "𐍈𐍈", "mixed 你👍é end", " ", ""]


def deltas(tokenizer, ids, **options):
    """Every text that came out, the flushed tail last."""
    state = Detokenizer(tokenizer.pieces, **options)
    return [*(state.push(token) for token in ids), state.flush()]


def bytes_as_tokens(tokenizer, text):
    """Ids of single-byte tokens: every character is split wherever it can be."""
    single = {piece: index for index, piece in enumerate(tokenizer.pieces.visible) if len(piece) == 1}
    return [single[bytes([value])] for value in text.encode()]


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_characters_split_over_tokens_never_show_half(make, text):
    """Texts fed byte by byte come out whole, each delta made of whole characters (A1)."""
    tokenizer = make()
    parts = deltas(tokenizer, bytes_as_tokens(tokenizer, text))
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)


@pytest.mark.parametrize("text", HARD)
def test_every_cut_equals_the_one_shot_decode(text):
    """An output that ends anywhere, in mid-character too, gives what the tokenizer's own decoder gives."""
    tokenizer = byte_level()
    for ids in (bytes_as_tokens(tokenizer, text), tokenizer.encode(text, False)):
        for cut in range(len(ids) + 1):
            parts = deltas(tokenizer, ids[:cut])
            assert "".join(parts) == reference_decode(tokenizer, ids[:cut])
            assert all("\ufffd" not in part for part in parts[:-1])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 600), max_size=40), st.booleans())
def test_any_byte_level_ids_equal_the_one_shot_decode(ids, skip):
    """Arbitrary ids, special and unknown ones among them, decode as the library decodes them at once."""
    tokenizer = byte_level()
    joined = "".join(deltas(tokenizer, ids, skip_special=skip))
    assert joined == reference_decode(tokenizer, ids, skip)
    assert joined == tokenizer.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab é你👍‍ \n", max_size=12))
def test_byte_fallback_text_comes_back(text):
    """Texts that need byte tokens come back, and equal the library's decode."""
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text, False)
    assert "".join(deltas(tokenizer, ids, at_start=True)) == reference_decode(tokenizer, ids) == text


def test_output_keeps_its_leading_space_and_a_text_of_its_own_loses_it():
    """The sentencepiece prefix space belongs to the prompt's start only."""
    tokenizer = byte_fallback()
    ids = tokenizer.encode("hello world", False)
    assert tokenizer.decode(ids) == "hello world"
    assert "".join(deltas(tokenizer, ids, at_start=False)) == " hello world"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_begun_by_the_prompt_is_finished_by_the_output(cut):
    """A prompt of ids may end in mid-character: the output then shows that character once, whole."""
    tokenizer = byte_level()
    ids = bytes_as_tokens(tokenizer, "x👍y")
    state = Detokenizer(tokenizer.pieces)
    state.prime(ids[: 1 + cut])
    assert "".join([*(state.push(token) for token in ids[1 + cut :]), state.flush()]) == "👍y"


def test_a_character_the_output_does_not_finish_leaves_no_trace():
    """A prompt's broken end is the prompt's: the output starts clean, and an empty one is empty."""
    tokenizer = byte_level()
    ids = bytes_as_tokens(tokenizer, "x👍")[:-1]
    for output, expected in ((bytes_as_tokens(tokenizer, "y"), "y"), ([], "")):
        state = Detokenizer(tokenizer.pieces)
        state.prime(ids)
        assert "".join([*(state.push(token) for token in output), state.flush()]) == expected


def test_special_tokens_are_hidden_or_shown():
    """`skip_special` decides, in the middle of a split character too."""
    tokenizer = byte_level()
    first, *rest = bytes_as_tokens(tokenizer, "é")
    ids = [first, 2, *rest]
    assert "".join(deltas(tokenizer, ids)) == "é"
    assert "<|im_end|>" in "".join(deltas(tokenizer, ids, skip_special=False))


def test_cost_of_a_token_does_not_grow():
    """Tokens that never complete a character cost what others cost: later ones are not slower than early ones."""
    tokenizer = byte_level()
    lead = bytes_as_tokens(tokenizer, "👍")[0]
    state = Detokenizer(tokenizer.pieces)

    def block() -> float:
        start = time.process_time()
        for _ in range(20_000):
            state.push(lead)
        return time.process_time() - start

    first = min(block(), block())
    later = min(block() for _ in range(4))
    assert later < 5 * first + 0.01


def test_decoders_that_depend_on_neighbours_are_refused_by_name():
    """WordPiece cannot be decoded token by token: it is refused at boot, not decoded wrongly."""
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        build_pieces({"type": "WordPiece", "prefix": "##", "cleanup": True}, {"a": 0}, set())
    with pytest.raises(UnsupportedTokenizer, match="no decoder"):
        build_pieces(None, {"a": 0}, set())
