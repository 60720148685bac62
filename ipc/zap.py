"""ZAP: decides which CURVE clients get in, by public key. libzmq asks over an in-process socket (RFC 27).

Owns the one authenticator of a ZeroMQ context. Must never let a connection in that it did not recognise: sockets are
bound with an enforced domain, so without this task running nobody gets in at all.
"""

from __future__ import annotations

import trio
import zmq
from zmq.utils import z85

from ipc.sockets import ZAP_DOMAIN, Socket

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
CURVE = b"CURVE"


class Authenticator:
    """Answers libzmq's questions for one ZeroMQ context."""

    def __init__(self, allowed: frozenset[bytes], context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        """`allowed` holds the Z85 public keys of the clients that may connect."""
        self._allowed = allowed
        self._context = context or zmq.Context.instance()
        self.stats: dict[str, int] = {"admitted": 0, "denied": 0}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer until cancelled."""
        raw = self._context.socket(zmq.ROUTER)
        raw.setsockopt(zmq.LINGER, 0)
        socket = Socket(raw, ZAP_ENDPOINT)
        try:
            raw.bind(ZAP_ENDPOINT)
            task_status.started()
            while True:
                await self._answer(socket, await socket.recv())
        finally:
            socket.close()

    async def _answer(self, socket: Socket, frames: list[bytes]) -> None:
        envelope, request = frames[:2], frames[2:]
        request_id = request[1] if len(request) > 1 else b""
        admitted = self._admits(request)
        self.stats["admitted" if admitted else "denied"] += 1
        status = [b"200", b"OK"] if admitted else [b"400", b"unknown key"]
        await socket.send([*envelope, VERSION, request_id, *status, b"", b""])

    def _admits(self, request: list[bytes]) -> bool:
        """The request: version, id, domain, address, identity, mechanism, the client's 32-byte public key."""
        if len(request) != 7:
            return False
        version, _, domain, _, _, mechanism, key = request
        if (version, domain, mechanism) != (VERSION, ZAP_DOMAIN, CURVE) or len(key) != 32:
            return False
        return z85.encode(key) in self._allowed
