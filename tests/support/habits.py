"""Clients that name no session. Each changes the conversation in its own way when it resends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Final

import httpx

from tests.support.tongues import CHAT, Tongue

Data = dict[str, Any]
Habit = Callable[[list[Data]], list[Data]]

SYSTEM: Final[Data] = {"role": "system", "content": "You help with questions about rivers."}
TOOLS: Final = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
REMINDER: Final = "\n<reminder>Answer briefly, and in the user's language.</reminder>"
EXAMPLES: Final[list[Data]] = [
    {"role": "user", "content": "How long is the Rhine?"},
    {"role": "assistant", "content": "It is 1230 kilometres long, from the Alps to the North Sea."},
    {"role": "user", "content": "And the Elbe?"},
    {"role": "assistant", "content": "1094 kilometres."},
]


def as_it_is(said: list[Data]) -> list[Data]:
    return said


def with_examples(said: list[Data]) -> list[Data]:
    """Begin with few-shot assistant messages, which no model wrote."""
    return [*EXAMPLES, *said]


def with_reminder(said: list[Data]) -> list[Data]:
    """Add a reminder to the newest user message, for one request only."""
    newest = max(place for place, message in enumerate(said) if message["role"] == "user")
    reminded = {**said[newest], "content": said[newest]["content"] + REMINDER}
    return [*said[:newest], reminded, *said[newest + 1 :]]


def with_status(said: list[Data]) -> list[Data]:
    """Add a user message at the end, for one request only, and send ids of calls without their underscores."""

    def plain(message: Data) -> Data:
        if "tool_call_id" in message:
            return message | {"tool_call_id": message["tool_call_id"].replace("_", "")}
        calls = [call | {"id": call["id"].replace("_", "")} for call in message.get("tool_calls") or []]
        return message | {"tool_calls": calls} if calls else message

    return [*map(plain, said), {"role": "user", "content": "<status>Nothing else is running.</status>"}]


def without_earlier_calls(said: list[Data]) -> list[Data]:
    """Leave out the tool calls and results of all turns except the newest."""
    newest = max(place for place, message in enumerate(said) if message["role"] == "user")
    earlier = [m for m in said[:newest] if m["role"] != "tool" and not (m.get("tool_calls") and not m["content"])]
    return [{k: v for k, v in m.items() if k != "tool_calls"} for m in earlier] + said[newest:]


def with_parts(said: list[Data]) -> list[Data]:
    """Send replies as parts with keys that the SDK adds."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"], "annotations": [], "id": f"part_{place}"}]}
        if m["role"] == "assistant" and m["content"]
        else m
        for place, m in enumerate(said)
    ]


def with_other_space(said: list[Data]) -> list[Data]:
    """Change the white space of replies, at their ends and inside."""
    return [
        {**m, "content": f"\n{m['content'].replace(' ', '  ')}\n\n"} if m["role"] == "assistant" and m["content"] else m
        for m in said
    ]


def with_trimmed_space(said: list[Data]) -> list[Data]:
    return [{**m, "content": m["content"].strip()} if m["content"] else m for m in said]


def in_a_window(said: list[Data]) -> list[Data]:
    """Send at most the last nine messages, beginning with a question."""
    begins = [place for place, message in enumerate(said) if message["role"] == "user"]
    return said[next((place for place in begins if len(said) - place <= 9), begins[-1]) :]


def with_cleared_results(said: list[Data]) -> list[Data]:
    """Clear the text of all tool results except the last two."""
    results = [place for place, message in enumerate(said) if message["role"] == "tool"]
    cleared = set(results[:-2])
    return [{**m, "content": "[cleared]"} if place in cleared else m for place, m in enumerate(said)]


class Talker:
    """Holds one conversation, and resends all of it with each request, with its habit applied."""

    def __init__(
        self,
        client: httpx.Client,
        habit: Habit = as_it_is,
        *,
        stream: bool = False,
        tools: bool = False,
        system: Data | None = SYSTEM,
        session: str | None = None,
        body: Mapping[str, Any] | None = None,
        tongue: Tongue = CHAT,
    ) -> None:
        self.tongue = tongue
        self.client = client
        self.habit = habit
        self.stream = stream
        self.tools = tools
        self.system = system
        self.headers = {**tongue.headers, **({} if session is None else {"x-session-id": session})}
        self.body = dict(body or {})
        self.said: list[Data] = []
        self.sessions: list[str] = []  # the session of each request
        self.answers: list[httpx.Response] = []

    def ask(self, text: str) -> Data:
        """Send a user message, then a result for every call in the reply. Returns the final reply."""
        self.said.append({"role": "user", "content": text})
        calls = self.tools
        while True:
            reply = self._request("tool:look" if calls else "echo")
            self.said.append(reply)
            if not reply.get("tool_calls"):
                return reply
            for call in reply["tool_calls"]:
                seen = f"seen by {call['id']}: " + "water " * 20
                self.said.append({"role": "tool", "tool_call_id": call["id"], "content": seen})
            calls = False

    def begun_elsewhere(self, turns: int) -> None:
        """Add a history that did not go through the proxy."""
        for number in range(turns):
            self.said.append({"role": "user", "content": f"What did we say at first, in part {number}?"})
            self.said.append({"role": "assistant", "content": f"We spoke of the rivers of continent {number}."})

    def _request(self, model: str) -> Data:
        sent = [*([self.system] if self.system else []), *self.habit(deepcopy(self.said))]
        tools = TOOLS if self.tools else ()
        body = self.tongue.body(sent, model, tools=tools, stream=self.stream, **self.body)
        answer = self.client.post(self.tongue.path, json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        self.answers.append(answer)
        self.sessions.append(answer.headers["x-session-id"])
        return self.tongue.said(answer.content, stream=self.stream)
