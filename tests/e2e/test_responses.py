"""The Responses API through a running proxy: items, streams, the provider's state, shared keys, Azure's paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from proxy.dialects.responses.reply import event_of, item_events
from tests.support.plain_provider import EVENTS, Asked, PlainProvider, Told
from tests.support.server import Proxy, settings_for
from tests.support.upstream import Upstream
from tests.support.waiting import until

LONG = "many words " * 60
TRIMS = {"trigger": {"messages": 6}, "keep": {"rounds": 1}, "edits": [{"type": "clear_tool_results", "keep": 0}]}
KEYS = [{"key": "key-of-anne-0123", "tenant": "anne"}, {"key": "key-of-bert-0123", "tenant": "bert"}]
Item = dict[str, Any]


def said(text: str, number: int) -> Item:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": f"msg_{number}", "status": "completed", "role": "assistant", "content": [part]}


def reasoning(number: int) -> Item:
    return {"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": f"sealed{number}"}


def call(name: str, number: int) -> Item:
    made = {"call_id": f"call_{number}", "name": name, "arguments": '{"query":"cats"}', "status": "completed"}
    return {"type": "function_call", "id": f"fc_{number}", **made}


def output(number: int, text: str) -> Item:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": text}


def user(text: str) -> Item:
    return {"role": "user", "content": text}


class Provider(PlainProvider):
    """Answers with the items that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[list[Item] | dict[str, Any]] = []
        self.made: dict[str, dict[str, Any]] = {}
        """Responses made in the background, by id, as they are fetched."""
        self._numbers = count(1)

    def answer(self, asked: Asked) -> Told:
        path, _, query = asked.path.partition("?")
        if asked.method != "POST" or not path.endswith("/responses"):
            made = self.made.get(path.rstrip("/").removesuffix("/cancel").rpartition("/")[2])
            if made is not None and "stream=true" in query:
                events = _events(made)[-1:] if "starting_after" in query else _events(made)
                return Told(kind=EVENTS, body=b"".join(events))
            return Told(body=orjson.dumps({"path": asked.path} if made is None else made))
        answer = self.answers.pop(0)
        given = answer if isinstance(answer, dict) else {"output": answer}
        if "refused" in given:
            return Told(status=400, body=orjson.dumps({"error": given["refused"]}))
        usage = {"input_tokens": 100, "output_tokens": 5, "total_tokens": 105}
        found = {"id": f"resp_{next(self._numbers)}", "object": "response", "model": "m", "status": "completed"}
        response: dict[str, Any] = found | {"usage": usage, "store": True} | given
        if not asked.body["stream"]:
            return Told(body=orjson.dumps(response))
        events = _events(response)
        return Told(kind=EVENTS, body=b"".join(events[: response.get("events", len(events))]))

    @property
    def sent(self) -> Any:
        return self.got[-1].body


def _events(response: dict[str, Any]) -> list[bytes]:
    """Return the events of a stream that ends with a response."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    events: list[tuple[str, Any]] = [("response.created", {"response": begun})]
    for place, item in enumerate(response["output"]):
        events += item_events(place, item)
    events.append((f"response.{response['status']}", {"response": response}))
    numbered = [(name, {"type": name, **data, "sequence_number": at}) for at, (name, data) in enumerate(events)]
    return [event_of(name, data) for name, data in numbered]


@pytest.fixture
def api() -> Iterator[Provider]:
    with Provider() as provider:
        yield provider


@pytest.fixture
def serves(api: Provider, upstream: Upstream, tmp_path: Path) -> Iterator[Callable[..., Proxy]]:
    with ExitStack() as stack:
        numbers = count()

        def start(**sections: Any) -> Proxy:
            sections["upstream"] = {"base_url": api.base_url, **sections.get("upstream", {})}
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
            return stack.enter_context(Proxy(settings_for(upstream, folder, sections)))

        yield start


def ask(
    proxy: Proxy, given: Any, session: str | None = "s", *, stream: bool = False, key: str = "sk-test", **fields: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", **fields.pop("headers", {})}
    headers |= {} if session is None else {"x-session-id": session}
    body = {"model": "m", "input": given, "stream": stream, **fields}
    return proxy.client.post("/v1/responses", json=body, headers=headers)


def outcome(answer: httpx.Response) -> Any:
    """Return the response object of an answer, which must be a success."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        return answer.json()
    return orjson.loads(answer.text.rstrip().rpartition("data: ")[2])["response"]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_conversation_is_stored_item_by_item_and_trimmed(
    serves: Callable[..., Proxy], api: Provider, stream: bool
) -> None:
    proxy, talk = serves(policies={"default": TRIMS}), [user("hello")]
    first, second = [reasoning(1), call("look", 1), call("look", 2)], [reasoning(2), said("Two cats.", 3)]
    api.answers += [first, second, [said("None.", 4)], [reasoning(4), said("No.", 5)], [said("Bye.", 6)]]
    asked = [[output(1, LONG), output(2, LONG)], [user("And dogs?")], [user("Birds?")], [user("Fish?")], []]
    for number, new in enumerate(asked):
        found = outcome(ask(proxy, talk, stream=stream, instructions="Be brief."))
        talk = [*talk, *found["output"], *new]
        if number < 2:
            assert api.sent["input"] == talk[: len(api.sent["input"])]
    assert proxy.messages("s") == talk
    # The second-to-last question caused a trim. The items that it made invalid are not sent from then on.
    before, last = [asked.body["input"] for asked in api.got[-2:]]
    assert last[: len(before)] == before
    assert [each["id"] for each in last if each.get("type") == "reasoning"] == ["rs_1", "rs_4"]
    assert LONG not in orjson.dumps(last).decode()
    assert proxy.get("/sessions/s")["instructions"] == [{"role": "system", "content": "Be brief."}]
    told = proxy.exchanges("s")[-1]
    assert (told["kind"], told["status"], told["usage"]["prompt_tokens"]) == ("resend", "complete", 100)


def test_what_is_not_trimmed_goes_byte_for_byte(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves()
    api.answers.append([said("Hi.", 1)])
    body = b'{ "model":"m" ,"stream":true, "input" : "hello", "odd":1.50 }'
    answer = proxy.client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert answer.content.startswith(b"event: response.created\ndata: {")
    assert api.sent == orjson.loads(body)
    refused = proxy.client.post("/v1/responses", json={"messages": []})
    assert refused.headers["x-context-kind"] == "refused"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    misplaced = proxy.client.post("/v1/chat/completions", json={"input": "hello"})
    assert "/v1/responses" in misplaced.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_what_is_too_long_is_trimmed_and_sent_once_more(
    serves: Callable[..., Proxy], api: Provider, stream: bool
) -> None:
    proxy = serves(policies={"default": {}})
    error = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model."}
    failed = {"status": "failed", "error": error, "output": []}
    api.answers += [failed if stream else {"refused": error}, [said("Fine.", 1)]]
    talk = [user(LONG), said("ok", 7), user(LONG), said("ok", 8), user("So?")]
    assert outcome(ask(proxy, talk, stream=stream))["output"] == [said("Fine.", 1)]
    assert len(api.sent["input"]) < len(talk)
    assert "too long" in proxy.exchanges("s")[-1]["warnings"][-1]


def test_what_is_refused_after_it_was_too_long_is_not_sent_untrimmed(
    serves: Callable[..., Proxy], api: Provider
) -> None:
    proxy = serves(policies={"default": {}})
    error = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model."}
    talk = [user(LONG), said("ok", 7), user(LONG), said("ok", 8), user("So?")]
    for stream in (False, True):
        tooling = {"status": "failed", "error": error, "output": []} if stream else {"refused": error}
        api.answers += [tooling, {"refused": {"message": "Something else is wrong."}}]
        before = len(api.got)
        answer = ask(proxy, talk, f"{stream}", stream=stream)
        assert (answer.status_code, "Something else" in answer.text) == (400, True)
        assert len(api.got) == before + 2


def test_a_tool_of_the_proxy_s_own_is_answered_unseen(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves(virtual_tools={"recall_context": True})
    tools = [{"type": "function", "name": "look", "parameters": {}}]
    for stream in (False, True):
        api.answers += [[reasoning(1), call("recall_context", 1)], [reasoning(2), said("Eighty.", 2)]]
        found = outcome(ask(proxy, [user("cats?")], str(stream), stream=stream, tools=tools))
        assert [each["type"] for each in found["output"]] == ["reasoning", "message"]
        assert [each.get("type") for each in api.sent["input"]][1:] == [
            "reasoning",
            "function_call",
            output(1, "")["type"],
        ]
        api.answers.append([said("Yes.", 3)])
        ask(proxy, [user("cats?"), *found["output"], user("Sure?")], str(stream), stream=stream, tools=tools)
        assert len(api.sent["input"]) == 7


@pytest.mark.parametrize("from_events", [True, False, None], ids=["events", "last event", "json"])
def test_what_unseen_rounds_said_and_searched_comes_back_once(
    serves: Callable[..., Proxy], api: Provider, from_events: bool | None
) -> None:
    """A message and a search need the reasoning before them; a reasoning item needs what followed it."""
    proxy, tools = serves(virtual_tools={"recall_context": True}), [{"type": "function", "name": "look"}]
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    }
    api.answers += [[reasoning(1), search, said("I look.", 1), reasoning(2), call("recall_context", 2)]]
    api.answers += [[reasoning(3), said("Eighty.", 3)]]
    asked = user("How many cats?")
    answer = ask(proxy, [asked], tools=tools, stream=from_events is not None)
    shown = outcome(answer)["output"]
    whole = ["rs_1", "ws_1", "msg_1", "rs_3", "msg_3"]
    assert [item["id"] for item in shown] == whole
    if from_events:
        told = [orjson.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
        shown = [data["item"] for data in told if data["type"] == "response.output_item.done"]
        assert [item["id"] for item in shown] == [*whole[:3], "rs_2", *whole[3:]]
    for policy, hidden in (("default", ["rs_2", "fc_2", None]), ("off", [])):
        api.answers.append([said("Yes.", 4)])
        headers = {"x-context-policy": policy}
        later = ask(proxy, [asked, *shown, user("Sure?")], tools=tools, headers=headers)
        assert "x-context-warning" not in later.headers
        assert [item.get("id") for item in api.sent["input"]][1:-1] == [*whole[:3], *hidden, *whole[3:]]
        view = proxy.get(f"/exchanges/{later.headers['x-exchange-id']}/view")
        assert view["messages"] == api.sent["input"]


def test_the_view_of_an_exchange_is_what_was_sent(serves: Callable[..., Proxy], api: Provider) -> None:
    """It lists single items, and the proxy's own tools."""
    proxy = serves(policies={"default": TRIMS}, virtual_tools={"recall_context": True})
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}]
    api.answers += [[reasoning(1), call("look", 1), call("look", 2)], [said("Yes.", 3)]]
    talk = [user("cats?")]
    talk += outcome(ask(proxy, talk, tools=tools))["output"]
    answer = ask(proxy, [*talk, output(1, LONG), output(2, LONG)], tools=tools)
    view = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}/view", diff="true")
    assert (view["messages"], view["tools"]) == (api.sent["input"], api.sent["tools"])
    assert [tool["name"] for tool in view["tools"]] == ["look", "recall_context"]
    assert [each["original"] for each in view["diff"]] == [talk[0], talk[1:], output(1, LONG), output(2, LONG)]


# ------------------------------------------------------------------------------------ the provider's state


def test_a_request_that_names_a_response_is_passed_on_and_recorded(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves(policies={"default": TRIMS})
    api.answers += [[said("a", 1)], [said("b", 2)], [said("c", 3)], [said("d", 4)]]
    first = ask(proxy, "one", None)
    session = first.headers["x-session-id"]
    second = ask(proxy, "two", None, previous_response_id=first.json()["id"])
    assert (second.headers["x-session-id"], second.headers["x-context-policy"]) == (session, "off")
    assert api.sent["previous_response_id"] == first.json()["id"]
    assert [exchange["kind"] for exchange in proxy.exchanges(session)] == ["first", "provider_state"]
    fork = ask(proxy, "three", None, previous_response_id=first.json()["id"])
    assert fork.headers["x-session-id"] == session
    assert len(proxy.get(f"/sessions/{session}")["branches"]) == 2
    assert [each["content"] for each in proxy.messages(session) if each["role"] == "user"] == ["one", "three"]
    unknown = ask(proxy, "four", "other", previous_response_id="resp_elsewhere")
    assert (unknown.status_code, len(proxy.messages("other"))) == (200, 2)


def missed(proxy: Proxy) -> None:
    """Return once the proxy has noticed that its store is unavailable, and no longer queries it."""
    proxy.client.get("/readyz")
    until(lambda: proxy.client.get("/sessions").status_code == 503, "the store is missed")


@pytest.mark.parametrize("session", [None, "s"], ids=["unnamed", "named"])
def test_without_the_store_it_is_passed_on_and_recorded_later(
    serves: Callable[..., Proxy], api: Provider, tmp_path: Path, session: str | None
) -> None:
    proxy, away = serves(), tmp_path / "away"
    file = tmp_path / "0" / "palimpsest.db"
    away.mkdir()
    api.answers += [[said(reply, number)] for number, reply in enumerate("abcd", 1)]
    first = ask(proxy, "one", session)
    for each in file.parent.glob(f"{file.name}*"):
        each.rename(away / each.name)
    missed(proxy)
    second = ask(proxy, "two", session, previous_response_id=first.json()["id"])
    assert (second.status_code, second.headers["x-context-kind"]) == (200, "provider_state")
    third = ask(proxy, "three", session, previous_response_id=second.json()["id"], stream=True)
    assert api.sent["previous_response_id"] == second.json()["id"]
    for each in away.iterdir():
        each.rename(file.parent / each.name)
    until(lambda: proxy.client.get("/readyz").status_code == 200, "the store is used again")
    fourth = ask(proxy, "four", session, previous_response_id=outcome(third)["id"])
    name = first.headers["x-session-id"]
    assert fourth.headers["x-session-id"] == name
    texts = [each["content"] for each in proxy.messages(name)]
    assert [text if isinstance(text, str) else text[0]["text"] for text in texts] == [
        *("one", "a", "two", "b", "three", "c", "four", "d")
    ]
    assert [each["kind"] for each in proxy.exchanges(name)] == ["first", *["provider_state"] * 3]
    assert len(proxy.get("/sessions")["data"]) == 1


def test_what_the_proxy_is_to_look_up_needs_the_store(
    serves: Callable[..., Proxy], api: Provider, tmp_path: Path
) -> None:
    proxy = serves(responses={"state": "proxy"})
    api.answers += [[said("a", 1)]]
    first = ask(proxy, "one", None)
    file = tmp_path / "0" / "palimpsest.db"
    file.rename(file.with_name("away.db"))
    missed(proxy)
    assert ask(proxy, "two", None, previous_response_id=first.json()["id"]).status_code == 503


def test_the_proxy_holds_the_state_where_it_is_asked_to(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves(responses={"state": "proxy"})
    api.answers += [[said("a", 1)], [said("b", 2)], [said("c", 3)]]
    first = ask(proxy, [{"role": "developer", "content": "Rules."}, user("one")], None, instructions="Be brief.")
    second = ask(proxy, "two", None, previous_response_id=first.json()["id"], instructions="Be long.")
    assert api.sent["instructions"] == "Be long."
    assert "previous_response_id" not in api.sent
    assert [each["content"] for each in api.sent["input"] if each["role"] != "assistant"] == ["Rules.", "one", "two"]
    ask(proxy, "three", None, previous_response_id=first.json()["id"])
    assert "instructions" not in api.sent
    assert [each["content"] for each in api.sent["input"] if each["role"] == "user"] == ["one", "three"]
    assert first.headers["x-session-id"] == second.headers["x-session-id"]
    lost = ask(proxy, "four", None, previous_response_id="resp_elsewhere")
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "previous_response_not_found")


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("session", ["s", None], ids=["named", "unnamed"])
def test_what_goes_on_from_a_response_brings_results_that_its_client_knows_nothing_of(
    serves: Callable[..., Proxy], api: Provider, session: str | None, stream: bool
) -> None:
    proxy, tools = serves(virtual_tools={"recall_context": True}), [{"type": "function", "name": "look"}]
    api.answers.append([reasoning(1), call("recall_context", 1), call("look", 2)])
    mixed = outcome(ask(proxy, [user("where are my cats?")], session, tools=tools, stream=stream))
    assert [each["type"] for each in mixed["output"]] == ["reasoning", "function_call"]
    for number in (3, 4):  # the second time too: it is a fork
        api.answers.append([said("In the garden.", number)])
        state = {"previous_response_id": mixed["id"], "tools": tools}
        answer = ask(proxy, [output(2, "garden")], session, stream=stream, **state)
        brought = api.sent["input"]
        assert [(item["type"], item["call_id"]) for item in brought] == [
            ("function_call_output", "call_1"),
            ("function_call_output", "call_2"),
        ]
        view = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}/view")
        assert view["messages"][-2:] == brought
        assert [item.get("id") for item in view["messages"][1:-2]] == ["rs_1", "fc_1", "fc_2"]  # the provider holds it
        api.answers.append([said("Where?", number + 2)])
        alone = ask(proxy, [output(2, "garden")], "other", tools=tools, previous_response_id="resp_elsewhere")
        assert view["tokens_sent"] > int(alone.headers["x-context-tokens-sent"])


@pytest.mark.parametrize("state", ["upstream", "proxy"])
def test_a_client_may_name_the_response_with_which_a_stream_of_several_rounds_began(
    serves: Callable[..., Proxy], api: Provider, state: str
) -> None:
    """LangChain and Vercel's SDK do this."""
    proxy = serves(virtual_tools={"recall_context": True}, responses={"state": state})
    tools = [{"type": "function", "name": "look"}]
    api.answers += [[reasoning(1), call("recall_context", 1)], [reasoning(2), said("Eighty.", 2)]]
    answer = ask(proxy, [user("How many cats?")], None, tools=tools, stream=True)
    told = [orjson.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    begun, ended = told[0]["response"]["id"], told[-1]["response"]["id"]
    assert begun != ended
    whole = ["user", "rs_1", "fc_1", "call_1", "rs_2", "msg_2", "user"]
    for name, held in ((ended, 6), (begun, 3)):
        api.answers.append([said("Yes.", 3)])
        later = ask(proxy, [user("Sure?")], None, tools=tools, previous_response_id=name)
        assert later.headers["x-session-id"] == answer.headers["x-session-id"]
        sent = [item.get("id") or item.get("call_id") or item["role"] for item in api.sent["input"]]
        assert sent == (whole if state == "proxy" else whole[held:])


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_model_that_recalls_for_ever_can_be_asked_on(
    serves: Callable[..., Proxy], api: Provider, stream: bool
) -> None:
    """The client continues with the id of its response, which ends with a call, or with the whole history."""
    proxy, tools = serves(virtual_tools={"recall_context": True}), [{"type": "function", "name": "look"}]
    talk = [user("How many cats?")]
    for turn in (0, 10):
        api.answers += [[reasoning(turn + n), call("recall_context", turn + n)] for n in range(4)]
        stopped = outcome(ask(proxy, talk, tools=tools, stream=stream))
        assert [each["type"] for each in stopped["output"]][-1] == "message"
        calls = [item["call_id"] for item in api.sent["input"] if "call_id" in item]
        api.answers.append([said("Yes.", turn + 5)])
        ask(proxy, [user("Sure?")], previous_response_id=stopped["id"], tools=tools)
        assert [item.get("call_id") for item in api.sent["input"]] == [f"call_{turn + 3}", None]
        talk += [*stopped["output"], user("Sure?")]
        api.answers.append([said("No.", turn + 6)])
        later = ask(proxy, talk, tools=tools)
        assert "x-context-warning" not in later.headers
        sent = [item["call_id"] for item in api.sent["input"] if "call_id" in item]
        assert sent == [*calls, f"call_{turn + 3}", f"call_{turn + 3}"]
        talk += [said("No.", turn + 6), user("Really?")]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_from_the_store_can_be_followed(serves: Callable[..., Proxy], api: Provider, stream: bool) -> None:
    proxy = serves(responses={"state": "proxy"}, finish={"tools": ["finish_task"]})
    api.answers += [[call("finish_task", 1)], [said("a", 2)]]
    first = ask(proxy, "one", None)
    repeated = ask(proxy, [output(1, "ok")], None, previous_response_id=first.json()["id"], stream=stream)
    assert "finished" in repeated.headers["x-context-warning"]
    name = f"resp_{repeated.headers['x-exchange-id']}"
    assert name in repeated.text
    assert ask(proxy, "two", None, previous_response_id=name).headers["x-session-id"] == first.headers["x-session-id"]
    assert [each["type"] for each in api.sent["input"]] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]


def test_a_conversation_is_the_provider_s_until_something_of_it_came_here(
    serves: Callable[..., Proxy], api: Provider
) -> None:
    """The client may have added items to it without the proxy."""
    own_tools = {"recall_context": True, "only_with_tools": False}
    proxy = serves(responses={"state": "proxy"}, policies={"default": TRIMS}, virtual_tools=own_tools)
    api.answers += [{"output": [said("a", 1)], "conversation": {"id": "conv_1"}}, [said("b", 2)]]
    first = ask(proxy, "one", None, conversation={"id": "conv_1"})
    assert (first.status_code, first.headers["x-context-policy"]) == (200, "off")
    assert api.sent["conversation"] == {"id": "conv_1"}
    assert "tools" not in api.sent
    second = ask(proxy, "two", None, conversation="conv_1")
    assert first.headers["x-session-id"] == second.headers["x-session-id"]
    assert "conversation" not in api.sent
    assert api.sent["tools"]
    assert [each["content"] for each in api.sent["input"] if each["role"] == "user"] == ["one", "two"]


@pytest.mark.parametrize("state", ["upstream", "proxy"])
def test_a_conversation_goes_on_from_its_last_reply(serves: Callable[..., Proxy], api: Provider, state: str) -> None:
    proxy = serves(responses={"state": state})
    told = {} if state == "proxy" else {"conversation": {"id": "conv_1"}}  # not named if the proxy expands it
    api.answers += [{"output": [said("a", 1)], "conversation": {"id": "conv_1"}}]
    api.answers += [{"output": [said(text, at)], **told} for at, text in enumerate("bcd", 2)]
    texts = ("one", "two", "three", "four")
    session = [ask(proxy, text, None, conversation="conv_1").headers["x-session-id"] for text in texts][-1]
    if state == "proxy":
        asked = [each["content"] for each in api.sent["input"] if each["role"] == "user"]
        assert asked == ["one", "two", "three", "four"]
    stored = proxy.messages(session)
    assert [each["content"] for each in stored if each["role"] == "user"] == ["one", "two", "three", "four"]


@pytest.mark.parametrize("policy", ["default", "off"])
def test_the_view_of_what_is_expanded_holds_what_was_repaired(
    serves: Callable[..., Proxy], api: Provider, policy: str
) -> None:
    proxy = serves(responses={"state": "proxy"})
    api.answers += [[call("look", 1)], [said("b", 2)], [said("c", 3)]]
    last = ask(proxy, "one").json()["id"]
    for text in ("two", "three"):
        answer = ask(proxy, text, previous_response_id=last, headers={"x-context-policy": policy})
        assert "repaired: 1 x tool call without a result" in answer.headers["x-context-warning"]
        view = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}/view")
        assert view["messages"] == api.sent["input"]
        last = answer.json()["id"]


def test_what_is_expanded_has_the_instructions_of_its_own_branch(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves(responses={"state": "proxy"})
    api.answers += [[said(text, at)] for at, text in enumerate("abcdef", 1)]

    def follow(text: str, before: httpx.Response | None, *told: str) -> tuple[httpx.Response, list[str]]:
        state = {} if before is None else {"previous_response_id": before.json()["id"]}
        answer = ask(proxy, [*({"role": "developer", "content": each} for each in told), user(text)], **state)
        return answer, [each["content"] for each in api.sent["input"] if each["role"] == "developer"]

    first, _ = follow("one", None, "be brief")
    other, _ = follow("another one", None, "be kind")
    second, told = follow("two", first, "be quick")
    assert told == ["be brief", "be quick"]
    assert follow("three", second)[1] == ["be brief", "be quick"]
    assert follow("two, otherwise", first)[1] == ["be brief"]
    assert follow("another two", other)[1] == ["be kind"]


@pytest.mark.parametrize("fields", [{}, {"store": False}])
def test_the_proxy_holds_the_state_of_a_provider_that_keeps_none(
    serves: Callable[..., Proxy], api: Provider, fields: dict[str, Any]
) -> None:
    proxy = serves(responses={"state": "proxy"})
    api.answers += [{"output": [said("a", 1)], "store": False}, {"output": [said("b", 2)], "store": False}]
    name = ask(proxy, "one", None, **fields).json()["id"]
    assert ask(proxy, "two", None, previous_response_id=name, **fields).status_code == 200
    assert [each["content"] for each in api.sent["input"] if each["role"] == "user"] == ["one", "two"]


@pytest.mark.parametrize("session", ["s", None], ids=["named", "unnamed"])
@pytest.mark.parametrize("names", [True, False], ids=["by its id", "resent"])
def test_what_was_asked_in_the_background_is_stored(
    serves: Callable[..., Proxy], api: Provider, session: str | None, names: bool
) -> None:
    proxy = serves()
    api.answers += [[said("a", 1)], {"id": "resp_late", "status": "queued", "output": []}, [said("c", 3)]]
    first = ask(proxy, "one", session)
    late = ask(proxy, "two", session, background=True, previous_response_id=first.json()["id"])
    assert "its output is stored once the client fetches it" in late.headers["x-context-warning"]
    if names:
        last = ask(proxy, "three", session, previous_response_id="resp_late")
    else:
        last = ask(proxy, [user("one"), said("a", 1), user("two"), said("b", 2), user("three")], session)
    used = last.headers["x-session-id"]
    assert used == first.headers["x-session-id"] == late.headers["x-session-id"]
    assert [each["content"] for each in proxy.messages(used) if each["role"] == "user"] == ["one", "two", "three"]
    assert {each["status"] for each in proxy.exchanges(used)} == {"complete"}


QUEUED = {"id": "resp_late", "status": "queued", "output": [], "background": True, "usage": None}
USAGE = {"input_tokens": 100, "output_tokens": 5, "total_tokens": 105}


def made(*output: Item, status: str = "completed", **fields: Any) -> dict[str, Any]:
    """Return the response that a provider made in the background from `QUEUED`."""
    return {**QUEUED, "status": status, "output": list(output), "usage": USAGE, **fields}


def fetched(proxy: Proxy, rest: str = "", key: str = "sk-test", method: str = "GET") -> httpx.Response:
    path = f"/v1/responses/resp_late{rest}"
    return proxy.client.request(method, path, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("rest", ["", "?stream=true", "?stream=true&starting_after=3"], ids=["json", "stream", "rest"])
@pytest.mark.parametrize("session", ["s", None], ids=["named", "unnamed"])
@pytest.mark.parametrize("state", ["upstream", "proxy"])
def test_what_was_made_in_the_background_is_stored_once_it_is_fetched(
    serves: Callable[..., Proxy], api: Provider, rest: str, session: str | None, state: str
) -> None:
    proxy = serves(responses={"state": state}, models=[{"match": ["m"], "prices": {"input": 1, "output": 2}}])
    reply = [reasoning(2), said("b", 2)]
    api.answers += [[said("a", 1)], QUEUED, [said("c", 3)], [said("d", 4)]]
    first = ask(proxy, "one", session)
    name = ask(proxy, "two", session, background=True, previous_response_id=first.json()["id"]).headers["x-session-id"]
    for running in ({"status": "queued"}, {"status": "in_progress", "output": [reasoning(2)]}):
        api.made["resp_late"] = QUEUED | running
        assert fetched(proxy).json() == QUEUED | running
        assert proxy.exchanges(name)[-1]["replies"] == []
    api.made["resp_late"] = made(*reply)
    answers = [fetched(proxy, rest) for _ in range(3)]
    # The proxy reads the first answer, and only relays the others.
    assert len({(answer.status_code, answer.content, answer.headers["content-type"]) for answer in answers}) == 1
    assert proxy.messages(name)[2:] == [{"type": "message", "role": "user", "content": "two"}, *reply]
    receipt = proxy.exchanges(name)[-1]
    node = proxy.get(f"/sessions/{name}")["head"]
    assert (receipt["status"], receipt["replies"], receipt["usage"]["prompt_tokens"]) == ("complete", [node], 100)
    assert receipt["finish_reasons"] == ["completed"]
    assert receipt["cost"] == pytest.approx(110 / 1e6)
    session_row = proxy.get(f"/sessions/{name}")
    assert (session_row["messages"], session_row["requests"]) == (4, 2)
    total = proxy.get("/stats")["total"]
    assert (total["requests"], total["tokens_input"], total["tokens_output"]) == (2, 200, 10)
    assert 'palimpsest_tokens_total{state="input"} 200.0' in proxy.client.get("/metrics").text
    later = ask(proxy, "three", session, previous_response_id="resp_late")
    assert later.headers["x-session-id"] == name
    resent = [user("one"), said("a", 1), user("two"), *reply, user("three"), said("c", 3), user("four")]
    last = ask(proxy, resent, session)
    assert (last.headers["x-session-id"], last.headers["x-context-kind"]) == (name, "resend")
    assert len(proxy.get(f"/sessions/{name}")["branches"]) == 1


@pytest.mark.parametrize(
    ("ended", "status", "said_of_it"),
    [
        ({"status": "failed", "error": {"message": "It broke: key sk-test-0123."}}, "failed", "It broke: key [key]."),
        ({"status": "cancelled"}, "cancelled", "the response is cancelled"),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "complete", None),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
@pytest.mark.parametrize(("method", "rest"), [("GET", ""), ("GET", "/"), ("POST", "/cancel"), ("POST", "/cancel/")])
def test_what_did_not_come_to_its_end_in_the_background_is_told_in_the_receipt(
    serves: Callable[..., Proxy],
    api: Provider,
    ended: dict[str, Any],
    status: str,
    said_of_it: str | None,
    method: str,
    rest: str,
) -> None:
    proxy, key = serves(), "sk-test-0123"
    api.answers += [QUEUED, [said("c", 3)]]
    ask(proxy, "one", background=True, key=key)
    api.made["resp_late"] = made(*([said("b", 2)] if status == "complete" else [])) | ended
    for _ in range(2):
        assert fetched(proxy, rest, key, method).json() == api.made["resp_late"]
    (receipt,) = proxy.exchanges("s")
    assert (receipt["status"], receipt["error"], len(receipt["replies"])) == (status, said_of_it, status == "complete")
    assert proxy.get("/stats")["total"]["tokens_input"] == 100
    ask(proxy, "two", previous_response_id="resp_late")
    assert [each["content"] for each in proxy.messages("s") if each["role"] == "user"] == ["one", "two"]


@pytest.mark.parametrize("fetches", [True, False], ids=["fetched", "fetched elsewhere"])
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_what_is_asked_in_the_background_is_trimmed_as_everything_is(
    serves: Callable[..., Proxy], api: Provider, stream: bool, fetches: bool
) -> None:
    proxy, seen = serves(policies={"default": TRIMS}), []
    for session in ("plain", "late"):
        talk, later = [user("hello")], session == "late"
        replies = [[call("look", 1)], [said("Two cats.", 3)], [said("None.", 4)], [said("No.", 5)], [said("Bye.", 6)]]
        new = [[output(1, LONG)], [user("And dogs?")], [user("Birds?")], [user("Fish?")], []]
        for number, (reply, more) in enumerate(zip(replies, new, strict=True)):
            name = f"resp_{session}_{number}"
            whole = api.made[name] = made(*reply, id=name, background=later)
            api.answers.append({**QUEUED, "id": name} if later and not stream else whole)
            ask(proxy, talk, session, stream=stream, background=later)
            if fetches:
                assert proxy.client.get(f"/v1/responses/{name}").json() == whole
            talk = [*talk, *reply, *more]
        cuts = [row["cut"] for row in proxy.exchanges(session)]
        seen.append(([asked.body["input"] for asked in api.got if asked.method == "POST"], cuts))
        api.got.clear()
        assert proxy.messages(session) == talk[: None if stream or fetches or not later else -1]
    assert seen[0] == seen[1]
    assert [LONG in orjson.dumps(each).decode() for each in seen[1][0]] == [False, True, True, False, False]


def test_a_response_is_fetched_where_its_model_is_served(serves: Callable[..., Proxy], api: Provider) -> None:
    with Provider() as other:
        route = {"models": ["m"], "base_url": other.base_url, "api_key": "sk-of-the-route"}
        proxy = serves(upstream={"routes": [route]})
        other.answers += [QUEUED, {"output": [said("b", 2)], "id": "resp_whole"}]
        ask(proxy, "one", background=True)
        other.made["resp_late"] = made(said("a", 1))
        for _ in range(2):  # the second time nothing is pending any more
            assert fetched(proxy).json() == other.made["resp_late"]
        assert proxy.messages("s")[-1] == said("a", 1)
        ask(proxy, "two", "t")
        for method, path in (("POST", "resp_late/cancel"), ("GET", "resp_whole/input_items"), ("DELETE", "resp_whole")):
            assert proxy.client.request(method, f"/v1/responses/{path}").status_code == 200
            assert (other.got[-1].method, other.got[-1].path) == (method, f"/v1/responses/{path}")
            assert other.got[-1].headers["authorization"] == "Bearer sk-of-the-route"
        assert proxy.client.get("/v1/responses/resp%5Fwhole").status_code == 200
        assert other.got[-1].path == "/v1/responses/resp%5Fwhole"
        assert api.got == []
        assert proxy.client.get("/v1/responses/resp_elsewhere").status_code == 200
        assert [asked.path for asked in api.got] == ["/v1/responses/resp_elsewhere"]


def test_what_is_asked_of_an_input_goes_where_its_model_is_served(serves: Callable[..., Proxy], api: Provider) -> None:
    with Provider() as other:
        route = {"models": ["m"], "base_url": other.base_url, "api_key": "sk-of-the-route"}
        proxy = serves(upstream={"routes": [route]})
        for path in ("/v1/responses/compact", "/v1/responses/input_tokens"):
            for model, provider in (("m", other), ("another", api)):
                body = {"model": model, "input": "x"}
                assert proxy.client.post(path, json=body).status_code == 200
                assert (provider.got[-1].path, provider.got[-1].body) == (path, body)
        sent = {"model": "m", "input": "x", "previous_response_id": "resp_of_nobody"}
        assert proxy.client.post("/v1/responses/compact", json=sent).status_code == 404  # all clients share the key
    assert (len(other.got), len(api.got)) == (2, 2)


def test_what_several_fetch_at_once_is_stored_once(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves()
    api.answers.append(QUEUED)
    ask(proxy, "one", background=True)
    api.made["resp_late"] = made(said("b", 2))
    with ThreadPoolExecutor(8) as pool:
        bodies = {answer.content for answer in pool.map(lambda _: fetched(proxy), range(16))}
    assert len(bodies) == 1
    assert len(proxy.get("/sessions/s")["branches"]) == 1
    assert proxy.get("/stats")["total"]["tokens_input"] == 100


def test_what_was_made_in_the_background_is_stored_for_its_own_tenant(
    serves: Callable[..., Proxy], api: Provider
) -> None:
    api.made["resp_late"] = made(said("b", 2))
    for shared in ({}, {"upstream": {"api_key": "sk-shared"}}):
        auth = {"mode": "keys", "keys": KEYS} if shared else {"mode": "passthrough"}
        proxy = serves(auth=auth, **shared)
        anne, bert = "key-of-anne-0123", "key-of-bert-0123"
        api.answers += [QUEUED]
        exchange = ask(proxy, "one", background=True, key=anne).headers["x-exchange-id"]

        def replies(exchange: str = exchange, proxy: Proxy = proxy, key: str = anne) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return len(proxy.client.get(f"/exchanges/{exchange}", headers=headers).json()["replies"])

        assert fetched(proxy, key=bert).status_code == (404 if shared else 200)
        assert replies() == 0
        assert fetched(proxy, key=anne).status_code == 200
        assert replies() == 1


def test_what_is_made_in_the_background_counts_in_a_budget(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves(budgets=[{"tenant": "default", "tokens_per_minute": 100}])
    api.answers.append(QUEUED)
    ask(proxy, "one", background=True)
    api.made["resp_late"] = made(said("b", 2))
    assert fetched(proxy).status_code == 200
    assert ask(proxy, "two").status_code == 429


def test_what_is_fetched_while_the_store_is_away_is_passed_on_and_stored_when_it_is_fetched_again(
    serves: Callable[..., Proxy], api: Provider, tmp_path: Path
) -> None:
    proxy, away = serves(), tmp_path / "away"
    file = tmp_path / "0" / "palimpsest.db"
    away.mkdir()
    api.answers.append(QUEUED)
    ask(proxy, "one", background=True)
    api.made["resp_late"] = made(said("b", 2))
    for each in file.parent.glob(f"{file.name}*"):
        each.rename(away / each.name)
    missed(proxy)
    assert fetched(proxy).json() == api.made["resp_late"]
    for each in away.iterdir():
        each.rename(file.parent / each.name)
    until(lambda: proxy.client.get("/readyz").status_code == 200, "the store is used again")
    assert len(proxy.messages("s")) == 1
    fetched(proxy)
    assert proxy.messages("s")[1:] == [said("b", 2)]


def test_a_reply_that_comes_after_its_session_went_on_is_a_branch(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves()
    api.answers += [QUEUED, [said("c", 3)]]
    ask(proxy, "one", background=True)
    ask(proxy, "two")
    head = proxy.get("/sessions/s")["head"]
    api.made["resp_late"] = made(said("b", 2))
    fetched(proxy)
    assert proxy.get("/sessions/s")["head"] == head
    (node,) = proxy.exchanges("s")[0]["replies"]
    branch = proxy.get("/sessions/s/messages", branch=node)["data"]
    assert [each["content"] for each in branch] == ["one", said("b", 2)["content"]]


@pytest.mark.parametrize("goes_on", [False, True], ids=["waits", "goes on"])
def test_a_conversation_goes_on_from_what_was_made_in_the_background(
    serves: Callable[..., Proxy], api: Provider, goes_on: bool
) -> None:
    proxy = serves(responses={"state": "proxy"})
    first = {"output": [said("a", 1)], "conversation": {"id": "conv_1"}}
    api.answers += [first, QUEUED, *[[said(text, number)] for number, text in enumerate("cd", 3)]]
    api.made["resp_late"] = made(said("b", 2))
    ask(proxy, "one", None, conversation="conv_1")
    ask(proxy, "two", None, conversation={"id": "conv_1"}, background=True)
    if goes_on:
        ask(proxy, "two, otherwise", None, conversation="conv_1")
    fetched(proxy)
    ask(proxy, "three", None, conversation="conv_1")
    asked = [each["content"] for each in api.sent["input"] if each["role"] == "user"]
    assert asked == ["one", "two, otherwise" if goes_on else "two", "three"]


@pytest.mark.parametrize("events", [1, 5], ids=["nothing came", "some text came"])
def test_a_stream_that_broke_off_is_stored_whole_where_it_is_made_in_the_background(
    serves: Callable[..., Proxy], api: Provider, events: int
) -> None:
    proxy, whole = serves(), made(said("a long", 2), said("reply", 3))
    api.answers.append({**whole, "events": events})
    ask(proxy, "one", background=True, stream=True)
    parts = [each["content"] for each in proxy.messages("s")]
    assert parts[0] == "one"
    assert len(parts) == (2 if events > 1 else 1)
    api.made["resp_late"] = whole
    for _ in range(2):
        fetched(proxy, "?stream=true&starting_after=3")
    assert proxy.messages("s")[1:] == whole["output"]
    (receipt,) = proxy.exchanges("s")
    assert (receipt["status"], receipt["error"], receipt["usage"]["prompt_tokens"]) == ("complete", None, 100)
    assert proxy.get("/stats")["total"]["tokens_input"] == 100


def test_what_is_made_in_the_background_cannot_be_expanded_before_it_is_fetched(
    serves: Callable[..., Proxy], api: Provider
) -> None:
    """A request sent without that response would lose the history before it."""
    proxy = serves(responses={"state": "proxy"})
    api.answers += [[said("a", 1)], QUEUED, [said("c", 3)]]
    first = ask(proxy, "one", None).json()["id"]
    assert ask(proxy, "two", None, background=True, previous_response_id=first).json()["status"] == "queued"
    answer = ask(proxy, "three", None, previous_response_id="resp_late")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    assert "fetch it, or" in answer.json()["error"]["message"]
    api.made["resp_late"] = made(said("b", 2))
    fetched(proxy)
    assert ask(proxy, "three", None, previous_response_id="resp_late").status_code == 200
    assert [each["content"] for each in api.sent["input"] if each["role"] == "user"] == ["one", "two", "three"]


def test_who_answers_in_the_background_is_offered_no_tool_of_the_proxy_s(
    serves: Callable[..., Proxy], api: Provider
) -> None:
    """The proxy does not read the answer while it is made, so it could not answer the calls."""
    own_tools = {"recall_context": True, "only_with_tools": False}
    proxy = serves(responses={"state": "proxy"}, virtual_tools=own_tools)
    api.answers += [[said("a", 1)], {"id": "resp_late", "status": "queued", "output": []}]
    first = ask(proxy, "one", None).json()["id"]
    assert api.sent["tools"]
    ask(proxy, "two", None, background=True, previous_response_id=first)
    assert "tools" not in api.sent


def test_where_nothing_is_stored_the_provider_holds_the_state(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves(responses={"state": "proxy"}, sessions={"missing": "stateless"})
    api.answers += [[said("a", 1)], [said("b", 2)]]
    name = ask(proxy, "one", None).json()["id"]
    assert ask(proxy, "two", None, previous_response_id=name).status_code == 200
    assert api.sent["previous_response_id"] == name


def test_a_response_is_followed_where_it_is_stored_whatever_session_is_named(
    serves: Callable[..., Proxy], api: Provider
) -> None:
    proxy = serves(responses={"state": "proxy"})
    api.answers += [[said("a", 1)], [said("b", 2)], [said("c", 3)], [said("d", 4)]]
    ask(proxy, "of another session", "other")
    first = ask(proxy, "one", "mine")
    for session in ("other", "new"):
        second = ask(proxy, "two", session, previous_response_id=first.json()["id"])
        assert second.headers["x-session-id"] == "mine"
        assert "previous_response_id" not in api.sent
        assert [each["content"] for each in api.sent["input"] if each["role"] == "user"] == ["one", "two"]


def test_a_shared_key_opens_a_tenant_s_own_responses_alone(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves(upstream={"api_key": "sk-shared"}, auth={"mode": "keys", "keys": KEYS})
    anne, bert = "key-of-anne-0123", "key-of-bert-0123"
    api.answers += [[reasoning(1), said("a", 1)], [said("b", 2)], [said("c", 3)]]
    name = ask(proxy, "one", key=anne).json()["id"]
    refers = [user("x"), {"type": "item_reference", "id": "msg_1"}, user("y")]
    bare = [user("x"), {"type": "reasoning", "id": "rs_1", "summary": []}, said("a", 9), user("y")]
    assert ask(proxy, refers, key=anne).status_code == 200
    assert ask(proxy, "two", key=anne, previous_response_id=name).status_code == 200
    for given, fields in ((refers, {}), (bare, {}), ("two", {"previous_response_id": name})):
        assert ask(proxy, given, key=bert, **fields).status_code == 404
    assert ask(proxy, "x", key=anne, conversation="conv_1").status_code == 404

    def reach(key: str, method: str, path: str, body: Any = None) -> int:
        return proxy.client.request(method, path, json=body, headers={"authorization": f"Bearer {key}"}).status_code

    for method, rest in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        assert [reach(key, method, f"/v1/responses/{name}{rest}") for key in (anne, bert)] == [200, 404]
    assert reach(anne, "PUT", f"/v1/responses/{name}") == reach(anne, "GET", "/v1/responses/..%2fmodels") == 404
    for path in ("compact", "input_tokens"):
        for body, status in (({"input": "x"}, 200), ({"input": "x", "previous_response_id": name}, 404)):
            assert reach(bert, "POST", f"/v1/responses/{path}", body) == status
    assert [asked.path for asked in api.got if asked.method == "DELETE"] == [f"/v1/responses/{name}"]


def test_with_a_key_of_its_own_everything_goes_through(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves()
    assert proxy.client.delete("/v1/responses/resp_1?x=1").json() == {"path": "/v1/responses/resp_1?x=1"}
    assert proxy.client.post("/v1/responses/compact", json={"input": "x"}).status_code == 200
    api.answers.append({"status": "queued", "output": []})
    assert ask(proxy, "later", background=True).json()["status"] == "queued"
    assert api.sent == {"model": "m", "input": "later", "stream": False, "background": True}


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("session", ["s", None], ids=["named", "unnamed"])
@pytest.mark.parametrize("tied", [True, False], ids=["references", "calls written out"])
def test_items_that_are_named_by_their_ids_are_those_of_the_conversation(
    serves: Callable[..., Proxy], api: Provider, stream: bool, session: str | None, tied: bool
) -> None:
    """The Vercel AI SDK sends reasoning and texts as references, and calls in full or as references."""
    trims = {"trigger": {"messages": 12}, "keep": {"rounds": 1}, "edits": [{"type": "clear_tool_results", "keep": 0}]}
    proxy, talk, whole, names = serves(policies={"default": trims}), [user("hello")], [user("hello")], set[str]()
    for number in range(1, 6):
        api.answers += [[reasoning(number), call("look", number)], [reasoning(number + 50), said("Found.", number)]]
        for new in ([output(number, LONG)], [user(f"And {number}?")]):
            answer = ask(proxy, talk, session, stream=stream)
            made = outcome(answer)["output"]
            names.add(answer.headers["x-session-id"])
            shown = [
                {name: value for name, value in item.items() if name != "id"}
                if item["type"] == "function_call" and not tied
                else {"type": "item_reference", "id": item["id"]}
                for item in made
            ]
            talk, whole = [*talk, *shown, *new], [*whole, *made, *new]
    (name,) = names
    receipts = proxy.exchanges(name)
    assert [each["kind"] for each in receipts] == ["first", *["resend"] * 9]
    assert proxy.messages(name) == whole[:-1]
    moved = [bool(each["cut"] and each["cut"]["moved"]) for each in receipts]
    first, sent = moved.index(True), [asked.body["input"] for asked in api.got]
    assert next(each["type"] for each in sent[first - 1] if "id" in each) == "item_reference"  # its own bytes
    view = sent[-1]
    assert LONG not in orjson.dumps(view[:-1]).decode()
    kept = [each["id"] for each in view if each.get("type") == "reasoning"]
    assert (kept[0], "rs_51" in kept, "rs_52" in kept) == ("rs_1", False, False)  # the first result was cleared
    for place, before in enumerate(sent[:-1]):
        assert moved[place + 1] or sent[place + 1][: len(before)] == before


def test_a_reference_that_is_not_known_here_is_passed_on(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves()
    api.answers += [[said("a", 1)], [said("b", 2)]]
    given = [user("x"), {"type": "item_reference", "id": "msg_elsewhere"}, user("y")]
    assert ask(proxy, given).status_code == 200
    assert api.sent["input"] == given
    masked = serves(store={"mask": ["stripe"]})
    assert ask(masked, given).status_code == 200
    assert api.sent["input"] == given


def test_what_references_name_counts_in_the_memory_of_their_request(
    serves: Callable[..., Proxy], api: Provider
) -> None:
    proxy = serves(server={"max_memory": 8_000_000})
    api.answers += [[said("a" * 900_000, 1)], [said("b", 2)]]
    assert ask(proxy, "x").status_code == 200
    answer = ask(proxy, [user("x"), {"type": "item_reference", "id": "msg_1"}, user("y")])
    assert (answer.status_code, "stored messages" in answer.text, len(api.got)) == (413, True, 1)


# ------------------------------------------------------------------------------------------- other ways in


def test_azure_s_paths_are_understood(serves: Callable[..., Proxy], api: Provider, upstream: Upstream) -> None:
    proxy = serves(upstream={"base_url": upstream.base_url})
    path = "/openai/deployments/echo%2Bsay:hi/chat/completions?api-version=2024-10-21"
    for body in ({"messages": [user("x")]}, {"messages": [user("x")], "model": "echo"}):
        assert proxy.client.post(path, json=body).status_code == 200
    assert [orjson.loads(each.body)["model"] for each in upstream.log] == ["echo+say:hi", "echo"]
    for wrong in (b"{}", b"[", b"[]"):
        answer = proxy.client.post(path, content=wrong, headers={"content-type": "application/json"})
        assert answer.status_code == 400
    there = serves()
    api.answers += [[said("a", 1)], [said("b", 2)]]
    for way in ("/openai/v1/responses", "/openai/responses?api-version=preview"):
        assert there.client.post(way, json={"model": "m", "input": "x", "stream": False}).status_code == 200
    assert [asked.path for asked in api.got] == ["/v1/responses", "/v1/responses?api-version=preview"]
    assert there.client.get("/openai/v1/models").json() == {"path": "/v1/models"}


def test_a_websocket_is_refused_in_words(serves: Callable[..., Proxy]) -> None:
    headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    answer = serves().client.get("/v1/responses", headers={**headers, "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="})
    assert (answer.status_code, answer.json()["error"]["code"]) == (426, "upgrade_refused")
