"""What is stored instead of the original: masks for secrets, and marks if no content is stored."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.conversation import content_hash
from proxy.dialects import Message, dialect_named
from proxy.errors import InvalidRequest
from proxy.store import Masker, Settlement, Status, Withholder, is_withheld

SECRET = b"s" * 32


def message(data: dict[str, Any], dialect: str = "chat") -> Message:
    return dialect_named(dialect).message(orjson.dumps(data))


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


ALIKE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "chat",
        {"role": "user", "content": "plumbus"},
        {"role": "user", "content": [{"type": "text", "text": "plumbus"}]},
    ),
    ("chat", {"role": "assistant", "content": "plumbus"}, {"role": "assistant", "content": " plumbus\n"}),
    ("chat", call('{"a": "plumbus", "b": 1}'), call('{"b":1,"a":"plumbus"}')),
    (
        "messages",
        {"role": "user", "content": "plumbus"},
        {"role": "user", "content": [{"type": "text", "text": "plumbus", "cache_control": {"type": "ephemeral"}}]},
    ),
    (
        "messages",
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1, "plumbus": 2}}],
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"plumbus": 2, "a": 1}}],
        },
    ),
    (
        "responses",
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"plumbus": 1}'},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{ "plumbus":1 }', "status": "completed"},
    ),
]


@pytest.mark.parametrize(("dialect", "one", "other"), ALIKE)
def test_what_means_the_same_is_withheld_alike(dialect: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    withholder = Withholder(SECRET)
    made = [withholder.message(message(data, dialect)) for data in (one, other)]
    assert content_hash(made[0]) == content_hash(made[1])
    for each in made:
        assert b"plumbus" not in each.raw
        assert is_withheld(each)
        assert withholder.message(each).raw == each.raw  # what is withheld stays as it is
    changed = message(orjson.loads(orjson.dumps(one).replace(b"plumbus", b"plumbas")), dialect)
    assert content_hash(withholder.message(changed)) != content_hash(made[0])
    assert content_hash(Withholder(b"t" * 32).message(message(one, dialect))) != content_hash(made[0])


def test_roles_ids_and_names_of_tools_stay() -> None:
    withholder = Withholder(SECRET)
    asked = withholder.message(message(call('{"a": 1}')))
    assert (asked.role, [(each.id, each.name) for each in asked.calls]) == ("assistant", [("c1", "look")])
    answered = withholder.message(message({"role": "tool", "tool_call_id": "c1", "content": "plumbus"}))
    assert answered.answers == "c1"
    tools = withholder.tools(
        b'[{"type":"function","function":{"name":"look","description":"plumbus","parameters":{}}}]'
    )
    assert tools is not None
    assert b'"look"' in tools
    assert b"plumbus" not in tools


def test_a_message_that_speaks_of_a_mark_is_none() -> None:
    mark = Withholder(SECRET).text("a reply that is long enough")
    assert is_withheld(message({"role": "user", "content": mark}))
    for text in (f"What does {mark} mean?", f'It says "{mark}".', "not_stored", '{"not_stored": 1}'):
        assert not is_withheld(message({"role": "user", "content": text}))


def test_a_warning_that_may_quote_a_model_is_withheld() -> None:
    warnings = ["no summary: plumbus is not in the text", "target missed: 5 tokens are 1 above 4"]
    settlement = Settlement(
        tenant="t",
        session="s",
        exchange="e",
        settled_at=1,
        status=Status.COMPLETE,
        kind="first",
        base="",
        at_head=False,
        moves_head=True,
        messages=(),
        arrivals=(),
        policy_version="",
        agent=None,
        replies=(),
        cut=None,
        tokens_before=0,
        tokens_sent=0,
        receipt={"warnings": warnings},
    )
    kept = Withholder(SECRET).settlement(settlement).receipt["warnings"]
    assert kept == ["no summary: the words are not stored", warnings[1]]


def test_a_short_text_gets_a_mark_that_tells_no_session() -> None:
    withholder = Withholder(SECRET)
    assert len(withholder.text("ok")) < 24 <= len(withholder.text("a reply that is long enough"))
    assert withholder.text("") == ""


@pytest.mark.parametrize("tools", [b"null", b"[]", b'{"a": [1, true, null]}', b"no json"])
def test_whatever_tools_are_they_are_withheld(tools: bytes) -> None:
    withheld = Withholder(SECRET).tools(tools)
    assert withheld is not None
    orjson.loads(withheld)


def test_a_masked_request_names_the_tools_as_they_are_stored() -> None:
    tools = b'[{"type":"function","function":{"name":"f","description":"sk-abcdefghijklmnopqrstuvwx"}}]'
    masked = Masker(["openai"], SECRET).tools(tools)
    assert masked is not None
    assert b"[masked:" in masked


def test_names_in_what_a_tool_is_called_with_are_masked_and_roles_are_not() -> None:
    masker = Masker(["plumbus", "user", "tool_use"], SECRET)
    asked = {"type": "tool_use", "id": "t", "name": "f", "input": {"plumbus": {"a": ["plumbus"]}, "b": 1}}
    made = masker.message(message({"role": "assistant", "content": [asked]}, "messages"))
    assert b"plumbus" not in made.raw
    assert [each.name for each in made.calls] == ["f"]
    said = masker.message(message({"role": "user", "content": "plumbus of the user"}))
    assert said.role == "user"
    assert b"plumbus" not in said.raw


def test_an_import_that_holds_what_is_masked_is_refused() -> None:
    masker = Masker(["plumbus"], SECRET)
    held = {"record": "body", "body": "plumbus", "data": {"role": "user", "content": "hello"}}
    masker.check([held])  # an id is no text
    for field, value in (("data", {"role": "user", "content": "a plumbus"}), ("text", "a plumbus")):
        with pytest.raises(InvalidRequest, match=r"Line 2 of the import holds what store\.mask masks"):
            masker.check([held, {**held, field: value}])
