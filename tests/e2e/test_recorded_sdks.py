"""Replays what SDKs really send: every turn continues where the last one ended.

The conversations were recorded by tests/sdks/record.py. The proxy receives the recorded bytes and headers of the
SDK, and the provider answers with the recorded bytes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing

import httpx
import pytest
from sqlalchemy import make_url

from proxy.pipeline import DEFAULT_TENANT
from proxy.store import session_key
from proxy.store.packing import encode_session
from tests.e2e.conftest import Serve
from tests.sdks import conversation, record
from tests.support import retelling
from tests.support.recorded import DATA, SUFFIX, Exchange, Recorded, told
from tests.support.replay import raw_messages
from tests.support.retelling import Retelling, retold
from tests.support.server import Proxy
from tests.support.tape import Tape

RESENDS = ("first", "resend")
FOREIGN = ("first", "foreign")

SDKS: dict[str, tuple[str, str]] = {
    "agents-json": RESENDS,
    "agents-stream": RESENDS,
    "ai_sdk-json": RESENDS,
    "ai_sdk-stream": RESENDS,
    "agno-json": RESENDS,
    "agno-stream": RESENDS,
    "langchain-json": RESENDS,
    "langchain-stream": RESENDS,
    "litellm-json": RESENDS,
    "litellm-stream": RESENDS,
    "llama_index-json": RESENDS,
    "llama_index-stream": RESENDS,
    "node-json": RESENDS,
    "node-stream": RESENDS,
    "openai-json": RESENDS,
    "openai-dump": RESENDS,
    "openai-parse": RESENDS,
    "openai-stream": RESENDS,
    "pydantic_ai-json": RESENDS,
    "pydantic_ai-stream": RESENDS,
}
"""The recordings, each with the context kind of its first request and of all others."""

OTHER_APIS = (
    "agents-responses-json",
    "agents-responses-stream",
    "agents_js-responses-json",
    "agents_js-responses-stream",
    "ai_sdk-responses-json",
    "ai_sdk-responses-stream",
    "anthropic-json",
    "anthropic-stream",
    "anthropic_node-json",
    "anthropic_node-stream",
    "openai-responses-json",
    "openai-responses-stream",
    "pydantic_ai-responses-json",
    "pydantic_ai-responses-stream",
)
"""The recordings of Responses and Messages: each continues at every turn."""

OUR_MARK = b',"cache_control":{"type":"ephemeral"}}'
"""The end of a Messages body from a client without cache marks, once its conversation is long enough."""

RENAMES = "agno-other_ids"
"""Agno replaces call ids that are not in OpenAI's style. Results are paired with their calls by these ids, so a
call with another id is another call: this recording has its own test."""

BASE = "openai-json"
RETOLD: dict[Retelling, tuple[str, str]] = {
    retelling.moving_cache_marks: RESENDS,
    retelling.marks_on_calls: RESENDS,
    retelling.time_in_the_instructions: RESENDS,
    retelling.time_in_the_first_question: FOREIGN,
    retelling.index_on_calls: RESENDS,
    retelling.nulls_dropped: RESENDS,
    retelling.nulls_added: RESENDS,
    retelling.arguments_rewritten: RESENDS,
    retelling.developer_for_system: RESENDS,
    retelling.instructions_amid: RESENDS,
    retelling.text_parts: RESENDS,
    retelling.names_on_results: RESENDS,
    retelling.parsed_beside_texts: RESENDS,
    retelling.keys_sorted: RESENDS,
}
"""Changes to a history, with the context kinds as above."""

WITHOUT_ID = [name for name in SDKS if not name.endswith("-stream")]
"""The recordings without streams. A stored stream is equal to stored JSON, so these are enough here."""

ENOUGH = 20
"""Number of exchanges that include every kind of reply: single and parallel calls, odd arguments, reasoning, texts."""


@pytest.fixture(scope="module")
def tape() -> Iterator[Tape]:
    with Tape() as provider:
        yield provider


@pytest.fixture(scope="module")
def proxy(serve: Serve, tape: Tape) -> Proxy:
    """A proxy that has no reason to change a body."""
    address = {"base_url": tape.base_url, "anthropic_base_url": tape.base_url}
    return serve(upstream={**address, "include_usage": "never"})


@pytest.fixture(scope="module")
def inferring(serve: Serve, tape: Tape) -> Proxy:
    """The same, but with one tenant per key."""
    address = {"base_url": tape.base_url, "anthropic_base_url": tape.base_url}
    return serve(upstream={**address, "include_usage": "never"}, auth={"mode": "passthrough"})


def read(name: str) -> Recorded:
    return Recorded.read(DATA / f"{name}{SUFFIX}")


def ask(proxy: Proxy, exchange: Exchange, headers: Mapping[str, str]) -> httpx.Response:
    """Send a recorded request again, and check that the answer is the recorded one."""
    answer = proxy.client.post(
        exchange.tongue.path, content=exchange.request, headers={**dict(exchange.headers), **headers}
    )
    assert answer.status_code == 200, answer.text
    assert answer.content == exchange.response
    return answer


def replay(proxy: Proxy, tape: Tape, session: str, recorded: Recorded) -> list[str]:
    """Replay a conversation; return the context kinds of its requests."""
    tape.play(recorded.exchanges)
    for exchange in recorded.exchanges:
        ask(proxy, exchange, {"x-session-id": session})
    assert [request.body for request in tape.received] == [exchange.request for exchange in recorded.exchanges]
    return [receipt["kind"] for receipt in proxy.exchanges(session)]


def check_stored_once(proxy: Proxy, session: str, recorded: Recorded) -> None:
    """Check that the store holds each message once, in the form that arrived first."""
    stored, said = proxy.messages(session), recorded.conversation
    assert [told(message) for message in stored] == [told(message) for message in said]
    streamed = recorded.exchanges[0].streams
    for message, first in zip(stored, said, strict=True):
        if not streamed or first["role"] != "assistant":
            assert message == first
    branches = proxy.get(f"/sessions/{session}")["branches"]
    assert [branch["depth"] for branch in branches] == [len(said)]
    assert rows(proxy, session, "nodes") == len(said)


def check_bodies_stored_once(proxy: Proxy, session: str, recorded: Recorded) -> None:
    """Check that each turn is its own branch, and that no text is stored twice."""
    sent = [raw_messages(exchange.request)[1:] for exchange in recorded.exchanges]
    replies = len(recorded.exchanges)
    assert rows(proxy, session, "nodes") == sum(map(len, sent)) + replies
    texts = {raw for messages in sent for raw in messages}
    tools = 1
    assert rows(proxy, session, "bodies") <= len(texts) + replies + tools
    last = recorded.exchanges[-1]
    assert [told(message) for message in proxy.messages(session)] == [
        told(message) for message in [*last.history, last.reply]
    ]


def rows(proxy: Proxy, session: str, table: str) -> int:
    """Count what a session has in a table of the store."""
    path = make_url(proxy.settings.store.url).database
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
        counted: tuple[int] = store.execute(
            f"SELECT count(*) FROM {table} WHERE session = ?",  # noqa: S608 - a name from this file
            (encode_session(session_key(DEFAULT_TENANT, session)),),
        ).fetchone()
    return counted[0]


@pytest.mark.parametrize("name", SDKS)
def test_an_sdk_goes_on_at_every_turn(proxy: Proxy, tape: Tape, session: str, name: str) -> None:
    recorded = read(name)
    first, others = SDKS[name]

    assert replay(proxy, tape, session, recorded) == [first, *[others] * (len(recorded.exchanges) - 1)]
    check_stored_once(proxy, session, recorded)


def test_calls_that_get_other_ids_are_branches_and_nothing_is_lost(proxy: Proxy, tape: Tape, session: str) -> None:
    recorded = read(RENAMES)

    kinds = replay(proxy, tape, session, recorded)

    renamed = [bool(exchange.reply.get("tool_calls")) for exchange in recorded.exchanges[:-1]]
    assert kinds == ["first", *("rewind" if each else "resend" for each in renamed)]
    last = recorded.exchanges[-1]
    assert [told(message) for message in proxy.messages(session)] == [
        told(message) for message in [*last.history, last.reply]
    ]


@pytest.mark.parametrize("how", RETOLD, ids=lambda how: how.__name__)
def test_what_is_told_otherwise(proxy: Proxy, tape: Tape, session: str, how: Retelling) -> None:
    recorded = retold(read(BASE).beginning(ENOUGH), how)
    first, others = RETOLD[how]

    assert replay(proxy, tape, session, recorded) == [first, *[others] * (len(recorded.exchanges) - 1)]
    if others == "foreign":
        check_bodies_stored_once(proxy, session, recorded)
    else:
        check_stored_once(proxy, session, recorded)


@pytest.mark.parametrize("name", WITHOUT_ID)
def test_without_a_session_id_every_turn_finds_its_session(inferring: Proxy, tape: Tape, name: str) -> None:
    recorded = read(name).beginning(ENOUGH)
    mine = {"authorization": f"Bearer sk-{name}"}  # all SDKs have the same conversation, so each gets its own tenant
    tape.play(recorded.exchanges)

    sessions = {ask(inferring, exchange, mine).headers["x-session-id"] for exchange in recorded.exchanges}

    assert len(sessions) == 1
    listed = inferring.client.get("/sessions", headers=mine).json()["data"]
    assert [(entry["id"], entry["messages"]) for entry in listed] == [(*sessions, len(recorded.conversation))]


@pytest.mark.parametrize("named", [True, False], ids=["named", "without-id"])
@pytest.mark.parametrize("name", OTHER_APIS)
def test_an_sdk_of_another_api_goes_on_at_every_turn(
    inferring: Proxy, tape: Tape, session: str, name: str, named: bool
) -> None:
    recorded = read(name)
    tape.play(recorded.exchanges)
    mine = {"authorization": f"Bearer sk-{name}-{named}"}
    headers = mine | ({"x-session-id": session} if named else {})
    answers = [ask(inferring, exchange, headers) for exchange in recorded.exchanges]
    first, *others = [request.body for request in tape.received]
    unmarked = [body.removesuffix(OUR_MARK) + b"}" if body.endswith(OUR_MARK) else body for body in others]
    assert [first, *unmarked] == [exchange.request for exchange in recorded.exchanges]
    assert len({answer.headers["x-session-id"] for answer in answers}) == 1
    assert [answer.headers["x-context-kind"] for answer in answers] == ["first", *["resend"] * (len(answers) - 1)]
    path = f"/sessions/{answers[0].headers['x-session-id']}"
    assert len(inferring.client.get(path, headers=mine).json()["branches"]) == 1
    stored = inferring.client.get(f"{path}/messages", headers=mine).json()["data"]
    last, tongue = recorded.exchanges[-1], recorded.exchanges[0].tongue
    replies = [tongue.reply(each.response, stream=each.streams) for each in recorded.exchanges]
    by_id = {item["id"]: item for reply in replies for item in reply if "id" in item}
    sent = [by_id[item["id"]] if item.get("type") == "item_reference" else item for item in last.body[tongue.listed]]
    said = tongue.told([*sent, *replies[-1]])
    said = [message for message in said if message["role"] not in {"system", "developer"}]
    assert [told(message) for message in tongue.told(stored)] == [told(message) for message in said]
    roles = [message["role"] for message in said]
    assert roles.count("user") == len(conversation.QUESTIONS)


def test_every_recording_is_in_the_table_and_of_the_pinned_version() -> None:
    pinned = {f"{sdk.name}-{mode}": list(sdk.packages) for sdk in record.SDKS for mode in sdk.modes}
    found = [path.name.removesuffix(SUFFIX) for path in DATA.glob(f"*{SUFFIX}")]
    assert pinned.keys() == SDKS.keys() | {*OTHER_APIS, RENAMES} == set(found)
    assert {name: read(name).packages for name in found} == pinned


def test_the_recordings_are_long_and_differ() -> None:
    """The other tests would pass trivially if all clients sent replies back unchanged."""
    forms: dict[str, str] = {}
    for name in SDKS:
        recorded = read(name)
        roles = [message["role"] for message in recorded.conversation]
        assert roles.count("user") == len(conversation.QUESTIONS) == 20
        assert roles.count("tool") > 10
        forms[name] = json.dumps(recorded.exchanges[-1].history)
    assert len(set(forms.values())) > len(SDKS) / 2
    together = "".join(forms.values())
    for field in ("parsed_arguments", "provider_specific_fields", "index", "reasoning_content", "refusal"):
        assert f'"{field}": ' in together
