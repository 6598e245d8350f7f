"""OpenAI's official SDK with the proxy as its base URL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}
CLOCK: ChatCompletionToolParam = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve()


@pytest.fixture
def sdk(proxy: Proxy, session: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{proxy.url}/v1",
        api_key="sk-test",
        max_retries=2,
        default_headers={"X-Session-ID": session},
        http_client=DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


def user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def test_a_conversation(sdk: OpenAI, proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = [user("one")]
    for text in ("two", "three"):
        reply = sdk.chat.completions.create(model="echo", messages=said).choices[0].message
        said += [reply.model_dump(exclude_none=True), user(text)]  # type: ignore[list-item]  # as users do it
    sdk.chat.completions.create(model="echo", messages=said)

    assert [message["content"] for message in proxy.messages(session)] == [
        *("one", "echo: one", "two", "echo: two", "three", "echo: three")
    ]
    assert [row["kind"] for row in proxy.exchanges(session)] == ["first", "resend", "resend"]
    assert len(upstream.last.messages) == 5


def test_the_headers_of_a_raw_response(sdk: OpenAI, proxy: Proxy, upstream: Upstream, session: str) -> None:
    raw = sdk.chat.completions.with_raw_response.create(model="echo", messages=[user("hello")])

    assert raw.parse().choices[0].message.content == "echo: hello"
    assert raw.headers["x-session-id"] == session
    assert raw.headers["x-context-policy"] == "default"
    assert raw.headers["x-context-messages-before"] == raw.headers["x-context-messages-sent"] == "1"
    assert int(raw.headers["x-context-tokens-before"]) == int(raw.headers["x-context-tokens-sent"]) > 0
    assert raw.headers["x-context-edits"] == ""
    assert "x-context-warning" not in raw.headers
    assert raw.request_id == "req_test"
    assert proxy.get(f"/exchanges/{raw.headers['x-exchange-id']}")["status"] == "complete"


@pytest.mark.parametrize("names", [["weather"], ["weather", "clock"]])
def test_tools_with_their_results(
    sdk: OpenAI, proxy: Proxy, upstream: Upstream, session: str, names: list[str]
) -> None:
    said = [user("how is it?")]
    model = f"tools:{','.join(names)}"
    first = sdk.chat.completions.create(model=model, messages=said, tools=[WEATHER, CLOCK])
    assert first.choices[0].finish_reason == "tool_calls"
    calls = first.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls if call.type == "function"] == names

    said.append(first.choices[0].message.model_dump(exclude_none=True))  # type: ignore[arg-type]  # as users do it
    said += [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in calls]
    second = sdk.chat.completions.create(model=model, messages=said, tools=[WEATHER, CLOCK])

    assert second.choices[0].message.content == "echo: how is it?"
    roles = [message["role"] for message in proxy.messages(session)]
    assert roles == ["user", "assistant", *["tool"] * len(names), "assistant"]
    assert [request.refused for request in upstream.log] == [None, None]


@pytest.mark.parametrize("model", ["echo", "tools:weather,clock", "reason+long:9", "long:40+fault:split-utf8"])
def test_a_stream_says_what_the_json_says(sdk: OpenAI, proxy: Proxy, session: str, model: str) -> None:
    said = [user("grüß 你好")]
    whole = sdk.chat.completions.create(
        model=model, messages=said, tools=[WEATHER, CLOCK], extra_headers={"X-Session-ID": f"{session}-json"}
    )
    with sdk.chat.completions.stream(model=model, messages=said, tools=[WEATHER, CLOCK]) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()

    message = streamed.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})
    for call in message.get("tool_calls", ()):  # the SDK adds these fields
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    told = whole.choices[0].message.model_dump(exclude_none=True, exclude={"annotations"})
    message.pop("reasoning_content", None), told.pop("reasoning_content", None)  # the SDK's stream loses it
    assert message == told
    stored = [
        {name: value for name, value in proxy.messages(name_of)[-1].items() if value and name != "annotations"}
        for name_of in (session, f"{session}-json")
    ]
    assert stored[0] == stored[1]
    assert stored[0].get("reasoning_content") == ("thinking about it" if "reason" in model else None)


def test_usage_comes_only_to_whom_asks(sdk: OpenAI, upstream: Upstream, proxy: Proxy, session: str) -> None:
    def chunks(**given: Any) -> list[Any]:
        return list(sdk.chat.completions.create(model="echo", messages=[user("a")], stream=True, **given))

    assert all(chunk.usage is None and chunk.choices for chunk in chunks())
    assert upstream.last.json["stream_options"] == {"include_usage": True}
    assert chunks(stream_options={"include_usage": True})[-1].usage.prompt_tokens > 0
    assert all(chunk.usage is None for chunk in chunks(stream_options={"include_usage": False}))
    assert upstream.last.json["stream_options"] == {"include_usage": False}
    usages = [row["usage"] for row in proxy.exchanges(session)]
    assert usages[0]["completion_tokens"] == usages[1]["completion_tokens"] == 7
    assert usages[2] is None


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_choices_is_kept(sdk: OpenAI, proxy: Proxy, session: str, stream: bool) -> None:
    said = [user("pick")]
    texts = ["", ""]
    if stream:
        for chunk in sdk.chat.completions.create(model="echo", messages=said, n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = sdk.chat.completions.create(model="echo", messages=said, n=2)
        texts = [choice.message.content or "" for choice in answer.choices]
    assert texts == ["echo: pick", "echo: pick (1)"]

    assert [message["content"] for message in proxy.messages(session)] == ["pick", texts[0]]
    heads = [branch["head"] for branch in proxy.get(f"/sessions/{session}")["branches"]]
    ends = {proxy.get(f"/sessions/{session}/messages", branch=head)["data"][-1]["content"] for head in heads}
    assert ends == set(texts)

    # A client that continues with the second choice selects another branch.
    sdk.chat.completions.create(model="echo", messages=[*said, {"role": "assistant", "content": texts[1]}, user("on")])
    assert proxy.exchanges(session)[-1]["kind"] == "rewind"
    assert [m["content"] for m in proxy.messages(session)] == ["pick", texts[1], "on", "echo: on"]


def test_an_sdk_retries_what_was_refused(sdk: OpenAI, proxy: Proxy, upstream: Upstream, session: str) -> None:
    answer = sdk.chat.completions.create(model=f"echo+fault:429-once+{session}", messages=[user("again")])

    assert answer.choices[0].message.content == "echo: again"
    assert [request.header("x-stainless-retry-count") for request in upstream.log] == ["0", "1"]
    assert [row["status"] for row in proxy.exchanges(session)] == ["failed", "complete"]
    assert [message["content"] for message in proxy.messages(session)] == ["again", "echo: again"]


def test_an_error_arrives_as_the_sdk_knows_it(sdk: OpenAI) -> None:
    with pytest.raises(APIStatusError) as ours:
        sdk.chat.completions.create(model="echo", messages=[])
    assert (ours.value.status_code, ours.value.type, ours.value.param) == (400, "invalid_request_error", "messages")
    with pytest.raises(APIStatusError) as theirs:
        sdk.chat.completions.create(model="echo", messages=[{"role": "tool", "tool_call_id": "x", "content": "y"}])
    assert theirs.value.status_code == 400
    assert theirs.value.request_id == "req_test"


@pytest.mark.anyio
async def test_the_asynchronous_client(proxy: Proxy, upstream: Upstream, session: str) -> None:
    async with AsyncOpenAI(
        base_url=f"{proxy.url}/v1",
        api_key="sk-test",
        default_headers={"X-Session-ID": session},
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    ) as sdk:
        answer = await sdk.chat.completions.create(model="echo", messages=[user("one")])
        assert answer.choices[0].message.content == "echo: one"
        stream = await sdk.chat.completions.create(model="echo", messages=[user("two")], stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "echo: two"
        models = await sdk.models.list()
        assert [model.id for model in models.data] == ["echo"]

    # The second question is sent without the first reply, so it counts as an append.
    assert [message["content"] for message in proxy.messages(session)] == ["one", "echo: one", "two", text]
    assert [message["content"] for message in upstream.log[1].messages] == ["one", "echo: one", "two"]


def test_the_same_question_eight_times_makes_eight_rounds(sdk: OpenAI, proxy: Proxy, session: str) -> None:
    for _ in range(8):
        sdk.chat.completions.create(model="say:done", messages=[user("continue")])
    assert [message["content"] for message in proxy.messages(session)] == ["continue", "done"] * 8
    assert proxy.get(f"/sessions/{session}")["rounds"] == 8
