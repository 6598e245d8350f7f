"""OpenAI's official SDK for Node, streaming through the proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Serve
from tests.support.node_sdk import node_sdk_folder, run_script
from tests.support.upstream import Upstream

SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({
  baseURL: process.argv[2], apiKey: "sk-test", defaultHeaders: { "X-Session-ID": process.argv[3] },
});
const said = [{ role: "user", content: "how is it?" }];
const tools = [{ type: "function", function: { name: "weather", parameters: { type: "object" } } }];
const first = client.chat.completions.stream({ model: "tools:weather,clock", messages: said, tools });
const message = await first.finalMessage();
said.push({ role: message.role, content: message.content, tool_calls: message.tool_calls });
for (const call of message.tool_calls) {
  said.push({ role: "tool", tool_call_id: call.id, content: "fine" });
}
let text = "";
const asked = { model: "echo", messages: said, tools, stream: true };
for await (const chunk of await client.chat.completions.create(asked)) {
  text += chunk.choices[0].delta.content ?? "";
}
console.log(JSON.stringify({ names: message.tool_calls.map((call) => call.function.name), text }));
"""


@pytest.fixture(scope="module")
def node_folder() -> Path:
    return node_sdk_folder()


def test_a_conversation_with_tools(node_folder: Path, serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve()
    said = run_script(node_folder, "conversation.mjs", SCRIPT, f"{proxy.url}/v1", session)

    assert said == '{"names":["weather","clock"],"text":"echo: how is it?"}'
    assert [message["role"] for message in proxy.messages(session)] == [
        *("user", "assistant", "tool", "tool", "assistant")
    ]
    assert [row["kind"] for row in proxy.exchanges(session)] == ["first", "resend"]
