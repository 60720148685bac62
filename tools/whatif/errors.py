"""Errors of what-if: what was asked cannot be answered.

Owns the one exception. Must never be raised for a defect of the program.
"""

from __future__ import annotations

from tools.ends import Refused


class WhatIfError(Refused):
    """The text says what was wrong, the value, what is allowed and what to do."""
