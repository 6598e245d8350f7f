"""Kept connections: which are used again, and what happens to a request that is lost on one."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from proxy.errors import UpstreamUnreachable
from proxy.upstream import Upstream, connections
from proxy.upstream.connections import Connector
from tests.upstream.wire import OK, Provider, ask, connected, until, with_header

pytestmark = pytest.mark.anyio

KEY = [(b"Idempotency-Key", b"k")]


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


def _connector(upstream: Upstream) -> Connector:
    connector = upstream._session.connector
    assert isinstance(connector, Connector)
    return connector


def _kept(upstream: Upstream) -> list[Any]:
    return [protocol for idle in _connector(upstream)._conns.values() for protocol, _ in idle]


async def test_a_connection_is_used_again_and_several_where_several_ask() -> None:
    async with connected(provider := Provider(OK)) as upstream:
        for _ in range(3):
            await ask(upstream)
        assert provider.connections == 1
        await asyncio.gather(ask(upstream), ask(upstream))
        assert provider.connections == 2


async def test_an_idle_connection_is_given_up_before_servers_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connections.IDLE_SECONDS < 5
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.02)
    async with connected(provider := Provider(OK)) as upstream:
        for asked in range(3):
            assert (await ask(upstream))[1] == b"ok"
            assert provider.connections == asked + 1
            await asyncio.sleep(0.05)  # the pause itself, not a wait


@pytest.mark.parametrize("says_so", [True, False])
async def test_a_connection_that_the_server_closed_is_not_used(*, says_so: bool) -> None:
    answer = with_header(OK, b"Connection: close") if says_so else OK
    async with connected(provider := Provider(answer)) as upstream:
        await ask(upstream)
        if not says_so:
            provider.writers[0].close()
            await until(lambda: not any(protocol.is_connected() for protocol in _kept(upstream)))
        assert (await ask(upstream))[1] == b"ok"
        assert provider.connections == 2


async def test_an_end_that_the_event_loop_has_not_seen_yet_is_noticed() -> None:
    async with connected(provider := Provider(OK)) as upstream:
        await ask(upstream, content=b"1")
        [kept] = _kept(upstream)
        ours = kept.transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(provider.writers[0].get_extra_info("socket").fileno())) as theirs:
            theirs.shutdown(socket.SHUT_WR)  # at once: the event loop has no say in it
        assert select.select([ours], [], [], 5)[0] == [ours]
        await ask(upstream, content=b"2")
        assert [request[-1:] for request in provider.requests] == [b"1", b"2"]
        assert provider.connections == 2


async def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_one() -> None:
    async with connected(provider := Provider(OK)) as upstream:
        await ask(upstream)
        provider.writers[0].write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        await provider.writers[0].drain()
        await asyncio.sleep(0.05)  # it has come
        answer, _ = await ask(upstream)
        assert (answer.status, provider.connections) == (200, 2)


@pytest.mark.parametrize(
    ("says", "expected"), [(b"timeout=1, max=9", 2), (b"max=9;Timeout=0", 2), (b"timeout=5", 1), (b"max=1", 1)]
)
async def test_a_connection_rests_no_longer_than_the_server_says(says: bytes, expected: int) -> None:
    async with connected(provider := Provider(with_header(OK, b"Keep-Alive: " + says))) as upstream:
        for _ in range(2):
            await ask(upstream)
        assert provider.connections == expected


async def test_a_connection_is_given_up_a_second_before_the_server_closes_it() -> None:
    async with connected(Provider(with_header(OK, b"Keep-Alive: timeout=30"))) as upstream:
        await ask(upstream)
        [used] = _connector(upstream)._used.values()
        assert used.deadline - time.monotonic() == pytest.approx(29, abs=1)


@pytest.mark.parametrize("end", ["none", "closed", "reset", "said"])
async def test_input_on_an_idle_connection_is_seen_without_taking_it(end: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
        with ours, theirs:
            if end == "said":
                theirs.sendall(b"x")
            elif end == "reset":
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if end in {"closed", "reset"}:
                theirs.close()
            if end != "none":
                select.select([ours], [], [], 5)
            assert connections._has_input(asyncio.Transport({"socket": ours})) is (end != "none")
            if end == "said":
                assert ours.recv(9) == b"x"


@pytest.mark.parametrize("name", [b"Idempotency-Key", b"x-idempotency-key"])
async def test_a_lost_request_that_may_arrive_twice_is_sent_once_more(name: bytes) -> None:
    """The server closes just as the request comes: the client cannot tell whether it was read."""
    async with connected(provider := Provider(OK, b"", OK)) as upstream:
        await ask(upstream, content=b"1")
        assert (await ask(upstream, headers=[(name, b"k")], content=b"2"))[1] == b"ok"
        assert [request[-1:] for request in provider.requests] == [b"1", b"2", b"2"]
        assert provider.connections == 2


async def test_a_body_that_came_in_pieces_is_not_sent_again() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"hello "
        yield b"world"

    async with connected(provider := Provider(OK, b"", OK)) as upstream:
        await ask(upstream)
        with pytest.raises(UpstreamUnreachable):
            await ask(upstream, headers=KEY, content=pieces())
        assert len(provider.requests) == 2


async def test_it_is_sent_again_on_a_new_connection_only() -> None:
    async with connected(provider := Provider(OK, OK, b"", OK)) as upstream:
        await asyncio.gather(ask(upstream), ask(upstream))
        assert provider.connections == 2
        assert (await ask(upstream, headers=KEY))[1] == b"ok"
        assert (len(provider.requests), provider.connections) == (4, 3)


@pytest.mark.parametrize(("answers", "requests"), [((OK, b""), 3), ((b"",), 1)], ids=["kept", "new"])
async def test_it_is_sent_once_more_at_most_and_only_if_the_connection_was_kept(
    answers: tuple[bytes, ...], requests: int
) -> None:
    async with connected(provider := Provider(*answers)) as upstream:
        if len(answers) > 1:
            await ask(upstream)
        with pytest.raises(UpstreamUnreachable):
            await ask(upstream, headers=KEY)
        assert len(provider.requests) == requests
        assert not _kept(upstream)


async def test_it_is_not_sent_again_once_a_byte_of_an_answer_has_come() -> None:
    async with connected(provider := Provider(OK, b"H" + Provider.CUT)) as upstream:
        await ask(upstream)
        with pytest.raises(UpstreamUnreachable):
            await ask(upstream, headers=KEY)
        assert (len(provider.requests), provider.connections) == (2, 1)


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_any_other_lost_request_is_never_sent_twice(method: str) -> None:
    async with connected(provider := Provider(OK, b"")) as upstream:
        await ask(upstream)
        with pytest.raises(UpstreamUnreachable):
            await ask(upstream, method)
        assert (len(provider.requests), provider.connections) == (2, 1)
        assert not _kept(upstream)


async def test_after_a_loss_those_are_given_up_that_stood_open() -> None:
    async with connected(provider := Provider(OK, OK, b"", OK)) as upstream:
        await asyncio.gather(ask(upstream), ask(upstream))
        with pytest.raises(UpstreamUnreachable):
            await ask(upstream)
        for _ in range(3):  # on a new one, which is kept
            assert (await ask(upstream))[1] == b"ok"
        assert provider.connections == 3


async def test_a_server_that_closes_new_ones_too_gets_a_connection_for_each_request() -> None:
    async with connected(provider := Provider(OK, b"", OK, b"", OK)) as upstream:
        for _ in range(2):
            await ask(upstream)
            with pytest.raises(UpstreamUnreachable):
                await ask(upstream)
        for opened in range(3, 6):
            assert (await ask(upstream))[1] == b"ok"
            assert provider.connections == opened


async def test_a_request_that_was_not_written_is_sent_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server closes after the connection was chosen, and before the first byte: nobody is asked twice."""
    async with connected(provider := Provider(OK, OK, OK)) as upstream:
        await ask(upstream)
        looked: list[bool] = []

        def has_input(transport: asyncio.Transport | None) -> bool:
            looked.append(True)
            return len(looked) == 2 or transport is None

        monkeypatch.setattr(connections, "_has_input", has_input)
        assert (await ask(upstream, content=b"2"))[1] == b"ok"
        assert ([request[-1:] for request in provider.requests][1:], provider.connections) == ([b"2"], 2)


async def test_an_answer_that_comes_before_the_request_is_written_is_not_taken_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected(provider := Provider(OK, OK)) as upstream:
        await ask(upstream)
        looked: list[bool] = []

        def has_input(transport: asyncio.Transport | None) -> bool:
            looked.append(True)
            if len(looked) == 2 and transport is not None:
                protocol = cast("asyncio.Protocol", transport.get_protocol())
                protocol.data_received(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            return len(looked) == 2

        monkeypatch.setattr(connections, "_has_input", has_input)
        answer, body = await ask(upstream, content=b"2")
        assert (answer.status, body) == (200, b"ok")
        assert ([request[-1:] for request in provider.requests][1:], provider.connections) == ([b"2"], 2)


async def test_closing_an_unread_answer_breaks_its_connection() -> None:
    async with connected(provider := Provider(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nfirst")) as upstream:
        answer = await upstream.ask(upstream.base, "POST", "/x", [], b"{}")
        await answer.aclose()
        await until(lambda: provider.open == 0)
        assert not _kept(upstream)


async def test_cancelling_a_request_breaks_its_connection() -> None:
    async with connected(provider := Provider(b"HTTP/1.1 200 OK\r\n")) as upstream:
        asking = asyncio.get_running_loop().create_task(ask(upstream))
        await until(lambda: provider.requests)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: provider.open == 0)
        assert not _kept(upstream)


async def test_closing_the_upstream_closes_idle_connections_and_those_in_use() -> None:
    async with connected(provider := Provider(OK, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")) as upstream:
        await ask(upstream)
        held = await upstream.ask(upstream.base, "POST", "/x", [], b"{}")
        await upstream.aclose()
        await until(lambda: provider.open == 0)
        assert await held.chunk() == b"half"
        with pytest.raises(UpstreamUnreachable):
            await held.chunk()
        await held.aclose()
