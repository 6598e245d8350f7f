"""Replays the recorded conversation through the proxy twice, and measures both runs.

The first run uses the policy, the second `X-Context-Policy: off`. Requests and upstream are the same, but session and
account differ, so that neither run warms the other's prompt cache. All checks are made from outside: from what the
client got, what the upstream received, and what the proxy's HTTP API shows. The client resends the whole history with
every request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import httpx
import orjson
import uvicorn
import yaml
from msgspec import Struct
from msgspec.json import decode
from msgspec.structs import replace

from proxy.config import Settings
from proxy.demo.upstream import MODEL, PracticeUpstream
from proxy.dialects import JsonObject
from proxy.errors import PalimpsestError
from proxy.models import Catalogue, Dollars
from proxy.tokens import TokenCounter

Serve = Callable[[Settings], uvicorn.Config]  # returns uvicorn's configuration of the proxy with these settings

STORE: Final = "demo.db"
CONFIG: Final = "config.yaml"
TRIMMED: Final = "demo"  # the session with the policy
WHOLE: Final = "demo-off"  # the session of the same conversation without trimming
PRICED: Final = ("gpt-4o", "gpt-5.4")
"""The runs are compared at the prices of these models. Cached tokens of the first are expensive, those of the second
cheap; both cache by the rules of the practice upstream."""
_PROVIDER: Final = "https://api.openai.com/v1"
_MILLION: Final = 1_000_000
_START_SECONDS: Final = 30.0
_DATA: Final = files("proxy.demo") / "data"


class RecordedRequest(Struct, frozen=True, kw_only=True):
    """One request of the recorded client."""

    turn: int  # number of the user's turn, from 1
    position: int  # position of the reply in the conversation; the request sent all messages before it


class Recording(Struct, frozen=True, kw_only=True):
    """A conversation as chat messages, ending with a reply."""

    id: str
    source: str
    license: str
    tools: tuple[JsonObject, ...]
    messages: tuple[JsonObject, ...]

    @classmethod
    def load(cls) -> Recording:
        """Return the recording in the package, up to its last reply."""
        recording = decode((_DATA / "airline.json").read_bytes(), type=cls)
        last = max(request.position for request in recording.requests())
        return replace(recording, messages=recording.messages[: last + 1])

    @property
    def replies(self) -> tuple[JsonObject, ...]:
        """The model's replies, in order."""
        return tuple(message for message in self.messages if message["role"] == "assistant")

    @property
    def log(self) -> tuple[JsonObject, ...]:
        """The messages without the leading instructions."""
        first = next(i for i, message in enumerate(self.messages) if message["role"] not in {"system", "developer"})
        return self.messages[first:]

    def requests(self) -> Iterator[RecordedRequest]:
        """Yield the requests in order, one for each reply."""
        turn = 0
        for position, message in enumerate(self.messages):
            if message["role"] == "user":
                turn += 1
            elif message["role"] == "assistant":
                yield RecordedRequest(turn=turn, position=position)


class DemoStep(Struct, frozen=True, kw_only=True):
    """One request: what the client sent, what was forwarded, and what was stored afterwards.

    Tokens are counted by the practice upstream, and include those of the tools.
    """

    turn: int
    messages: int
    tokens: int
    forwarded_messages: int
    forwarded_tokens: int
    cached_tokens: int  # forwarded tokens that the upstream's prompt cache held
    edits: tuple[str, ...]  # the edits that changed the forwarded messages
    moved: bool  # whether the cut moved
    stored: int  # messages on the session's branch after the reply


class DemoRun(Struct, frozen=True, kw_only=True):
    """The whole conversation through one session."""

    session: str
    steps: tuple[DemoStep, ...]
    replies_equal: bool  # whether the client got every reply exactly as recorded
    stored_equal: bool  # whether the store holds the conversation, message for message
    bytes_equal: bool  # whether the upstream received exactly the bytes that the client sent
    extended: bool  # whether every forwarded request began with all messages of the previous one, unless the cut moved

    @property
    def tokens(self) -> int:
        """Prompt tokens that the client sent."""
        return sum(step.tokens for step in self.steps)

    @property
    def forwarded(self) -> int:
        """Prompt tokens that were forwarded."""
        return sum(step.forwarded_tokens for step in self.steps)

    @property
    def cached(self) -> int:
        """Prompt tokens that the upstream's prompt cache held."""
        return sum(step.cached_tokens for step in self.steps)

    def dollars(self, rates: Dollars) -> float:
        """Return the cost of the input: cached tokens at the price of reading, all others at that of writing."""
        written = self.forwarded - self.cached
        return (rates.cached_read * self.cached + rates.cache_write * written) / _MILLION

    @property
    def moves(self) -> int:
        """Number of trims."""
        return sum(step.moved for step in self.steps)

    @property
    def saved_percent(self) -> float:
        """Prompt tokens saved by the policy, in per cent of what the client sent."""
        return round(100 * (1 - self.forwarded / self.tokens), 1)


class DemoCost(Struct, frozen=True, kw_only=True):
    """The cost of the input of both runs at the prices of a model."""

    model: str
    trimmed: float  # dollars with the policy
    whole: float  # dollars without it

    @property
    def saved_percent(self) -> float:
        """Dollars saved by the policy, in per cent."""
        return round(100 * (1 - self.trimmed / self.whole), 1)


class DemoOutcome(Struct, frozen=True, kw_only=True):
    """The measurements of the demonstration."""

    recording: Recording
    trigger: int
    target: int
    fixed_tokens: int  # tokens of instructions and tools, which are never trimmed
    trimmed: DemoRun
    whole: DemoRun
    refused: int

    @property
    def costs(self) -> tuple[DemoCost, ...]:
        """The cost of the input at the published prices of the models in `PRICED`."""
        catalogue = Catalogue()
        priced = [(model, catalogue.facts(model, _PROVIDER).dollars) for model in PRICED]
        return tuple(
            [
                DemoCost(model=model, trimmed=self.trimmed.dollars(rates), whole=self.whole.dollars(rates))
                for model, rates in priced
                if rates is not None
            ]
        )

    @property
    def checks(self) -> dict[str, bool]:
        """Every claim that must hold, and whether it does."""
        both = (self.trimmed, self.whole)
        asked = sum(len(run.steps) for run in both) + self.refused
        stored, moves = len(self.recording.log), self.trimmed.moves
        return {
            f"requests refused by the upstream: {self.refused} of {asked}": self.refused == 0,
            "the client got every reply as it was recorded": all(run.replies_equal for run in both),
            f"the store holds all {stored} messages of the conversation, message for message": all(
                run.stored_equal for run in both
            ),
            "under the policy less was sent on than the client sent": moves > 0 and self.trimmed.saved_percent > 0,
            f"it costs less at the prices of {' and '.join(PRICED)}": all(
                cost.saved_percent > 0 for cost in self.costs
            ),
            f"every request began with all of the last one, but for {moves} moves of the cut": self.trimmed.extended,
            "with X-Context-Policy: off, every request went upstream byte for byte": self.whole.bytes_equal,
        }

    @property
    def holds(self) -> bool:
        """Whether all checks hold."""
        return all(self.checks.values())


class DemoReply(Struct, frozen=True, kw_only=True):
    """A reply as the client got it."""

    headers: Mapping[str, str]
    message: JsonObject
    usage: JsonObject


class Unanswered(PalimpsestError):
    """The request was refused. The message has the status and the body."""


class DemoClient(httpx.Client):
    """A client that works like an SDK."""

    def __init__(self, base_url: str, api_key: str, headers: Mapping[str, str]) -> None:
        own = {"authorization": f"Bearer {api_key}", **headers}
        # Ignore a proxy in the environment: both servers are on this machine.
        super().__init__(base_url=base_url, headers=own, timeout=30.0, trust_env=False)

    def ask(self, body: bytes) -> DemoReply:
        """Send a request (`request_body`) and return the reply."""
        response = self.post("/chat/completions", content=body, headers={"content-type": "application/json"})
        if response.status_code != 200:
            raise Unanswered(f"HTTP {response.status_code}: {response.text}")
        data: JsonObject = response.json()
        message = data["choices"][0]["message"]
        return DemoReply(headers=dict(response.headers), message=message, usage=data["usage"])

    def read(self, path: str) -> Any:
        """Return the JSON at `path` of the proxy's own API."""
        return self.get(self.base_url.copy_with(path=path)).raise_for_status().json()


def request_body(model: str, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> bytes:
    """Return a request as JSON."""
    return orjson.dumps({"model": model, "messages": list(messages)} | ({"tools": list(tools)} if tools else {}))


@contextmanager
def serving(config: uvicorn.Config) -> Generator[str]:
    """Serve on a free port of this machine and yield the address: `http://127.0.0.1:PORT`.

    The server runs in its own thread and event loop, so that servers do not block each other and the main thread keeps
    the signals.
    """
    config.host, config.port = "127.0.0.1", 0
    server = uvicorn.Server(config)

    def run() -> None:
        with suppress(SystemExit):  # raised by uvicorn if its start fails; ends this thread only
            server.run()

    thread = threading.Thread(target=run, name="demo-server", daemon=True)
    thread.start()
    deadline = time.monotonic() + _START_SECONDS
    try:
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise PalimpsestError("A server of the demonstration did not start; what it logged says why.")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def configuration(folder: Path, base_url: str) -> str:
    """Return the configuration file, with the store in `folder` and the upstream at `base_url`."""
    # Written as JSON strings, which are valid YAML.
    url = orjson.dumps(f"sqlite+aiosqlite:///{folder.resolve() / STORE}").decode()
    spool = orjson.dumps(str(folder.resolve() / "palimpsest-spool")).decode()
    return (
        "# Written by `palimpsest demo`. Its upstream ended with the demonstration.\n"
        f"store: {{url: {url}, spool: {spool}}}\n"
        f"upstream: {{base_url: {orjson.dumps(base_url).decode()}}}\n"
        + (_DATA / "policies.yaml").read_text(encoding="utf-8")
    )


def rehearse(serve: Serve, folder: Path) -> DemoOutcome:
    """Replay the recorded conversation through the proxy and return the measurements.

    The store and the configuration file are written to `folder`, which must exist and have neither.
    """
    recording = Recording.load()
    upstream = PracticeUpstream(recording.replies, TokenCounter("tiktoken"))
    with serving(uvicorn.Config(upstream, lifespan="off", log_config=None, access_log=False)) as provider:
        text = configuration(folder, f"{provider}/v1")
        (folder / CONFIG).write_text(text, encoding="utf-8")
        # Use this text alone: environment variables are meant for the real proxy.
        settings = Settings(**yaml.safe_load(text))
        with serving(serve(settings)) as address:
            player = _Player(recording, upstream, f"{address}/v1")
            trimmed = player.play(TRIMMED, {})
            whole = player.play(WHOLE, {"x-context-policy": "off"})
    policy = settings.policies["default"]
    return DemoOutcome(
        recording=recording,
        trigger=policy.trigger.tokens or 0 if policy.trigger is not None else 0,
        target=policy.target.tokens or 0 if policy.target is not None else 0,
        fixed_tokens=player.tokens(recording.messages[: -len(recording.log)]),
        trimmed=trimmed,
        whole=whole,
        refused=sum(received.refusal is not None for received in upstream.log),
    )


class _Player:
    """Plays the client of a recording and measures each request."""

    def __init__(self, recording: Recording, upstream: PracticeUpstream, base_url: str) -> None:
        self._recording = recording
        self._upstream = upstream
        self._base_url = base_url

    def play(self, session: str, headers: Mapping[str, str]) -> DemoRun:
        """Send every request of the recording through a session, each with the replies received so far."""
        account = f"practice-{session}"
        history = list(self._recording.messages)
        steps: list[DemoStep] = []
        bytes_equal = extended = True
        before: tuple[JsonObject, ...] = ()
        with DemoClient(self._base_url, account, {"x-session-id": session, **headers}) as client:
            for request in self._recording.requests():
                messages = history[: request.position]
                body = request_body(MODEL, messages, self._recording.tools)
                reply = client.ask(body)
                history[request.position] = reply.message
                received = self._upstream.answered(account)[-1]
                cut = client.read(f"/exchanges/{reply.headers['x-exchange-id']}")["cut"]
                edits = reply.headers["x-context-edits"]
                step = DemoStep(
                    turn=request.turn,
                    messages=request.position,
                    tokens=self.tokens(messages),
                    forwarded_messages=len(received.messages),
                    forwarded_tokens=reply.usage["prompt_tokens"],
                    cached_tokens=reply.usage["prompt_tokens_details"]["cached_tokens"],
                    edits=tuple(edits.split(",")) if edits else (),
                    moved=cut is not None and cut["moved"],
                    stored=client.read(f"/sessions/{session}")["messages"],
                )
                steps.append(step)
                bytes_equal = bytes_equal and received.body == body
                extended = extended and (step.moved or received.messages[: len(before)] == before)
                before = received.messages
            stored = client.read(f"/sessions/{session}/messages")["data"]
        return DemoRun(
            session=session,
            steps=tuple(steps),
            replies_equal=_same(history, self._recording.messages),
            stored_equal=_same(stored, self._recording.log),
            bytes_equal=bytes_equal,
            extended=extended,
        )

    def tokens(self, messages: Sequence[JsonObject]) -> int:
        """Return the tokens of a request with these messages."""
        request = {"model": MODEL, "messages": messages, "tools": list(self._recording.tools)}
        return self._upstream.tokens_of(request)


def _same(found: Sequence[JsonObject], expected: Sequence[JsonObject]) -> bool:
    """Tell whether two conversations are equal, message for message. Null fields count as missing."""

    def said(message: JsonObject) -> JsonObject:
        return {name: value for name, value in message.items() if value is not None}

    return list(map(said, found)) == list(map(said, expected))
