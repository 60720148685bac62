"""Cases: one random workload on one tiny world, as data that is drawn from a seed, kept in files and made smaller.

Owns what can be drawn: models, configurations with every policy, requests, and everything that can happen to them.
Must never use anything but the seed, so that a case means the same wherever it runs; each seed switches some actions
off and skews the others, so that rare mixes are reached too. The first actions of a longer case are those of a shorter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allocator.columns import pack_i64
from daemon.core.limits import CoreConfig
from daemon.core.order import POLICIES
from ipc.messages import Generate, Sampling
from tools.worlds.prompts import stream_tokens
from tools.worlds.rank_double import FULL_ONLY, UNIT_BYTES, Shape

FAMILIES: dict[str, Shape] = {
    "full": FULL_ONLY,
    "window": Shape(windows=(20,)),
    "state": Shape(state=True),
    "window_state": Shape(windows=(12,), state=True),
    "windows_state": Shape(windows=(33, 9), state=True),
    "windows_only": Shape(windows=(24,), full_bytes=0),
}
"""Name -> the bands of a model."""

VOCAB_SIZE = 97
MODEL_LEN = 128
ACTIONS = 140  # actions of a case
CROWD = 9  # requests of a crowd: eight small ones and a long one
STEMS = 3  # beginnings that prompts share
OWN = 1000  # streams from here on are of one request each
EVICTION = ("value", "lru", "lfu", "fifo", "priority")
ONE_PPM = 1_000_000
SHORT_PPM = (300_000, 500_000, 700_000)  # how much of what all rows want there is in a world under pressure
# How often each number of stages is drawn, and what else; what happens at most once in a case.
STAGES = (1, 1, 1, 2, 2, 3)
DEATHS = (0.0, 0.0, 0.02, 0.06)  # how likely something dies behind an action
POISONED = 0.2  # how likely a rank dies of one of the requests
DEADLY_AT = (0, 0, 6, 40)  # positions of a request that are the death of a rank; where there is none, nobody dies
DYING = ("recover", "recover", "restart", "resume", "resume", "snapshot")
SINGLE = ("",) * 10 + ("epoch", "epoch", "drain", "drain", "stop", "degrade")


class Ask(msgspec.Struct):
    """One request. Its prompt begins with the first `shared` tokens of what request `parent` asked and was told.

    Without a parent (-1) those are of stream `stem`; then come `own` tokens of `stream`, which no other request has.
    """

    parent: int
    stem: int
    shared: int
    stream: int
    own: int
    max_tokens: int | None
    min_tokens: int = 0
    stop_ids: list[int] = []
    n: int = 1
    priority: int = 0
    deadline_ms: int = 0
    clip: bool = True
    namespace: str = ""
    store: bool = True
    pin_ms: int = 0
    temperature: float = 0.0
    penalty: float = 0.0
    seed: int | None = None
    logprobs: int = -1
    prompt_logprobs: int = -1
    frontend: str = "fe"

    def generate(self, number: int, prompt: list[int]) -> Generate:
        """The message of this request, which is request `number` of its case."""
        return Generate(
            id=f"r{number}",
            prompt=pack_i64(prompt),
            sampling=Sampling(
                temperature=self.temperature,
                seed=self.seed,
                presence_penalty=self.penalty,
                logprobs=self.logprobs,
                prompt_logprobs=self.prompt_logprobs,
            ),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_ids=pack_i64(self.stop_ids),
            n=self.n,
            priority=self.priority,
            deadline_ms=self.deadline_ms,
            clip=self.clip,
            namespace=self.namespace,
            store=self.store,
            pin_ms=self.pin_ms,
        )


class Case(msgspec.Struct):
    """Everything that a run depends on. `pages`: the arena holds so many pages of full attention and nothing else.

    `actions` are (what, number); what the number means, `tools.worlds.run` says. A rank that computes position
    `deadly_at` of request `poison` dies of it, every time (-1: there is none such).
    """

    seed: int
    family: str
    pages: int
    config: CoreConfig
    asks: list[Ask]
    actions: list[tuple[str, int]]
    stages: int = 1
    poison: int = -1
    deadly_at: int = 0

    @property
    def shape(self) -> Shape:
        """The bands of the model."""
        return FAMILIES[self.family]


def draw(
    seed: int,
    *,
    pressed: bool | None = None,
    family: str | None = None,
    caching: bool | None = None,
    actions: int = ACTIONS,
) -> Case:
    """The case of a seed; what is given is not drawn. `pressed`: many requests grow, and nothing else ends them."""
    rng = random.Random(seed)
    drawn = (rng.random() < 0.4, rng.choice(sorted(FAMILIES)), rng.random() < 0.8)
    pressed = drawn[0] if pressed is None else pressed
    family = drawn[1] if family is None else family
    config = _config(rng, drawn[2] if caching is None else caching)
    if pressed:
        config = msgspec.structs.replace(config, max_running_requests=7, reserve="estimate", max_batched_tokens=64)
    crowded = pressed and rng.random() < 0.5
    if crowded:
        chunk = rng.choice([1, 2])
        config = msgspec.structs.replace(config, page_size=1, chunked_prefill_size=chunk, max_running_requests=CROWD)
        config = msgspec.structs.replace(config, max_queued_requests=200)
    happens = _Happens(rng, pressed, crowded, config)
    pages = max(2, rng.choice([40, 90, 400]) // config.page_size) * (1 if family == "full" else 2)
    if pressed:
        pages = _short_pages(FAMILIES[family], config, happens.typical, rng.choice(SHORT_PPM))
    weights = _weights(rng, pressed)
    lives = random.Random(f"lives {seed}")  # drawn apart, so that the rest of a case does not hang on it
    stages, deaths = lives.choice(STAGES), lives.choice(DEATHS)
    asks: list[Ask] = []
    script: list[tuple[str, int]] = []
    crowd = CROWD if crowded else 0  # so many come before anything runs
    for place in range(actions):
        name = "submit" if place < crowd else rng.choices(list(weights), list(weights.values()))[0]
        if name == "submit":
            script.append((name, len(asks)))
            asks.append(happens.ask(asks))
        else:
            script.append((name, rng.randrange(10**6)))
        if lives.random() < deaths:
            script.append((lives.choice(DYING), lives.randrange(10**6)))
    single = rng.choice(SINGLE)
    if single and not pressed and script:
        script.insert(rng.randrange(len(script)), (single, 0))
    poison = lives.randrange(len(asks)) if asks and lives.random() < POISONED else -1
    return Case(seed, family, pages, config, asks, script, stages, poison, lives.choice(DEADLY_AT))


def _config(rng: random.Random, caching: bool) -> CoreConfig:
    """A small configuration with every policy in it."""
    page_size = rng.choice([1, 1, 2, 2, 4, 4, 16, 64])
    return CoreConfig(
        page_size=page_size,
        checkpoint_interval=page_size * rng.choice([1, 2, 3, 8]),
        state_cache=rng.choice(["extra_buffer", "no_buffer"]) if page_size == 1 else "extra_buffer",
        max_running_requests=rng.choice([1, 2, 4, 7]),
        max_batched_tokens=rng.choice([8, 16, 64]),
        chunked_prefill_size=rng.choice([1, 2, 5, 16, 64]),
        max_queued_requests=rng.choice([3, 20, 200]),
        schedule_policy=rng.choice(sorted(POLICIES)),
        overlap=rng.random() < 0.7,
        reserve=rng.choice(["estimate", "estimate", "full"]),
        retracts_max=rng.choice([0, 1, 3, 3]),
        stall_steps=8,
        enable_prefix_caching=caching,
        eviction_policy=rng.choice(EVICTION),
        checkpoint_policy=rng.choice(["likely", "grid"]),
        checkpoint_mark_tokens=rng.choice([0, 16, 64]),
        cache_quota_ppm=rng.choice([ONE_PPM, ONE_PPM, 400_000]),
        cache_quotas=rng.choice([{}, {}, {"a": 200_000}]),
        pinned_max_ppm=rng.choice([0, 250_000, ONE_PPM]),
        priority_preemption=rng.random() < 0.5,
        fair_quantum_tokens=rng.choice([1, 16, 4096]),
        overtaken_max=rng.choice([1, 4, 4096]),
        deadline_check=rng.random() < 0.5,
    )


def _short_pages(shape: Shape, config: CoreConfig, tokens: Sequence[int], short_ppm: int) -> int:
    """Pages of full attention that hold so much of what all rows want at once, each as long as one of `tokens`."""
    pages = [-(-one // config.page_size) for one in tokens]
    page_bytes = max(shape.full_bytes, 1) + len(shape.windows) * shape.window_bytes
    each = sum(pages) * page_bytes // len(pages) + 2 * shape.slot_bytes * shape.state
    return max(2, max(pages) + 1, config.max_running_requests * each * short_ppm // ONE_PPM // UNIT_BYTES)


def _weights(rng: random.Random, pressed: bool) -> dict[str, int]:
    """How likely each action of a case is; 0: it never happens in it."""
    often = {"submit": rng.choice([2, 4, 8]), "turn": rng.choice([6, 12]), "tick": 3, "report": rng.choice([2, 5])}
    rare = ("wait", "flush", "flush_cache", "acknowledge", "repeat")
    ending = ("abort", "finish", "lose")
    weights = often | {name: rng.choice([0, 1, 1, 2]) for name in rare}
    weights |= {name: 0 if pressed else rng.choice([0, 1, 1, 2]) for name in ending}
    return {name: weight for name, weight in weights.items() if weight}


class _Happens:
    """What the requests of one case are like."""

    def __init__(self, rng: random.Random, pressed: bool, crowded: bool, config: CoreConfig) -> None:
        self.rng, self.crowded = rng, crowded
        self.priorities = (
            [0, 0, 0] if config.schedule_policy == "fcfs" else rng.choice([[0], [-2, -1, 0, 1, 2], [0, 9]])
        )
        self.deadlines = [0] if pressed else rng.choice([[0], [0], [0, 0, 0, 20], [0, 0, 0, 5, 30, 200]])
        # The first requests of a world end early and so teach that little of an output is used; the others use it all.
        self.teaching = rng.choice([0, 8, 14]) if pressed and not crowded else 0
        self.namespaces = rng.choice([[""], ["", "a"], ["a", "b", "c"]])
        self.stores = rng.choice([[True], [True, True, False]])
        self.pins = rng.choice([[0], [0, 0, 5, 50, 5000]]) if config.enable_prefix_caching else [0]
        self.outputs: list[int | None] = [1, 2, 8, 8, 20, 40, None]
        self.lengths = [1, 9, 30, 50, 70]
        self.stops = [0, 1, 9]
        if pressed:
            self.outputs, self.lengths, self.stops = [30, 40, 60], [1, 3, 9], [0]
        if crowded:
            self.outputs, self.lengths = [13], [1]
        # What a request of such a length with such an output holds in the end.
        self.typical = [length + output for length in self.lengths for output in self.outputs if output is not None]

    def ask(self, asks: Sequence[Ask]) -> Ask:
        """The next request; in a crowd many small ones that grow, and every now and then a long prompt beside them."""
        one = self._any(asks)
        if not self.crowded:
            return one
        plain = msgspec.structs.replace(one, parent=-1, shared=0, n=1, prompt_logprobs=-1, min_tokens=0)
        if len(asks) % CROWD == CROWD - 1:
            return msgspec.structs.replace(plain, own=self.rng.choice([20, 30, 40]), max_tokens=1)
        return msgspec.structs.replace(plain, own=1, max_tokens=13)

    def _any(self, asks: Sequence[Ask]) -> Ask:
        """A fresh prompt, one that begins like others, or the next turn of an earlier request."""
        rng = self.rng
        length = rng.choice(self.lengths)
        parent = rng.randrange(len(asks)) if asks and rng.random() < 0.35 else -1
        own = rng.choice([length, 1, 1, 5])
        prompt_logprobs = rng.choice([-1, -1, -1, 1])
        scoring = prompt_logprobs >= 0 and rng.random() < 0.3
        namespace = asks[parent].namespace if parent >= 0 and rng.random() < 0.8 else rng.choice(self.namespaces)
        store = rng.choice(self.stores)
        return Ask(
            parent=parent,
            stem=rng.randrange(STEMS),
            shared=rng.choice([7, 40, MODEL_LEN]) if parent >= 0 else max(0, length - own),
            stream=OWN + len(asks),
            own=max(1, min(own, length)),
            max_tokens=0 if scoring else rng.choice(self.outputs),
            min_tokens=0 if scoring else rng.choice([0, 0, 1]),
            stop_ids=rng.sample(range(VOCAB_SIZE), 30 if len(asks) < self.teaching else rng.choice(self.stops)),
            n=rng.choice([1, 1, 1, 1, 1, 3]),
            priority=rng.choice(self.priorities),
            deadline_ms=rng.choice(self.deadlines),
            clip=rng.random() < 0.8,
            namespace=namespace,
            store=store,
            pin_ms=rng.choice(self.pins) if store else 0,
            temperature=rng.choice([0.0, 1.0]),
            penalty=rng.choice([0.0, 0.5]),
            seed=rng.choice([None, rng.randint(-(2**63), 2**63 - 1)]),
            logprobs=rng.choice([-1, -1, 1]),
            prompt_logprobs=prompt_logprobs,
            frontend=rng.choice(["fe", "fe", "other"]),
        )


def prompt_of(case: Case, number: int, parent: Sequence[int]) -> list[int]:
    """The prompt of a request whose parent has asked and was told `parent` (empty without one)."""
    ask = case.asks[number]
    begin = list(parent[: ask.shared]) if ask.parent >= 0 else stream_tokens(ask.stem, ask.shared, VOCAB_SIZE)
    return begin + stream_tokens(ask.stream, ask.own, VOCAB_SIZE)


# --- files ------------------------------------------------------------------------------------------------------------


class BadCase(Exception):
    """A file that is no case."""


def save(path: Path, case: Case) -> None:
    """Write a case so that a person can read it."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(case), indent=1) + b"\n")


def load(path: Path) -> Case:
    """Read a case; raises BadCase."""
    try:
        case = msgspec.json.decode(path.read_bytes(), type=Case)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadCase(str(error)) from error
    if case.family not in FAMILIES or any(
        name == "submit" and number >= len(case.asks) for name, number in case.actions
    ):
        raise BadCase("it names a family or a request that is not there")
    return case
