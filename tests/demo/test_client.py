from collections.abc import Callable, MutableMapping
from typing import Any

import httpx
import orjson
import pytest
import uvicorn

from proxy.demo.replay import DemoClient, Unanswered, request_body, serving
from proxy.demo.upstream import completion
from proxy.errors import PalimpsestError
from tests.demo.measured import plain

App = Callable[..., Any]


def answering(status: int, body: bytes) -> App:
    async def app(_: MutableMapping[str, Any], __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"X-Exchange-ID", b"e")]})
        await send({"type": "http.response.body", "body": body})

    return app


def test_the_client_gets_the_reply() -> None:
    reply = {"role": "assistant", "content": "Some words."}
    body = completion(0, "m", reply, {"prompt_tokens": 5})
    with serving(plain(answering(200, body))) as address, DemoClient(address, "key", {}) as client:
        answered = client.ask(request_body("m", [], []))
    assert answered.message == reply
    assert answered.usage == {"prompt_tokens": 5}
    assert answered.headers["x-exchange-id"] == "e"


def test_a_refusal_is_an_error() -> None:
    with (
        serving(plain(answering(503, b"busy"))) as address,
        DemoClient(address, "key", {}) as client,
        pytest.raises(Unanswered, match="HTTP 503: busy"),
    ):
        client.ask(request_body("m", [], []))


def test_the_client_reads_paths_outside_the_api() -> None:
    async def app(scope: MutableMapping[str, Any], _: Any, send: Any) -> None:
        said = {"path": scope["path"], "key": dict(scope["headers"])[b"authorization"].decode()}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": orjson.dumps(said)})

    with serving(plain(app)) as address, DemoClient(f"{address}/v1", "key", {}) as client:
        assert client.read("/sessions/demo") == {"path": "/sessions/demo", "key": "Bearer key"}


def test_tools_are_sent_only_where_there_are_any() -> None:
    assert "tools" not in orjson.loads(request_body("m", [], []))
    assert orjson.loads(request_body("m", [], [{"a": 1}]))["tools"] == [{"a": 1}]


async def hello(_: MutableMapping[str, Any], __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def broken(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    assert scope["type"] == "lifespan"
    await receive()
    await send({"type": "lifespan.startup.failed", "message": "no"})


def test_a_server_runs_until_the_block_ends() -> None:
    with serving(plain(hello)) as address:
        assert httpx.get(address, trust_env=False).text == "hello"
    with pytest.raises(httpx.ConnectError):
        httpx.get(address, trust_env=False)


def test_a_server_that_does_not_start_is_an_error() -> None:
    config = uvicorn.Config(broken, lifespan="on", log_config=None)
    with pytest.raises(PalimpsestError, match="did not start"), serving(config):
        pass
