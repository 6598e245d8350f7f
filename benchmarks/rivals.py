"""What other packages send of recorded sessions. Runs in an environment of its own and imports nothing of Palimpsest.

    python benchmarks/rivals.py < sessions.json > views.jsonl

In: `[{name, messages, requests}]`, each request as the number of messages before it. Out: a line for each session and
package, `{session, rival, version, made, views}`. A view lists messages: a number below `len(messages)` is that message
of the session, a higher one is in `made`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final, TypeAlias

BUDGET: Final = 30_000  # limit in tokens, for the packages that take one
MODEL: Final = "gpt-4o"
OFFLINE: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}

Message: TypeAlias = dict[str, Any]
Choose: TypeAlias = Callable[[int], Sequence[int | Message]]  # from a number of messages to what is sent of them


def langchain(messages: Sequence[Message]) -> Choose:
    """Return `trim_messages` as in its documentation, except that a view may begin with a reply."""
    package: Any = import_module("langchain_core.messages")
    numbered = package.convert_to_messages(messages)
    for number, message in enumerate(numbered):
        message.id = str(number)
    settings = {"strategy": "last", "token_counter": "approximate", "include_system": True, "start_on": ("human", "ai")}
    return lambda stop: [int(each.id) for each in package.trim_messages(numbered[:stop], max_tokens=BUDGET, **settings)]


def litellm(messages: Sequence[Message]) -> Choose:
    """Return `trim_messages` with estimated tokens: its tokenizer takes a second. If it fails, nothing is trimmed."""
    package: Any = import_module("litellm.utils")
    package.token_counter = _estimated

    def choose(stop: int) -> Sequence[Message]:
        try:
            sent: Sequence[Message] = package.trim_messages(_copied(messages[:stop]), model=MODEL, max_tokens=BUDGET)
        except Exception:  # noqa: BLE001 - whatever it raises
            return messages[:stop]
        return sent

    return choose


def headroom(messages: Sequence[Message]) -> Choose:
    """Return `compress` with its default settings."""
    package: Any = import_module("headroom")
    return lambda stop: package.compress(_copied(messages[:stop]), model=MODEL).messages


RIVALS: Final = {"langchain-core": langchain, "litellm": litellm, "headroom-ai": headroom}


def _estimated(model: str, messages: Sequence[Message]) -> int:  # noqa: ARG001 - as it is called
    return sum(len(json.dumps(each)) for each in messages) // 4


def _copied(messages: Sequence[Message]) -> list[Message]:
    return [dict(message) for message in messages]


def lines(session: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each package: what it sends at each request of the session."""
    messages = session["messages"]
    for rival, start in RIVALS.items():
        numbers = {json.dumps(message, sort_keys=True): number for number, message in enumerate(messages)}
        made: list[Message] = []
        views: list[list[int]] = []
        choose = start(messages)
        for stop in session["requests"]:
            view: list[int] = []
            for message in choose(stop):
                if isinstance(message, int):
                    view.append(message)
                    continue
                text = json.dumps(message, sort_keys=True)
                if text not in numbers:
                    numbers[text] = len(messages) + len(made)
                    made.append(message)
                view.append(numbers[text])
            views.append(view)
        found = {"session": session["name"], "rival": rival, "version": version(rival), "made": made, "views": views}
        yield json.dumps(found)


def main() -> None:
    """Write the views of all sessions."""
    os.environ.update(OFFLINE)  # noqa: TID251 - the proxy is not here
    logging.disable(logging.CRITICAL)
    out, sys.stdout = sys.stdout, sys.stderr  # what the packages print goes to stderr
    for session in json.load(sys.stdin):
        for line in lines(session):
            out.write(f"{line}\n")


if __name__ == "__main__":
    main()
