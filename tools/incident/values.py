"""Values: the records of a journal with pseudonyms in place of what users wrote.

Owns which field of which record holds a name, a token or a number that comes of them. Must never change a length, an
order or a number that a decision reads. What is told of log probabilities is how many there are: their values would say
which words were likely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from allocator.columns import F32
from daemon.core.inputs import RecoveredChoice, RecoveredGroup
from daemon.core.kept_logprobs import NOT_KNOWN
from daemon.core.limits import CoreConfig
from daemon.settings_table import TABLE
from ipc.messages import Finished, Forward, Generate, Logprobs, RequestLogprobs, RowLogprobs, RowSampling, Sampling
from journal.records import Opened
from tools.incident.pseudonyms import Names, Tip, Tokens

replace = msgspec.structs.replace
LEFT_OUT = "(left out)"
SETTINGS_KEPT = frozenset(("int", "fraction", "bytes", "seconds", "switch", "choice", "secret"))
"""Kinds of settings whose values say nothing of users: a secret's is whether it is set."""
SETTINGS_OF_PLACES = frozenset(("port",))
SETTINGS_NAMED = frozenset(("served_model_name", "eviction_policy", "pp_layers", "rank_option"))


class Known(NamedTuple):
    """A mapped request: the end of its prompt, and the digest of its content."""

    tip: Tip
    digest: bytes


class Values:
    """Both kinds of pseudonyms, applied to structs."""

    def __init__(self, names: Names, tokens: Tokens) -> None:
        self.names = names
        self.tokens = tokens

    # --- requests ------------------------------------------------------------------------------------------------

    def generate(self, one: Generate) -> tuple[Generate, Tip]:
        """A request, and the end of its prompt."""
        prompt, tip = self.tokens.column(self.tokens.root(one.namespace), one.prompt)
        mapped = replace(
            one,
            id=self.names.id(one.id),
            prompt=prompt,
            sampling=self.sampling(one.sampling),
            stop_ids=self.tokens.stop_ids(one.stop_ids),
            namespace=self.names.namespace(one.namespace),
        )
        return mapped, tip

    def sampling(self, one: Sampling) -> Sampling:
        """Sampling without the client's own seed."""
        return one if one.seed is None else replace(one, seed=self.names.seed(one.seed))

    def finished(self, one: Finished) -> Finished:
        """An end."""
        return replace(one, id=self.names.id(one.id), detail=self.tokens.detail(one.detail))

    def group(self, one: RecoveredGroup, known: Known | None = None) -> tuple[RecoveredGroup, Tip, list[Tip]]:
        """What a life took over of a request, the end of its prompt and of each choice's output.

        `known` is what an earlier life had of it: where all choices have ended, the prompt is not there any more.
        """
        generate, tip = self.generate(one.generate)
        digest = self.names.digest(one.digest)
        if one.digest:
            tip, digest = known or Known(self.without_prompt(one.generate.namespace, one.digest), digest)
        choices, tips = [], []
        for choice in one.choices:
            mapped, end = self._choice(choice, tip)
            choices.append(mapped)
            tips.append(end)
        accepted = replace(one.accepted, id=self.names.id(one.accepted.id), seed=self.names.seed(one.accepted.seed))
        group = RecoveredGroup(
            frontend=self.names.frontend(one.frontend),
            generate=generate,
            seed=self.names.seed(one.seed),
            accepted=accepted,
            arrived_ns=one.arrived_ns,
            choices=choices,
            digest=digest,
        )
        return group, tip, tips

    def without_prompt(self, namespace: str, digest: bytes) -> Tip:
        """Where the output begins of a request of which only the digest of its content is left."""
        return self.tokens.root(namespace, digest)

    def _choice(self, one: RecoveredChoice, tip: Tip) -> tuple[RecoveredChoice, Tip]:
        tokens, end = self.tokens.column(tip, one.tokens)
        ended = self.finished(one.ended) if one.ended is not None else None
        return replace(one, tokens=tokens, ended=ended, logprobs=request_logprobs(one.logprobs)), end

    # --- lives and steps -----------------------------------------------------------------------------------------

    def config(self, one: CoreConfig) -> CoreConfig:
        """The core's configuration: quotas name namespaces."""
        if not one.cache_quotas:
            return one
        quotas = {self.names.namespace(name): ppm for name, ppm in one.cache_quotas.items()}
        return replace(one, cache_quotas=quotas)

    def opened(self, one: Opened) -> Opened:
        """The head of a life."""
        return replace(one, core=self.config(one.core), settings=settings(one.settings))

    def blank_forward(self, one: Forward) -> Forward:
        """A forward of a life that cannot be followed: as many tokens, all of them 0."""
        sampling = [self._blank_row(row) for row in one.sampling]
        return replace(one, tokens=bytes(len(one.tokens)), sampling=sampling)

    def _blank_row(self, one: RowSampling) -> RowSampling:
        return replace(
            one,
            sampling=self.sampling(one.sampling),
            banned=self.tokens.stop_ids(one.banned),
            prompt_ids=bytes(len(one.prompt_ids)),
            output_ids=bytes(len(one.output_ids)),
        )


def settings(said: Mapping[str, str]) -> dict[str, str]:
    """A daemon's settings without paths, addresses, and names that may be of users."""
    kinds = {row.key: row.kind for row in TABLE}
    rows = {row.key: row.attribute for row in TABLE}
    kept = {}
    for key, value in said.items():
        if kinds.get(key) == "path" and value:
            kept[key] = f".../{value.rstrip('/').rpartition('/')[2]}" if key == "model" else LEFT_OUT
        elif not value or _kept(key, kinds.get(key, ""), rows.get(key, "")):
            kept[key] = value
        else:
            kept[key] = LEFT_OUT
    return kept


def _kept(key: str, kind: str, attribute: str) -> bool:
    """Whether a setting's value tells nothing of users or places."""
    return key not in SETTINGS_OF_PLACES and (kind in SETTINGS_KEPT or attribute in SETTINGS_NAMED)


# --- log probabilities -------------------------------------------------------------------------------------------


def logprobs(values: Logprobs) -> Logprobs:
    """As many, all of them 0; one that is not known stays so."""
    chosen = values.chosen
    if len(chosen) % 4 == 0:
        known = np.frombuffer(chosen, F32)
        chosen = np.where(known == np.float32(NOT_KNOWN), known, np.float32(0)).astype(F32).tobytes()
    else:
        chosen = bytes(len(chosen))
    lengths = (len(values.ranks), len(values.top_ids), len(values.top_values))
    return Logprobs(values.k, chosen, *map(bytes, lengths))


def request_logprobs(entries: list[RequestLogprobs]) -> list[RequestLogprobs]:
    """Those of one choice."""
    return [replace(entry, values=logprobs(entry.values)) for entry in entries]


def row_logprobs(entries: list[RowLogprobs]) -> list[RowLogprobs]:
    """Those of one report."""
    return [replace(entry, values=logprobs(entry.values)) for entry in entries]


# --- what may differ between a record and the one that is made of mapped inputs ------------------------------------


def shape_of_forward(one: Forward) -> Forward:
    """A forward without what comes of tokens and seeds, for a comparison of the rest."""
    sampling = [_shape_of_row(row) for row in one.sampling]
    return replace(one, tokens=_length(one.tokens), sampling=sampling)


def _shape_of_row(one: RowSampling) -> RowSampling:
    return replace(
        one,
        sampling=replace(one.sampling, seed=None),
        banned=_length(one.banned),
        prompt_ids=_length(one.prompt_ids),
        output_ids=_length(one.output_ids),
    )


def _length(column: bytes) -> bytes:
    return len(column).to_bytes(8, "little")
