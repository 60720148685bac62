"""Chat templates: where they are found, what they see, and what happens when they refuse."""

from __future__ import annotations

import json

import pytest

from daemon.frontend.chat_template import ChatTemplate, find_template
from daemon.frontend.errors import ApiError
from daemon.frontend.pieces import UnsupportedTokenizer
from daemon.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.double import http_client, make_service, says
from tests.frontend.tokenizers_made import TEMPLATE, byte_level

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def render(source, messages=HELLO, **arguments):
    """The text that a template makes."""
    return ChatTemplate(source, byte_level()).render(messages, True, arguments)


def test_templates_have_what_the_fields_templates_use():
    """Special tokens, tojson without HTML escapes, loop controls, generation blocks, dates, given variables."""
    assert render("{{ bos_token }}|{{ eos_token }}") == "<|endoftext|>|<|im_end|>"
    assert render("{{ {'a': '<ü>'} | tojson }}") == '{"a": "<ü>"}'
    assert render("{% for m in messages %}{% if loop.first %}{% break %}{% endif %}x{% endfor %}y") == "y"
    assert render("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}") == "hello"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ enable }}", enable="yes") == "yes"
    assert render("{% for m in messages %}\n  {{ m.content }}\n{% endfor %}") == "  hello\n"


def test_message_contents_are_data():
    """Template text inside a message is not evaluated."""
    assert "{{ 7 * 7 }}" in render(TEMPLATE, [{"role": "user", "content": "{{ 7 * 7 }}{% raise %}"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ missing.attribute.deeper }}",
        "{{ messages[0].__init__.__globals__ }}",
    ],
)
def test_failing_templates_are_the_requests_400(source):
    """A template that refuses, fails or reaches outside the sandbox is a 400 naming the messages."""
    with pytest.raises(ApiError) as caught:
        ChatTemplate(source, byte_level()).render(HELLO, True, {})
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_broken_templates_are_found_at_boot():
    """A template that does not compile stops the start."""
    with pytest.raises(UnsupportedTokenizer, match="does not compile"):
        ChatTemplate("{% for %}", byte_level())


def test_places_of_the_template(tmp_path):
    """An override, chat_template.jinja, chat_template.json, the tokenizer's configuration alone or by name, or none."""
    plain = Tokenizer(byte_level()._tokenizer.to_str(), {})
    assert find_template(tmp_path, plain, "") is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert find_template(tmp_path, Tokenizer(byte_level()._tokenizer.to_str(), {"chat_template": named}), "") == "D"
    assert find_template(tmp_path, byte_level(), "") == TEMPLATE
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert find_template(tmp_path, byte_level(), "") == "J"
    (tmp_path / "chat_template.jinja").write_text("N")
    assert find_template(tmp_path, byte_level(), "") == "N"
    (tmp_path / "mine").write_text("O")
    assert find_template(tmp_path, byte_level(), str(tmp_path / "mine")) == "O"


def test_a_directory_without_a_fast_tokenizer_is_named(tmp_path):
    """The missing file is in the error."""
    with pytest.raises(UnsupportedTokenizer, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


async def test_refused_messages_and_models_without_template():
    """Over HTTP both are a 400 that names the messages."""
    service, _ = make_service(says("x"))
    wrong = [*HELLO, {"role": "system", "content": "late"}]
    async with http_client(service) as client:
        response = await client.post(CHAT, json={"messages": wrong})
        assert "system must come first" in response.json()["error"]["message"]
        service.template = None
        without = await client.post(CHAT, json={"messages": HELLO})
    assert "--chat-template" in without.json()["error"]["message"]
    assert [response.json()["error"]["param"], without.json()["error"]["param"]] == ["messages", "messages"]


async def test_the_last_message_can_be_continued():
    """continue_final_message cuts the prompt right behind the last message's content."""
    service, daemon = make_service(says("x"))
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    fields = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    async with http_client(service) as client:
        assert (await client.post(CHAT, json=fields)).status_code == 200
        tokenized = await client.post("/tokenize", json=fields)
    assert daemon.streams[0].prompt == tokenized.json()["tokens"]
    shown = service.tokenizer.decode(daemon.streams[0].prompt, False)
    assert shown == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nI am"
