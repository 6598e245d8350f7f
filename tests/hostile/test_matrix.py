"""Every route with every credential: only its tenant and the administrator can read a session.

The routes come from the application itself, so that no new route is forgotten. A route whose path has a parameter
that this file does not know fails the tests until the parameter is added here.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import httpx
import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.routing import Mount, Route

from proxy.config import Settings
from proxy.server.app import _ROUTES, Application
from tests.e2e.conftest import Serve

KEYS: Final = {"anne": "key-of-anne-0123", "bob": "key-of-bob-45678", "admin": "key-of-the-admin"}
CREDENTIALS: Final = {
    "none": {},
    "empty": {"authorization": "Bearer"},
    "unknown": {"authorization": "Bearer key-of-a-stranger"},
    "other scheme": {"authorization": f"Basic {KEYS['anne']}"},
    "bob": {"authorization": f"Bearer {KEYS['bob']}"},
    "bob as anne": {"authorization": f"Bearer {KEYS['bob']}", "x-tenant": "anne", "x-forwarded-user": "anne"},
    "anne": {"authorization": f"Bearer {KEYS['anne']}"},
    "admin": {"authorization": f"Bearer {KEYS['admin']}"},
}
SECRET: Final = "the-launch-is-on-tuesday"  # only Anne and the administrator may read it
SESSION: Final = "annes-session"
OPEN: Final = frozenset({"/", "/healthz", "/readyz"})
"""Routes that need no key and show nothing of any tenant."""
LOGIN: Final = frozenset({"/ui/login", "/ui/static/{path}", "/ui/static/{name}"})
"""Routes that must be reachable without a key in order to log in."""
BODIES: Final = {"/sessions/{session}/fork": {"as": "a-copy"}, "/sessions/{session}/compact": {}}
CHANGING: Final = frozenset({"POST", "PUT", "PATCH"})
REFUSED: Final = frozenset({401, 403, 303})  # 303: to the page that asks for a key
_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")


def routes() -> list[tuple[str, str]]:
    """Return (method, path) of every route, those of the dialects included."""
    found = list(flat(Application(Settings())._api.routes))
    assert len(found) > 10
    return [*found, *[("POST", path.decode()) for path in _ROUTES]]


def flat(found: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield method and path of the routes of an application, its routers and mounted applications."""
    for route in single(found):
        if isinstance(route, Mount):
            yield from ((method, route.path + path) for method, path in flat(route.routes))
        else:
            yield from ((method, route.path) for method in sorted((route.methods or set()) - {"HEAD"}))


def single(found: Iterable[Any]) -> Iterator[Any]:
    """Yield the routes of an application and of its routers."""
    for route in found:
        if isinstance(route, Mount | Route | APIRoute):
            yield route
        else:
            yield from single(route.original_router.routes)


def called(dependant: Dependant) -> Iterator[Callable[..., Any] | None]:
    """Yield a route's function and those that it depends on."""
    yield dependant.call
    for each in dependant.dependencies:
        yield from called(each)


ROUTES: Final = routes()


class Asking:
    """A client that sends requests with different credentials."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def __call__(self, credential: str, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """Send a request with a credential; `body` is sent as JSON."""
        return self._client.request(method, path, headers=CREDENTIALS[credential] | headers, json=body)


@pytest.fixture(scope="module")
def ask(serve: Serve) -> Iterator[Asking]:
    listed = [{"key": KEYS[tenant], "tenant": tenant} for tenant in ("anne", "bob")]
    auth = {"mode": "keys", "keys": listed, "admin_key": KEYS["admin"]}
    proxy = serve(auth=auth, upstream={"api_key": "sk-shared"})
    with httpx.Client(base_url=proxy.url, trust_env=False, timeout=30) as client:
        yield Asking(client)


class Annes:
    """Anne's session with a secret in it. It is read again after a request that may have changed it."""

    def __init__(self, ask: Asking) -> None:
        self._ask = ask
        self._values: dict[str, str] | None = None
        self._before = b""

    def values(self) -> dict[str, str]:
        """Return values for the parameters of a path."""
        if self._values is None:
            self._values = self._made()
            self._before = self._export()
        return self._values

    def may_have_changed(self) -> None:
        """Read the session again next time."""
        self._values = None

    def has_changed(self) -> bool:
        """Tell whether the session has changed."""
        return self._export() != self._before

    def _export(self) -> bytes:
        return self._ask("anne", "GET", f"/sessions/{SESSION}/export").content

    def _made(self) -> dict[str, str]:
        ask = self._ask
        found = ask("anne", "GET", f"/sessions/{SESSION}/messages?meta=true")
        if found.status_code != 200 or not found.json()["data"]:
            body = {"model": "echo", "messages": [{"role": "user", "content": SECRET}]}
            answer = ask("anne", "POST", "/v1/chat/completions", body, **{"x-session-id": SESSION})
            assert answer.status_code == 200
            found = ask("anne", "GET", f"/sessions/{SESSION}/messages?meta=true")
        node, exchange = found.json()["data"][0]["node"], found.json()["data"][0]["exchange"]
        return {
            "session": SESSION,
            "exchange": exchange,
            "ref": node[:16],
            "node": node,
            "response": exchange,
            "name": "echo",
            "path": "nothing.css",
            "page": "overview",
            "suffix": "json",
            "tenant": "anne",
        }


@pytest.fixture(scope="module")
def annes(ask: Asking) -> Annes:
    return Annes(ask)


def filled(path: str, values: dict[str, str]) -> str:
    """Return a path with its parameters filled in."""
    missing = set(_PARAMETER.findall(path)) - set(values)
    assert not missing, f"{path} names {missing}: say in `Annes` what stands for it"
    return _PARAMETER.sub(lambda found: values[found[1]], path)


def cases() -> Iterator[Any]:
    for (method, path), credential in itertools.product(ROUTES, CREDENTIALS):
        yield pytest.param(method, path, credential, id=f"{method} {path} {credential}")


@pytest.mark.parametrize(("method", "path", "credential"), list(cases()))
def test_nobody_else_reads_or_changes_a_session(
    ask: Asking, annes: Annes, method: str, path: str, credential: str
) -> None:
    body = BODIES.get(path, {"model": "echo", "messages": [], "input": []}) if method in CHANGING else None
    answer = ask(credential, method, filled(path, annes.values()), body)
    assert answer.status_code != 500, answer.text
    if credential in {"anne", "admin"}:
        annes.may_have_changed()
        return
    assert SECRET not in answer.text + str(answer.headers)
    if path not in OPEN | LOGIN and not credential.startswith("bob"):
        assert answer.status_code in REFUSED, answer.text
    if "{session}" in path or "{exchange}" in path:
        assert answer.status_code in REFUSED | {404}, answer.text
    assert not annes.has_changed()


def test_a_list_names_the_own_sessions_only(ask: Asking, annes: Annes) -> None:
    annes.values()
    for path in [path for method, path in ROUTES if method == "GET" and not _PARAMETER.search(path)]:
        for query in ("", "?tenant=anne", "?limit=1000"):
            answer = ask("bob", "GET", path + query)
            assert SESSION not in answer.text, path
            assert SECRET not in answer.text, path


def test_no_route_waits_for_the_threads_that_compute() -> None:
    """FastAPI runs plain functions in these threads: `/healthz` would wait behind the settling of long replies."""
    for route in single(Application(Settings())._api.routes):
        if isinstance(route, APIRoute):
            asynchronous = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
            plain = [each for each in called(route.dependant) if not any(is_one(each) for is_one in asynchronous)]
            assert not plain, route.path
