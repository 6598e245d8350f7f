"""The recorded conversation, replayed through the proxy twice, and what was measured.

The first run is under the policy, the second with `X-Context-Policy: off`: the same requests and upstream,
but another session and account, so that neither run warms the other's prompt cache. All checks are from
outside: by what the client got, what the upstream received, and what the proxy's HTTP API shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Final

import orjson
import uvicorn
import yaml
from msgspec import Struct

from proxy.config import Settings
from proxy.demo.client import DemoClient, plain_config, request_body, serving
from proxy.demo.upstream import MODEL, PracticeUpstream
from proxy.dialects import JsonObject
from proxy.tokens import TokenCounter

Serve = Callable[[Settings], uvicorn.Config]
"""Returns how uvicorn serves the proxy with given settings."""

STORE: Final = "demo.db"
"""Name of the SQLite file."""
CONFIG: Final = "config.yaml"
"""Name of the configuration file."""
TRIMMED: Final = "demo"
"""The session under the policy."""
WHOLE: Final = "demo-off"
"""The session of the same conversation without trimming."""
_DATA: Final = files("proxy.demo") / "data"
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


# ------------------------------------------------------------------------------------- the recording


class RecordedRequest(Struct, frozen=True, kw_only=True):
    """One request that the recorded client made."""

    turn: int
    """Number of the user's turn, from 1."""
    position: int
    """Position of its reply in the conversation. It sent every message before that one."""


class Recording(Struct, frozen=True, kw_only=True):
    """A conversation as chat messages, ending with a reply."""

    id: str
    source: str
    license: str
    tools: tuple[JsonObject, ...]
    """The tools that the client offered with every request."""
    messages: tuple[JsonObject, ...]
    """Every message in order, the system prompt first."""

    @classmethod
    def load(cls) -> Recording:
        """Return the recording that is part of the package, up to its last reply."""
        return cls.of(orjson.loads((_DATA / "airline.json").read_bytes()))

    @classmethod
    def of(cls, data: JsonObject) -> Recording:
        """Return a recording from `{id, source, license, tools, messages}`."""
        messages: list[JsonObject] = data["messages"]
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        about = {name: data[name] for name in ("id", "source", "license")}
        return cls(**about, tools=tuple(data["tools"] or ()), messages=tuple(messages))

    @property
    def replies(self) -> tuple[JsonObject, ...]:
        """The model's replies in order."""
        return tuple(message for message in self.messages if message["role"] == "assistant")

    @property
    def log(self) -> tuple[JsonObject, ...]:
        """The messages without the leading instructions."""
        first = next(i for i, message in enumerate(self.messages) if message["role"] not in {"system", "developer"})
        return self.messages[first:]

    def requests(self) -> Iterator[RecordedRequest]:
        """Yield the requests in order: one for each reply."""
        turn = 0
        for position, message in enumerate(self.messages):
            if message["role"] == "user":
                turn += 1
            elif message["role"] == "assistant":
                yield RecordedRequest(turn=turn, position=position)


# ------------------------------------------------------------------------------------ measurements


class DemoStep(Struct, frozen=True, kw_only=True):
    """One request: what the client sent, what was forwarded, and what was stored afterwards."""

    turn: int
    messages: int
    """Messages that the client sent, the system prompt included."""
    tokens: int
    """Their tokens, with those of the tools. The practice upstream counts all tokens here."""
    forwarded_messages: int
    forwarded_tokens: int
    cached_tokens: int
    """Forwarded tokens that the upstream's prompt cache held, as it told the client."""
    edits: tuple[str, ...]
    """The edits that changed something in what was forwarded."""
    moved: bool
    """Whether a trim happened: the trigger fired and the cut moved."""
    stored: int
    """Messages on the session's branch after the reply."""


class DemoRun(Struct, frozen=True, kw_only=True):
    """The whole conversation through one session."""

    session: str
    steps: tuple[DemoStep, ...]
    replies_equal: bool
    """Whether the client got every reply as it was recorded."""
    stored_equal: bool
    """Whether the store holds the conversation, message for message."""
    bytes_equal: bool
    """Whether the upstream received every request with the bytes that the client sent."""
    extended: bool
    """Whether every forwarded request began with all messages of the one before, unless the cut moved."""

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

    @property
    def moves(self) -> int:
        """Number of trims."""
        return sum(step.moved for step in self.steps)

    @property
    def saved_percent(self) -> float:
        """How much less was forwarded than the client sent, in per cent."""
        return round(100 * (1 - self.forwarded / self.tokens), 1)


class DemoCheck(Struct, frozen=True, kw_only=True):
    """Something that must hold."""

    claim: str
    holds: bool


class DemoOutcome(Struct, frozen=True, kw_only=True):
    """What the demonstration measured."""

    recording: Recording
    trigger: int
    """Tokens of a request above which the policy trims."""
    target: int
    """Tokens down to which it trims."""
    fixed_tokens: int
    """Tokens of instructions and tools, which no policy changes."""
    trimmed: DemoRun
    whole: DemoRun
    refused: int
    """Requests that the upstream refused."""

    @property
    def checks(self) -> tuple[DemoCheck, ...]:
        """Everything that must hold."""
        both = (self.trimmed, self.whole)
        asked = sum(len(run.steps) for run in both) + self.refused
        stored = len(self.recording.log)
        moves = self.trimmed.moves
        claims = {
            f"requests refused by the upstream: {self.refused} of {asked}": self.refused == 0,
            "the client got every reply as it was recorded": all(run.replies_equal for run in both),
            f"the store holds all {stored} messages of the conversation, message for message": all(
                run.stored_equal for run in both
            ),
            "under the policy less was sent on than the client sent": (moves > 0 and self.trimmed.saved_percent > 0),
            f"every request began with all of the last one, but for {moves} moves of the cut": (self.trimmed.extended),
            "with X-Context-Policy: off, every request went upstream byte for byte": self.whole.bytes_equal,
        }
        return tuple(DemoCheck(claim=claim, holds=holds) for claim, holds in claims.items())

    @property
    def holds(self) -> bool:
        """Whether all checks hold."""
        return all(check.holds for check in self.checks)


# -------------------------------------------------------------------------------------- the replay


def configuration(folder: Path, base_url: str) -> str:
    """Return the configuration: the store in `folder`, the upstream at `base_url`."""
    # JSON strings are YAML strings.
    url = orjson.dumps(f"sqlite+aiosqlite:///{folder.resolve() / STORE}").decode()
    return (
        "# Written by `palimpsest demo --keep`. Its upstream ended with the demonstration.\n"
        f"store: {{url: {url}}}\n"
        f"upstream: {{base_url: {orjson.dumps(base_url).decode()}}}\n"
        + (_DATA / "policies.yaml").read_text(encoding="utf-8")
    )


def rehearse(serve: Serve, folder: Path) -> DemoOutcome:
    """Replay the recorded conversation through the proxy and return what was measured.

    Args:
        serve: how to serve the proxy with given settings.
        folder: where the store and the configuration file are written. It exists and has neither.

    Raises:
        PalimpsestError: a server did not start, or a request was not answered.
    """
    recording = Recording.load()
    upstream = PracticeUpstream(recording.replies, TokenCounter("tiktoken"))
    with serving(plain_config(upstream)) as provider:
        text = configuration(folder, f"{provider}/v1")
        (folder / CONFIG).write_text(text, encoding="utf-8")
        # From the text alone: variables of the environment are meant for the real proxy.
        settings = Settings(**yaml.safe_load(text))
        with serving(serve(settings)) as address:
            player = _Player(recording, upstream, f"{address}/v1")
            trimmed = player.play(TRIMMED)
            whole = player.play(WHOLE, {"x-context-policy": "off"})
    policy = settings.policies["default"]
    return DemoOutcome(
        recording=recording,
        trigger=policy.trigger.tokens or 0 if policy.trigger is not None else 0,
        target=policy.target.tokens or 0 if policy.target is not None else 0,
        fixed_tokens=player.fixed_tokens,
        trimmed=trimmed,
        whole=whole,
        refused=sum(received.refusal is not None for received in upstream.log),
    )


class _Player:
    """Plays the client's part of a recording and measures each request."""

    def __init__(self, recording: Recording, upstream: PracticeUpstream, base_url: str) -> None:
        self._recording = recording
        self._upstream = upstream
        self._base_url = base_url

    @property
    def fixed_tokens(self) -> int:
        """Tokens of instructions and tools."""
        lead = len(self._recording.messages) - len(self._recording.log)
        return self._tokens(self._recording.messages[:lead])

    def play(self, session: str, headers: Mapping[str, str] = _NONE) -> DemoRun:
        """Send every request of the recording through a session, each with the replies that came before."""
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
                cut = client.get(f"/exchanges/{reply.headers['x-exchange-id']}")["cut"]
                edits = reply.headers["x-context-edits"]
                step = DemoStep(
                    turn=request.turn,
                    messages=request.position,
                    tokens=self._tokens(messages),
                    forwarded_messages=len(received.messages),
                    forwarded_tokens=reply.usage["prompt_tokens"],
                    cached_tokens=reply.usage["prompt_tokens_details"]["cached_tokens"],
                    edits=tuple(edits.split(",")) if edits else (),
                    moved=cut is not None and cut["moved"],
                    stored=client.get(f"/sessions/{session}")["messages"],
                )
                steps.append(step)
                bytes_equal = bytes_equal and received.body == body
                extended = extended and (step.moved or received.messages[: len(before)] == before)
                before = received.messages
            stored = client.get(f"/sessions/{session}/messages")["data"]
        return DemoRun(
            session=session,
            steps=tuple(steps),
            replies_equal=_same(history, self._recording.messages),
            stored_equal=_same(stored, self._recording.log),
            bytes_equal=bytes_equal,
            extended=extended,
        )

    def _tokens(self, messages: Sequence[JsonObject]) -> int:
        request = {"model": MODEL, "messages": messages, "tools": list(self._recording.tools)}
        return self._upstream.tokens_of(request)


def _same(found: Sequence[JsonObject], expected: Sequence[JsonObject]) -> bool:
    """Tell whether two conversations are the same, message for message; null is the same as missing."""
    return [_said(message) for message in found] == [_said(message) for message in expected]


def _said(message: JsonObject) -> JsonObject:
    return {name: value for name, value in message.items() if value is not None}
