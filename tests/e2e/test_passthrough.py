"""Every other path below /v1 is forwarded unchanged, in both directions."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until

BINARY = bytes(range(256)) * 300


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve()


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
def test_every_method(proxy: Proxy, upstream: Upstream, method: str) -> None:
    answer = proxy.client.request(method, "/v1/files/f1?a=1&a=2&b=%2F+", headers={"x-session-id": "s", "x-own": "1"})
    assert answer.status_code == 200
    received = upstream.last
    assert (received.method, received.target, received.query) == (method, "/v1/files/f1", "a=1&a=2&b=%2F+")
    assert received.header("authorization") == "Bearer sk-test"
    assert received.header("x-own") == "1"
    assert "x-session-id" not in received.names
    assert "accept-encoding" in received.names  # forwarded, since the proxy does not read the answer
    assert (answer.content == b"") == (method == "HEAD")


def test_a_browser_may_ask_without_a_key_whether_a_page_may_send_one(serve: Serve, upstream: Upstream) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    target = "/v1/chat/completions"

    def status(proxy: Proxy, headers: dict[str, str]) -> int:
        return httpx.options(proxy.url + target, headers=headers).status_code

    own_keys = serve(auth={"mode": "passthrough"})
    assert [status(own_keys, asks), status(own_keys, {"origin": asks["origin"]})] == [200, 401]
    assert (upstream.last.method, upstream.last.target) == ("OPTIONS", target)
    assert "authorization" not in upstream.last.names
    shared = serve(upstream={"api_key": "sk-own"}, auth={"mode": "keys", "keys": [{"key": "k" * 16, "tenant": "t"}]})
    assert status(shared, asks) == 401


@pytest.mark.parametrize(
    "target", ["/v1/files/a%2Fb%20c", "/v1/x/%C3%BC/%E4%BD%A0", "/v1/a//b/", "/v1/x/../y", "/v1/@:+,;=!*'()"]
)
def test_paths_are_not_requoted(proxy: Proxy, upstream: Upstream, target: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port)
    connection.request("GET", target + "?q=%7e", headers={"authorization": "Bearer k"})
    assert connection.getresponse().status == 200
    connection.close()
    assert (upstream.last.target, upstream.last.query) == (target, "q=%7e")


@pytest.mark.parametrize("size", [0, 1, len(BINARY)])
def test_binary_bodies_both_ways(proxy: Proxy, upstream: Upstream, size: int) -> None:
    body = BINARY[:size]
    answer = proxy.client.post("/v1/mirror", content=body, headers={"content-type": "audio/x-raw; a=b"})
    assert upstream.last.body == answer.content == body
    assert answer.headers["content-type"] == "audio/x-raw; a=b"
    assert answer.headers["content-length"] == str(size)
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert answer.headers["x-custom"] == "yes"
    # Cookies are between provider and client: the proxy keeps none.
    proxy.client.cookies.clear()
    proxy.client.get("/v1/mirror")
    assert "cookie" not in upstream.last.names


def test_a_body_of_unknown_length_goes_up_as_it_comes(proxy: Proxy, upstream: Upstream) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"first"
        until(lambda: upstream.uploaded == len(b"first"), "the provider has the first piece")
        yield b"second"

    answer = proxy.client.post("/v1/mirror", content=pieces())
    assert answer.content == b"firstsecond"
    assert upstream.last.header("transfer-encoding") == "chunked"


def test_an_answer_comes_down_as_it_comes(proxy: Proxy, upstream: Upstream) -> None:
    with proxy.client.stream("GET", "/v1/ticks") as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"tick\n"
        upstream.gate.set()
        assert b"".join(pieces) == b"tock\n"


def test_a_client_that_leaves_frees_the_provider(proxy: Proxy, upstream: Upstream) -> None:
    with proxy.client.stream("GET", "/v1/ticks") as answer:
        next(answer.iter_bytes())
    until(lambda: upstream.left == 1 and upstream.open == 0, "the provider is free")


def test_redirects_are_the_clients_affair(proxy: Proxy, upstream: Upstream) -> None:
    answer = proxy.client.get("/v1/moved")
    assert (answer.status_code, answer.headers["location"]) == (307, "/v1/mirror")
    assert len(upstream.log) == 1


def test_a_get_of_chat_completions_is_passed_on(proxy: Proxy, upstream: Upstream) -> None:
    proxy.client.get("/v1/chat/completions?limit=2")
    assert (upstream.last.method, upstream.last.target) == ("GET", "/v1/chat/completions")


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v2/models", "/models", "/v1x", "/favicon.ico", "/sessions/x/y/z"])
def test_what_is_neither_is_ours_to_refuse(proxy: Proxy, upstream: Upstream, path: str) -> None:
    answer = proxy.client.get(path)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert upstream.log == []


def test_many_at_once(proxy: Proxy, upstream: Upstream) -> None:
    def one(number: int) -> None:
        answers[number] = proxy.client.post("/v1/mirror", content=b"%d" % number).content

    answers: dict[int, bytes] = {}
    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: b"%d" % number for number in range(20)}
