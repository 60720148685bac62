"""Errors of a plan: what was asked for cannot be planned.

Owns the one exception. Must never be raised for a defect of the program.
"""

from __future__ import annotations


class PlanError(Exception):
    """The text says what was wrong, the limit, the value and what to do."""
