"""The trio wrapper: no message is lost or invented, whatever waits, is cancelled or is full."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ipc.errors import PeerGone
from ipc.sockets import FRAMES_MAX, Socket, SocketOptions, bind_router, connect_dealer

UNBOUNDED = SocketOptions(send_hwm=0, recv_hwm=0)


async def greet(router: Socket, dealer: Socket) -> bytes:
    """Make the dealer known to the router; its identity."""
    await dealer.send([b"hello"])
    identity, hello = await router.recv()
    assert hello == b"hello"
    return identity


async def fill(socket: Socket, message: Callable[[int], list[bytes]]) -> int:
    """Send until the queues and the kernel's buffers stay full; the number of messages sent."""
    sent = refused = 0
    while refused < 5:
        if socket.try_send(message(sent)):
            sent, refused = sent + 1, 0
        else:
            refused += 1
            await wait_all_tasks_blocked(0.02)  # lets ZeroMQ's thread move what it still can
    return sent


async def test_a_message_goes_there_and_back(endpoint: str) -> None:
    """A dealer's frame reaches the router with an identity, and an answer finds its way back."""
    router, dealer = bind_router(endpoint), connect_dealer(endpoint)
    identity = await greet(router, dealer)
    await router.send([identity, b"answer"])
    assert await dealer.recv() == [b"answer"]
    assert (router.stats.received, router.stats.sent) == (1, 1)
    assert (dealer.stats.sent_bytes, dealer.stats.received_bytes) == (5, 6)
    dealer.close()
    router.close()


async def test_a_tcp_peer_that_answers_nothing_counts_as_gone() -> None:
    """A network that swallows everything: the connection stands, but nobody answers; a peer that is there stays."""
    router = bind_router("tcp://127.0.0.1:0", insecure=True)
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = int(router.endpoint.rpartition(":")[2])
    swallowing = trio.Event()

    async def carry(stream: trio.SocketStream) -> None:
        """To the router and back, until told to swallow."""
        onward = await trio.open_tcp_stream("127.0.0.1", port)

        async def one_way(source: trio.SocketStream, target: trio.SocketStream) -> None:
            async for data in source:
                if not swallowing.is_set():
                    await target.send_all(data)

        async with trio.open_nursery() as ways:
            ways.start_soon(one_way, stream, onward)
            ways.start_soon(one_way, onward, stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, carry, [listener])
        address = f"tcp://127.0.0.1:{listener.socket.getsockname()[1]}"
        dealer = connect_dealer(address, SocketOptions(gone_ms=600), insecure=True)
        dealer.watch_disconnects()
        await greet(router, dealer)
        with trio.move_on_after(1.5) as alive:  # pings go there and back
            await dealer.wait_disconnected()
        assert alive.cancelled_caught
        swallowing.set()
        with trio.fail_after(30):
            await dealer.wait_disconnected()
        nursery.cancel_scope.cancel()
    dealer.close()
    router.close()


async def test_a_cancelled_recv_loses_nothing(endpoint: str) -> None:
    """A task cancelled while it waits takes no message with it."""
    router, dealer = bind_router(endpoint), connect_dealer(endpoint)
    await greet(router, dealer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(router.recv)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    for number in range(3):
        await dealer.send([b"%d" % number])
    assert [(await router.recv())[1] for _ in range(3)] == [b"0", b"1", b"2"]
    dealer.close()
    router.close()


async def test_cancellation_at_every_point_loses_nothing_and_keeps_the_order(endpoint: str) -> None:
    """Receivers that are cancelled after any number of scheduler passes together see every message, in order."""
    router, dealer = bind_router(endpoint, UNBOUNDED), connect_dealer(endpoint, UNBOUNDED)
    await greet(router, dealer)
    total, got = 2000, []
    rng = random.Random(1)

    async def send_all() -> None:
        for number in range(total):
            await dealer.send([b"%d" % number])
            if rng.random() < 0.3:
                await trio.lowlevel.checkpoint()

    async def cancel_after(scope: trio.CancelScope, passes: int) -> None:
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_all)
        while len(got) < total:
            async with trio.open_nursery() as inner:
                inner.start_soon(cancel_after, inner.cancel_scope, rng.randrange(6))
                while True:
                    got += [frames[1] for frames in await router.recv_batch(rng.randrange(1, 5))]
    assert got == [b"%d" % number for number in range(total)]
    dealer.close()
    router.close()


async def test_a_send_cancelled_at_the_high_water_mark_is_not_delivered(endpoint: str) -> None:
    """A full queue blocks the sender; cancelled there, its message never arrives; the ones before it all do."""
    small = SocketOptions(send_hwm=1, recv_hwm=1)
    router, dealer = bind_router(endpoint, small), connect_dealer(endpoint, small)
    identity = await greet(router, dealer)
    payload = bytes(1 << 20)
    sent = await fill(dealer, lambda number: [b"%d" % number, payload])
    assert dealer.stats.blocked > 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dealer.send, [b"cancelled", payload])
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    got = [(await router.recv())[1] for _ in range(sent)]
    assert got == [b"%d" % number for number in range(sent)]
    await dealer.send([b"last"])
    assert await router.recv() == [identity, b"last"]
    dealer.close()
    router.close()


async def test_one_pair_used_by_four_tasks_both_ways_at_a_tiny_high_water_mark(endpoint: str) -> None:
    """Senders and receivers on the same two sockets wake each other; nothing stalls, nothing is lost."""
    tiny = SocketOptions(send_hwm=3, recv_hwm=3)
    router, dealer = bind_router(endpoint, tiny), connect_dealer(endpoint, tiny)
    identity = await greet(router, dealer)
    total = 1000
    there: list[bytes] = []
    back: list[bytes] = []

    async def produce(socket: Socket, prefix: list[bytes]) -> None:
        for number in range(total):
            await socket.send([*prefix, b"%d" % number])

    async def consume(socket: Socket, into: list[bytes]) -> None:
        while len(into) < total:
            into += [frames[-1] for frames in await socket.recv_batch(7)]

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(produce, dealer, [])
            nursery.start_soon(consume, router, there)
            nursery.start_soon(produce, router, [identity])
            nursery.start_soon(consume, dealer, back)
    expected = [b"%d" % number for number in range(total)]
    assert there == expected
    assert back == expected
    dealer.close()
    router.close()


async def test_many_receivers_share_one_socket_and_survive_each_others_cancellation(endpoint: str) -> None:
    """When the task that waits on the descriptor is cancelled, another takes over: no message is stranded."""
    router, dealer = bind_router(endpoint, UNBOUNDED), connect_dealer(endpoint, UNBOUNDED)
    await greet(router, dealer)
    got: list[bytes] = []
    scopes: list[trio.CancelScope] = []

    async def receive() -> None:
        scope = trio.CancelScope()
        scopes.append(scope)
        with scope:
            while True:
                got.append((await router.recv())[1])

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(receive)
            await wait_all_tasks_blocked()
            for number in range(5):
                await dealer.send([b"%d" % number])
                while len(got) <= number:
                    await wait_all_tasks_blocked(0.001)
                if number < 4:
                    scopes[number].cancel()  # number 0 led, the others were parked
                    await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert got == [b"0", b"1", b"2", b"3", b"4"]
    dealer.close()
    router.close()


@pytest.mark.parametrize("waits", [True, False])
async def test_a_sender_that_swallows_the_edge_wakes_the_receiver(endpoint: str, waits: bool) -> None:
    """A message arrives unseen while the receiver sleeps; a send on the same socket looks first, and passes it on."""
    router, dealer = bind_router(endpoint), connect_dealer(endpoint)
    identity = await greet(router, dealer)
    got: list[list[bytes]] = []

    async def receive() -> None:
        got.append(await dealer.recv())

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await wait_all_tasks_blocked()
            assert router.try_send([identity, b"unseen"])
            until = time.monotonic() + 0.05
            while time.monotonic() < until:
                pass  # ZeroMQ's thread delivers; the loop does not look
            if waits:
                await dealer.send([b"x"])
            else:
                assert dealer.try_send([b"x"])
    assert got == [[b"unseen"]]
    dealer.close()
    router.close()


async def test_a_router_knows_its_peers_and_says_when_one_is_unknown(endpoint: str) -> None:
    """Two peers get their own answers; a third identity is an error, not silence."""
    router = bind_router(endpoint)
    first, second = connect_dealer(endpoint), connect_dealer(endpoint)
    one, two = await greet(router, first), await greet(router, second)
    await router.send([two, b"for two"])
    await router.send([one, b"for one"])
    assert await first.recv() == [b"for one"]
    assert await second.recv() == [b"for two"]
    with pytest.raises(PeerGone, match="no peer"):
        await router.send([b"nobody", b"x"])
    with pytest.raises(PeerGone):
        router.try_send([b"nobody", b"x"])
    assert router.stats.unreachable == 2
    for socket in (first, second, router):
        socket.close()


async def test_a_router_waits_for_one_full_peer_while_another_can_be_written(endpoint: str) -> None:
    """Sending to a peer that does not read waits, without spinning, and goes on when it reads."""
    small = SocketOptions(send_hwm=1, recv_hwm=1)
    router = bind_router(endpoint, small)
    slow, idle = connect_dealer(endpoint, small), connect_dealer(endpoint, small)
    identity = await greet(router, slow)
    await greet(router, idle)
    payload = bytes(1 << 20)
    sent = await fill(router, lambda _: [identity, payload])
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.send, [identity, b"last"])
            for _ in range(sent):
                assert await slow.recv() == [payload]
            assert await slow.recv() == [b"last"]
    for socket in (slow, idle, router):
        socket.close()


async def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(endpoint: str) -> None:
    """A frame above the limit never reaches the application; another peer is still served."""
    router = bind_router(endpoint, SocketOptions(max_message_bytes=1000))
    hostile, good = connect_dealer(endpoint), connect_dealer(endpoint)
    await greet(router, hostile)
    identity = await greet(router, good)
    hostile.watch_disconnects()
    await hostile.send([bytes(1001)])
    with trio.fail_after(5):
        await hostile.wait_disconnected()
    await good.send([bytes(1000)])
    assert await router.recv() == [identity, bytes(1000)]
    for socket in (hostile, good, router):
        socket.close()


async def test_frames_beyond_the_few_that_belong_to_a_message_are_dropped(endpoint: str) -> None:
    """A message of a thousand frames is read to its end, kept short, and the next one is whole."""
    router, dealer = bind_router(endpoint), connect_dealer(endpoint)
    identity = await greet(router, dealer)
    await dealer.send([b"x"] * 1000)
    await dealer.send([b"next"])
    assert len(await router.recv()) == FRAMES_MAX
    assert await router.recv() == [identity, b"next"]
    dealer.close()
    router.close()


async def test_closing_wakes_every_sleeper(endpoint: str) -> None:
    """The leader and the parked tasks all end with ClosedResourceError, and so does later use."""
    router = bind_router(endpoint)
    ended: list[str] = []

    async def receive() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await router.recv()
        ended.append("closed")

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        router.close()
    assert ended == ["closed"] * 3
    with pytest.raises(trio.ClosedResourceError):
        router.try_send([b"x", b"y"])
    router.close()


async def test_aclose_lets_what_was_sent_arrive(endpoint: str) -> None:
    """Messages queued before `aclose(drain_ms)` reach a peer that starts to listen only afterwards."""
    dealer = connect_dealer(endpoint)
    await dealer.send([b"parting words"])
    await dealer.aclose(drain_ms=5000)
    router = bind_router(endpoint)
    with trio.fail_after(5):
        assert (await router.recv())[1] == b"parting words"
    router.close()


async def test_a_disconnect_is_noticed_without_traffic(endpoint: str) -> None:
    """When the bound end goes away, a dealer that watches learns it at once."""
    router, dealer = bind_router(endpoint), connect_dealer(endpoint)
    dealer.watch_disconnects()
    await greet(router, dealer)
    router.close()
    with trio.fail_after(5):
        await dealer.wait_disconnected()
    dealer.close()


async def test_after_a_reconnect_the_router_sees_a_new_peer(endpoint: str) -> None:
    """A dealer whose connection was cut comes back under another identity: a gap cannot pass for a pause."""
    router, dealer = bind_router(endpoint, SocketOptions(max_message_bytes=1000)), connect_dealer(endpoint)
    first = await greet(router, dealer)
    await dealer.send([bytes(2000)])  # cuts the connection
    with trio.fail_after(5):
        while True:  # what was queued may have gone down with the connection
            await dealer.send([b"again"])
            with trio.move_on_after(0.1):
                second, again = await router.recv()
                break
    assert again == b"again"
    assert second != first
    with pytest.raises(PeerGone):
        await router.send([first, b"x"])
    dealer.close()
    router.close()


async def test_waiting_costs_no_processor_time(endpoint: str) -> None:
    """A receiver that sleeps for 0.3 s uses under a hundredth of a core."""
    router, dealer = bind_router(endpoint), connect_dealer(endpoint)
    await greet(router, dealer)
    with trio.move_on_after(0.05):
        await router.recv()
    before = time.process_time()
    with trio.move_on_after(0.3):
        await router.recv()
    assert time.process_time() - before < 0.02
    dealer.close()
    router.close()


async def test_tcp_in_the_clear_works_only_when_asked_for() -> None:
    """`insecure=True` opens a tcp port, whose number the bound socket names."""
    router = bind_router("tcp://127.0.0.1:*", insecure=True)
    dealer = connect_dealer(router.endpoint, insecure=True)
    with trio.fail_after(5):
        await greet(router, dealer)
    dealer.close()
    router.close()
