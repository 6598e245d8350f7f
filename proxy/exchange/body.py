"""The body that goes upstream: the view of a plan in the place of the client's messages.

Where nothing was trimmed or added, it is the client's own bytes. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from proxy.exchange.past import Past
from proxy.settings.model import Breakpoints
from proxy.trimming.plan import Plan
from proxy.trimming.view import merged
from proxy.wire.marks import decides_itself, marked
from proxy.wire.request import ChatRequest, compose


def body_of_view(
    request: ChatRequest,
    past: Past,
    plan: Plan,
    *,
    add_usage: bool,
    drop_fields: Collection[str],
    breakpoints: Breakpoints = "none",
    key: str | None = None,
) -> bytes:
    """Return the body to send.

    Args:
        request: what the client sent.
        past: where it belongs.
        plan: what is sent of that.
        add_usage: ask for the usage of a stream.
        drop_fields: members that are taken out.
        breakpoints: the explicit cache marks that the model takes.
        key: names the session in the provider's cache; None where that is not wanted.
    """
    instructions = tuple(message.without_own_fields() for message in past.instructions)
    if plan.summary is not None and plan.summary.role == "merge":
        instructions = merged(instructions, plan.summary)
    view = plan.view
    if breakpoints != "none" and plan.settled and not decides_itself(request.fields):
        whole = marked(
            (*instructions, *view), [len(instructions) + end - 1 for end in plan.settled], breakpoints
        )
        instructions, view = whole[: len(instructions)], whole[len(instructions) :]
    untouched = (
        not past.arrival.composed
        and view == tuple(entry.message for entry in past.entries)
        and instructions == past.instructions
    )
    return compose(
        request,
        instructions=None if untouched else instructions,
        messages=None if untouched else view,
        add_usage=add_usage,
        drop_fields=drop_fields,
        cache_key=key,
    )
