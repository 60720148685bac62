"""Step plan: what a step being formed will hold, before anything of it has happened.

Owns the chunks, the token budget and the units that they add up to. Must never take memory or decide. Invariant: at
most one request is partly prefilled when the step is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from allocator.columns import Int32s
from daemon.core.caching import Hit
from daemon.core.requests import Request
from daemon.core.rows import Batch, Rows


@dataclass(slots=True)
class Chunk:
    """Prompt tokens [start, start + count) of a request in this step, and the pages and state slots it takes.

    `hit` is what a new request found in the prefix cache: it starts behind it. None when there is no cache, and for a
    request that goes on. `left_tokens` were found and are not used: it starts cold, because what it would hold of them
    does not fit beside what it takes.
    """

    request: Request
    start: int
    count: int
    pages: int
    slots: int = 0
    hit: Hit | None = None
    left_tokens: int = 0

    @property
    def target(self) -> int:
        """Tokens that the request's prefill must cover."""
        return self.request.target_tokens if self.request.row >= 0 else self.request.sequence_tokens

    @property
    def last(self) -> bool:
        """The prefill ends with it."""
        return self.start + self.count == self.target

    @property
    def computed_tokens(self) -> int:
        """Tokens that the prefill computes from here on, in this chunk and those after it."""
        return self.target - self.start

    @property
    def charged_tokens(self) -> int:
        """What the start of a new request is charged to its namespace: each prompt token once."""
        assert self.request.row < 0, "asked before it has a row"
        return 0 if self.request.started else self.computed_tokens


@dataclass(slots=True)
class StepPlan:
    """A step being planned; nothing of it has happened yet.

    `starts` are the next positions of the batch's rows, `needy` those of the rows that need one page each; `partial`: a
    request is partly prefilled when the step is done.
    """

    batch: Batch
    starts: Int32s
    needy: Rows
    budget_tokens: int
    pages: int
    partial: bool
    slots: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    new_rows: int = 0

    def add(self, chunk: Chunk) -> None:
        """Plan a chunk: its tokens leave the budget, its units join what the step takes."""
        assert 0 < chunk.count <= self.budget_tokens, "a chunk has tokens and fits the budget"
        if not chunk.last:
            assert chunk.request.row >= 0 or not self.partial, "one request at a time is partly prefilled"
            self.partial = True
        elif chunk.request.row >= 0:
            self.partial = False
        self.chunks.append(chunk)
        self.pages += chunk.pages
        self.slots += chunk.slots
        self.budget_tokens -= chunk.count
