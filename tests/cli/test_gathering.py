"""What is written in one turn of the event loop goes out by one call."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import uvicorn

from proxy.cli.gathering import Gathering, GatheringProtocol
from proxy.cli.serving import server_config
from proxy.config import Settings

pytestmark = pytest.mark.anyio


class _Transport:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.told.append(data)

    def close(self) -> None:
        self.told.append("close")
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def set_protocol(self, protocol: object) -> None:
        self.told.append(protocol)

    def get_extra_info(self, name: str) -> str:
        return f"the {name}"


def _made() -> tuple[_Transport, Gathering]:
    transport = _Transport()
    return transport, Gathering(cast("asyncio.Transport", transport), asyncio.get_running_loop())


async def test_what_is_written_in_one_turn_is_one_call() -> None:
    transport, gathering = _made()
    for data in (b"head ", b"body"):
        gathering.write(data)
    assert transport.told == []
    await asyncio.sleep(0)
    gathering.write(b"next")
    await asyncio.sleep(0)
    assert transport.told == [b"head body", b"next"]


async def test_much_is_not_put_together_with_more() -> None:
    transport, gathering = _made()
    much = b"x" * 65_536
    gathering.write(much)
    assert transport.told == [much]
    gathering.write(b"head ")
    gathering.write(much)
    gathering.write(b"after")
    await asyncio.sleep(0)
    assert transport.told == [much, b"head " + much, b"after"]


async def test_what_waits_goes_before_the_end() -> None:
    transport, gathering = _made()
    gathering.write(b"last")
    gathering.close()
    await asyncio.sleep(0)
    assert transport.told == [b"last", "close"]


async def test_what_waits_goes_before_another_protocol() -> None:
    transport, gathering = _made()
    gathering.write(b"last")
    other = asyncio.Protocol()
    gathering.set_protocol(other)
    assert transport.told == [b"last", other]


async def test_what_waits_for_a_connection_that_is_gone_is_dropped() -> None:
    transport, gathering = _made()
    gathering.write(b"late")
    transport.closing = True
    await asyncio.sleep(0)
    assert transport.told == []


async def test_all_else_is_the_transports() -> None:
    _, gathering = _made()
    assert gathering.get_extra_info("peername") == "the peername"


def test_the_server_serves_so() -> None:
    config: uvicorn.Config = server_config(Settings())
    config.load()
    assert config.http_protocol_class is GatheringProtocol
