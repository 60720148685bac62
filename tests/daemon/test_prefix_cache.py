"""The prefix cache of a whole daemon with a modeled rank: hits, keys, counters, flushes, and what boots."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from allocator.columns import i32, pack_i64
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from daemon.exits import Exit
from ipc.client import DaemonClient
from ipc.client_stream import Tokens
from ipc.messages import Finished, Generate, Refused, Sampling, Step
from journal import records
from journal.opening import open_journal
from journal.reader import read_records
from journal.records import DECISION_VERSION, SCHEMA_VERSION, Kind, Opened
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.daemon.daemon_process import PATIENCE_S, DaemonProcess, running
from tools.replay import replay_directory

pytestmark = pytest.mark.e2e
PAGE, INTERVAL, WINDOW = 16, 64, 64
GRID = ("--page-size", str(PAGE), "--checkpoint-interval", str(INTERVAL), "--invariants", "2")
HYBRID = ("--rank-option", f"windows={WINDOW}", "--rank-option", "state=1", *GRID)


@dataclass
class Answered:
    """One request's choices: their tokens, and their ends by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)
    refused: Refused | None = None

    def hit(self, choice: int = 0) -> tuple[int, int, str]:
        end = self.ends[choice]
        return end.cached_tokens, end.matched_tokens, end.hit_cut


async def ask_for(
    client: DaemonClient,
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    namespace: str = "",
    n: int = 1,
    started: trio.Event | None = None,
) -> Answered:
    """Send one greedy request and follow it to its end."""
    found = Answered()
    message = Generate(
        name, pack_i64(list(prompt)), Sampling(temperature=0.0), max_tokens=max_tokens, n=n, namespace=namespace
    )
    with trio.fail_after(PATIENCE_S):
        async with client.generate(message) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    found.tokens.setdefault(event.choice, []).extend(event.tokens)
                    if started is not None:
                        started.set()
                elif isinstance(event, Finished):
                    found.ends[event.choice] = event
                elif isinstance(event, Refused):
                    found.refused = event
    return found


def some_prompt(seed: int, tokens: int) -> list[int]:
    """Token ids of the modeled vocabulary; a longer prompt of the same seed begins with the shorter one."""
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(tokens)]


def sample(metrics: str, name: str, **labels: str) -> float:
    """One value of a Prometheus text; 0 where the series is not there yet."""
    tail = "{" + ",".join(f'{key}="{text}"' for key, text in labels.items()) + "}" if labels else ""
    for line in metrics.splitlines():
        if line.startswith(f"bandmaster:{name}{tail} "):
            return float(line.rpartition(" ")[2])
    return 0.0


async def counted(client: DaemonClient, name: str, **labels: str) -> float:
    return sample((await client.ask("metrics")).body, name, **labels)


async def order(client: DaemonClient, what: str) -> tuple[bool, dict[str, Any]]:
    answer = await client.ask(what)
    return answer.ok, msgspec.json.decode(answer.body)


@pytest.mark.parametrize(
    ("flags", "cached", "cut"),
    [
        (GRID, 288, ""),
        ((*GRID, "--rank-option", f"windows={WINDOW}"), 288, ""),
        (HYBRID, 256, "state"),
        ((*GRID, "--no-enable-prefix-caching"), 0, ""),
    ],
)
async def test_the_second_of_two_equal_prompts_is_a_hit(
    tmp_path: Path, flags: tuple[str, ...], cached: int, cut: str
) -> None:
    """300 tokens: all whole pages but the last token's with attention, the last grid point with state; equal tokens."""
    prompt = some_prompt(1, 300)
    async with running(tmp_path / "run", *flags) as (_, client):
        first = await ask_for(client, "a", prompt, 8)
        second = await ask_for(client, "b", prompt, 8)
    assert first.hit()[0] == 0
    assert second.hit()[0] == cached
    assert second.hit()[2] == cut
    assert first.tokens == second.tokens
    assert replay_directory(str(tmp_path / "run")).divergence is None


async def test_a_conversation_goes_on_behind_its_last_turn(tmp_path: Path) -> None:
    """A second turn that repeats prompt and output finds both, as far as pages, window and checkpoints go."""
    async with running(tmp_path / "run", *HYBRID) as (_, client):
        prompt = some_prompt(2, 250)
        first = await ask_for(client, "a", prompt, 100)
        turn = prompt + first.tokens[0] + some_prompt(3, 20)
        second = await ask_for(client, "b", turn, 8)
        cold = await ask_for(client, "c", turn, 8, namespace="salt:cold")
    assert second.hit()[0] == 320, "the last checkpoint before token 349, the newest that was written"
    assert cold.hit()[0] == 0
    assert second.tokens == cold.tokens


async def test_P6_a_salt_and_an_adapter_of_one_name_share_nothing(tmp_path: Path) -> None:
    """Equal tokens under typed keys: each space misses first and hits after; outputs are equal everywhere."""
    prompt = some_prompt(4, 200)
    spaces = ["", "salt:x", "lora:x", "salt:lora:x", "salt:"]
    async with running(tmp_path / "run", *HYBRID) as (_, client):
        first = [await ask_for(client, f"a{k}", prompt, namespace=space) for k, space in enumerate(spaces)]
        again = [await ask_for(client, f"b{k}", prompt, namespace=space) for k, space in enumerate(spaces)]
    assert [one.hit() for one in first] == [(0, 0, "full")] * len(spaces)
    assert [one.hit()[0] for one in again] == [192] * len(spaces), "so the cache was on"
    assert len({tuple(one.tokens[0]) for one in first + again}) == 1


async def test_P7_tokens_skipped_by_reuse_equal_the_counters(tmp_path: Path) -> None:
    """Under a mixed load start positions of steps, decisions, ends and metrics agree to the token; it all replays."""
    draw = random.Random(7)
    trunks = [some_prompt(10 + k, 400) for k in range(3)]
    finished: list[Finished] = []
    flags = (*HYBRID, "--max-running-requests", "6", "--chunked-prefill-size", "128", "--max-num-batched-tokens", "256")
    async with running(tmp_path / "run", *flags) as (daemon, client):

        async def one(index: int) -> None:
            trunk = trunks[draw.randrange(3)]
            prompt = trunk[: draw.randrange(1, 400)] + some_prompt(100 + index, draw.randrange(1, 40))
            space = draw.choice(["", "", "salt:a"])
            answered = await ask_for(client, f"r{index}", prompt, draw.randrange(1, 60), space, draw.choice([1, 1, 2]))
            finished.extend(answered.ends.values())

        for start in range(0, 32, 8):
            async with trio.open_nursery() as nursery:
                for index in range(start, start + 8):
                    nursery.start_soon(one, index)
        text = (await client.ask("metrics")).body
        assert (await client.ask("drain")).ok
        assert await daemon.code() == Exit.CLEAN
    hits, resumed = sample(text, "prefix_cache_hits_total"), sample(text, "prefix_cache_resumed_hits_total")
    assert hits == sum(end.cached_tokens for end in finished) > 0
    written = [record.decode() for record in read_records(DiskStorage(tmp_path / "run" / "journal"))]
    admitted = [item for item in written if isinstance(item, Decided) and item.verdict == Verdict.ADMITTED]
    assert hits + resumed == sum(item.numbers.get("cached_tokens", 0) for item in admitted)
    assert hits + resumed == sum(_first_starts(written))
    queried = sample(text, "prefix_cache_queries_total") + sample(text, "prefix_cache_resumed_queries_total")
    assert queried == sum(item.numbers.get("queried_tokens", 0) for item in admitted)
    looked_up = [line for line in text.splitlines() if line.startswith("bandmaster:prefix_cache_lookups_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in looked_up) == len(admitted)
    assert replay_directory(str(tmp_path / "run")).divergence is None


def _first_starts(written: list[Any]) -> list[int]:
    """Where the first forward of each generation of each row starts: what came before was not computed."""
    starts: dict[tuple[int, int], int] = {}
    for step in written:
        if isinstance(step, Step) and step.forward is not None:
            forward = step.forward
            columns = zip(i32(forward.rows), i32(forward.generations), i32(forward.starts), strict=True)
            for row, generation, start in columns:
                starts.setdefault((int(row), int(generation)), int(start))
    return list(starts.values())


async def test_X10_a_flush_at_idle_leaves_nothing(tmp_path: Path) -> None:
    """The answer has what was freed per band, nothing is live afterwards, and the same prompt misses."""
    prompt = some_prompt(5, 300)
    async with running(tmp_path / "run", *HYBRID) as (_, client):
        await ask_for(client, "a", prompt)
        held = {band: await counted(client, "cached_units", band=band) for band in ("state", "window:64", "full")}
        assert all(held.values()), "the cache holds something of every kind"
        ok, told = await order(client, "flush_cache")
        assert (ok, told["flushed"]) == (True, True)
        assert told["freed"] == held
        assert not any(told["kept"].values())
        for band in held:
            assert await counted(client, "cached_units", band=band) == 0
        assert (await ask_for(client, "b", prompt)).hit() == (0, 0, "full")
        ok, told = await order(client, "flush_cache")
        assert ok
        assert await _live(client) == {"state": 0, "window:64": 0, "full": 0}
    assert replay_directory(str(tmp_path / "run")).divergence is None


async def _live(client: DaemonClient) -> dict[str, int]:
    """Live units by band once the daemon is at rest and the rank has heard of everything that was freed."""
    with trio.fail_after(PATIENCE_S):
        while True:
            status = msgspec.json.decode((await client.ask("status")).body)
            core, live = status["core"], {name: row[0] for name, row in status["bands"].items()}
            counted = {name: core["gauges"][f"live_units_{name}"] for name in live}
            if not core["flights"] and not core["requests"] and live == counted:
                return live
            await trio.sleep(0.01)


async def test_X10_a_flush_under_load_says_who_reads(tmp_path: Path) -> None:
    """A running request keeps what it reads and is named; once it ended a flush empties the rest."""
    prompt = some_prompt(6, 300)
    async with running(tmp_path / "run", *HYBRID, delay_us=2000) as (_, client), trio.open_nursery() as nursery:
        cold = await ask_for(client, "a", prompt, 40)
        started, answers = trio.Event(), []

        async def reader() -> None:
            answers.append(await ask_for(client, "reader", prompt, 200, started=started))

        nursery.start_soon(reader)
        await started.wait()
        ok, told = await order(client, "flush_cache")
        assert (ok, told["flushed"], told["read_by"]) == (False, False, ["reader"])
        assert told["kept"]["full"] >= 16, "the prefix that it reads"
        with trio.fail_after(PATIENCE_S):
            while not answers:
                await trio.sleep(0.01)
        assert answers[0].tokens[0][:40] == cold.tokens[0], "nothing that is read was taken away"
        ok, told = await order(client, "flush_cache")
        assert (ok, told["kept"]["full"]) == (True, 0)
        assert await _live(client) == {"state": 0, "window:64": 0, "full": 0}


async def test_X10_many_flushes_under_a_mixed_load_do_no_harm(tmp_path: Path) -> None:
    """Flushes at any moment: every request gives the tokens that it gives alone, and the journal replays."""
    prompts = [some_prompt(20 + k, 250) for k in range(4)]
    async with running(tmp_path / "run", *HYBRID, "--chunked-prefill-size", "64") as (_, client):
        alone = [(await ask_for(client, f"a{k}", prompt, 30)).tokens for k, prompt in enumerate(prompts)]
        done = trio.Event()

        async def flush() -> None:
            while not done.is_set():
                ok, told = await order(client, "flush_cache")
                assert ok == (not any(told["kept"].values()))

        async def again(k: int) -> None:
            for turn in range(4):
                answered = await ask_for(client, f"b{k}.{turn}", prompts[k], 30)
                assert answered.tokens == alone[k]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush)
            async with trio.open_nursery() as load:
                for k in range(4):
                    load.start_soon(again, k)
            done.set()
    assert replay_directory(str(tmp_path / "run")).divergence is None


@pytest.mark.parametrize(
    ("flags", "slots"),
    [
        ((), 2),
        (("--no-enable-prefix-caching",), 1),
        (("--state-cache", "no_buffer", "--page-size", "1"), 1),
    ],
)
async def test_U8_a_request_holds_the_slots_that_admission_charges(
    tmp_path: Path, flags: tuple[str, ...], slots: int
) -> None:
    """By the daemon's own counters, while one request decodes: two slots with a checkpoint slot, else one."""
    chosen = ("--rank-option", "state=1", "--invariants", "2", *flags)
    async with running(tmp_path / "run", *chosen, delay_us=2000) as (_, client), trio.open_nursery() as nursery:
        started = trio.Event()
        nursery.start_soon(lambda: ask_for(client, "a", some_prompt(8, 40), 100, started=started))
        await started.wait()
        held = await counted(client, "units", band="state", stage="0", state="live")
        cached = await counted(client, "cached_units", band="state")
        assert (held, cached) == (slots, 0)


async def test_S4_many_short_sessions_leave_every_slot(tmp_path: Path) -> None:
    """Many sessions, some hung up: what is live at the end is what the cache holds, and a flush frees it."""
    async with running(tmp_path / "run", *HYBRID, "--arena-bytes", "1MiB") as (_, client):

        async def session(index: int) -> None:
            with trio.move_on_after(0.02 if index % 5 == 0 else PATIENCE_S):
                await ask_for(client, f"s{index}", some_prompt(index % 7, 30 + index % 90), 1 + index % 9)

        for start in range(0, 200, 20):
            async with trio.open_nursery() as nursery:
                for index in range(start, start + 20):
                    nursery.start_soon(session, index)
        live = await _live(client)
        assert live == {band: await counted(client, "cached_units", band=band) for band in live}
        ok, _ = await order(client, "flush_cache")
        assert ok
        assert await _live(client) == dict.fromkeys(live, 0)


async def test_U1_cached_pages_give_way_to_state_slots(tmp_path: Path) -> None:
    """An arena full of cached pages that nobody reads: many short requests that each need slots all run at once."""
    # A unit takes 256 bytes at least, so that pages of one token make one MiB an arena of some 4,000 pages.
    flags = (*HYBRID[:4], "--checkpoint-interval", "64", "--page-size", "1", "--arena-bytes", "1MiB")
    async with running(tmp_path / "run", *flags, "--max-running-requests", "32") as (_, client):
        for index in range(8):
            await ask_for(client, f"fill{index}", some_prompt(200 + index, 600), 1)
        full = await counted(client, "cached_units", band="full")
        answers: list[Answered] = []

        async def short(index: int) -> None:
            answers.append(await ask_for(client, f"short{index}", some_prompt(300 + index, 20), 10))

        async with trio.open_nursery() as nursery:
            for index in range(32):
                nursery.start_soon(short, index)
        assert [answered.ends[0].reason for answered in answers] == ["length"] * 32
        assert await counted(client, "num_preemptions_total") == 0
        assert await counted(client, "evicted_units_total", band="full") > 0
        assert await counted(client, "cached_units", band="full") < full


async def test_P2_boot_says_that_no_prefix_can_be_reused(tmp_path: Path) -> None:
    """An interval above the context: one line with the step, the reach and the reason, and indeed nothing hits."""
    flags = ("--rank-option", "state=1", "--rank-option", "max_model_len=256", "--checkpoint-interval", "1024")
    prompt = some_prompt(9, 200)
    async with running(tmp_path / "run", *flags) as (daemon, client):
        await ask_for(client, "a", prompt)
        again = await ask_for(client, "b", prompt)
        (line,) = daemon.lines("ReuseCannotOccur")
    assert (line["level"], line["step_tokens"], line["reach_tokens"]) == ("warning", 1024, 254)
    assert "--checkpoint-interval" in line["what"]
    assert again.hit()[0] == 0


async def test_P2_no_shared_prefix_and_no_usable_checkpoint_are_told_apart(tmp_path: Path) -> None:
    """Other tokens: cut by full attention at 0. Known tokens without a state at their end: cut by state, and where.

    The first one that leaves a known path computes it again and keeps a state where it left; the next one finds that.
    """
    async with running(tmp_path / "run", *HYBRID, "--chunked-prefill-size", str(INTERVAL)) as (_, client):
        prompt = some_prompt(11, 300)
        await ask_for(client, "a", prompt)
        other = await ask_for(client, "b", some_prompt(12, 300))
        forked = await ask_for(client, "c", prompt[:100] + some_prompt(13, 100))
        again = await ask_for(client, "d", prompt[:100] + some_prompt(14, 100))
        cuts = {cut: await counted(client, "prefix_cache_lookups_total", cut=cut) for cut in ("full", "state")}
        lost = await counted(client, "prefix_cache_unusable_tokens_total", cut="state")
    assert other.hit() == (0, 0, "full")
    assert forked.hit() == (0, 96, "state")
    assert again.hit() == (64, 96, "state")
    assert cuts == {"full": 2, "state": 2}
    assert lost == 96 + 32


async def test_S6_boot_says_how_many_requests_can_run(tmp_path: Path) -> None:
    """More running requests allowed than slots exist: one line with both numbers; with the number it names, none."""
    flags = (*HYBRID, "--arena-bytes", "1MiB")
    async with running(
        tmp_path / "run", *flags, "--max-running-requests", "4096", "--max-num-batched-tokens", "8192"
    ) as (
        daemon,
        client,
    ):
        (line,) = daemon.lines("ConcurrencyClamped")
        assert line["allowed"] == 4096
        assert 0 < line["most"] < 4096
        assert (await ask_for(client, "a", [5, 6, 7])).ends[0].reason == "length"
    most = str(line["most"])
    async with running(tmp_path / "next", *flags, "--max-running-requests", most) as (daemon, client):
        assert not daemon.lines("ConcurrencyClamped")
        assert (await ask_for(client, "a", [5, 6, 7])).ends[0].reason == "length"


async def test_H3_prompts_around_the_limit_beside_cached_ones(tmp_path: Path) -> None:
    """One below, at and one above the model's length, among hits: refused or served, and the others go on."""
    limit = 256
    flags = (*HYBRID, "--rank-option", f"max_model_len={limit}", "--max-running-requests", "4")
    async with running(tmp_path / "run", *flags) as (_, client):
        trunk = some_prompt(14, limit + 1)
        answers: dict[str, Answered] = {}

        async def one(name: str, prompt: list[int]) -> None:
            answers[name] = await ask_for(client, name, prompt, 1)

        for turn in range(4):
            async with trio.open_nursery() as nursery:
                for tokens in (limit - 1, limit, limit + 1, 100):
                    nursery.start_soon(one, f"{tokens}.{turn}", trunk[:tokens])
        health_ok = (await client.ask("health")).ok
    assert health_ok
    for turn in range(4):
        assert answers[f"{limit - 1}.{turn}"].ends[0].reason == "length"
        assert answers[f"100.{turn}"].ends[0].reason == "length"
        for tokens in (limit, limit + 1):
            refused = answers[f"{tokens}.{turn}"].refused
            assert refused is not None
            assert refused.code == "prompt_too_long"
            assert str(refused.value) in refused.message
    assert answers[f"{limit - 1}.3"].hit()[0] == 192


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--checkpoint-interval", "100"), "--checkpoint-interval 100 is no multiple of --page-size 16"),
        (("--state-cache", "no_buffer", "--page-size", "16"), "--page-size is 16; pass --page-size 1"),
    ],
)
async def test_cache_settings_that_cannot_work_do_not_boot(tmp_path: Path, flags: tuple[str, ...], named: str) -> None:
    """Exit code 2 and one sentence with flag, value and remedy; nothing was started."""
    daemon = DaemonProcess(tmp_path / "run", *flags)
    assert await daemon.code() == Exit.USAGE
    assert named in daemon.output.read_text()
    assert not (tmp_path / "run" / "ranks.pid").exists()


async def test_a_journal_from_before_the_prefix_cache_still_opens(tmp_path: Path) -> None:
    """A life whose recorded configuration lacks the new fields: the next life opens it, serves and replays."""
    storage = DiskStorage(tmp_path / "run" / "journal")
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "journal").mkdir(mode=0o700)
    writer, _ = open_journal(storage, JournalSettings(), b"j" * 16)
    opened = msgspec.msgpack.decode(
        records.encode(Opened(1, "older", SCHEMA_VERSION, DECISION_VERSION, CoreConfig(), {}, {"page-size": "16"}))
    )
    (core,) = (part for part in opened if isinstance(part, dict) and "page_size" in part)
    for name in ("enable_prefix_caching", "checkpoint_interval", "state_cache"):
        del core[name]
    writer.append_encoded(Kind.OPENED, msgspec.msgpack.encode(opened))
    writer.close()
    prompt = some_prompt(15, 100)
    async with running(tmp_path / "run", *GRID) as (_, client):
        await ask_for(client, "a", prompt)
        assert (await ask_for(client, "b", prompt)).hit()[0] == 96
    lives = [record for record in read_records(storage) if record.kind == Kind.OPENED]
    assert len(lives) == 2
    newest = lives[1].decode()
    assert isinstance(newest, Opened)
    assert newest.settings["enable-prefix-caching"] == "true"
