"""Epoch recovery, with modeled ranks as processes: a rank is lost under load, which costs every request a pause."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from daemon.exits import Exit
from ipc.client import DaemonClient
from ipc.client_stream import Tokens
from ipc.messages import Finished
from journal.records import Kind
from tests.daemon.daemon_process import PATIENCE_S, DaemonProcess, Outcome, greedy, kinds, request, running, under_load
from tools.replay import replay_directory

pytestmark = pytest.mark.e2e


class Told(Outcome):
    """An outcome that keeps the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[int] = []


async def follow(client: DaemonClient, name: str, told: Told, max_tokens: int) -> None:
    """One greedy request to its end, every token kept."""
    async with client.generate(greedy(name, max_tokens)) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                told.said += [int(token) for token in event.tokens]
                told.decoding.set()
            elif isinstance(event, Finished):
                told.end = event.reason


async def health(client: DaemonClient) -> dict[str, Any]:
    return dict(json.loads((await client.ask("health")).body))


async def losing_ranks(daemon: DaemonProcess, client: DaemonClient, number: int, times: int) -> list[Told]:
    """Four requests of 400 tokens, whose rank gets the signal so often; their outcomes."""
    outcomes = [Told() for _ in range(4)]
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for index, told in enumerate(outcomes):
                nursery.start_soon(follow, client, f"r{index}", told, 400)
            for told in outcomes:
                await told.decoding.wait()
            for time in range(1, times + 1):
                seen = len(outcomes[0].said)
                while len(outcomes[0].said) < seen + 5:
                    await trio.sleep(0.005)
                daemon.ranks()[0].send_signal(number)
                while len(daemon.lines("EpochBegan")) <= time:
                    await trio.sleep(0.02)
    return outcomes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_X1_a_rank_killed_or_frozen_costs_a_pause(tmp_path: Path, number: int) -> None:
    """Every request gets the very tokens that it gets undisturbed, none twice; the journal replays; exit 0."""
    run_dir = tmp_path / "run"
    async with running(run_dir, "--rank-timeout", "2", delay_us=2000) as (daemon, client):
        undisturbed = Told()
        await follow(client, "alone", undisturbed, 400)
        outcomes = await losing_ranks(daemon, client, number, 2 if number == signal.SIGKILL else 1)
        metrics = (await client.ask("metrics")).body
        daemon.send(signal.SIGTERM)
        assert await daemon.code() == Exit.CLEAN
    assert {outcome.end for outcome in outcomes} == {"length"}
    assert all(outcome.said == undisturbed.said for outcome in outcomes)
    losses = daemon.lines("EpochLost")
    assert {line["mark"] for line in losses} == {"killed" if number == signal.SIGKILL else "silent"}
    assert all("rank 0.0" in line["error"] for line in losses)
    assert f"bandmaster:epoch_restarts_total {len(losses)}.0" in metrics
    assert f"bandmaster:epoch_recovery_seconds_count {len(losses)}.0" in metrics
    assert kinds(run_dir).count(Kind.EPOCH_ENDED) == len(losses)
    assert replay_directory(str(run_dir)).divergence is None


async def test_health_is_red_from_the_loss_until_the_next_epoch(tmp_path: Path) -> None:
    """It names the rank while there is none; requests that arrive meanwhile are accepted, wait, and are served."""
    run_dir = tmp_path / "run"
    async with running(run_dir, delay_us=2000) as (daemon, client):
        assert (await health(client))["ready"]
        daemon.ranks()[0].kill()
        with trio.fail_after(PATIENCE_S):
            while (report := await health(client))["ready"]:
                await trio.sleep(0.005)
            late = Outcome()
            await request(client, "late", late)
            while not (await health(client))["ready"]:
                await trio.sleep(0.02)
        daemon.send(signal.SIGTERM)
        assert await daemon.code() == Exit.CLEAN
    assert "recovering: rank 0.0" in report["reasons"][0]
    assert "SIGKILL" in report["reasons"][0]
    assert (late.end, late.tokens) == ("length", 8)


async def test_restarts_that_are_used_up_end_the_daemon_honestly(tmp_path: Path) -> None:
    """The third loss with two restarts allowed: every request ends with fault and why, the exit code says rank."""
    run_dir = tmp_path / "run"
    async with running(run_dir, "--epoch-restarts-max", "2", delay_us=2000) as (daemon, client):

        async def act() -> None:
            for time in range(1, 4):
                daemon.ranks()[0].kill()
                while daemon.alive() and len(daemon.lines("EpochBegan")) <= time:
                    await trio.sleep(0.02)

        outcomes = await under_load(client, 3, 5000, act)
        assert await daemon.code() == Exit.RANK
    assert {outcome.end for outcome in outcomes} == {"fault"}
    assert "--epoch-restarts-max 2 within 600 s are used up" in outcomes[0].detail
    assert len(daemon.lines("EpochBegan")) == 3
    assert Kind.CLOSED not in kinds(run_dir)
    assert replay_directory(str(run_dir)).divergence is None


async def test_an_order_to_stop_while_recovering_is_carried_out(tmp_path: Path) -> None:
    """SIGINT between two epochs: every request ends as drained at once, nothing is left, exit 0."""
    run_dir = tmp_path / "run"
    async with running(run_dir, delay_us=2000) as (daemon, client):

        async def act() -> None:
            daemon.ranks()[0].kill()
            while not daemon.lines("EpochLost"):
                await trio.sleep(0.005)
            daemon.send(signal.SIGINT)

        outcomes = await under_load(client, 3, 5000, act)
        assert await daemon.code() == Exit.CLEAN
    assert {outcome.end for outcome in outcomes} == {"drained"}
    assert replay_directory(str(run_dir)).divergence is None


async def test_a_rank_killed_while_the_next_life_boots_loses_nothing(tmp_path: Path) -> None:
    """The daemon dies under load, and a rank of the daemon that follows dies before any epoch of it: all go on."""
    run_dir = tmp_path / "run"
    outcomes = [Told() for _ in range(3)]
    async with running(run_dir, delay_us=2000, return_within_s=PATIENCE_S) as (daemon, client):
        alone = Told()
        await follow(client, "alone", alone, 300)
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for index, told in enumerate(outcomes):
                    nursery.start_soon(follow, client, f"r{index}", told, 300)
                for told in outcomes:
                    await told.decoding.wait()
                daemon.send(signal.SIGKILL)
                await daemon.code()
                second = DaemonProcess(run_dir)
                while len(second.lines("RankStarted")) < 2:
                    await trio.sleep(0.002)
                second.ranks()[0].kill()
        second.send(signal.SIGTERM)
        assert await second.code() == Exit.CLEAN
    assert all(told.said == alone.said for told in outcomes)
    (lost,) = second.lines("EpochLost")
    assert (lost["epoch"], lost["mark"], lost["live_requests"]) == (1, "killed", 3)
    assert len(second.lines("RankStarted")) == 3
    assert replay_directory(str(run_dir)).divergence is None


async def test_a_rank_frozen_before_it_joined_is_noticed(tmp_path: Path) -> None:
    """SIGSTOP of a rank of the next epoch while its interpreter starts: `--rank-timeout` counts there too."""
    run_dir = tmp_path / "run"
    async with running(run_dir, "--rank-timeout", "2", delay_us=2000) as (daemon, client):

        async def act() -> None:
            daemon.ranks()[0].kill()
            while len(daemon.lines("RankStarted")) < 2:
                await trio.sleep(0.002)
            daemon.ranks()[0].send_signal(signal.SIGSTOP)

        outcomes = await under_load(client, 2, 100, act)
        daemon.send(signal.SIGTERM)
        assert await daemon.code() == Exit.CLEAN
    assert {(outcome.end, outcome.tokens) for outcome in outcomes} == {("length", 100)}
    assert [line["mark"] for line in daemon.lines("EpochLost")] == ["killed", "silent"]
    assert replay_directory(str(run_dir)).divergence is None
