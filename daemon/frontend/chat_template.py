"""Chat template: from messages to the prompt's text, by the model's own Jinja template in a sandbox.

Owns the template environment and the variables a template sees. Must never let message contents be read as template
text. Invariant: a template's failure is the request's 400, never the server's 500.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from daemon.frontend.errors import ApiError, bad_field
from daemon.frontend.pieces import UnsupportedTokenizer
from daemon.frontend.tokenizer import Tokenizer, read_json


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's turn for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  (the attribute's type is jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body in place of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefused(jinja2.TemplateError):
    """The template itself refused the messages by `raise_exception`."""


def _refuse(message: str) -> NoReturn:
    raise TemplateRefused(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda shape: datetime.datetime.now().strftime(shape)
    return environment


class ChatTemplate:
    """A compiled chat template with the tokenizer's special tokens."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Raises UnsupportedTokenizer when the template does not compile."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UnsupportedTokenizer(f"the chat template does not compile: {error}") from error
        self._tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool, arguments: dict[str, Any]) -> str:
        """The prompt's text; raises ApiError 400 naming `messages` when the template refuses them."""
        variables = {**self._tokens, **arguments, "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**variables)
        except jinja2.TemplateError as error:
            raise bad_field("messages", f"the chat template refused them: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            raise bad_field("messages", f"the chat template failed on them: {error}") from error

    def render_open(self, messages: list[dict[str, str]], arguments: dict[str, Any]) -> str:
        """The prompt's text cut right behind the last message's content, for the model to go on with it."""
        text, content = self.render(messages, False, arguments), messages[-1]["content"].rstrip()
        end = text.rfind(content)
        if not content or end < 0:
            raise bad_field("continue_final_message", "the chat template does not show the last message as it is")
        return text[: end + len(content)]


def find_template(directory: Path, tokenizer: Tokenizer, override: str) -> str | None:
    """The template's source: the file `override`, else the model's own, else None.

    A model has it in chat_template.jinja, chat_template.json or tokenizer_config.json, there alone or in a list.
    """
    if override:
        return Path(override).read_text(encoding="utf-8")
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    found = read_json(directory / "chat_template.json").get("chat_template") or tokenizer.config.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        return named.get("default")
    return found


def no_template() -> ApiError:
    """The answer to a chat request when the model has no template."""
    return bad_field("messages", "this model has no chat template; the server can be given one by --chat-template")
