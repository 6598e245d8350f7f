"""If the upstream refuses a trimmed request, the original is sent once."""

from __future__ import annotations

import re
from typing import Any

import pytest

from proxy.pipeline import settle
from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.tongues import CHAT, TONGUES, Tongue
from tests.support.upstream import Upstream

JsonObject = dict[str, Any]
POLICY = {
    "trigger": {"messages": 6},
    "target": {"tokens": 20},
    "keep": {"rounds": 1, "spans": 1},
    "edits": [{"type": "drop_oldest"}],
}
FUSSY = "echo+needs:question one"


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(policies={"default": POLICY})


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def converse(proxy: Proxy, session: str, turns: int = 3, tongue: Tongue = CHAT) -> list[JsonObject]:
    said: list[JsonObject] = []
    for text in ("question one", "question two", "question three")[:turns]:
        said.append(user(text))
        said += tongue.reply(proxy.ask(tongue, session, said).content, stream=False)
    return said


@pytest.mark.parametrize("tongue", TONGUES.values(), ids=TONGUES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("appends", [False, True])
def test_the_original_is_sent_and_the_session_is_not_trimmed_that_way_again(
    proxy: Proxy, upstream: Upstream, session: str, stream: bool, appends: bool, tongue: Tongue
) -> None:
    said = converse(proxy, session, tongue=tongue) if not appends else []
    for text in ("question one", "question two", "question three") if appends else ():
        assert proxy.ask(tongue, session, [user(text)]).status_code == 200
    for number in range(3):
        before = len(upstream.log)
        asked = user(f"more {number}")
        sent = [asked] if appends else [*said, asked]
        answer = proxy.ask(tongue, session, sent, model=FUSSY, stream=stream)
        assert answer.status_code == 200, answer.text
        arrived = upstream.log[before:]
        assert len(arrived) == (2 if number == 0 else 1)
        texts = [message["content"] for message in arrived[-1].chat]
        assert texts[0] == "question one"
        assert len(texts) == 7 + 2 * number
        assert ("the original was sent" in answer.headers.get("x-context-warning", "")) is (number == 0)
        assert answer.headers["x-context-tokens-before"] == answer.headers["x-context-tokens-sent"]
        said = proxy.messages(session)
    receipt = proxy.exchanges(session)[3]
    assert receipt["cut"]["moved"]
    assert receipt["cut"]["fired"] == "upstream refused the trimmed request"
    assert [warning for warning in receipt["warnings"] if "the original was sent" in warning]
    assert "refused" in receipt["timings"]


def test_requests_that_were_sent_again_untrimmed_are_counted(serve: Serve, session: str) -> None:
    proxy = serve(policies={"default": POLICY})

    def counted() -> float:
        found = re.search(r"^palimpsest_fail_open_total (\S+)$", proxy.client.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    said = converse(proxy, session)
    assert counted() == 0
    for number in range(2):
        said.append(user(f"more {number}"))
        said.append(proxy.chat(session, said, model=FUSSY).json()["choices"][0]["message"])
    assert counted() == 1  # the second one was not trimmed


def test_an_exchange_that_cannot_be_settled_as_it_ended_is_counted_once(
    serve: Serve, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, made, failures = serve(), settle.settlement_of, [RecursionError("too many levels")]

    def settlement_of(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return made(*given)

    monkeypatch.setattr(settle, "settlement_of", settlement_of)
    assert proxy.chat(session, [user("hi")]).status_code == 200
    figures = proxy.client.get("/metrics").text
    counted = re.findall(r"^palimpsest_requests_total\{(.*)\} (\S+)$", figures, re.MULTILINE)
    assert [(float(number), 'status="failed"' in labels) for labels, number in counted] == [(1.0, True)]
    assert "palimpsest_open_exchanges 0.0" in figures
    assert [row["status"] for row in proxy.exchanges(session)] == ["failed"]


def test_an_answer_is_not_withheld_where_its_figures_cannot_be_worked_out(
    serve: Serve, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = serve()

    def figures_of(*_: Any, **__: Any) -> Any:
        raise ValueError("no figures")

    monkeypatch.setattr(settle, "figures_of", figures_of)
    assert proxy.chat(session, [user("hi")]).status_code == 200
    assert "palimpsest_open_exchanges 0.0" in proxy.client.get("/metrics").text
    assert [row["status"] for row in proxy.exchanges(session)] == ["failed"]


@pytest.mark.parametrize("status", [401, 403, 407, 413, 429])
def test_who_may_not_ask_is_not_helped_by_another_body(
    proxy: Proxy, upstream: Upstream, session: str, status: int
) -> None:
    said = converse(proxy, session)
    before = len(upstream.log)
    answer = proxy.chat(session, [*said, user("more")], model=f"{FUSSY}+status:{status}")
    assert answer.status_code == status
    assert len(upstream.log) == before + 1


@pytest.mark.parametrize("tongue", TONGUES.values(), ids=TONGUES)
@pytest.mark.parametrize("stream", [False, True])
def test_where_the_original_is_refused_too_that_is_relayed_and_nothing_is_remembered(
    proxy: Proxy, upstream: Upstream, session: str, stream: bool, tongue: Tongue
) -> None:
    said = converse(proxy, session, tongue=tongue)
    before, asked = len(upstream.log), [*said, user("more")]
    answer = proxy.ask(tongue, session, asked, model="echo+needs:nothing like it+status:422", stream=stream)
    assert (answer.status_code, "Something is missing." in answer.text) == (422, True)
    assert "and the original too" in answer.headers["x-context-warning"]
    assert [len(each.json[tongue.listed]) for each in upstream.log[before:]] == [3, 7]
    again = proxy.ask(tongue, session, asked, stream=stream)
    assert again.headers["x-context-messages-sent"] == "3"


def test_a_refusal_of_what_was_not_trimmed_is_relayed(proxy: Proxy, upstream: Upstream, session: str) -> None:
    before = len(upstream.log)
    assert proxy.chat(session, "hello", model=FUSSY).status_code == 400
    assert len(upstream.log) == before + 1


@pytest.mark.parametrize("tongue", TONGUES.values(), ids=TONGUES)
def test_an_overflow_is_trimmed_further_and_never_opened(
    proxy: Proxy, upstream: Upstream, session: str, tongue: Tongue
) -> None:
    said = converse(proxy, session, tongue=tongue)
    before = len(upstream.log)
    answer = proxy.ask(tongue, session, [*said, user("word " * 200)], model="echo+ctx:100")
    assert answer.status_code == 400
    assert all(len(each.json[tongue.listed]) < 7 for each in upstream.log[before:])


def test_another_policy_begins_anew(serve: Serve, session: str) -> None:
    other = {**POLICY, "target": {"tokens": 30}}
    proxy = serve(policies={"default": POLICY, "other": {"match": {"models": ["other"]}, **other}})
    said = converse(proxy, session)
    said.append(user("more"))
    said.append(proxy.chat(session, said, model=FUSSY).json()["choices"][0]["message"])
    answer = proxy.chat(session, [*said, user("on")], headers={"x-context-policy": "other"})
    assert int(answer.headers["x-context-messages-sent"]) < 9


@pytest.mark.parametrize("tongue", TONGUES.values(), ids=TONGUES)
@pytest.mark.parametrize("appends", [False, True])
def test_reasoning_that_was_made_behind_the_view_of_another_policy_is_left_out(
    serve: Serve, upstream: Upstream, session: str, appends: bool, tongue: Tongue
) -> None:
    """This happens after a policy is renamed. A provider that checks the prefix of reasoning would refuse it."""
    tight = {"trigger": {"messages": 6}, "edits": [{"type": "keep_rounds", "last": 1}]}
    proxy = serve(policies={"tight": tight, "rest": {}}, upstream={"reasoning": "keep"})
    said: list[JsonObject] = []
    for number in range(9):
        before = len(upstream.log)
        asked = user(f"question {number}")
        answer = proxy.ask(
            tongue,
            session,
            [asked] if appends else [*said, asked],
            "say:ok+reason+prefix:400",
            headers={"x-context-policy": "tight" if number < 6 else "rest"},
        )
        assert answer.status_code == 200, answer.text
        assert len(upstream.log) - before == (2 if number == 6 else 1)
        assert ("behind another view" in answer.headers.get("x-context-warning", "")) is (number == 6)
        view = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}/view")["messages"]
        assert view[-len(upstream.last.json[tongue.listed]) :] == upstream.last.json[tongue.listed]
        said += [asked, *tongue.reply(answer.content, stream=False)]
    receipt = proxy.exchanges(session)[6]
    assert "behind another view" in receipt["cut"]["fired"]
    assert "unbound" in receipt["timings"]
    assert "refused" not in receipt["timings"]  # it is not counted as sent untrimmed


def test_a_refusal_of_reasoning_holds_where_leaving_it_out_does_not_help(
    serve: Serve, upstream: Upstream, session: str
) -> None:
    tight = {"trigger": {"messages": 6}, "edits": [{"type": "keep_rounds", "last": 1}]}
    proxy = serve(policies={"tight": tight, "rest": {}}, upstream={"reasoning": "keep"})
    append, rest = {"x-session-mode": "append"}, {"x-context-policy": "rest"}
    for number in range(6):
        proxy.chat(session, f"question {number}", "say:ok+reason+prefix:400", headers=append)
    before = len(upstream.log)
    answer = proxy.chat(session, "more", "say:ok+reason+prefix:400+fault:500", headers=append | rest)
    assert (answer.status_code, "could not be verified" in answer.text) == (400, True)
    assert "x-context-warning" not in answer.headers
    receipt = proxy.exchanges(session)[-1]
    assert (receipt["status"], receipt["cut"], len(upstream.log) - before) == ("failed", None, 2)
    assert "refused_again" in receipt["timings"]
