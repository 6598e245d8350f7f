"""OpenAI's SDK for Node, streaming, while the proxy answers some of the model's calls itself."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.e2e.conftest import Serve
from tests.support.node_sdk import node_sdk_folder, run_script
from tests.support.upstream import Upstream

SCRIPT = """
import OpenAI from "openai";
const [baseURL, session] = process.argv.slice(2);
const defaultHeaders = { "X-Session-ID": session };
const client = new OpenAI({ baseURL, apiKey: "sk-test", maxRetries: 0, defaultHeaders });
const tools = [{ type: "function", function: { name: "look", parameters: { type: "object" } } }];
const said = [{ role: "user", content: "begin" }];
const seen = [];
for (let turn = 0; turn < 4; turn++) {
  const asked = { model: `script:${session}`, messages: said, tools };
  let message;
  if (turn % 2 === 0) {
    const stream = client.chat.completions.stream(asked);
    for await (const chunk of stream) seen.push(JSON.stringify(chunk));
    message = await stream.finalMessage();
  } else {
    message = (await client.chat.completions.create(asked)).choices[0].message;
  }
  seen.push(JSON.stringify(message));
  said.push({ role: "assistant", content: message.content, tool_calls: message.tool_calls });
  for (const call of message.tool_calls ?? []) {
    said.push({ role: "tool", tool_call_id: call.id, content: "fine" });
  }
  if (!message.tool_calls) said.push({ role: "user", content: "and on" });
}
console.log(JSON.stringify({
  saw: seen.some((text) => text.includes("recall_context")),
  said: said.filter((message) => message.role === "assistant").map((message) => [
    message.content, (message.tool_calls ?? []).map((call) => [call.id, call.function.arguments]),
  ]),
}));
"""


@pytest.fixture(scope="module")
def node_folder() -> Path:
    return node_sdk_folder()


def call(name: str, number: int) -> dict[str, object]:
    return {"id": f"{name}_{number}", "type": "function", "function": {"name": name, "arguments": '{"query":"valve"}'}}


def own(number: int) -> dict[str, object]:
    return call("recall_context", number)


def look(number: int) -> dict[str, object]:
    return call("look", number)


def test_no_call_of_the_proxys_is_seen(node_folder: Path, serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve(virtual_tools={"recall_context": True})
    turns = [
        (None, [own(1)]),
        ("One. ", [own(2), look(3), own(4), look(5)]),
        (None, [look(6), own(7)]),
        ("Two. ", [own(8), own(9)]),
        ("Three.", []),
        (None, [own(10)]),
        ("Four.", []),
    ]
    upstream.load(
        session,
        [{"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})} for text, calls in turns],
    )
    said = run_script(node_folder, "recall.mjs", SCRIPT, f"{proxy.url}/v1", session)

    arguments = '{"query":"valve"}'
    assert orjson.loads(said) == {
        "saw": False,
        "said": [
            ["One. ", [["look_3", arguments], ["look_5", arguments]]],
            [None, [["look_6", arguments]]],
            ["Two. Three.", []],
            ["Four.", []],
        ],
    }
    assert [request.refused for request in upstream.log] == [None] * len(turns)
    assert not upstream.scripts[session]
