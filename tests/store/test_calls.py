"""Which tools the newest reply calls, as the session's row says it."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.chat.message import ChatMessage
from proxy.store.records import Reply, SessionRow
from proxy.store.store import Store
from proxy.store.tree import calls_of, decode_calls, encode_calls
from tests.support.asides import settle
from tests.support.talk import Talk, body, message

pytestmark = pytest.mark.anyio


def call(name: str, number: str = "c1", arguments: str = "{}") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


async def row_of(talk: Talk) -> SessionRow:
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    return row


def test_each_tool_is_named_once_in_the_order_of_the_calls() -> None:
    asked = message("assistant", "", tool_calls=[call("look"), call("finish", "c2"), call("look", "c3")])
    assert calls_of(asked, partial=False) == ("look", "finish")
    assert calls_of(message("user", "look"), partial=False) == ()


def test_of_a_reply_that_broke_off_whole_calls_count() -> None:
    broken = message("assistant", "", tool_calls=[call("look"), call("finish", "c2", '{"result": "al')])
    assert calls_of(broken, partial=True) == ("look",)


def test_names_come_back_from_their_column() -> None:
    odd = ChatMessage(
        b'{"role":"assistant","tool_calls":[{"id":"1","type":"function",'
        b'"function":{"name":"a\\u0000","arguments":"{}"}}]}'
    )
    names = calls_of(odd, partial=False)
    assert names == ("a\ufffd",)  # no database holds a NUL
    assert decode_calls(encode_calls(names)) == names
    assert encode_calls(()) is None
    assert decode_calls(None) == ()


async def test_the_row_names_the_calls_of_the_reply_at_the_head(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    assert (await row_of(talk)).calls == ()
    asked = body("user", "two")
    exchange = await talk.begin(asked)
    calling = body("assistant", "", tool_calls=[call("finish_task")])
    await talk.settle(exchange, asked, replies=(calling,))
    assert (await row_of(talk)).calls == ("finish_task",)
    await talk.say("beside", "b", moves_head=False)
    assert (await row_of(talk)).calls == ("finish_task",)
    result = body("tool", "done", tool_call_id="c1")
    await talk.settle(await talk.begin(result), result, replies=(body("assistant", "fine"),))
    assert (await row_of(talk)).calls == ()


async def test_of_several_replies_the_first_one_counts(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    both = tuple(body("assistant", "", tool_calls=[call(name)]) for name in ("first", "second"))
    await talk.settle(await talk.begin(asked), asked, replies=both)
    assert (await row_of(talk)).calls == ("first",)


async def test_of_a_reply_that_broke_off_the_row_names_whole_calls(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    broken = body("assistant", "", tool_calls=[call("finish", arguments='{"a')])
    await settle(talk, await talk.begin(asked), asked, replies=(Reply(body=broken, partial=True),))
    assert (await row_of(talk)).calls == ()


async def test_results_alone_are_calls_of_nobody(store: Store) -> None:
    talk = Talk(store=store)
    result = body("tool", "done", tool_call_id="c1")
    exchange = await talk.begin(result)
    await settle(talk, exchange, result, replies=(), finished=True)
    row = await row_of(talk)
    assert (row.messages, row.calls) == (1, ())
