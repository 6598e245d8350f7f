from __future__ import annotations

import pytest

from proxy.conversation import body_id
from proxy.dialects.chat.message import ChatMessage
from proxy.store.records import Body
from proxy.store.store import Store
from proxy.store.tree import is_message, messages_in, named_bodies
from tests.support.talk import Talk, body, message

pytestmark = pytest.mark.anyio


async def test_a_text_is_found_by_the_beginning_of_its_name(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    name = body_id(asked.message.raw)
    await talk.begin(asked, tools=b'[{"type":"function"}]')
    for digits in (12, 16, 40):
        assert await store.body(talk.key, name[:digits]) == (name, asked.message)
    for wrong in (name[:11], "", name + "0", name[:12].upper() + "g", "%" * 12, "f" * 40):
        assert await store.body(talk.key, wrong) is None
    assert await store.body("other", name) is None


async def test_a_beginning_that_two_names_share_names_neither(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = "abcdefabcdef"
    names = {b'{"a":1}': shared + "0" * 28, b'{"b":1}': shared + "f" * 28}
    for module in ("texts", "opening"):
        monkeypatch.setattr(f"proxy.store.{module}.body_of", lambda text: names[text.raw])
    talk = Talk(store=store)
    await talk.begin(*(Body(message=ChatMessage(raw), tokens=1) for raw in names))
    assert await store.body(talk.key, shared) is None
    assert await store.body(talk.key, shared + "f") == (shared + "f" * 28, ChatMessage(b'{"b":1}'))


async def test_tools_are_no_message_and_messages_no_tools(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    await talk.begin(asked, tools=b'[{"type":"function"}]')
    tools = body_id(b'[{"type":"function"}]')
    assert await store.tools(talk.key, tools) == b'[{"type":"function"}]'
    assert await store.body(talk.key, tools) is None
    assert await store.tools(talk.key, body_id(asked.message.raw)) is None
    assert await store.tools(talk.key, "0" * 40) is None


async def test_equal_instructions_are_one_version_and_keep_their_bytes(store: Store) -> None:
    talk = Talk(store=store)
    leading = (
        ChatMessage(b'{"role":"system", "content":"a"}'),
        ChatMessage(b' {"role":"developer","content":"\\u00e9"}'),
    )
    versions = set()
    for at in (1_000, 2_000):
        row = await store.exchange(
            await talk.begin(instructions=leading, instructions_tokens=8, created_at=at)
        )
        assert row is not None
        versions.add(row.instructions)
    (version,) = versions
    found = await store.instructions(talk.key, version)
    assert found is not None
    assert (found.version, found.tokens, found.created_at) == (version, 8, 1_000)
    assert [one.raw.strip() for one in found.messages] == [one.raw.strip() for one in leading]
    assert await store.instructions(talk.key, "0" * 40) is None


def test_a_text_given_twice_is_one_body() -> None:
    assert list(named_bodies([body("user", "a"), body("user", "b"), body("user", "a")])) == [
        body_id(message("user", text).raw) for text in "ab"
    ]


def test_a_message_begins_with_a_brace() -> None:
    assert is_message(b' \n{"role":"user"}')
    assert not is_message(b"\t[]")
    assert messages_in('[{"a": 1} ,{"b":2}]') == (ChatMessage(b'{"a": 1}'), ChatMessage(b'{"b":2}'))
