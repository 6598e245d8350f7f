"""What a store holds beside messages: summaries by a model, and rounds that are hidden from the client."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from proxy.dialects.chat.message import ChatMessage
from proxy.store import Body, Reply, Settled, Status, SummaryRow, SummaryStatus
from proxy.trimming import Hidden
from tests.support.talk import Talk, body, message, settlement

RECIPE = "0123456789ab"


def summary(name: str, node: str, until: int, **changes: Any) -> SummaryRow:
    """Return a ready summary of the first `until` messages of a branch, of which `node` is the last."""
    plain = SummaryRow(
        id=f"sum_{name}",
        node=node,
        tip=node,
        recipe=RECIPE,
        until=until,
        generation=1,
        status=SummaryStatus.READY,
        reason="",
        model="small",
        text=f"So far: {name}",
        state={"values": ["42"]},
        tokens=7,
        covered_messages=until,
        covered_tokens=5 * until,
        predecessor=None,
        asked=False,
        usage={"total_tokens": 50},
        cost=0.25,
        exchange="exc",
        created_at=3_000,
    )
    return replace(plain, **changes)


def failed(name: str, node: str, until: int, **changes: Any) -> SummaryRow:
    """Return a failed attempt at a summary."""
    said = {"status": SummaryStatus.FAILED, "reason": "it did not answer", "text": "", "state": {}}
    return summary(name, node, until, **(said | changes))


HIDDEN = Hidden(
    before=(
        ChatMessage(b'{"role":"assistant", "tool_calls":[{"id":"c1","type":"function","function":'
                b'{"name":"recall_context","arguments":"{\\"ref\\": 1}"}}],"content":null}'),
        message("tool", "The whole text: \u00e9 \x00 \u2028", tool_call_id="c1"),
    ),
    reply=ChatMessage(b'{ "role" : "assistant",\n "content":"\\ud83e\\udd8a" }'),
    after=(message("tool", "so it is", tool_call_id="c2"),),
    tokens=31,
)  # fmt: skip
"""A tool round before a reply, and a result after it. Only a byte-for-byte copy preserves the texts."""


def reply(text: str, hidden: Hidden | None = None, **fields: Any) -> Reply:
    """Return a reply."""
    return Reply(body=body("assistant", text, **fields), hidden=hidden)


async def settle(talk: Talk, exchange: str, *messages: Body, replies: tuple[Reply, ...], **changes: Any) -> Settled:
    """Settle an exchange with replies that consist of more than their texts."""
    mine = {"tenant": talk.tenant, "session": talk.session, "base": talk.bases[exchange]}
    plain = settlement(exchange, *messages, status=Status.COMPLETE, **(mine | changes))
    return await talk.store.settle(replace(plain, replies=replies))


async def say(talk: Talk, text: str, *replies: Reply, **changes: Any) -> Settled:
    """Send a user message at the head, and settle it with these replies."""
    asked = body("user", text)
    return await settle(talk, await talk.begin(asked), asked, replies=replies, **changes)
