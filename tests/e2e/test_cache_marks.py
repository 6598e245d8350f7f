"""Cache marks and cache keys for the provider's prompt cache, as the provider receives them."""

from __future__ import annotations

from itertools import count, pairwise
from typing import Any

import orjson
import pytest

from tests.e2e.conftest import Serve
from tests.support.replay import raw_messages
from tests.support.server import Proxy, settings_for
from tests.support.tongues import MESSAGES
from tests.support.upstream import Upstream

JsonObject = dict[str, Any]

MARKED = "say:ok+marked"
PLAIN = "say:ok"
MODELS = [
    {"match": ["*marked"], "cache": {"matching": "breakpoints", "breakpoints": "openai", "key": True}},
    {"match": ["*claude*"], "cache": {"matching": "breakpoints", "breakpoints": "anthropic"}},
]
POLICY = {
    "trigger": {"messages": 12},
    "keep": {"rounds": 1, "spans": 1},
    "edits": [{"type": "clear_tool_results", "keep": 1, "digest_chars": 60}],
}
_NUMBERS = count(1)


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(policies={"default": POLICY}, models=MODELS, cache={"key": "session"})


@pytest.fixture
def session() -> str:
    return f"marks-{next(_NUMBERS)}"


def turn(number: int) -> list[JsonObject]:
    """Return the messages of a turn: a question and its tool result."""
    function = {"name": "look", "arguments": orjson.dumps({"number": number}).decode()}
    return [
        {"role": "user", "content": f"question {number}"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}: " + "so much of it " * 60},
    ]


def converse(proxy: Proxy, session: str, turns: int, model: str = MARKED, **given: Any) -> list[JsonObject]:
    """Resend a growing conversation; return its receipts."""
    said: list[JsonObject] = [{"role": "system", "content": "You look things up."}]
    for number in range(turns):
        said += turn(number)
        answer = proxy.chat(session, said, model, **given)
        assert answer.status_code == 200, answer.text
        said.append(answer.json()["choices"][0]["message"])
    return proxy.exchanges(session)


def marks(body: JsonObject, name: str = "prompt_cache_breakpoint") -> list[int]:
    """Return the positions of the marked messages."""
    return [at for at, message in enumerate(body["messages"]) if name.encode() in orjson.dumps(message)]


def unmarked(message: bytes) -> JsonObject:
    """Return a message without its mark."""
    data: JsonObject = orjson.loads(message)
    if isinstance(data.get("content"), list):
        assert [set(part) for part in data["content"]] == [{"type", "text", "prompt_cache_breakpoint"}]
        data["content"] = data["content"][0]["text"]
    return data


def test_a_mark_stands_at_the_end_of_what_will_not_change(proxy: Proxy, upstream: Upstream, session: str) -> None:
    rows = converse(proxy, session, 14)
    moves = [place for place, row in enumerate(rows) if row["cut"] is not None and row["cut"]["moved"]]
    assert len(moves) >= 2
    for place, (row, request) in enumerate(zip(rows, upstream.log, strict=True)):
        found = marks(request.json)
        if row["cut"] is None:
            assert found == []
            continue
        # The last mark is on the last message that a trim changed; everything after it is new.
        last = max(line["position"] for line in row["plan"] if line["action"] == "replace")
        assert found[-1] == 1 + last  # after the instructions
        # A trim marks its new position, and the end of the previous prefix that the cache still holds.
        assert len(found) == (2 if place in moves[1:] and found[0] != found[-1] else 1)
    assert any(len(marks(upstream.log[place].json)) == 2 for place in moves[1:])


def test_between_moves_the_marks_stand_still(proxy: Proxy, upstream: Upstream, session: str) -> None:
    rows = converse(proxy, session, 14)
    bodies = [raw_messages(request.body) for request in upstream.log]
    for place, (earlier, later) in enumerate(pairwise(bodies), start=1):
        if rows[place]["cut"] is None or rows[place]["cut"]["moved"]:
            continue
        if rows[place - 1]["cut"]["moved"]:  # a trim may also mark the end of the previous prefix
            assert list(map(unmarked, later[: len(earlier)])) == list(map(unmarked, earlier))
        else:
            assert later[: len(earlier)] == earlier


@pytest.mark.parametrize("append", [False, True], ids=["resend", "append"])
def test_other_models_get_none(proxy: Proxy, upstream: Upstream, session: str, append: bool) -> None:
    rows = converse(proxy, session, 8, PLAIN)
    assert rows[-1]["cut"] is not None
    if append:
        proxy.chat(session, "more", PLAIN, headers={"x-session-mode": "append"})
    for request in upstream.log:
        assert b"breakpoint" not in request.body
        assert b"cache_control" not in request.body
        assert "prompt_cache_key" not in request.json


def test_those_of_claude_are_written_its_own_way(proxy: Proxy, upstream: Upstream, session: str) -> None:
    converse(proxy, session, 8, "say:ok+claude")
    assert marks(upstream.last.json, "cache_control")
    assert b"breakpoint" not in upstream.last.body


@pytest.mark.parametrize("model", ["say:ok", "say:ok+plain"])
def test_the_messages_api_caches_up_to_the_newest_message_once_trimmed(
    serve: Serve, upstream: Upstream, session: str, model: str
) -> None:
    policy = {"trigger": {"messages": 6}, "target": {"tokens": 100}, "edits": [{"type": "drop_oldest"}]}
    proxy, said = serve(policies={"default": policy}), list[JsonObject]()
    for number in range(8):
        said.append({"role": "user", "content": f"question {number}: " + "so much of it " * 60})
        answer = proxy.ask(MESSAGES, session, said, model)
        assert answer.status_code == 200, answer.text
        said += MESSAGES.reply(answer.content, stream=False)
    rows = proxy.exchanges(session)
    trimmed = [row["tokens_sent"] < row["tokens_before"] for row in rows]
    assert trimmed[-1]
    asked = ["cache_control" in request.json for request in upstream.log]
    if model == "say:ok":
        assert asked[-1]
        assert all(trims for marks, trims in zip(asked, trimmed, strict=True) if marks)
    else:  # a model that refuses the mark is asked again without it, and later requests have none
        assert [asked.count(True), len(asked)] == [1, 9]
        assert not any("original" in warning for row in rows for warning in row["warnings"])


def test_a_mark_of_the_clients_that_is_refused_is_not_sent_twice(
    serve: Serve, upstream: Upstream, session: str
) -> None:
    policy = {"trigger": {"messages": 4}, "target": {"tokens": 100}, "edits": [{"type": "drop_oldest"}]}
    proxy, said = serve(policies={"default": policy}), list[JsonObject]()
    for number in range(6):
        said.append({"role": "user", "content": f"question {number}: " + "so much of it " * 60})
        said.append({"role": "assistant", "content": f"answer {number}"})
    said.append({"role": "user", "content": "and now?"})
    refused = proxy.ask(MESSAGES, session, said, PLAIN + "+plain", cache_control={"type": "ephemeral"})
    assert refused.status_code == 400
    bodies = [request.body for request in upstream.log]
    assert len(bodies) == len(set(bodies)) == 2  # trimmed, then as the client sent it


RULES = "Look twice before you answer. " * 250


def go_on(
    proxy: Proxy, session: str | None, turns: int, model: str = PLAIN, system: str = RULES, **given: Any
) -> list[JsonObject]:
    """Resend a growing conversation without marks through the Messages API; return its messages."""
    said: list[JsonObject] = []
    for number in range(turns):
        said.append({"role": "user", "content": f"question {number}"})
        answer = proxy.ask(MESSAGES, session, said, model, system=system, **given)
        assert answer.status_code == 200, answer.text
        said += MESSAGES.reply(answer.content, stream=False)
    return said


def newest_marked(upstream: Upstream) -> list[bool]:
    return ["cache_control" in request.json for request in upstream.log]


@pytest.mark.parametrize("named", [True, False], ids=["named", "inferred"])
def test_a_session_that_goes_on_by_the_messages_api_is_cached_untrimmed(
    serve: Serve, upstream: Upstream, session: str, named: bool
) -> None:
    proxy = serve(policies={"default": POLICY})
    said = go_on(proxy, session if named else None, 4, f"say:A reply that tells session {session} from others.")
    assert newest_marked(upstream) == [False, True, True, True]
    for request in upstream.log:  # the client's messages are unchanged
        assert set(request.json) - {"cache_control"} == {"model", "max_tokens", "system", "messages"}
        assert request.json["system"] == RULES
        assert request.json["messages"] == said[: len(request.json["messages"])]
    upstream.forget()
    proxy.ask(MESSAGES, session, [*said, {"role": "user", "content": "again"}], PLAIN, system=RULES)
    proxy.ask(MESSAGES, session, [*said, {"role": "user", "content": "edited"}], PLAIN, system=RULES)
    assert newest_marked(upstream) == [named, False]  # an edited question is at a position of its own


@pytest.mark.parametrize(
    ("policy", "cache", "system"),
    [
        ({"mode": "observe"}, "auto", RULES),
        ({"trigger": {"every_request": True}}, "auto", RULES),
        ({}, "never", RULES),
        ({}, "auto", "Look twice."),
        (None, "auto", RULES),
    ],
    ids=["observed", "trimmed anew each time", "switched off", "too short to be cached", "not to be trimmed"],
)
def test_otherwise_the_bytes_of_an_unmarked_client_are_sent(
    serve: Serve, upstream: Upstream, session: str, policy: JsonObject | None, cache: str, system: str
) -> None:
    proxy = serve(policies={"default": {} if policy is None else POLICY | policy}, cache={"breakpoints": cache})
    go_on(proxy, session, 4, system=system)
    assert newest_marked(upstream) == [False] * 4


@pytest.mark.parametrize("changes", ["instructions", "tools", "examples"])
def test_what_would_not_be_found_again_is_not_cached(
    serve: Serve, upstream: Upstream, session: str, changes: str
) -> None:
    proxy, said = serve(policies={"default": POLICY}), list[JsonObject]()
    examples = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    for number in range(4):
        asked = {"role": "user", "content": f"question {number}"}
        said = [*(examples if changes == "examples" else said), asked]
        system = f"It is 12:0{number}. {RULES}" if changes == "instructions" else RULES
        tool = {"type": "function", "function": {"name": f"look_{number}", "parameters": {"type": "object"}}}
        given = {"tools": [tool]} if changes == "tools" else {}
        answer = proxy.ask(MESSAGES, session, said, PLAIN, system=system, **given)
        assert answer.status_code == 200, answer.text
        said += MESSAGES.reply(answer.content, stream=False)
    # The second request shows that the instructions change.
    assert newest_marked(upstream) == [False] * 4


def test_neither_what_stands_beside_a_session_nor_a_window_is_cached(
    serve: Serve, upstream: Upstream, session: str
) -> None:
    proxy = serve(policies={"default": POLICY})
    said = go_on(proxy, session, 4)
    upstream.forget()
    more = {"role": "user", "content": "and now?"}
    mine = {"type": "text", "text": "mine", "cache_control": {"type": "ephemeral"}}
    examples = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    for messages, headers in (
        ([*said, more], {"x-context-policy": "off"}),
        ([*said, {"role": "user", "content": [mine]}], {}),
        ([*said[4:], more], {}),  # the client's own window
        ([*examples, more], {}),  # another conversation
        ([{"role": "user", "content": "A title for it?"}], {}),
    ):
        proxy.ask(MESSAGES, session, messages, PLAIN, system=RULES, headers=headers)
    assert [row["kind"] for row in proxy.exchanges(session)][-3:] == ["windowed", "foreign", "side"]
    assert newest_marked(upstream) == [False] * 5


def test_a_reminder_that_comes_and_goes_is_not_cached(serve: Serve, upstream: Upstream, session: str) -> None:
    proxy, said = serve(policies={"default": POLICY}), list[JsonObject]()
    for number in range(4):
        asked = {"role": "user", "content": f"question {number}"}
        reminded = {"role": "user", "content": f"question {number}\n<reminder>Be brief.</reminder>"}
        answer = proxy.ask(MESSAGES, session, [*said, reminded], PLAIN, system=RULES)
        said += [asked, *MESSAGES.reply(answer.content, stream=False)]
    assert newest_marked(upstream) == [False] * 4


@pytest.mark.parametrize("wants", ["vague", "plain"])
def test_a_mark_of_ours_that_is_refused_does_not_break_an_untrimmed_request(
    serve: Serve, upstream: Upstream, session: str, wants: str
) -> None:
    proxy = serve(policies={"default": POLICY})
    go_on(proxy, session, 3, f"{PLAIN}+{wants}")
    assert newest_marked(upstream) == [False, True, False, False]  # refused once and not tried again
    upstream.forget()
    go_on(proxy, f"{session}-other", 3, f"{PLAIN}+{wants}")
    # If the refusal did not name the mark, its reason may have been something else in that session.
    assert newest_marked(upstream) == ([False, True, False, False] if wants == "vague" else [False] * 3)


def test_a_gateway_that_fails_on_our_mark_is_asked_without_it(serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve(policies={"default": POLICY})
    go_on(proxy, session, 3, f"{PLAIN}+plain:500")
    assert newest_marked(upstream) == [False, True, False, False]


def test_a_marked_request_that_is_too_long_is_trimmed_at_once(serve: Serve, upstream: Upstream, session: str) -> None:
    policy = {"trigger": {"tokens": 50_000}, "target": {"tokens": 1000}, "edits": [{"type": "drop_oldest"}]}
    proxy, said = serve(policies={"default": policy}), list[JsonObject]()
    for number in range(3):
        said.append({"role": "user", "content": f"question {number}: " + "so much of it " * 300})
        answer = proxy.ask(MESSAGES, session, said, f"{PLAIN}+ctx:3000")
        assert answer.status_code == 200, answer.text
        said += MESSAGES.reply(answer.content, stream=False)
    assert newest_marked(upstream) == [False, True, True, False]  # the third was refused and sent again, trimmed


def test_marks_can_be_switched_off(serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve(policies={"default": POLICY}, models=MODELS, cache={"breakpoints": "never"})
    rows = converse(proxy, session, 8)
    assert rows[-1]["cut"] is not None
    for request in upstream.log:
        assert b"breakpoint" not in request.body
        assert "prompt_cache_key" not in request.json  # no key is the default


def test_an_untrimmed_request_keeps_the_clients_bytes_but_for_the_key(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    converse(proxy, session, 1)
    body = upstream.last.json
    assert marks(body) == []
    assert set(body) == {"model", "messages", "prompt_cache_key"}


def test_a_key_is_of_one_session_and_says_nothing(proxy: Proxy, upstream: Upstream, session: str) -> None:
    converse(proxy, session, 3)
    (key,) = {request.json["prompt_cache_key"] for request in upstream.log}
    assert len(key) == 32
    assert session not in key
    upstream.forget()
    converse(proxy, f"{session}-other", 1)
    assert upstream.last.json["prompt_cache_key"] != key


def test_tenants_and_installations_have_keys_of_their_own(serve: Serve, upstream: Upstream, session: str) -> None:
    keys = []
    for _ in range(2):
        proxy = serve(models=MODELS, cache={"key": "session"}, auth={"mode": "passthrough"})
        for bearer in ("sk-one", "sk-two"):
            proxy.chat(session, "hi", MARKED, headers={"authorization": f"Bearer {bearer}"})
            keys.append(upstream.last.json["prompt_cache_key"])
    assert len(set(keys)) == 4


def test_a_key_outlives_a_restart(upstream: Upstream, tmp_path: Any, session: str) -> None:
    settings = settings_for(upstream, tmp_path, {"models": MODELS, "cache": {"key": "session"}})
    for _ in range(2):
        with Proxy(settings) as proxy:
            proxy.chat(session, "hi", MARKED)
    first, second = (request.json["prompt_cache_key"] for request in upstream.log)
    assert first == second


def test_a_client_that_decides_itself_is_left_alone(proxy: Proxy, upstream: Upstream, session: str) -> None:
    converse(proxy, session, 8, prompt_cache_key="mine")
    assert {request.json["prompt_cache_key"] for request in upstream.log} == {"mine"}
    upstream.forget()
    said = [message for number in range(8) for message in turn(number)]
    part = {"type": "text", "text": "mark this", "prompt_cache_breakpoint": {"mode": "explicit"}}
    said += [{"role": "user", "content": [part]}]
    proxy.chat(f"{session}-own", said, MARKED)
    assert proxy.exchanges(f"{session}-own")[-1]["cut"]["moved"]
    assert marks(upstream.last.json) == [len(upstream.last.json["messages"]) - 1]
