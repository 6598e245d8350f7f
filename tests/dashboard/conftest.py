"""A proxy with sessions, and a real browser that opens its pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, sync_playwright

from tests.e2e.conftest import Serve, _direct, provider, serve, session, upstream
from tests.support.server import Proxy

__all__ = ["_direct", "provider", "serve", "session", "upstream"]

TEAM_A, TEAM_B, ADMIN = "team-a-key-0123456789", "team-b-key-0123456789", "admin-key-0123456789abc"
SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
HOSTILE = f"{SCRIPT} \x1b[31mred\x1b[0m \u202egnirts desrever\u202c ]]> {{{{ 7 * 7 }}}}"
MODELS = [
    {
        "match": ["echo", "say:*"],
        "context_window": 16_000,
        "prices": {"input": 2.5, "cached_read": 0.25, "output": 10.0},
        "cache": {"matching": "blocks", "minimum": 128, "block": 64},
    }
]
POLICIES = {
    "agents": {
        "match": {"models": ["echo", "say:*"]},
        "trigger": {"tokens": 3_000},
        "target": {"tokens": 1_500},
        "keep": {"rounds": 1, "spans": 2},
        "edits": [{"type": "clear_tool_results", "keep": 2, "digest_chars": 120}, {"type": "drop_oldest"}],
    },
    "gentle": {
        "match": {"models": ["never"]},
        "trigger": {"tokens": 9_000},
        "target": {"tokens": 6_000},
        "edits": [{"type": "drop_oldest"}],
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ').capitalize()} of the warehouse, by its number.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
        },
    }
    for name in ("read_shelf", "move_parcel", "print_label")
]


def agent_run(proxy: Proxy, session: str, turns: int, headers: dict[str, str] | None = None) -> None:
    """Run an agent that resends its whole history, until the policy has trimmed it."""
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "You look after a warehouse. Answer in one sentence."},
        {"role": "user", "content": "Which shelves hold parcels for Basel? Look at each."},
    ]
    for turn in range(turns):
        answer = proxy.chat(session, said, tools=TOOLS, headers=headers or {})
        assert answer.status_code == 200, answer.text
        call = {"name": "read_shelf", "arguments": f'{{"number": {turn}}}'}
        calls = [{"id": f"call_{session}_{turn}", "type": "function", "function": call}]
        shelf = "\n".join(f"shelf {turn}, place {place}: parcel {turn * 31 + place} for Basel" for place in range(40))
        said += [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{session}_{turn}", "content": shelf},
        ]
        if turn % 4 == 3:
            said += [
                {"role": "assistant", "content": f"Shelves up to {turn} are read."},
                {"role": "user", "content": f"Go on from shelf {turn + 1}."},
            ]
    assert proxy.chat(session, said, tools=TOOLS, headers=headers or {}).status_code == 200


def fill(proxy: Proxy) -> None:
    """Create the conversations that the pages show."""
    agent_run(proxy, "warehouse", 16)
    agent_run(proxy, "night shift", 5)
    for number in range(3):
        talk = [{"role": "user", "content": f"Question {number}: where is my parcel?"}]
        assert proxy.chat(f"desk-{number}", talk).status_code == 200
    proxy.chat("desk-0", "And by when?", headers={"x-session-mode": "append", "x-agent-name": "clerk"})
    hostile = [{"role": "system", "content": HOSTILE}, {"role": "user", "content": HOSTILE}]
    assert proxy.chat('"><script>window.hacked = 1</script>', hostile).status_code == 200


@pytest.fixture(scope="module")
def filled(serve: Serve) -> Proxy:
    """A proxy without authentication that holds conversations."""
    proxy = serve(models=MODELS, policies=POLICIES)
    fill(proxy)
    return proxy


@pytest.fixture(scope="module")
def guarded(serve: Serve) -> Proxy:
    """A proxy with two tenants, who have sessions, and an administrator."""
    keys = [{"key": TEAM_A, "tenant": "team-a"}, {"key": TEAM_B, "tenant": "team-b"}]
    proxy = serve(models=MODELS, policies=POLICIES, auth={"mode": "keys", "keys": keys, "admin_key": ADMIN})
    for key, name in ((TEAM_A, "alpha"), (TEAM_B, "beta")):
        headers = {"authorization": f"Bearer {key}"}
        assert proxy.chat(name, f"hello from {name}", headers=headers).status_code == 200
        assert proxy.chat("shared", f"ours, says {name}", headers=headers).status_code == 200
    return proxy


def _chromium() -> str | None:
    """Return the path of the installed Chromium, or None if there is none."""
    named = os.environ.get("CHROMIUM")  # noqa: TID251 - a setting of the tests, not of the program
    places = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))
    return named or next(filter(None, places), None)


@pytest.fixture(scope="module")  # while it is open, an event loop runs in this thread, so that no other can
def browser() -> Iterator[Browser]:
    path = _chromium()
    if path is None:
        pytest.skip("no Chromium is on this machine: install the package chromium, or name one in $CHROMIUM")
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=path, args=[*flags, "--disable-sync", "--no-first-run"])
        yield browser
        browser.close()


class Watched:
    """A page of the browser, and all errors on it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        page.on("console", lambda line: self.problems.append(line.text) if line.type in {"error", "warning"} else None)
        page.on("requestfailed", self._failed)

    def _failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # a newer request replaced it
            self.problems.append(f"{request.failure}: {request.url}")


@contextmanager
def watched(context: BrowserContext) -> Iterator[Watched]:
    """Open a page. At the end, check that it had no errors and that no text ran as a script."""
    found = Watched(context.new_page())
    yield found
    assert found.page.evaluate("window.hacked") is None
    assert found.problems == []
    found.page.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce") as context:
        context.set_default_timeout(10_000)
        yield context
