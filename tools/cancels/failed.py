"""Why a round could not be run at all.

Owns the one exception of this room. Must never stand for something that was measured and is wrong: that is a problem.
"""

from __future__ import annotations


class Failed(Exception):
    """It could not be run: the text says what happened."""
