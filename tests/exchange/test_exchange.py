"""One chat completion without HTTP before it: what is stored when, and what becomes of its failures.

The whole way, with clients of all kinds, is shown in tests/e2e.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import orjson
import pytest

from proxy.errors import InvalidRequest, PalimpsestError, StoreUnavailable, UpstreamBusy, UpstreamError
from proxy.exchange.background import Background
from proxy.exchange.exchange import RESCUED, ChatCompletions, _is_stream
from proxy.exchange.knowledge import Knowledge
from proxy.exchange.past import Memory
from proxy.exchange.turn import Call
from proxy.models.catalogue import Catalogue
from proxy.settings.model import Settings
from proxy.store.records import ExchangeRow, Status, session_key
from proxy.store.store import Store
from proxy.tokens.counter import TokenCounter
from proxy.trimming.policy import Policy
from proxy.upstream.client import Answer, Upstream
from tests.support.server import settings_for
from tests.support.upstream import Upstream as Provider

pytestmark = pytest.mark.anyio

SESSION = (b"x-session-id", b"s")
KEY = session_key("t", "s")


class _Client:
    """Whoever asked, and what it is told."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.got = b""
        self.error: PalimpsestError | None = None
        self.ended = False

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = {name.decode().lower(): value.decode() for name, value in headers}

    async def write(self, data: bytes) -> None:
        self.got += data

    async def end(self, data: bytes = b"") -> None:
        self.got += data
        self.ended = True

    async def fail(self, error: PalimpsestError, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.error = error
        self.headers = {name.decode().lower(): value.decode() for name, value in headers}


class _House:
    """All that an exchange needs, open."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self.settings = settings
        self.store = store
        self.upstream = Upstream(settings.upstream, shares_key=False)
        self.background = Background()
        counter = TokenCounter(settings.tokens.method)
        memory = Memory(store, counter, settings.upstream.reasoning)
        seconds = count(1_000)  # each later than the last, so that there is a newest one
        knowledge = Knowledge(
            counter, Catalogue(settings.models), self.upstream, None, lambda: float(next(seconds))
        )
        self.chat = ChatCompletions(settings, store, self.upstream, self.background, memory, knowledge)

    async def ask(
        self, model: str = "echo", *headers: tuple[bytes, bytes], client: _Client | None = None, **body: Any
    ) -> _Client:
        client = client or _Client()
        asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], **body}
        await self.chat.answer(Call("t", [SESSION, *headers], b"", orjson.dumps(asked)), client)
        return client

    async def last(self) -> ExchangeRow:
        rows, _ = await self.store.exchanges(KEY, limit=1)
        return rows[0]


@asynccontextmanager
async def opened(provider: Provider, folder: Path, **sections: Any) -> AsyncIterator[_House]:
    settings = settings_for(provider, folder, sections)
    house = _House(settings, await Store.open(settings.store.url))
    try:
        yield house
    finally:
        await house.background.drain()
        await house.upstream.aclose()
        await house.store.close()


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Provider() as upstream:
        yield upstream


@pytest.fixture
async def house(provider: Provider, tmp_path: Path) -> AsyncIterator[_House]:
    provider.forget()
    async with opened(provider, tmp_path, upstream={"max_connections": 1, "connect_timeout": 0.2}) as house:
        yield house


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_is_stored_before_its_end_is_told(house: _House, stream: bool) -> None:
    seen: list[tuple[Status, str]] = []

    class _Watching(_Client):
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


async def test_a_request_is_stored_before_its_answer_is_told(house: _House) -> None:
    seen: list[Status] = []

    class _Watching(_Client):
        async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
            seen.append((await house.last()).status)
            await super().start(status, headers)

    await house.ask(client=_Watching(), stream=True)
    assert seen == [Status.PENDING]


async def test_usage_that_is_refused_is_asked_for_once(house: _House, provider: Provider) -> None:
    for asked in ([True, False], [False]):
        provider.forget()
        client = await house.ask("plain", stream=True)
        assert (client.status, client.got.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert ["stream_options" in request.json for request in provider.log] == asked
    assert (await house.last()).receipt["usage"] is None


async def test_usage_is_not_asked_for_where_the_client_decided(house: _House, provider: Provider) -> None:
    client = await house.ask("plain", stream=True, stream_options={"include_usage": False})
    assert (client.status, len(provider.log)) == (422, 1)


async def test_another_refusal_is_told_as_it_is(house: _House, provider: Provider) -> None:
    client = await house.ask("echo", stream=True, nonsense=1)
    assert (client.status, len(provider.log)) == (400, 1)
    assert b"nonsense" in client.got


async def test_a_refusal_that_breaks_keeps_no_connection(
    house: _House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: Answer) -> bytes:
        raise UpstreamError("It broke.")

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "read", broken)
        client = await house.ask("plain", stream=True)
    assert client.error is not None
    assert client.error.message == "It broke."
    assert (await house.ask()).status == 200  # there is one connection only


LONG = [
    message
    for number in range(40)
    for message in (
        {"role": "user", "content": f"{number} " + "parcel " * 100},
        {"role": "assistant", "content": "noted"},
    )
] + [{"role": "user", "content": "and now?"}]
WINDOW = "echo+ctx:4000"


async def test_an_overflow_is_asked_once_more_over_one_connection(house: _House, provider: Provider) -> None:
    client = await house.ask(WINDOW, messages=LONG)
    assert (client.status, len(provider.log)) == (200, 2)
    row = await house.last()
    assert RESCUED in row.receipt["warnings"]
    assert row.status is Status.COMPLETE
    assert row.tokens_sent * 2 <= row.tokens_before
    assert client.headers["x-context-tokens-sent"] == str(row.tokens_sent)


async def test_usage_that_is_refused_after_an_overflow_is_not_asked_for_again(
    house: _House, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may look at the length first, and at the fields of what is short enough then."""
    sent: list[bool] = []
    ask = house.upstream.ask

    async def refusing(*given: Any) -> Answer:
        destination, method, path, fields, body = given
        asked = orjson.loads(body)
        sent.append("stream_options" in asked)
        if len(asked["messages"]) < len(LONG) and sent[-1]:
            body = orjson.dumps({**asked, "model": "plain"})
        return await ask(destination, method, path, fields, body)

    monkeypatch.setattr(house.upstream, "ask", refusing)
    client = await house.ask(WINDOW, messages=LONG, stream=True)
    assert (client.status, client.got.endswith(b"data: [DONE]\n\n")) == (200, True)
    assert sent == [True, True, False]
    assert RESCUED in (await house.last()).receipt["warnings"]
    provider.forget()
    await house.ask(WINDOW, stream=True)
    assert sent[3:] == [False]  # it is remembered


async def test_an_error_after_a_rescue_tells_of_what_was_sent_last(
    house: _House, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = house.upstream.ask
    asked: list[bytes] = []

    async def busy(*given: Any) -> Answer:
        asked.append(given[-1])
        if len(asked) == 2:
            raise UpstreamBusy("All are in use.")
        return await ask(*given)

    monkeypatch.setattr(house.upstream, "ask", busy)
    client = await house.ask(WINDOW, messages=LONG)
    assert isinstance(client.error, UpstreamBusy)
    row = await house.last()
    assert RESCUED in client.headers["x-context-warning"]
    assert client.headers["x-context-tokens-sent"] == str(row.tokens_sent)
    assert client.headers["x-context-messages-sent"] == str(len(orjson.loads(asked[1])["messages"]))


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_rescue_that_fails_keeps_no_connection(
    house: _House, provider: Provider, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    why: type[BaseException] = asyncio.CancelledError if cancelled else ZeroDivisionError

    async def fail(*_: Any) -> bool:
        raise why

    with monkeypatch.context() as patch:
        patch.setattr(house.chat, "_replan", fail)
        with pytest.raises(why):
            await house.ask(WINDOW, messages=LONG)
    await house.background.drain()
    row = await house.last()
    assert row.status is (Status.CANCELLED if cancelled else Status.FAILED)
    assert len(provider.log) == 1
    assert (await house.ask()).status == 200  # there is one connection only


async def test_what_does_not_get_shorter_is_not_asked_again(house: _House, provider: Provider) -> None:
    client = await house.ask(WINDOW, messages=[{"role": "user", "content": "parcel " * 6_000}])
    assert (client.status, len(provider.log)) == (400, 1)
    assert orjson.loads(client.got)["error"]["code"] == "context_length_exceeded"
    assert RESCUED not in (await house.last()).receipt["warnings"]


async def test_a_second_plan_is_made_where_the_first_is_too_long_by_its_bytes(
    house: _House, provider: Provider
) -> None:
    """Much of what is left here is not text: it counts for more with upstream than the counter thinks."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    short: list[dict[str, Any]] = []
    for number in range(160):
        called = {"role": "assistant", "content": None, "tool_calls": [{**call, "id": f"c{number}"}]}
        short += [called, {"role": "tool", "tool_call_id": f"c{number}", "content": "1"}]
    said = [*LONG[:-1], LONG[-1], *short]
    client = await house.ask(WINDOW, messages=said)
    assert (client.status, len(provider.log)) == (200, 2)


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


async def test_a_policy_that_changed_is_applied_to_the_whole_log(house: _House, provider: Provider) -> None:
    """What an older version dropped is read again when the next one moves the cut."""
    lean = {"trigger": {"messages": 6}, "target": {"tokens": 60}, "keep": {"rounds": 1, "spans": 1}}
    edits = [{"type": "drop_oldest"}]
    house.chat.policies.current = {"lean": Policy.model_validate(lean | {"edits": edits})}
    for number in range(8):
        await house.ask(messages=[{"role": "user", "content": f"number {number}"}])
    assert len(provider.last.json["messages"]) < 8
    kept = lean | {"target": {"tokens": 60}, "trigger": {"messages": 2}, "pin": [{"regex": "number 0"}]}
    house.chat.policies.current = {"lean": Policy.model_validate(kept | {"edits": edits})}
    await house.ask(messages=[{"role": "user", "content": "number 8"}])
    assert provider.last.json["messages"][0] == {"role": "user", "content": "number 0"}
    row = await house.last()
    assert (row.kind, row.receipt["cut"]["moved"]) == ("append", True)


async def test_a_store_that_cannot_begin_lets_nothing_through(
    house: _House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> None:
        raise StoreUnavailable("The store cannot be used.")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(house.store, "begin", fail)
        client = await house.ask(stream=True)
    assert isinstance(client.error, StoreUnavailable)
    assert (client.status, client.got) == (0, b"")
    assert await house.store.exchanges(KEY, limit=1) == ([], None)
    assert (await house.ask()).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_store_that_cannot_settle_lets_no_end_through(
    house: _House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    async def fail(*_: Any) -> None:
        raise StoreUnavailable("The store cannot be used.")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(house.store, "settle", fail)
        client = await house.ask(stream=stream)
    assert isinstance(client.error, StoreUnavailable)
    assert not client.ended
    assert b"[DONE]" not in client.got
    assert (await house.last()).status is Status.PENDING  # a restart marks it
    assert (await house.ask()).status == 200


async def test_who_leaves_is_settled_and_frees_the_connection(house: _House, provider: Provider) -> None:
    for model, status in (("fault:hang", Status.CANCELLED), ("long:10+gate", Status.PARTIAL)):
        client = _Client()

        async def ask(model: str = model, client: _Client = client) -> None:
            await house.ask(model, client=client, stream=True)

        async with asyncio.timeout(5), anyio.create_task_group() as group:
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


async def test_a_mistake_of_ours_does_not_stay_pending(
    house: _House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(house.upstream, "ask", fail)
        with pytest.raises(ZeroDivisionError):
            await house.ask()
    row = await house.last()
    assert (row.status, row.receipt["error"]) == (Status.FAILED, "internal error: ZeroDivisionError")


async def test_an_error_says_which_exchange_it_was(house: _House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise UpstreamBusy("All are in use.")

    with monkeypatch.context() as patch:
        patch.setattr(house.upstream, "ask", fail)
        client = await house.ask()
    row = await house.last()
    assert (client.headers["x-exchange-id"], client.headers["x-session-id"]) == (row.id, "s")
    assert (row.status, row.receipt["error"]) == (Status.FAILED, "All are in use.")


@pytest.mark.parametrize(
    ("header", "param"),
    [
        ((b"x-session-mode", b"sometimes"), "X-Session-Mode"),
        ((b"x-context-policy", b"none"), "X-Context-Policy"),
        ((b"x-agent-name", b"%00"), "x-agent-name"),
    ],
)
async def test_what_cannot_be_meant_is_not_stored(
    house: _House, provider: Provider, header: tuple[bytes, bytes], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await house.ask("echo", header)
    assert refused.value.param == param
    assert await house.store.exchanges(KEY, limit=1) == ([], None)
    assert provider.log == []


async def test_calls_without_tools_are_warned_of(house: _House) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert "tool" in (await house.ask(messages=said)).headers["x-context-warning"]
    assert "x-context-warning" not in (await house.ask(messages=said, tools=tools)).headers


async def test_what_is_compressed_is_told_plain(house: _House, provider: Provider) -> None:
    client = await house.ask("gzip")
    assert provider.last.header("accept-encoding") == "identity"
    assert "content-encoding" not in client.headers
    assert client.headers["content-length"] == str(len(client.got))
    assert orjson.loads(client.got)["choices"][0]["message"]["content"] == "echo: hi"


async def test_without_a_session_nothing_is_stored(provider: Provider, tmp_path: Path) -> None:
    async with opened(provider, tmp_path, sessions={"missing": "stateless"}) as house:
        asked = orjson.dumps({"model": "echo", "messages": [{"role": "user", "content": "hi"}]})
        client = _Client()
        await house.chat.answer(Call("t", [], b"", asked), client)
        assert (client.status, "x-session-id" in client.headers) == (200, False)
        assert await house.store.sessions(None, limit=9) == ([], None)


@pytest.mark.parametrize(
    ("kind", "asked", "stream"),
    [
        (b"text/event-stream; charset=utf-8", False, True),
        (b"Text/Event-Stream", True, True),
        (None, True, True),
        (b"application/octet-stream", True, True),
        (None, False, False),
        (b"application/json", True, False),
        (b"text/html", True, False),
    ],
)
def test_a_stream_is_known_by_its_type_or_by_what_was_asked(
    kind: bytes | None, asked: bool, stream: bool
) -> None:
    answer: Any = SimpleNamespace(header=lambda _: kind)
    assert _is_stream(answer, asked=asked) is stream
