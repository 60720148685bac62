"""Discreet: clients get why their request ended, and neither paths nor process ids of the server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from daemon.frontend.discreet import discreet
from ipc.errors import DaemonLost
from ipc.messages import Answer, Refused
from tests.frontend.double import Script, accepted, finished, http_client, make_service, says

KILLED = "rank 1.0 (pid 25799) was killed by SIGKILL; it named no error; its log is /srv/a run/logs/rank-1-0.log"
SECRETS = ("25799", "/srv", "rank-1-0", "pid")
FIELDS = {"prompt": [7], "max_tokens": 4}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (KILLED, "rank 1.0 was killed by SIGKILL"),
        (f"recovering: {KILLED} (restart 1)", "recovering: rank 1.0 was killed by SIGKILL (restart 1)"),
        ("x; it said last: OSError: '/m/a.bin'; its log is run/b.log; y", "x; it said last: OSError: '.../a.bin'; y"),
        ("killed ranks are still there, pids [12, 13]: wait", "killed ranks are still there, a process: wait"),
        ("no daemon at ipc:///run/x/front.sock: gone", "no daemon at ipc://...: gone"),
        ("2/3 of 10 tokens/s; a/b/c; http://host/v1/models", "2/3 of 10 tokens/s; a/b/c; http://host/v1/models"),
        ("the drain timeout passed", "the drain timeout passed"),
    ],
)  # fmt: skip
def test_what_is_left_out(text: str, told: str) -> None:
    """Process ids, logs and directories; all else stays."""
    assert discreet(text) == told


def killed(how: str) -> Script:
    """A script whose request is refused, ends by a fault, or loses the daemon, each for the same reason."""

    async def script(stream: Any) -> AsyncIterator[Any]:
        if how == "refused":
            yield Refused(stream.message.id, "not_ready", KILLED, "", 0, 0)
        yield accepted(stream.message)
        if how == "lost":
            raise DaemonLost(KILLED)
        yield finished(stream.message, "fault", 0, detail=KILLED)

    return script


@pytest.mark.parametrize("how", ["refused", "lost", "fault"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_whose_request_met_a_dead_rank(how: str, stream: bool) -> None:
    """It is told of the signal, and nothing about the machine, whole or streamed."""
    service, _ = make_service(killed(how))
    async with http_client(service) as client:
        answer = await client.post("/v1/completions", json={**FIELDS, "stream": stream})
    assert "rank 1.0 was killed by SIGKILL" in answer.text
    assert not [secret for secret in SECRETS if secret in answer.text]


async def test_health_is_discreet() -> None:
    """In the daemon's reasons, and in why there is no daemon."""
    service, daemon = make_service(says("a"))
    body = {"live": True, "ready": False, "reasons": [f"recovering: {KILLED}"], "stalled_s": 0.5}
    daemon.answers["health"] = Answer(1, False, json.dumps(body))
    async with http_client(service) as client:
        told = await client.get("/health")
        daemon.connected, daemon.lost_reason = False, KILLED
        gone = await client.get("/health")
    assert told.json()["daemon"] == {**body, "reasons": ["recovering: rank 1.0 was killed by SIGKILL"]}
    assert gone.json()["why"] == "rank 1.0 was killed by SIGKILL"
