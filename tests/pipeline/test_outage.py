"""While the store is away: what is served, what waits, and what is stored once it is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from proxy.config import Settings
from proxy.config.settings import StoreSettings
from proxy.dialects.chat import CHAT
from proxy.errors import InvalidRequest, StoreUnavailable
from proxy.pipeline import ClientRequest, erase_tenant
from proxy.pipeline.inspection import exchange_view, past_of, receipt_document
from proxy.pipeline.outage import AWAY, LOST, WAITS, decode, encode, spool_of, warn_of_others
from proxy.store import Settled, Settlement, Status, Withholder, session_key, spool_name
from tests.support.house import Heard, House, opened
from tests.support.story import LATER, SUMMARY
from tests.support.talk import opening
from tests.support.upstream import Upstream as Provider
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

OTHERS = opening("exc_1")


@asynccontextmanager
async def away(house: House) -> AsyncIterator[None]:
    """Take the store away; when this ends, it is back, and what waited is stored."""
    circuit = house.store.circuit
    probe = circuit._probe

    async def fails() -> None:
        raise StoreUnavailable("The store cannot be used. It is a test.")

    circuit._probe = fails
    circuit.open(StoreUnavailable("The store cannot be used. It is a test."))
    yield
    circuit._probe = probe
    assert await circuit.closes(10)


async def say(
    house: House, messages: list[dict[str, Any]], session: str | None = "s", model: str = "echo", **headers: str
) -> Heard:
    client = Heard()
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    if session is not None:
        sent.append((b"x-session-id", session.encode()))
    body = orjson.dumps({"model": model, "messages": messages})
    try:
        await house.chat.answer(ClientRequest(dialect=CHAT, tenant="t", headers=sent, query=b"", body=body), client)
    except StoreUnavailable as why:
        client.error = why
    if client.status == 200:
        messages.append(orjson.loads(client.got)["choices"][0]["message"])
    return client


async def texts(house: House, session: str = "s") -> list[Any]:
    row = await house.store.session("t", session)
    assert row is not None
    return [each.message.data["content"] for each in await house.store.path(row.key, row.head)]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def spoken(history: list[dict[str, Any]]) -> list[Any]:
    return [message["content"] for message in history]


async def test_a_whole_history_is_served_and_stored_later(house: House) -> None:
    history = [user("one")]
    await say(house, history)
    async with away(house):
        for text in ("two", "three"):
            history.append(user(text))
            client = await say(house, history)
            assert client.status == 200
            assert AWAY in client.headers["x-context-warning"]
            assert client.headers["x-session-id"] == "s"
        assert house.spool.flag[0]
    assert not house.spool.flag[0]
    assert await texts(house) == spoken(history)
    history.append(user("four"))
    assert "x-context-warning" not in (await say(house, history)).headers
    assert await texts(house) == spoken(history)
    rows, _ = await house.store.exchanges(session_key("t", "s"), limit=10)
    assert [row.status for row in rows] == [Status.COMPLETE] * 4
    assert [row.kind for row in rows] == ["resend", "resend", "resend", "first"]
    assert AWAY in rows[1].receipt["warnings"]


async def test_what_was_asked_before_the_store_came_back_does_not_open_the_circuit_again(
    house: House, provider: Provider
) -> None:
    provider.forget()
    history = [user("one")]
    await say(house, history)
    history.append(user("two"))
    async with asyncio.TaskGroup() as group:
        async with away(house):
            asked = group.create_task(say(house, history, model="echo+hold"))
            await asyncio.to_thread(until, lambda: len(provider.log) == 2, "it is asked")
        provider.gate.set()
    assert asked.result().status == 200
    assert (house.spool.flag[0], house.store.circuit.down) == (0, None)
    assert await texts(house) == spoken(history)


async def test_a_secret_that_is_kept_leaves_the_others_in_their_places(house: House) -> None:
    outage = house.services.outage
    kept = [await outage.secret(name, place) for place, name in enumerate("abc")]
    await outage.secret("a", 0)
    async with away(house):
        assert [await outage.secret(name, place) for place, name in enumerate("abc")] == kept


async def test_what_needs_the_store_is_refused(house: House, provider: Provider) -> None:
    await say(house, [user("one")])
    heard = len(provider.log)
    async with away(house):
        client = await say(house, [user("two")])
        assert isinstance(client.error, StoreUnavailable)
        assert client.error.retry_after == 1
        appended = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
        assert (await say(house, appended, x_session_mode="append")).error is not None
        assert len(provider.log) == heard
        assert (await say(house, [user("two")], x_session_mode="full")).status == 200
        assert (await say(house, [user("other")], None)).status == 200


async def test_a_session_that_is_known_to_resend_may_ask_something_beside(house: House) -> None:
    history = [user("one")]
    await say(house, history)
    history.append(user("two"))
    await say(house, history)
    async with away(house):
        assert (await say(house, [user("a title for this")])).status == 200
    assert await texts(house) == spoken(history)
    assert (await house.last()).kind == "side"


async def test_the_first_request_of_a_session_may_come_again(house: House) -> None:
    await say(house, [user("one")], "new", "fault:500")
    async with away(house):
        again = [user("one")]
        assert (await say(house, again, "new")).status == 200
    assert await texts(house, "new") == spoken(again)


async def test_a_conversation_without_a_name_goes_on(house: House) -> None:
    history = [user("tell me something that is long enough to be known again")]
    session = (await say(house, history, None)).headers["x-session-id"]
    async with away(house):
        for text in ("more", "and more"):
            history.append(user(text))
            client = await say(house, history, None)
            assert client.headers["x-session-id"] == session
    assert await texts(house, session) == spoken(history)
    async with away(house):
        house.services.loader._replies.clear()  # another process has the store and no more
        history.append(user("the last thing"))
        client = await say(house, history, None)
        assert (client.status, client.headers.get("x-session-id")) == (200, None)
    assert await texts(house, session) == spoken(history)
    rows, _ = await house.store.sessions("t", limit=10)
    assert len(rows) == 1


@pytest.mark.parametrize("mode", ["drop", "sum"])
async def test_the_receipt_of_a_window_that_waited_names_the_messages_of_the_branch(
    provider: Provider, tmp_path: Path, mode: str
) -> None:
    edit = {"type": "keep_rounds", "last": 1}
    if mode == "sum":
        edit = {"type": "summarize", "mode": "statistics", "min_messages": 2, "min_new_messages": 1, "keep_rounds": 1}
    policy = {"trigger": {"messages": 6}, "edits": [edit]}
    async with opened(provider, tmp_path, policies={"few": policy}) as house:
        history: list[dict[str, Any]] = []
        for number in range(8):
            history.append(user(f"question {number}, which is long enough to be summed up in fewer words " * 4))
            await say(house, history, x_context_policy="off")
        async with away(house):
            window = [*history[-6:], user("and now?")]
            await say(house, window)
            sent = [message.get("content") for message in provider.last.messages]
        row = (await house.store.exchanges(session_key("t", "s"), limit=1))[0][0]
        assert (row.kind, row.receipt["cut"]["moved"], row.receipt["cut"]["position"]) == ("windowed", True, 17)
        told = receipt_document(row, await past_of([row], house.store))
        nodes = [each.node for each in await house.store.path(row.session_key, row.replies[0])]
        dropped = [line["position"] for line in told["plan"]]
        assert dropped == [10, 11, 12, 13]
        assert [line["node"] for line in told["plan"]] == nodes[10:14]
        session = await house.store.session("t", "s")
        assert session is not None
        view = await exchange_view(row, session, house.services)
        assert view.fates == ["dropped"] * 10 + ["dropped" if mode == "drop" else "summarised"] * 4 + ["sent"] * 3
        if mode == "drop":
            assert [message.data["content"] for message in view.messages] == sent
        else:
            assert told["summary"]["summarized_until"] == 14


async def test_rejecting_serves_nobody(provider: Provider, tmp_path: Path) -> None:
    async with opened(provider, tmp_path, store={"on_failure": "reject"}) as house:
        history = [user("one")]
        await say(house, history)
        history.append(user("two"))
        async with away(house):
            assert (await say(house, history)).error is not None
        assert (await say(house, history)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fails", ["begin", "settle"])
async def test_an_answer_that_was_paid_for_is_handed_over_and_stored(
    house: House, monkeypatch: pytest.MonkeyPatch, stream: bool, fails: str
) -> None:
    def begin(*_: Any) -> asyncio.Future[None]:
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(StoreUnavailable("The store cannot be used."))
        return failed

    async def settle(*_: Any) -> None:
        raise StoreUnavailable("The store cannot be used.")

    with monkeypatch.context() as patch:
        patch.setattr(house.store, fails, {"begin": begin, "settle": settle}[fails])
        client = await house.ask(stream=stream)
    assert (client.status, client.error, client.ended) == (200, None, True)
    if not stream:
        assert WAITS in client.headers["x-context-warning"]
    if house.store.circuit.down is not None:
        assert await house.store.circuit.closes(10)
    assert (await house.last()).status is Status.COMPLETE
    assert await texts(house) == ["hi", "echo: hi"]


async def test_an_answer_is_handed_over_even_where_nothing_can_be_written(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise StoreUnavailable("No.")

    with monkeypatch.context() as patch:
        patch.setattr(house.store, "settle", fail)
        patch.setattr(house.spool, "append", fail)
        client = await house.ask()
    assert client.status == 200
    assert LOST in client.headers["x-context-warning"]
    if house.store.circuit.down is not None:
        assert await house.store.circuit.closes(10)
    assert await texts(house) == ["hi", "echo: hi"]  # it waited in memory


async def test_a_spool_without_room_refuses_before_anybody_is_asked(provider: Provider, tmp_path: Path) -> None:
    provider.forget()
    async with opened(provider, tmp_path, store={"spool_max_bytes": 10_000}) as house:
        async with away(house):
            client = await say(house, [user("one")], None)
            assert isinstance(client.error, StoreUnavailable)
            assert "spool_max_bytes" in client.error.message
        assert not provider.log


async def test_what_the_store_does_not_take_is_set_aside(house: House) -> None:
    history = [user("one")]
    async with away(house):
        await house.spool.append("key", b"not what we wrote")
        await say(house, history, "s", x_session_mode="full")
    assert await texts(house) == spoken(history)
    assert house.spool._path.with_suffix(".rejected").exists()


async def test_an_answer_to_messages_that_the_store_has_lost_is_set_aside(house: House, provider: Provider) -> None:
    provider.forget()
    history = [user("one")]
    await say(house, history)
    history.append(user("two"))
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(say(house, history, model="say:paid+hold"))
        await asyncio.to_thread(until, lambda: len(provider.log) == 2, "it is asked")
        async with away(house):
            provider.gate.set()
            assert (await asked).status == 200
            assert house.spool.flag[0]
            await house.store.direct().delete(session_key("t", "s"))  # as in a copy that is older than the session
    rejected = house.spool._path.with_suffix(".rejected").read_bytes()
    assert b"paid" in rejected
    rows, _ = await house.store.exchanges(session_key("t", "s"), limit=10)
    assert [row.status for row in rows] == [Status.FAILED]
    assert (await say(house, history)).status == 200
    assert await texts(house) == spoken(history)


async def test_emptying_again_from_the_beginning_changes_nothing(house: House) -> None:
    history = [user("one")]
    async with away(house):
        for text in ("two", "three", "four"):
            await say(house, history, x_session_mode="full")
            history.append(user(text))
        kept = house.spool.read()
    for _ in range(2):
        for record in kept:
            await house.spool.append(record.key, record.content)
        house.store.circuit.open(StoreUnavailable("again"))
        assert await house.store.circuit.closes(10)
    assert await texts(house) == spoken(history[:-1])
    rows, _ = await house.store.exchanges(session_key("t", "s"), limit=10)
    assert len(rows) == 3


async def test_what_the_store_refuses_as_it_ended_is_kept_as_failed_and_counted_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, counts = house.store.settle, house.services.counts

    async def refuses(settlement: Settlement, opening: Any) -> Settled:
        if settlement.status is Status.COMPLETE:
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        return await settle(settlement, opening)

    monkeypatch.setattr(house.store, "settle", refuses)
    assert (await say(house, [user("one")])).status == 200
    await house.services.background.drain()
    (row,), _ = await house.store.exchanges(session_key("t", "s"), limit=10)
    assert row.status == Status.FAILED
    assert counts.values[counts.under_way] == 0


async def test_a_session_that_is_deleted_leaves_nothing_in_the_spool(house: House) -> None:
    history = [user("one")]
    async with away(house):
        await say(house, history, x_session_mode="full")
        assert house.spool.drop(lambda key, _: key == session_key("t", "s")) == 1
    assert await house.store.session("t", "s") is None


async def test_a_tenant_that_is_erased_leaves_nothing_in_the_spool(house: House) -> None:
    async with away(house):
        await say(house, [user("one")], x_session_mode="full")
        await house.spool.append("unreadable", b"\xc1")
        await house.spool.append("another's", encode(replace(decode(house.spool.read()[0].content), opening=OTHERS)))
        with pytest.raises(StoreUnavailable):
            await erase_tenant(house.store, house.spool, "t")
        assert [record.key for record in house.spool.read()] == ["unreadable", "another's"]


async def test_what_is_not_stored_is_not_sent_on_from_amid_a_history_either(house: House) -> None:
    house.store.masker = Withholder(b"s" * 32)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [user(""), {"role": "assistant", "content": "What?"}, user("a secret")]
    history = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}]
    await say(
        house, [*history, {"role": "tool", "tool_call_id": "c", "content": ""}], x_session_mode="full", model="say:"
    )
    with pytest.raises(InvalidRequest, match="is not stored"):
        await say(house, [user("and now?")], x_session_mode="append")


async def test_what_waits_for_another_store_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after = (
        Settings(store=StoreSettings(url=f"postgresql://me:secret@{host}/db", spool=str(tmp_path)))
        for host in ("old", "new")
    )
    spool = spool_of(before)
    await spool.append("key", b"record")
    spool.close()
    warn_of_others(before)
    assert not caplog.records
    warn_of_others(after)
    (record,) = caplog.records
    assert f"{spool_name(before.store.url)}.spool holds exchanges" in record.getMessage()
    assert f"to {spool_name(after.store.url)}.spool while" in record.getMessage()


async def test_a_record_is_read_as_it_was_written(house: House) -> None:
    async with away(house):
        await say(house, [user("one \udc80".encode("utf-8", "replace").decode())], x_session_mode="full")
        (record,) = house.spool.read()
        spooled = decode(record.content)
        assert encode(spooled) == record.content
        trimmed = replace(spooled, settlement=replace(spooled.settlement, cut=replace(LATER, summary=SUMMARY)))
        assert decode(encode(trimmed)) == trimmed
        assert spooled.settlement.messages == spooled.opening.messages
        assert spooled.opening.messages[0].message.dialect is CHAT


@pytest.mark.parametrize("model", ["deep", "digits"])
async def test_an_answer_that_cannot_be_read_is_handed_over_and_ends_as_failed(
    house: House, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise RecursionError(model)

    with monkeypatch.context() as patch:
        target = "proxy.pipeline.settle.reply_of" if model == "deep" else "proxy.pipeline.settle.used"
        patch.setattr(target, breaks)
        if model == "digits":
            patch.setattr("proxy.pipeline.settle.log_line", breaks)
        client = await house.ask()
    assert (client.status, client.error) == (200, None)
    row = await house.last()
    assert row.status is Status.FAILED
    assert "RecursionError" in row.receipt["error"]
