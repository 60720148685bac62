"""Endpoints: what an address must satisfy, and the Unix socket file behind an `ipc://` one.

Owns the socket file: its directory, mode, stale predecessors and removal. Must never touch a file that a live process
listens on. Invariants: nobody but the owner can connect, at no moment; the file is removed by whom created it only.

The listening descriptor is made here and handed to ZeroMQ: libzmq would remove whatever lies at the path, live or
not, and would remove the file again from its own thread at an unknown time after close, perhaps a successor's.
"""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from ipc.errors import EndpointError, EndpointInUse, InsecureEndpoint

UNIX_PATH_BYTES_MAX = 107  # sun_path, less its terminator
BACKLOG = 128


@dataclass(slots=True)
class UnixListener:
    """A listening Unix socket: its descriptor (ZeroMQ closes it) and the file, known by device and inode."""

    fd: int
    path: Path
    device: int
    inode: int

    def remove(self) -> None:
        """Remove the socket file if it is still the one that was made here."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return
        if (found.st_dev, found.st_ino) == (self.device, self.inode):
            self.path.unlink()


def unix_path(endpoint: str) -> Path | None:
    """The file of an `ipc://` endpoint; None for another transport. Raises EndpointError for a path too long."""
    if not endpoint.startswith("ipc://"):
        return None
    path = Path(endpoint.removeprefix("ipc://"))
    size = len(os.fsencode(path))
    if size > UNIX_PATH_BYTES_MAX:
        raise EndpointError(
            f"the socket path {path} has {size} bytes; the system's limit is {UNIX_PATH_BYTES_MAX}: "
            "choose a shorter run directory"
        )
    return path


def check_tcp(endpoint: str, has_keys: bool, insecure: bool) -> None:
    """Refuse a tcp endpoint in the clear unless it is asked for, and transports nobody asked for."""
    transport = endpoint.partition("://")[0]
    if transport not in ("ipc", "tcp", "inproc"):
        raise EndpointError(f"the endpoint {endpoint!r} is neither ipc:// nor tcp://")
    if transport == "tcp" and not has_keys and not insecure:
        raise InsecureEndpoint(
            f"{endpoint} would carry prompts in the clear to anyone who connects: "
            "make CURVE keys with `bandmaster keys DIR`, or pass --insecure"
        )


def private_directory(path: Path) -> None:
    """Make `path` with mode 0700, or check that an existing one is ours and nobody else can write in it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except FileExistsError:
        raise EndpointError(f"{path} is not a directory: name another one, or one that does not exist yet") from None
    except OSError as error:
        raise EndpointError(f"the directory {path} cannot be made or used: {error.strerror}") from error
    if found.st_uid != os.geteuid():
        raise EndpointError(f"the directory {path} belongs to uid {found.st_uid}, not to us (uid {os.geteuid()})")
    if found.st_mode & 0o022:
        raise EndpointError(
            f"the directory {path} has mode {stat.S_IMODE(found.st_mode):04o}: others could replace its sockets; "
            f"run `chmod 700 {path}`"
        )


def listen_unix(path: Path) -> UnixListener:
    """Listen at `path`, mode 0600. A dead process's socket file is removed; EndpointInUse when somebody listens."""
    private_directory(path.parent)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        os.chmod(path, 0o600)  # before listen(): until then nobody can connect
        made = os.lstat(path)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise EndpointError(f"cannot listen at {path}: {error}") from error
    return UnixListener(listener.detach(), path, made.st_dev, made.st_ino)


def _remove_stale(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise EndpointError(f"{path} exists and is not a socket: remove it or choose another run directory")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1.0)
        probe.connect(os.fspath(path))
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
        return
    except OSError as error:
        raise EndpointInUse(f"cannot tell whether {path} is in use: {error}") from error
    finally:
        probe.close()
    raise EndpointInUse(f"a live process listens at {path}: stop it first, or choose another run directory")
