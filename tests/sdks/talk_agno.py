"""Agno: an agent that keeps its runs in a database and puts all of them before the next question."""

from __future__ import annotations

import sys

from agno.agent import Agent  # type: ignore[import-not-found]  # it has an environment of its own
from agno.db.in_memory import InMemoryDb  # type: ignore[import-not-found]  # the same
from agno.models.openai.like import OpenAILike  # type: ignore[import-not-found]  # the same

from tests.sdks.conversation import QUESTIONS, SYSTEM, TOOLS


def main(base_url: str, mode: str) -> None:
    agent = Agent(
        model=OpenAILike(id="gpt-4o-mini", base_url=base_url, api_key="none"),
        system_message=SYSTEM,
        tools=TOOLS,
        db=InMemoryDb(),
        session_id="recorded",
        add_history_to_context=True,
        num_history_runs=len(QUESTIONS),
        telemetry=False,
    )
    for question in QUESTIONS:
        if mode == "stream":
            for _ in agent.run(question, stream=True):
                pass
        else:
            agent.run(question)


if __name__ == "__main__":
    main(*sys.argv[1:])
