"""LangChain: an agent over `ChatOpenAI`, whose messages are handed back to it with the next question."""

from __future__ import annotations

import sys
from typing import Any

from langchain.agents import create_agent  # type: ignore[import-not-found]  # it has an environment of its own
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]  # the same

from tests.sdks.conversation import QUESTIONS, SYSTEM, TOOLS


def main(base_url: str, mode: str) -> None:
    model = ChatOpenAI(model="gpt-4o-mini", base_url=base_url, api_key="none", streaming=mode == "stream")
    agent = create_agent(model, tools=TOOLS, system_prompt=SYSTEM)
    said: list[Any] = []
    for question in QUESTIONS:
        said = agent.invoke({"messages": [*said, {"role": "user", "content": question}]})["messages"]


if __name__ == "__main__":
    main(*sys.argv[1:])
