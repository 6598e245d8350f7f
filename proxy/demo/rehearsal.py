"""The demonstration itself: the conversation replayed through the proxy, twice, and what was measured.

Once under the policy, once with `X-Context-Policy: off`: the same requests, the same upstream,
another session and another account, so that neither run warms the other's prompt cache. Whether it
holds is checked from outside: from what the client got, what the upstream received, and what the
proxy's HTTP API says is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import orjson
import uvicorn
import yaml

from proxy.config import Settings
from proxy.demo.client import Answered, Client, request_body
from proxy.demo.configuration import CONFIG, configuration
from proxy.demo.measures import Outcome, Run, Step
from proxy.demo.recording import Recording, Request, same_message
from proxy.demo.server import plain_config, serving
from proxy.demo.upstream import MODEL, PracticeUpstream, Received
from proxy.tokens import TokenCounter

Serve = Callable[[Settings], uvicorn.Config]
"""How the proxy of these settings is to be served."""

TRIMMED: Final = "demo"
"""The session under the policy."""
WHOLE: Final = "demo-off"
"""The session of the same conversation without trimming."""

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


def rehearse(serve: Serve, folder: Path) -> Outcome:
    """Play the recorded conversation through the proxy and return what was measured.

    Args:
        serve: how to serve the proxy of given settings.
        folder: where the store and the configuration file are left; it exists and holds neither.

    Raises:
        PalimpsestError: a server did not start, or a request was not answered.
    """
    recording = Recording.load()
    upstream = PracticeUpstream(recording.replies, TokenCounter("tiktoken"))
    with serving(plain_config(upstream)) as provider:
        text = configuration(folder, f"{provider}/v1")
        (folder / CONFIG).write_text(text, encoding="utf-8")
        # Made from the text alone: what the environment sets is for the proxy in use.
        settings = Settings(**yaml.safe_load(text))
        with serving(serve(settings)) as address:
            player = _Player(recording, upstream, f"{address}/v1")
            trimmed = player.play(TRIMMED)
            whole = player.play(WHOLE, {"x-context-policy": "off"})
    policy = settings.policies["default"]
    return Outcome(
        recording=recording,
        trigger=policy.trigger.tokens or 0 if policy.trigger is not None else 0,
        target=policy.target.tokens or 0 if policy.target is not None else 0,
        fixed_tokens=player.fixed_tokens,
        trimmed=trimmed,
        whole=whole,
        refused=sum(received.refusal is not None for received in upstream.log),
    )


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request, as its sender sees it."""

    request: Request
    body: bytes
    answered: Answered
    moved: bool
    stored: int


class _Player:
    """Plays the client's part of a recording, and keeps the books."""

    def __init__(self, recording: Recording, upstream: PracticeUpstream, base_url: str) -> None:
        self._recording = recording
        self._upstream = upstream
        self._base_url = base_url

    @property
    def fixed_tokens(self) -> int:
        """Tokens of instructions and tools."""
        lead = len(self._recording.messages) - len(self._recording.log)
        return self._tokens(self._recording.messages[:lead])

    def play(self, session: str, headers: Mapping[str, str] = _NONE) -> Run:
        """Send every request of the recording through a session of this name."""
        account = f"practice-{session}"
        with Client(self._base_url, account, {"x-session-id": session, **headers}) as client:
            turns = list(self._turns(client, session))
            stored = client.get(f"/sessions/{session}/messages")["data"]
        received = self._upstream.answered(account)
        steps = tuple(self._step(turn, at) for turn, at in zip(turns, received, strict=True))
        replies = [turn.answered.message for turn in turns]
        return Run(
            session=session,
            steps=steps,
            replies_equal=_same(replies, self._recording.replies),
            stored_equal=_same(stored, self._recording.log),
            bytes_equal=[turn.body for turn in turns] == [at.body for at in received],
            extended=_extended(received, [step.moved for step in steps]),
        )

    def _turns(self, client: Client, session: str) -> Iterator[_Turn]:
        """Send one request after the other, each with the replies that came before."""
        history = list(self._recording.messages)
        for request in self._recording.requests():
            body = request_body(MODEL, history[: request.position], self._recording.tools)
            answered = client.ask(body)
            history[request.position] = answered.message
            cut = client.get(f"/exchanges/{answered.headers['x-exchange-id']}")["cut"]
            stored = client.get(f"/sessions/{session}")["messages"]
            yield _Turn(
                request=request,
                body=body,
                answered=answered,
                moved=cut is not None and cut["moved"],
                stored=stored,
            )

    def _step(self, turn: _Turn, received: Received) -> Step:
        edits = turn.answered.headers["x-context-edits"]
        usage = turn.answered.usage
        return Step(
            turn=turn.request.turn,
            messages=turn.request.position,
            tokens=self._tokens(orjson.loads(turn.body)["messages"]),
            forwarded_messages=len(received.messages),
            forwarded_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            edits=tuple(edits.split(",")) if edits else (),
            moved=turn.moved,
            stored=turn.stored,
        )

    def _tokens(self, messages: Sequence[dict[str, Any]]) -> int:
        request = {"model": MODEL, "messages": messages, "tools": list(self._recording.tools)}
        return self._upstream.tokens_of(request)


def _same(stored: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> bool:
    """Tell whether two conversations are the same, message for message."""
    return len(stored) == len(expected) and all(map(same_message, stored, expected))


def _extended(received: Sequence[Received], moved: Sequence[bool]) -> bool:
    """Tell whether each request began with all messages of the one before, where the cut stood still."""
    pairs = zip(received, received[1:], moved[1:], strict=False)
    return all(
        after.messages[: len(before.messages)] == before.messages
        for before, after, at_move in pairs
        if not at_move
    )
