"""Answers that break or come early, which the provider of tests/e2e/test_passthrough.py cannot do."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy

SECONDS = 10


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Give the address of a server that reads the head of a request, says these bytes and hangs up."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(SECONDS)
                head = b""
                while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
                    head += piece
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # or what is unread would reset the connection
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
def test_an_answer_that_breaks_breaks_for_the_client_too(serve: Serve, answer: bytes) -> None:
    with answering(answer) as base:
        proxy = serve(upstream={"base_url": base})
        got = b""
        with (  # noqa: PT012 - it breaks on the way
            pytest.raises(httpx.RemoteProtocolError),
            proxy.client.stream("GET", "/v1/files/f/content") as response,
        ):
            assert response.status_code == 200
            for piece in response.iter_raw():
                got += piece
    assert got == b"half"


def test_not_modified_says_how_long_a_body_is_that_it_does_not_have(serve: Serve) -> None:
    with answering(b'HTTP/1.1 304 Not Modified\r\nContent-Length: 100\r\nETag: "a"\r\n\r\n') as base:
        proxy = serve(upstream={"base_url": base})
        for _ in range(2):  # the connection is kept
            answer = proxy.client.get("/v1/files/a", headers={"if-none-match": '"a"'})
            assert (answer.status_code, answer.headers["etag"], answer.content) == (304, '"a"', b"")


def test_an_answer_before_the_end_of_the_upload_is_told(serve: Serve) -> None:
    with answering(b"HTTP/1.1 413 Large\r\nContent-Length: 8\r\n\r\ntoo much") as base:
        proxy = serve(upstream={"base_url": base})
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=SECONDS)
        connection.putrequest("POST", "/v1/files")
        connection.putheader("content-length", "1000")
        connection.endheaders(b"first piece")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (413, b"too much")
        connection.close()


def test_a_client_that_leaves_during_its_upload_harms_nobody(serve: Serve) -> None:
    with answering(b"") as base:
        proxy = serve(upstream={"base_url": base})
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nfirst")
        assert proxy.get("/healthz") == {"status": "ok"}


def test_nobody_is_let_in_by_another_path(serve: Serve) -> None:
    proxy: Proxy = serve(
        auth={"mode": "keys", "keys": [{"key": "key-of-anne-0123", "tenant": "t"}], "admin_key": "key-of-the-admin"}
    )
    for key, status in (("wrong", 401), ("key-of-the-admin", 403)):
        answer = proxy.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})
