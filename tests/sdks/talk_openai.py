"""The SDK of OpenAI for Python, with the loop that its documentation shows: replies are appended."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

from tests.sdks.conversation import QUESTIONS, SCHEMAS, SYSTEM, call


def main(base_url: str, mode: str) -> None:
    client: Any = OpenAI(base_url=base_url, api_key="none")
    if mode.startswith("responses"):
        respond(client, stream=mode.endswith("stream"))
        return
    said: list[Any] = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        said.append({"role": "user", "content": question})
        while (calls := reply(client, mode, said)) is not None:
            for identity, name, arguments in calls:
                result = json.dumps(call(name, json.loads(arguments)))
                said.append({"role": "tool", "tool_call_id": identity, "content": result})


def reply(client: Any, mode: str, said: list[Any]) -> list[tuple[str, str, str]] | None:
    """Append the next reply; return the id, name and arguments of each of its calls, None without any.

    The modes are the ways that are in use: the reply's own object, its dump with every null, the object
    with parsed arguments that `parse` returns for strict tools, and that of a stream.
    """
    given: dict[str, Any] = {"model": "gpt-4o-mini", "messages": said, "tools": SCHEMAS}
    if mode == "stream":
        with client.chat.completions.stream(**given) as stream:
            message = stream.get_final_completion().choices[0].message
    elif mode == "parse":
        given["tools"] = [{**tool, "function": {**tool["function"], "strict": True}} for tool in SCHEMAS]
        message = client.chat.completions.parse(**given).choices[0].message
    else:
        message = client.chat.completions.create(**given).choices[0].message
    said.append(message.model_dump() if mode == "dump" else message)
    calls = [(made.id, made.function.name, made.function.arguments) for made in message.tool_calls or ()]
    return calls or None


def respond(client: Any, *, stream: bool) -> None:
    """Hold the conversation by the Responses API: what came out is the next input."""
    said: list[Any] = []
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in SCHEMAS]
    for question in QUESTIONS:
        said.append({"role": "user", "content": question})
        calls: Any = True
        while calls:
            given: dict[str, Any] = {"model": "gpt-5", "instructions": SYSTEM, "input": said, "tools": tools}
            if stream:
                with client.responses.stream(**given) as events:
                    response = events.get_final_response()
            else:
                response = client.responses.create(**given)
            said += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            for made in calls:
                result = json.dumps(call(made.name, json.loads(made.arguments)))
                said.append({"type": "function_call_output", "call_id": made.call_id, "output": result})


if __name__ == "__main__":
    main(*sys.argv[1:])
