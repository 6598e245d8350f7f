"""A long session under the built-in policy: the provider's cache keeps serving it.

The session is assembled from recorded ones. The provider gives the recorded replies.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.prefix_cache import cached_and_all
from tests.support.replay import Recording, difference, unsteady
from tests.support.server import Proxy
from tests.support.upstream import Upstream

DATA = Path(__file__).parents[1] / "data" / "trajectories"
PARTS = (
    "tau-airline-t46-r3",
    "deerflow-thread-4f3e55ee",
    "sweagent-marshmallow-function_calling_replace_from_source",
    "tau-airline-t00-r2",
    "deerflow-replay-ultra-processed-foods",
    "bfcl-multi_turn_base_0",
)
SHARE = 0.9
"""The least share of cached tokens with trimming, relative to the share without trimming."""
DEARER = 1.04
"""The most that a session may cost, relative to its cost without trimming."""
CACHED = 0.1
"""Price of a cached token, relative to an uncached one."""


@pytest.fixture(scope="module")
def recording() -> Recording:
    """One session of all parts, one after the other."""
    parts = [Recording.read(DATA / f"{name}.json") for name in PARTS]
    lead = parts[0].messages[: parts[0].lead]
    said = [message for part in parts for message in _ended(part.messages[part.lead :])]
    system = [message for message in said if message["role"] in {"system", "developer"}]
    return Recording(
        name="long", messages=[*lead, *(message for message in said if message not in system)], tools=parts[0].tools
    )


def _ended(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without a question at the end, and without calls at the end that have no results."""
    last = messages[-1]
    return messages[:-1] if last["role"] == "user" or last.get("tool_calls") else messages


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    prices = {"input": 1, "cached_read": CACHED, "output": 4}
    return serve(models=[{"match": ["*"], "context_window": 400_000, "prices": prices}])


def replay(
    proxy: Proxy, upstream: Upstream, session: str, recording: Recording, policy: str | None = None
) -> list[Any]:
    """Request every reply, as an agent would; return the bodies that reached the upstream."""
    upstream.forget()
    turns = list(recording.turns(append=False))
    upstream.load(session, [turn.reply for turn in turns])
    headers = {"x-session-mode": "full"} | ({"x-context-policy": policy} if policy else {})
    tools = {"tools": recording.tools} if recording.tools else {}
    for turn in turns:
        answer = proxy.chat(session, turn.messages, f"script:{session}+lenient+discreet", headers=headers, **tools)
        assert answer.status_code == 200, answer.text
    assert len(upstream.log) == len(turns)
    return [request.json for request in upstream.log]


def test_the_cache_serves_it_nearly_as_well_as_if_nothing_were_trimmed(
    proxy: Proxy, upstream: Upstream, recording: Recording
) -> None:
    before = cached_and_all(replay(proxy, upstream, "whole", recording, "off"))
    after = cached_and_all(replay(proxy, upstream, "trimmed", recording))
    receipts = proxy.exchanges("trimmed")
    assert unsteady([request.body for request in upstream.log], receipts) is None
    moved = [row for row in receipts if row["cut"] is not None and row["cut"]["moved"]]
    assert moved
    assert after[1] < before[1]
    assert after[0] / after[1] >= SHARE * before[0] / before[1]
    assert _cost(*after) <= DEARER * _cost(*before)
    assert difference(proxy.messages("trimmed"), recording) is None
    # The counts in the receipts agree with what arrived.
    for row in receipts:
        told = sum(line["tokens_before"] - line["tokens_after"] for line in row["plan"])
        spared = row["tokens_before"] - row["tokens_sent"]
        assert told * row["calibration"] == pytest.approx(spared, abs=2)


def _cost(cached: int, tokens: int) -> float:
    return tokens - cached + CACHED * cached


def test_what_is_counted_here_is_how_a_cache_counts() -> None:
    def bodies() -> Iterator[dict[str, Any]]:
        said = [{"role": "user", "content": "x" * 8_000}]
        yield {"messages": said}
        yield {"messages": [*said, {"role": "user", "content": "more"}]}
        yield {"messages": [{"role": "user", "content": "other"}, *said]}

    one, two, three = list(bodies())
    assert cached_and_all([one, one])[0] == 15 * 128
    assert cached_and_all([one, two])[0] == 15 * 128
    assert cached_and_all([one, three])[0] == 0
