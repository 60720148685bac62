"""The prompts of the parity check: short and long, many scripts, shared beginnings.

Owns thirty texts with the number of tokens that each is cut to. Must never depend on a tokenizer. Invariant: lengths
span 1 to 1,500 tokens, and at least three groups of prompts share a prefix of more than one page.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """One prompt: a name, a text, and the tokens it is cut to (0: all of it)."""

    name: str
    text: str
    tokens: int = 0


HARBOUR = (
    "The harbour master kept three ledgers. In the first he wrote what arrived, in the second what left, and in the "
    "third what he could not explain. For most of the year the third stayed empty, and he was proud of that. "
)
LETTER = (
    "Dear colleague, thank you for the careful notes on the pump test. I agree that the second reading is too high, "
    "and I suspect the seal rather than the gauge. Before we take anything apart, please repeat the test twice: "
)
RECIPE = (
    "To make bread you need flour, water, salt and time. Mix the flour with most of the water and wait; add the salt "
    "with the rest. Fold it four times, half an hour apart, and let it rise until it has doubled. "
)
CODE = (
    "def merge(left, right):\n    out, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n            out.append(left[i]); i += 1\n        else:\n"
    "            out.append(right[j]); j += 1\n    return out + left[i:] + right[j:]\n\n"
)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

CASES: tuple[Case, ...] = (
    Case("one token", "The", 1),
    Case("two tokens", "Once upon", 2),
    Case("a word", "Photosynthesis"),
    Case("a page less one", HARBOUR, 15),
    Case("a page", HARBOUR, 16),
    Case("a page and one", HARBOUR, 17),
    Case("chat, capital", CHAT.format("What is the capital of France?")),
    Case("chat, list", CHAT.format("Name three primary colours, one on each line.")),
    Case("chat, sum", CHAT.format("What is 17 + 25? Answer with the number only.")),
    Case("chat, story", CHAT.format("Write the first sentence of a story about a lighthouse.")),
    Case("german", "Der schnellste Weg vom Bahnhof zum Hafen führt über die alte Brücke, denn"),
    Case("french", "Il était une fois, dans une forêt où même l'hiver sentait la menthe, un hérisson qui"),
    Case("polish", "Zażółć gęślą jaźń, powiedział nauczyciel, i wszyscy"),
    Case("greek", "Η θάλασσα ήταν ήρεμη και ο ουρανός"),
    Case("russian", "Утром мы вышли из дома и увидели, что"),
    Case("arabic", "في الصباح الباكر خرج الصياد إلى البحر و"),
    Case("hindi", "एक समय की बात है, एक छोटे से गाँव में"),
    Case("japanese", "昔々あるところに、おじいさんとおばあさんが"),
    Case("chinese", "从前有一座山，山里有一座庙，"),
    Case("emoji", "Weather today: ☀️🌧️🌈 and my mood: 😀😅🤷🏽‍♀️ because"),
    Case("digits", "3.14159 26535 89793 23846 26433 83279 50288"),
    Case("code", CODE + "def sort(items):\n"),
    Case("white space", "a\n\n\n\tb   c\r\n    d"),
    Case("letter, seal", LETTER * 2 + "once with the old seal and once with"),
    Case("letter, gauge", LETTER * 2 + "and write down the gauge's number, because"),
    Case("harbour, long", HARBOUR * 8 + "But in the spring", 330),
    Case("harbour, longer", HARBOUR * 14 + "Then, one morning,", 600),
    Case("recipe, long", RECIPE * 18 + "When it is baked,", 850),
    Case("code, long", CODE * 12 + "assert merge([1, 3], [2]) ==", 1000),
    Case("recipe, 1500 tokens", RECIPE * 40, 1500),
)
assert len(CASES) == 30
