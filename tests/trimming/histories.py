"""Random histories: such as a client sends, and such as no provider takes.

Blocks of parallel calls with results in any order, ids that are used again, text beside calls,
assistants before anyone asked, two assistants in a row, and the older form of calls. Broken ones
lose results, have results nobody asked for, ids twice or not at all.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from proxy.conversation import open_calls
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage

TRIED = settings(max_examples=60)
"""Each history is many messages, so that few of them try a lot. Nothing is timed."""

IDS = st.sampled_from(["a", "b", "c", "d"])
NAMES = st.sampled_from(["search", "fetch", "note"])
TEXTS = st.sampled_from(["", "ok", "never forget this", "x" * 40, "line\n" * 30, "多字节\n" * 12])
SAID = st.sampled_from(["ok", "never forget this", "x" * 40])


def _call(identity: str, name: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": "{}"}}


def _result(identity: str, text: str) -> Message:
    return ChatMessage.of({"role": "tool", "tool_call_id": identity, "content": text})


@st.composite
def _block(draw: st.DrawFn, *, open_: bool = False) -> list[Message]:
    ids = draw(st.lists(IDS, min_size=1, max_size=4, unique=True))
    fields: dict[str, Any] = {"content": draw(st.sampled_from([None, "", "let me see"]))}
    block = ChatMessage.of({"role": "assistant", **fields, "tool_calls": [_call(each, draw(NAMES)) for each in ids]})
    answered = draw(st.permutations(ids))
    if open_:
        answered = answered[: draw(st.integers(0, len(ids) - 1))]
    return [block, *(_result(each, draw(TEXTS)) for each in answered)]


@st.composite
def _older_block(draw: st.DrawFn) -> list[Message]:
    name = draw(NAMES)
    call = {"name": name, "arguments": "{}"}
    return [
        ChatMessage.of({"role": "assistant", "content": draw(st.sampled_from([None, "so"])), "function_call": call}),
        ChatMessage.of({"role": "function", "name": name, "content": draw(TEXTS)}),
    ]


def _said(role: str) -> st.SearchStrategy[list[Message]]:
    return SAID.map(lambda text: [ChatMessage.of({"role": role, "content": text})])


SPANS = st.one_of(_said("user"), _said("user"), _said("assistant"), _said("system"), _block(), _block(), _older_block())


def valid() -> st.SearchStrategy[list[Message]]:
    """Return histories that keep the rules."""
    return st.lists(SPANS, max_size=12).map(lambda spans: [message for span in spans for message in span])


@st.composite
def _broken_message(draw: st.DrawFn) -> Message:
    calls = st.lists(st.builds(_call, st.one_of(IDS, st.just("")), NAMES), max_size=4)
    return draw(
        st.one_of(
            st.builds(_result, IDS, TEXTS),
            st.builds(_result, IDS, TEXTS),
            st.builds(
                lambda content, items: ChatMessage.of({"role": "assistant", "content": content, "tool_calls": items}),
                st.sampled_from([None, "", "let me see"]),
                calls,
            ),
            _said("user").map(lambda said: said[0]),
            st.just(ChatMessage.of({"role": "assistant", "content": None})),
        )
    )


def broken() -> st.SearchStrategy[list[Message]]:
    """Return histories of which anything may be wrong, and those with something left out."""
    pieces = st.one_of(SPANS, _block(open_=True), _broken_message().map(lambda message: [message]))
    return st.lists(pieces, max_size=10).map(lambda spans: [message for span in spans for message in span])


def grown(history: list[Message]) -> st.SearchStrategy[list[Message]]:
    """Return histories that go on from `history`, whose last calls are answered no further."""
    more = broken()
    if open_calls(history) is not None:
        more = more.map(lambda messages: [ChatMessage.of({"role": "user", "content": "go on"}), *messages])
    return more.map(lambda messages: history + messages)
