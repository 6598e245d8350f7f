"""What the Chat Completions API refuses, for the stand-in provider of the tests.

It is written from the API's reference and its real error messages, independently of the package under
test, so that the two do not share a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

PARAMETERS = {
    *("audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_tokens"),
    *("max_completion_tokens", "messages", "metadata", "modalities", "model", "n", "parallel_tool_calls"),
    *("prediction", "presence_penalty", "prompt_cache_key", "reasoning_effort", "response_format", "seed"),
    *("safety_identifier", "service_tier", "stop", "store", "stream", "stream_options", "temperature"),
    *("tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity", "web_search_options"),
}
FIELDS = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {
        *("role", "content", "name", "refusal", "audio", "tool_calls", "function_call"),
        *("annotations", "reasoning_content"),
    },
    "tool": {"role", "content", "tool_call_id", "name"},
    "function": {"role", "content", "name"},
}


class Refused(Exception):
    """A request that the API answers with an error."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": None}}


def check(body: Any, *, plain: bool, lenient: bool, strict: str = "") -> None:
    """Raise `Refused` where the API would.

    `plain` refuses features that some compatible servers do not support. `lenient` accepts unknown roles and
    fields, as others do. `strict` names an order of roles that some models' templates require.
    """
    if not isinstance(body, dict):
        raise Refused("We could not parse the JSON body of your request.")
    if plain and "stream_options" in body:
        raise Refused("Extra inputs are not permitted: stream_options", "stream_options", 422)
    _check_parameters(body)
    if not lenient:
        if unknown := sorted(set(body) - PARAMETERS):
            raise Refused(f"Unrecognized request argument supplied: {unknown[0]}", unknown[0])
        for place, message in enumerate(body["messages"]):
            _check_fields(place, message)
    _check_blocks(body["messages"])
    _check_order([message["role"] for message in body["messages"]], strict)


def _check_order(roles: list[str], strict: str) -> None:
    rules = strict.split(",")
    if "one-system" in rules and {"system", "developer"} & set(roles[1:]):
        raise Refused("System message must be at the beginning.", "messages")
    turns = [role for role in roles if role in {"user", "assistant"}]
    if "alternate" in rules and ("user", "user") in pairwise(turns):
        said = "Conversation roles must alternate user/assistant/user/assistant/..."
        raise Refused(said, "messages")


def _check_parameters(body: dict[str, Any]) -> None:
    if not isinstance(body.get("model"), str):
        raise Refused("you must provide a model parameter", "model")
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise Refused("Invalid 'messages': expected an array with minimum length 1.", "messages")
    if body.get("tools") == []:
        raise Refused("Invalid 'tools': empty array. Expected an array with minimum length 1.", "tools")
    if "stream_options" in body and not body.get("stream"):
        raise Refused("'stream_options' is only allowed when 'stream' is enabled.", "stream_options")


def _check_fields(place: int, message: Any) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in FIELDS:
        raise Refused(f"Invalid value: {role!r}.", f"messages[{place}].role")
    if unknown := sorted(set(message) - FIELDS[role]):
        raise Refused(f"Unknown parameter: 'messages[{place}].{unknown[0]}'.", f"messages[{place}].{unknown[0]}")
    content = message.get("content")
    if role != "assistant" and not isinstance(content, str) and not (isinstance(content, list) and content):
        raise Refused("Invalid value for 'content'.", f"messages[{place}].content")
    if role == "assistant" and not any(message.get(field) for field in ("tool_calls", "function_call")):
        if "tool_calls" in message and message["tool_calls"] is not None:
            raise Refused("Invalid 'tool_calls': empty array.", f"messages[{place}].tool_calls")
        if content is None and not message.get("refusal") and not message.get("audio"):
            raise Refused("Invalid value for 'content': expected a string, got null.", f"messages[{place}].content")


def _check_blocks(messages: list[Any]) -> None:
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if message.get("role") == "tool":
            if message.get("tool_call_id") not in waiting:
                raise Refused(
                    "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'.",
                    f"messages[{place}].role",
                )
            waiting.remove(message["tool_call_id"])
            continue
        _answered(waiting, place)
        waiting = list(_ids(message, place))
    _answered(waiting, len(messages))


def _answered(waiting: list[str], place: int) -> None:
    if waiting:
        raise Refused(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            f"'tool_call_id'. These did not have response messages: {', '.join(waiting)}",
            f"messages[{place}].role",
        )


def _ids(message: dict[str, Any], place: int) -> Iterator[str]:
    seen: set[str] = set()
    for call in message.get("tool_calls") or ():
        if call["id"] in seen:
            raise Refused("Duplicate value for 'tool_call_id'.", f"messages[{place}].tool_calls")
        seen.add(call["id"])
        yield call["id"]
