"""When the tools are offered, and how the arguments of a call are read."""

from __future__ import annotations

import pytest

from proxy.config import VirtualToolSettings
from proxy.dialects.chat.own_tools import offer_tools
from proxy.dialects.chat.request import parse_chat_request
from proxy.errors import InvalidRequest
from proxy.recall import COMPRESS, RECALL, offered
from proxy.recall.tools import ALLOWED, Asked, read_asked

BOTH = VirtualToolSettings(recall_context=True, compress_chat_history=True)
ALWAYS = VirtualToolSettings(recall_context=True, compress_chat_history=True, only_with_tools=False)


def names(settings: VirtualToolSettings, *, has_tools: bool = True, **given: bool) -> tuple[str, ...]:
    return tuple(tool.name for tool in offered(settings, has_tools=has_tools, **given))


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({}, ()),
        ({"recall_context": True}, (RECALL,)),
        ({"compress_chat_history": True}, (COMPRESS,)),
        ({"recall_context": True, "compress_chat_history": True}, (RECALL, COMPRESS)),
    ],
)
def test_what_is_switched_on_is_offered(switches: dict[str, bool], expected: tuple[str, ...]) -> None:
    assert names(VirtualToolSettings(**switches)) == expected


def test_without_tools_of_the_client_it_depends_on_the_settings() -> None:
    assert names(BOTH, has_tools=False) == ()
    assert names(ALWAYS, has_tools=False) == (RECALL, COMPRESS)


def test_they_need_a_store_and_a_policy() -> None:
    assert names(BOTH, stateless=True) == ()
    assert names(BOTH, off=True) == ()


def test_the_definitions_cost_little_and_say_how_a_parameter_is_not_given() -> None:
    request = parse_chat_request(b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}')
    made = offer_tools(request, offered(ALWAYS, has_tools=False)).tools
    assert made is not None
    assert len(made) < 1_400  # some 300 tokens
    recall, _ = offered(ALWAYS, has_tools=False)
    assert all(told.count("{unset}") == 1 for _, told in recall.parameters)


# ------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ('{"ref": " ref_1 "}', Asked(ref="ref_1", query="", lines="", grep="")),
        ('{"query": "a b", "ref": "", "lines": "", "grep": ""}', Asked(ref="", query="a b", lines="", grep="")),
        ('{"query": "a", "ref": null, "lines": null, "grep": null}', Asked(ref="", query="a", lines="", grep="")),
        ('{"ref": "r", "lines": "10 - 20", "grep": " x "}', Asked(ref="r", query="", lines="10-20", grep=" x ")),
        ('{"ref": "r", "lines": "7"}', Asked(ref="r", query="", lines="7-7", grep="")),
        ('{"ref": "r", "lines": 7}', Asked(ref="r", query="", lines="7-7", grep="")),
        ('{"ref": "r", "lines": [3, 9]}', Asked(ref="r", query="", lines="3-9", grep="")),
        ('{"ref": "r", "lines": "x"}', Asked(ref="r", query="", lines="x", grep="")),
        ('{"ref": "r", "more": 1}', Asked(ref="r", query="", lines="", grep="")),
    ],
)
def test_what_is_asked_for(arguments: str, asked: Asked) -> None:
    assert read_asked(arguments) == asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "not valid JSON"),
        ('{"ref": "r"', "not valid JSON"),
        ("[" * 5_000, "not valid JSON"),
        ('["ref"]', "no JSON object"),
        ('"ref_1"', "no JSON object"),
        ("{}", "Neither"),
        ('{"ref": " ", "query": ""}', "Neither"),
        ('{"grep": "a"}', "Neither"),
        ('{"ref": "r", "query": "q"}', "Both"),
        ('{"ref": 7}', '"ref" must be a string'),
        ('{"query": ["a"]}', '"query" must be a string'),
        ('{"ref": "r", "grep": {}}', '"grep" must be a string'),
        ('{"ref": "r", "lines": true}', '"lines" must be a string'),
        ('{"ref": "r", "lines": [1, 2, 3]}', '"lines" must be a string'),
        ('{"ref": "r", "lines": []}', '"lines" must be a string'),
    ],
)
def test_what_is_wrong_is_said_with_what_is_allowed(arguments: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_asked(arguments)
    assert words in raised.value.message
    assert ALLOWED in raised.value.message
