"""Listening: the HTTP socket of a server, and how a front end comes by one that its launcher holds.

Owns binding and the variable in which a descriptor is handed on. Must never accept a connection. A socket that the
launcher bound outlives the front ends that accept on it: the port is kept, and who connects while none runs is queued.
"""

from __future__ import annotations

import os
import socket

from daemon.exits import DaemonError, Exit

BACKLOG = 1024
LISTEN_VARIABLE = "BANDMASTER_LISTEN_FD"
PULSE_VARIABLE = "BANDMASTER_PULSE_FD"


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, port 0 being any free one; raises DaemonError naming the address when it is taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)  # clients may connect from now on; they are answered when the server runs
    except OSError as error:
        text = f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or --port"
        raise DaemonError(Exit.USAGE, text) from error
    bound.setblocking(False)
    return bound


def handed_on(variable: str) -> socket.socket | None:
    """The socket whose descriptor our parent named in this variable; None where it named none."""
    text = os.environ.pop(variable, "")
    if not text:
        return None
    try:
        return socket.socket(fileno=int(text))
    except (OSError, ValueError) as error:
        raise DaemonError(Exit.USAGE, f"{variable}={text} is no socket that was handed on: {error}") from error


def url_of(bound: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
