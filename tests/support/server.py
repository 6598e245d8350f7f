"""The proxy, served by uvicorn in the same way as by `palimpsest serve`, with its own port and store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx

from proxy.cli.serving import server_config
from proxy.config import Settings
from tests.support.listening import Listening
from tests.support.stores import empty_store
from tests.support.tongues import Tongue
from tests.support.upstream import Upstream


def settings_for(upstream: Upstream, folder: Path, sections: Mapping[str, Any]) -> Settings:
    """Return settings with this upstream and a store in `folder`; `sections` override them."""
    data: dict[str, Any] = {
        "upstream": {"base_url": upstream.base_url, "anthropic_base_url": upstream.base_url},
        "store": {"spool": str(folder / "spool")},
        "tokens": {"method": "estimate"},
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section} if isinstance(section, Mapping) else section
    if "url" not in data["store"]:
        data["store"]["url"] = empty_store(folder / "palimpsest.db")
    return Settings(**data)


class Proxy:
    """A running proxy, and a client for it."""

    def __init__(self, settings: Settings, **server: Any) -> None:
        self.settings = settings
        self._listening = Listening(server_config(settings, timeout_graceful_shutdown=2, **server))
        self.port = self._listening.port
        self.url = self._listening.url
        self.client = httpx.Client(
            base_url=self.url, trust_env=False, timeout=30, headers={"authorization": "Bearer sk-test"}
        )

    def __enter__(self) -> Self:
        self._listening.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self.client.close()
        self._listening.__exit__(*problem)

    def chat(self, session: str | None, messages: list[Any] | str, model: str = "echo", **given: Any) -> httpx.Response:
        """Send a chat completion. A string is sent as one user message.

        `headers` are sent as headers; all other keyword arguments are fields of the body.
        """
        headers = {**given.pop("headers", {}), **({} if session is None else {"x-session-id": session})}
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        body = {"model": model, "messages": said, **given}
        return self.client.post("/v1/chat/completions", json=body, headers=headers)

    def ask(
        self, tongue: Tongue, session: str | None, messages: list[Any], model: str = "echo", **given: Any
    ) -> httpx.Response:
        """Send chat messages in any of the APIs. Keyword arguments except `headers` are fields of the body."""
        headers = {
            **tongue.headers,
            **given.pop("headers", {}),
            **({} if session is None else {"x-session-id": session}),
        }
        body = tongue.body(messages, model, **given)
        return self.client.post(tongue.path, json=body, headers=headers)

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of a route; the answer must be a success."""
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def messages(self, session: str) -> list[dict[str, Any]]:
        """Return the stored messages of the session's current branch."""
        data: list[dict[str, Any]] = self.get(f"/sessions/{quote(session, safe='')}/messages")["data"]
        return data

    def exchanges(self, session: str) -> list[dict[str, Any]]:
        """Return the receipts of a session, the oldest first."""
        data: list[dict[str, Any]] = self.get(f"/sessions/{quote(session, safe='')}/exchanges", limit=1000)["data"]
        return data[::-1]
