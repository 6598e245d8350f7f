from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.config import VirtualToolSettings
from proxy.dialects.chat.request import ChatRequest, compose, parse_chat_request
from proxy.recall.tools import COMPRESS, MOST_TOOLS, RECALL, offered, with_tools

BOTH = VirtualToolSettings(recall_context=True, compress_chat_history=True)
ALWAYS = VirtualToolSettings(recall_context=True, compress_chat_history=True, only_with_tools=False)
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def request(**fields: Any) -> ChatRequest:
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return parse_chat_request(orjson.dumps(asked))


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    ("switches", "names"),
    [
        ({}, ()),
        ({"recall_context": True}, (RECALL,)),
        ({"compress_chat_history": True}, (COMPRESS,)),
        ({"recall_context": True, "compress_chat_history": True}, (RECALL, COMPRESS)),
    ],
)
def test_what_is_switched_on_is_offered(switches: dict[str, bool], names: tuple[str, ...]) -> None:
    assert offered(request(tools=[SEARCH]), VirtualToolSettings(**switches)) == names


@pytest.mark.parametrize("fields", [{}, {"tools": None}, {"tools": []}])
def test_without_tools_it_depends_on_the_settings(fields: dict[str, Any]) -> None:
    assert offered(request(**fields), BOTH) == ()
    assert offered(request(**fields), ALWAYS) == (RECALL, COMPRESS)


@pytest.mark.parametrize(
    "fields",
    [
        *({"tool_choice": choice} for choice in ("auto", "required", None)),
        *({"n": 1}, {"n": None}, {"functions": []}, {"functions": None}, {"function_call": None}),
        {"parallel_tool_calls": False},
    ],
)
def test_where_the_model_may_call_what_it_likes_they_are_offered(fields: dict[str, Any]) -> None:
    assert offered(request(tools=[SEARCH], **fields), BOTH) == (RECALL, COMPRESS)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tool_choice": {"type": "function", "function": {"name": "search"}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"tool_choice": "any"},
        {"n": 2},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
    ],
)
def test_where_it_may_not_they_are_not(fields: dict[str, Any]) -> None:
    assert offered(request(tools=[SEARCH], **fields), BOTH) == ()


def test_they_need_a_store_and_a_policy() -> None:
    assert offered(request(tools=[SEARCH]), BOTH, stateless=True) == ()
    assert offered(request(tools=[SEARCH]), BOTH, off=True) == ()


@pytest.mark.parametrize(
    "tool",
    [function(RECALL), {"type": "custom", "custom": {"name": RECALL}}, {"type": "function", "name": RECALL}],
)
def test_a_name_that_is_taken_is_the_clients(tool: dict[str, Any]) -> None:
    assert offered(request(tools=[SEARCH, tool]), BOTH) == (COMPRESS,)


@pytest.mark.parametrize(
    "tool", ["search", {"type": "web_search"}, {"type": "function", "function": {"name": 1}}]
)
def test_a_tool_of_an_unknown_kind_takes_no_name(tool: Any) -> None:
    assert offered(request(tools=[tool]), BOTH) == (RECALL, COMPRESS)


def test_a_request_has_only_so_many_tools() -> None:
    tools = [function(f"f{number}") for number in range(MOST_TOOLS - 1)]
    assert offered(request(tools=tools), BOTH) == ()
    assert offered(request(tools=tools[1:]), BOTH) == (RECALL, COMPRESS)


def test_the_clients_tools_keep_their_bytes_and_come_first() -> None:
    tools = b'[ {"type":"function", "function" : {"name":"search","x":1.50}} \n]'
    asked = parse_chat_request(b'{"messages":[{"role":"user","content":"a"}], "tools":%b,"z":1}' % tools)
    made = with_tools(asked, (RECALL, COMPRESS))
    assert made is not None
    assert made.startswith(tools[:-1] + b",{")
    assert [tool["function"]["name"] for tool in orjson.loads(made)] == ["search", RECALL, COMPRESS]
    assert made == with_tools(asked, (RECALL, COMPRESS))
    assert orjson.loads(compose(asked, tools=made))["tools"] == orjson.loads(made)


def test_alone_they_are_all_the_tools() -> None:
    for asked in (request(), request(tools=[])):
        made = with_tools(asked, (COMPRESS,))
        assert made is not None
        assert [tool["function"]["name"] for tool in orjson.loads(made)] == [COMPRESS]


def test_without_any_the_tools_are_the_clients() -> None:
    assert with_tools(request(tools=[SEARCH]), ()) is None


@pytest.mark.parametrize(
    ("tools", "strict"),
    [
        ([function("a", strict=True), function("b", strict=True)], True),
        ([function("a", strict=True), {"type": "custom", "custom": {"name": "b"}}], True),
        ([function("a", strict=True), function("b")], False),
        ([function("a", strict=False)], False),
        ([{"type": "custom", "custom": {"name": "b"}}], False),
        (["a"], False),
    ],
)
def test_among_strict_functions_they_are_strict(tools: list[Any], strict: bool) -> None:
    made = with_tools(request(tools=tools), (RECALL, COMPRESS))
    assert made is not None
    for tool in orjson.loads(made)[-2:]:
        assert tool["function"].get("strict", False) is strict


def made_among(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions of ours that are offered beside these tools."""
    made = with_tools(request(tools=list(tools)), (RECALL, COMPRESS))
    assert made is not None
    return [tool["function"] for tool in orjson.loads(made)[-2:]]


def test_their_schemas_are_as_strict_mode_wants_them() -> None:
    for ours in made_among(function("a", strict=True)):
        parameters = ours["parameters"]
        assert parameters["additionalProperties"] is False
        assert parameters["required"] == list(parameters["properties"])
        assert {told["type"] for told in parameters["properties"].values()} == {"string"}
        assert "Leave out" not in str(ours)


def test_where_nothing_is_strict_nothing_is_required() -> None:
    lax, strict = made_among(SEARCH), made_among(function("a", strict=True))
    for ours, other in zip(lax, strict, strict=True):
        parameters, theirs = ours["parameters"], other["parameters"]
        assert "required" not in parameters
        assert list(parameters["properties"]) == list(theirs["properties"])
        assert "Empty" not in str(ours)
    for name, told in lax[0]["parameters"]["properties"].items():
        unset = strict[0]["parameters"]["properties"][name]["description"]
        assert unset.count("Empty ") == told["description"].count("Leave out ") == 1


def test_what_is_offered_costs_little() -> None:
    made = with_tools(request(), (RECALL, COMPRESS))
    assert made is not None
    assert len(made) < 1_400  # some 300 tokens
