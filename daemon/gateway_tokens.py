"""Tokens by front end: one step's columns cut into one message per front end.

Owns nothing; plain functions. Must never reorder entries within a front end. One front end without log probabilities
is the common case and costs one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from allocator.columns import pack_i64
from daemon.core.outputs import TokenColumns
from ipc.messages import TokenBatch

NOBODY = -1


def batches_by_frontend(columns: TokenColumns, owners: Mapping[int, int]) -> Iterator[tuple[int, TokenBatch]]:
    """(front-end index, its TokenBatch), by rising index.

    `owners` names the front end of a request: a log probability of a prompt may come without a token. Entries of
    requests it does not know come last, under NOBODY.
    """
    frontends, logprobs = columns.frontends, columns.logprobs
    if not logprobs:
        first = int(frontends[0])
        if (frontends == first).all():
            yield first, TokenBatch(columns.step, pack_i64(columns.requests), pack_i64(columns.tokens))
            return
    of_logprobs = [owners.get(entry.request, NOBODY) for entry in logprobs]
    known = set(frontends.tolist()) | set(of_logprobs)
    for frontend in sorted(known - {NOBODY}) + sorted(known & {NOBODY}):
        mask = np.equal(frontends, frontend)
        mine = [entry for entry, owner in zip(logprobs, of_logprobs, strict=True) if owner == frontend]
        yield (
            frontend,
            TokenBatch(columns.step, pack_i64(columns.requests[mask]), pack_i64(columns.tokens[mask]), mine),
        )
