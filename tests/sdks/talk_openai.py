"""The SDK of OpenAI for Python, with the loop that its documentation shows: replies are appended."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

from tests.sdks.conversation import QUESTIONS, SCHEMAS, SYSTEM, call


def main(base_url: str, mode: str) -> None:
    client: Any = OpenAI(base_url=base_url, api_key="none")
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


if __name__ == "__main__":
    main(*sys.argv[1:])
