"""Links between modeled ranks: who gets what, and that nobody waits for a peer that is gone."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from daemon.rank.errors import BadOption, GroupBroken
from daemon.rank.layout import Layout
from daemon.rank.modeled_link import SocketLink
from tests.rank.places import free_port, layouts

TIMEOUT_MS = 10_000
WITHIN_S = 3 * TIMEOUT_MS / 1000


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """A thread for each rank."""
    with ThreadPoolExecutor(16) as made:
        yield made


def rendezvous(scheme: str, place: Path) -> str:
    """A rendezvous of either kind; the file lies deeper than a Unix socket's path may be long."""
    if scheme == "tcp":
        return f"tcp://127.0.0.1:{free_port()}"
    deep = place / ("d" * 90)
    deep.mkdir(exist_ok=True)
    return f"file://{deep}/meeting"


def on_all(
    pool: ThreadPoolExecutor, links: list[SocketLink], work: Callable[[SocketLink, int], object]
) -> list[object]:
    """The same call on every rank at once; results in order."""
    futures: list[Future[object]] = [pool.submit(work, link, number) for number, link in enumerate(links)]
    return [future.result(WITHIN_S) for future in futures]


def linked(
    pool: ThreadPoolExecutor, stages: int, ranks: int, where: str, timeout_ms: int = TIMEOUT_MS
) -> list[SocketLink]:
    """The links of a whole group."""
    futures = [pool.submit(SocketLink, layout, 3, where, timeout_ms) for layout in layouts(stages, ranks)]
    return [future.result(WITHIN_S) for future in futures]


@pytest.mark.parametrize("scheme", ["file", "tcp", "env"])
def test_sums_and_broadcasts_stay_in_a_stage(
    pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """A sum is over the tensor ranks of the stage, a broadcast is what its rank 0 has; wherever they meet."""
    where = "env:///some-epoch" if scheme == "env" else rendezvous(scheme, tmp_path)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port() - 1))
    links = linked(pool, 2, 3, where)
    own = [np.array([number, 10 * number, 2**63], dtype=np.uint64) for number in range(6)]
    sums = on_all(pool, links, lambda link, number: link.reduce(own[number]).tolist())
    assert sums == [[3, 30, 2**63]] * 3 + [[12, 120, 2**63]] * 3
    told = on_all(pool, links, lambda link, number: link.broadcast(own[number]).tolist())
    assert told == [own[0].tolist()] * 3 + [own[3].tolist()] * 3
    for link in links:
        link.close()


def test_what_a_stage_sends_reaches_the_same_tensor_rank_of_the_next(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Values keep their shape and order, and bring the time at which they are due."""
    links = linked(pool, 3, 2, rendezvous("file", tmp_path))

    def work(link: SocketLink, number: int) -> list[object]:
        got: list[object] = []
        for turn in range(3):
            if number >= 2:
                values, due_in_ns = link.receive_previous((2, 2))
                got.append((values.tolist(), due_in_ns))
            if number < 4:
                link.send_next(np.full((2, 2), 100 * turn + number, dtype=np.uint64), turn)
        return got

    found = on_all(pool, links, work)
    for number in range(2, 6):
        sender = number - 2
        assert found[number] == [([[100 * t + sender] * 2] * 2, t) for t in range(3)]
    for link in links:
        link.close()


def test_a_rank_that_left_is_named_by_those_who_need_it(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Its partners fail at once, not after the timeout."""
    links = linked(pool, 2, 2, rendezvous("file", tmp_path))
    links[1].close()
    with pytest.raises(GroupBroken, match=r"rank 0\.1 is gone"):
        links[0].reduce(np.zeros(2, dtype=np.uint64))
    with pytest.raises(GroupBroken, match=r"rank 0\.1 is gone"):
        links[3].receive_previous((1,))
    for link in links:
        link.close()


def test_a_rank_that_does_not_answer_is_a_fault_after_the_timeout(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """A silent peer is named with the limit."""
    links = linked(pool, 1, 2, rendezvous("file", tmp_path), timeout_ms=60)
    with pytest.raises(GroupBroken, match=r"rank 0\.1 did not take part within 0\.06 s"):
        links[0].reduce(np.zeros(1, dtype=np.uint64))
    for link in links:
        link.close()


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    """Whoever waits for them says so when its time is up."""
    where = rendezvous("file", tmp_path)
    with pytest.raises(GroupBroken, match=r"rank 0\.1, rank 1\.0 did not come"):
        SocketLink(Layout(0, 2, 0, 2), 1, where, 50)
    with pytest.raises(GroupBroken, match=r"rank 0\.0 at the rendezvous is not there"):
        SocketLink(Layout(0, 2, 1, 2), 1, f"tcp://127.0.0.1:{free_port()}", 50)


def test_a_rank_of_another_epoch_is_not_let_in(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """What is left of an earlier epoch does not take a place in this one."""
    where = rendezvous("file", tmp_path)
    first = pool.submit(SocketLink, Layout(0, 1, 0, 2), 2, where, TIMEOUT_MS)
    (tmp_path / ("d" * 90) / "meeting.0.1").unlink(missing_ok=True)
    stray = SocketLink(Layout(0, 1, 1, 2), 1, where, TIMEOUT_MS)
    (tmp_path / ("d" * 90) / "meeting.0.1").unlink()
    second = SocketLink(Layout(0, 1, 1, 2), 2, where, TIMEOUT_MS)
    mate = first.result(WITHIN_S)
    waiting = pool.submit(mate.reduce, np.ones(1, dtype=np.uint64))
    assert second.reduce(np.ones(1, dtype=np.uint64)).tolist() == [2]
    assert waiting.result(WITHIN_S).tolist() == [2]
    with pytest.raises(GroupBroken):
        stray.reduce(np.ones(1, dtype=np.uint64))
    for link in (mate, second, stray):
        link.close()


def test_a_rendezvous_of_another_kind_is_refused() -> None:
    """The text says which kinds there are."""
    with pytest.raises(BadOption, match="tcp://HOST:PORT"):
        SocketLink(Layout(0, 1, 0, 2), 1, "http://somewhere", 50)


@pytest.mark.parametrize("port", ["", "http", "-1", "0", "65535", "70000"])
def test_a_port_in_the_environment_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    """With its name and value, not with a trace of whatever read it."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(BadOption, match=f"MASTER_PORT='{port}' in the environment: a host and a port from 1 to 65534"):
        SocketLink(Layout(0, 1, 0, 2), 1, "env:///epoch", 50)
    with pytest.raises(BadOption, match=r"rendezvous 'tcp://127\.0\.0\.1:"):
        SocketLink(Layout(0, 1, 0, 2), 1, f"tcp://127.0.0.1:{'99999' if port == '65535' else port}", 50)


def test_a_rank_whose_rendezvous_ends_says_that_it_is_gone() -> None:
    """Rank 0.0 dies while it gathers: who waits for its table breaks with it, and is not to blame."""
    with socket.create_server(("127.0.0.1", 0)) as store, ThreadPoolExecutor(1) as one:
        place = f"tcp://127.0.0.1:{store.getsockname()[1]}"
        waiting = one.submit(SocketLink, Layout(0, 1, 1, 2), 1, place, 30_000)
        peer, _ = store.accept()
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(GroupBroken, match=r"rank 0\.0 at the rendezvous is gone"):
            waiting.result(WITHIN_S)
        peer.close()
