"""Short histories for the tests of backtests, and their counts."""

from __future__ import annotations

from typing import Any

from proxy.backtest.comparison import BacktestResult, Figures
from proxy.backtest.histories import SessionHistory, of_messages
from proxy.backtest.replay import Counted
from proxy.tokens import TokenCounter

COUNTER = TokenCounter("estimate")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(*ids: str, text: str | None = None, arguments: str = "{}") -> dict[str, Any]:
    """Return an assistant message that calls a tool under each of the ids."""
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": each, "type": "function", "function": function} for each in ids],
    }


def result(answers: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": answers, "content": text}


def agent(calls: int, *, size: int = 400) -> list[dict[str, Any]]:
    """Return what an agent said and saw on one request: so many calls, each with a result of `size` words."""
    said = [{"role": "system", "content": "be brief"}, user("do all of it")]
    for number in range(calls):
        said += [call(f"c{number}"), result(f"c{number}", f"part {number}: " + "word " * size)]
    return [*said, reply("done")]


def history(said: list[dict[str, Any]], name: str = "talk", **fields: Any) -> SessionHistory:
    return of_messages(name, said, **fields)


def counted(said: list[dict[str, Any]], **fields: Any) -> Counted:
    return Counted(history(said, **fields), COUNTER)


def figures_of(outcome: BacktestResult, strategy: str, prices: str, session: str = "talk") -> Figures:
    """Return what a strategy came to on a session, at a class of prices."""
    (found,) = (
        line.figures
        for line in outcome.sessions
        if (line.strategy, line.session, line.prices) == (strategy, session, prices)
    )
    return found
