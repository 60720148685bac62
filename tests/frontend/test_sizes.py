"""Large bodies: refused before their cost arises, prepared by calls that leave the loop free, accounted in bytes."""

from __future__ import annotations

import json
import threading

import pytest
import trio

from daemon.frontend import sizes
from daemon.frontend.sizes import Bodies
from daemon.frontend.tokenizer import Tokenizer
from tests.frontend.double import MAX_MODEL_LEN, http_client, make_service, says
from tests.frontend.tokenizers_made import byte_fallback, byte_level

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


class Spy:
    """The tokenizer library's object, with a record of its calls: (name, characters)."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def encode(self, text, **options):
        """As the library's."""
        self.calls.append(("encode", len(text)))
        return self._inner.encode(text, **options)

    def encode_batch(self, texts, **options):
        """As the library's."""
        self.calls.append(("encode_batch", len(texts[0])))
        return self._inner.encode_batch(texts, **options)


@pytest.fixture
def spied(monkeypatch):
    """A service whose tokenizer is watched."""
    service, daemon = make_service(says("x"))
    spy = Spy(service.tokenizer._tokenizer)
    monkeypatch.setattr(service.tokenizer, "_tokenizer", spy)
    return service, daemon, spy


async def post(service, path, document):
    """The answer to a JSON body."""
    async with http_client(service, timeout=60) as client:
        return await client.post(path, json=document)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "a" * 100_000}, "prompt"),
        (TEXT, {"prompt": ["a", "a" * 100_000]}, "prompt[1]"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ],
)
async def test_a_text_that_cannot_fit_is_not_tokenized(spied, path, body, param):
    """More characters than the context's tokens can stand for: the 400 names length and limit, without the work."""
    service, daemon, spy = spied
    response = await post(service, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert str(MAX_MODEL_LEN) in error["message"]
    assert (max((size for _, size in spy.calls), default=0) < 1000, daemon.streams) == (True, [])


@pytest.mark.parametrize(
    ("path", "more"),
    [(TEXT, {"truncate_prompt_tokens": 5}), ("/tokenize", {}), ("/tokenize", {"add_special_tokens": False})],
)
async def test_no_text_beyond_the_tokenized_length(spied, path, more):
    """Where any length would do, there is still a longest text."""
    service, _, spy = spied
    response = await post(service, path, {"prompt": "a" * (sizes.TEXT_BYTES_MIN + 1), **more})
    error = response.json()["error"]
    assert (response.status_code, error["param"], spy.calls) == (400, "prompt", [])
    assert str(sizes.TEXT_BYTES_MIN) in error["message"]


@pytest.mark.parametrize("size", [5000, 50_000])
async def test_long_texts_use_the_call_that_frees_the_lock(spied, size):
    """`encode` of the library holds the interpreter's lock, so long texts go through `encode_batch`; ids are equal."""
    service, daemon, spy = spied
    text = "the quick brown fox " * (size // 20)
    response = await post(service, TEXT, {"prompt": text, "truncate_prompt_tokens": 7})
    assert response.status_code == 200
    assert [name for name, characters in spy.calls if characters == len(text)] == ["encode_batch"]
    assert daemon.streams[0].prompt == spy._inner.encode(text).ids[-7:]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_no_token_stands_for_more_bytes_than_the_bound(make):
    """The early refusal's premise, on texts of every kind of piece."""
    tokenizer = make()
    assert tokenizer.token_bytes_max == max(map(len, tokenizer.pieces.plain))
    for text in ("the quick brown fox " * 50, "<|endoftext|>" * 50, "👩‍👩‍👧‍👦" * 50, " " * 500, "你好世界" * 99):
        assert len(tokenizer.encode(text, False)) * tokenizer.token_bytes_max >= len(text.encode())


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({"normalizer": {"type": "NFC"}}, 4),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, 4),
        ({"normalizer": {"type": "NFKC"}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "long"}, "content": ""}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, None),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, None),
    ],
)
def test_a_tokenizer_that_shortens_texts_has_a_wider_bound_or_none(change, factor):
    """What the definition cannot bound is tokenized before it is refused."""
    tokenizer = byte_level()
    changed = Tokenizer(json.dumps(json.loads(tokenizer._tokenizer.to_str()) | change))
    assert changed.token_bytes_max == (factor and factor * tokenizer.token_bytes_max)


async def test_ids_are_counted_before_they_are_listed(spied, monkeypatch):
    """/tokenize and /detokenize have a longest list, and say how long the refused one is."""
    monkeypatch.setattr(sizes, "LISTED_TOKENS_MIN", 300)
    service, *_ = spied
    tokenized = await post(service, "/tokenize", {"prompt": "1" * 301})
    detokenized = await post(service, "/detokenize", {"tokens": [5] * 301})
    for response, param in ((tokenized, "prompt"), (detokenized, "tokens")):
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert "300" in error["message"]
        assert "301" in error["message"]
    assert (await post(service, "/tokenize", {"prompt": "1" * 300})).json()["count"] == 300
    assert (await post(service, "/detokenize", {"tokens": [5] * 300})).status_code == 200


@pytest.mark.parametrize("item", [[], {}, {"a": 1}, [[1]]])
async def test_too_much_structure_is_refused_unparsed(item):
    """Millions of lists and objects would hold the lock; brackets inside texts are text."""
    service, _ = make_service(says("x"))
    refused = await post(service, TEXT, {"prompt": [item] * (sizes.STRUCTURE_MAX + 1)})
    brackets = '[{\\":' * sizes.STRUCTURE_MAX
    text = await post(service, TEXT, {"prompt": brackets})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "body_too_complex")
    assert text.json()["error"]["code"] == "context_length_exceeded"


async def test_heavy_bodies_are_prepared_one_at_a_time():
    """However many come, one is at work, in another thread than the loop's; small ones do not wait for it."""
    service, _ = make_service(says("x"))
    gate, started, working, most = threading.Event(), threading.Event(), [], []

    def work() -> None:
        working.append(threading.current_thread())
        most.append(len(working))
        started.set()
        assert gate.wait(30)
        working.pop()

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(lambda: service.prepare(work, size_bytes=sizes.HEAVY_BYTES + 1))
        await trio.to_thread.run_sync(started.wait, 30)
        assert working[0] is not threading.main_thread()
        assert await service.prepare(lambda: "small", size_bytes=100) == "small"
        assert await service.prepare(lambda: "middle", size_bytes=sizes.HEAVY_BYTES) == "middle"
        gate.set()
    assert most == [1, 1, 1]


@pytest.mark.parametrize("path", [TEXT, "/tokenize"])
async def test_large_bodies_have_a_budget_together(path):
    """A body beyond it is a 503 with Retry-After; small ones are taken; in the end nothing is held."""
    service, _ = make_service(says("x"), bodies=Bodies(budget_bytes=100_000, held_bytes=70_000))
    field = {"truncate_prompt_tokens": 5} if path == TEXT else {}
    large = await post(service, path, {"prompt": "a " * 20_000, **field})
    small = await post(service, path, {"prompt": "hello"})
    middle = await post(service, path, {"prompt": "a " * 10_000, **field})
    assert (large.status_code, large.json()["error"]["code"]) == (503, "overloaded")
    assert int(large.headers["retry-after"]) >= 1
    assert (small.status_code, middle.status_code, service.bodies.held_bytes) == (200, 200, 70_000)


async def test_one_body_alone_may_exceed_the_budget():
    """A request size limit above the budget is still served, one body at a time."""
    service, _ = make_service(says("x"), bodies=Bodies(budget_bytes=20_000))
    body = {"prompt": "a " * 20_000, "truncate_prompt_tokens": 5}
    assert (await post(service, TEXT, body)).status_code == 200
    service.bodies.held_bytes = 1
    assert (await post(service, TEXT, body)).status_code == 503
    assert service.bodies.held_bytes == 1


async def test_a_body_is_given_back_before_the_output_and_when_it_is_refused():
    """Only reading and preparing hold its bytes, not a long generation."""
    held = []

    async def script(stream):
        held.append(service.bodies.held_bytes)
        async for event in says("x")(stream):
            yield event

    service, _ = make_service(script, body_limit_bytes=60_000)
    assert (await post(service, TEXT, {"prompt": "a " * 20_000, "truncate_prompt_tokens": 5})).status_code == 200
    assert (await post(service, TEXT, {"prompt": "a " * 20_000, "no_such": 5})).status_code == 400
    assert (await post(service, TEXT, {"prompt": "a " * 40_000})).status_code == 413
    assert (held, service.bodies.held_bytes) == ([0], 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (r'{"prompt": "\ud800"}', "prompt"),
        (r'{"prompt": "\ud800 and more"}', "prompt"),
        (r'{"prompt": "\udc00"}', "prompt"),
        (r'{"model": "x", "prompt": ["\\\\ud83d\ude00", "\ud83d\ude00", "\ud83d\ud83d"], "n": 1}', "prompt"),
        (r'{"prompt": "a", "stop": [{"prompt": "\""}, "\ud800A"]}', "stop"),
        (r'{"\ud800": 1}', None),
        (r'["\ud800"]', None),
    ],
)
async def test_half_a_surrogate_pair_is_named(body, param):
    """JSON can spell it and no text can have it: the 400 says where and what, not that something was truncated."""
    service, _ = make_service(says("x"))
    async with http_client(service) as client:
        response = await client.post(TEXT, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_json", param)
    assert "surrogate" in error["message"]
    assert "\\ud" in error["message"]


async def test_whole_pairs_and_other_errors_keep_their_answers():
    """A pair is a character, an escaped backslash is none of this, and broken JSON stays broken JSON."""
    service, daemon = make_service(says("x"))
    async with http_client(service) as client:
        good = await client.post(TEXT, content=r'{"prompt": "\ud83d\ude00\\ud800"}')
        broken = await client.post(TEXT, content=r'{"prompt": "\ud83d\ude00\\ud800"')
    assert (good.status_code, broken.status_code) == (200, 400)
    assert service.tokenizer.decode(daemon.streams[0].prompt) == "😀\\ud800"
    assert "surrogate" not in broken.json()["error"]["message"]
