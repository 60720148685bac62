"""Documents: traffic to be recorded in which it matters what the cache keeps: long texts that come again and again.

Owns the drawing. Must never depend on what a server does: everything is drawn from the seed before the first request is
sent. Between questions about a few documents come other texts that nobody sends twice: a cache that keeps what was used
last loses the documents to those. More comes than there are rows, so that requests wait, and urgent ones take the place
of others.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from allocator.columns import pack_i64
from ipc.messages import Generate, Sampling
from tools.whatif.pressured import NS_PER_S, URGENT, tokens
from tools.whatif.rerun import Sending


class Documents(NamedTuple):
    """How much comes, and how long it is, in tokens."""

    requests: int = 260
    seconds: float = 28.0
    documents: int = 13
    document_tokens: int = 640
    question_tokens: tuple[int, int] = (16, 64)
    once_one_in: int = 2  # texts that come once
    once_tokens: tuple[int, int] = (300, 800)
    max_tokens: int = 300
    urgent_one_in: int = 4  # with a priority: under preemption they take the place of others
    hang_up_one_in: int = 12  # clients that leave before they have everything


def draw_documents(load: Documents, seed: int) -> list[Sending]:
    """The requests, in order of time."""
    rng = random.Random(f"documents/{seed}")
    documents = [tokens(rng, load.document_tokens) for _ in range(load.documents)]
    found = []
    for number, at_s in enumerate(sorted(rng.uniform(0, load.seconds) for _ in range(load.requests))):
        if rng.randrange(load.once_one_in) == 0:
            prompt = tokens(rng, rng.randint(*load.once_tokens))
        else:
            prompt = documents[rng.randrange(len(documents))] + tokens(rng, rng.randint(*load.question_tokens))
        at_ns = round(at_s * NS_PER_S)
        leaves = load.hang_up_one_in and rng.randrange(load.hang_up_one_in) == 0
        hang_up_ns = at_ns + round(rng.uniform(1.0, 6.0) * NS_PER_S) if leaves else -1
        generate = Generate(
            id=f"d{number}",
            prompt=pack_i64(prompt),
            sampling=Sampling(temperature=0.0, seed=number),
            max_tokens=load.max_tokens,
            priority=URGENT if rng.randrange(load.urgent_one_in) == 0 else 0,
        )
        found.append(Sending(at_ns, generate, hang_up_ns))
    return found
