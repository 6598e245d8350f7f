"""Recorded conversations, replayed with every edit: nothing is refused, nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.replay import Recording, difference, unsteady
from tests.support.server import Proxy
from tests.support.upstream import Upstream

DATA = Path(__file__).parents[1] / "data" / "trajectories"
LONG = "tau-airline-t46-r3"
RECORDINGS = [Recording.read(path) for path in sorted(DATA.glob("*.json")) if path.stem != LONG]

KEEP = {"type": "keep_tool_calls", "last": 2}
CUT_SHORT = {"type": "truncate_tool_output", "max_lines": 8, "max_bytes": 300}
DROP = {"type": "drop_oldest"}
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {"trigger": {"tool_calls": 6}, "edits": [KEEP]},
    "truncate": {"trigger": {"messages": 20}, "on_arrival": [{**CUT_SHORT, "max_bytes": 600}], "edits": [CUT_SHORT]},
    "drop": {"trigger": {"tokens": 1200}, "target": {"tokens": 700}, "edits": [DROP]},
    "all": {
        "trigger": {"tokens": 1500, "tool_calls": 5},
        "target": {"tokens": 900},
        "on_arrival": [CUT_SHORT],
        "edits": [KEEP, DROP],
        "pin": [{"regex": "(?i)must not|\u5fc5\u987b", "roles": ["user"]}],
    },
    "always": {
        "trigger": {"every_request": True},
        "target": {"tokens": 400},
        "keep": {"rounds": 1, "spans": 1, "first_user": True},
        "edits": [KEEP, CUT_SHORT, DROP],
    },
}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(policies={name: {**policy, "match": {"models": [f"*+{name}"]}} for name, policy in POLICIES.items()})


WAYS = [*((False, policy) for policy in (*POLICIES, "off")), *((True, policy) for policy in ("keep", "drop", "all"))]
REPLAYS = [
    pytest.param(recording, append, policy, id=f"{recording.name[:40]}-{'append' if append else 'resend'}-{policy}")
    for place, recording in enumerate(RECORDINGS)
    for number, (append, policy) in enumerate(WAYS)
    if (place + number) % 2 == 0  # every other recording for each way
]


@pytest.mark.parametrize(("recording", "append", "policy"), REPLAYS)
def test_a_recording(
    proxy: Proxy, upstream: Upstream, session: str, recording: Recording, append: bool, policy: str
) -> None:
    if append and not recording.appendable:
        append = False  # appending cannot produce two replies in a row, so resend as a stream
        session = f"{session}-streamed"
    # Over all policies, each way is tested with and without streams.
    stream = append == (policy in {"keep", "drop", "always"})
    if stream:
        recording = recording.streamable()
    given: dict[str, Any] = {"tools": recording.tools} if recording.tools else {}
    headers = {"x-context-policy": "off"} if policy == "off" else {}
    turns = list(recording.turns(append=append))
    upstream.load(session, [turn.reply for turn in turns])
    for turn in turns:
        answer = proxy.chat(
            session, turn.messages, f"script:{session}+{policy}", stream=stream, headers=headers, **given
        )
        assert answer.status_code == 200, answer.text
        assert not stream or answer.content.endswith(b"data: [DONE]\n\n")

    assert difference(proxy.messages(session), recording) is None
    receipts = proxy.exchanges(session)
    assert [row["status"] for row in receipts] == ["complete"] * len(turns)
    assert {row["kind"] for row in receipts[1:]} <= {"append" if append else "resend"}
    assert {row["policy"] for row in receipts} == {policy}
    assert unsteady([request.body for request in upstream.log], receipts) is None
    assert all(row["tokens_sent"] <= row["tokens_before"] for row in receipts)


def test_the_recordings_are_trimmed_at_all(proxy: Proxy, upstream: Upstream, session: str) -> None:
    """The other tests would pass trivially if the proxy trimmed nothing."""
    turns = list(Recording.read(DATA / f"{LONG}.json").turns(append=False))
    for policy in POLICIES:
        upstream.forget()
        upstream.load(session, [turn.reply for turn in turns])
        for turn in turns:
            proxy.chat(f"{session}-{policy}", turn.messages, f"script:{session}+{policy}")
        receipts = proxy.exchanges(f"{session}-{policy}")
        assert any(row["edits"] for row in receipts), policy
        assert unsteady([request.body for request in upstream.log], receipts) is None
        assert receipts[-1]["tokens_sent"] < receipts[-1]["tokens_before"]
        moves = sum(row["cut"] is not None and row["cut"]["moved"] for row in receipts)
        if policy == "always":
            assert moves == len(turns)
        else:
            assert 0 < moves < len(turns) / 2
