"""Render: the JSON documents of the API: chunks of a stream, whole answers, usage.

Owns the shapes. Must never wait or send. Invariant: the deltas of a stream joined are the text of the whole answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from daemon.frontend.choice import Choice, Hit
from daemon.frontend.generation import Generation
from daemon.frontend.logprobs import CompletionLogprobs, TokenLogprob, chat_logprobs
from daemon.frontend.schemas import CHAT, Options
from daemon.frontend.tokenizer import Tokenizer

Document = dict[str, Any]
encode = msgspec.json.Encoder().encode


def usage(generation: Generation) -> Document:
    """Token counts: prompts once each, all choices' output up to a stop string's end.

    What the prefix cache had is known at the ends only, and null before.
    """
    prompt, output, hits = generation.prompt_tokens, generation.output_tokens, generation.hits
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": None if hits is None else _details(hits),
    }


def _details(hits: list[Hit]) -> Document:
    """Cached tokens of all prompts together, as in the API, and how far each prompt's hit went and what ended it."""
    each = [
        {"cached_tokens": hit.cached_tokens, "matched_tokens": hit.matched_tokens, "hit_cut": hit.cut or None}
        for hit in hits
    ]
    return {"cached_tokens": sum(hit.cached_tokens for hit in hits), "hits": each}


class Renderer:
    """Documents of one response: `identity` is what all of them begin with."""

    def __init__(self, options: Options, tokenizer: Tokenizer, request_id: str, model: str, created: int) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._chat = options.endpoint == CHAT
        kind = "chat.completion" if self._chat else "text_completion"
        self._whole = self._identity(request_id, kind, model, created)
        self._chunk = self._identity(request_id, kind + ".chunk" if self._chat else kind, model, created)
        self._prompts_shown: set[int] = set()
        self._offsets: dict[int, CompletionLogprobs] = {}

    @staticmethod
    def _identity(request_id: str, kind: str, model: str, created: int) -> Document:
        return {"id": request_id, "object": kind, "created": created, "model": model}

    def _logprobs(self, index: int, entries: list[TokenLogprob]) -> Document | None:
        if self._options.logprobs < 0:
            return None
        if self._chat:
            return chat_logprobs(self._tokenizer, entries)
        offsets = self._offsets.setdefault(index, CompletionLogprobs(self._tokenizer))
        return offsets.render(entries)

    def _choice(self, choice: Choice, body: Document) -> Document:
        entries, ids = choice.take_delta()
        made: Document = {"index": choice.index, **body, "logprobs": self._logprobs(choice.index, entries)}
        made["finish_reason"] = choice.finish_reason
        if choice.finish_reason is not None:
            made["stop_reason"] = choice.stop_reason
        if self._options.return_token_ids:
            made["token_ids"] = ids
            if choice.index not in self._prompts_shown:
                self._prompts_shown.add(choice.index)
                made["prompt_token_ids"] = choice.prompt
        return made

    def role_chunk(self, choice: Choice, usage: Document | None) -> bytes:
        """The first chunk of a chat choice."""
        made = self._choice(choice, {"delta": {"role": "assistant", "content": ""}})
        made["logprobs"] = None
        return self._encode_chunk([made], usage)

    def chunk(self, choice: Choice, text: str, usage: Document | None) -> bytes:
        """More text of a choice, with what else is new; its end when it has one."""
        if self._chat:
            body: Document = {"delta": {"content": text} if text or choice.finish_reason is None else {}}
        else:
            body = {"text": text}
        return self._encode_chunk([self._choice(choice, body)], usage)

    def usage_chunk(self, counts: Document) -> bytes:
        """The last chunk when usage was asked for."""
        return encode({**self._chunk, "choices": [], "usage": counts})

    def _encode_chunk(self, choices: list[Document], counts: Document | None) -> bytes:
        document = {**self._chunk, "choices": choices}
        if self._options.include_usage or counts is not None:
            document["usage"] = counts
        return encode(document)

    def whole(self, generation: Generation, texts: list[str]) -> bytes:
        """The answer in one document."""
        choices = []
        for choice, text in zip(generation.choices, texts, strict=True):
            if self._chat:
                body: Document = {"message": {"role": "assistant", "content": text, "refusal": None}}
            else:
                body = {"text": text}
            choices.append(self._choice(choice, body))
        return encode({**self._whole, "choices": choices, "usage": usage(generation)})
