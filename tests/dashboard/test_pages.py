"""What the pages say, in each of their forms, read without a browser."""

from __future__ import annotations

import asyncio
import csv
import io
import re
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from proxy.store import downgrade
from tests.dashboard.conftest import HOSTILE, POLICIES, SCRIPT, agent_run
from tests.e2e.conftest import Serve
from tests.support.served import ROOT
from tests.support.server import Proxy
from tests.support.waiting import until

PAGES = (
    "/ui",
    "/ui/cache",
    "/ui/sessions",
    "/ui/sessions/warehouse",
    "/ui/compare?a=warehouse&b=night%20shift",
    "/ui/policies",
    "/ui/policies/lab?session=warehouse&policy=gentle",
)
STRANGE = "%22%3E%3Cscript%3Ewindow%2Ehacked%20%3D%201%3C%2Fscript%3E"


def with_ending(path: str, ending: str) -> str:
    bare, question, query = path.partition("?")
    return f"{bare}{ending}{question}{query}"


class Outline(HTMLParser):
    """Everything in a page that could run or load something, and its structure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def found(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.mark.parametrize("path", PAGES)
def test_nothing_on_a_page_is_inline_or_from_elsewhere(filled: Proxy, path: str) -> None:
    answer = filled.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Outline(answer.text)
    assert page.found("style") == []
    for name, attributes in page.tags:
        assert not [each for each in attributes if each == "style" or each.startswith("on")], name
        for place in (attributes.get("src"), attributes.get("href"), attributes.get("action")):
            assert place is None or place.startswith(("/ui", "#")), place
    assert all(attributes.get("src") for attributes in page.found("script"))
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", PAGES)
def test_each_page_is_there_as_json_and_as_csv(filled: Proxy, path: str) -> None:
    data = filled.client.get(with_ending(path, ".json"))
    assert data.headers["content-type"] == "application/json"
    assert isinstance(data.json(), dict)
    table = filled.client.get(with_ending(path, ".csv"))
    assert table.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.reader(io.StringIO(table.text)))
    assert len(rows) > 1
    assert len({len(row) for row in rows}) == 1


def test_what_others_made_is_as_they_published_it() -> None:
    listed = dict(re.findall(r"\| `([\w.]+)` \| .* \| `([0-9a-f]{64})` \|", (ROOT / "THIRD_PARTY.md").read_text()))
    assert len(listed) == 3
    folder = ROOT / "proxy" / "dashboard" / "static"
    assert {name: sha256((folder / name).read_bytes()).hexdigest() for name in listed} == listed


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dashboard.css", "text/css; charset=utf-8"),
        ("dashboard.js", "text/javascript; charset=utf-8"),
        ("icon.svg", "image/svg+xml; charset=utf-8"),
    ],
)
def test_files_have_their_pinned_types(filled: Proxy, name: str, kind: str) -> None:
    answer = filled.client.get(f"/ui/static/{name}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "immutable" in answer.headers["cache-control"]
    assert filled.client.get("/ui/static/..%2Froutes.py").status_code == 404


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/ui/sessions?sort=oldest", "newest, largest, dearest, saved"),
        ("/ui/sessions?limit=0", "greater than or equal to 1"),
        ("/ui/sessions?limit=1000", "less than or equal to 200"),
        ("/ui/sessions?after=nonsense", "next"),
        ("/ui/sessions?order=newest", "It can be: after, agent, deleted, failed, limit, min_tokens, model, q"),
        ("/ui/sessions?since=yesterday", "a time ago (24h, 7d, 2w)"),
        ("/ui?since=yesterday", "a time ago (24h, 7d, 2w)"),
        ("/ui?since=2026-11-02&until=2026-11-01", "until must be later than since"),
        ("/ui?group=colour", "group can be: day, hour, model"),
        ("/ui/cache?since=soon", "a time ago (24h, 7d, 2w)"),
        ("/ui/sessions/warehouse?request=99", "1 to 17"),
        ("/ui/sessions/warehouse?start=-1", "greater than or equal to 0"),
        ("/ui/compare?a=warehouse", "b"),
    ],
)
def test_a_wrong_question_is_told_what_is_allowed(filled: Proxy, path: str, allowed: str) -> None:
    page = filled.client.get(path)
    assert page.status_code == 400
    assert allowed.replace("'", "&#39;") in page.text
    assert "<h1>Not possible</h1>" in page.text
    data = filled.client.get(with_ending(path, ".json"))
    assert data.status_code == 400
    assert allowed in data.json()["error"]["message"]


def test_a_wrong_address_says_which_pages_there_are(filled: Proxy) -> None:
    answer = filled.client.get("/ui/nothing")
    assert answer.status_code == 404
    assert "/ui/policies" in answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert filled.client.get("/ui/").headers["location"] == "/ui"


def test_the_list_pages_on(filled: Proxy) -> None:
    first = filled.client.get("/ui/sessions.json?limit=2").json()
    second = filled.client.get(f"/ui/sessions.json?limit=2&after={first['next']}").json()
    everything = filled.client.get("/ui/sessions.json").json()["sessions"]
    assert [each["id"] for each in first["sessions"] + second["sessions"]] == [each["id"] for each in everything[:4]]
    table = filled.client.get("/ui/sessions.csv?limit=2&sort=newest")
    rows = [line.split(",")[0] for line in filled.client.get(table.links["next"]["url"]).text.splitlines()[1:]]
    assert rows == [each["id"] for each in second["sessions"]]


def session_at(proxy: Proxy, request: int) -> Any:
    return proxy.client.get(f"/ui/sessions/warehouse.json?request={request}").json()


def test_the_slider_shows_what_the_model_saw(filled: Proxy) -> None:
    before, after = session_at(filled, 7), session_at(filled, 12)
    assert {each["state"] for each in before["messages"]} == {"sent"}
    assert before["runs"] == [{"state": "sent", "start": 0, "stop": before["window"]["total"]}]
    assert after["chosen"]["cut"]["moved"]
    assert [each["state"] for each in after["messages"][:10]] == ["dropped"] * 10
    assert after["messages"][0]["reason"]
    short = next(each for each in after["messages"] if each["state"] == "shortened")
    assert short["tokens_sent"] < short["tokens"]
    assert short["sent"]["text"].startswith("[cleared ")
    saved = sum(each["tokens"] - each["tokens_sent"] for each in after["messages"])
    chosen = after["chosen"]
    assert chosen["tokens_before"] - chosen["tokens_sent"] == pytest.approx(saved * chosen["calibration"], rel=0.02)


def test_the_states_are_those_of_the_request_that_the_provider_got(filled: Proxy) -> None:
    for request in (8, 12, 17):
        shown = session_at(filled, request)
        kept = [each for each in shown["messages"] if each["state"] in {"sent", "shortened"}]
        assert len(kept) + len(shown["instructions"]["messages"]) == shown["chosen"]["messages_sent"]


def test_a_message_page_tells_the_difference(filled: Proxy) -> None:
    shown = session_at(filled, 8)
    short = next(each for each in shown["messages"] if each["state"] == "shortened")
    path = f"/ui/sessions/warehouse/messages/{short['node']}?exchange={shown['chosen']['id']}"
    page = filled.client.get(path).text
    assert "<del>" in page
    assert "<ins>" in page
    pieces = filled.client.get(with_ending(path, ".json")).json()["pieces"]
    assert "".join(each["text"] for each in pieces if each["kind"] != "new") == short["text"] or short["more"]


def test_branches_tell_where_they_leave(filled: Proxy) -> None:
    assert filled.chat("forked", "one").status_code == 200
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "echo: one"}]
    for text in ("two", "another two"):
        assert filled.chat("forked", [*said, {"role": "user", "content": text}]).status_code == 200
    branches = filled.client.get("/ui/sessions/forked.json").json()["branches"]
    assert [(each["current"], each["shared"], each["depth"]) for each in branches] == [(True, 4, 4), (False, 2, 4)]


def test_a_session_whose_only_request_failed_can_be_read(filled: Proxy) -> None:
    assert filled.chat("broken", "hello", model="fault:500").status_code == 500
    page = filled.client.get("/ui/sessions/broken")
    assert page.status_code == 200
    assert "failed" in page.text


def test_two_sessions_are_compared(filled: Proxy) -> None:
    found = filled.client.get("/ui/compare.json?a=warehouse&b=night%20shift").json()
    assert found["common"] == 1  # the question; the calls have ids of their own
    assert {each["figure"] for each in found["figures"]} >= {"requests", "tokens_sent", "cost", "cost_saved"}


# ---------------------------------------------------------------------------------------------------- hostile texts


def test_hostile_texts_are_shown_as_texts(filled: Proxy) -> None:
    pages = [filled.client.get(path) for path in ("/ui/sessions", f"/ui/sessions/{STRANGE}")]
    for page in pages:
        assert page.status_code == 200
        assert SCRIPT not in page.text
        assert "<script>window" not in page.text
        assert not [character for character in "\x1b\u202e\u202c" if character in page.text]
    page = pages[1]
    assert "␛[31mred" in page.text
    assert "[U+202E]" in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert len(Outline(page.text).found("img")) == 0


def test_hostile_texts_stay_what_they_are_in_json_and_are_no_formulas_in_csv(filled: Proxy) -> None:
    data = filled.client.get(f"/ui/sessions/{STRANGE}.json").json()
    assert data["messages"][0]["text"] == HOSTILE
    assert filled.chat("=1+1", "=cmd|'/c calc'!A1").status_code == 200
    rows = list(csv.DictReader(io.StringIO(filled.client.get("/ui/sessions.csv").text)))
    assert "'=1+1" in {row["id"] for row in rows}
    said = list(csv.DictReader(io.StringIO(filled.client.get("/ui/sessions/%3D1%2B1.csv").text)))
    assert said[0]["text"] == "'=cmd|'/c calc'!A1"


def test_a_very_long_line_is_shown_in_part(filled: Proxy) -> None:
    line = "x" * 10_000_000
    assert filled.chat("long", line, model="say:ok").status_code == 200
    page = filled.client.get("/ui/sessions/long")
    assert len(page.content) < 100_000
    assert "9,998,800 more characters" in page.text
    node = filled.client.get("/ui/sessions/long.json").json()["messages"][0]["node"]
    whole = filled.client.get(f"/ui/sessions/long/messages/{node}")
    assert len(whole.content) < 1_000_000


def test_pages_stay_small_whatever_is_said(filled: Proxy) -> None:
    said = [{"role": role, "content": "\u202e" * 200_000} for role in ("user", "assistant")]
    assert filled.chat("unseen", [*said * 10, said[0]], model="say:ok").status_code == 200
    node = filled.client.get("/ui/sessions/unseen.json").json()["messages"][0]["node"]
    for path in ("sessions/unseen", f"sessions/unseen/messages/{node}", "policies/lab?session=unseen&policy=gentle"):
        page = filled.client.get(f"/ui/{path}")
        assert page.status_code == 200
        assert len(page.content) < 1_000_000, path


def test_sessions_are_compared_whatever_their_ids_are(filled: Proxy) -> None:
    for name in ("a%E2%80%AEb", "50%25"):
        assert filled.chat(name, "hello").status_code == 200
    page = filled.client.get("/ui/sessions").text
    assert 'value="a%E2%80%AEb"' in page
    for one, other in (("a%25E2%2580%25AEb", "50%25"), ("a%E2%80%AEb", "50%25")):
        found = filled.client.get(f"/ui/compare.json?a={one}&b={other}").json()
        assert [each["id"] for each in found["pair"]] == ["a\u202eb", "50%"]


def test_an_id_with_an_ending_or_a_slash_is_found(filled: Proxy) -> None:
    for name in ("report.json", "a/b.csv", "50%"):
        assert filled.chat(name, "hello").status_code == 200
    for path in ("report%2Ejson", "a%2Fb%2Ecsv", "50%25"):
        assert filled.client.get(f"/ui/sessions/{path}").status_code == 200
        assert "messages" in filled.client.get(f"/ui/sessions/{path}.json").json()


def test_a_session_of_dots_is_linked_as_something_that_browsers_leave_alone(filled: Proxy) -> None:
    for name, segment in ((".", "%2E%7F"), ("..", "%2E%2E%7F")):
        assert filled.chat(name, "hello of dots").status_code == 200
        assert f'href="/ui/sessions/{segment}"' in filled.client.get("/ui/sessions").text
        assert filled.client.get(f"/ui/sessions/{segment}.json").json()["session"]["id"] == name
        page = filled.client.get(f"/ui/sessions/{segment}").text
        assert "hello of dots" in page
        assert f"/ui/sessions/{segment}/delete" in page
        gone = filled.client.post(f"/ui/sessions/{segment}/delete")
        assert gone.status_code == 303
        assert filled.client.get(f"/ui/sessions/{segment}").status_code == 404


def test_what_a_policy_would_have_done_is_told_where_it_only_observes(serve: Serve) -> None:
    proxy = serve(policies={"watching": {**POLICIES["agents"], "match": {"models": ["*"]}, "mode": "observe"}})
    agent_run(proxy, "depot", 12)
    shown = proxy.client.get("/ui/sessions/depot.json").json()
    observed = shown["chosen"]["observed"]
    assert observed["tokens_sent"] < shown["chosen"]["tokens_sent"]
    assert shown["chart"]["trims"] == []
    page = proxy.client.get("/ui/sessions/depot").text
    assert f"would have sent {observed['tokens_sent']:,}, by {', '.join(observed['edits'])}" in page


def test_while_the_store_is_away_a_page_says_so(serve: Serve) -> None:
    proxy = serve()
    asyncio.run(downgrade(proxy.settings.store.url, "base"))
    until(lambda: proxy.client.get("/readyz").status_code == 503, "it is noticed")
    for path in ("/ui", "/ui/sessions/depot", "/ui/login"):
        page = proxy.client.get(path)
        assert (page.status_code, page.headers["content-type"]) == (503, "text/html; charset=utf-8")
        assert "palimpsest upgrade" in page.text
    assert proxy.client.get("/ui.json").json()["error"]["code"] == "store_unavailable"


def test_an_answer_that_broke_off_is_marked_as_one(filled: Proxy) -> None:
    assert filled.chat("torn", "hello there", "fault:error-event", stream=True).status_code == 200
    assert filled.chat("torn", "hello again", "echo", headers={"x-session-mode": "append"}).status_code == 200
    marked = [filled.client.get(f"/ui/sessions/torn?request={number}").text.count("broke off") for number in (1, 2)]
    assert marked == [1, 1]  # as the answer to the first request, and as a message of the second


# ----------------------------------------------------------------------------------------------------------- the lab


def test_the_lab_compares_with_todays_policy(filled: Proxy) -> None:
    before = filled.client.get("/sessions/warehouse").json()
    result = filled.client.get("/ui/policies/lab.json?session=warehouse&policy=off").json()["result"]
    assert result["names"] == ["agents", "baseline:none"]
    none, today = result["figures"]
    assert none["policy"] == "no trimming"
    assert today["tokens_sent"] < none["tokens_sent"]
    assert today["cost"] > 0
    assert 0 <= today["recall"] <= 1
    assert result["views"][0]["tokens_sent"] < result["views"][1]["tokens_sent"]
    assert filled.client.get("/sessions/warehouse").json() == before


def test_what_a_policy_does_on_arrival_is_shown_and_the_lab_counts_it_once(serve: Serve) -> None:
    short = {"on_arrival": [{"type": "truncate_tool_output", "max_lines": 2}]}
    hard = {"match": {"models": ["never"]}, "trigger": {"tokens": 300}, "target": {"tokens": 100}}
    proxy = serve(policies={"hard": {**hard, "edits": [{"type": "drop_oldest"}]}, "short": short})
    assert "on arrival: truncate_tool_output" in proxy.client.get("/ui/policies").text
    assert proxy.client.get("/ui/policies.json").json()["policies"][1]["on_arrival"] == ["truncate_tool_output"]
    agent_run(proxy, "depot", 24)
    assert "The last ones:" in proxy.client.get("/ui/sessions/depot").text  # of more than 40 runs
    agent_run(proxy, "yard", 6)
    assert "The last ones:" not in proxy.client.get("/ui/sessions/yard").text
    found = proxy.client.get("/ui/policies/lab.json?session=yard&policy=hard").json()["result"]
    view = found["views"][1]
    assert {line["edit"] for line in view["plan"]} == {"truncate_tool_output", "drop_oldest"}
    assert view["changes"] == len({line["position"] for line in view["plan"]}) < view["steps"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("trigger: {tokens: -1}", "trigger.tokens"),
        ("edits: [{type: nothing}]", "unknown type"),
        ("a: &x [1]\nb: *x", "repeat"),
        ("[" * 60 + "]" * 60, "levels"),
        ("{", "not YAML"),
        ("just words", "Write a policy"),
        ("extends: nobody", "unknown policy"),
    ],
)
def test_a_typed_policy_is_checked(filled: Proxy, typed: str, said: str) -> None:
    headers = {"authorization": "Bearer anything"}
    answer = filled.client.post("/ui/policies/lab", data={"session": "warehouse", "typed": typed}, headers=headers)
    assert answer.status_code == 400
    assert said in answer.text
    assert f"{typed}</textarea>" in unescape(answer.text)  # nobody has to type it again
