"""The group of rank processes over `torch.distributed`: gloo on CPUs, nccl on GPUs.

Owns this process's connections to its peers: one group of the tensor ranks of its stage, and pairs with the same tensor
rank of the stages beside it. Must never outlive an epoch, nor wait for a peer without a limit once the ranks have met.
Invariants: every rank makes the same calls in the same order, so that nothing names what it belongs to; a tensor that
is sent is kept until it has left; receives are answered in the order in which they were posted.

    meet("joined")    every rank is there, whatever it had to load before: no limit but the daemon's --boot-timeout
    collectives       a failure or the timeout is a GroupBroken that names the call
"""

from __future__ import annotations

import datetime
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from daemon.rank.errors import BadOption, GroupBroken
from daemon.rank.group import Group, SoloGroup
from daemon.rank.layout import Layout
from ipc.messages import RankSettings
from ipc.rank_id import rank_name

MEET_WITHIN = datetime.timedelta(days=1)  # the daemon ends a boot that takes too long
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

T = TypeVar("T")


def open_group(settings: RankSettings, layout: Layout, epoch: int, device: torch.device) -> Group:
    """The group of this rank: alone, or with the others where `settings.rendezvous` says, once they are all there."""
    if layout.total == 1:
        return SoloGroup()
    return ProcessGroup(settings, layout, epoch, device)


class ProcessGroup:
    """The ranks of one epoch as processes; see the module. Used by one thread."""

    def __init__(self, settings: RankSettings, layout: Layout, epoch: int, device: torch.device) -> None:
        self.layout = layout
        self._device = device
        self._timeout = datetime.timedelta(milliseconds=settings.collective_timeout_ms)
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._posted: deque[tuple[Any, Tensor]] = deque()
        self._store = open_store(settings.rendezvous, layout, epoch, self._timeout, os.environ)
        self.meet("joined")
        backend = "nccl" if device.type == "cuda" else "gloo"
        own, whole = layout.number, layout.total
        join = dist.init_process_group
        self._call(
            "joining the group", join, backend, store=self._store, rank=own, world_size=whole, timeout=self._timeout
        )
        self._stage: dist.ProcessGroup | None = None
        for stage in range(layout.stages):  # every rank takes part in the making of every group
            members = [layout._replace(stage=stage, rank=rank).number for rank in range(layout.ranks)]
            made = self._call("making the groups", dist.new_group, members, timeout=self._timeout)
            if stage == layout.stage:
                self._stage = made

    def meet(self, what: str) -> None:
        """Wait in the store, not in a collective, until every rank has come to `what`."""

        def wait() -> None:
            if self._store.add(f"{what}/count", 1) == self.layout.total:
                self._store.set(f"{what}/all", "here")
            self._store.wait([f"{what}/all"], MEET_WITHIN)

        self._call(f"meeting the other ranks ({what})", wait)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the stage's tensor ranks, in place."""
        if self.layout.ranks > 1:
            self._call("all_reduce", dist.all_reduce, tensor, group=self._stage)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The parts of all tensor ranks along `dim`, in rank order."""
        if self.layout.ranks == 1:
            return tensor
        whole = tensor.contiguous()
        parts = [torch.empty_like(whole) for _ in range(self.layout.ranks)]
        self._call("all_gather", dist.all_gather, parts, whole, group=self._stage)
        return torch.cat(parts, dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """What tensor rank 0 of the stage has, in place."""
        if self.layout.ranks > 1:
            source = self.layout._replace(rank=0).number
            self._call("broadcast", dist.broadcast, tensor, source, group=self._stage)
        return tensor

    def send_next(self, tensor: Tensor) -> None:
        """Hand a tensor to the next stage; waits only for sends that are more forwards old than can be in flight."""
        assert not self.layout.last, "the last stage has no next one"
        target = self.layout._replace(stage=self.layout.stage + 1).number
        kept = tensor.clone(memory_format=torch.contiguous_format)
        work = self._call("send to the next stage", dist.isend, kept, target)
        self._sent.append((work, kept))
        while len(self._sent) > self.layout.stages + 1:
            oldest, _ = self._sent.popleft()
            self._wait("send to the next stage", oldest)

    def expect_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Post the receive of a tensor that will be asked for."""
        assert not self.layout.first, "the first stage has no previous one"
        source = self.layout._replace(stage=self.layout.stage - 1).number
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        work = self._call("receive from the previous stage", dist.irecv, tensor, source)
        self._posted.append((work, tensor))

    def receive_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that the previous stage sent next."""
        if not self._posted:
            self.expect_previous(shape, dtype)
        work, tensor = self._posted.popleft()
        assert (tensor.shape, tensor.dtype) == (shape, dtype), f"{tensor.shape} was expected, {shape} is asked for"
        self._wait("receive from the previous stage", work)
        if self._device.type == "cuda":  # made on another stream than it is read on: not to be reused before that
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def close(self) -> None:
        """Leave without waiting for the others."""
        self._sent.clear()
        self._posted.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait(self, what: str, work: Any) -> None:
        """On a CPU the host waits, on a GPU the stream: nccl's own watchdog keeps the time there, and ends the process.

        A wait with a limit would hold up the host on a GPU too.
        """
        if self._device.type == "cuda":
            self._call(what, work.wait)
        else:
            self._call(what, work.wait, self._timeout)

    def _call(self, what: str, call: Callable[..., T], *given: Any, **named: Any) -> T:
        """Call into `torch.distributed`, whose errors are RuntimeErrors of many kinds; raises GroupBroken."""
        try:
            return call(*given, **named)
        except (RuntimeError, TimeoutError) as error:
            stage, stages, rank, ranks = self.layout
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise GroupBroken(
                f"{rank_name((stage, rank))} of {stages} x {ranks} in {what}, within "
                f"{self._timeout.total_seconds():g} s (--collective-timeout): {first}"
            ) from error


# --- where the ranks meet --------------------------------------------------------------------------------------------


def open_store(
    rendezvous: str, layout: Layout, epoch: int, timeout: datetime.timedelta, environ: Mapping[str, str]
) -> Store:
    """The store where the ranks of an epoch meet, and the network set towards it; raises BadOption, GroupBroken."""
    scheme, _, place = rendezvous.partition("://")
    name = str(epoch)
    if scheme in ("tcp", "env"):
        place, _, given = place.partition("/")
        name = given or name
    if scheme == "env":
        if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT"):
            raise BadOption(
                "ranks started elsewhere must know where they meet: set MASTER_ADDR and MASTER_PORT for them, or pass "
                "--rendezvous HOST:PORT to the daemon"
            )
        scheme, place = "tcp", f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    if scheme == "file" and place:
        set_interface("127.0.0.1")
        store: Store = FileStore(place, layout.total)
    elif scheme == "tcp" and place.rpartition(":")[2].isdecimal():
        host, _, port = place.rpartition(":")
        host = host.strip("[]")
        try:
            socket.getaddrinfo(host, int(port))  # a name that nobody knows would be tried for as long as ranks may take
        except OSError as error:
            text = f"the rendezvous {host}:{port} is no place: {error}; ranks meet on the host of rank 0.0"
            raise BadOption(text) from None
        set_interface(host)
        # A launcher like torchrun may run the store itself; otherwise rank 0.0 does.
        serves = layout.number == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = TCPStore(
                host, int(port), layout.total, serves, timeout=MEET_WITHIN, wait_for_workers=False, use_libuv=True
            )
        except (RuntimeError, TimeoutError) as error:
            raise GroupBroken(f"no rendezvous at {host}:{port}: {error}") from error
    else:
        raise BadOption(f"rendezvous {rendezvous!r} is none of tcp://HOST:PORT, file://PATH and env://")
    return PrefixStore(f"bandmaster/{name}", store)


def set_interface(host: str) -> None:
    """Have gloo and nccl listen on the interface that leads to `host`, unless the environment names one.

    Their own choice is the address of this machine's name, which on many hosts is a loopback one that no peer reaches.
    """
    name = interface_towards(host)
    for variable in INTERFACE_VARIABLES:
        if name:
            os.environ.setdefault(variable, name)


def interface_towards(host: str) -> str:
    """The name of the interface whose address this machine uses towards `host`; empty when there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            own = probe.getsockname()[0]
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return name
    return "lo" if own.startswith("127.") else ""
