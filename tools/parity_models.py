"""The model matrix: families of real architectures on the whole engine in one process, beside `transformers`.

Owns what is run per family, page size and chunk size, and how it is judged. Must never hide a difference: an output is
equal token for token, or every token of it that differs is one where the reference's own two best logits lie closer
than the tie, listed one by one and judged behind it by teacher forcing; all else is `different`.

Rounds of one engine, in this order; each sends requests whose outputs the reference knows:

    moves     (in an arena so tight that hardly two long requests fit) all prompts at once from an empty cache, with a
              balloon that forces relocations every few turns, and compaction
    cold      all prompts at once, mixed in one batch, nothing cached
    hit       the same again: every prompt was seen whole
    branch    a prefix of a prompt, then other tokens
    turn      a prompt, its output and more
    cut       the same prompts behind an eviction of half or all of one band's part of the cache, each band in turn
    retract   the prompts again, with requests that lose their memory while they are prefilled and while they decode
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from allocator.capacity import Demand
from daemon.core.limits import CoreConfig
from ipc.messages import RankSettings
from tools.groups.threads import GroupInProcess, ThreadedRanks
from tools.inprocess import InProcess, Sent
from tools.parity_judge import Judgement, judge
from tools.reference import Reference
from tools.toy_schedules import least_arena

PROMPT_TOKENS = (1, 2, 15, 16, 17, 63, 64, 65, 255, 700, 1500, 3000)
CHUNKS = (3, 16, 100, 512, 2048)
PAIRS = (  # page size and chunk size of each engine: every chunk size, every page size with a small and a large chunk
    *((16, chunk) for chunk in CHUNKS),
    *((page_size, chunk) for page_size in (1, 64) for chunk in (16, 512)),
)
CHUNKS_PER_PROMPT = 44  # the longest prompt of a chunk size has about so many chunks
TOGETHER = 16
OUTPUT_TOKENS = 8
INTERVAL = 64
LENGTH_MAX = 4096
ROOMY_BYTES = 64 << 20
BATCHED_TOKENS = 2048


class Plan(NamedTuple):
    """What is run of one family."""

    pairs: Sequence[tuple[int, int]] = PAIRS  # page size and chunk size of each engine
    prompt_tokens: Sequence[int] = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    together: int = TOGETHER
    chunks_per_prompt: int = CHUNKS_PER_PROMPT
    arena_bytes: int = ROOMY_BYTES
    stages: int = 1  # each engine runs on so many pipeline stages
    ranks: int = 1  # of so many tensor ranks


class Engine(NamedTuple):
    """One engine of the matrix."""

    page_size: int
    chunk: int
    state_cache: str


@dataclass
class Row:
    """One output, judged."""

    family: str
    page_size: int
    chunk: int
    state_cache: str
    round: str
    prompt_tokens: int
    cached_tokens: int
    cut: str
    admissions: int
    output_tokens: int
    verdict: str
    flips: list[dict[str, Any]]
    why: str


@dataclass
class Result:
    """Everything of one family; `copied` units per band, `moves` by reliefs, over all its engines."""

    family: str
    rows: list[Row] = field(default_factory=list)
    copied: Counter[str] = field(default_factory=Counter)
    relief_moves: int = 0
    retractions: int = 0


class Family:
    """One model directory, its reference and the outputs that the reference gave so far."""

    def __init__(self, name: str, directory: Path, plan: Plan, prompts: Sequence[Sequence[int]]) -> None:
        self.name, self.directory, self.plan = name, directory, plan
        self.reference = Reference(directory)
        self.prompts = [list(prompt) for prompt in prompts]
        self._known: dict[tuple[int, ...], list[int]] = {}

    def expected(self, prompt: Sequence[int]) -> list[int]:
        """The reference's greedy output; each prompt is generated once."""
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self.reference.generate(prompt, self.plan.output_tokens, stop_at_eos=False)
        return self._known[key]

    def judge(self, sent: Sent) -> Judgement:
        """The output of one request beside the reference's."""
        if sent.refused is not None:
            return Judgement("different", why=f"refused: {sent.refused.message}")
        if sent.finished is None or sent.finished.reason != "length":
            return Judgement("different", why=f"ended by {sent.finished.reason if sent.finished else 'nothing'}")
        theirs = self.expected(sent.prompt)
        if sent.tokens == theirs:
            return Judgement("equal")
        return judge(
            self.reference,
            sent.prompt,
            sent.tokens,
            theirs,
            limit=self.plan.output_tokens,
            finish_reason="length",
        )


def random_prompts(plan: Plan, vocab_size: int, seed: int) -> list[list[int]]:
    """One prompt of each length, and random lengths up to `together`."""
    rng = random.Random(seed)
    lengths = list(plan.prompt_tokens)
    while len(lengths) < plan.together:
        lengths.append(rng.randint(1, max(2, max(plan.prompt_tokens) // 4)))
    return [[rng.randrange(2, vocab_size) for _ in range(length)] for length in lengths]


def engines(plan: Plan) -> Iterator[Engine]:
    """One per pair, and the mode without checkpoint slots once where a page of one token is among them."""
    for page_size, chunk in plan.pairs:
        yield Engine(page_size, chunk, "extra_buffer")
    alone = [chunk for page_size, chunk in plan.pairs if page_size == 1]
    if alone:
        yield Engine(1, max(alone), "no_buffer")


def run_family(family: Family) -> Result:
    """The whole matrix of one family."""
    result = Result(family.name)
    loaded: dict[tuple[int, int], ThreadedRanks] = {}
    has_state = True
    for one in engines(family.plan):
        if one.state_cache == "no_buffer" and not has_state:
            continue
        settings = _settings(family, one)
        key = (one.page_size, settings.checkpoint_interval)
        if key not in loaded:
            loaded[key] = ThreadedRanks(settings, family.plan.stages, family.plan.ranks)
        has_state = any(band.kind == "state" for band in loaded[key].geometry.stages[0].bands)
        _run_engine(family, one, loaded[key], result)
    return result


def _settings(family: Family, one: Engine) -> RankSettings:
    return RankSettings(
        model_path=str(family.directory),
        model_name=family.name,
        dtype="float32",
        page_size=one.page_size,
        max_running_requests=TOGETHER,
        max_batched_tokens=BATCHED_TOKENS,
        max_model_len=LENGTH_MAX,
        arena_bytes=family.plan.arena_bytes,
        mem_fraction_ppm=0,
        runner="torch",
        threads=1,
        invariants=2,
        checkpoint_interval=INTERVAL if one.state_cache == "extra_buffer" else 0,
    )


def _run_engine(family: Family, one: Engine, ranks: ThreadedRanks, result: Result) -> None:
    config = CoreConfig(
        page_size=one.page_size,
        max_running_requests=TOGETHER,
        max_batched_tokens=BATCHED_TOKENS,
        chunked_prefill_size=one.chunk,
        checkpoint_interval=INTERVAL,
        state_cache=one.state_cache,
        retracts_max=64,
    )
    seed = one.page_size * 10_000 + one.chunk
    tight = Rounds(family, GroupInProcess(config, ranks, seed=seed), one)
    crowd = tight.crowd()
    arenas = [least_arena(stage, crowd) for stage in ranks.geometry.stages]
    tight.engine = GroupInProcess(config, ranks, seed=seed, arena_bytes=arenas)
    _keep(family, one, tight.tight(), tight.engine, result)
    roomy = Rounds(family, GroupInProcess(config, ranks, seed=seed), one)
    _keep(family, one, roomy.roomy(), roomy.engine, result)


def _keep(
    family: Family,
    one: Engine,
    rounds: Iterator[tuple[str, list[Sent]]],
    engine: InProcess,
    result: Result,
) -> None:
    """Judge every request of the rounds and add up what the engine did."""
    for name, requests in rounds:
        for sent in requests:
            judged = family.judge(sent)
            result.rows.append(
                Row(
                    family.name,
                    one.page_size,
                    one.chunk,
                    one.state_cache,
                    name,
                    len(sent.prompt),
                    sent.cached[0] if sent.cached else 0,
                    sent.cuts[0] if sent.cuts else "",
                    len(sent.admissions),
                    len(sent.tokens),
                    judged.verdict,
                    judged.notes,
                    judged.why,
                )
            )
    for band, units in engine.copied().items():
        result.copied[band] += units
    result.relief_moves += engine.worker.chain.relief.moves
    result.retractions += engine.state.totals.retractions


class Rounds:
    """The rounds of one engine; each ends at rest with the engine's checks."""

    def __init__(self, family: Family, engine: InProcess, one: Engine) -> None:
        self.family, self.engine = family, engine
        longest = one.chunk * family.plan.chunks_per_prompt
        self.prompts = [prompt for prompt in family.prompts if len(prompt) <= longest]
        self.rng = random.Random(one.chunk)

    def crowd(self) -> Demand:
        """Units of the longest request and of four of middle length, all at their most."""
        memory = self.engine.state.memory
        assert memory is not None, "the epoch has begun"
        lengths = sorted(len(prompt) + 2 * self.family.plan.output_tokens + 40 for prompt in self.prompts)
        several = memory.ceiling(lengths[len(lengths) // 2])
        return tuple(most + 4 * each for most, each in zip(memory.ceiling(lengths[-1]), several, strict=True))

    def tight(self) -> Iterator[tuple[str, list[Sent]]]:
        """Name and requests of each round in the tight arena, run when it is asked for."""
        yield "moves", self._send(self.prompts, between=self._move)
        yield "moves, hits", self._send(self.prompts, between=self._move)
        self._empty()

    def roomy(self) -> Iterator[tuple[str, list[Sent]]]:
        """Name and requests of each round with room for all, run when it is asked for."""
        yield "cold", self._send(self.prompts)
        yield "hit", self._send(self.prompts)
        yield "branch", self._send(self._branches())
        yield "turn", self._send(self._turns())
        for index, band in enumerate(self.engine.bands[:-1]):
            for parts in (2, 1):
                self.engine.evict_only(index, parts)
                yield f"cut {'half' if parts > 1 else 'all'} {band.kind}", self._send(self.prompts)
        yield "retract", self._send(self.prompts, between=self._retract)
        self._empty()

    def _send(self, prompts: Sequence[list[int]], between: Callable[[], None] | None = None) -> list[Sent]:
        engine, sent = self.engine, []
        for prompt in prompts:
            sent.append(engine.submit(prompt, self.family.plan.output_tokens))
            engine.turn()
        turns = 0
        while engine.turn():
            turns += 1
            if between is not None and turns % 2 == 0:
                between()
        engine.check_rest()
        return sent

    def _empty(self) -> None:
        self.engine.flush_cache()
        self.engine.run()
        self.engine.check_free()

    def _move(self) -> None:
        if not self.engine.live:
            return
        self.engine.churn(self.rng.randrange(2**30))
        if self.rng.random() < 0.1:
            self.engine.flush(32)

    def _retract(self) -> None:
        running = [sent for sent in self.engine.sent.values() if sent.finished is None and not sent.refused]
        if running and self.rng.random() < 0.25:
            self.engine.retract(self.rng.choice(running))

    def _branches(self) -> list[list[int]]:
        """Where a branch leaves is the prompt's own, so that every engine sends the same ones."""
        made = []
        for prompt in self.prompts:
            rng = random.Random(len(prompt))
            made.append([*prompt[: rng.randint(1, len(prompt))], *prompt[-1:], *prompt[: rng.randint(1, 40)]])
        return made

    def _turns(self) -> list[list[int]]:
        return [[*prompt, *self.family.expected(prompt), *prompt[-3:]] for prompt in self.prompts]


def tiny_family(name: str, plan: Plan, directory: Path) -> Family:
    """A family by its small random checkpoint, written under `directory`."""
    from tools.tiny_models import COMMON, tiny_model

    place = tiny_model(directory, name, max_position_embeddings=LENGTH_MAX)
    return Family(name, place, plan, random_prompts(plan, int(COMMON["vocab_size"]), seed=len(name)))


def temporary() -> tempfile.TemporaryDirectory[str]:
    """Where checkpoints are written for one run."""
    return tempfile.TemporaryDirectory(prefix="bandmaster-parity-")
