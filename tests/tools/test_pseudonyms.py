"""Pseudonyms: what a prefix cache sees of tokens stays, exactly; nothing can be read off a name."""

from __future__ import annotations

import json
import random

import pytest

from allocator.columns import i64, pack_i64
from tools.incident.logs import Cleaner
from tools.incident.pseudonyms import KEY_BYTES, Names, Tip, Tokens

KEY = bytes(range(KEY_BYTES))


def tokens(vocabulary: int = 100, eos: tuple[int, ...] = (7,), stops: tuple[int, ...] = (), **kept: object) -> Tokens:
    return Tokens(Names(KEY), [vocabulary], eos, stops, **kept)  # type: ignore[arg-type]


def common(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def mapped(how: Tokens, prompt: list[int], tip: Tip | None = None) -> list[int]:
    column, _ = how.column(tip or how.root("salt:a"), pack_i64(prompt))
    return list(map(int, i64(column)))


@pytest.mark.parametrize("vocabulary", [1, 2, 9, 100, 4093])
@pytest.mark.parametrize("pages", [(), (4,)])
def test_the_next_token_of_a_sequence_is_permuted(vocabulary: int, pages: tuple[int, ...]) -> None:
    """Every id of the vocabulary comes out once behind every beginning; what ends requests is one id everywhere."""
    stops = tuple(range(3, min(vocabulary, 9)))
    how = tokens(vocabulary, (0,), stops, page_sizes=pages)
    tip = how.root("")
    for _ in range(6):
        images = [how.one(tip, id)[0] for id in range(vocabulary)]
        assert sorted(images) == list(range(vocabulary))
        assert images[0] == 0
        assert [images[id] for id in stops] == [how.stop_id(id) for id in stops]
        _, tip = how.one(tip, vocabulary // 2)


def test_sequences_are_equal_exactly_as_far_as_their_originals() -> None:
    """Over random pairs that share a beginning, in the same namespace; the rest has nothing in common but by chance."""
    rng, how = random.Random(5), tokens(5000)
    for _ in range(60):
        shared = [rng.randrange(5000) for _ in range(rng.randrange(200))]
        rest = [rng.randrange(5000) for _ in range(40)]
        one, other = [*shared, 1, *rest], [*shared, 2, *rest]
        ours, theirs = mapped(how, one), mapped(how, other)
        assert common(ours, theirs) == len(shared)
        assert sum(a == b for a, b in zip(ours[len(shared) :], theirs[len(shared) :], strict=True)) <= 2
        assert sum(a == b for a, b in zip(one, ours, strict=True)) <= 2
    assert mapped(how, [5, 6, 8]) != mapped(how, [5, 6, 8], how.root("salt:b"))


def test_a_column_is_mapped_as_its_tokens_one_by_one() -> None:
    """However it is cut, and again when it was seen before."""
    rng, how = random.Random(2), tokens(700)
    prompt = [rng.randrange(700) for _ in range(300)]
    tip, singly = how.root("salt:a"), []
    for token in prompt:
        one, tip = how.one(tip, token)
        singly.append(one)
    assert mapped(how, prompt) == singly == mapped(how, prompt)
    first, end = how.column(how.root("salt:a"), pack_i64(prompt[:77]))
    second, _ = how.column(end, pack_i64(prompt[77:]))
    assert list(i64(first + second)) == singly


def test_another_key_gives_other_tokens_and_names() -> None:
    """So who has no key can check no guess; ids that are refused for their value, and their length, stay."""
    other = Names(bytes(KEY_BYTES))
    assert mapped(tokens(5000), [1, 2, 3]) != mapped(Tokens(other, [5000], [7]), [1, 2, 3])
    names = Names(KEY)
    for said in (names.id("cmpl-1"), names.frontend("front"), names.namespace("salt:abc")):
        assert said not in (other.id("cmpl-1"), other.frontend("front"), other.namespace("salt:abc"))
    assert mapped(tokens(100), [5, 100, -1])[1:] == [100, -1]
    assert len(names.id("x" * 300)) == 300
    assert names.id("") == names.namespace("") == ""
    assert names.namespace("salt:abc").startswith("salt:")
    assert names.id("cmpl-a-0").rpartition("-")[0] == names.id("cmpl-a-1").rpartition("-")[0] == names.id("cmpl-a")
    assert names.seed(1) != 1
    assert names.seed(1 << 63) == 1 << 63


def test_ranges_of_two_vocabularies_stay_apart() -> None:
    """An id that is outside of one model's vocabulary stays outside of it."""
    how = Tokens(Names(KEY), [50, 80], [7])
    images = [how.one(how.root(""), id)[0] for id in range(80)]
    assert sorted(images[:50]) == list(range(50))
    assert sorted(images[50:]) == list(range(50, 80))


def test_what_ended_a_choice_names_the_mapped_id_and_no_folder() -> None:
    """As the followed core says it."""
    how = tokens(100, (7,), (3, 5))
    assert how.detail("stop token 7") == "stop token 7"
    assert how.detail("stop token 3") == f"stop token {how.stop_id(3)}"
    assert how.detail("its log is /srv/ann/run/logs/rank-0-1.log") == "its log is .../rank-0-1.log"


LINES = [
    ({"event": "Finished", "request": 4, "id": "cmpl-7-0"}, "cmpl-7", "Finished"),
    ({"event": "Accepted", "frontend": "ann", "prompt_tokens": 9}, "ann", "9"),
    ({"event": "front_end_lost", "text": "hello secret"}, "secret", "front_end_lost"),
    ({"event": "ann", "namespace": "salt:ann"}, "ann", "left out"),
    ({"event": "Failed", "process": "frontend", "error": "bad prompt 'ann'"}, "ann", "Failed"),
    ({"event": "Failed", "process": "daemon", "error": "no space on /srv/ann/x"}, "ann", "no space"),
    ({"event": "fault", "trace": "Traceback (most recent call last):\n  File \"/srv/ann/a.py\", line 3, in f\n"
      "    secret()\nValueError: ann"}, "ann", "a.py"),
    ({"event": "Starting", "settings": {"run-dir": "/srv/ann", "page-size": "16"}}, "ann", "16"),
    ({"event": "Starting", "settings": {"cache-quotas": "ann=1", "model": "/srv/ann/big"}}, "ann", ".../big"),
    ({"event": "HttpRequest", "path": "/v1/completions?q=ann", "status": 200}, "ann", "HttpRequest"),
    ({"event": "nested", "requests": [{"id": "ann", "row": 3}]}, "ann", "3"),
]  # fmt: skip


@pytest.mark.parametrize(("event", "gone", "kept"), LINES, ids=[str(at) for at in range(len(LINES))])
def test_a_log_line_keeps_what_the_list_names(event: dict[str, object], gone: str, kept: str) -> None:
    """Numbers, names of our own, and frames of a trace; no text that may be a client's."""
    cleaned = Cleaner(Names(KEY)).line(json.dumps(event))
    assert cleaned is not None
    assert gone not in cleaned
    assert kept in cleaned
    assert json.loads(cleaned).keys() <= {*event, "fields_left_out"}


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ('  File "/srv/ann/daemon/app.py", line 12, in main', '  File ".../app.py", line 12, in main'),
        ("    print(secret)", None),
        ("torch.OutOfMemoryError: tried to allocate ann", "torch.OutOfMemoryError"),
        ("a warning about ann", None),
        ("{broken json", None),
    ],
)
def test_of_other_lines_only_a_trace_stays(line: str, kept: str | None) -> None:
    """Without the source and without what the error says."""
    assert Cleaner(Names(KEY)).line(line) == kept
