"""Sessions of all three APIs in the dashboard: found, read, compared with what was sent, and tried in the lab."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

from tests.dashboard.conftest import SCRIPT
from tests.support.metered import Metered
from tests.support.server import Proxy, settings_for

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
LONG = "line of output\n" * 60
POLICY = {"trigger": {"tokens": 900}, "target": {"tokens": 400}, "edits": [{"type": "clear_tool_results", "keep": 0}]}


def called(dialect: str, turn: int) -> list[dict[str, Any]]:
    """Return a call of a tool and its result, in the form of each API."""
    name = f"call_{turn}"
    if dialect == "responses":
        made: dict[str, Any] = {"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"}
        return [made, {"type": "function_call_output", "call_id": name, "output": LONG}]
    if dialect == "messages":
        use: dict[str, Any] = {"type": "tool_use", "id": name, "name": "look", "input": {}}
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": name, "content": LONG}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    asked: dict[str, Any] = {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [asked]}
    return [call, {"role": "tool", "tool_call_id": name, "content": LONG}]


@pytest.fixture(scope="module")
def talked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy with a session of the same id in each API, and one of its own."""
    with Metered() as provider:
        sections = {"policies": {"default": POLICY}, "upstream": {"anthropic_base_url": provider.base_url}}
        settings = settings_for(provider, tmp_path_factory.mktemp("store"), sections)  # type: ignore[arg-type]
        with Proxy(settings) as proxy:
            for dialect, path in PATHS.items():
                for session in ("same", f"only-{dialect}"):
                    history: list[Any] = []
                    for turn in range(4):
                        history += [{"role": "user", "content": f"{dialect} {turn} {SCRIPT}"}, *called(dialect, turn)]
                        body: dict[str, Any] = {
                            "model": "m",
                            "input" if dialect == "responses" else "messages": history,
                        }
                        body |= {"max_tokens": 9} if dialect == "messages" else {}
                        answer = proxy.client.post(path, json=body, headers={"x-session-id": session})
                        assert answer.status_code == 200, answer.text
                        history = [*history, *said(dialect, answer.json())]
            yield proxy


def said(dialect: str, answer: Any) -> list[Any]:
    if dialect == "responses":
        return list(answer["output"])
    message = answer if dialect == "messages" else answer["choices"][0]["message"]
    return [{"role": "assistant", "content": message["content"]}]


@pytest.mark.parametrize("dialect", PATHS)
def test_a_session_is_found_and_shown_beside_what_was_sent(talked: Proxy, dialect: str) -> None:
    found = talked.client.get("/ui/sessions", params={"text": f"{dialect} 2"}).text
    links = {unescape(link) for link in re.findall(r'href="(/ui/sessions/same[^"]*)"', found)}
    assert len(links) == 2
    for link in links:
        page = talked.client.get(link)
        assert page.status_code == 200
        assert f"{dialect} 2" in page.text
        assert SCRIPT not in page.text
    shown = talked.client.get("/ui/sessions/same.json", params={"dialect": dialect}).json()
    assert [each["tokens_before"] > 0 for each in shown["requests"]] == [True] * 4
    assert {each["state"] for each in shown["messages"]} == {"sent", "shortened"}
    short = next(each for each in shown["messages"] if each["state"] == "shortened")
    assert "line of output" in short["text"]
    assert "cleared" in short["sent"]["text"]
    where = {"dialect": dialect, "exchange": shown["chosen"]["id"]}
    page = talked.client.get(f"/ui/sessions/same/messages/{short['node']}", params=where)
    assert page.status_code == 200
    assert "cleared" in page.text
    view = talked.client.get(f"/exchanges/{shown['chosen']['id']}/view", params={"diff": "true"}).json()
    assert [each["fate"] for each in view["diff"]] == [each["state"] for each in shown["messages"]]
    for ending in (".csv", ""):
        assert talked.client.get(f"/ui/sessions/same{ending}", params={"dialect": dialect}).status_code == 200


@pytest.mark.parametrize("dialect", PATHS)
def test_a_policy_is_tried_on_a_session(talked: Proxy, dialect: str) -> None:
    tried = talked.client.get("/ui/policies/lab.json", params={"session": f"only-{dialect}", "policy": "off"})
    assert tried.status_code == 200, tried.text
    assert talked.client.get("/ui/compare", params={"a": f"only-{dialect}", "b": "same"}).status_code == 200
