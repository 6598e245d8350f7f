"""Orders of roles that servers insist on: how they say so, and messages brought into them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.dialects import Message, RoleOrder
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.refusals import demanded_order, merged_users, one_system, refuses_usage, reordered


def said(message: str, **more: Any) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": "invalid_request_error", **more}})


TURNS = "Conversation roles must alternate user/assistant/user/assistant/..."
FIRST = "System message must be at the beginning."


@pytest.mark.parametrize(
    ("words", "order"),
    [
        (TURNS, "alternate"),
        (f"{TURNS} {TURNS}", "alternate"),
        (f"After the optional system message, {TURNS.lower()}", "alternate"),
        (
            (
                "After the optional system message, conversation roles must alternate user and assistant "
                "roles except for tool calls and results."
            ),
            "alternate",
        ),
        (f"Error in applying chat template from request: {TURNS}", "alternate"),
        ("After the (optional) system message(s), user and assistant roles should be alternating.", "alternate"),
        (
            (
                "After the (optional) system message(s), user or tool message(s) should alternate with "
                "assistant message(s)."
            ),
            "alternate",
        ),
        (
            (
                "deepseek-reasoner does not support successive user or assistant messages (messages[1] and "
                "messages[2] in your input). You should interleave the user/assistant messages."
            ),
            "alternate",
        ),
        (
            ('messages: roles must alternate between "user" and "assistant", but found multiple "user" roles in a row'),
            "alternate",
        ),
        ("Please ensure that multiturn requests alternate between user and model", "alternate"),
        ("Unexpected role 'user' after role 'user'", "alternate"),
        (FIRST, "one_system"),
        (f"Chat template error: {FIRST}", "one_system"),
        ("System message should be the first one", "one_system"),
        ("System message must be the first message.", "one_system"),
        ("Unexpected role 'system' after role 'assistant'", "one_system"),
        ("Only one system message is allowed.", "one_system"),
        ("Multiple system messages are not supported", "one_system"),
        ("System messages are only allowed at the beginning of a conversation", "one_system"),
        ("Unexpected role 'user' after role 'tool'", None),
        ("Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant", None),
        ("Only user and assistant roles are supported!", None),
        ("System role not supported", None),
        ("Invalid value: 'systems'. Supported values are: 'system', 'assistant', 'user'.", None),
        ("messages with role 'tool' must be a response to a preceding message with 'tool_calls'.", None),
        ("Rate limit reached", None),
    ],
)
def test_every_wording_is_known(words: str, order: RoleOrder | None) -> None:
    assert [demanded_order(status, said(words)) for status in (400, 422, 500)] == [order] * 3
    assert [demanded_order(status, said(words)) for status in (200, 401, 429, 503)] == [None] * 4


def test_it_is_read_however_it_is_wrapped() -> None:
    raw = orjson.dumps({"object": "error", "message": TURNS, "type": "BadRequestError", "code": 400})
    assert demanded_order(400, raw) == "alternate"
    wrapped = {"error": {"message": "Provider returned error", "metadata": {"raw": raw.decode()}}}
    assert demanded_order(400, orjson.dumps(wrapped)) == "alternate"
    assert demanded_order(400, orjson.dumps({"detail": f"Chat template error: {FIRST}"})) == "one_system"
    assert demanded_order(500, FIRST.encode()) == "one_system"
    assert demanded_order(400, b"\xff\x00 nothing") is None
    assert demanded_order(400, b"") is None
    # What repeats the request says nothing by itself.
    assert demanded_order(422, orjson.dumps({"detail": [{"msg": "bad", "input": {"content": TURNS}}]})) is None


def user(content: Any, **more: Any) -> Message:
    return ChatMessage.of({"role": "user", "content": content, **more})


def system(content: Any, role: str = "system") -> Message:
    return ChatMessage.of({"role": role, "content": content})


REPLY = ChatMessage(b'{"role": "assistant",  "content": "yes"}')


def contents(messages: tuple[Message, ...]) -> list[tuple[str, Any]]:
    return [(each.role, each.data["content"]) for each in messages]


def test_user_messages_side_by_side_become_one() -> None:
    given = [user("a", name="ann"), user("b"), user("c", name="bob"), REPLY, user("d")]
    merged = merged_users(given)
    assert contents(merged) == [("user", "a\n\nb\n\nc"), ("assistant", "yes"), ("user", "d")]
    assert merged[0].data["name"] == "ann"
    assert merged[1] is REPLY
    assert merged[2] is given[4]
    assert merged_users([]) == ()


def test_nothing_else_is_merged() -> None:
    tool = ChatMessage.of({"role": "tool", "tool_call_id": "a", "content": "1"})
    given = [system("s"), system("t"), user("a"), REPLY, REPLY, tool, tool, user("b"), system("u"), user("c")]
    assert merged_users(given) == tuple(given)


@pytest.mark.parametrize(
    ("contents_given", "content"),
    [
        (["a", ""], "a"),
        (["", ""], ""),
        (["a", [{"type": "image_url"}]], [{"type": "text", "text": "a"}, {"type": "image_url"}]),
        (["", [{"type": "image_url"}]], [{"type": "image_url"}]),
        (
            [[{"type": "text", "text": "a"}], [{"type": "text", "text": "b"}]],
            [{"type": "text", "text": x} for x in "ab"],
        ),
        ([None, "b"], [{"type": "text", "text": "b"}]),
    ],
)
def test_contents_of_any_form_are_joined(contents_given: list[Any], content: Any) -> None:
    (merged,) = merged_users([user(each) for each in contents_given])
    assert merged.data["content"] == content


def test_all_instructions_become_one_message_at_the_beginning() -> None:
    given = [
        system("a"),
        system("b"),
        user("q"),
        system("c", "developer"),
        REPLY,
        system([{"type": "text", "text": "d"}]),
    ]
    one = one_system(given)
    parts = [{"type": "text", "text": each} for each in "abcd"]
    assert contents(one) == [("system", parts), ("user", "q"), ("assistant", "yes")]
    assert one[2] is REPLY
    texts = one_system(given[:4])
    assert contents(texts) == [("system", "a\n\nb\n\nc"), ("user", "q")]


def test_where_none_leads_one_is_made() -> None:
    assert contents(one_system([user("q"), system("a", "developer")])) == [("developer", "a"), ("user", "q")]
    assert one_system([user("q"), REPLY]) == (user("q"), REPLY)
    lone = [system("a"), user("q")]
    assert [one is given for one, given in zip(one_system(lone), lone, strict=True)] == [True, True]


def test_a_system_message_between_two_users_breaks_the_turns_too() -> None:
    given = [system("a"), user("q"), system("b"), user("r"), REPLY]
    assert contents(reordered(given, "alternate")) == [("system", "a\n\nb"), ("user", "q\n\nr"), ("assistant", "yes")]
    assert contents(reordered(given, "one_system"))[1:3] == [("user", "q"), ("user", "r")]


@pytest.mark.parametrize(
    ("body", "refuses"), [(b"unknown field stream_options", True), (b"no include_usage", True), (b"no", False)]
)
def test_an_error_may_speak_of_the_usage_of_streams(body: bytes, refuses: bool) -> None:
    assert refuses_usage(body) is refuses
