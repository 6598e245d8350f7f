"""The Agents SDK of OpenAI over chat completions, or as it is by default: results go before the next question."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agents import (  # type: ignore[import-not-found]  # it has an environment of its own
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.sdks.conversation import QUESTIONS, SYSTEM, TOOLS


async def talk(base_url: str, mode: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    model: Any = OpenAIChatCompletionsModel("gpt-4o-mini", client)
    if mode.startswith("responses"):
        set_default_openai_client(client, use_for_tracing=False)
        model = "gpt-5"
    agent = Agent(
        name="planner",
        instructions=SYSTEM,
        tools=[function_tool(tool, strict_mode=False) for tool in TOOLS],
        model=model,
    )
    said: list[Any] = []
    for question in QUESTIONS:
        said = [*said, {"role": "user", "content": question}]
        if mode.endswith("stream"):
            result = Runner.run_streamed(agent, said)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, said)
        said = result.to_input_list()


if __name__ == "__main__":
    asyncio.run(talk(*sys.argv[1:]))
