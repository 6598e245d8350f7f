"""Tools of the proxy's own among the client's: where there is room for them, and the bytes that are sent."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.dialects import Request, ToolDefinition
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.request import compose, parse_chat_request
from proxy.dialects.own_tools import MOST_TOOLS

OWN = (
    ToolDefinition(
        name="recall",
        description="Read again.",
        parameters=(("ref", "A ref. {unset} to search."), ("query", "Words. {unset} with a ref.")),
    ),
    ToolDefinition(name="compress", description="Sum up.", parameters=(("reason", "Why now."),)),
)
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def names_for(asked: Request) -> tuple[str, ...]:
    return CHAT.requests.offer_tools(asked, OWN).names


def request(**fields: Any) -> Request:
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return parse_chat_request(orjson.dumps(asked))


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    "fields",
    [
        *({"tool_choice": choice} for choice in ("auto", "required", None)),
        *({"n": 1}, {"n": None}, {"functions": []}, {"functions": None}, {"function_call": None}),
        {"parallel_tool_calls": False},
    ],
)
def test_where_the_model_may_call_what_it_likes_they_are_offered(fields: dict[str, Any]) -> None:
    assert names_for(request(tools=[SEARCH], **fields)) == ("recall", "compress")


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
    assert names_for(request(tools=[SEARCH], **fields)) == ()


@pytest.mark.parametrize(
    "tool",
    [function("recall"), {"type": "custom", "custom": {"name": "recall"}}, {"type": "function", "name": "recall"}],
)
def test_a_name_that_is_taken_is_the_clients(tool: dict[str, Any]) -> None:
    assert names_for(request(tools=[SEARCH, tool])) == ("compress",)


@pytest.mark.parametrize("tool", ["search", {"type": "web_search"}, {"type": "function", "function": {"name": 1}}])
def test_a_tool_of_an_unknown_kind_takes_no_name(tool: Any) -> None:
    assert names_for(request(tools=[tool])) == ("recall", "compress")


def test_a_request_has_only_so_many_tools() -> None:
    tools = [function(f"f{number}") for number in range(MOST_TOOLS - 1)]
    assert names_for(request(tools=tools)) == ()
    assert names_for(request(tools=tools[1:])) == ("recall", "compress")


def test_the_clients_tools_keep_their_bytes_and_come_first() -> None:
    tools = b'[ {"type":"function", "function" : {"name":"search","x":1.50}} \n]'
    asked = parse_chat_request(b'{"messages":[{"role":"user","content":"a"}], "tools":%b,"z":1}' % tools)
    made = CHAT.requests.offer_tools(asked, OWN).tools
    assert made is not None
    assert made.startswith(tools[:-1] + b",{")
    assert [tool["function"]["name"] for tool in orjson.loads(made)] == ["search", "recall", "compress"]
    assert made == CHAT.requests.offer_tools(asked, OWN).tools
    assert orjson.loads(compose(asked, tools=made))["tools"] == orjson.loads(made)


def test_alone_they_are_all_the_tools() -> None:
    for asked in (request(), request(tools=[])):
        made = CHAT.requests.offer_tools(asked, OWN[1:]).tools
        assert made is not None
        assert [tool["function"]["name"] for tool in orjson.loads(made)] == ["compress"]


def test_without_any_the_tools_are_the_clients() -> None:
    asked = request(tools=[SEARCH])
    assert CHAT.requests.offer_tools(asked, ()).tools == asked.tools


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
    made = CHAT.requests.offer_tools(request(tools=tools), OWN).tools
    assert made is not None
    for tool in orjson.loads(made)[-2:]:
        assert tool["function"].get("strict", False) is strict


def made_among(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions of ours that are offered beside these tools."""
    made = CHAT.requests.offer_tools(request(tools=list(tools)), OWN).tools
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
