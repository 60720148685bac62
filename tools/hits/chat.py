"""Chat: conversations whose next turn is all before it and some new text, and what their checkpoints cost.

Owns the traffic and the account of it. Must never help the core. Invariants: turns of all conversations come in rounds,
one request at a time; no two conversations share a token beyond the system prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from allocator.columns import Int64s, pack_i64
from daemon.core.grid import KIND_NAMES
from ipc.messages import Accepted, Generate
from tools.hits.arena import ROOM_PPM, SLOT_BYTES, Served
from tools.simulate.engine import GREEDY, Engine

SEED_FIRST = 1_000_001  # output ids lie above every prompt's


class Chat(NamedTuple):
    """Sizes in tokens: what all conversations begin with, what each begins with, and what a turn adds.

    `fewer` is how many times fewer bytes of checkpoints per hit token than on a grid are promised; 0: nothing is. A
    turn that is not much longer than the grid's interval leaves nothing to save.
    """

    name: str
    conversations: int
    turns: int
    system: int
    first: int
    new: int
    output: int
    fewer: float = 0.0

    def tokens(self) -> int:
        """Tokens of all conversations at their end."""
        return self.conversations * (self.system + self.first + self.turns * (self.new + self.output))


CHATS = (
    Chat("short turns", 6, 10, 400, 200, 150, 250),
    Chat("long answers", 6, 8, 400, 300, 300, 900),
    Chat("a document", 4, 6, 400, 8_000, 200, 350),
    Chat("tool results", 4, 8, 2_000, 1_000, 2_500, 300, fewer=5.0),
    Chat("as traced", 4, 5, 512, 9_500, 3_200, 350, fewer=5.0),  # means of the published conversation trace
)


class Cost(NamedTuple):
    """What one chat needed under one policy. Bytes are those of the states of its checkpoints.

    `kinds` are (given, hit) by kind; `held` are states in the cache at the end.
    """

    chat: Chat
    policy: str
    room_ppm: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    given: int
    held: int
    kinds: dict[str, tuple[int, int]]

    @property
    def bytes_per_hit_token(self) -> float:
        """Bytes of all states given over tokens that were not computed because of them."""
        return self.given * SLOT_BYTES / self.hit_tokens if self.hit_tokens else float("inf")


def text(conversation: int, begin: int, tokens: int) -> Int64s:
    """`tokens` ids (int64) of a conversation from its position `begin` on; -1 is what all begin with."""
    return (np.arange(begin, begin + tokens, dtype=np.int64) * 7919 + (conversation + 1) * 104_729) % 1_000_000


def run(chat: Chat, served: Served, room_ppm: int = ROOM_PPM) -> Cost:
    """Serve the chat from an empty cache; `room_ppm` of the arena that holds everything."""
    requests = chat.conversations * chat.turns
    engine = Engine(served.config(1), served.geometry(chat.tokens(), requests, 1, room_ppm))
    histories = [
        np.concatenate([text(-1, 0, chat.system), text(one, 0, chat.first)]) for one in range(chat.conversations)
    ]
    prompts = hits = 0
    for turn in range(chat.turns):
        for one, history in enumerate(histories):
            id, seed = f"{one}/{turn}", SEED_FIRST + one * chat.turns + turn
            prompt = np.concatenate([history, text(one, len(history), chat.new)])
            answer = engine.submit(Generate(id, pack_i64(prompt), GREEDY, max_tokens=chat.output), seed)
            assert isinstance(answer, Accepted), "the arena holds any one conversation"
            engine.run()
            prompts, hits = prompts + len(prompt), hits + engine.sent[id].cached_tokens
            histories[one] = np.concatenate([prompt, np.full(chat.output, seed, np.int64)])
    engine.check_rest()
    gauges = engine.core.gauges()
    return Cost(
        chat=chat,
        policy=served.policy,
        room_ppm=room_ppm,
        prompt_tokens=prompts,
        hit_tokens=hits,
        computed_tokens=engine.prompt_tokens,
        given=gauges["checkpoints_given_total"],
        held=engine.cached_units()[0],
        kinds={
            name: (gauges[f"states_given_{name}_total"], gauges[f"states_hit_{name}_total"])
            for name in KIND_NAMES.values()
        },
    )
