"""One chat completion without HTTP before it: what is stored when, and what becomes of its failures.

The whole way, with clients of all kinds, is shown in tests/e2e.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import anyio
import orjson
import pytest
from aiohttp.base_protocol import BaseProtocol
from multidict import CIMultiDict

from proxy.dialects.chat import CHAT
from proxy.errors import UpstreamBusy, UpstreamError
from proxy.pipeline import ClientRequest, settle
from proxy.pipeline.exchange import _is_stream
from proxy.pipeline.settle import settlement_of
from proxy.store import Status
from proxy.upstream import Answer
from proxy.upstream.client import AnswerMemory
from tests.support.house import LONG, Heard, House, opened
from tests.support.upstream import Upstream as Provider

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_is_stored_before_its_end_is_told(house: House, stream: bool) -> None:
    seen: list[tuple[Status, str]] = []

    class _Watching(Heard):
        async def end(self, data: bytes = b"") -> None:
            seen.append(((await house.last()).status, "end"))
            await super().end(data)

        async def write(self, data: bytes) -> None:
            if b"[DONE]" in data:
                seen.append(((await house.last()).status, "done"))
            await super().write(data)

    client = await house.ask(client=_Watching(), stream=stream)
    assert client.ended
    assert seen
    assert {status for status, _ in seen} == {Status.COMPLETE}


async def test_a_request_is_stored_before_its_answer_is_told(house: House) -> None:
    seen: list[Status] = []

    class _Watching(Heard):
        async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
            seen.append((await house.last()).status)
            await super().start(status, headers)

    await house.ask(client=_Watching(), stream=True)
    assert seen == [Status.PENDING]


async def test_usage_that_is_refused_is_asked_for_once(house: House, provider: Provider) -> None:
    for asked in ([True, False], [False]):
        provider.forget()
        client = await house.ask("plain", stream=True)
        assert (client.status, client.got.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert ["stream_options" in request.json for request in provider.log] == asked
    assert (await house.last()).receipt["usage"] is None


async def test_usage_is_not_asked_for_where_the_client_decided(house: House, provider: Provider) -> None:
    client = await house.ask("plain", stream=True, stream_options={"include_usage": False})
    assert (client.status, len(provider.log)) == (422, 1)


async def test_another_refusal_is_told_as_it_is(house: House, provider: Provider) -> None:
    client = await house.ask("echo", stream=True, nonsense=1)
    assert (client.status, len(provider.log)) == (400, 1)
    assert b"nonsense" in client.got


async def test_a_refusal_that_breaks_keeps_no_connection(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: Answer) -> bytes:
        raise UpstreamError("It broke.")

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "read", broken)
        client = await house.ask("plain", stream=True)
    assert client.error is not None
    assert client.error.message == "It broke."
    assert (await house.ask()).status == 200  # there is one connection only


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_exchange_cost_is_told_where_it_is_known(
    provider: Provider, tmp_path: Path, stream: bool
) -> None:
    rules = [{"match": ["echo*"], "prices": {"input": 2, "cached_read": 0.5, "output": 8}}]
    async with opened(provider, tmp_path, models=rules) as house:
        await house.ask(stream=stream)
        usage = (await house.last()).receipt["usage"]
        told = (await house.last()).receipt["cost"]
        assert told == pytest.approx((usage["prompt_tokens"] * 2 + usage["completion_tokens"] * 8) / 1e6)
        await house.ask("say:unknown")
        assert (await house.last()).receipt["cost"] is None
        await house.ask("echo+fault:500")
        assert (await house.last()).receipt["cost"] is None


async def test_one_line_is_logged_of_an_exchange(
    provider: Provider, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = {"trigger": {"tokens": 1_000}, "target": {"ratio": 0.1}, "edits": [{"type": "drop_oldest"}]}
    rules = [{"match": ["echo"], "context_window": 10_000}]
    async with opened(provider, tmp_path, models=rules, policies={"lean": policy}) as house:
        with caplog.at_level(logging.INFO, "palimpsest.exchange"):
            client = await house.ask(messages=[{"role": "system", "content": "You keep count."}, *LONG])
    (record,) = [each for each in caplog.records if each.name == "palimpsest.exchange"]
    told: dict[str, Any] = record.fields  # type: ignore[attr-defined]  # our own
    assert told["window"] == 10_000
    assert told["ratio"] == round(told["tokens_before"] / 10_000, 3)
    assert 0 < told["instructions_tokens"] < 20
    assert (told["messages_before"], told["messages_sent"]) == (
        len(LONG) + 1,
        int(client.headers["x-context-messages-sent"]),
    )
    assert told["budget"] == 1_000
    assert told["tokens_sent"] <= 1_000 < told["tokens_before"]
    saved = 100 * (1 - told["tokens_sent"] / told["tokens_before"])
    assert told["saved_percent"] == round(saved, 1)
    expected = ("s", "first", "complete", "lean", "drop_oldest")
    assert tuple(told[name] for name in ("session", "kind", "status", "policy", "edits")) == expected
    assert told["fired"].startswith("tokens")


async def test_who_leaves_is_settled_and_frees_the_connection(house: House, provider: Provider) -> None:
    for model, status in (("fault:hang", Status.CANCELLED), ("long:10+gate", Status.PARTIAL)):
        client = Heard()

        async def ask(model: str = model, client: Heard = client) -> None:
            await house.ask(model, client=client, stream=True)

        async with asyncio.timeout(60), anyio.create_task_group() as group:
            provider.forget()
            group.start_soon(ask)
            # The provider runs in a thread of its own, and has no event of this loop's.
            while not provider.log or (model != "fault:hang" and b"word2" not in client.got):  # noqa: ASYNC110 - see above
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        await house.background.drain()  # it is settled in a task that nobody's leaving stops
        row = await house.last()
        assert (row.status, row.receipt["error"]) == (status, "the client left")
    assert (await house.ask()).status == 200


async def test_a_mistake_of_ours_does_not_stay_pending(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(house.upstream, "ask", fail)
        with pytest.raises(ZeroDivisionError):
            await house.ask()
    row = await house.last()
    assert (row.status, row.receipt["error"]) == (Status.FAILED, "internal error: ZeroDivisionError")


async def test_an_error_says_which_exchange_it_was(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise UpstreamBusy("All are in use.")

    with monkeypatch.context() as patch:
        patch.setattr(house.upstream, "ask", fail)
        client = await house.ask()
    row = await house.last()
    assert (client.headers["x-exchange-id"], client.headers["x-session-id"]) == (row.id, "s")
    assert (row.status, row.receipt["error"]) == (Status.FAILED, "All are in use.")


async def test_what_is_compressed_is_told_plain(house: House, provider: Provider) -> None:
    client = await house.ask("gzip")
    assert provider.last.header("accept-encoding") == "identity"
    assert "content-encoding" not in client.headers
    assert client.headers["content-length"] == str(len(client.got))
    assert orjson.loads(client.got)["choices"][0]["message"]["content"] == "echo: hi"


async def test_without_a_session_nothing_is_stored(provider: Provider, tmp_path: Path) -> None:
    async with opened(provider, tmp_path, sessions={"missing": "stateless"}) as house:
        asked = orjson.dumps({"model": "echo", "messages": [{"role": "user", "content": "hi"}]})
        client = Heard()
        await house.chat.answer(ClientRequest(dialect=CHAT, tenant="t", headers=[], query=b"", body=asked), client)
        assert (client.status, "x-session-id" in client.headers) == (200, False)
        assert await house.store.sessions(None, limit=9) == ([], None)


async def test_a_large_reply_is_counted_where_it_holds_up_no_other(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noting(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return settlement_of(*given)

    monkeypatch.setattr(settle, "settlement_of", noting)
    async with opened(provider, tmp_path) as house:
        for content in ("short", "long " * 5_000):
            asked = orjson.dumps({"model": "echo", "messages": [{"role": "user", "content": content}]})
            client = Heard()
            await house.chat.answer(
                ClientRequest(
                    dialect=CHAT, tenant="t", headers=[(b"x-session-id", content[:5].encode())], query=b"", body=asked
                ),
                client,
            )
            assert client.status == 200
        assert threads[0] == threading.current_thread().name
        assert threads[1] != threads[0]
        (long, short) = (await house.store.sessions(None, limit=9))[0]
        assert (long.messages, short.messages) == (2, 2)


@pytest.mark.parametrize(
    ("kind", "asked", "stream"),
    [
        ("text/event-stream; charset=utf-8", False, True),
        ("Text/Event-Stream", True, True),
        (None, True, True),
        ("application/octet-stream", True, True),
        (None, False, False),
        ("application/json", True, False),
        ("text/html", True, False),
    ],
)
async def test_a_stream_is_known_by_its_type_or_by_what_was_asked(kind: str | None, asked: bool, stream: bool) -> None:
    for status, expected in ((200, stream), (204, False)):
        answer = answer_of(b": hello\n\n", status, {} if kind is None else {"Content-Type": kind})
        assert await _is_stream(answer, asked=asked) is expected


@pytest.mark.parametrize("body", [b'{"id":"x"}', b' \n{"id":"x"}'])
@pytest.mark.parametrize(("kind", "asked"), [("", True), ("text/event-stream", False)])
async def test_json_of_no_type_or_of_the_wrong_one_is_no_stream(body: bytes, kind: str, asked: bool) -> None:
    answer = answer_of(body, 200, {"Content-Type": kind} if kind else {})
    assert not await _is_stream(answer, asked=asked)
    assert await answer.read() == body  # none of it was lost by looking
    assert await _is_stream(answer_of(body, 200, {"Content-Encoding": "br"}), asked=True)  # nobody can look


def answer_of(body: bytes, status: int, headers: dict[str, str]) -> Answer:
    """Return an answer of the upstream."""
    loop = asyncio.get_running_loop()
    content = aiohttp.StreamReader(BaseProtocol(loop), 65536, loop=loop)
    content.feed_data(body)
    content.feed_eof()
    response: Any = SimpleNamespace(status=status, raw_headers=(), headers=CIMultiDict(headers), content=content)
    return Answer(response, lambda _: UpstreamError("it broke"), AnswerMemory())
