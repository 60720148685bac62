"""Legend: the words of a story that an engineer who serves models may not know, once each.

Owns the texts. Must never be needed to read a story: its sentences say what they mean.
"""

from __future__ import annotations

LEGEND: dict[str, str] = {
    "request": "one choice of what a client asked for, with a number of its own; n = 3 makes three.",
    "step": "one iteration of the scheduler: a batch of prompt parts and next tokens that all ranks compute together.",
    "pass": "one look of the scheduler at its queue, mostly to form a step.",
    "place in the batch": "one of --max-running-requests; a request that runs or is being prefilled has one.",
    "rank": "a process that runs the model, one for each device (a worker elsewhere).",
    "pipeline stage": "the ranks that hold the same layers (--pp); each stage has memory of its own, and the fullest"
    " one decides.",
    "epoch": "one life of the device memory: it ends when a rank is lost, and the next one begins empty.",
    "trial": "who ran when ranks died twice in a row and got no further runs alone once, so that the one that kills"
    " them is found (--epoch-losses-max).",
    "life": "one run of the daemon's process; the next one reads the journal and takes over what had not ended.",
    "arena": "the one region of device memory that every kind of per-request memory shares, so that whichever"
    " is needed may grow.",
    "full-attention page": "KV of a run of tokens (--page-size) for the layers that attend to everything before them.",
    "page of the N-token sliding window": "the same for layers with a sliding window of N tokens; given back as the"
    " window moves on.",
    "recurrent-state slot": "the state of all recurrent layers (Mamba and alike) behind one position of one sequence.",
    "prefix cache": "pages and states that ended or running requests left, found again by equal prompts; all of"
    " it counts as free memory and is evicted when something else needs the room.",
    "hit cut short": "a prefix-cache hit needs every kind: the full-attention pages before its end, the window before"
    " its end, and the state at its end. Where one kind is gone, the hit ends earlier.",
    "missing": "units that must come free before the step or start fits, beside what the prefix cache can give back.",
    "expected growth": "running requests grow; a start is only granted when what is expected of all of them still fits,"
    " by the lengths of recent outputs (--reserve).",
    "retracted": "it lost its memory and waits again (preempted by recomputation): its output is kept, what is not"
    " in the prefix cache any more is computed again.",
    "parked": "it keeps its memory and its place, and gets no tokens until there is room.",
    "spilled": "swapped out to host memory: does not occur, there is no host tier to move memory to.",
    "#N": "the number of the record in the journal: `bandmaster replay until N DIR` shows the whole state behind it.",
}
"""Word -> what it means."""


def legend() -> list[str]:
    """The words as lines."""
    return ["words:", *(f"  {word}: {text}" for word, text in LEGEND.items())]
