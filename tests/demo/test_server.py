from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
import uvicorn

from proxy.demo.server import plain_config, serving
from proxy.errors import PalimpsestError


async def hello(_: MutableMapping[str, Any], __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def broken(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    assert scope["type"] == "lifespan"
    await receive()
    await send({"type": "lifespan.startup.failed", "message": "no"})


def test_it_serves_while_it_is_needed_and_then_no_more() -> None:
    with serving(plain_config(hello)) as address:
        assert httpx.get(address, trust_env=False).text == "hello"
    with pytest.raises(httpx.ConnectError):
        httpx.get(address, trust_env=False)


def test_one_that_does_not_start_is_an_error() -> None:
    config = uvicorn.Config(broken, lifespan="on", log_config=None)
    with pytest.raises(PalimpsestError, match="did not start"), serving(config):
        pass
