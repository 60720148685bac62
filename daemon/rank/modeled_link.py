"""Links: what the modeled runners of one epoch pass to each other, over sockets of their own.

Owns the connections between the ranks of one host or several: each tensor rank to rank 0 of its stage, each rank to the
same tensor rank of the stage before. Must never decide anything or import torch. Invariants: every exchange is in step
order on both ends; a peer that is gone or late is a GroupBroken that names it, within the timeout.

Ranks find each other by the rendezvous of their epoch. `file://PATH`: each listens on a Unix socket beside PATH, whose
name ends in its place. `tcp://HOST:PORT`: rank 0.0 listens there and tells everyone where the others listen. `env://`:
the same at MASTER_ADDR and the port behind MASTER_PORT, which torchrun keeps for itself. There are no keys: whoever
reaches these ports can disturb a simulation, and sees hashes.

    a frame: uint32 bytes of what follows | uint64 nanoseconds until it is due | uint64 values
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from daemon.rank.errors import BadOption, GroupBroken
from daemon.rank.layout import Layout
from daemon.rank.noise import Hashes
from ipc.rank_id import rank_name

Place = tuple[int, int]  # stage, tensor rank
HEAD = struct.Struct("<IQ")
HELLO = struct.Struct("<III")  # epoch, stage, tensor rank
RETRY_S = 0.01
BACKLOG = 128
PORT_MAX = 65_535


def partners(layout: Layout) -> tuple[list[Place], list[Place]]:
    """Whom a rank connects to, and who connects to it."""
    stage, rank, ranks = layout.stage, layout.rank, layout.ranks
    to = ([(stage, 0)] if rank else []) + ([(stage - 1, rank)] if stage else [])
    by = ([] if rank else [(stage, other) for other in range(1, ranks)]) + ([] if layout.last else [(stage + 1, rank)])
    return to, by


class SocketLink:
    """The open links of one rank; made when every partner is there, GroupBroken when one is not in time."""

    def __init__(self, layout: Layout, epoch: int, rendezvous: str, timeout_ms: int) -> None:
        self._layout = layout
        self._timeout_s = timeout_ms / 1000
        self._peers: dict[Place, socket.socket] = {}
        try:
            self._meet(epoch, rendezvous, time.monotonic() + self._timeout_s)
        except OSError as error:
            self.close()
            raise GroupBroken(f"a rank was lost while all were meeting at {rendezvous}: {error}") from error
        except GroupBroken:
            self.close()
            raise

    def _meet(self, epoch: int, rendezvous: str, deadline: float) -> None:
        layout = self._layout
        meeting = _meeting(rendezvous, layout, epoch, deadline)
        to, by = partners(layout)
        with contextlib.closing(meeting.listener):
            addresses = meeting.addresses(to)
            for place in to:
                self._peers[place] = _connected(addresses[place], deadline, rank_name(place))
                self._peers[place].sendall(HELLO.pack(epoch, layout.stage, layout.rank))
            while missing := set(by) - self._peers.keys():
                peer = _accepted(meeting.listener, deadline, missing)
                its_epoch, stage, rank = HELLO.unpack(_exactly(peer, HELLO.size))
                if its_epoch == epoch and (stage, rank) in missing:
                    self._peers[stage, rank] = peer
                else:
                    peer.close()  # what is left of another epoch
        for peer in self._peers.values():
            peer.settimeout(self._timeout_s)

    def reduce(self, values: Hashes) -> Hashes:
        """The sum over the stage's tensor ranks, on each."""
        return self._round(values, add=True)

    def broadcast(self, values: Hashes) -> Hashes:
        """What tensor rank 0 of the stage has, on each."""
        return self._round(values, add=False)

    def send_next(self, values: Hashes, due_in_ns: int) -> None:
        """Values to the same tensor rank of the next stage, which may use them when they are due."""
        self._send((self._layout.stage + 1, self._layout.rank), values, due_in_ns)

    def receive_previous(self, shape: tuple[int, ...]) -> tuple[Hashes, int]:
        """What the stage before sent next, and the nanoseconds until it is due."""
        values, due_in_ns = self._receive((self._layout.stage - 1, self._layout.rank), int(np.prod(shape)))
        return values.reshape(shape), due_in_ns

    def close(self) -> None:
        """Leave; harmless twice."""
        for peer in self._peers.values():
            peer.close()

    def _round(self, values: Hashes, *, add: bool) -> Hashes:
        stage, rank, ranks = self._layout.stage, self._layout.rank, self._layout.ranks
        if rank:
            self._send((stage, 0), values, 0)
            return self._receive((stage, 0), values.size)[0].reshape(values.shape)
        for other in range(1, ranks):
            found = self._receive((stage, other), values.size)[0].reshape(values.shape)
            values = values + found if add else values
        for other in range(1, ranks):
            self._send((stage, other), values, 0)
        return values

    def _send(self, place: Place, values: Hashes, due_in_ns: int) -> None:
        data = np.ascontiguousarray(values, dtype="<u8").tobytes()
        with self._naming(place):
            self._peers[place].sendall(HEAD.pack(len(data), max(due_in_ns, 0)) + data)

    def _receive(self, place: Place, count: int) -> tuple[Hashes, int]:
        with self._naming(place):
            size, due_in_ns = HEAD.unpack(_exactly(self._peers[place], HEAD.size))
            if size != 8 * count:
                raise GroupBroken(f"{rank_name(place)} sent {size} bytes where {8 * count} belong: the ranks differ")
            return np.frombuffer(_exactly(self._peers[place], size), dtype="<u8").astype(np.uint64), due_in_ns

    @contextlib.contextmanager
    def _naming(self, place: Place) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            what = f"{rank_name(place)} did not take part within {self._timeout_s:g} s (--collective-timeout)"
            raise GroupBroken(what) from error
        except OSError as error:
            raise GroupBroken(f"{rank_name(place)} is gone: {error}") from error


class _FileMeeting:
    """Unix sockets beside the rendezvous file, opened through its directory so that no path is too long."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(self._file((layout.stage, layout.rank))) as short:
            self.listener.bind(short)
        self.listener.listen(BACKLOG)

    def addresses(self, places: list[Place]) -> dict[Place, str]:
        return {place: str(self._file(place)) for place in places}

    def _file(self, place: Place) -> Path:
        return self._path.with_name(f"{self._path.name}.{place[0]}.{place[1]}")


class _TcpMeeting:
    """Rank 0.0 at the rendezvous gathers where everyone listens and tells it to all."""

    def __init__(self, host: str, port: int, layout: Layout, epoch: int, deadline: float) -> None:
        self._layout, self._epoch, self._deadline = layout, epoch, deadline
        self._table: dict[Place, str] = {}
        if layout.number == 0:
            self._gather(host, port)
        else:
            with contextlib.closing(_connected(f"{host}:{port}", deadline, "rank 0.0 at the rendezvous")) as store:
                self.listener = _listening(store.getsockname()[0])
                own = "{}:{}".format(*self.listener.getsockname()[:2])
                _say(store, f"{layout.stage} {layout.rank} {own}", epoch)
                self._table = _read_table(_hear(store, epoch))
            if not self._table:
                raise GroupBroken("rank 0.0 at the rendezvous is gone: it did not say where the others are")

    def _gather(self, host: str, port: int) -> None:
        waiting: list[socket.socket] = []
        with contextlib.closing(_listening(host, port)) as store:
            self.listener = _listening(host)
            self._table[0, 0] = "{}:{}".format(*self.listener.getsockname()[:2])
            while len(self._table) < self._layout.total:
                peer = _accepted(store, self._deadline, self._missing())
                self._table |= _read_table(_hear(peer, self._epoch))
                waiting.append(peer)
        table = "\n".join(f"{stage} {rank} {address}" for (stage, rank), address in self._table.items())
        for peer in waiting:
            _say(peer, table, self._epoch)
            peer.close()

    def _missing(self) -> set[Place]:
        places = {divmod(number, self._layout.ranks) for number in range(self._layout.total)}
        return places - self._table.keys()

    def addresses(self, places: list[Place]) -> dict[Place, str]:
        return {place: self._table[place] for place in places}


def _meeting(rendezvous: str, layout: Layout, epoch: int, deadline: float) -> _FileMeeting | _TcpMeeting:
    if rendezvous.startswith("env://"):
        return _TcpMeeting(*_torchruns_place(os.environ), layout, epoch, deadline)
    parts = urlsplit(rendezvous)
    if parts.scheme == "file":
        return _FileMeeting(Path(parts.path), layout)
    port = parts.netloc.rpartition(":")[2]
    if parts.scheme == "tcp" and parts.hostname and port.isdecimal() and 0 < int(port) <= PORT_MAX:
        return _TcpMeeting(parts.hostname, int(port), layout, epoch, deadline)
    raise BadOption(
        f"rendezvous {rendezvous!r}: file:///PATH, tcp://HOST:PORT, or env:// with MASTER_ADDR and MASTER_PORT set"
    )


def _torchruns_place(environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port at which ranks meet that a launcher told of its own store; raises BadOption."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or not 0 < int(port) < PORT_MAX:
        raise BadOption(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} in the environment: a host and a port from 1 to "
            f"{PORT_MAX - 1} belong there; modeled ranks meet at the port behind it"
        )
    return host, int(port) + 1


def _read_table(text: str) -> dict[Place, str]:
    lines = [line.split() for line in text.splitlines()]
    return {(int(stage), int(rank)): address for stage, rank, address in lines}


def _say(peer: socket.socket, text: str, epoch: int) -> None:
    data = text.encode()
    peer.sendall(HEAD.pack(len(data), epoch) + data)


def _hear(peer: socket.socket, epoch: int) -> str:
    """What a rank of the epoch says; nothing of one that is another epoch's or gone, which is not counted then."""
    try:
        size, its_epoch = HEAD.unpack(_exactly(peer, HEAD.size))
        return _exactly(peer, size).decode() if its_epoch == epoch else ""
    except ConnectionResetError:
        return ""


def _listening(host: str, port: int = 0) -> socket.socket:
    return socket.create_server((host, port), family=_family(host), backlog=BACKLOG)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _connected(address: str, deadline: float, whom: str) -> socket.socket:
    """A connection to a path or HOST:PORT, tried until somebody listens there."""
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise GroupBroken(f"{whom} is not there: nobody listens at {address}")
        try:
            return _connect(address, left_s)
        except OSError:
            time.sleep(min(RETRY_S, left_s))


def _connect(address: str, timeout_s: float) -> socket.socket:
    if not address.startswith("/"):
        host, _, port = address.rpartition(":")
        made = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout_s)
        with _short(Path(address)) as short:
            made.connect(short)
    except OSError:
        made.close()
        raise
    return made


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The path through a descriptor of its directory: a Unix socket's has 107 bytes at most."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _accepted(listener: socket.socket, deadline: float, missing: set[Place]) -> socket.socket:
    listener.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        peer, _ = listener.accept()
    except TimeoutError as error:
        who = ", ".join(map(rank_name, sorted(missing))) or "some rank"
        raise GroupBroken(f"{who} did not come to the rendezvous in time") from error
    peer.settimeout(max(deadline - time.monotonic(), 0.001))
    if peer.family != socket.AF_UNIX:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def _exactly(peer: socket.socket, size: int) -> bytes:
    """So many bytes; OSError when the other side ended before."""
    parts = bytearray()
    while len(parts) < size:
        part = peer.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts += part
    return bytes(parts)
