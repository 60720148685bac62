"""The process group by real processes: what passes, who is missing, and where ranks meet."""

from __future__ import annotations

import datetime
import multiprocessing
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from daemon.rank.errors import BadOption
from daemon.rank.group import SoloGroup
from daemon.rank.layout import SOLO, Layout
from daemon.rank.process_group import ProcessGroup, interface_towards, open_group, open_store
from tests.rank.group_process import child
from tests.rank.places import free_port, layouts
from tools.rank_driver import settings

WITHIN_S = 120


def run(
    work: str, rendezvous: str, stages: int, ranks: int, timeout_ms: int = 60_000, environ: Any = None
) -> list[Any]:
    """What every rank said, in rank order; None for one that died without a word."""
    context = multiprocessing.get_context("forkserver")  # torch is imported once, in a process without threads
    context.set_forkserver_preload(["tests.rank.group_process"])
    heard = []
    for layout in layouts(stages, ranks):
        mine, theirs = context.Pipe(duplex=False)
        given = (theirs, work, rendezvous, layout, timeout_ms, environ or {})
        process = context.Process(target=child, args=given, daemon=True)
        process.start()
        theirs.close()
        heard.append((mine, process))
    said: list[Any] = []
    for pipe, _ in heard:
        assert pipe.poll(WITHIN_S), "a rank says nothing"
        try:
            said.append(pipe.recv())
        except EOFError:
            said.append(None)
    for _, process in heard:
        process.join(WITHIN_S)
    return said


def test_collectives_of_each_stage_in_every_dtype(tmp_path: Path) -> None:
    """Two stages of two ranks: each stage sums, joins and tells its own only, the same on both ranks."""
    found = run("collectives", f"file://{tmp_path}/meet", 2, 2)
    for stage, (low, high) in enumerate(((1, 2), (3, 4))):
        for rank in range(2):
            for name, (reduced, gathered, told) in found[2 * stage + rank].items():
                assert reduced == [[low + high] * 3] * 2, name
                assert gathered == [[low] * 3 + [high] * 3] * 2, name
                assert told == [[low] * 3] * 2, name


def test_hidden_states_pass_in_order_over_tcp_on_another_address() -> None:
    """Three stages that meet at 127.0.0.2, as on another host: ten tensors of growing shapes, each by every stage."""
    found = run("pipeline", f"tcp://127.0.0.2:{free_port('127.0.0.2')}", 3, 1)
    assert found == [[], [], [step + 0 + 1 + 2 for step in range(10)]]


def test_ranks_meet_where_their_launcher_says() -> None:
    """MASTER_ADDR and MASTER_PORT, as torchrun and scripts around srun set them."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run("pipeline", "env://", 2, 1, environ=place)[1] == [step + 1 for step in range(10)]


@pytest.mark.parametrize(("stages", "ranks", "call"), [(1, 2, "all_reduce"), (2, 1, "send to the next stage")])
def test_a_peer_that_died_is_named_by_the_call_that_missed_it(
    tmp_path: Path, stages: int, ranks: int, call: str
) -> None:
    """Long before the timeout; the survivor says GroupBroken, so that it is not blamed."""
    survivor, dead = run("dies", f"file://{tmp_path}/meet", stages, ranks, timeout_ms=WITHIN_S * 1000)
    assert dead is None
    assert survivor.startswith(f"GroupBroken: rank 0.0 of {stages} x {ranks} in {call}, within {WITHIN_S} s")


@pytest.mark.parametrize(("stages", "ranks", "call"), [(1, 2, "all_reduce"), (2, 1, "receive from the previous stage")])
def test_a_peer_that_does_not_take_part_is_a_fault_in_time(tmp_path: Path, stages: int, ranks: int, call: str) -> None:
    """It is alive and connected, but does nothing: whoever waits for it gives up at --collective-timeout."""
    waited, gave_up = run("hangs", f"file://{tmp_path}/meet", stages, ranks, timeout_ms=2_000)
    assert waited == "waited"
    assert f"in {call}, within 2 s (--collective-timeout)" in gave_up


class Received:
    """Stands for a tensor on a GPU, and for the work that fills it."""

    shape, dtype = (2, 4), torch.float32

    def __init__(self) -> None:
        self.did: list[str] = []

    def wait(self) -> None:
        self.did.append("waited")

    def record_stream(self, stream: str) -> None:
        self.did.append(f"kept for {stream}")


def test_what_a_gpu_received_is_kept_for_the_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made on the stream that was current when it was expected: without that the next one would be received into
    the same memory while the forward still reads.
    """
    group, received = object.__new__(ProcessGroup), Received()
    group.layout, group._device = Layout(1, 2, 0, 1), torch.device("cuda", 0)
    group._posted = deque([(received, received)])  # type: ignore[list-item]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the forward of {device}")
    assert group.receive_previous((2, 4), torch.float32) is received  # type: ignore[comparison-overlap]
    assert received.did == ["waited", "kept for the forward of cuda:0"]


def test_one_rank_needs_nobody() -> None:
    """No rendezvous, no process group."""
    assert isinstance(open_group(settings(), SOLO, 1, torch.device("cpu")), SoloGroup)


def test_a_place_to_meet_that_is_none_is_refused() -> None:
    """A scheme that nobody knows, a port that is no number, and a launcher that says nothing."""
    two, soon = Layout(0, 2, 0, 1), datetime.timedelta(seconds=1)
    for place in ("udp://host:1", "tcp://host:port", "file://", ""):
        with pytest.raises(BadOption, match="is none of tcp://HOST:PORT, file://PATH and env://"):
            open_store(place, two, 1, soon, {})
    with pytest.raises(BadOption, match="set MASTER_ADDR and MASTER_PORT for them, or pass --rendezvous"):
        open_store("env://", two, 1, soon, {"MASTER_ADDR": "somewhere"})
    with pytest.raises(BadOption, match=r"the rendezvous no\.such\.host\.invalid:1 is no place"):
        open_store("tcp://no.such.host.invalid:1", two._replace(stage=1), 1, soon, {})


def test_the_interface_is_the_one_that_leads_to_the_others() -> None:
    """Loopback addresses lead to `lo`; a name that leads nowhere leaves the choice to gloo."""
    assert interface_towards("127.0.0.1") == interface_towards("127.0.0.9") == "lo"
    assert interface_towards("no.such.host.invalid") == ""
