"""Requests of the Messages API: how they are read, why they are refused, and the body that goes upstream."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.dialects import Message, Request, ToolDefinition
from proxy.dialects.messages import DIALECT as MESSAGES
from proxy.dialects.messages.request import MANAGED, compose, parse_messages_request
from proxy.errors import InvalidRequest

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
HI = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
RECALL = ToolDefinition(name="recall", description="Recalls.", parameters=(("query", "What. {unset} it."),))


def body(**fields: Any) -> bytes:
    return orjson.dumps({"model": "claude", "max_tokens": 100, "messages": [HI], **fields})


def read(**fields: Any) -> Request:
    return parse_messages_request(body(**fields))


def text(said: str, mark: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": said} | ({} if mark is None else {"cache_control": mark})


def result(identity: str, said: str, mark: Any = None) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": identity, "content": said}
    return block | ({} if mark is None else {"cache_control": mark})


def call(identity: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "tool_use", "id": identity, "name": "look", "input": {}}]}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


# ------------------------------------------------------------------------------------------- reading


def test_a_request_is_read() -> None:
    request = read(
        system=[text("Be brief.")],
        messages=[HI, call("a"), user(result("a", "x"), text("go on")), HI],
        tools=[LOOK],
        stream=True,
        metadata={"user_id": "u1"},
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [message.data for message in request.instructions] == [{"role": "system", "content": [text("Be brief.")]}]
    assert [message.role for message in request.messages] == ["user", "assistant", "tool", "user"]
    assert (request.model, request.stream, request.has_tools, request.reply_tokens) == ("claude", True, True, 100)
    assert (request.replies, request.wants_usage, request.has_own_fields) == ((1,), True, False)
    assert (request.notes, request.keeps_loop, request.untouched) == ((MANAGED,), True, False)
    models = (
        "claude-3-7-sonnet-latest",
        "us.anthropic.claude-opus-4-1-v1:0",
        "claude-sonnet-4-5",
        "claude-opus-5",
        "m",
    )
    assert [read(messages=[HI], model=model).binds_loop for model in models] == [False, False, False, True, True]
    assert request.field("metadata.user_id") == "u1"
    assert request.parameters.keys() == {
        *("model", "max_tokens", "stream", "metadata", "context_management", "thinking")
    }
    again = read(messages=[HI, {**HI, "agent": "planner"}], system="", max_tokens=0)
    assert (again.instructions, again.has_own_fields, again.reply_tokens) == ((), True, None)
    assert (again.notes, again.keeps_loop, again.tools) == ((), False, None)
    assert again.messages[0].facts is request.messages[0].facts
    assert read(system=None, thinking="x", thread=7).instructions == ()


@pytest.mark.parametrize(
    ("thread", "state", "untouched", "keeps"),
    [
        (None, "", False, False),
        (7, "", False, False),
        ({"type": "create"}, "", False, True),
        ({"type": "continue", "previous_message_id": "m"}, "m", True, True),
        ({"type": "continue", "previous_message_id": 7}, "", True, True),  # the provider refuses it
    ],
)
def test_a_thread_is_the_provider_s(thread: Any, state: str, untouched: bool, keeps: bool) -> None:
    request = read(tools=[LOOK], thread=thread)
    assert (request.state, request.untouched, request.keeps_reply) == (state, untouched, keeps)
    assert request.references == ((state,) if state else ())
    assert MESSAGES.requests.offer_tools(request, [RECALL]).names == (() if keeps else ("recall",))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": {}}, "messages", "an array of objects"),
        ({"messages": []}, "messages", "empty array"),
        ({"messages": ["x"]}, "messages[0]", "an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "a role and a content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a role and a content"),
        ({"messages": [{"role": 7, "content": "x"}]}, "messages[0].role", "a string"),
        ({"messages": [HI, {"role": "user", "content": None}]}, "messages[1].content", "but got null"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "an object"),
        ({"system": 7}, "system", "a string, or an array"),
        ({"tools": {}}, "tools", "an array"),
        ({"stream": "yes"}, "stream", "a boolean"),
        ({"max_tokens": "many"}, "max_tokens", "an integer"),
        ({"model": 7}, "model", "a string"),
    ],
)
def test_a_body_is_refused_with_its_reason(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert (caught.value.param, words in caught.value.message) == (param, True)


@pytest.mark.parametrize(
    ("sent", "where"),
    [
        (body(tools=[{"type": "function", "function": {"name": "x"}}]), "/v1/chat/completions"),
        (body(messages=[{"role": "system", "content": "x"}, HI]), "/v1/chat/completions"),
        (body(messages=[{"role": "developer", "content": "x"}, HI]), "/v1/chat/completions"),
        (body(messages=[HI, {"role": "tool", "tool_call_id": "a", "content": "x"}]), "/v1/chat/completions"),
        (body(messages=[HI, {"role": "assistant", "tool_calls": [{"id": "a"}]}]), "/v1/chat/completions"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}]}', "/v1/chat/completions"),
        (b'{"model":"m","input":"x"}', "/v1/responses"),
        (b'{"model":"m"}', "at least one message"),
        (b"[]", "a JSON object"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "messages[0]"),
        (b'{"messages":"\\ud800"}', "messages"),
    ],
)
def test_a_body_for_another_endpoint_is_told_where_it_belongs(sent: bytes, where: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_messages_request(sent)
    assert where in caught.value.message


# ------------------------------------------------------------------------------------------- sending


def test_nothing_changed_is_the_client_s_own_bytes() -> None:
    raw = b' { "max_tokens": 9,"messages":[ {"role":"user" ,"content":"x"}], "system":"Be.", "model":"m" }'
    request = parse_messages_request(raw)
    same = compose(
        request, instructions=request.instructions, messages=request.messages, add_usage=True, cache_key="k", tools=None
    )
    assert same is raw
    assert compose(request) is raw


def test_fields_of_ours_never_go_out() -> None:
    request = read(messages=[{**HI, "agent": "planner", "is_internal": True}])
    assert orjson.loads(compose(request))["messages"] == [HI]


def test_views_instructions_and_tools_are_put_in_place() -> None:
    request = read(system="Be brief.", messages=[HI, call("a"), user(result("a", "long"))], tools=[LOOK])
    spoken, lead = MESSAGES.spoken("system", "Summary."), request.instructions[0]
    sent = orjson.loads(compose(request, messages=[spoken, *request.messages[1:]], tools=b'[{"name":"x"}]'))
    assert sent["system"] == "Be brief.\n\nSummary."
    assert (sent["messages"], sent["tools"]) == ([call("a"), user(result("a", "long"))], [{"name": "x"}])
    blocks = orjson.loads(compose(request, instructions=[lead, MESSAGES.message(b'{"role":"system","content":[]}')]))
    assert blocks["system"] == [text("Be brief.")]
    one = orjson.loads(compose(request, instructions=[lead.with_appended("More.")]))
    assert one["system"] == "Be brief.\n\nMore."
    bare = read()
    assert orjson.loads(compose(bare, instructions=[lead]))["system"] == "Be brief."


def test_fields_that_name_the_session_are_left_out() -> None:
    request = read(metadata={"session_id": "s"}, note={"a": 1, "b": 2})
    sent = orjson.loads(compose(request, drop_fields=["metadata.session_id", "note.a", "messages.x", "none"]))
    assert sent == {**orjson.loads(body()), "note": {"b": 2}}


# -------------------------------------------------------------------------------------------- marks


def test_marks_stand_where_the_client_s_do() -> None:
    messages = [
        user(text("a", EPHEMERAL)),
        call("a"),
        user(result("a", "long", HOUR)),
        call("b"),
        user(result("b", "long"), text("x", EPHEMERAL)),
    ]
    request = read(messages=messages)
    first, one, long, two, last = request.messages
    view = [first, one, long.with_text("short"), two, last.with_text("short")]
    sent = orjson.loads(compose(request, messages=view))["messages"]
    assert sent[2] == user(result("a", "short", HOUR))
    assert sent[4] == user(result("b", "short"), text("x", EPHEMERAL))
    ends = orjson.loads(compose(request, messages=[first, MESSAGES.spoken("user", "x")]))["messages"]
    assert ends[1] == user(text("x", EPHEMERAL))
    nothing = orjson.loads(compose(request, messages=[first, MESSAGES.spoken("user", " ")]))["messages"]
    assert nothing[1] == {"role": "user", "content": " "}


def test_stored_marks_never_make_more_than_four() -> None:
    request = read(messages=[user(text("now", EPHEMERAL))], system=[text("Be.", EPHEMERAL)], tools=[LOOK])
    stored = [MESSAGES.message(orjson.dumps(user(text(f"{n}", EPHEMERAL)))) for n in range(6)]
    sent = orjson.loads(compose(request, messages=[*stored, *request.messages]))["messages"]
    marked = [each["content"][0]["text"] for each in sent if "cache_control" in each["content"][0]]
    assert marked == ["4", "5", "now"]
    crowded = read(
        messages=[user(text("now", EPHEMERAL))], cache_control=EPHEMERAL, tools=[LOOK | {"cache_control": HOUR}]
    )
    sent = orjson.loads(compose(crowded, messages=[*stored[:3], *crowded.messages]))["messages"]
    assert ["cache_control" in each["content"][0] for each in sent] == [False, False, True, True]


def test_a_mark_goes_into_the_system_prompt() -> None:
    broken = MESSAGES.requests.broken
    request = read(messages=[HI], system=[text("Be brief. It is ten.", EPHEMERAL)])
    whole = (*request.instructions, *request.messages)
    lead = broken(whole, 0, 10, "anthropic")[:1]
    sent = orjson.loads(compose(request, instructions=lead, messages=request.messages))
    assert sent["system"] == [text("Be brief. ", EPHEMERAL), text("It is ten.")]
    assert sent["messages"] == [HI]
    assert broken(whole, 0, 10, "openai") == whole
    assert broken(whole, 0, 0, "anthropic") == whole
    full = tuple([MESSAGES.message(orjson.dumps(user(text(f"{n}", EPHEMERAL)))) for n in range(4)])
    plain = read(messages=[HI], system="Be brief. It is ten.").instructions
    assert broken((*plain, *full), 0, 10, "anthropic") == (*plain, *full)
    # A mark that the client set elsewhere in the prompt stays, so this would be a fifth one.
    theirs = read(messages=[HI], system=[text("Today."), text("Be brief.", EPHEMERAL)]).instructions
    assert broken((*theirs, *full[:3]), 0, 3, "anthropic") == (*theirs, *full[:3])
    lasting = (*read(messages=[HI], system=[text("Be brief.", HOUR)]).instructions, *full[:1])
    assert broken(lasting, 0, 3, "anthropic") == lasting  # ours, which is shorter, must not stand before it
    blank = read(messages=[HI], system="Be brief.\n").instructions
    assert broken(blank, 0, 9, "anthropic") == blank  # a text of nothing is refused
    made = orjson.loads(compose(request, instructions=broken(plain, 0, 10, "anthropic"), messages=request.messages))
    assert made["system"] == [text("Be brief. ", EPHEMERAL), text("It is ten.")]


def test_a_header_in_the_system_prompt_is_not_split() -> None:
    broken = MESSAGES.requests.broken
    header, rules = "x-anthropic-billing-header: cc_version=2.1.197.a51;", "Be brief. It is ten."
    whole = read(messages=[HI], system=[text(header), text(rules)]).instructions
    assert broken(whole, 0, 28, "anthropic") == whole
    assert broken(whole, 0, len(header), "anthropic") == whole  # nor marked
    made = orjson.loads(broken(whole, 0, len(header) + 10, "anthropic")[0].raw)["content"]
    assert made == [text(header), text("Be brief. ", EPHEMERAL), text("It is ten.")]


def test_marks_of_the_proxy_s_own_go_where_there_is_room() -> None:
    request = read(messages=[HI, user(text("a", EPHEMERAL)), HI, call("a"), HI], system=[text("Be.", EPHEMERAL)])
    marked, whole = MESSAGES.requests.marked, (*request.instructions, *request.messages)
    ours = [message.data["content"] for message in marked(whole, [1, 2, 3, 5], "anthropic")]
    assert [content == old.data["content"] for content, old in zip(ours, whole, strict=True)] == [
        *(True, True, True, False, True, False)
    ]
    assert ours[3] == [text("hi", EPHEMERAL)]
    assert marked(whole, [1], "openai") == whole
    blank = (MESSAGES.spoken("user", "a"), MESSAGES.spoken("user", " "))
    assert [each.data["content"] for each in marked(blank, [1], "anthropic")] == [[text("a", EPHEMERAL)], " "]
    ends = marked((*request.messages[:2], MESSAGES.spoken("user", " ")), [2], "anthropic")
    assert ends[0].data == HI
    full = tuple([MESSAGES.message(orjson.dumps(user(text(f"{n}", EPHEMERAL)))) for n in range(4)])
    assert marked((*full, *blank), [5], "anthropic") == (*full, *blank)
    decides = MESSAGES.requests.decides_caching
    assert decides(read(cache_control=EPHEMERAL).fields)
    assert decides(read(tools=[LOOK | {"cache_control": HOUR}]).fields)
    assert not decides(read(tools=[LOOK]).fields)


def test_the_newest_message_is_cached_where_the_client_marks_nothing() -> None:
    def asked(request: Request, *view: Message) -> Any:
        return orjson.loads(compose(request, messages=view, cache_newest=True)).get("cache_control")

    said = [HI, call("a"), user(result("a", "long"))]
    request = read(messages=said)
    first, called, long = request.messages
    short = long.with_text("short")
    assert asked(request, first, called, long) == EPHEMERAL  # whether it is trimmed or not
    assert asked(request, first, called, short) == EPHEMERAL
    assert asked(request, short) is None  # nothing was answered yet
    full = [MESSAGES.message(orjson.dumps(user(text(f"{n}", EPHEMERAL)))) for n in range(4)]
    assert asked(request, *full[:3], called, short) == EPHEMERAL
    assert asked(request, *full, called, short) is None
    assert asked(read(messages=said, cache_control=HOUR), first, called, short) == HOUR
    marked = read(messages=[user(text("a", EPHEMERAL)), *said[1:]])
    assert asked(marked, called, short) is None
    assert asked(read(messages=said, system=[text("Be.", HOUR)]), first, called, short) is None
    refuses = MESSAGES.requests.refuses_caching
    assert refuses(b"cache_control: Extra inputs are not permitted")
    assert not refuses(b"temperature: Extra inputs are not permitted")


# ------------------------------------------------------------------------------------- tools of ours


def test_tools_are_offered_beside_the_client_s() -> None:
    offer = MESSAGES.requests.offer_tools(read(tools=[LOOK], tool_choice={"type": "any"}), [RECALL])
    assert offer.names == ("recall",)
    assert orjson.loads(offer.tools or b"")[0] == LOOK
    assert orjson.loads(offer.tools or b"")[1] == {
        "name": "recall",
        "description": "Recalls.",
        "input_schema": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What. Leave out it."}},
            "additionalProperties": False,
        },
    }
    assert MESSAGES.requests.offer_tools(read(), [RECALL]).names == ("recall",)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "none"}},
        {"tool_choice": {"type": "tool", "name": "look"}},
        {"tools": [LOOK | {"name": "recall"}]},
        {"tools": [LOOK | {"name": f"t{n}"} for n in range(128)]},
    ],
)
def test_tools_are_not_offered_where_there_is_no_room(fields: dict[str, Any]) -> None:
    request = read(**fields)
    offer = MESSAGES.requests.offer_tools(request, [RECALL])
    assert (offer.names, offer.tools) == ((), request.tools)
