"""Causes: what an input says about why a request ended, lost its memory or changed hands.

Owns these sentences. Must never guess: what an input does not say is not said.
"""

from __future__ import annotations

from daemon.core import inputs
from journal.records import Closed
from tools.why.nouns import milliseconds

ABORTED_BY = {
    "client": "its client hung up, or cancelled it",
    "frontend": "its front end ended it",
    "operator": "an operator ended it",
}
ORDERS = {
    "stop": "the daemon was told to stop at once",
    "drain": "the daemon was told to shut down",
    "drain_expired": "the time that requests had for finishing at a shutdown was over",
}


def cause_of(item: inputs.Input | None) -> str:
    """Why what an input led to happened; empty where the decision says it all."""
    match item:
        case inputs.Aborted(by=by):
            return ABORTED_BY.get(by, f"ended by {by}")
        case inputs.FrontEndLost(frontend=name):
            return f"its front end {name} was gone for longer than --frontend-timeout"
        case inputs.FinishAsked(output_tokens=tokens):
            return f"its front end found a stop string behind {tokens:,} output tokens"
        case inputs.EpochEnded(why=why):
            return why
        case inputs.Controlled(order=order):
            return ORDERS.get(order, f"an operator's order: {order}")
        case _:
            return ""


def closed(said: Closed | None) -> str:
    """How the process of a life ended."""
    if said is None:
        return "it was killed or it crashed"
    return f"it ended in order ({said.why})"


def after(gap_ns: int) -> str:
    """When the next process began, as an addition."""
    return f", and the next one began {milliseconds(gap_ns)} later" if gap_ns > 0 else ""
