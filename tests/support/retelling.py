"""Changes that clients and intermediate proxies make to a history from turn to turn, with or without a meaning.

Each function takes the messages of a request as an SDK sent them and the number of the turn, and returns the
messages that arrive.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.support.recorded import INSTRUCTIONS, Exchange, Message, Recorded

Retelling = Callable[[list[Message], int], list[Message]]


def retold(recorded: Recorded, retelling: Retelling) -> Recorded:
    """Return a recording with changed requests and the same answers."""
    return replace(
        recorded,
        exchanges=[_retold(exchange, retelling, turn) for turn, exchange in enumerate(recorded.exchanges, start=1)],
    )


def _retold(exchange: Exchange, retelling: Retelling, turn: int) -> Exchange:
    body = exchange.body
    body["messages"] = retelling(body["messages"], turn)
    return replace(exchange, request=json.dumps(body, ensure_ascii=False).encode())


def moving_cache_marks(messages: list[Message], turn: int) -> list[Message]:
    """Put cache marks on the instructions and the two newest questions or results, as clients made for Claude do."""
    del turn
    places = [place for place, message in enumerate(messages) if message["role"] in {"user", "tool"}][-2:]
    marked = {0, *places}
    return [_marked(message) if place in marked else message for place, message in enumerate(messages)]


def _marked(message: Message) -> Message:
    part = {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
    return {**message, "content": [part]}


def marks_on_calls(messages: list[Message], turn: int) -> list[Message]:
    """Put cache marks on the newest reply and on its last call, and change the marks' time to live."""
    place = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if place is None:
        return messages
    mark = {"type": "ephemeral", "ttl": f"{turn}m"}
    message = {**messages[place], "cache_control": mark}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [*calls[:-1], {**calls[-1], "cache_control": mark}]
    return [*messages[:place], message, *messages[place + 1 :]]


def time_in_the_instructions(messages: list[Message], turn: int) -> list[Message]:
    """Put the time into the system prompt."""
    first, *others = messages
    return [{**first, "content": f"{first['content']}\nIt is 12:{turn:02}."}, *others]


def time_in_the_first_question(messages: list[Message], turn: int) -> list[Message]:
    """Put the time into the first user message."""
    place = next(place for place, message in enumerate(messages) if message["role"] == "user")
    first = {**messages[place], "content": f"[12:{turn:02}] {messages[place]['content']}"}
    return [*messages[:place], first, *messages[place + 1 :]]


def index_on_calls(messages: list[Message], turn: int) -> list[Message]:
    """Give the calls an `index`, as in the deltas of a stream."""
    del turn
    return _with_calls(messages, lambda made, place: {"index": place, **made})


def nulls_dropped(messages: list[Message], turn: int) -> list[Message]:
    """Drop every field that is null."""
    del turn
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def nulls_added(messages: list[Message], turn: int) -> list[Message]:
    """Write every field of a reply, with null if it is absent, as strict data models do."""
    fields = ("name", "refusal", "audio", "function_call", "tool_calls", "reasoning_content")
    return [
        {**dict.fromkeys(fields if message["role"] == "assistant" and turn % 2 else ()), **message}
        for message in messages
    ]


def arguments_rewritten(messages: list[Message], turn: int) -> list[Message]:
    """Parse the arguments of calls and serialize them again: sorted or not, indented or not, escaped or not."""

    def rewrite(made: dict[str, Any], _: int) -> dict[str, Any]:
        function = made["function"]
        arguments = json.loads(function["arguments"])
        text = json.dumps(
            arguments, sort_keys=turn % 2 == 0, indent=2 if turn % 3 == 0 else None, ensure_ascii=turn % 5 == 0
        )
        return {**made, "function": {**function, "arguments": text}}

    return _with_calls(messages, rewrite)


def developer_for_system(messages: list[Message], turn: int) -> list[Message]:
    """Use the role `developer` instead of `system`, at every second turn."""
    return [
        {**message, "role": "developer" if turn % 2 else "system"} if message["role"] in INSTRUCTIONS else message
        for message in messages
    ]


def instructions_amid(messages: list[Message], turn: int) -> list[Message]:
    """Insert a system or a developer message after the first question, alternating by turn."""
    amid = {"role": "developer" if turn % 2 else "system", "content": "Be friendly."}
    return [*messages[:2], amid, *messages[2:]]


def text_parts(messages: list[Message], turn: int) -> list[Message]:
    """Write each text as one text part, at every second turn."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if turn % 2 and isinstance(message.get("content"), str) and message["content"]
        else message
        for message in messages
    ]


def names_on_results(messages: list[Message], turn: int) -> list[Message]:
    """Add the tool's name to each result, at every second turn."""
    return [{**message, "name": "tool"} if turn % 2 and message["role"] == "tool" else message for message in messages]


def parsed_beside_texts(messages: list[Message], turn: int) -> list[Message]:
    """Add `parsed` to a reply, as the SDK's `parse` with a response format does."""
    del turn
    return [
        {**message, "parsed": {"answer": message["content"]}}
        if message["role"] == "assistant" and message["content"]
        else message
        for message in messages
    ]


def keys_sorted(messages: list[Message], turn: int) -> list[Message]:
    """Write the fields of messages, calls and functions in another order."""
    ordered: list[Message] = json.loads(json.dumps(messages, sort_keys=turn % 2 == 0))
    return ordered if turn % 2 == 0 else [dict(reversed(message.items())) for message in ordered]


def _with_calls(messages: list[Message], change: Callable[[dict[str, Any], int], dict[str, Any]]) -> list[Message]:
    return [
        {**message, "tool_calls": [change(made, place) for place, made in enumerate(message["tool_calls"])]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
