"""A client of a proxy that may die at any moment. It records the replies whose end it saw.

The end of a reply is the last byte of a JSON body, or `[DONE]`. A reply that ended is durable, so the proxy's API
must show it later: see `Shown`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson

from tests.support.api_rules import check

Reply = tuple[str, tuple[str, ...]]
"""Content and the arguments of the calls: they identify a reply of the stand-in."""


class CutOffError(Exception):
    """The connection broke before the end of the reply."""


@dataclass
class Talker:
    """One client in one session; `base` is the proxy's current address."""

    http: aiohttp.ClientSession
    base: str
    session: str
    appends: bool
    """Whether it sends only what is new; otherwise it resends everything."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Its copy of the conversation."""
    seen: list[Reply] = field(default_factory=list)
    """The replies whose end it saw."""

    async def say(self, message: dict[str, Any], model: str, *, stream: bool, retried: bool = False) -> str:
        """Send one more message and take the reply; return the exchange's id.

        Raises:
            CutOffError: the connection broke; send the same message again with `retried`.
        """
        asked = [*self.history, message]
        body = {"model": model, "messages": asked[-1:] if self.appends else asked, "stream": stream}
        sent = {"x-session-id": self.session, "x-session-mode": "append" if self.appends else "full"}
        if retried:
            sent["x-stainless-retry-count"] = "1"
        try:
            async with self.http.post(f"{self.base}/v1/chat/completions", json=body, headers=sent) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, OSError) as why:
            raise CutOffError from why
        assert answer.status == 200, raw
        reply = _streamed(raw) if stream else orjson.loads(raw)["choices"][0]["message"]
        self.seen.append(reply_of(reply))
        kept = {name: reply[name] for name in ("role", "content", "tool_calls") if reply.get(name)}
        self.history = [*asked, kept]
        return answer.headers["x-exchange-id"]


def reply_of(message: dict[str, Any]) -> Reply:
    """Return what identifies a reply."""
    calls = message.get("tool_calls") or ()
    return message.get("content") or "", tuple(call["function"]["arguments"] for call in calls)


def _streamed(raw: bytes) -> dict[str, Any]:
    """Assemble a streamed reply.

    Raises:
        CutOffError: its end is missing.
    """
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise CutOffError
    reply: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for choice in orjson.loads(event)["choices"]:
            reply["content"] += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"function": {"name": "", "arguments": ""}})
                call |= {name: piece[name] for name in ("id", "type") if name in piece}
                for name, text in piece["function"].items():
                    call["function"][name] += text
    if calls:
        reply["tool_calls"] = list(calls.values())
    return reply


@dataclass(frozen=True)
class Shown:
    """Everything that the API shows of a session."""

    replies: Counter[Reply]
    """How many nodes hold each reply, on all branches together."""
    statuses: Counter[str]
    """How the exchanges ended."""

    def lacks(self, seen: Iterable[Reply]) -> dict[Reply, int]:
        """Return the replies that are not stored exactly once, with how often each is stored."""
        return {reply: self.replies[reply] for reply in seen if self.replies[reply] != 1}


async def shown(http: aiohttp.ClientSession, base: str, session: str) -> Shown:
    """Read a session through every route, and check each branch against the provider's rules."""
    name = quote(session, safe="")

    async def get(path: str) -> Any:
        async with http.get(f"{base}/sessions/{name}{path}") as answer:
            raw = await answer.read()
            assert answer.status == 200, (path, raw)
            return orjson.loads(raw)

    replies: dict[str, Reply] = {}
    listed = await get("")
    for branch in listed["branches"]:
        rows = (await get(f"/messages?meta=true&branch={branch['head']}"))["data"]
        _check_branch([row["message"] for row in rows])
        replies |= {row["node"]: reply_of(row["message"]) for row in rows if row["message"]["role"] == "assistant"}
    assert len((await get("/messages"))["data"]) == listed["messages"]
    if listed["messages"]:
        assert (await get("/context"))["messages"]
    statuses: Counter[str] = Counter()
    after = ""
    while True:
        page = await get(f"/exchanges?limit=1000{after}")
        statuses.update(row["status"] for row in page["data"])
        if page["next"] is None:
            return Shown(replies=Counter(replies.values()), statuses=statuses)
        after = f"&after={quote(page['next'], safe='')}"


def _check_branch(messages: list[dict[str, Any]]) -> None:
    """Raise `Refused` if the provider would refuse to continue this branch. Calls may still lack results."""
    closed = messages[:-1] if messages[-1].get("tool_calls") else messages
    if closed:
        check({"model": "m", "messages": closed}, plain=False, lenient=True)
