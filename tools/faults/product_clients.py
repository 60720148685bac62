"""Product clients of a campaign: requests through `ipc.client`, the connection that front ends use.

Owns one request's reading. Must never repair what that client gets wrong: tokens are taken as it gives them.
"""

from __future__ import annotations

import trio

from ipc.client import DaemonClient
from ipc.client_stream import Tokens
from ipc.errors import DaemonLost
from ipc.messages import Accepted, Finished, Refused
from tools.faults.work import Story

AGAIN_S = 0.2
CONNECT_WITHIN_S = 120.0
TRANSIENT = frozenset({"queue_full", "draining"})


async def follow(client: DaemonClient, story: Story, round_: int, name: str) -> None:
    """Ask until the story is over. A request that was never accepted is asked again; an accepted one must go on."""
    for attempt in range(1_000_000):
        await client.wait_connected(CONNECT_WITHIN_S)
        accepted = False
        try:
            async with client.generate(story.task.generate(round_, f"{name}-{attempt}")) as stream:
                async for event in stream:
                    match event:
                        case Accepted():
                            accepted = True
                        case Tokens(tokens=tokens):
                            story.take(list(tokens))
                        case Finished(reason=reason, output_tokens=told):
                            story.finish, story.told_tokens = reason, told
                            if reason not in ("length", "stop"):
                                story.error = f"{reason}: {event.detail}"
                        case Refused(code=code, message=text):
                            if code not in TRANSIENT:
                                story.error = f"refused ({code}): {text}"
        except DaemonLost as error:
            if accepted:
                story.error = f"daemon_lost: {error}"
        if story.over:
            return
        story.turned_away += 1
        await trio.sleep(AGAIN_S)
