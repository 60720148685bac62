"""Campaign: an undisturbed round, then one round for every strike, then what must be true at the end.

Owns the server's flags, the order and the result. Must never start in a run directory that holds a journal. The result
is plain data: `show` prints it, `--json` writes it.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from tools.faults.judge import Judged, Verdict, judge, unexcused
from tools.faults.rounds import Round, Rounds, by_band, units_left
from tools.faults.strikes import Strike
from tools.faults.ties import Tie, explain
from tools.faults.work import Sizes, draw_tasks
from tools.own_server import ROOT, OwnServer, ServerFailed

FLUSHED_WITHIN_S = 10.0
FLUSH_LOOK_S = 0.05
REPLAY_WITHIN_S = 1200.0


class CampaignFailed(Exception):
    """It could not be run: the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign does: flags of the server, its environment, the clients and the strikes."""

    run_dir: Path
    serve: tuple[str, ...]
    seed: int
    clients: int
    sizes: Sizes
    strikes: tuple[Strike, ...]
    patience_s: float
    ties_within: float = 0.0  # bound of the log probabilities of a near-tie; 0: there are none
    environ: dict[str, str] = field(default_factory=dict)
    notes: Path | None = None  # where planted faults leave their notes
    reference: tuple[tuple[int, ...], ...] = ()  # outputs of another server's undisturbed round; empty: of the first


@dataclass(slots=True)
class Result:
    """What a campaign found."""

    undisturbed_s: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)  # of the first round
    rounds: list[dict[str, Any]] = field(default_factory=list)
    ties: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    units_after_flush: dict[str, float] = field(default_factory=dict)
    replay: str = ""
    replay_code: int = -1
    diverges: str = ""  # what the replay must name, where a fault can be found only there

    @property
    def clean(self) -> bool:
        """Nothing lost, missing, doubled or different, nothing left over, and a journal that replays as it must."""
        replays = self.replay_code == 1 and self.diverges in self.replay if self.diverges else self.replay_code == 0
        return not self.problems and not any(row["bad"] for row in self.rounds) and replays


def run(plan: Plan, told: Any) -> Result:
    """Run it to its end; `told` is called with each round's row. Raises CampaignFailed, ServerFailed."""
    if (plan.run_dir / "journal").exists() and any((plan.run_dir / "journal").iterdir()):
        raise CampaignFailed(f"{plan.run_dir} holds a journal already: name a fresh --run-dir")
    server = OwnServer(list(plan.serve), plan.run_dir, plan.environ)
    result = Result()
    try:
        server.start()
        server.arguments += ["--port", server.url.rpartition(":")[2]]  # the same one after a death
        trio.run(_rounds, plan, server, result, told)
        _at_the_end(server, result)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from None
        raise
    finally:
        server.kill()
    result.replay_code, result.replay = _replay(plan.run_dir)
    return result


async def _rounds(plan: Plan, server: OwnServer, result: Result, told: Any) -> None:
    tasks = draw_tasks(plan.seed, plan.clients, plan.sizes)
    async with Rounds(server, tasks, plan.patience_s, uuid.uuid4().hex[:6]).open() as rounds:
        quiet = await rounds.run(0, None, 0.0, plan.notes)
        result.undisturbed_s = quiet.ended_s - quiet.began_s
        result.outputs = [story.tokens for story in quiet.stories]
        reference = [list(tokens) for tokens in plan.reference] or result.outputs
        told(_row(quiet, reference, await _ties(plan, rounds, quiet, reference), result))
        for number, strike in enumerate(plan.strikes, start=1):
            if server.exit_code is not None:
                await trio.to_thread.run_sync(server.start)
            done = await rounds.run(number, strike, result.undisturbed_s)
            ties = await _ties(plan, rounds, done, reference)
            told(_row(done, reference, ties, result))


async def _ties(plan: Plan, rounds: Rounds, done: Round, reference: list[list[int]]) -> list[Tie]:
    """What became of outputs that parted, where near-ties can be."""
    if not plan.ties_within:
        return []
    parted = [story for story in done.stories if judge(story, reference[story.task.index]).verdict == Verdict.PARTED]
    return [await explain(rounds, story, reference[story.task.index], plan.ties_within) for story in parted]


def _row(done: Round, reference: list[list[int]], ties: list[Tie], result: Result) -> dict[str, Any]:
    """The books of a round as one row, its problems noted."""
    judged = [judge(story, reference[story.task.index]) for story in done.stories]
    excused = {tie.request for tie in ties if tie.near}
    bad = [
        _problem(done, place, verdict)
        for place, verdict in enumerate(judged)
        if verdict.verdict != Verdict.EQUAL and not (verdict.verdict == Verdict.PARTED and place in excused)
    ]
    breaks = done.strike is not None and done.strike.breaks_http
    bad += [f"round {done.number}, request {story.task.index}: its connection broke without a cause"
            for story in done.stories if unexcused(story, breaks)]  # fmt: skip
    bad += [f"round {done.number}: {text}" for text in done.problems]
    result.ties += [tie._asdict() | {"round": done.number} for tie in ties]
    row: dict[str, Any] = {
        "round": done.number,
        "kind": done.strike.kind if done.strike else "planted" if done.struck_s else "undisturbed",
        "victim": done.victim,
        "at_s": _seconds(done.struck_s - done.began_s) if done.struck_s else None,
        "took_s": _seconds(done.ended_s - done.began_s),
        "red_s": _seconds(done.seen.red_s),
        "green_s": _seconds(done.seen.green_s),
        "silence_s": _seconds(done.seen.silence_s) if done.struck_s else None,
        "tokens_s": _seconds(done.seen.tokens_s),
        "gone_s": _seconds(done.gone_s),
        "requests": len(done.stories),
        **{verdict.value: sum(one.verdict == verdict for one in judged) for verdict in Verdict},
        "near_ties": len(excused),
        "broken": sum(len(story.cuts) for story in done.stories),
        "resumes": sum(story.resumes for story in done.stories),
        "turned_away": sum(story.turned_away for story in done.stories),
        "units_left": done.units_left,
        "bad": bad,
    }
    result.rounds.append(row)
    return row


def _problem(done: Round, place: int, judged: Judged) -> str:
    task = done.stories[place].task
    what = f"round {done.number}, request {task.index} ({task.via}, {'greedy' if not task.temperature else 'sampled'})"
    return f"{what}: {judged.verdict}: {judged.text}"


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _at_the_end(server: OwnServer, result: Result) -> None:
    """Nothing is held once the cache is empty; and the server stops in order."""
    if server.exit_code is not None:
        result.problems.append(f"the server has ended with code {server.exit_code}")
        return
    try:
        flush = urllib.request.Request(f"{server.url}/flush_cache", method="POST")
        with urllib.request.urlopen(flush, timeout=30) as answer:
            answer.read()
        deadline = time.monotonic() + FLUSHED_WITHIN_S
        while True:  # the ranks report a step behind the answer
            live = by_band(server.metrics(), "units", ("live", "pending"))
            result.units_after_flush = {**live, **units_left(server)}
            if not any(result.units_after_flush.values()) or time.monotonic() > deadline:
                break
            time.sleep(FLUSH_LOOK_S)
        if any(result.units_after_flush.values()):
            result.problems.append(f"units held after the cache was flushed: {result.units_after_flush}")
        if code := server.stop():
            result.problems.append(f"the server ended with code {code} when asked to stop")
    except (OSError, ServerFailed) as error:
        result.problems.append(f"at the end: {error}")


def _replay(run_dir: Path) -> tuple[int, str]:
    """`bandmaster replay check` on the journal of all lives."""
    command = [sys.executable, "-m", "tools.cli", "replay", "check", str(run_dir / "journal")]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=REPLAY_WITHIN_S)
    except subprocess.TimeoutExpired:
        return 1, f"replay check took more than {REPLAY_WITHIN_S:g} s"
    return done.returncode, (done.stdout + done.stderr).strip()[-4000:]
