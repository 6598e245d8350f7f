"""What a provider of chat completions refuses, in its own words: the rules that trimming must never break.

Written from the API's behaviour and on purpose without the proxy's own rules: what those overlook is
found here.
"""

from __future__ import annotations

from typing import Any, cast

from proxy.dialects import JsonObject


class Refused(Exception):
    """The request is not taken: the body of a 400 in OpenAI's shape."""

    def __init__(self, message: str, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.body: JsonObject = {
            "error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        }


def check(request: Any) -> JsonObject:
    """Return the request if it would be taken.

    Raises:
        Refused: it would not.
    """
    if not isinstance(request, dict):
        raise Refused("We could not parse the JSON body of your request.", None)
    body: JsonObject = cast("JsonObject", request)
    if not isinstance(body.get("model"), str):
        raise Refused("you must provide a model parameter", None)
    if not isinstance(body.get("messages"), list):
        raise Refused("Missing required parameter: 'messages'.", "messages", "missing_required_parameter")
    _not_empty(body["messages"], "messages")
    if "tools" in body:
        _not_empty(body["tools"], "tools")
    _blocks(body["messages"])
    return body


def _not_empty(value: Any, name: str) -> None:
    if value == []:
        raise Refused(
            f"Invalid '{name}': empty array. Expected an array with minimum length 1, "
            "but got an empty array instead.",
            name,
            "empty_array",
        )


def _blocks(messages: list[Any]) -> None:
    """Check that calls and results stand together: every call is answered at once, and nothing else is."""
    open_calls: list[str] = []
    for position, item in enumerate(messages):
        if not isinstance(item, dict):
            raise Refused("Invalid type: expected an object.", f"messages[{position}]", "invalid_type")
        message = cast("JsonObject", item)
        role = message.get("role")
        if role == "tool":
            if message.get("tool_call_id") not in open_calls:
                raise Refused(
                    "Invalid parameter: messages with role 'tool' must be a response to a preceeding message "
                    "with 'tool_calls'.",
                    f"messages.[{position}].role",
                )
            open_calls.remove(message["tool_call_id"])
            continue
        _answered(open_calls, position)
        if role not in {"system", "developer", "user", "assistant"}:
            raise Refused(f"Invalid value: {role!r}.", f"messages[{position}].role", "invalid_value")
        if "tool_calls" in message:
            _not_empty(message["tool_calls"], f"messages[{position}].tool_calls")
            open_calls = [str(call.get("id")) for call in message["tool_calls"] or ()]
    _answered(open_calls, len(messages))


def _answered(open_calls: list[str], position: int) -> None:
    if open_calls:
        raise Refused(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to "
            f"each 'tool_call_id'. The following tool_call_ids did not have response "
            f"messages: {', '.join(open_calls)}",
            f"messages.[{position}].role",
        )
