"""A request that kills its rank whenever it runs, with real processes: it ends, and 31 others do not notice more than a
pause."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from allocator.columns import pack_i64
from daemon.settings_table import Settings
from ipc.client import DaemonClient
from ipc.client_stream import Tokens
from ipc.messages import Finished, Generate, Sampling
from tests.daemon.daemon_process import PATIENCE_S, running
from tools.replay import replay_directory
from tools.toy_reference import Toy, mismatches

pytestmark = pytest.mark.e2e

COUNT = 32
DEADLY = 7  # below the ids that the modeled runner samples: it stands in one prompt alone
MAX_TOKENS = 40


async def follow(
    client: DaemonClient, number: int, prompt: list[int], said: list[int], ends: dict[int, Finished]
) -> None:
    """One greedy request to its end."""
    generate = Generate(f"r{number}", pack_i64(prompt), Sampling(temperature=0.0), max_tokens=MAX_TOKENS)
    async with client.generate(generate) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                said += [int(token) for token in event.tokens]
            elif isinstance(event, Finished):
                ends[number] = event


@pytest.mark.parametrize("deadly_at", [3, 40])  # in its first chunk of 32, or in its second
async def test_a_deadly_request_among_others_ends_alone(tmp_path: Path, deadly_at: int) -> None:
    """Within the restarts that there are by default; every other request gets its tokens; the journal replays."""
    prompts = [[1000 + number, *range(100, 150)] for number in range(COUNT)]
    deadly = COUNT // 2
    prompts[deadly][deadly_at] = DEADLY
    flags = ("--rank-option", f"deadly_id={DEADLY}", "--chunked-prefill-size", "32")
    said: list[list[int]] = [[] for _ in range(COUNT)]
    ends: dict[int, Finished] = {}
    run_dir = tmp_path / "run"
    async with running(run_dir, *flags, delay_us=500) as (daemon, client):
        with trio.fail_after(2 * PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for number, prompt in enumerate(prompts):
                    nursery.start_soon(follow, client, number, prompt, said[number], ends)
        metrics = (await client.ask("metrics")).body
        losses = daemon.lines("EpochLost")
        assert daemon.alive()
    assert ends.pop(deadly).reason == "fault"
    assert not said[deadly]
    assert {end.reason for end in ends.values()} == {"length"}
    for number in ends:
        assert len(said[number]) == MAX_TOKENS
        assert not mismatches(Toy(), prompts[number], said[number])
    assert 3 <= len(losses) <= Settings().epoch_restarts_max, "one more where the first epoch's last report was lost"
    assert "bandmaster:num_requests_suspected 0.0" in metrics
    verdict = replay_directory(str(run_dir))
    assert verdict.divergence is None, verdict.divergence
