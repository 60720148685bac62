"""Schemas: the table of every request field this server knows, and the options that a request ends up with.

Owns the table that drives parsing, validation and `docs/api.md`. Must never hold a check that is not about fields.
Invariant: a field that is not in the table is refused by name, so nothing a client sends is silently dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daemon.frontend.fields import (
    STOP_IDS_MAX,
    Field,
    Use,
    anything,
    boolean,
    integer,
    messages,
    number,
    prompts,
    salt,
    stop_strings,
    stream_options,
    template_arguments,
    text,
    token_ids,
)

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "completions", "chat", "tokenize", "detokenize"
ENDPOINTS = (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE)
BOTH = (COMPLETIONS, CHAT)
TEMPLATED = (CHAT, TOKENIZE)

INT32_MAX = 2**31 - 1
PRIORITY_MAX = 1_000_000  # as the core's
DEADLINE_MS_MAX = 7 * 24 * 3600 * 1000  # as the core's
PIN_MS_MAX = 7 * 24 * 3600 * 1000  # as the core's
N_MAX = 128
LOGPROBS_MAX = 20

BUILT_FIELDS: tuple[Field, ...] = (
    Field("model", text, ENDPOINTS, None, high=512, note="a served name; the only model when left out"),
    Field("prompt", prompts, (COMPLETIONS,), required=True),
    Field("prompt", text, (TOKENIZE,), note="either this or messages"),
    Field("messages", messages, (CHAT,), required=True),
    Field("messages", messages, (TOKENIZE,), note="rendered with the chat template"),
    Field("tokens", token_ids, (DETOKENIZE,), required=True),
    Field("max_tokens", integer, (COMPLETIONS,), None, 0, INT32_MAX, note="16 when left out; 0 only with echo"),
    Field("max_tokens", integer, (CHAT,), None, 1, INT32_MAX, note="as many as fit when left out"),
    Field("max_completion_tokens", integer, (CHAT,), None, 1, INT32_MAX, note="the newer name of max_tokens"),
    Field("min_tokens", integer, BOTH, 0, 0, INT32_MAX, note="no stop id or stop string ends the output before it"),
    Field("n", integer, BOTH, 1, 1, N_MAX),
    Field("best_of", integer, (COMPLETIONS,), None, 1, N_MAX, note="only if equal to n"),
    Field("temperature", number, BOTH, 1.0, 0, 2, note="0 takes the most likely token"),
    Field("top_p", number, BOTH, 1.0, 0, 1, low_open=True),
    Field("top_k", integer, BOTH, 0, -1, INT32_MAX, note="0 and -1 switch it off"),
    Field("min_p", number, BOTH, 0.0, 0, 1),
    Field("presence_penalty", number, BOTH, 0.0, -2, 2),
    Field("frequency_penalty", number, BOTH, 0.0, -2, 2),
    Field("repetition_penalty", number, BOTH, 1.0, 0, 10, low_open=True),
    Field("seed", integer, BOTH, None, -(2**63), 2**63 - 1, note="drawn by the daemon when left out"),
    Field("stop", stop_strings, BOTH, (), note="up to 16, of 1 to 1024 characters"),
    Field("stop_token_ids", token_ids, BOTH, (), high=STOP_IDS_MAX, note="at most 128"),
    Field("ignore_eos", boolean, BOTH, False, note="the model's own end tokens do not end the output"),
    Field("include_stop_str_in_output", boolean, BOTH, False),
    Field("skip_special_tokens", boolean, BOTH, True, note="leave special tokens out of the text"),
    Field("priority", integer, BOTH, 0, -PRIORITY_MAX, PRIORITY_MAX, note="a higher one is served earlier"),
    Field(
        "deadline_ms", integer, BOTH, 0, 0, DEADLINE_MS_MAX, note="ends without success after so long; 0: no deadline"
    ),
    Field("cache_store", boolean, BOTH, True, note="false: later requests find nothing of what this one computed"),
    Field(
        "cache_pin_ms",
        integer,
        BOTH,
        0,
        0,
        PIN_MS_MAX,
        note="how long what it leaves in the cache is kept before others",
    ),
    Field("cache_salt", salt, BOTH, None, note="cached prefixes are shared only among requests of the same salt"),
    Field("stream", boolean, BOTH, False),
    Field("stream_options", stream_options, BOTH, None, note="only with stream"),
    Field("echo", boolean, (COMPLETIONS,), False, note="the prompt precedes the output, with its logprobs if asked"),
    Field("logprobs", integer, (COMPLETIONS,), None, 0, LOGPROBS_MAX),
    Field("logprobs", boolean, (CHAT,), False),
    Field("top_logprobs", integer, (CHAT,), None, 0, LOGPROBS_MAX, note="only with logprobs"),
    Field("return_token_ids", boolean, BOTH, False, note="adds token_ids to choices and prompt_token_ids"),
    Field("truncate_prompt_tokens", integer, BOTH, None, 1, INT32_MAX, note="keeps the last tokens of the prompt"),
    Field("add_special_tokens", boolean, (COMPLETIONS, TOKENIZE), True, note="as the tokenizer does for plain text"),
    Field("add_special_tokens", boolean, (CHAT,), False, note="the chat template usually writes them"),
    Field("add_generation_prompt", boolean, TEMPLATED, True),
    Field("continue_final_message", boolean, TEMPLATED, False, note="only with add_generation_prompt false"),
    Field("chat_template_kwargs", template_arguments, TEMPLATED, None),
    Field("return_token_strs", boolean, (TOKENIZE,), False),
)

IGNORED_FIELDS: tuple[Field, ...] = (
    Field("user", text, BOTH, None, high=4096, use=Use.IGNORED, note="an end-user's name"),
    Field("safety_identifier", text, BOTH, None, high=4096, use=Use.IGNORED, note="an end-user's name"),
    Field("prompt_cache_key", text, BOTH, None, high=4096, use=Use.IGNORED, note="a hint for routing"),
)


def _refused(endpoints: tuple[str, ...], rows: dict[str, tuple[Any, ...]]) -> tuple[Field, ...]:
    return tuple(
        Field(name, anything, endpoints, use=Use.REFUSED, neutral=neutral) for name, neutral in sorted(rows.items())
    )


# Known to clients of OpenAI, vLLM and SGLang, and not built here: name -> values that change nothing.
REFUSED_FIELDS: tuple[Field, ...] = (
    *_refused(
        BOTH,
        {
            "allowed_token_ids": ([],),
            "bad_words": ([],),
            "custom_logit_processor": (),
            "custom_params": (),
            "ebnf": (),
            "guided_choice": (),
            "guided_decoding_backend": (),
            "guided_grammar": (),
            "guided_json": (),
            "guided_regex": (),
            "guided_whitespace_pattern": (),
            "json_schema": (),
            "kv_transfer_params": (),
            "length_penalty": (1,),
            "logit_bias": ({},),
            "logits_processors": ([],),
            "lora": (),
            "lora_path": (),
            "metadata": ({},),
            "mm_processor_kwargs": (),
            "no_stop_trim": (False,),
            "prompt_cache_retention": (),
            "prompt_logprobs": (),
            "regex": (),
            "request_id": (),
            "response_format": ({"type": "text"},),
            "return_hidden_states": (False,),
            "return_tokens_as_token_ids": (False,),
            "rid": (),
            "service_tier": ("auto", "default"),
            "session_params": (),
            "spaces_between_special_tokens": (True,),
            "stop_regex": (),
            "store": (False,),
            "structured_outputs": (),
            "use_beam_search": (False,),
            "vllm_xargs": (),
        },
    ),
    *_refused((COMPLETIONS,), {"prompt_embeds": (), "suffix": ("",)}),
    *_refused(
        (CHAT,),
        {
            "audio": (),
            "best_of": (),
            "echo": (False,),
            "function_call": ("none",),
            "functions": ([],),
            "include_reasoning": (True,),
            "modalities": (["text"],),
            "parallel_tool_calls": (True,),
            "prediction": (),
            "reasoning_effort": (),
            "separate_reasoning": (True,),
            "stream_reasoning": (True,),
            "tool_choice": ("none",),
            "verbosity": (),
            "web_search_options": (),
        },
    ),
    *_refused(TEMPLATED, {"chat_template": (), "documents": ([],), "tools": ([],)}),
)

FIELDS: tuple[Field, ...] = (*BUILT_FIELDS, *IGNORED_FIELDS, *REFUSED_FIELDS)

TABLES: dict[str, dict[str, Field]] = {
    endpoint: {field.name: field for field in FIELDS if endpoint in field.endpoints} for endpoint in ENDPOINTS
}


@dataclass(slots=True)
class Options:
    """The checked fields of one completion or chat request, defaults filled in; names as in the table."""

    endpoint: str
    model: str | None
    prompt: list[str | list[int]] | None
    messages: list[dict[str, str]] | None
    max_tokens: int | None
    min_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    priority: int
    deadline_ms: int
    cache_store: bool
    cache_pin_ms: int
    cache_salt: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    logprobs: int  # -1: none; k: the chosen token's and the k best
    return_token_ids: bool
    truncate_prompt_tokens: int | None
    add_special_tokens: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]
    max_tokens_field: str = "max_tokens"  # as the client spelled it
