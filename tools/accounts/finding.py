"""Findings: what does not agree, and where.

Owns the values that counters hand on. Must never judge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

FINDINGS_MAX = 50  # that are kept; all are counted


class Finding(NamedTuple):
    """One disagreement: between whom, behind which record of which life (counted from 1), and in words."""

    between: str
    life: int
    sequence: int
    text: str


@dataclass(slots=True)
class Findings:
    """The first findings, and how many there were."""

    kept: list[Finding] = field(default_factory=list)
    count: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, between: str, life: int, sequence: int, text: str) -> None:
        """Something does not agree."""
        self.count += 1
        if len(self.kept) < FINDINGS_MAX:
            self.kept.append(Finding(between, life, sequence, text))

    def note(self, text: str) -> None:
        """Something that a reader should know and that is no disagreement."""
        if len(self.notes) < FINDINGS_MAX:
            self.notes.append(text)
