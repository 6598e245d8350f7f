"""A session with something of everything, as the records of its export."""

from __future__ import annotations

from proxy.dialects.chat.messages import JsonObject, Message
from proxy.store import Body, Kept, Store
from proxy.trimming import Account, Change, Cut, Gap, Summary
from tests.support.asides import HIDDEN, reply, say, summary
from tests.support.talk import Talk, body, message

CUT = Cut(1, "default", "v1", (Change(0, "drop_oldest", "old", None, 4, 0),), 9, 1, 0)
"""As it was stored before there were gaps."""


SUMMARY = Summary("So far.", "system", 1, 3, "statistics", 1, 4, 2, {"said": ["one"]})


LATER = Cut(
    3,
    "default",
    "v1",
    (),
    9,
    1,
    0,
    (Gap(0, 1, "drop_oldest", "old", 4, 0),),
    SUMMARY,
    Account(3, 41.5, -2.25),
)


async def told(store: Store) -> list[JsonObject]:
    """Tell a story with branches, and return its records."""
    talk = Talk(store, "from", "story")
    asked = Body(Message(b'{"role":"user",  "content":"one \\u0000"}'), 4)
    exchange = await talk.begin(asked, instructions=(message("system", "x"),))
    first = await talk.settle(
        exchange,
        asked,
        replies=(body("assistant", "1", refusal=None), body("assistant", "I")),
        cut=CUT,
        arrivals=((Change(0, "truncate_tool_output", "long", message("user", "o"), 4, 1),),),
        agent="writer",
        kind="first",
    )
    await talk.say("two", "2", base=first.head, at_head=False)
    node = first.replies[0]
    last = await talk.say("zwei", "2", base=node, at_head=False, cut=LATER, kept=Kept((node,), (0,)))
    await store.keep_summary(talk.key, summary("a", first.nodes[0], 1, tip=node, created_at=1))
    later = summary("b", last.nodes[0], 3, tip=last.head, created_at=2, predecessor="sum_a")
    await store.keep_summary(talk.key, later)
    calls = [{"id": "c1", "type": "function", "function": {"name": "finish", "arguments": "{}"}}]
    await say(talk, "drei", reply("3", HIDDEN, tool_calls=calls))
    return [record async for record in store.export(talk.key)]
