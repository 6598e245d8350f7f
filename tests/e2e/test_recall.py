"""Tools that the proxy answers itself: the model can read what was trimmed, and the client sees one reply."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import orjson
import pytest
from openai import DefaultHttpxClient, OpenAI

from tests.e2e.conftest import Serve
from tests.support.server import Proxy, settings_for
from tests.support.upstream import Upstream
from tests.support.waiting import until

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "search")
]
OWN = ("recall_context", "compress_chat_history")
LOG = "\n".join(f"entry {number}: nothing" for number in range(1, 200)) + "\nentry 200: the valve broke"
SECTIONS: dict[str, Any] = {
    "virtual_tools": {"recall_context": True, "compress_chat_history": True},
    "policies": {
        "default": {"on_arrival": [{"type": "truncate_tool_output", "max_lines": 3, "direction": "head"}]},
        "lean": {
            "trigger": {"tokens": 100},
            "keep": {"rounds": 0, "spans": 0},
            "edits": [{"type": "clear_tool_results", "keep": 0}],
        },
    },
}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(**SECTIONS)


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    return {"id": f"{name}_{number}", "type": "function", "function": function}


def reply(text: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def recall(number: int = 0, **arguments: Any) -> dict[str, Any]:
    return call("recall_context", number, **arguments)


class Talk:
    """A conversation as with an SDK: it resends the whole history each time."""

    def __init__(self, url: str, session: str, upstream: Upstream, *, stream: bool, policy: str = "default") -> None:
        self.upstream = upstream
        self.stream = stream
        self.session = session
        self.said: list[Any] = []
        self.appends = False
        """Whether to send only new messages."""
        self.script = f"{session}-script"
        self.sdk = OpenAI(
            base_url=f"{url}/v1",
            api_key="sk-test",
            max_retries=0,
            default_headers={"X-Session-ID": session, "X-Context-Policy": policy},
            http_client=DefaultHttpxClient(trust_env=False),
        )

    def ask(self, *said: dict[str, Any] | str, **given: Any) -> dict[str, Any]:
        """Send messages; add the reply to the history, and return it."""
        if self.appends:
            self.said = []
            given["extra_headers"] = {"X-Session-Mode": "append"}
        self.said += [{"role": "user", "content": item} if isinstance(item, str) else item for item in said]
        model = f"script:{self.script}" if self.upstream.scripts.get(self.script) else "echo"
        asked: dict[str, Any] = {"model": model, "messages": self.said, "tools": TOOLS, **given}
        if self.stream:
            with self.sdk.chat.completions.stream(**asked) as events:
                for _ in events:
                    pass
                completion: Any = events.get_final_completion()
        else:
            completion = self.sdk.chat.completions.create(**asked)
        (choice,) = completion.choices
        message: dict[str, Any] = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
        for made in message.get("tool_calls", ()):  # the SDK adds these fields
            made.pop("index", None)
            made["function"].pop("parsed_arguments", None)
        assert choice.finish_reason == ("tool_calls" if "tool_calls" in message else "stop")
        self.said.append(message)
        return message

    def scripted(self, *messages: dict[str, Any]) -> None:
        """Queue these as the model's next messages."""
        self.upstream.load(self.script, list(messages))

    def results(self, message: dict[str, Any], text: str = "fine") -> list[dict[str, Any]]:
        """Return a result for each call of a reply."""
        return [{"role": "tool", "tool_call_id": made["id"], "content": text} for made in message.get("tool_calls", ())]

    def looked(self) -> str:
        """Let the model read the log; return the ref in place of the part that was left out."""
        self.scripted(reply(None, call("look")))
        message = self.ask("look at it")
        self.ask(*self.results(message, LOG))
        return ref_in(self.upstream)

    def close(self) -> None:
        self.sdk.close()


@contextmanager
def talking(
    url: str, session: str, upstream: Upstream, *, stream: bool = True, policy: str = "default"
) -> Iterator[Talk]:
    talk = Talk(url, session, upstream, stream=stream, policy=policy)
    try:
        yield talk
    finally:
        talk.close()


@pytest.fixture(params=[False, True], ids=["json", "stream"])
def talk(proxy: Proxy, upstream: Upstream, session: str, request: pytest.FixtureRequest) -> Iterator[Talk]:
    with talking(proxy.url, session, upstream, stream=request.param) as talk:
        yield talk


def ref_in(upstream: Upstream) -> str:
    found = re.search(r"(?<=ref=)[0-9a-f]{8,40}|ref_[0-9a-f]{16}", orjson.dumps(upstream.last.messages).decode())
    assert found is not None
    return found[0]


def raw_messages(body: bytes) -> list[bytes]:
    """Return the bytes of each message as it was sent."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return [bytes(raw) for raw in msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])]


def check(upstream: Upstream) -> None:
    """Check that nothing was refused, that the tools stayed, and that every request extends the previous one."""
    assert [request.refused for request in upstream.log] == [None] * len(upstream.log)
    tools = {orjson.dumps(request.json["tools"]) for request in upstream.log}
    assert len(tools) == 1
    names = [tool["function"]["name"] for tool in upstream.last.json["tools"]]
    assert names == ["look", "search", *OWN]
    sent = [raw_messages(request.body) for request in upstream.log]
    for before, after in pairwise(sent):
        assert after[: len(before)] == before


def unseen(talk: Talk, proxy: Proxy) -> None:
    """Check that neither the client's messages nor the stored ones show the proxy's tools."""
    assert not any(name in orjson.dumps(talk.said).decode() for name in OWN)
    assert not any(name in orjson.dumps(proxy.messages(talk.session)).decode() for name in OWN)


def test_what_was_shortened_is_read_again(talk: Talk, proxy: Proxy, upstream: Upstream) -> None:
    ref = talk.looked()
    assert "valve" not in str(upstream.last.messages)
    talk.scripted(reply(None, recall(ref=ref, grep="broke")), reply("The valve broke."))

    assert talk.ask("what broke?")["content"] == "The valve broke."
    assert talk.ask("thanks")["content"] == "echo: thanks"

    result = upstream.last.messages[6]
    assert (result["role"], result["tool_call_id"]) == ("tool", "recall_context_0")
    assert "\n200: entry 200: the valve broke\n" in result["content"]
    assert [message["role"] for message in upstream.last.messages[4:]] == [
        *("user", "assistant", "tool", "assistant", "user")
    ]
    check(upstream)
    unseen(talk, proxy)
    assert len(proxy.messages(talk.session)) == len(talk.said)


def test_what_was_cleared_is_read_again(proxy: Proxy, upstream: Upstream, session: str) -> None:
    with talking(proxy.url, session, upstream, policy="lean") as talk:
        talk.scripted(reply(None, call("look")))
        talk.ask(*talk.results(talk.ask("look at it"), LOG))
        talk.ask("go on")
        assert "[cleared " in str(upstream.last.messages)
        talk.scripted(reply(None, recall(ref=f"ref={ref_in(upstream)}", lines="200")), reply("A valve."))
        assert talk.ask("what was it?")["content"] == "A valve."
        assert "<<< ref_" in upstream.last.messages[-1]["content"]
        assert "entry 200: the valve broke" in upstream.last.messages[-1]["content"]
        unseen(talk, proxy)


def test_a_search_finds_what_has_no_ref(talk: Talk, proxy: Proxy, upstream: Upstream) -> None:
    talk.looked()
    talk.scripted(reply(None, recall(query="valve")), reply("Entry 200."))
    assert talk.ask("which entry was it?")["content"] == "Entry 200."
    found = upstream.last.messages[-1]["content"]
    assert "the result of the tool look, message 3\n  200| entry 200: the valve broke" in found
    assert "which entry" not in found
    check(upstream)


OWN_CALLS = [recall(1, query="valve"), recall(2, query="pump"), call("compress_chat_history", 3)]
THEIRS = [call("look", 1, at="a"), call("search", 2, what="é" * 9)]
ORDERS: dict[str, Sequence[dict[str, Any]]] = {
    "own-first": [OWN_CALLS[0], THEIRS[0]],
    "own-last": [THEIRS[0], OWN_CALLS[0]],
    "own-between": [THEIRS[0], OWN_CALLS[0], THEIRS[1]],
    "theirs-between": [OWN_CALLS[0], THEIRS[0], OWN_CALLS[1]],
    "taking-turns": [OWN_CALLS[0], THEIRS[0], OWN_CALLS[1], THEIRS[1], OWN_CALLS[2]],
    "all-own": OWN_CALLS,
    "all-theirs": THEIRS,
}


@pytest.mark.parametrize("text", [None, "Let me see. "])
@pytest.mark.parametrize("order", ORDERS)
def test_calls_in_every_order(talk: Talk, proxy: Proxy, upstream: Upstream, order: str, text: str | None) -> None:
    calls = list(ORDERS[order])
    theirs = [made for made in calls if made["function"]["name"] not in OWN]
    talk.scripted(reply(text, *calls), *([] if theirs else [reply("Done.")]))

    first = talk.ask("begin")
    if theirs:
        assert first["tool_calls"] == theirs
        assert first.get("content") == text
        talk.ask(*talk.results(first))
    else:
        assert first["content"] == f"{text or ''}Done."
    talk.ask("and on")

    block = next(message for message in upstream.last.messages if message.get("tool_calls"))
    place = upstream.last.messages.index(block)
    assert block["tool_calls"] == calls
    results = upstream.last.messages[place + 1 : place + 1 + len(calls)]
    assert {result["tool_call_id"] for result in results} == {made["id"] for made in calls}
    check(upstream)
    unseen(talk, proxy)


def test_text_before_between_and_after_is_one_reply(talk: Talk, proxy: Proxy, upstream: Upstream) -> None:
    talk.scripted(
        reply("One. ", recall(1, query="valve")),
        reply("Two. ", recall(2, query="pump")),
        reply("Three. ", recall(3, query="hose"), call("look", 4)),
    )
    first = talk.ask("begin")
    assert first["content"] == "One. Two. Three. "
    assert [made["id"] for made in first["tool_calls"]] == ["look_4"]
    talk.ask(*talk.results(first))
    talk.ask("and on")
    said = [message.get("content") for message in upstream.last.messages if message["role"] == "assistant"]
    assert said[:3] == ["One. ", "Two. ", "Three. "]
    check(upstream)
    unseen(talk, proxy)


def test_texts_that_would_run_into_each_other_are_kept_apart(talk: Talk, proxy: Proxy, upstream: Upstream) -> None:
    talk.scripted(
        reply("Let me look.", recall(1, query="valve")),
        reply(None, recall(2, query="pump")),
        reply("Not yet.\n", recall(3, query="hose")),
        reply("The code is 7.", call("look", 4)),
    )
    first = talk.ask("begin")
    assert first["content"] == "Let me look.\n\nNot yet.\nThe code is 7."
    talk.ask(*talk.results(first))
    talk.ask("and on")
    said = [message.get("content") for message in upstream.last.messages if message["role"] == "assistant"]
    assert said[:4] == ["Let me look.", None, "Not yet.\n", "The code is 7."]
    check(upstream)
    unseen(talk, proxy)
    assert [message["content"] for message in proxy.messages(talk.session)] == [
        message.get("content") for message in talk.said
    ]


def test_a_model_that_recalls_for_ever_is_stopped(talk: Talk, proxy: Proxy, upstream: Upstream) -> None:
    talk.scripted(*[reply(None, recall(number, query="valve")) for number in range(9)])
    assert talk.ask("begin")["content"]
    assert len(upstream.log) == 4
    talk.scripted()
    assert talk.ask("and on")["content"] == "echo: and on"
    check(upstream)
    unseen(talk, proxy)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"ref": "ref_0000000000000000"}', "There is nothing under ref_0000000000000000"),
        ('{"ref": "the log"}', "is not a ref"),
        ('{"ref": "a", "query": "b"}', "Both"),
        ('{"query": ', "not valid JSON"),
        ("", "not valid JSON"),
        ('{"query": ["a"]}', '"query" must be a string'),
        ('{"query": "unheard-of"}', "Nothing in this conversation matches"),
    ],
)
def test_a_call_that_asks_for_nothing_is_told_so(
    talk: Talk, proxy: Proxy, upstream: Upstream, arguments: str, words: str
) -> None:
    asked = recall()
    asked["function"]["arguments"] = arguments
    talk.scripted(reply(None, asked), reply("I do not know."))
    assert talk.ask("begin")["content"] == "I do not know."
    assert words in upstream.last.messages[-1]["content"]
    talk.ask("and on")
    check(upstream)


def test_the_refs_of_others_lead_nowhere(talk: Talk, proxy: Proxy, upstream: Upstream, session: str) -> None:
    with talking(proxy.url, f"{session}-other", upstream) as other:
        ref = other.looked()
    upstream.forget()
    talk.scripted(reply(None, recall(ref=ref), recall(1, query="valve")), reply("No."))
    talk.ask("begin")
    assert "There is nothing under" in upstream.last.messages[-2]["content"]
    assert "Nothing in this conversation" in upstream.last.messages[-1]["content"]
    assert "entry 200" not in upstream.last.body.decode()


def test_a_client_that_never_answers_its_own_calls(talk: Talk, proxy: Proxy, upstream: Upstream) -> None:
    talk.scripted(reply(None, recall(query="valve"), call("look", 1)))
    talk.ask("begin")
    assert talk.ask("never mind")["content"] == "echo: never mind"
    assert talk.ask("and on")["content"] == "echo: and on"
    assert [request.refused for request in upstream.log] == [None] * 3
    unseen(talk, proxy)


def test_a_client_that_appends(talk: Talk, proxy: Proxy, upstream: Upstream) -> None:
    talk.appends = True
    ref = talk.looked()
    for text in ("what broke?", "and why?"):
        talk.scripted(reply(None, recall(ref=ref, lines="200")), reply("The valve."))
        assert talk.ask(text)["content"] == "The valve."
    talk.ask("thanks")
    assert len([message for message in upstream.last.messages if "<<< ref_" in str(message)]) == 2
    check(upstream)
    unseen(talk, proxy)


def test_a_turn_that_is_made_anew_is_without_it(talk: Talk, proxy: Proxy, upstream: Upstream) -> None:
    talk.ask("begin")
    talk.scripted(reply(None, recall(query="valve")), reply("No valve."))
    talk.ask("what broke?")
    before = list(talk.said)
    talk.said = talk.said[:2]
    talk.ask("what works?")
    assert [message["role"] for message in upstream.last.messages] == ["user", "assistant", "user"]
    talk.said = before
    talk.ask("and on")
    roles = [message["role"] for message in upstream.last.messages[3:]]
    assert roles == ["assistant", "tool", "assistant", "user"]
    assert [request.refused for request in upstream.log] == [None] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_no_byte_of_it_reaches_the_client(proxy: Proxy, upstream: Upstream, session: str, stream: bool) -> None:
    upstream.load(session, [reply("One. ", recall(query="valve")), reply("Two.", call("look"), recall(1))])
    answer = proxy.chat(session, "begin", f"script:{session}", tools=TOOLS, stream=stream)
    assert answer.status_code == 200
    for word in ("recall", "compress", "valve", "Nothing in this conversation"):
        assert word not in answer.text
    assert '"look"' in answer.text
    assert answer.text.count("[DONE]") == stream


def test_usage_is_that_of_all_requests(talk: Talk, proxy: Proxy, upstream: Upstream) -> None:
    talk.scripted(reply(None, recall(query="valve")), reply("No."))
    talk.ask("begin")
    (row,) = proxy.exchanges(talk.session)
    prompts = [len(orjson.dumps(one.json["messages"])) // 4 for one in upstream.log]
    assert row["usage"]["completion_tokens"] == 14
    assert row["usage"]["prompt_tokens"] >= sum(prompts)
    assert [made["tool"] for made in row["own_calls"]] == ["recall_context"]


@pytest.mark.parametrize(
    ("given", "headers"),
    [
        ({"tools": None}, {}),
        ({"tool_choice": "none"}, {}),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, {}),
        ({"n": 2}, {}),
        ({}, {"x-context-policy": "off"}),
    ],
    ids=["no-tools", "choice-none", "choice-named", "several", "policy-off"],
)
def test_where_they_are_not_offered_the_request_goes_as_it_is(
    proxy: Proxy, upstream: Upstream, session: str, given: dict[str, Any], headers: dict[str, str]
) -> None:
    asked = {name: value for name, value in {"tools": TOOLS, **given}.items() if value is not None}
    assert proxy.chat(session, "hi", headers=headers, **asked).status_code == 200
    assert upstream.last.json.get("tools") == asked.get("tools")


def test_a_name_that_is_taken_is_the_clients(proxy: Proxy, upstream: Upstream, session: str) -> None:
    theirs = {"type": "function", "function": {"name": "recall_context", "parameters": {"type": "object"}}}
    upstream.load(session, [reply(None, recall(query="valve"))])
    answer = proxy.chat(session, "hi", f"script:{session}", tools=[theirs]).json()
    assert answer["choices"][0]["message"]["tool_calls"] == [recall(query="valve")]
    assert [tool["function"]["name"] for tool in upstream.last.json["tools"]] == [
        "recall_context",
        "compress_chat_history",
    ]


def test_a_restart_an_export_and_a_fork_keep_what_was_hidden(upstream: Upstream, session: str, tmp_path: Path) -> None:
    settings = settings_for(upstream, tmp_path, SECTIONS)
    with Proxy(settings) as proxy, talking(proxy.url, session, upstream) as talk:
        ref = talk.looked()
        talk.scripted(reply(None, recall(ref=ref, lines="200")), reply("The valve.", call("look", 7)))
        asked = talk.ask("what broke?")
        talk.ask(*talk.results(asked))
        said = list(talk.said)
    with Proxy(settings) as proxy:
        with talking(proxy.url, session, upstream) as talk:
            talk.said = list(said)
            talk.ask("thanks")
            check(upstream)
        sent = raw_messages(upstream.last.body)
        lines = proxy.client.get(f"/sessions/{session}/export").content
        copy = proxy.client.post("/sessions/import", params={"as": f"{session}-copy"}, content=lines)
        assert copy.status_code == 201, copy.text
        fork = proxy.client.post(f"/sessions/{session}/fork", json={"as": f"{session}-fork"})
        assert fork.status_code == 201, fork.text
        for name in (f"{session}-copy", f"{session}-fork"):
            with talking(proxy.url, name, upstream) as talk:
                talk.said = [*said, {"role": "user", "content": "thanks"}, reply("echo: thanks")]
                talk.scripted(reply(None, recall(ref=ref, lines="200")), reply("Still the valve."))
                assert talk.ask("again?")["content"] == "Still the valve."
                assert raw_messages(upstream.last.body)[: len(sent)] == sent
                assert "entry 200: the valve broke" in upstream.last.messages[-1]["content"]
        proxy.client.delete(f"/sessions/{session}-copy")
        with talking(proxy.url, f"{session}-copy", upstream) as talk:
            talk.scripted(reply(None, recall(ref=ref)), reply("Gone."))
            talk.ask("and now?")
            assert "There is nothing under" in upstream.last.messages[-1]["content"]


def test_two_that_share_a_store_send_the_same(upstream: Upstream, session: str, tmp_path: Path) -> None:
    settings = settings_for(upstream, tmp_path, SECTIONS)
    with (
        Proxy(settings) as one,
        Proxy(settings) as two,
        talking(one.url, session, upstream) as first,
        talking(two.url, session, upstream) as second,
    ):
        ref = first.looked()
        second.said = first.said
        for number, talk in enumerate([second, first, second, first]):
            talk.scripted(reply(None, recall(number, ref=ref, lines="200")), reply(f"The valve, {number}."))
            talk.ask(f"what broke, {number}?")
        second.ask("thanks")
        check(upstream)
        assert len([message for message in upstream.last.messages if "<<< ref_" in str(message)]) == 4


def test_the_model_asks_for_a_summary(talk: Talk, proxy: Proxy, upstream: Upstream) -> None:
    talk.scripted(reply(None, call("compress_chat_history", reason="done with it")), reply("Fine."))
    assert talk.ask("begin")["content"] == "Fine."
    assert "Go on with the task." in upstream.last.messages[-1]["content"]
    check(upstream)


def test_a_client_that_leaves_while_it_is_answered_harms_nothing(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    upstream.load(session, [reply("One. ", recall(query="valve")), reply("Two.")])
    asked = {
        "model": f"script:{session}+gate",
        "messages": [{"role": "user", "content": "begin"}],
        "tools": TOOLS,
        "stream": True,
    }
    with (
        httpx.Client(trust_env=False, timeout=30) as client,
        client.stream(
            "POST", f"{proxy.url}/v1/chat/completions", json=asked, headers={"x-session-id": session}
        ) as answer,
    ):
        next(answer.iter_bytes())
    upstream.gate.set()
    until(lambda: proxy.exchanges(session), "it is stored")
    until(lambda: proxy.exchanges(session)[0]["status"] != "pending", "it is settled")
    assert proxy.chat(session, "again", tools=TOOLS).status_code == 200
    assert [request.refused for request in upstream.log] == [None] * len(upstream.log)
