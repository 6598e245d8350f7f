"""A growing conversation about parcels, and a policy with which a model summarizes it."""

from __future__ import annotations

from typing import Any

import orjson

from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until

Message = dict[str, Any]

RULE = "You must never open a parcel of the customer 77-2043."
REPLY = "The parcel was moved to the other shelf."
SOFT, FULL = 24, 30
"""Rounds at which a summary is prepared, and at which the history is trimmed."""
POLICY: dict[str, Any] = {
    "trigger": {"tokens": 3000},
    "target": {"tokens": 2000},
    "keep": {"rounds": 1, "spans": 2},
    "edits": [
        {
            "type": "summarize",
            "mode": "model",
            "keep_rounds": 1,
            "min_messages": 4,
            "min_new_messages": 2,
            "role": "system",
        },
        {"type": "drop_oldest"},
    ],
}
SECTIONS: dict[str, Any] = {"policies": {"default": POLICY}, "tokens": {"calibrate": False}}
"""Settings for which the numbers above are right."""


def parcels(rounds: int, opening: str = RULE) -> list[Message]:
    """Return this many rounds of about 102 tokens each; the last one has no reply yet."""
    said: list[Message] = []
    for at in range(rounds):
        asked = f"Please check parcel number {at} in depot D-{100 + at % 3}. {opening if at == 0 else ''}"
        filler = "It should be moved to another shelf before the evening. " * 6
        said += [{"role": "user", "content": asked + filler}, {"role": "assistant", "content": REPLY}]
    return said[:-1]


def ask(
    proxy: Proxy, session: str, messages: list[Message], model: str, *, stream: bool = False, **given: Any
) -> dict[str, Any]:
    """Send a request and check the answer; return the receipt, with the warning header as `warning`."""
    answer = proxy.chat(session, messages, f"say:{REPLY}+{model}", stream=stream, **given)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        deltas = [choice["delta"] for event in events[:-1] for choice in orjson.loads(event)["choices"]]
        said = "".join(delta.get("content") or "" for delta in deltas)
    else:
        said = answer.json()["choices"][0]["message"]["content"]
    assert said == REPLY
    receipt: dict[str, Any] = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}")
    assert receipt["status"] == "complete"
    return {**receipt, "warning": answer.headers.get("x-context-warning", "")}


def tried(proxy: Proxy, session: str, number: int = 1, seconds: float = 20) -> dict[str, Any]:
    """Wait until `number` summaries were made or failed; return what the session's API shows of them."""
    told: dict[str, Any] = {}

    def enough() -> bool:
        told.update(proxy.get(f"/sessions/{session}")["summarizer"])
        return int(told["ready"]) + int(told["refused"]) + int(told["failed"]) >= number

    until(enough, f"{number} summaries", seconds)
    return told


def asked_for(upstream: Upstream) -> list[Message]:
    """Return the bodies of the requests for summaries."""
    return [request.json for request in upstream.log if b"<transcript-" in request.body]


def sent(upstream: Upstream) -> list[Message]:
    """Return the messages of the newest request that is not for a summary."""
    return next(each.messages for each in reversed(upstream.log) if b"<transcript-" not in each.body)


def stored(proxy: Proxy, session: str) -> list[Message]:
    """Return role and text of each stored message on the session's branch."""
    return [{name: message[name] for name in ("role", "content")} for message in proxy.messages(session)]
