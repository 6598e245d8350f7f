"""LlamaIndex: a function agent with a memory buffer."""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent  # type: ignore[import-not-found]  # it has an environment of its own
from llama_index.core.memory import ChatMemoryBuffer  # type: ignore[import-not-found]  # the same
from llama_index.llms.openai import OpenAI  # type: ignore[import-not-found]  # the same

from tests.sdks.conversation import QUESTIONS, SYSTEM, TOOLS


async def talk(base_url: str, mode: str) -> None:
    model = OpenAI(model="gpt-4o-mini", api_base=base_url, api_key="none")
    agent = FunctionAgent(llm=model, tools=TOOLS, system_prompt=SYSTEM, streaming=mode == "stream")
    memory = ChatMemoryBuffer.from_defaults(token_limit=100_000)
    for question in QUESTIONS:
        await agent.run(question, memory=memory)


if __name__ == "__main__":
    asyncio.run(talk(*sys.argv[1:]))
