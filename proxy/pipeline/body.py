"""The body that goes upstream: the view of a plan in the place of the client's messages.

Where nothing was trimmed or added, it is the client's own bytes. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from proxy.config import Breakpoints
from proxy.dialects import Message
from proxy.dialects.chat.marks import decides_itself, marked
from proxy.dialects.chat.message import INSTRUCTION_ROLES, ChatMessage
from proxy.dialects.chat.request import ChatRequest, compose
from proxy.dialects.chat.roles import Shape, shaped
from proxy.pipeline.past import History
from proxy.trimming import Plan, merged


class Sending(Struct, frozen=True, kw_only=True):
    """What is done to a body beside putting the view in it."""

    add_usage: bool = False
    """Ask for the usage of a stream."""
    drop_fields: Collection[str] = ()
    """Members that are taken out."""
    breakpoints: Breakpoints = "none"
    """The explicit cache marks that the model takes."""
    key: str | None = None
    """Names the session in the provider's cache; None where that is not wanted."""
    tools: bytes | None = None
    """The JSON text of the tools to offer; None: those of the request."""
    rounds: tuple[Message, ...] = ()
    """What is sent after the view: calls of the proxy's own tools, with their results."""
    shapes: Collection[Shape] = ()
    """The order of roles that the upstream insists on."""


def body_of_view(request: ChatRequest, past: History, plan: Plan, sending: Sending) -> bytes:
    """Return the body to send: what the client sent, in its place in the log, as planned."""
    instructions = tuple([message.without_own_fields() for message in past.instructions])
    if plan.summary is not None and plan.summary.role == "merge":
        instructions = merged(instructions, plan.summary, ChatMessage.dialect)
    view = plan.view
    if sending.breakpoints != "none" and plan.settled and not decides_itself(request.fields):
        whole = marked(
            (*instructions, *view), [len(instructions) + end - 1 for end in plan.settled], sending.breakpoints
        )
        instructions, view = whole[: len(instructions)], whole[len(instructions) :]
    untouched = (
        not past.arrival.composed
        and view == tuple([entry.message for entry in past.entries])
        and instructions == past.instructions
    )
    if sending.rounds:
        view, untouched = (*view, *sending.rounds), False
    if sending.shapes:
        instructions, view = _shaped(instructions, view, sending.shapes)
        untouched = untouched and view == request.messages and instructions == request.instructions
    return compose(
        request,
        instructions=None if untouched else instructions,
        messages=None if untouched else view,
        add_usage=sending.add_usage,
        drop_fields=sending.drop_fields,
        cache_key=sending.key,
        tools=sending.tools,
    )


def _shaped(
    instructions: tuple[Message, ...], view: tuple[Message, ...], shapes: Collection[Shape]
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return instructions and view with their roles in the order that the upstream insists on."""
    whole = (*instructions, *view)
    for shape in sorted(shapes):
        whole = shaped(whole, shape)
    lead = next((i for i, each in enumerate(whole) if each.role not in INSTRUCTION_ROLES), len(whole))
    return whole[:lead], whole[lead:]
