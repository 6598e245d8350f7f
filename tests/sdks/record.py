"""Records what each SDK sends: `python -m tests.sdks.record` writes tests/data/sdks anew.

Every SDK gets an environment of its own, since they pin different versions of each other, and holds the
same conversation with the stand-in provider. What reaches the provider and what it answers is written
down to the byte. Nothing of the package under test takes part.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import venv
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from tests.sdks.conversation import QUESTIONS, REPLIES, SCHEMAS, SYSTEM
from tests.support.answers import CREATED, DONE, deltas_of, usage_of
from tests.support.api_rules import Refused, check
from tests.support.listening import Listening
from tests.support.received import Received
from tests.support.recorded import DATA, SUFFIX, Exchange, Recorded
from tests.support.tongues import BY_PATH, CHAT, SEALED, Tongue

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OTHER_IDS = "other_ids"
"""The mode in which the ids of calls are not those of OpenAI: some SDKs put their own in their place."""
RESPONSES_MODES = ("responses-json", "responses-stream")
"""The modes in which the Responses API is spoken."""
KEPT_HEADERS = ("accept", "anthropic-version", "content-type", "idempotency-key", "user-agent")
KEPT_PREFIXES = ("x-stainless-",)
SECONDS = 300


@dataclass(frozen=True)
class Sdk:
    """An SDK, pinned, and how it is made to talk."""

    name: str
    script: str
    packages: tuple[str, ...]
    """What is installed, the SDK itself first, as `name==version`."""
    modes: tuple[str, ...] = ("json", "stream")
    rounds: bool = False
    """Whether it sends arguments back as JavaScript has parsed them: integers above 2^53 are others then. Each such
    turn would be a branch, so the model says none."""

    @property
    def node(self) -> bool:
        """Whether it is one of Node."""
        return self.script.endswith(".mjs")


SDKS = (
    Sdk(
        name="openai",
        script="talk_openai.py",
        packages=("openai==3.54.0",),
        modes=("json", "dump", "parse", "stream", *RESPONSES_MODES),
    ),
    Sdk(name="anthropic", script="talk_anthropic.py", packages=("anthropic==2.12.0",)),
    Sdk(name="node", script="talk_node.mjs", packages=("openai@6.49.0",)),
    Sdk(
        name="langchain",
        script="talk_langchain.py",
        packages=("langchain-openai==1.7.3", "langchain==1.4.7", "openai==3.54.0"),
    ),
    Sdk(
        name="pydantic_ai",
        script="talk_pydantic_ai.py",
        packages=("pydantic-ai-slim[openai]==2.68.0", "openai==3.54.0"),
        modes=("json", "stream", *RESPONSES_MODES),
    ),
    Sdk(
        name="agents",
        script="talk_agents.py",
        packages=("openai-agents==0.24.0", "openai==3.54.0"),
        modes=("json", "stream", *RESPONSES_MODES),
    ),
    Sdk(
        name="agno",
        script="talk_agno.py",
        packages=("agno==3.1.10", "openai==3.54.0"),
        modes=("json", "stream", OTHER_IDS),
    ),
    Sdk(
        name="llama_index",
        script="talk_llama_index.py",
        packages=("llama-index-llms-openai==0.8.3", "llama-index-core==0.14.25", "openai==2.54.0"),
    ),
    Sdk(name="litellm", script="talk_litellm.py", packages=("litellm==1.106.2", "mcp==2.3.0", "openai==2.54.0")),
    Sdk(name="anthropic_node", script="talk_anthropic_node.mjs", packages=("@anthropic-ai/sdk@1.12.0",), rounds=True),
    Sdk(
        name="agents_js",
        script="talk_agents_js.mjs",
        packages=("@openai/agents@0.20.0", "openai@7.57.0", "zod@4.6.7"),
        modes=RESPONSES_MODES,
    ),
    Sdk(
        name="ai_sdk",
        script="talk_ai_sdk.mjs",
        packages=("ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7"),
        modes=("json", "stream", *RESPONSES_MODES),
        rounds=True,
    ),
)


class Provider:
    """A provider that answers whatever it is asked with the script's next reply, and writes both down.

    Parallel calls are streamed one after another, as OpenAI does it. The stand-in of the other tests
    lets them take turns, which LlamaIndex takes for ever more calls.
    """

    def __init__(self, mode: str, *, rounds: bool = False) -> None:
        replies = _with_other_ids(REPLIES) if mode == OTHER_IDS else REPLIES
        self.replies = deque(_with_short_integers(replies) if rounds else replies)
        """What is still to be said."""
        self.exchanges: list[Exchange] = []
        self.refused: list[str] = []
        """Why requests were refused by the rules of the API."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        received = Received(scope)
        async for _ in received.pieces(receive):
            pass
        try:
            body, tongue = received.json, BY_PATH[received.path]
            status, stream = 200, bool(body.get("stream"))
            if tongue is not CHAT:
                kind, answer = _in(tongue, body, len(self.exchanges), self.replies.popleft())
                self.exchanges.append(Exchange(headers=_kept(received), request=received.body, response=answer))
                await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
                await send({"type": "http.response.body", "body": answer})
                return
            check(body, plain=False, lenient=True)  # what SDKs send beyond the API's fields is for the record
            message = {"refusal": None, "annotations": [], **self.replies.popleft()}
            if stream:
                kind, answer = b"text/event-stream; charset=utf-8", b"".join(_events(body, message))
            else:
                kind, answer = b"application/json", _whole(body, message)
        except Refused as why:
            self.refused.append(str(why))
            status, kind, answer = why.status, b"application/json", orjson.dumps(why.body)
        self.exchanges.append(Exchange(headers=_kept(received), request=received.body, response=answer))
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": answer})


def _in(tongue: Tongue, body: dict[str, Any], number: int, reply: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the kind and the bytes of an answer in another API; reasoning is sealed there."""
    message = {**reply, SEALED: [f"sealed-{number}"] if reply.get("reasoning_content") else []}
    asked = {"model": body["model"], "messages": body[tongue.listed]}
    usage = usage_of(asked)
    if body.get("stream"):
        return b"text/event-stream; charset=utf-8", b"".join(tongue.events(asked, message, usage))
    return b"application/json", orjson.dumps(tongue.answer(asked, message, usage), option=orjson.OPT_INDENT_2)


def _with_other_ids(replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the replies with ids of calls as vLLM makes them."""
    changed: list[dict[str, Any]] = json.loads(json.dumps(replies).replace('"call_', '"chatcmpl-tool-'))
    return changed


def _with_short_integers(replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the replies without integers that JavaScript rounds."""
    changed: list[dict[str, Any]] = json.loads(re.sub(r"\d{16,}", "9007199254740991", json.dumps(replies)))
    return changed


def _whole(body: dict[str, Any], message: dict[str, Any]) -> bytes:
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(message)}
    answer = {**_fixed(body, "chat.completion"), "choices": [choice], "usage": usage_of(body)}
    return orjson.dumps(answer, option=orjson.OPT_INDENT_2)


def _events(body: dict[str, Any], message: dict[str, Any]) -> Iterator[bytes]:
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    fixed = _fixed(body, "chat.completion.chunk")
    for delta, reason in [*((delta, None) for delta in _deltas(message)), ({}, _reason(message))]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**fixed, "choices": [choice], **({"usage": None} if usage else {})}
        yield b"data: " + orjson.dumps(chunk) + b"\n\n"
    if usage:
        yield b"data: " + orjson.dumps({**fixed, "choices": [], "usage": usage_of(body)}) + b"\n\n"
    yield DONE


def _deltas(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the deltas of a message, one call after another."""

    def place(delta: dict[str, Any]) -> int:
        return delta["tool_calls"][0]["index"] if "tool_calls" in delta else -1

    return sorted(deltas_of(message), key=place)


def _fixed(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-recorded", "object": kind, "created": CREATED, "model": body["model"]}


def _reason(message: dict[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _kept(request: Received) -> list[tuple[str, str]]:
    """Return the headers that say something of the SDK."""
    return [(name, value) for name, value in request.headers if name in KEPT_HEADERS or name.startswith(KEPT_PREFIXES)]


def main() -> None:
    """Record all SDKs, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tests.sdks.record", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SDK", help=", ".join(sdk.name for sdk in SDKS))
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path(sys.prefix) / "sdks",
        help="where the SDKs are installed, a folder for each (default: beside this environment)",
    )
    given = parser.parse_args()
    if unknown := set(given.names) - {sdk.name for sdk in SDKS}:
        parser.error(f"no such SDK: {', '.join(sorted(unknown))}")
    for sdk in SDKS:
        if sdk.name in given.names or not given.names:
            program = installed(sdk, given.environments.resolve() / sdk.name)
            for mode in sdk.modes:
                recorded = record(sdk, mode, program)
                size = recorded.write(DATA / f"{sdk.name}-{mode}{SUFFIX}")
                sys.stdout.write(f"{sdk.name} {mode}: {len(recorded.exchanges)} exchanges, {size} bytes\n")


def installed(sdk: Sdk, folder: Path) -> list[str]:
    """Return the program that runs the SDK's script; install the SDK if it is not there as pinned."""
    marker, pins = folder / "pins", "\n".join(sdk.packages)
    ready = marker.is_file() and marker.read_text() == pins
    if not ready:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    if sdk.node:
        program = folder / sdk.script
        if not ready:
            (folder / "package.json").write_text('{"private": true, "type": "module"}')
            quiet = ("--silent", "--no-audit", "--no-fund", "--no-package-lock")
            subprocess.run(["npm", "install", *quiet, *sdk.packages], cwd=folder, check=True)  # noqa: S603, S607 - fixed words, npm of the path
        for script in (sdk.script, "tools.mjs"):
            shutil.copy(HERE / script, folder / script)  # Node looks for packages beside the script
        command = [shutil.which("node") or "node", str(program)]
    else:
        python = folder / "bin" / "python"
        if not ready:
            venv.create(folder, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *sdk.packages], check=True)  # noqa: S603 - fixed words
        command = [str(python), "-m", f"tests.sdks.{Path(sdk.script).stem}"]
    marker.write_text(pins)
    return command


def record(sdk: Sdk, mode: str, program: list[str]) -> Recorded:
    """Let an SDK talk; return what it sent and what it was answered."""
    # Nothing of the caller's environment: no key, no proxy, no setting of an SDK.
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    story = json.dumps({"system": SYSTEM, "questions": QUESTIONS, "schemas": SCHEMAS})
    provider = Provider(mode, rounds=sdk.rounds)
    config = uvicorn.Config(provider, ws="none", lifespan="off", log_config=None, access_log=False)
    with Listening(config) as listening:
        subprocess.run(  # noqa: S603 - the command is made above
            [*program, f"{listening.url}/v1", mode],
            cwd=ROOT,
            env=environment,
            input=story.encode(),
            timeout=SECONDS,
            check=True,
        )
    if provider.refused or provider.replies:
        raise SystemExit(f"{sdk.name} {mode} did not come to the end: {provider.refused}")
    return Recorded(name=f"{sdk.name}-{mode}", packages=list(sdk.packages), exchanges=provider.exchanges)


if __name__ == "__main__":
    main()
