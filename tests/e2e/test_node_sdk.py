"""The official SDK of OpenAI for Node, streaming through the proxy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Serve
from tests.support.upstream import Upstream

PACKAGE = "openai@6"
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
    """A folder in which Node finds the SDK; kept in the virtual environment, so that it is fetched once."""
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("this machine has no node and npm")
    folder = Path(sys.prefix) / "node-sdk"
    if not (folder / "node_modules" / "openai").is_dir():
        folder.mkdir(exist_ok=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock", PACKAGE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603 - fixed words
        if done.returncode != 0:
            pytest.skip(
                f"npm cannot install {PACKAGE} on this machine: {(done.stderr or done.stdout)[-200:]}"
            )
    return folder


def test_a_conversation_with_tools(node_folder: Path, serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve()
    (node_folder / "conversation.mjs").write_text(SCRIPT)
    command = ["node", "conversation.mjs", f"{proxy.url}/v1", session]
    done = subprocess.run(command, cwd=node_folder, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - fixed words

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '{"names":["weather","clock"],"text":"echo: how is it?"}'
    assert [message["role"] for message in proxy.messages(session)] == [
        *("user", "assistant", "tool", "tool", "assistant")
    ]
    assert [row["kind"] for row in proxy.exchanges(session)] == ["first", "resend"]
