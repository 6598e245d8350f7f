"""The Agents SDK of OpenAI over chat completions: results go before the next question."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled  # type: ignore[import-not-found]  # it has an environment of its own
from openai import AsyncOpenAI

from tests.sdks.conversation import QUESTIONS, SYSTEM, TOOLS


async def talk(base_url: str, mode: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    agent = Agent(
        name="planner",
        instructions=SYSTEM,
        tools=[function_tool(tool, strict_mode=False) for tool in TOOLS],
        model=OpenAIChatCompletionsModel("gpt-4o-mini", client),
    )
    said: list[Any] = []
    for question in QUESTIONS:
        said = [*said, {"role": "user", "content": question}]
        if mode == "stream":
            result = Runner.run_streamed(agent, said)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, said)
        said = result.to_input_list()


if __name__ == "__main__":
    asyncio.run(talk(*sys.argv[1:]))
