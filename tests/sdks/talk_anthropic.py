"""The SDK of Anthropic for Python: the content of each reply is appended."""

from __future__ import annotations

import json
import sys
from typing import Any

from anthropic import Anthropic  # type: ignore[import-not-found]  # it has an environment of its own

from tests.sdks.conversation import QUESTIONS, SCHEMAS, SYSTEM, call


def main(base_url: str, mode: str) -> None:
    client: Any = Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none")
    tools = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"]["description"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in SCHEMAS
    ]
    said: list[Any] = []
    for question in QUESTIONS:
        said.append({"role": "user", "content": question})
        calls: Any = True
        while calls:
            given = {"model": "claude", "max_tokens": 4096, "system": SYSTEM, "messages": said, "tools": tools}
            if mode == "stream":
                with client.messages.stream(**given) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**given)
            said.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": made.id, "content": json.dumps(call(made.name, made.input))}
                for made in calls
            ]
            if results:
                said.append({"role": "user", "content": results})


if __name__ == "__main__":
    main(*sys.argv[1:])
