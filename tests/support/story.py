"""A session that contains every kind of record, as exported."""

from __future__ import annotations

from proxy.dialects import JsonObject
from proxy.dialects.chat.message import ChatMessage
from proxy.store import Body, Kept, Store
from proxy.trimming import Account, Change, Cut, Gap, Summary
from tests.support.asides import HIDDEN, reply, say, summary
from tests.support.talk import Talk, body, message

CUT = Cut(
    position=1,
    policy="default",
    version="v1",
    changes=(Change(position=0, edit="drop_oldest", reason="old", message=None, tokens_before=4, tokens_after=0),),
    tokens=9,
    messages=1,
    tool_calls=0,
)
"""A cut in the format from before gaps existed."""


SUMMARY = Summary(
    text="So far.",
    role="system",
    until=1,
    tokens=3,
    kind="statistics",
    covered_messages=1,
    covered_tokens=4,
    generation=2,
    state={"said": ["one"]},
)


LATER = Cut(
    position=3,
    policy="default",
    version="v1",
    changes=(),
    tokens=9,
    messages=1,
    tool_calls=0,
    gaps=(Gap(start=0, stop=1, edit="drop_oldest", reason="old", tokens=4, tool_calls=0),),
    summary=SUMMARY,
    account=Account(turns=3, untrimmed=41.5, saved=-2.25),
)


SHORTENED = Change(
    position=0,
    edit="truncate_tool_output",
    reason="long",
    message=message("user", "o"),
    tokens_before=4,
    tokens_after=1,
)
"""What was decided at the arrival of the first message."""


async def told(store: Store) -> list[JsonObject]:
    """Store a session with branches, and return its records."""
    talk = Talk(store=store, tenant="from", session="story")
    asked = Body(message=ChatMessage(b'{"role":"user",  "content":"one \\u0000"}'), tokens=4)
    exchange = await talk.begin(asked, instructions=(message("system", "x"),))
    first = await talk.settle(
        exchange,
        asked,
        replies=(body("assistant", "1", refusal=None), body("assistant", "I")),
        cut=CUT,
        arrivals=((SHORTENED,),),
        agent="writer",
        kind="first",
    )
    await talk.say("two", "2", base=first.head, at_head=False)
    node = first.replies[0]
    last = await talk.say("zwei", "2", base=node, at_head=False, cut=LATER, kept=Kept(nodes=(node,), messages=(0,)))
    await store.keep_summary(talk.key, summary("a", first.nodes[0], 1, tip=node, created_at=1))
    later = summary("b", last.nodes[0], 3, tip=last.head, created_at=2, predecessor="sum_a")
    await store.keep_summary(talk.key, later)
    calls = [{"id": "c1", "type": "function", "function": {"name": "finish", "arguments": "{}"}}]
    await say(talk, "drei", reply("3", HIDDEN, tool_calls=calls))
    return [record async for record in store.export(talk.key)]
