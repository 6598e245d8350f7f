"""Connections to the provider through an operator's own certificate authority and an HTTP proxy."""

from __future__ import annotations

import base64
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import httpx
import pytest

from tests.support.metered import Metered
from tests.support.served import ROOT, SECONDS, Served, config_file
from tests.support.stores import empty_store

TLS = ROOT / "tests" / "data" / "tls"


class Encrypted(Metered):
    """The provider, behind TLS."""

    def __init__(self) -> None:
        super().__init__()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.base_url = self.base_url.replace("http://", "https://")


class Tunnel(ThreadingTCPServer):
    """An HTTP proxy with authentication. It tunnels every request to the same port, whatever the target is."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.lines: list[str] = []
        tunnel = self

        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                line = self.rfile.readline().decode().strip()
                headers = list(iter(lambda: self.rfile.readline().decode().strip(), ""))
                tunnel.lines.append(line)
                name = "Basic " + base64.b64encode(b"anne:secret").decode()
                if not any(header.lower() == f"proxy-authorization: {name}".lower() for header in headers):
                    self.wfile.write(b"HTTP/1.1 407 Who?\r\nContent-Length: 0\r\n\r\n")
                    return
                with socket.create_connection(("127.0.0.1", port)) as other:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                    pair = [self.connection, other]
                    while True:
                        for ready in select.select(pair, [], [])[0]:
                            data = ready.recv(65536)
                            if not data:
                                return
                            pair[ready is self.connection].sendall(data)

        super().__init__(("127.0.0.1", 0), Handler)
        self.port: int = self.server_address[1]


@pytest.fixture
def provider() -> Iterator[Encrypted]:
    with Encrypted() as made:
        yield made


@pytest.fixture
def tunnel(provider: Encrypted) -> Iterator[Tunnel]:
    made = Tunnel(int(provider.base_url.rpartition(":")[2].partition("/")[0]))
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def asked(folder: Path, provider: Encrypted, store_url: str, **upstream: Any) -> list[httpx.Response]:
    """Send one request in each API through a proxy with these settings."""
    sections = {"upstream": {"anthropic_base_url": provider.base_url, **upstream}}
    said = [{"role": "user", "content": "hi"}]
    with Served(config_file(folder, provider, store_url, **sections)).wait() as served:
        return [
            httpx.post(
                f"{served.url}{path}",
                json={"model": "m", "max_tokens": 9, field: said},
                trust_env=False,
                timeout=SECONDS,
            )
            for path, field in (
                ("/v1/chat/completions", "messages"),
                ("/v1/responses", "input"),
                ("/v1/messages", "messages"),
            )
        ]


def test_an_authority_of_ones_own_is_trusted_where_it_is_named(tmp_path: Path, provider: Encrypted) -> None:
    store = empty_store(tmp_path / "s.db")
    assert [answer.status_code for answer in asked(tmp_path, provider, store, ca=str(TLS / "ca.pem"))] == [200] * 3
    refused = asked(tmp_path, provider, store)
    assert [answer.status_code for answer in refused] == [502] * 3
    assert "certificate" in refused[0].text


def test_all_goes_through_the_proxy_that_is_named(tmp_path: Path, provider: Encrypted, tunnel: Tunnel) -> None:
    store, ca = empty_store(tmp_path / "s.db"), str(TLS / "ca.pem")
    way = {"proxy": f"http://anne:secret@127.0.0.1:{tunnel.port}", "base_url": "https://provider.example/v1"}
    way["anthropic_base_url"] = way["base_url"]
    answers = asked(tmp_path, provider, store, ca=ca, **way)
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    assert set(tunnel.lines) == {"CONNECT provider.example:443 HTTP/1.1"}
    assert all(headers["host"] == "provider.example" for headers in provider.headers)
    assert not any("proxy-authorization" in headers for headers in provider.headers)
    refused = asked(tmp_path, provider, store, ca=ca, **way | {"proxy": f"http://127.0.0.1:{tunnel.port}"})
    assert [answer.status_code for answer in refused] == [502] * 3
    assert "407" in refused[0].text
