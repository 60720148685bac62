"""Prepare: from checked options to the messages for the daemon: prompts as token ids, sampling, stop ids, limits.

Owns tokenization of requests and the checks that need token counts. Must never wait for anything: it is a plain
function of the body and the model's facts, so that a large body can be handled in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from allocator.columns import pack_i64
from daemon.frontend.chat_template import ChatTemplate, no_template
from daemon.frontend.errors import ApiError, bad_field
from daemon.frontend.fields import STOP_IDS_MAX
from daemon.frontend.schemas import COMPLETIONS, DETOKENIZE, TOKENIZE, Options
from daemon.frontend.sizes import check_text, listed_tokens_max, text_bytes_max
from daemon.frontend.tokenizer import Tokenizer, TooManyTokens
from daemon.frontend.validation import (
    COMPLETION_MAX_TOKENS_DEFAULT,
    check_fields,
    decode_object,
    read_options,
)
from ipc.messages import Generate, ModelFacts, Sampling

CONTEXT = "context_length_exceeded"


@dataclass(frozen=True)
class Model:
    """What requests are prepared with: the tokenizer, the chat template, the served names and the model's facts."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    names: tuple[str, ...]
    facts: ModelFacts


@dataclass(frozen=True)
class Prepared:
    """A request ready to be sent: its options, each prompt's token ids, and all ids that end an output."""

    options: Options
    prompts: list[list[int]]
    stop_ids: frozenset[int]

    def generate(self, index: int, request_id: str) -> Generate:
        """The message for prompt `index`."""
        options = self.options
        limit = options.max_tokens
        if limit is None and options.endpoint == COMPLETIONS:
            limit = COMPLETION_MAX_TOKENS_DEFAULT
        return Generate(
            id=request_id,
            prompt=pack_i64(self.prompts[index]),
            sampling=sampling(options),
            max_tokens=limit,
            min_tokens=options.min_tokens,
            stop_ids=pack_i64(sorted(self.stop_ids)),
            n=options.n,
            priority=options.priority,
            deadline_ms=options.deadline_ms,
            clip=options.max_tokens is None,
            namespace=namespace(options),
            store=options.cache_store,
            pin_ms=options.cache_pin_ms,
        )


def namespace(options: Options) -> str:
    """Who shares cached prefixes with this request; the kind in front keeps a salt unequal to keys of other kinds."""
    return "" if options.cache_salt is None else f"salt:{options.cache_salt}"


def sampling(options: Options) -> Sampling:
    """The daemon's sampling values of a request; an echo without output still needs its prompt computed."""
    prompt_logprobs = options.logprobs if options.echo else -1
    if options.max_tokens == 0:
        prompt_logprobs = max(prompt_logprobs, 0)
    return Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        logprobs=options.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def check_model(name: str | None, names: Sequence[str]) -> None:
    """Raises ApiError 404 for a model that is not served here; a request without one means the only model."""
    if name is not None and name not in names:
        message = f"The model {name[:200]!r} does not exist; this server has {', '.join(names)}"
        raise ApiError(404, message, param="model", code="model_not_found")


def prepare_generation(endpoint: str, body: bytes, model: Model) -> Prepared:
    """Decode, check and tokenize a completion or chat request; raises ApiError naming the field at fault."""
    options = read_options(endpoint, decode_object(body), model.facts.vocab_size)
    check_model(options.model, model.names)
    prompts = _prompts(options, model)
    options.prompt = options.messages = None  # a large text is not kept beside its ids
    eos = [] if options.ignore_eos else model.facts.eos_ids
    stop_ids = frozenset([*eos, *options.stop_token_ids])
    if len(stop_ids) > STOP_IDS_MAX:
        room = STOP_IDS_MAX - len(eos)
        raise bad_field("stop_token_ids", f"at most {room} beside the model's own end tokens", "out_of_range")
    return Prepared(options, prompts, stop_ids)


def _prompts(options: Options, model: Model) -> list[list[int]]:
    """Every prompt's token ids, truncated if asked, and checked against the model's length."""
    field, given = ("prompt", options.prompt) if options.messages is None else ("messages", [_chat(options, model)])
    assert given is not None
    prompts = []
    for index, prompt in enumerate(given):
        param = field if len(given) == 1 else f"{field}[{index}]"
        ids = _encode(param, prompt, options, model) if isinstance(prompt, str) else prompt
        if options.truncate_prompt_tokens is not None:
            ids = ids[-options.truncate_prompt_tokens :]
        _check_length(param, len(ids), options, model.facts)
        prompts.append(ids)
    return prompts


def _chat(options: Options, model: Model) -> str:
    assert options.messages is not None
    return render_chat(
        model,
        options.messages,
        options.add_generation_prompt,
        options.continue_final_message,
        options.chat_template_kwargs,
    )


def _encode(param: str, text: str, options: Options, model: Model) -> list[int]:
    """The ids of a text; one that cannot fit is refused by its length alone, before the work."""
    limit, most = model.facts.max_model_len, None
    if options.truncate_prompt_tokens is None:
        most, each = limit, model.tokenizer.token_bytes_max
        if each is not None and len(text) > limit * each:
            reason = f"the maximum context length is {limit} tokens and the prompt has {len(text)} characters"
            raise bad_field(param, f"{reason}, which are at least {-(-len(text) // each)} tokens", CONTEXT)
    check_text(param, text, text_bytes_max(limit))
    try:
        return model.tokenizer.encode(text, options.add_special_tokens, most)
    except TooManyTokens as error:
        _check_length(param, error.count, options, model.facts)
        raise


def render_chat(
    model: Model, messages: list[dict[str, str]], add_prompt: bool, go_on: bool, arguments: dict[str, Any]
) -> str:
    """The text of a chat's prompt; raises ApiError 400 without a template or when it refuses the messages."""
    if model.template is None:
        raise no_template()
    if go_on:
        return model.template.render_open(messages, arguments)
    return model.template.render(messages, add_prompt, arguments)


def _check_length(field: str, length: int, options: Options, facts: ModelFacts) -> None:
    """Raises the 400 with both numbers for a prompt, or prompt and output, beyond the model's length."""
    limit, wanted = facts.max_model_len, options.max_tokens
    if length == 0:
        raise bad_field(field, "has no tokens; at least one is needed", "empty_prompt")
    needed = 0 if wanted == 0 else 1
    if length + needed > limit:
        text = f"the maximum context length is {limit} tokens and the prompt has {length}"
        raise bad_field(field, text + (", which leaves no room for output" if length <= limit else ""), CONTEXT)
    if wanted is not None and length + wanted > limit:
        text = f"the maximum context length is {limit} tokens and {length + wanted} were asked for"
        raise bad_field(options.max_tokens_field, f"{text} ({length} in the prompt, {wanted} for the output)", CONTEXT)


def prepare_tokenize(body: bytes, model: Model) -> bytes:
    """The whole JSON answer to a /tokenize request; raises ApiError naming the field."""
    values = check_fields(TOKENIZE, decode_object(body), model.facts.vocab_size)
    ids = _tokenized(values, model)
    document: dict[str, object] = {"count": len(ids), "max_model_len": model.facts.max_model_len, "tokens": ids}
    if values["return_token_strs"]:
        document["token_strs"] = [model.tokenizer.token_string(token) for token in ids]
    return msgspec.json.encode(document)


def _tokenized(values: dict[str, Any], model: Model) -> list[int]:
    check_model(values["model"], model.names)
    prompt, messages = values["prompt"], values["messages"]
    if (prompt is None) == (messages is None):
        raise bad_field("prompt", "send either prompt or messages", "missing_field")
    if messages is None:
        return _listed("prompt", prompt, values["add_special_tokens"], model)
    go_on = values["continue_final_message"]
    if go_on and values["add_generation_prompt"]:
        raise bad_field("continue_final_message", "only allowed with add_generation_prompt false")
    arguments = values["chat_template_kwargs"] or {}
    text = render_chat(model, messages, values["add_generation_prompt"], go_on, arguments)
    return _listed("messages", text, False, model)


def _listed(param: str, text: str, special: bool, model: Model) -> list[int]:
    """The ids of a text to show: as many as any model's prompt may have, and some more."""
    limit = model.facts.max_model_len
    check_text(param, text, text_bytes_max(limit))
    most = listed_tokens_max(limit)
    try:
        return model.tokenizer.encode(text, special, most)
    except TooManyTokens as error:
        raise bad_field(param, f"has {error.count} tokens; at most {most} are listed", "out_of_range") from error


def prepare_detokenize(body: bytes, model: Model) -> bytes:
    """The whole JSON answer to a /detokenize request; raises ApiError naming the field."""
    document = decode_object(body)
    tokens, most = document.get("tokens"), listed_tokens_max(model.facts.max_model_len)
    if isinstance(tokens, list) and len(tokens) > most:
        raise bad_field("tokens", f"at most {most} token ids, got {len(tokens)}", "out_of_range")
    values = check_fields(DETOKENIZE, document, model.facts.vocab_size)
    check_model(values["model"], model.names)
    return msgspec.json.encode({"prompt": model.tokenizer.decode(values["tokens"], skip_special_tokens=False)})
