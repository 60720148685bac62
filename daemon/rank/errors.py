"""Errors of a rank.

RankError              the rank cannot serve: said once, in `Fault`, and on stderr
  UnsupportedModel     the model, or a feature of it, is not supported; names what is missing
  BadOption            a setting or option has a value that cannot be used
  StepRefused          a step contradicts what this rank knows; a broken invariant on one side of the wire
  GroupBroken          another rank is gone or late: this one cannot compute any more, and is not the one to blame
"""

from __future__ import annotations


class RankError(Exception):
    """The rank cannot serve; the text says what was wrong, the limit, the value and what to do."""


class UnsupportedModel(RankError):
    """The model or a feature of it is not supported; the text names what is missing."""


class BadOption(RankError):
    """A setting or option has a value that cannot be used."""


class StepRefused(RankError):
    """A step contradicts the state it is applied to; the epoch ends."""


class GroupBroken(RankError):
    """A peer is gone or did not take part in time; the text names the call, the peers and the limit."""
