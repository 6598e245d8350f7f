"""Conversations of clients that name no session: each stays one session, however the client changes its history."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.support import habits
from tests.support.answers import Answering
from tests.support.habits import Habit, Talker
from tests.support.served import SECONDS, Served, config_file
from tests.support.tongues import CHAT, TONGUES, Tongue
from tests.support.upstream import JSON, Upstream

JsonObject = dict[str, Any]

_NUMBERS = count(1)

SHAPES: dict[str, tuple[Habit, bool]] = {
    "as it is": (habits.as_it_is, True),
    "examples": (habits.with_examples, False),
    "reminder": (habits.with_reminder, False),
    "reminder beside calls": (habits.with_reminder, True),
    "status": (habits.with_status, False),
    "status beside calls": (habits.with_status, True),
    "earlier calls left out": (habits.without_earlier_calls, True),
    "parts": (habits.with_parts, False),
    "other space": (habits.with_other_space, False),
    "trimmed space": (habits.with_trimmed_space, True),
    "window": (habits.in_a_window, False),
    "window over calls": (habits.in_a_window, True),
    "cleared results": (habits.with_cleared_results, True),
}


PAIRS = 40
"""Number of concurrent conversations with equal beginnings."""

in_each_api = pytest.mark.parametrize(
    ("tongue", "store_url"),
    [*((tongue, "sqlite") for tongue in TONGUES.values()), (CHAT, "postgres")],
    ids=[*(f"{name}-sqlite" for name in TONGUES), "chat-postgres"],
    indirect=["store_url"],
)
"""The API affects parsing and the database affects storage, so one API is enough to test the other database."""


@pytest.fixture
def served(tmp_path: Path, upstream: Upstream, store_url: str) -> Iterator[Served]:
    """A proxy with two workers: a reply relayed by one of them is evidence for the other."""
    policy = {"trigger": {"messages": 12}, "target": {"tokens": 150}, "edits": [{"type": "drop_oldest"}]}
    config = config_file(tmp_path, upstream, store_url, policies={"default": policy})
    with Served(config, "--workers", "2").wait() as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_keepalive_connections=0)  # a new connection each time, which any worker may get
    with httpx.Client(base_url=served.url, trust_env=False, timeout=SECONDS, limits=limits) as found:
        yield found


def hold(talker: Talker, requests: int = 14) -> None:
    """Continue the conversation until at least this many requests were sent."""
    number = next(_NUMBERS)
    while len(talker.sessions) < requests:
        talker.ask(f"Question {len(talker.said)} of conversation {number}: where does it rise?")


@in_each_api
def test_each_shape_is_one_session(client: httpx.Client, tongue: Tongue) -> None:
    found: dict[str, set[str]] = {}
    for stream in (False, True):
        for name, (habit, tools) in SHAPES.items():
            talker = Talker(client, habit, stream=stream, tools=tools, tongue=tongue)
            hold(talker)
            found[f"{name}, stream: {stream}"] = set(talker.sessions)
        begun = Talker(client, stream=stream, tongue=tongue)
        begun.begun_elsewhere(4)
        hold(begun)
        found[f"begun elsewhere, stream: {stream}"] = set(begun.sessions)
    assert {name: len(sessions) for name, sessions in found.items()} == dict.fromkeys(found, 1)
    assert len(set[str]().union(*found.values())) == len(found)  # no two conversations share one


@in_each_api
def test_a_conversation_that_is_repeated_word_for_word_is_one_session_each_time(
    client: httpx.Client, tongue: Tongue
) -> None:
    found: list[set[str]] = []
    for stream in (False, True, False):
        talker = Talker(client, stream=stream, tools=True, tongue=tongue)
        while len(talker.sessions) < 20:
            talker.ask(f"Evaluation {len(talker.said)}")  # short, and the same each time
        found.append(set(talker.sessions))
    assert [len(sessions) for sessions in found] == [1, 1, 1]
    assert len(set[str]().union(*found)) == 3


@in_each_api
def test_reasoning_that_a_client_takes_out_of_replies_changes_no_session(client: httpx.Client, tongue: Tongue) -> None:
    for answers in (["Ok {}.", "No {}."], ["Water number {} flows to the sea, and it is very deep.", "{}"]):
        said: list[JsonObject] = []
        sessions, kinds = list[str](), list[str]()
        for number in range(6):
            said.append({"role": "user", "content": f"Question {number}: where does it rise?"})
            text = answers[number % 2].format(number)
            body = tongue.body(said, f"say:<think>I think of {number}.</think> {text}", tools=(), stream=False)
            answer = client.post(tongue.path, json=body, headers=tongue.headers)
            assert text in answer.text
            said.append({"role": "assistant", "content": text})
            sessions.append(answer.headers["x-session-id"])
            kinds.append(answer.headers["x-context-kind"])
        assert len(set(sessions)) == 1
        assert kinds == ["first", *["resend"] * 5]


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("keeps_id", [True, False])
def test_a_conversation_goes_on_with_its_compaction_alone(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, keeps_id: bool
) -> None:
    item: JsonObject = {"type": "compaction", "id": "cmp_0a1b2c3d4e5f60718293", "encrypted_content": "gAAAAA1b2c3d4e5f"}

    async def compacted(answering: Answering, body: JsonObject, *_: Any, **__: Any) -> None:
        told = {"id": "resp_one", "object": "response", "created_at": 1, "model": body["model"], "output": [item]}
        await answering.whole(200, JSON, orjson.dumps(told | {"status": "completed"}))

    asked = {"role": "user", "content": "How long is it?"}
    with monkeypatch.context() as patched:
        patched.setattr(Answering, "completion", compacted)
        first = client.post("/v1/responses", json={"model": "m", "input": [asked]})
    assert first.status_code == 200, first.text
    kept = {name: value for name, value in item.items() if keeps_id or name != "id"}
    second = client.post("/v1/responses", json={"model": "echo", "input": [kept, asked]})
    assert second.headers["x-session-id"] == first.headers["x-session-id"]
    assert second.headers["x-context-kind"] == "windowed"


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_a_reply_that_goes_on_with_what_the_model_said_is_known_in_the_same_turn(client: httpx.Client) -> None:
    """The model's consecutive items are one entry. A request may end within it, with a text as short as the reply."""
    found: list[set[str]] = []
    for _ in range(3):  # the same words each time
        said = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One."}]
        sessions: set[str] = set()
        for number in range(6):
            if number in {2, 3}:
                said.append({"role": "user", "content": "And then?"})
            answer = client.post("/v1/responses", json={"model": f"say:{number}.", "input": said})
            said += answer.json()["output"]
            sessions.add(answer.headers["x-session-id"])
        found.append(sessions)
    assert [len(sessions) for sessions in found] == [1, 1, 1]
    assert len(set[str]().union(*found)) == 3


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_a_reply_of_two_texts_is_not_taken_for_a_text_of_the_clients_and_its_reply(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: JsonObject = {"role": "user", "content": "Count."}
    texts: list[JsonObject] = [{"type": "output_text", "text": text, "annotations": []} for text in ("One.", "0.")]
    items: list[JsonObject] = [
        {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [part]}
        for number, part in enumerate(texts)
    ]

    async def of_two(answering: Answering, body: JsonObject, *_: Any, **__: Any) -> None:
        told = {"id": "resp_two", "object": "response", "created_at": 1, "model": body["model"], "output": items}
        await answering.whole(200, JSON, orjson.dumps(told | {"status": "completed"}))

    def ask(model: str, said: list[JsonObject]) -> str:
        answer = client.post("/v1/responses", json={"model": model, "input": said})
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-session-id"])

    with monkeypatch.context() as patched:
        patched.setattr(Answering, "completion", of_two)
        mine = ask("m", [asked])
    other = ask("say:0.", [asked, {"role": "assistant", "content": "One."}])
    said = [asked, *items, {"role": "user", "content": "more"}]
    assert [ask("say:ok", said), ask("say:better", said)] == [mine, mine]
    assert other != mine


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("answer", "is_known"), [("{}", False), ('{"name": "Rhine", "length_in_km": 1230}', True)], ids=["short", "long"]
)
def test_the_words_that_a_client_lets_replies_begin_with_tell_no_session(
    client: httpx.Client, answer: str, is_known: bool
) -> None:
    begun = f"Here is the JSON object that you asked for, {answer[:5]}: "
    sessions = list[str]()
    for said, reply in (
        ([{"role": "user", "content": "One"}, {"role": "assistant", "content": begun}], answer),
        (
            [
                {"role": "user", "content": "Another one asks elsewhere"},
                {"role": "assistant", "content": begun + answer},
                {"role": "user", "content": "and goes on here"},
            ],
            "yes",
        ),
    ):
        body = CHAT.body(said, f"say:{reply}", tools=(), stream=False)
        sessions.append(client.post(CHAT.path, json=body, headers=CHAT.headers).headers["x-session-id"])
    assert (sessions[0] == sessions[1]) is is_known


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("tongue", [CHAT, TONGUES["messages"]], ids=["chat", "messages"])
def test_a_reply_is_known_with_the_words_that_the_client_let_it_begin_with(
    client: httpx.Client, tongue: Tongue
) -> None:
    for answer in ("it rises in the Alps, and is very long.", "yes."):
        said: list[JsonObject] = []
        sessions: set[str] = set()
        for number in range(4):
            said.append({"role": "user", "content": f"Question {number}: where does it rise?"})
            begun = {"role": "assistant", "content": f"Answer {number}: "}
            body = tongue.body([*said, begun], f"say:{answer}", tools=(), stream=False)
            found = client.post(tongue.path, json=body, headers=tongue.headers)
            assert found.status_code == 200, found.text
            said.append({"role": "assistant", "content": begun["content"] + answer})
            sessions.add(found.headers["x-session-id"])
        assert len(sessions) == 1


@pytest.mark.parametrize("fault", ["+fault:drop", ""], ids=["broke off", "whole"])
@in_each_api
def test_a_client_that_has_the_beginning_of_a_reply_goes_on(client: httpx.Client, tongue: Tongue, fault: str) -> None:
    """A client that disconnects does not receive what was still on its way. A voice agent keeps what it spoke."""
    told = {"role": "assistant", "content": "word0 word1 word2 word3 wo"}
    said: list[JsonObject] = [{"role": "user", "content": "Count."}]
    body = tongue.body(said, f"long:40{fault}", stream=True)
    with client.stream("POST", tongue.path, json=body, headers=tongue.headers) as answer:
        session = answer.headers["x-session-id"]
        assert "word5" in "".join(answer.iter_text())
    for text in ("Go on.", "And on."):
        said += [told, {"role": "user", "content": text}]
        found = client.post(tongue.path, json=tongue.body(said, "echo"), headers=tongue.headers)
        assert found.headers["x-session-id"] == session, found.text
        told = {"role": "assistant", "content": f"echo: {text}"}


@in_each_api
def test_conversations_with_equal_beginnings_are_not_merged(client: httpx.Client, tongue: Tongue) -> None:
    def talk(number: int) -> Talker:
        talker = Talker(client, habits.with_examples if number % 2 else habits.as_it_is, tongue=tongue)
        for text in ("hello", "go on", "and now?"):
            talker.ask(text)
        for turn in range(2):
            talker.ask(f"I am number {number}, and this is turn {turn} of what I have to say.")
        return talker

    with ThreadPoolExecutor(8) as pool:
        talkers = list(pool.map(talk, range(PAIRS)))
    owners: dict[str, set[str]] = {}
    for number, talker in enumerate(talkers):
        owners.setdefault(talker.sessions[-1], set()).add(f"{number}")
    assert all(len(owner) == 1 for owner in owners.values())
    for talker in talkers:
        assert talker.sessions[-1] == talker.sessions[-2]  # after the point where they differ, each is recognized
