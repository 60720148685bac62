"""Errors of the allocator: what was wrong, the limit, the value and what to do, in one sentence each.

Owns every exception type of this package. Must never be raised after part of an operation took effect: whoever
catches one may go on as if the call had not been made, except `InvariantBroken`, which ends the epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allocator.capacity import CapacityRefusal
    from allocator.sizing import Term


class AllocatorError(Exception):
    """Base of all errors of the allocator."""


class InvariantBroken(AllocatorError):
    """Something that can only be a defect or corruption: the epoch ends. `name` is the invariant's name in the logs."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


class CapacityRefused(AllocatorError):
    """A take was made without asking first, and does not fit; nothing changed."""

    def __init__(self, refusal: CapacityRefusal) -> None:
        super().__init__(refusal.text())
        self.refusal = refusal


class DeclarationError(AllocatorError):
    """A storage declaration that cannot be laid out."""


class BudgetTooSmall(AllocatorError):
    """The byte budget is below what one request at batch size 1 needs.

    `terms` is the table of what was asked for, `missing_bytes` what the budget lacks.
    """

    def __init__(self, budget_bytes: int, terms: list[Term], missing_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.terms = terms
        self.missing_bytes = missing_bytes
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """The refusal as text: one line per term, then the budget and the bytes missing."""
        width = max(len(term.name) for term in self.terms)
        rows = [f"  {term.name:<{width}}  {term.size_bytes:>16,d} bytes  {term.note}".rstrip() for term in self.terms]
        needed = self.budget_bytes + self.missing_bytes
        return [
            f"the memory budget of {self.budget_bytes:,d} bytes is {self.missing_bytes:,d} bytes below the "
            f"{needed:,d} that one request at batch size 1 needs; raise --arena-bytes or --mem-fraction, or lower "
            "what the terms below depend on",
            *rows,
        ]
