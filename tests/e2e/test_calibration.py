"""Limits are in the upstream's tokens, once the proxy has learnt its scale from usage: seen over HTTP."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy, settings_for
from tests.support.upstream import Upstream

JsonObject = dict[str, Any]

TIMES = 1.3
MODEL = f"say:ok+times:{TIMES}"
POLICY = {"trigger": {"tokens": 4_000}, "target": {"tokens": 2_000}, "edits": [{"type": "drop_oldest"}]}
_NUMBERS = count(1)


@pytest.fixture
def session() -> str:
    return f"calibration-{next(_NUMBERS)}"


@pytest.fixture
def proxy(serve: Serve) -> Proxy:
    """A proxy that has learnt nothing yet."""
    return serve(policies={"default": POLICY})


def text(number: int, words: int = 300) -> str:
    return " ".join(f"parcel {chr(97 + (number + place) % 26)} was moved" for place in range(words // 4))


def converse(proxy: Proxy, session: str, turns: int, model: str = MODEL) -> list[JsonObject]:
    """Resend a conversation that grows by about 400 tokens per turn; return the receipts."""
    said: list[JsonObject] = []
    for turn in range(turns):
        said.append({"role": "user", "content": text(turn)})
        answer = proxy.chat(session, said, model)
        assert answer.status_code == 200, answer.text
        said.append(answer.json()["choices"][0]["message"])
        receipt = proxy.exchanges(session)[-1]
        headers = (answer.headers["x-context-tokens-before"], answer.headers["x-context-tokens-sent"])
        assert headers == (str(receipt["tokens_before"]), str(receipt["tokens_sent"]))
    return proxy.exchanges(session)


def test_it_is_learnt_from_the_first_answer_on(proxy: Proxy, session: str) -> None:
    first, *later = converse(proxy, session, 4)
    assert first["calibration"] == 1.0
    ratio = first["usage"]["prompt_tokens"] / first["tokens_sent"]
    # The usage of fewer than 500 tokens is not learnt from.
    taught = next(place for place, row in enumerate(later) if row["calibration"] != 1.0)
    assert taught <= 1
    for row in later[taught:]:
        assert row["calibration"] == pytest.approx(ratio, abs=0.05)
        assert row["tokens_sent"] == pytest.approx(row["usage"]["prompt_tokens"], rel=0.03)


def test_the_trigger_fires_and_the_target_is_met_by_upstreams_count(proxy: Proxy, session: str) -> None:
    rows = converse(proxy, session, 25)
    moved = [row for row in rows if row["cut"] is not None and row["cut"]["moved"]]
    assert len(moved) >= 2
    for row in moved:
        assert row["usage"]["prompt_tokens"] <= 2_000 * 1.03
        fired = int(row["cut"]["fired"].split()[1])
        assert 4_000 < fired < 4_600
    assert all(row["usage"]["prompt_tokens"] <= 4_000 * 1.03 for row in rows)
    standing = [row for row in rows if row not in moved]
    assert max(row["usage"]["prompt_tokens"] for row in standing) > 3_400


def test_without_it_our_own_count_decides(serve: Serve, session: str) -> None:
    proxy = serve(policies={"default": POLICY}, tokens={"calibrate": False})
    rows = converse(proxy, session, 25)
    assert {row["calibration"] for row in rows} == {1.0}
    assert max(row["usage"]["prompt_tokens"] for row in rows) > 4_400
    assert max(row["tokens_sent"] for row in rows) <= 4_000


def test_each_model_has_a_scale_of_its_own(proxy: Proxy, session: str) -> None:
    many = converse(proxy, f"{session}-a", 4)
    few = converse(proxy, f"{session}-b", 4, "say:ok+times:0.8")
    assert few[0]["calibration"] == 1.0
    assert many[-1]["calibration"] / few[-1]["calibration"] == pytest.approx(TIMES / 0.8, rel=0.05)


def test_what_is_shown_is_what_is_then_sent(proxy: Proxy, upstream: Upstream, session: str) -> None:
    converse(proxy, session, 12)
    proxy.chat(session, "and now?", MODEL, headers={"x-session-mode": "append"})
    sent = proxy.exchanges(session)[-1]
    shown = proxy.get(f"/sessions/{session}/context")
    # The view now begins with what was sent; the reply was added since.
    assert shown["messages"][: len(upstream.last.json["messages"])] == upstream.last.json["messages"]
    assert shown["tokens_sent"] == pytest.approx(sent["usage"]["prompt_tokens"], rel=0.05)
    told = sum(line["tokens_before"] - line["tokens_after"] for line in shown["plan"])
    scale = sent["calibration"]
    assert told * scale == pytest.approx(shown["tokens_before"] - shown["tokens_sent"], rel=0.01)
    answer = proxy.chat(session, "go on", MODEL, headers={"x-session-mode": "append"})
    assert upstream.last.json["messages"][: len(shown["messages"])] == shown["messages"]
    assert int(answer.headers["x-context-tokens-sent"]) > shown["tokens_sent"]


def test_it_is_kept_with_the_session_and_so_the_same_in_every_process(
    upstream: Upstream, tmp_path: Any, session: str
) -> None:
    settings = settings_for(upstream, tmp_path, {"policies": {"default": POLICY}})
    with Proxy(settings) as proxy:
        converse(proxy, session, 4)
        proxy.chat(session, "again", MODEL, headers={"x-session-mode": "append"})
        before = proxy.exchanges(session)[-1]["calibration"]
        assert before > 1.0
    with Proxy(settings) as proxy:
        proxy.chat(session, "and again", MODEL, headers={"x-session-mode": "append"})
        assert proxy.exchanges(session)[-1]["calibration"] == pytest.approx(before, abs=0.02)
        proxy.chat(f"{session}-new", "hello", MODEL)
        assert proxy.exchanges(f"{session}-new")[-1]["calibration"] == 1.0
