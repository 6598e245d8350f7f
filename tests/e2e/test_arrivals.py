"""Placement of requests, seen from outside: each context kind, and what is stored afterwards."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until

JsonObject = dict[str, Any]
_NUMBERS = count(1)

SYSTEM = {"role": "system", "content": "You help."}
TITLE = {"role": "system", "content": "Give the conversation a title of three words."}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(policies={"short": {"match": {"models": ["*+short"]}, **SHORT}})


SHORT = {
    "trigger": {"messages": 6},
    "target": {"tokens": 40},
    "keep": {"rounds": 1, "spans": 1},
    "edits": [{"type": "drop_oldest"}],
}


@pytest.fixture
def session() -> str:
    return f"arrivals-{next(_NUMBERS)}"


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def converse(proxy: Proxy, session: str | None, turns: int, *, start: int = 1, **given: Any) -> list[JsonObject]:
    """Run some turns, each of which resends the whole conversation; return it, including the last reply."""
    messages: list[JsonObject] = []
    for number in range(1, turns + 1):
        messages.append(user(f"question {number}"))
        messages.append(reply(proxy, session, messages, **given))
    return messages


def reply(proxy: Proxy, session: str | None, messages: list[JsonObject], **given: Any) -> JsonObject:
    answer = proxy.chat(session, messages, **given)
    assert answer.status_code == 200, answer.text
    message: JsonObject = answer.json()["choices"][0]["message"]
    return message


def kinds(proxy: Proxy, session: str) -> list[str]:
    return [receipt["kind"] for receipt in proxy.exchanges(session)]


def texts(messages: list[JsonObject]) -> list[Any]:
    return [message["content"] for message in messages]


def branches(proxy: Proxy, session: str) -> list[list[Any]]:
    """Return the texts of every branch."""
    heads = [branch["head"] for branch in proxy.get(f"/sessions/{session}")["branches"]]
    return [texts(proxy.get(f"/sessions/{session}/messages", branch=head)["data"]) for head in heads]


def test_a_first_answer_that_nobody_heard_is_not_sent(proxy: Proxy, upstream: Upstream, session: str) -> None:
    """A voice agent that is interrupted before it speaks resends its questions without the answer."""
    said = [user("Hello."), user("Wait, there is more."), user("And more.")]
    for stop in (1, 2, 3):
        reply(proxy, session, said[:stop])
        assert upstream.last.messages == said[:stop]
    reply(proxy, session, [*said, proxy.messages(session)[-1], user("Go on.")])
    assert texts(proxy.messages(session))[:3] == texts(said)
    assert sorted(map(len, branches(proxy, session))) == [2, 3, 6]


def test_a_regenerated_and_an_edited_turn_are_branches(proxy: Proxy, session: str) -> None:
    said = converse(proxy, session, 2)
    regenerated = reply(proxy, session, said[:3], model="say:again")
    assert texts(proxy.messages(session)) == [*texts(said[:3]), regenerated["content"]]
    edited = [*said[:2], user("edited")]
    reply(proxy, session, edited)
    assert kinds(proxy, session) == ["first", "resend", "rewind", "rewind"]
    assert texts(said) in branches(proxy, session)
    assert len(branches(proxy, session)) == 3
    # The client continues its first version.
    reply(proxy, session, [*said, user("on")])
    assert kinds(proxy, session)[-1] == "rewind"
    assert texts(proxy.messages(session))[:4] == texts(said)


def test_a_client_that_drops_its_oldest_messages_goes_on_with_its_branch(proxy: Proxy, session: str) -> None:
    said = converse(proxy, session, 4)
    for _ in range(3):
        said += [user(f"more {len(said)}")]
        said.append(reply(proxy, session, [SYSTEM, *said[-5:]]))
    assert kinds(proxy, session)[4:] == ["windowed"] * 3
    assert texts(proxy.messages(session)) == texts(said)
    assert len(branches(proxy, session)) == 1


def test_what_the_client_left_out_stays_out_of_what_is_sent(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = converse(proxy, session, 4)
    window = [*said[-3:], user("more")]
    answer = proxy.chat(session, window)
    assert upstream.log[-1].json["messages"] == window
    assert answer.headers["x-context-messages-before"] == "4"


def test_a_window_is_trimmed_like_any_other_history(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = converse(proxy, session, 6, model="echo+short")
    for _ in range(4):
        said += [user(f"more {len(said)}")]
        answer = proxy.chat(session, said[-9:], model="echo+short")
        assert answer.status_code == 200, answer.text
        assert int(answer.headers["x-context-messages-sent"]) <= 9
        assert upstream.log[-1].json["messages"][-1] == said[-1]
        said.append(answer.json()["choices"][0]["message"])
    assert kinds(proxy, session)[6:] == ["windowed"] * 4
    assert texts(proxy.messages(session)) == texts(said)
    context = proxy.get(f"/sessions/{session}/context")
    assert context["tokens_sent"] <= context["tokens_before"]


def test_a_history_replaced_by_a_summary_is_foreign_and_the_old_one_stays(proxy: Proxy, session: str) -> None:
    said = converse(proxy, session, 3)
    summary = [user("We spoke of questions 1 to 3."), {"role": "assistant", "content": "I see."}, user("go on")]
    end = reply(proxy, session, summary)
    assert kinds(proxy, session)[-1] == "foreign"
    assert texts(proxy.messages(session)) == [*texts(summary), end["content"]]
    assert texts(said) in branches(proxy, session)
    reply(proxy, session, [*summary, end, user("further")])
    assert kinds(proxy, session)[-1] == "resend"


def test_a_title_asked_for_under_the_same_id_stands_aside(proxy: Proxy, session: str) -> None:
    said = converse(proxy, session, 2)
    reply(proxy, session, [TITLE, user("Title for: question 1")])
    assert kinds(proxy, session) == ["first", "resend", "side"]
    assert texts(proxy.messages(session)) == texts(said)
    reply(proxy, session, [*said, user("on")])
    assert kinds(proxy, session)[-1] == "resend"


def test_instructions_with_a_new_id_are_the_same_and_do_not_stand_aside(proxy: Proxy, session: str) -> None:
    """Codex sends instructions like this after it compacted its history."""
    said: list[JsonObject] = [{"id": "msg_env", **user("This is Linux.")}, {"id": "msg_one", **user("one")}]
    later = [{"role": "assistant", "content": "echo: one"}, user("two")]
    for number, also in enumerate(([], later, [user("So far.")])):
        rules = {"type": "message", "role": "developer", "id": f"msg_{number}", "content": "You help."}
        answer = proxy.client.post(
            "/v1/responses",
            json={"model": "echo", "input": [rules, *said, *also], "store": False},
            headers={"x-session-id": session},
        )
        assert answer.status_code == 200, answer.text
    assert kinds(proxy, session) == ["first", "resend", "rewind"]
    assert texts(proxy.messages(session))[:3] == ["This is Linux.", "one", "So far."]


def test_a_call_whose_arguments_the_client_changes_is_the_same(proxy: Proxy, upstream: Upstream, session: str) -> None:
    """Claude Code sends its calls back like this."""
    function = {"name": "look", "arguments": '{"at": "here  "}'}
    ids = ["toolu_01A09q90qw90lq917835lq9", "toolu_01B17w03kd72ms660143pz5"]
    calls = [[{"id": name, "type": "function", "function": function}] for name in ids]
    upstream.load(session, [{"role": "assistant", "content": None, "tool_calls": call} for call in calls])
    look = {"name": "look", "input_schema": {"type": "object"}}
    asked = {"model": f"script:{session}", "max_tokens": 99, "tools": [look]}
    said: list[JsonObject] = [user("where?")]
    for changes in ({"at": "here", "all": False}, {}):
        headers = {"x-session-id": session, "x-api-key": "k", "anthropic-version": "2023-06-01"}
        answer = proxy.client.post("/v1/messages", json={**asked, "messages": said}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert upstream.log[-1].json["messages"] == said
        content = answer.json()["content"]
        assert content[-1]["type"] == "tool_use"
        content[-1]["input"] |= changes
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "seen"}
        said = [*said, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}, user("and?")]
    assert kinds(proxy, session) == ["first", "resend"]
    assert len(proxy.get(f"/sessions/{session}")["branches"]) == 1
    shown = proxy.get(f"/exchanges/{proxy.exchanges(session)[-1]['id']}/view")
    assert shown["messages"][1]["content"][-1]["input"]["all"] is False  # as it was sent


def test_text_beside_calls_that_the_client_leaves_out_is_kept(proxy: Proxy, upstream: Upstream, session: str) -> None:
    """CrewAI and Semantic Kernel send their calls back like this."""
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for name in ("call_7Qk2mZp9TnX4cVb8Rw3sLd6f", "call_9Bn3xKq7WdT5mHc2Zr8pJf4v")
    ]
    said = [{"role": "assistant", "content": f"I look {at}.", "tool_calls": [call]} for at, call in enumerate(calls)]
    upstream.load(session, [*said, {"role": "assistant", "content": "There."}])
    asked: list[JsonObject] = [user("where?")]
    for call in calls:
        reply(proxy, session, asked, model=f"script:{session}", tools=TOOLS)
        assert upstream.log[-1].json["messages"] == asked
        result = {"role": "tool", "tool_call_id": call["id"], "content": "seen"}
        asked = [*asked, {"role": "assistant", "tool_calls": [call]}, result]
    reply(proxy, session, asked, model=f"script:{session}", tools=TOOLS)
    assert upstream.log[-1].json["messages"] == asked
    assert kinds(proxy, session) == ["first", "resend", "resend"]
    assert len(proxy.get(f"/sessions/{session}")["branches"]) == 1
    assert [m["content"] for m in proxy.messages(session) if m["role"] == "assistant"] == [
        "I look 0.",
        "I look 1.",
        "There.",
    ]


def test_a_reply_that_is_an_object_is_the_same_however_it_is_written(proxy: Proxy, upstream: Upstream) -> None:
    """DSPy sends parsed replies back like this."""
    sessions: set[str] = set()
    asked: list[JsonObject] = [user("Where does it rise?")]
    for number in range(3):
        answer = proxy.chat(None, asked, model=f'say:{{"spring": "the {number}th one", "metres": [9.0]}}')
        assert answer.status_code == 200, answer.text
        assert upstream.log[-1].json["messages"] == asked
        sessions.add(answer.headers["x-session-id"])
        written = json.dumps(json.loads(answer.json()["choices"][0]["message"]["content"]), indent=2)
        asked = [*asked, {"role": "assistant", "content": written}, user(f"And number {number}?")]
    (session,) = sessions
    assert kinds(proxy, session) == ["first", "resend", "resend"]
    assert proxy.messages(session)[1]["content"] == '{"spring": "the 0th one", "metres": [9.0]}'


@pytest.mark.parametrize(("tools", "model"), [(TOOLS, "echo"), (None, "say:title")])
def test_a_title_asked_for_beside_appends_stands_aside(
    proxy: Proxy, upstream: Upstream, session: str, tools: list[JsonObject] | None, model: str
) -> None:
    offered = {} if tools is None else {"tools": tools}
    reply(proxy, session, [SYSTEM, user("one")], **offered)
    reply(proxy, session, [user("two")], **offered)
    reply(proxy, session, [TITLE, user("Title for: one")], model=model)
    assert upstream.log[-1].json["messages"] == [TITLE, user("Title for: one")]
    reply(proxy, session, [user("three")], **offered)
    assert kinds(proxy, session) == ["first", "append", "side", "append"]
    asked = [m["content"] for m in proxy.messages(session) if m["role"] == "user"]
    assert asked == ["one", "two", "three"]
    assert upstream.log[-1].json["messages"][0] == SYSTEM


@pytest.mark.parametrize("words", ["Title for: one", "one"])
def test_a_title_asked_for_right_after_the_first_turn_stands_aside(
    proxy: Proxy, upstream: Upstream, session: str, words: str
) -> None:
    said = [user("one")]
    said.append(reply(proxy, session, [SYSTEM, *said]))
    answer = proxy.chat(session, [TITLE, user(words)])
    assert answer.headers["x-context-kind"] == "side"
    assert upstream.log[-1].json["messages"] == [TITLE, user(words)]
    answer = proxy.chat(session, [SYSTEM, *said, user("two")])
    assert answer.headers["x-context-kind"] == "resend"
    appended = proxy.chat(session, [TITLE, user(words)], headers={"x-session-mode": "append"})
    assert appended.headers["x-context-kind"] == "append"
    assert len(upstream.log[-1].json["messages"]) == 6


def test_results_alone_make_no_appending_session_of_one_that_resends(proxy: Proxy, session: str) -> None:
    said = converse(proxy, session, 2)
    said.append(user("look"))
    said.append(reply(proxy, session, said, model="tool:look", tools=TOOLS))
    result = {"role": "tool", "tool_call_id": said[-1]["tool_calls"][0]["id"], "content": "seen"}
    reply(proxy, session, [result], tools=TOOLS)
    assert proxy.chat(session, [user("a new beginning")], tools=TOOLS).headers["x-context-kind"] == "side"


def test_a_request_that_resembles_a_session_is_told_what_differs(proxy: Proxy) -> None:
    name, answer = unnamed(proxy, [SYSTEM, user("resembling")])
    other = [SYSTEM, user("resembling"), {**answer, "content": "changed"}, user("on")]
    warning = proxy.chat(None, other).headers["x-context-warning"]
    assert name in warning
    assert "messages[2] (assistant) differs" in warning


def test_an_agent_that_says_its_name_appends_in_a_manner_of_its_own(proxy: Proxy, session: str) -> None:
    reply(proxy, session, [SYSTEM, user("one")], headers={"x-agent-name": "planner"})
    other = [TITLE, user("two")]
    reply(proxy, session, other, tools=TOOLS, headers={"x-agent-name": "writer"})
    assert kinds(proxy, session) == ["first", "append"]


# ---------------------------------------------------------------------------------- without an id


def unnamed(proxy: Proxy, messages: list[JsonObject], **given: Any) -> tuple[str, JsonObject]:
    """Send a request without a session; return the session that it got, and the reply."""
    answer = proxy.chat(None, messages, **given)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-session-id"], answer.json()["choices"][0]["message"]


def test_a_conversation_without_an_id_is_one_session(proxy: Proxy) -> None:
    said: list[JsonObject] = []
    found: list[str] = []
    for number in range(4):
        said.append(user(f"nameless {number}"))
        name, answer = unnamed(proxy, [SYSTEM, *said])
        said.append(answer)
        found.append(name)
    session = found[0]
    assert found == [session] * 4
    assert kinds(proxy, session) == ["first", "resend", "resend", "resend"]
    assert texts(proxy.messages(session)) == texts(said)
    # An edit is found too, because a recorded reply comes before it.
    assert unnamed(proxy, [*said[:2], user("edited")])[0] == session


def test_conversations_that_begin_alike_stay_apart(proxy: Proxy) -> None:
    begin = [user("the same beginning")]
    one, answer = unnamed(proxy, begin)
    two, same = unnamed(proxy, begin)
    assert answer == same
    assert one != two
    here, there = [*begin, answer, user("here")], [*begin, answer, user("there")]
    third, here_too = unnamed(proxy, here)
    fourth, _ = unnamed(proxy, there)
    assert len({one, two, third, fourth}) == 4  # it is unknown which of the two continued
    # After the point where they differ, each is recognized.
    assert unnamed(proxy, [*here, here_too, user("on")])[0] == third


def test_a_reply_that_nobody_recorded_leads_to_no_session(proxy: Proxy) -> None:
    session, answer = unnamed(proxy, [user("recorded")])
    forged = [user("recorded"), {"role": "assistant", "content": "forged"}, user("on")]
    assert unnamed(proxy, forged)[0] != session
    behind = [*forged[:2], user("recorded"), answer, user("on")]
    assert unnamed(proxy, behind)[0] != session


def test_tenants_do_not_find_each_others_conversations(serve: Serve) -> None:
    proxy = serve(auth={"mode": "passthrough"})
    said = [user("whose?")]
    mine, answer = unnamed(proxy, said)
    said += [answer, user("on")]
    theirs, _ = unnamed(proxy, said, headers={"authorization": "Bearer sk-other"})
    assert mine != theirs
    assert unnamed(proxy, said)[0] == mine


# ------------------------------------------------------------------------------------- retries


def test_a_repeated_request_stores_nothing_twice(proxy: Proxy, session: str) -> None:
    said = [*converse(proxy, session, 2), user("again")]
    for _ in range(3):
        reply(proxy, session, said)
    assert len(proxy.messages(session)) == 6
    assert len(branches(proxy, session)) == 1


@pytest.mark.parametrize(
    ("first", "again"),
    [({"idempotency-key": "k-1"}, {"idempotency-key": "k-1"}), ({}, {"x-stainless-retry-count": "1"})],
)
def test_an_append_that_announces_itself_as_a_retry_is_stored_once(
    proxy: Proxy, session: str, first: dict[str, str], again: dict[str, str]
) -> None:
    reply(proxy, session, [user("continue")])
    reply(proxy, session, [user("continue")], headers=first)
    reply(proxy, session, [user("continue")], headers=again)
    assert len(proxy.messages(session)) == 4
    other = {"idempotency-key": "k-2"} if first else {}
    reply(proxy, session, [user("continue")], headers=other)
    assert len(proxy.messages(session)) == 6  # equal text is no sign of a retry


def test_what_follows_an_empty_reply_does_not_repeat_the_question(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    """No client sends an empty reply back, so the next request looks like an append."""
    reply(proxy, session, [user("first")], model="echo+say:")
    told = reply(proxy, session, [user("first"), user("go on")])
    assert texts(upstream.log[-1].json["messages"]) == ["first", "go on"]
    assert texts(proxy.messages(session)) == ["first", "go on", told["content"]]
    reply(proxy, session, [user("first"), user("go on"), told, user("more")])
    assert len(proxy.messages(session)) == 5


def test_a_first_message_that_changes_every_turn_costs_no_copy_of_the_rest(proxy: Proxy, session: str) -> None:
    said: list[JsonObject] = []
    for number in range(4):
        changing = user(f"It is {number} o'clock.")
        said.append(user(f"question {number}"))
        said.append(reply(proxy, session, [changing, *said]))
    assert kinds(proxy, session) == ["first", "foreign", "foreign", "foreign"]
    assert texts(proxy.messages(session)) == ["It is 3 o'clock.", *texts(said)]
    lines = proxy.client.get(f"/sessions/{session}/export").text.splitlines()
    bodies = [line for line in lines if '"record":"body"' in line.replace(": ", ":")]
    assert len(bodies) == len(said) + 4


@pytest.mark.parametrize("style", ["count", "key", "silent"])
def test_a_retry_after_one_that_failed_is_stored_once(proxy: Proxy, session: str, style: str) -> None:
    """The first reply is lost, the second attempt fails, and the third is answered."""

    def headers(number: int) -> dict[str, str]:
        if style == "key":
            return {"idempotency-key": "k-again"}
        return {"x-stainless-retry-count": str(number)} if style == "count" or number == 1 else {}

    reply(proxy, session, [user("hello")])
    reply(proxy, session, [user("again")], headers=headers(0))
    failed = proxy.chat(session, "again", model="fault:500", headers=headers(1))
    assert failed.status_code == 500
    reply(proxy, session, [user("again")], headers=headers(2))
    assert [m["content"] for m in proxy.messages(session) if m["role"] == "user"] == ["hello", "again"]


def test_the_retry_of_what_failed_after_equal_words_is_a_turn_of_its_own(proxy: Proxy, session: str) -> None:
    reply(proxy, session, [user("continue")])
    assert proxy.chat(session, "continue", model="fault:500").status_code == 500
    reply(proxy, session, [user("continue")], headers={"x-stainless-retry-count": "1"})
    assert [m["content"] for m in proxy.messages(session) if m["role"] == "user"] == ["continue", "continue"]


def test_a_title_asked_for_while_the_first_question_is_answered_stands_aside(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    question = [SYSTEM, user("one")]
    body = {"model": "long:3+gate", "messages": question, "tools": TOOLS, "stream": True}
    before = len(upstream.log)
    with proxy.client.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-id": session}) as answer:
        until(lambda: len(upstream.log) > before, "the question arrives")
        reply(proxy, session, [TITLE, user("one")])
        upstream.gate.set()
        assert b"[DONE]" in answer.read()
    reply(proxy, session, [user("two")], tools=TOOLS)
    assert sorted(kinds(proxy, session)) == ["append", "first", "side"]
    assert [m["content"] for m in upstream.log[-1].json["messages"] if m["role"] != "assistant"] == [
        SYSTEM["content"],
        "one",
        "two",
    ]


@pytest.mark.parametrize("resends", [True, False])
def test_a_title_for_the_very_words_of_the_first_question_stands_aside(
    proxy: Proxy, upstream: Upstream, session: str, resends: bool
) -> None:
    said = [user("one")]
    said.append(reply(proxy, session, [SYSTEM, *said], tools=TOOLS))
    said.append(user("two"))
    said.append(reply(proxy, session, [SYSTEM, *said] if resends else said[-1:], tools=TOOLS))
    reply(proxy, session, [TITLE, user("one")])
    assert kinds(proxy, session)[-1] == "side"
    said.append(user("three"))
    reply(proxy, session, [SYSTEM, *said] if resends else said[-1:], tools=TOOLS)
    assert kinds(proxy, session)[-1] == ("resend" if resends else "append")
    assert texts(upstream.log[-1].json["messages"]) == [SYSTEM["content"], *texts(said)]


def test_replies_that_get_a_name_are_the_same_replies(proxy: Proxy, session: str) -> None:
    said: list[JsonObject] = []
    for number in range(3):
        said.append(user(f"question {number}"))
        said.append({**reply(proxy, session, said), "name": "planner"})
    assert kinds(proxy, session) == ["first", "resend", "resend"]
    assert len(branches(proxy, session)) == 1


def test_results_alone_follow_their_calls_in_a_session_that_resends(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    said = converse(proxy, session, 2)
    said.append(user("look"))
    said.append(reply(proxy, session, said, model="tool:look", tools=TOOLS))
    result = {"role": "tool", "tool_call_id": said[-1]["tool_calls"][0]["id"], "content": "seen"}
    reply(proxy, session, [result], tools=TOOLS)
    assert kinds(proxy, session)[-1] == "append"
    assert texts(upstream.log[-1].json["messages"])[-2:] == [said[-1]["content"], "seen"]
    assert len(proxy.messages(session)) == 8
