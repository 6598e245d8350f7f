"""History queries about a conversation that was written directly into a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.conversation import ROOT, Incoming, content_hash, names_under
from proxy.dialects import Message
from proxy.store import Body, Branches, HistoryQuery, HistorySnapshot, Kept, Settled, recall
from proxy.trimming import Cut, Gap
from tests.support.asides import RECIPE
from tests.support.talk import Talk, body, message


def incoming(messages: Sequence[Message], **changes: Any) -> Incoming:
    contents = [content_hash(each) for each in messages]
    replies = [place for place, each in enumerate(messages) if each.role == "assistant"]
    return Incoming(names=names_under(ROOT, contents), contents=contents, replies=replies, **changes)


async def ask(
    talk: Talk,
    *messages: Message,
    policy: str | None = None,
    idempotency: str | None = None,
    whole: bool = False,
    instructed: bool = False,
    recipe: str | None = RECIPE,
    agent: str | None = None,
    most: int | None = None,
    **changes: Any,
) -> HistorySnapshot:
    question = HistoryQuery(
        tenant=talk.tenant,
        session=talk.session,
        incoming=incoming(messages, **changes),
        messages=messages,
        policy=policy,
        agent=agent,
        idempotency=idempotency,
        whole=whole,
        instructed=instructed,
        recipe=recipe,
    )
    if most is not None:
        return await talk.store._database.read(lambda connection: recall(connection, question, Branches(), most=most))
    return await talk.store.recall(question)


def texts(found: HistorySnapshot) -> list[str]:
    return [row.message.text for row in found.rows]


def calling(*ids: str) -> Body:
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in ids]
    return body("assistant", "", tool_calls=calls)


async def said_with_calls(talk: Talk, *ids: str, **changes: Any) -> Settled:
    asked = body("user", "one")
    exchange = await talk.begin(asked, **changes)
    return await talk.settle(exchange, asked, replies=(calling(*ids),), **changes)


def result_of(call: str, text: str = "42") -> Message:
    return message("tool", text, tool_call_id=call)


def cut_with(position: int, *gaps: Gap) -> Cut:
    return Cut(
        position=position, policy="lean", version="v1", changes=(), tokens=10, messages=2, tool_calls=0, gaps=gaps
    )


async def long_talk(talk: Talk, turns: int) -> list[str]:
    """Store some turns, with a cut that keeps only the first message and the last question; return the nodes."""
    nodes: list[str] = []
    for number in range(turns - 1):
        settled = await talk.say(f"q{number}", f"a{number}")
        nodes += [*settled.nodes, *settled.replies]
    asked = body("user", "last")
    exchange = await talk.begin(asked)
    settled = await talk.settle(
        exchange,
        asked,
        replies=(body("assistant", "end"),),
        base=nodes[-1],
        at_head=False,
        cut=cut_with(
            2 * turns - 1, Gap(start=1, stop=2 * turns - 2, edit="drop_oldest", reason="old", tokens=5, tool_calls=0)
        ),
        kept=Kept(nodes=(nodes[0],), messages=(0,)),
    )
    return [*nodes, *settled.nodes, *settled.replies]
