"""Verdicts: what a decision about a request means to whoever follows requests through a journal.

Owns the sets that several tools read. Must never say more of a verdict than the core does.
"""

from __future__ import annotations

from daemon.core.reasons import Verdict

LOSES_ROW = frozenset({Verdict.RETRACTED, Verdict.REQUEUED, Verdict.RESUMED})
"""Behind these a request holds nothing and is in the queue, where it may have been already."""

WAITS_AGAIN = LOSES_ROW | {Verdict.RECOVERED}
"""The same, and the first decision about a request that a life took over from the one before."""
