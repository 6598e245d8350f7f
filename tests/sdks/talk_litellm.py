"""LiteLLM as a library: replies are appended as the objects that it returns."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm  # type: ignore[import-not-found]  # it has an environment of its own

from tests.sdks.conversation import QUESTIONS, SCHEMAS, SYSTEM, call


def main(base_url: str, mode: str) -> None:
    litellm.telemetry = False
    said: list[Any] = [{"role": "system", "content": SYSTEM}]
    given: dict[str, Any] = {"model": "openai/gpt-4o-mini", "api_base": base_url, "api_key": "none"}
    for question in QUESTIONS:
        said.append({"role": "user", "content": question})
        while True:
            answer = litellm.completion(messages=said, tools=SCHEMAS, stream=mode == "stream", **given)
            if mode == "stream":
                answer = litellm.stream_chunk_builder(list(answer), messages=said)
            message = answer.choices[0].message
            said.append(message)
            for made in message.tool_calls or ():
                result = json.dumps(call(made.function.name, json.loads(made.function.arguments)))
                said.append({"role": "tool", "tool_call_id": made.id, "content": result})
            if not message.tool_calls:
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
