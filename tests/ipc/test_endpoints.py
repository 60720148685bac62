"""Endpoints and keys: who can connect, and whose file is removed."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
import trio
import zmq
from trio.testing import wait_all_tasks_blocked

from ipc.endpoints import private_directory
from ipc.errors import EndpointError, EndpointInUse, InsecureEndpoint, KeyFileError
from ipc.keys import ClientKeys, load_client_keys, load_server_keys, make_keys
from ipc.sockets import Socket, bind_router, connect_dealer
from ipc.zap import Authenticator


async def test_a_socket_file_is_ours_alone_and_goes_with_its_socket(run_dir: Path) -> None:
    """Mode 0600 in a directory made 0700; removed at close."""
    path = run_dir / "deep" / "front.sock"
    router = bind_router(f"ipc://{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    router.close()
    assert not path.exists()


async def test_a_dead_processs_socket_file_is_replaced(run_dir: Path) -> None:
    """A file that nobody listens on does not stand in the way."""
    path = run_dir / "front.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    assert path.exists()
    router, dealer = bind_router(f"ipc://{path}"), connect_dealer(f"ipc://{path}")
    await dealer.send([b"x"])
    with trio.fail_after(5):
        assert (await router.recv())[1] == b"x"
    dealer.close()
    router.close()


async def test_a_live_socket_is_not_stolen(run_dir: Path) -> None:
    """The second one fails with a sentence; the first one goes on; its file stays."""
    endpoint = f"ipc://{run_dir / 'front.sock'}"
    first, dealer = bind_router(endpoint), connect_dealer(endpoint)
    with pytest.raises(EndpointInUse, match="a live process listens at"):
        bind_router(endpoint)
    await dealer.send([b"x"])
    with trio.fail_after(5):
        assert (await first.recv())[1] == b"x"
    dealer.close()
    first.close()


async def test_a_late_close_does_not_remove_a_successors_file(run_dir: Path) -> None:
    """Only the file that was made here is removed, recognised by its inode."""
    path = run_dir / "front.sock"
    old = bind_router(f"ipc://{path}")
    path.unlink()
    new = bind_router(f"ipc://{path}")
    old.close()
    assert path.exists()
    new.close()
    assert not path.exists()


async def test_bad_places_are_refused_with_a_reason(run_dir: Path) -> None:
    """Too long, taken by a file, in a directory that others may write to, or an unknown transport."""
    with pytest.raises(EndpointError, match="bytes; the system's limit is 107"):
        bind_router(f"ipc://{run_dir / ('x' * 120)}")
    (run_dir / "file").write_text("precious")
    with pytest.raises(EndpointError, match="is not a socket"):
        bind_router(f"ipc://{run_dir / 'file'}")
    assert (run_dir / "file").read_text() == "precious"
    os.chmod(run_dir, 0o777)
    with pytest.raises(EndpointError, match="chmod 700"):
        bind_router(f"ipc://{run_dir / 'front.sock'}")
    os.chmod(run_dir, 0o755)
    private_directory(run_dir)
    with pytest.raises(EndpointError, match="neither ipc:// nor tcp://"):
        bind_router("udp://127.0.0.1:1")


def test_tcp_needs_keys_or_an_explicit_wish() -> None:
    """The refusal says how to make keys."""
    with pytest.raises(InsecureEndpoint, match="bandmaster keys"):
        bind_router("tcp://127.0.0.1:*")
    with pytest.raises(InsecureEndpoint, match="--insecure"):
        connect_dealer("tcp://127.0.0.1:1")


# --- keys ------------------------------------------------------------------------------------------------------------


def test_key_files_have_the_right_modes_and_are_never_overwritten(run_dir: Path) -> None:
    """Secrets 0600 from the first byte on, whatever the umask; a second call adds a client, keeps the daemon's pair."""
    keys = run_dir / "keys"
    old = os.umask(0)
    try:
        written = make_keys(keys, ["a"])
    finally:
        os.umask(old)
    modes = {str(path.relative_to(keys)): stat.S_IMODE(path.stat().st_mode) for path in written}
    assert modes == {
        "daemon.secret": 0o600,
        "daemon.public": 0o644,
        "clients/a.secret": 0o600,
        "clients/a.public": 0o644,
    }
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    before = load_server_keys(keys)
    make_keys(keys, ["b"])
    after = load_server_keys(keys)
    assert (after.public, after.secret) == (before.public, before.secret)
    assert after.allowed > before.allowed
    with pytest.raises(KeyFileError, match="client 'a' has keys"):
        make_keys(keys, ["a"])
    assert load_client_keys(keys, "a").server_public == after.public


def test_secrets_do_not_show_in_logs(run_dir: Path) -> None:
    """Neither side's repr has its secret."""
    make_keys(run_dir, ["a"])
    for keys in (load_server_keys(run_dir), load_client_keys(run_dir, "a")):
        assert keys.secret.decode() not in repr(keys)
        assert keys.public.decode() in repr(keys)


def test_bad_key_files_are_refused_with_a_reason(run_dir: Path) -> None:
    """Missing, readable by others, malformed, of the wrong length, nobody allowed, an impossible name."""
    with pytest.raises(KeyFileError, match="does not exist"):
        load_server_keys(run_dir)
    make_keys(run_dir, [])
    with pytest.raises(KeyFileError, match="nobody could connect"):
        load_server_keys(run_dir)
    make_keys(run_dir, ["a"])
    secret = run_dir / "clients" / "a.secret"
    secret.chmod(0o640)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_client_keys(run_dir, "a")
    secret.chmod(0o600)
    for text, complaint in (("x = ", "cannot be read"), ('public = "short"', "`public` must be"), ("", "`public`")):
        secret.write_text(text)
        with pytest.raises(KeyFileError, match=complaint):
            load_client_keys(run_dir, "a")
    with pytest.raises(KeyFileError, match="client name"):
        make_keys(run_dir, ["../a"])


# --- CURVE over tcp --------------------------------------------------------------------------------------------------


async def arrives(router: Socket, dealer: Socket, within_s: float) -> bool:
    """Whether a message of the dealer reaches the router."""
    with trio.move_on_after(within_s):
        await dealer.send([b"hello"])
        identity, _ = await router.recv()
        await router.send([identity, b"welcome"])
        assert await dealer.recv() == [b"welcome"]
        return True
    return False


async def test_curve_lets_in_who_it_knows_and_nobody_else(run_dir: Path) -> None:
    """The right pair works both ways; an unknown pair, a wrong server key, and no key at all get nothing."""
    make_keys(run_dir, ["a", "later"])
    server = load_server_keys(run_dir)
    good = load_client_keys(run_dir, "a")
    stranger_public, stranger_secret = zmq.curve_keypair()
    unknown = ClientKeys(stranger_public, stranger_secret, server.public)
    misled = ClientKeys(good.public, good.secret, stranger_public)
    authenticator = Authenticator(server.allowed)
    async with trio.open_nursery() as nursery:
        await nursery.start(authenticator.run)
        router = bind_router("tcp://127.0.0.1:*", keys=server)
        dealers = {
            "unknown": connect_dealer(router.endpoint, keys=unknown),
            "misled": connect_dealer(router.endpoint, keys=misled),
            "no key": connect_dealer(router.endpoint, insecure=True),
        }
        for name, dealer in dealers.items():
            assert not await arrives(router, dealer, 0.3), name
        assert authenticator.stats["admitted"] == 0
        dealer = connect_dealer(router.endpoint, keys=good)
        assert await arrives(router, dealer, 10)
        assert authenticator.stats["admitted"] == 1
        assert authenticator.stats["denied"] >= 1
        for socket_ in (dealer, *dealers.values(), router):
            socket_.close()
        nursery.cancel_scope.cancel()


async def test_without_an_authenticator_nobody_gets_in(run_dir: Path) -> None:
    """The domain is enforced: a forgotten authenticator closes the door instead of opening it."""
    make_keys(run_dir, ["a"])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = bind_router("tcp://127.0.0.1:*", keys=load_server_keys(run_dir), context=context)
    dealer = connect_dealer(router.endpoint, keys=load_client_keys(run_dir, "a"), context=context)
    assert not await arrives(router, dealer, 0.3)
    dealer.close()
    router.close()
    await wait_all_tasks_blocked()
    context.term()
