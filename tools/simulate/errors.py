"""Errors of a simulation: what was asked for cannot be simulated.

Owns the one exception. Must never be raised for a defect of the program.
"""

from __future__ import annotations


class SimulateError(Exception):
    """The text says what was wrong, where, the value, what is allowed and what to do."""
