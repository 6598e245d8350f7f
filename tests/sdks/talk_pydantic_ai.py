"""Pydantic AI: an agent, whose `all_messages()` is its next `message_history`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterable
from typing import Any

from pydantic_ai import Agent  # type: ignore[import-not-found]  # it has an environment of its own
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # type: ignore[import-not-found]  # the same
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]  # the same

from tests.sdks.conversation import QUESTIONS, SYSTEM, TOOLS


async def watch(_: Any, events: AsyncIterable[Any]) -> None:
    """Read the events, which makes the agent ask for streams."""
    async for _event in events:
        pass


async def talk(base_url: str, mode: str) -> None:
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    of_responses = mode.startswith("responses")
    model = (
        OpenAIResponsesModel("gpt-5", provider=provider)
        if of_responses
        else OpenAIChatModel("gpt-4o-mini", provider=provider)
    )
    agent = Agent(model, system_prompt=SYSTEM, tools=TOOLS)
    said: list[Any] = []
    for question in QUESTIONS:
        # Not `run_stream`, which takes a text that stands beside calls for the answer and goes no further.
        handler = {"event_stream_handler": watch} if mode.endswith("stream") else {}
        said = (await agent.run(question, message_history=said, **handler)).all_messages()


if __name__ == "__main__":
    asyncio.run(talk(*sys.argv[1:]))
