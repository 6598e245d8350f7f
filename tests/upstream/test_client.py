"""The upstream client against a server of raw bytes: fidelity, errors, limits."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp.connector
import pytest

from proxy.config import UpstreamSettings
from proxy.errors import UpstreamBusy, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream import Answer, Destination, Upstream, connections
from proxy.upstream.client import AnswerMemory
from tests.upstream.wire import OK, Provider, ask, connected, listening, until, with_header

pytestmark = pytest.mark.anyio

TLS = Path(__file__).parents[1] / "data" / "tls"
HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"


@pytest.fixture(autouse=True)
def no_proxy_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    connections.origin_of.cache_clear()


# ------------------------------------------------------------------------------------ requests as given


@pytest.mark.parametrize(
    ("method", "content", "added"),
    [
        ("GET", b"", []),
        ("HEAD", b"", []),
        ("OPTIONS", b"", []),
        ("DELETE", b"", [(b"Content-Length", b"0")]),
        ("POST", b"", [(b"Content-Length", b"0")]),
        ("POST", b"{}", [(b"Content-Length", b"2")]),
        ("PATCH", b"{}", [(b"Content-Length", b"2")]),
    ],
)
async def test_no_header_is_added_but_the_length(method: str, content: bytes, added: Any) -> None:
    provider = Provider(OK.replace(b"ok", b"") if method == "HEAD" else OK)
    async with connected(provider) as upstream:
        await ask(upstream, method, content=content)
    assert (provider.sent, provider.body) == (added, content)


async def test_request_headers_keep_case_order_repetitions_and_utf_8() -> None:
    given = [
        (b"Authorization", b"Bearer k"),
        (b"X-B", b"1"),
        (b"x-a", b"two  words"),
        (b"X-B", b"2"),
        (b"X-U", "grün 蓝".encode()),
    ]
    async with connected(provider := Provider(OK)) as upstream:
        await ask(upstream, headers=given)
    assert provider.sent == [*given, (b"Content-Length", b"2")]
    assert provider.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % provider.port)


async def test_a_header_outside_utf_8_is_taken_for_latin_1() -> None:
    async with connected(provider := Provider(OK)) as upstream:
        await ask(upstream, headers=[(b"X-U", "grün".encode()), (b"X-L", b"gr\xfcn")])
    assert provider.sent[:2] == [(b"X-U", "grün".encode()), (b"X-L", "grün".encode())]


@pytest.mark.parametrize("value", [b"a\r\nX-More: b", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_header_cannot_become_two(value: bytes) -> None:
    async with connected(provider := Provider(OK)) as upstream:
        with pytest.raises(ValueError, match="control character"):
            await ask(upstream, headers=[(b"X", value)])
    assert provider.requests == []


@pytest.mark.parametrize(
    "path", ["/a%2Fb", "/%7Ea", "/a//b/../c/", "/x?q=%20+%2b&&=", "/x?", "/%E4%BD%A0", "/a:b@c!$&'()*+,;=", "/%zz"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_target_is_not_quoted_again(method: str, path: str) -> None:
    async with connected(provider := Provider(OK)) as upstream:
        await ask(upstream, method, path, content=b"")
    lines = {f"{method} /v1{each} HTTP/1.1".encode() for each in (path, path.rstrip("?"))}
    assert provider.line in lines


async def test_bytes_that_no_url_may_hold_are_quoted_and_a_fragment_is_dropped() -> None:
    async with connected(provider := Provider(OK)) as upstream:
        await ask(upstream, path="/files/%7E\xe4?q=\xff#part")
    assert provider.line == b"POST /v1/files/%7E%E4?q=%FF HTTP/1.1"


@pytest.mark.parametrize("size", [0, 60_000, 3_000_000])
async def test_a_body_goes_whole_whatever_its_size(size: int) -> None:
    async with connected(provider := Provider(OK)) as upstream:
        assert (await ask(upstream, content=b"a" * size))[1] == b"ok"
    assert provider.sent == [(b"Content-Length", b"%d" % size)]
    assert provider.body == b"a" * size


async def _pieces() -> AsyncIterator[bytes]:
    yield b"first"
    yield b"second"


async def test_a_body_of_unknown_length_goes_in_chunks() -> None:
    async with connected(provider := Provider(OK)) as upstream:
        await ask(upstream, content=_pieces())
    assert provider.sent == [(b"Transfer-Encoding", b"chunked")]
    assert provider.body == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"


async def test_a_body_of_known_length_goes_plain_piece_by_piece() -> None:
    async with connected(provider := Provider(OK)) as upstream:
        await ask(upstream, headers=[(b"content-length", b"11")], content=_pieces())
    assert [(name.lower(), value) for name, value in provider.sent] == [(b"content-length", b"11")]
    assert provider.body == b"firstsecond"


async def test_a_body_that_breaks_off_is_an_error() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"first"
        raise ConnectionResetError

    async with connected(Provider(OK)) as upstream:
        with pytest.raises(UpstreamUnreachable):
            await ask(upstream, content=broken())


async def test_no_cookie_is_kept_for_the_next_tenant() -> None:
    async with connected(provider := Provider(with_header(OK, b"Set-Cookie: a=b; Path=/"))) as upstream:
        for _ in range(2):
            await ask(upstream)
    assert b"ookie" not in provider.requests[1]


@pytest.mark.parametrize("machine", ["machine 127.0.0.1", "default"])
async def test_netrc_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str) -> None:
    file = tmp_path / "netrc"
    file.write_text(f"{machine} login anne password secret\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    async with connected(provider := Provider(OK)) as upstream:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{provider.port}")
        await ask(upstream)
    assert provider.line.startswith(b"POST http://")
    assert b"uthorization" not in provider.requests[0]


# -------------------------------------------------------------------------- a proxy of the environment


@pytest.mark.parametrize("written", ["http://127.0.0.1:{}", "127.0.0.1:{}", "http://anne:secret@127.0.0.1:{}/"])
async def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    async with connected(provider := Provider(OK), base_url="http://provider.example:81/v1") as upstream:
        monkeypatch.setenv("http_proxy", written.format(provider.port))
        await ask(upstream, path="/a%2Fb")
    assert provider.line == b"POST http://provider.example:81/v1/a%2Fb HTTP/1.1"
    assert (b"Basic YW5uZTpzZWNyZXQ=" in provider.requests[0]) == ("anne" in written)


async def test_a_proxy_is_asked_for_a_tunnel_to_an_encrypted_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Provider(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    async with connected(provider, base_url="https://provider.example/v1") as upstream:
        monkeypatch.setenv("HTTPS_PROXY", f"http://anne:secret@127.0.0.1:{provider.port}")
        with pytest.raises(UpstreamUnreachable) as raised:
            await ask(upstream, headers=[(b"X-Secret", b"k")])
    assert raised.value.message == (
        f"Could not connect to provider.example:443 through the proxy 127.0.0.1:{provider.port} (HTTP 403). "
        "Check HTTP_PROXY, HTTPS_PROXY and NO_PROXY."
    )
    assert provider.line.startswith(b"CONNECT provider.example:443 ")
    assert not any(b"X-Secret" in request for request in provider.requests)


@pytest.mark.parametrize(
    ("proxy", "cause"),
    [("http://nobody.invalid:8", "the host name is not known"), ("http://a..b:8", "the host name is invalid")],
)
async def test_a_proxy_of_the_configuration_that_cannot_be_reached_is_named(proxy: str, cause: str) -> None:
    settings = UpstreamSettings(base_url="http://provider.example/v1", proxy=proxy)
    upstream = Upstream(settings, shares_key=False)
    with pytest.raises(UpstreamUnreachable) as raised:
        await ask(upstream)
    through = f"Could not connect to provider.example:80 through the proxy {proxy.removeprefix('http://')} ({cause})."
    assert raised.value.message == f"{through} Check upstream.proxy."
    await upstream.aclose()


async def test_a_proxy_of_the_environment_that_is_none_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://anne:secret@host:port")
    upstream = Upstream(UpstreamSettings(base_url="http://other.example/v1"), shares_key=False)
    with pytest.raises(UpstreamUnreachable, match=r"HTTPS_PROXY is no address") as raised:
        await ask(upstream)
    assert "secret" not in raised.value.message
    await upstream.aclose()


@pytest.mark.parametrize(
    ("exempt", "direct"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:{}", True),
        ("*", True),
        ("other.example, 127.0.0.1", True),
        ("127.0.0.1:1", False),
        ("other.example", False),
    ],
)
async def test_no_proxy_names_hosts_and_ports(monkeypatch: pytest.MonkeyPatch, exempt: str, *, direct: bool) -> None:
    async with connected(provider := Provider(OK)) as upstream:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{provider.port}")
        monkeypatch.setenv("no_proxy", exempt.format(provider.port))
        await ask(upstream)
    assert provider.line.startswith(b"POST /v1/x" if direct else b"POST http://")


# ------------------------------------------------------------------------------------ answers as they come


async def test_answer_headers_come_as_they_are() -> None:
    lines = (b"Set-Cookie: a=1", b"set-cookie: b=2", b"X-Raw: \xff\xfe", b"X-Empty:", b"X-Space:  two  words \t")
    async with connected(Provider(with_header(OK, *lines))) as upstream:
        answer, _ = await ask(upstream)
    assert answer.headers == [
        (b"Content-Length", b"2"),
        (b"Set-Cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"X-Raw", b"\xff\xfe"),
        (b"X-Empty", b""),
        (b"X-Space", b"two  words"),
    ]
    assert (answer.header(b"set-cookie"), answer.header(b"x-raw")) == (b"a=1", b"\xff\xfe")
    assert answer.header(b"x-none") is None


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;ext=1\r\nthis\r\n3\r\n is\r\n0\r\nX-T: t\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "body", "connections"),
    [
        (OK, b"ok", 1),
        (CHUNKED, b"this is", 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok", 1),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK, b"ok", 1),
        (with_header(OK, b"Connection: close"), b"ok", 2),
        (OK.replace(b"1.1", b"1.0"), b"ok", 2),
        (OK.replace(b"2\r\n\r\nok", b"0\r\n\r\n"), b"", 1),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", 1),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end" + Provider.CUT, b"to the end", 2),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end" + Provider.CUT, b"to the end", 2),
    ],
)
async def test_an_answer_ends_where_it_says(answer: bytes, body: bytes, connections: int) -> None:
    async with connected(provider := Provider(answer)) as upstream:
        for _ in range(2):
            assert (await ask(upstream))[1] == body
    assert provider.connections == connections


async def test_each_chunk_of_a_stream_comes_at_once() -> None:
    async with connected(
        provider := Provider(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nd0\r\n")
    ) as upstream:
        answer = await upstream.ask(upstream.base, "POST", "/x", [], b"{}")
        chunks = [await answer.chunk()]
        for piece in (b"d1", b"d2"):
            provider.writers[0].write(b"2\r\n" + piece + b"\r\n")
            chunks.append(await asyncio.wait_for(answer.chunk(), 5))
            assert not answer.ended
        provider.writers[0].write(b"0\r\n\r\n")
        assert (chunks, await answer.chunk(), answer.ended) == ([b"d0", b"d1", b"d2"], b"", True)
        await answer.aclose()


async def test_an_answer_whose_length_is_known_has_ended_with_its_last_byte() -> None:
    async with connected(Provider(OK)) as upstream:
        answer = await upstream.ask(upstream.base, "POST", "/x", [], b"{}")
        body = b""
        while len(body) < 2:
            assert not answer.ended
            body += await answer.chunk()
        assert (body, answer.ended) == (b"ok", True)
        assert await answer.chunk() == b""
        await answer.aclose()


async def test_redirects_and_encodings_are_left_to_the_client() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Encoding: gzip\r\n"
    async with connected(Provider(moved + b"Content-Length: 2\r\n\r\nxx")) as upstream:
        answer, body = await ask(upstream)
    assert (answer.status, body) == (302, b"xx")


async def test_an_encoded_answer_can_be_read_plain() -> None:
    body = gzip.compress(b'{"a":1}')
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: GZip\r\nContent-Length: %d\r\n\r\n" % len(body)
    broken = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx"
    async with connected(Provider(head + body, broken)) as upstream:
        answer = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        assert (answer.encoding, answer.readable) == (b"gzip", True)
        assert await answer.read() == await answer.read() == b'{"a":1}'
        await answer.aclose()
        answer = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        with pytest.raises(UpstreamUnreachable, match="encoded"):
            await answer.read()
        await answer.aclose()


async def test_an_encoded_answer_may_come_in_pieces_that_hold_nothing_yet() -> None:
    body = gzip.compress(b'{"a":1}')
    data = b"\x1f\x8b\x08\x08" + bytes(4) + b"\0\xff" + b"n" * 3000 + b"\0" + body[10:]
    pieces = [data[at : at + 1] for at in range(len(data))]

    class Content:
        async def readany(self) -> bytes:
            return pieces.pop(0) if pieces else b""

        def at_eof(self) -> bool:
            return not pieces

    response: Any = SimpleNamespace(
        status=200, raw_headers=(), headers={"content-encoding": "gzip"}, content=Content(), close=lambda: None
    )
    answer = Answer(response, lambda why: UpstreamUnreachable(str(why)), AnswerMemory())
    assert await answer.read() == b'{"a":1}'


@pytest.mark.parametrize("rest", [b"", bytes(40)], ids=["ends", "padded"])
async def test_an_encoded_answer_in_several_members_is_read_to_its_last_one(rest: bytes) -> None:
    body = gzip.compress(b'{"a":') + gzip.compress(b"1}") + rest
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with connected(Provider(head + body)) as upstream:
        answer = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        assert await answer.read() == b'{"a":1}'
        await answer.aclose()


async def test_an_unknown_encoding_is_not_undone() -> None:
    async with connected(Provider(with_header(OK, b"Content-Encoding: br"))) as upstream:
        answer = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        assert (answer.encoding, answer.readable, await answer.read()) == (b"br", False, b"ok")
        await answer.aclose()


async def test_a_header_of_60_kb_is_taken_and_one_of_70_kb_is_not() -> None:
    for size in (60_000, 70_000):
        async with connected(Provider(with_header(OK, b"X-Large: " + b"a" * size))) as upstream:
            if size == 60_000:
                answer, body = await ask(upstream)
                assert (answer.header(b"x-large"), body) == (b"a" * size, b"ok")
            else:
                with pytest.raises(UpstreamUnreachable, match="valid HTTP"):
                    await ask(upstream)


@pytest.mark.parametrize(
    "answer",
    [
        HALF,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf",
    ],
)
async def test_all_that_came_before_a_break_is_given(answer: bytes) -> None:
    async with connected(provider := Provider(answer + Provider.CUT)) as upstream:
        received = await upstream.ask(upstream.base, "POST", "/x", [], b"{}")
        await until(lambda: not provider.open)
        await asyncio.sleep(0.02)  # the break has come before the body is read
        assert await received.chunk() == b"half"
        for _ in range(2):
            with pytest.raises(UpstreamUnreachable, match="Connection lost"):
                await received.chunk()
        await received.aclose()


async def test_a_body_that_becomes_invalid_ends_in_an_error() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"
    async with connected(provider := Provider(head)) as upstream:
        received = await upstream.ask(upstream.base, "POST", "/x", [], b"{}")
        assert await received.chunk() == b"half"
        provider.writers[0].write(b"xyz\r\n")
        with pytest.raises(UpstreamUnreachable, match="Connection lost"):
            await asyncio.wait_for(received.chunk(), 5)
        await received.aclose()


async def test_an_answer_may_have_hundreds_of_headers() -> None:
    async with connected(Provider(with_header(OK, *[b"X-%d: a" % number for number in range(900)]))) as upstream:
        answer, body = await ask(upstream)
    assert (len(answer.headers), body) == (901, b"ok")


async def test_a_slow_reader_makes_the_upstream_wait() -> None:
    size = 20_000_000
    async with connected(
        provider := Provider(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"a" * size), read_timeout=0.3
    ) as upstream:
        answer = await upstream.ask(upstream.base, "POST", "/x", [], b"{}")
        await asyncio.sleep(0.5)  # longer than read_timeout: the upstream is not to blame
        transport = provider.writers[0].transport
        assert transport.get_write_buffer_size() > 0
        assert len(await answer.read()) == size
        await answer.aclose()


async def test_an_answer_before_the_end_of_the_request_is_read() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(60)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK.replace(b"200 OK", b"413 Large"))
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    upstream = Upstream(UpstreamSettings(base_url=url), shares_key=False)
    answer, body = await asyncio.wait_for(ask(upstream, content=pieces()), 5)
    assert (answer.status, body) == (413, b"ok")
    await upstream.aclose()
    server.close()


# -------------------------------------------------------------------------------------- errors and limits


async def test_silence_before_and_during_the_answer_is_a_time_out() -> None:
    for answer in (None, b"HTTP/1.1 200", HALF):
        async with connected(provider := Provider(answer), read_timeout=0.1) as upstream:
            with pytest.raises(UpstreamTimeout) as raised:
                await ask(upstream)
            assert raised.value.message == (
                f"127.0.0.1:{provider.port} was silent for 0.1 s. Try again, or raise upstream.read_timeout."
            )


async def test_a_server_that_does_not_read_the_request_is_a_time_out() -> None:
    finished = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await finished.wait()

    server = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1024)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    upstream = Upstream(UpstreamSettings(base_url=url, read_timeout=0.2), shares_key=False)
    with pytest.raises(UpstreamTimeout):
        await asyncio.wait_for(ask(upstream, content=b"a" * 30_000_000), 5)
    await upstream.aclose()
    finished.set()
    writers[0].transport.abort()
    server.close()


async def test_after_an_informational_head_the_time_is_limited_too() -> None:
    finished = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await finished.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    upstream = Upstream(UpstreamSettings(base_url=url, read_timeout=0.2), shares_key=False)
    with pytest.raises(UpstreamTimeout):
        await asyncio.wait_for(ask(upstream), 5)
    await upstream.aclose()
    finished.set()
    server.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "Connection lost"),
        (b"nonsense\r\n\r\n", "valid HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Le" + Provider.CUT, "Connection lost|valid HTTP"),
        (OK + b"nonsense", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nxyz\r\n", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nok", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: a\x1bb\r\nContent-Length: 0\r\n\r\n", "valid HTTP"),
        (b"HTTP/1.1 600 Odd\r\nContent-Length: 0\r\n\r\n", "valid HTTP"),
        (b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 2000 + b"\r\n", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 1_000_000, "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + (b"X: " + b"a" * 60_000 + b"\r\n") * 30 + b"\r\n", "valid HTTP"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50_000 + OK, "valid HTTP"),
    ],
)
async def test_what_is_no_answer_is_an_error_that_names_the_upstream(answer: bytes, words: str) -> None:
    async with connected(provider := Provider(answer)) as upstream:
        with pytest.raises(UpstreamUnreachable, match=words) as raised:
            await ask(upstream, path="/x?key=secret")
        assert f"127.0.0.1:{provider.port}" in raised.value.message
        assert "secret" not in raised.value.message


async def test_a_refused_connection_names_host_port_and_cause() -> None:
    async with listening(provider := Provider()):
        pass
    upstream = Upstream(UpstreamSettings(base_url=f"http://127.0.0.1:{provider.port}/v1/secret"), shares_key=False)
    for method in ("GET", "POST"):
        with pytest.raises(UpstreamUnreachable) as raised:
            await ask(upstream, method, "/x?key=secret")
        assert raised.value.message == (
            f"Could not connect to 127.0.0.1:{provider.port} (connection refused). Check upstream.base_url."
        )
    url = f"http://localhost:{provider.port}"
    route = Destination(base_url=url, authorization=None, forwards_credentials=False, setting="s")
    with pytest.raises(UpstreamUnreachable, match=r"to localhost:\d+ \(connection refused\)\. Check s\."):
        await upstream.ask(route, "POST", "/x", [], b"")
    await upstream.aclose()


@pytest.mark.parametrize("host", ["nobody.invalid", "a..b", ".a", "a" * 64 + ".example"])
async def test_an_unknown_host_is_unreachable(host: str) -> None:
    upstream = Upstream(UpstreamSettings(base_url=f"http://{host}/v1"), shares_key=False)
    with pytest.raises(UpstreamUnreachable, match=r"the host name is (invalid|not known)\)|not a URL"):
        await ask(upstream)
    await upstream.aclose()


async def test_a_connection_that_does_not_come_is_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", never)
    async with connected(provider := Provider(OK), connect_timeout=0.05) as upstream:
        with pytest.raises(UpstreamTimeout) as raised:
            await ask(upstream)
    assert raised.value.message.startswith(f"Could not connect to 127.0.0.1:{provider.port} within 0.05 s. ")


async def test_beyond_max_connections_a_request_waits_and_is_then_refused() -> None:
    async with connected(Provider(HALF), max_connections=1, connect_timeout=0.2) as upstream:
        held = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        with pytest.raises(UpstreamBusy, match=r"All 1 connections .* upstream\.max_connections"):
            await upstream.ask(upstream.base, "GET", "/x", [], b"")
        await held.aclose()
        await held.aclose()  # a second time gives back nothing more
        answer = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        await answer.aclose()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate that names localhost, signed by itself, with its key in one file."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("there is no openssl to make a certificate with")
    made = tmp_path / "both.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", str(made), "-out", str(tmp_path / "certificate.pem")]
    subprocess.run([program, *words.split(), *files], check=True, capture_output=True)  # noqa: S603 - no stranger's
    made.write_bytes(made.read_bytes() + (tmp_path / "certificate.pem").read_bytes())
    return made


@pytest.mark.parametrize(
    ("host", "trusted", "problem"),
    [
        ("localhost", True, ""),
        ("127.0.0.1", False, "not valid for '127.0.0.1'"),
        ("localhost", False, "self.signed certificate"),
    ],
)
async def test_tls_needs_a_trusted_certificate_that_names_the_host(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, host: str, problem: str, *, trusted: bool
) -> None:
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate)
    ours = ssl.create_default_context()
    if trusted or host != "localhost":
        ours.load_verify_locations(certificate)
    monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", ours)
    async with listening(Provider(OK), tls=theirs) as provider:
        upstream = Upstream(UpstreamSettings(base_url=f"https://{host}:{provider.port}/v1"), shares_key=False)
        if trusted:
            for _ in range(2):
                assert (await ask(upstream))[1] == b"ok"
            assert provider.connections == 1
        else:
            refused = f"certificate is refused: .*{problem}.*Check upstream.base_url and upstream.ca"
            with pytest.raises(UpstreamUnreachable, match=refused):
                await ask(upstream)
        await upstream.aclose()


async def test_an_authority_of_ones_own_may_issue_certificates_without_key_usage_and_identifiers() -> None:
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(TLS / "older-server.pem", TLS / "server.key")
    async with listening(Provider(OK), tls=theirs) as provider:
        base_url = f"https://127.0.0.1:{provider.port}/v1"
        upstream = Upstream(UpstreamSettings(base_url=base_url, ca=TLS / "older-ca.pem"), shares_key=False)
        assert (await ask(upstream))[1] == b"ok"
        await upstream.aclose()


# ------------------------------------------------------------------------------------ where requests go


async def test_a_route_takes_its_models_with_its_own_key_and_never_the_clients() -> None:
    routes = [
        {"models": ["deepseek-*"], "base_url": "http://a.example/v1", "api_key": "ka"},
        {"models": ["local-?"], "base_url": "http://b.example"},
    ]
    upstream = Upstream(UpstreamSettings(routes=routes), shares_key=False)  # type: ignore[arg-type] # pydantic makes them
    first, second, base = (upstream.destination(model) for model in ("deepseek-v4", "local-1", "gpt"))
    assert (first.base_url, first.authorization, first.forwards_credentials) == (
        "http://a.example/v1",
        b"Bearer ka",
        False,
    )
    assert (second.authorization, second.forwards_credentials) == (None, False)
    assert (base.authorization, base.forwards_credentials) == (None, True)
    assert (first.forwards_query, second.forwards_query, base.forwards_query) == (False, False, True)
    await upstream.aclose()


async def test_a_key_of_the_proxys_own_never_leaves_it() -> None:
    shared = Upstream(UpstreamSettings(), shares_key=True)
    own = Upstream(UpstreamSettings(api_key="sk"), shares_key=False)  # type: ignore[arg-type] # pydantic makes it
    assert not shared.base.forwards_credentials
    assert (own.base.authorization, own.base.forwards_credentials) == (b"Bearer sk", False)
    await shared.aclose()
    await own.aclose()


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://a.example/v1", "a.example:80"),
        ("https://a.example", "a.example:443"),
        ("https://a.example:8443/a%20b", "a.example:8443"),
        ("http://[::1]:81/v1", "[::1]:81"),
        ("http://anne:secret@a.example/v1?key=k", "a.example:80"),
    ],
)
def test_the_name_of_an_origin_is_its_host_and_port(url: str, name: str) -> None:
    assert connections.origin_of(url).name == name
