"""The ASGI application: opens and wires all services, routes each request to its endpoint, closes the services.

There is no global state: two applications in one process share no mutable data.
"""

from __future__ import annotations

import logging
import random
import re
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import anyio
import anyio.to_thread
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from proxy import __version__
from proxy.config import AcceptedFile, Loaded, Policies, Reload, RetentionSettings, Settings, Takes
from proxy.dashboard import router as dashboard
from proxy.dialects import dialect_named
from proxy.errors import InternalError, InvalidRequest, NotFound, PalimpsestError, StoreUnavailable
from proxy.models import Catalogue
from proxy.pipeline import COMPUTING, AppServices, ExchangeHandler, open_services
from proxy.server import operations, sessions
from proxy.server.authentication import Authenticator
from proxy.server.budgets import Budgets
from proxy.server.dependencies import Services
from proxy.server.endpoint import ClientConnection, DialectEndpoint
from proxy.server.limits import ANSWERS_PART, MemoryBudget, forget_way
from proxy.server.passthrough import Passthrough
from proxy.store import Masker, Store, Withholder, WriterProcess
from proxy.telemetry import Meters, set_level, tracing_class

if TYPE_CHECKING:  # it would import OpenTelemetry
    from proxy.telemetry.tracing import Tracing

_LOG: Final = logging.getLogger("palimpsest.app")
_AUDIT: Final = logging.getLogger("palimpsest.audit")
_SWEEP_SECONDS: Final = 30.0
_DAY_SECONDS: Final = 86_400
_FOLD_SECONDS: Final = 900.0
_INDEX_SECONDS: Final = 5.0
_INDEX_PAUSE: Final = 0.5
_FOLD_PAUSE: Final = 0.5  # seconds between two steps, since each step scans the rows
_TRACING_SECONDS: Final = 5.0  # how long the last flush to a collector may take at shutdown
_CHAT: Final = dialect_named("chat")
_RESPONSES: Final = dialect_named("responses")
_MESSAGES: Final = dialect_named("messages")
_ROUTES: Final = {  # the dialect of each path
    b"/v1/chat/completions": _CHAT,
    b"/chat/completions": _CHAT,
    b"/v1/responses": _RESPONSES,
    b"/responses": _RESPONSES,
    b"/v1/messages": _MESSAGES,
}
_BESIDE: Final = b"/v1/messages/"  # other paths of the Messages API, which are passed through
_OPENAI: Final = b"/v1/"
_DOUBLED: Final = b"/v1/v1/"  # the client adds /v1 to a base URL that has it already; no provider has such paths
_AZURE: Final = b"/openai/"
_DEPLOYMENT: Final = re.compile(rb"/openai/deployments/([^/]+)(/.+)")
_FAULT: Final = "a request failed because of a bug in the proxy"
_MISTAKE: Final = "The proxy has a bug. Its log has the details; please report it."
_TENANT_SECRET: Final = "tenant-names"  # noqa: S105 - the name of a secret
_MASK_SECRET: Final = "masks"  # noqa: S105 - the name of a secret
_CACHE_SECRET: Final = "cache-keys"  # noqa: S105 - the name of a secret


class Worker(Struct, frozen=True, kw_only=True):
    """One of several processes that serve together. It does not touch the exchanges of the others."""

    mark: str  # 8 hexadecimal digits; the ids of its exchanges end with them
    ended: tuple[str, ...] | None = ()
    """The marks of the workers that this one replaces: their pending exchanges are marked as interrupted. None: this
    process serves alone, so all pending exchanges were left by ended processes."""
    counts: Meters | None = None  # its metrics, in memory that the workers share
    accepted: AcceptedFile | None = None  # the settings file in force, shared by the workers
    budgets: mmap | None = None  # the use of budgets, in memory that the workers share
    number: int = 0  # its index among the workers, and its part of `budgets`


class Application:
    """The ASGI application of one process."""

    def __init__(
        self,
        settings: Settings,
        worker: Worker | None = None,
        loaded: Loaded | None = None,
        writer: WriterProcess | None = None,
        away: StoreUnavailable | None = None,
    ) -> None:
        """Open nothing yet; ASGI's `lifespan.startup` does.

        Without `worker` the process serves alone. `loaded` is the source of the settings, which is watched for changes
        while serving. `writer` is the process that writes exchanges. `away` is the reason if the store is unavailable
        at the start.
        """
        self._writer = writer
        self._away = away
        self._settings = settings
        self._loaded = loaded
        self._worker = worker or Worker(mark=secrets.token_hex(4), ended=None)
        self._api = _api(self._opened)
        if settings.dashboard.enabled:
            self._api.include_router(dashboard)
        self._services: Services | None = None

    def stop(self) -> None:
        """Report not ready from now on: `/readyz` answers 503."""
        if self._services is not None:
            self._services.stopping.set()

    def cut_off(self) -> None:
        """Cancel the requests that still run. Their clients get an error."""
        if self._services is not None:
            self._services.app.background.stop_requests()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call: an HTTP request or the lifespan."""
        if scope["type"] != "http":
            await self._api(scope, receive, send)
            return
        path: bytes = scope["raw_path"].partition(b"?")[0]
        path, model = _of_azure(path) if path.startswith(_AZURE) else (path, "")
        dialect = _ROUTES.get(path.removesuffix(b"/"))
        other = _MESSAGES if path.startswith(_BESIDE) else _CHAT
        connection = ClientConnection(scope, receive, send, dialect or other)
        try:
            if dialect is not None and scope["method"] == "POST":
                await self._endpoint.serve(connection, model)
                return
            if path.startswith(_OPENAI) and len(path) > len(_OPENAI) and not path.startswith(_DOUBLED):
                await self._passthrough.serve(connection, path[len(_OPENAI) - 1 :])
                return
        except Exception:  # noqa: BLE001 - the outermost handler: the client always gets an answer
            _LOG.exception(_FAULT)
            await connection.fail(InternalError(_MISTAKE))
            return
        try:
            self._authenticator.check_host(connection.first.get(b"host"))
        except PalimpsestError as why:
            await connection.fail(why)
            return
        try:
            # Routes see the quoted path, because an id may hold an encoded slash.
            await self._api({**scope, "path": path.decode("latin-1")}, receive, send)
        except Exception as why:  # noqa: BLE001 - the client has its answer, or sees that the connection broke
            if isinstance(why.__cause__, PalimpsestError):  # raised after the answer had begun
                _LOG.warning("the answer to %s broke off: %s", path.decode("latin-1"), why.__cause__.message)
            else:
                _LOG.exception(_FAULT)

    @asynccontextmanager
    async def _opened(self, api: FastAPI) -> AsyncGenerator[None]:
        settings, worker = self._settings, self._worker
        anyio.to_thread.current_default_thread_limiter().total_tokens = COMPUTING
        async with AsyncExitStack() as stack:
            app = await stack.enter_async_context(open_services(settings, worker.counts, self._writer, self._away))
            outage, store = app.outage, app.store
            authenticator = self._authenticator = Authenticator(
                settings.auth, await outage.secret(_TENANT_SECRET, 0), settings.server.allowed_origins
            )
            budget = MemoryBudget(settings.server)
            app.upstream.memory.most = budget.most // ANSWERS_PART
            app.upstream.memory.on_freed = budget.give_back
            if worker.ended != ():
                await outage.once_back(partial(give_up_pending, marks=worker.ended))
            secret = await outage.secret(_CACHE_SECRET, 1)
            if settings.store.content == "none":
                store.masker = Withholder(await outage.secret(_MASK_SECRET, 2))
            elif settings.store.mask:
                store.masker = Masker(settings.store.mask, await outage.secret(_MASK_SECRET, 2))
            handler = ExchangeHandler(settings, app, process_mark=worker.mark, cache_secret=secret)
            budgets = Budgets(
                settings.budgets,
                store,
                worker.budgets,
                worker.number,
                counts=app.counts,
                background=app.background,
                once_back=outage.once_back,
            )
            app.used_by = app.summaries.used_by = budgets.used if budgets.in_force else None
            reload = None
            if self._loaded is not None:
                takes = _takes(handler.policies, app, authenticator, budgets)
                reload = Reload(self._loaded, takes, worker.accepted)
            self._services = api.state.services = Services(
                settings=settings,
                app=app,
                authenticator=authenticator,
                policies=handler.policies,
                budget=budget,
                budgets=budgets,
                reload=reload,
                stopping=threading.Event(),
            )
            tracing: Tracing | None = None
            if settings.telemetry.otlp_endpoint is not None:
                tracing = await stack.enter_async_context(tracing_to(settings.telemetry.otlp_endpoint, worker.mark))
            self._endpoint = DialectEndpoint(self._services, handler, tracing)
            self._passthrough = Passthrough(self._services)
            if reload is not None:
                # A worker that replaces another one was given the settings of the parent's start: read them again.
                await stack.enter_async_context(reload.running(again=bool(worker.ended)))
            ended = worker.ended or ()
            await stack.enter_async_context(sweeping(store, settings.retention, ended, indexes=worker.number == 0))
            yield


def _of_azure(path: bytes) -> tuple[bytes, str]:
    """Return the `/v1` path for an Azure path, and the model if the path names a deployment (else empty)."""
    found = _DEPLOYMENT.fullmatch(path)
    if found is not None:
        return b"/v1" + found[2], unquote(found[1].decode("latin-1"))
    rest = path.removeprefix(_AZURE)
    return b"/v1/" + rest.removeprefix(b"v1/"), ""


@asynccontextmanager
async def tracing_to(endpoint: str, instance: str) -> AsyncGenerator[Tracing]:
    """Send traces and metrics to a collector until the block ends."""
    tracing = tracing_class()(endpoint, instance)
    try:
        yield tracing
    finally:
        with anyio.move_on_after(_TRACING_SECONDS, shield=True):
            await anyio.to_thread.run_sync(tracing.close, abandon_on_cancel=True)


@asynccontextmanager
async def sweeping(
    store: Store, retention: RetentionSettings, ended: Collection[str], *, indexes: bool
) -> AsyncGenerator[None]:
    """Run the periodic jobs of the store until the block ends.

    They delete sessions that are too old or too many, finish deletions, and fold old sums. All workers run them, and
    share the work through the database. Exchanges of the processes with the marks `ended` are marked as interrupted
    again and again, because a database may commit a write after the process that sent it was killed. Only the worker
    with `indexes` indexes texts, if that is configured.
    """
    seconds = _SWEEP_SECONDS
    if retention.days is not None:
        seconds = min(max(retention.days * _DAY_SECONDS / 20, 1.0), seconds)
    async with anyio.create_task_group() as group:
        group.start_soon(_again, partial(_fold, store), "statistics", _FOLD_SECONDS)
        group.start_soon(_again, store.finish_removals, "deletions", _FOLD_SECONDS)
        group.start_soon(_again, store.forget_deleted, "deletions", _SWEEP_SECONDS)
        if ended:
            group.start_soon(_again, partial(give_up_pending, store, ended), "pending exchanges", _SWEEP_SECONDS)
        if indexes and store.searches_index:
            group.start_soon(_again, partial(_index, store), "search", _INDEX_SECONDS)
        if retention.days is not None or retention.max_sessions is not None:
            group.start_soon(_again, partial(_delete, store, retention), "retention", seconds)
        try:
            yield
        finally:
            group.cancel_scope.cancel()


async def _again(work: Callable[[], Awaitable[None]], what: str, seconds: float) -> None:
    while True:
        await anyio.sleep(seconds * random.uniform(0.5, 1.0))  # noqa: S311 - spreads the workers over time
        try:
            await work()
        except PalimpsestError as why:
            _LOG.warning("%s: %s", what, why.message)
        except Exception:  # noqa: BLE001 - a background job must not end the process
            _LOG.exception("%s: failed, and is tried again", what)


async def _delete(store: Store, retention: RetentionSettings) -> None:
    before = None if retention.days is None else int(max(time.time() - retention.days * _DAY_SECONDS, 0) * 1000)
    number = 0
    while swept := await store.sweep(before=before, most=retention.max_sessions):
        number += swept
    if number:
        _AUDIT.info("retention: %d sessions deleted", number)


async def _fold(store: Store) -> None:
    left = True
    while left:
        left = await store.fold(int(time.time() * 1000))
        await anyio.sleep(_FOLD_PAUSE)  # leave the store to requests in between


async def _index(store: Store) -> None:
    is_whole = False
    while not is_whole:
        is_whole = await store.index_texts(_INDEX_PAUSE)
        await anyio.sleep(_INDEX_PAUSE)  # leave half of the time to requests


def _takes(policies: Policies, app: AppServices, authenticator: Authenticator, budgets: Budgets) -> Takes:
    """Return the functions that apply changed settings. Requests that have begun keep the old settings."""

    def take_policies(settings: Settings) -> None:
        policies.current = settings.policies

    def take_models(settings: Settings) -> None:
        app.knowledge.catalogue = Catalogue(settings.models)

    def take_level(settings: Settings) -> None:
        set_level(settings.telemetry.log_level)

    def take_keys(settings: Settings) -> None:
        authenticator.take(settings.auth)

    def take_budgets(settings: Settings) -> None:
        budgets.take(settings.budgets)
        app.used_by = app.summaries.used_by = budgets.used if budgets.in_force else None

    return {
        "policies": take_policies,
        "models": take_models,
        "telemetry.log_level": take_level,
        "auth.keys": take_keys,
        "auth.admin_key": take_keys,
        "budgets": take_budgets,
    }


async def give_up_pending(store: Store, marks: Collection[str] | None = None) -> None:
    """Mark the pending exchanges of the processes with these marks as interrupted. None means all pending ones."""
    interrupted = await store.interrupt_pending(int(time.time() * 1000), marks)
    if interrupted:
        _LOG.warning("%d exchanges were under way when a process ended: marked as interrupted", interrupted)


async def _refuse(request: Request, why: Exception) -> Response:
    status, headers = 0, None
    if isinstance(why, PalimpsestError | ClientDisconnect):  # the others are logged with their traceback
        forget_way(why)
    if isinstance(why, PalimpsestError):
        error = why
    elif isinstance(why, RequestValidationError):
        first = why.errors()[0]
        name = str(first["loc"][-1])
        error = InvalidRequest(f"{name}: {first['msg']}", param=name)
    elif isinstance(why, HTTPException):  # unknown path, or method not allowed
        status, headers = why.status_code, why.headers
        error = NotFound(
            f"There is no {request.method} {request.scope['path']} here. "
            "Chat completions are at /v1/chat/completions, responses at /v1/responses, messages at /v1/messages "
            "(clients of Anthropic's API add /v1 to their base URL), everything else of the provider is below /v1/, "
            "the stored sessions are at /sessions.",
            code="unknown_url",
        )
    elif isinstance(why, ClientDisconnect):  # the client is gone: the status does not matter
        return Response(status_code=400)
    else:  # `Application` logs it
        error = InternalError(_MISTAKE)
    if error.retry_after is not None:
        headers = {"retry-after": str(error.retry_after)}
    return Response(orjson.dumps(error.body()), status or error.status, headers, media_type="application/json")


def _api(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """Return the FastAPI application with all routes that are not served on raw ASGI."""
    api = FastAPI(
        title="Palimpsest",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would use the client's `Host`, whatever it is
    )
    for module in (operations, sessions):
        api.include_router(module.router)
    for kind in (PalimpsestError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        api.add_exception_handler(kind, _refuse)
    return api
