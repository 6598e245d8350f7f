"""The systems that the example policies reproduce, through Responses and Messages: what is sent, and what is stored.

Each example has its own file with detailed tests for Chat Completions. That of tool calls from history covers all
three APIs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import orjson
import pytest

from tests.support.examples import serving
from tests.support.server import Proxy
from tests.support.tongues import MESSAGES, RESPONSES, Tongue
from tests.support.upstream import Upstream

Message = dict[str, Any]
Example = Callable[..., Proxy]

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}

pytestmark = pytest.mark.parametrize("tongue", [RESPONSES, MESSAGES], ids=["responses", "messages"])


@pytest.fixture(scope="module")
def example(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
    """Serve an example; it runs until the module's tests are done."""
    served: dict[str, Proxy] = {}
    with ExitStack() as stack:

        def start(name: str, **sections: Any) -> Proxy:
            if name not in served:
                folder = tmp_path_factory.mktemp("store")
                served[name] = stack.enter_context(serving(name, provider, folder, **sections))
            return served[name]

        yield start


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def looked(name: str, output: str) -> list[Message]:
    call = {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    made: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [made, {"role": "tool", "tool_call_id": name, "content": output}]


def words(number: int, word: str = "word") -> str:
    return " ".join([word] * number)


def ask(proxy: Proxy, tongue: Tongue, session: str, messages: list[Message], **given: Any) -> dict[str, Any]:
    """Send a request, and return its receipt."""
    answer = proxy.ask(tongue, session, messages, given.pop("model", "say:fine"), tools=TOOLS, **given)
    assert answer.status_code == 200, answer.text
    return proxy.exchanges(session)[-1]


def sent(upstream: Upstream) -> list[Message]:
    assert upstream.last.refused is None
    return upstream.last.chat


# ------------------------------------------------------------------------------------ a budget of the window


def test_recent_messages_fill_their_part_of_the_budget(
    example: Example, upstream: Upstream, session: str, tongue: Tongue
) -> None:
    proxy = example("context-budget")
    few = [each for at in range(5) for each in (user(words(8_000)), said(f"{at} {words(8_000)}"))][:9]
    assert ask(proxy, tongue, f"{session}-few", few)["edits"] == []
    assert sent(upstream) == few
    many = [each for at in range(20) for each in (user(f"{at} {words(2_000)}"), said(words(2_000)))]
    receipt = ask(proxy, tongue, session, [SYSTEM, *many, user("and now?")])
    assert receipt["edits"] == ["recent_window"]
    assert receipt["tokens_before"] > 76_800
    assert 40_000 < receipt["tokens_sent"] <= 0.65 * 76_800
    shown = sent(upstream)
    assert shown[0] == SYSTEM
    recent = [message for message in shown[1:] if message in many]
    assert recent == many[len(many) - len(recent) :]
    assert tongue.told(proxy.messages(session))[:-1] == [*many, user("and now?")]


def test_a_chain_goes_whole(example: Example, upstream: Upstream, session: str, tongue: Tongue) -> None:
    proxy = example("context-budget")
    talk = [each for at in range(10) for each in (user(f"{at} {words(1_500)}"), said(words(1_500)))]
    call, result = looked("large", "found")
    large = [{**call, "content": words(45_000)}, result]
    ask(proxy, tongue, session, [*talk, user("look"), *large, said("so"), *talk, user("and now?")])
    shown = sent(upstream)
    assert not any(message.get("tool_calls") or message["role"] == "tool" for message in shown)
    assert shown[-1]["content"].endswith("and now?")


def test_tool_output_is_compressed_as_json(example: Example, upstream: Upstream, session: str, tongue: Tongue) -> None:
    items = [{"id": number, "name": f"item {number}", "text": words(30)} for number in range(20)]
    given = orjson.dumps({"success": True, "total": 20, "items": items}).decode()
    proxy = example("context-budget")
    ten = [each for at in range(5) for each in (user(f"question {at}"), said(f"answer {at}"))]
    ask(proxy, tongue, session, [*ten, user("list"), *looked("c1", given)])
    shown = orjson.loads(sent(upstream)[-1]["content"])
    assert (shown["success"], shown["total"], shown["compressed"]) == (True, 20, True)
    assert len(shown["items_preview"]) == 5
    assert proxy.get(f"/sessions/{session}/refs/{shown['full_output']}")["text"] == given
    assert tongue.told(proxy.messages(session))[-2]["content"] == given


# ------------------------------------------------------------------------------------ rounds and a summary


def test_ten_whole_rounds_stay_and_the_rest_is_summed_up(
    example: Example, upstream: Upstream, session: str, tongue: Tongue
) -> None:
    models = [{"match": ["small*"], "context_window": 8_000}]
    proxy = example("rounds-and-statistics", models=models)
    rounds = [
        [user(f"question {at}: {words(175)}"), *looked(f"c{at}", words(90)), said(f"answer {at}: {words(175)}")]
        for at in range(1, 17)
    ]
    messages = [SYSTEM, *[message for each in rounds for message in each], user("question 17")]
    receipt = ask(proxy, tongue, session, messages, model="small+say:fine")
    assert receipt["tokens_before"] > 6_400
    assert receipt["edits"] == ["summarize"]
    shown = sent(upstream)
    text = "".join(str(message["content"]) for message in shown if message["role"] in {"system", "user"})
    assert "Archived Session Summary" in text
    assert "Rounds 1-6: " in text
    whole = [{k: v for k, v in message.items() if v} for each in rounds[6:] for message in each]
    assert shown[-len(whole) - 1 :] == [*whole, user("question 17")]
    assert tongue.told(proxy.messages(session))[:-1] == messages[1:]


def test_long_output_is_cut_and_can_be_read_whole(
    example: Example, upstream: Upstream, session: str, tongue: Tongue
) -> None:
    proxy = example("rounds-and-statistics", models=[{"match": ["small*"], "context_window": 8_000}])
    text = "".join(f"{number}\n" for number in range(2_100))
    ask(proxy, tongue, session, [user("read"), *looked("c1", text)])
    cut = sent(upstream)[-1]["content"]
    assert cut.startswith("".join(f"{number}\n" for number in range(2_000)))
    ref = cut.partition("full output: ")[2].partition(" ")[0]
    assert proxy.get(f"/sessions/{session}/refs/{ref}")["text"] == text


# ------------------------------------------------------------------------------------ a shared history


def test_agents_append_to_one_history(example: Example, upstream: Upstream, session: str, tongue: Tongue) -> None:
    proxy = example("shared-history")

    def append(agent: str, *messages: Message) -> None:
        headers = {"x-agent-name": agent, "x-session-mode": "append"}
        ask(proxy, tongue, session, list(messages), model=f"say:{agent} answers", headers=headers)

    append("planner", {"role": "system", "content": "Old rules."}, user("plan it"))
    append("coder", {"role": "system", "content": "New rules."}, {**user("code it"), "agent": "planner"})
    append("planner", user("is it done?"))
    texts = ["plan it", "planner answers", "code it", "coder answers", "is it done?"]
    shown = sent(upstream)
    assert [message["content"] for message in shown if message["role"] != "system"] == texts
    assert "Old rules." not in str(shown)
    assert b'"agent"' not in upstream.last.body
    assert "x-agent-name" not in upstream.last.names


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_finished_task_is_answered_from_the_store(
    example: Example, upstream: Upstream, session: str, tongue: Tongue, stream: bool
) -> None:
    proxy = example("shared-history", finish={"tools": ["finish_task"]})
    first = proxy.ask(tongue, session, [user("do it")], "tool:finish_task", tools=TOOLS, stream=stream)
    reply = tongue.reply(first.content, stream=stream)
    asked = len(upstream.log)
    answer = proxy.ask(tongue, session, [user("do it"), *reply], tools=TOOLS, stream=stream)
    assert len(upstream.log) == asked
    assert "finished" in answer.headers["x-context-warning"]
    again = tongue.said(answer.content, stream=stream)
    assert again["tool_calls"] == tongue.said(first.content, stream=stream)["tool_calls"]


# ------------------------------------------------------------------------------------ reports of other agents


def test_older_reports_become_a_digest(example: Example, upstream: Upstream, session: str, tongue: Tongue) -> None:
    def told(tool: str) -> Message:
        return user(f"<Worker: Bob> [调用工具 {tool}]")

    older = [told(name) for name in ("ToolA", "ToolB", *["ToolA"] * 3, *["ToolB"] * 2, "ToolA")]
    newest = [told(f"New{number}") for number in range(5)]
    proxy = example("agent-broadcasts")
    receipt = ask(proxy, tongue, session, [*older, *newest, user("who knows?")])
    digest = user("<Worker: Bob> [早期工具调用摘要: ToolA×5, ToolB×3, 共 8 次]</Worker: Bob>")
    assert sent(upstream) == [digest, *newest, user("who knows?")]
    assert receipt["edits"] == ["digest_agent_calls"]
    assert tongue.told(proxy.messages(session))[:-1] == [*older, *newest, user("who knows?")]
