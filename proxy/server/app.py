"""The ASGI application: opens all services, wires them, sends each request to its endpoint, closes them.

There is no global state: two applications in one process share nothing that changes.
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
_FOLD_PAUSE: Final = 0.5  # seconds: each step looks through the rows
_TRACING_SECONDS: Final = 5.0  # how long a collector may take for what is left at the end
_CHAT: Final = dialect_named("chat")
_RESPONSES: Final = dialect_named("responses")
_MESSAGES: Final = dialect_named("messages")
_ROUTES: Final = {  # the dialect that is spoken at a path
    b"/v1/chat/completions": _CHAT,
    b"/chat/completions": _CHAT,
    b"/v1/responses": _RESPONSES,
    b"/responses": _RESPONSES,
    b"/v1/messages": _MESSAGES,
}
_BESIDE: Final = b"/v1/messages/"  # paths of the Messages API that are passed through
_OPENAI: Final = b"/v1/"
_DOUBLED: Final = b"/v1/v1/"  # a client that adds /v1 has a base URL with it: no provider has such paths
_AZURE: Final = b"/openai/"
_DEPLOYMENT: Final = re.compile(rb"/openai/deployments/([^/]+)(/.+)")
_FAULT: Final = "a request failed because of a bug in the proxy"
_MISTAKE: Final = "The proxy has a bug. Its log has the details; please report it."
_TENANT_SECRET: Final = "tenant-names"  # noqa: S105 - the name of a secret
_MASK_SECRET: Final = "masks"  # noqa: S105 - the name of a secret
_CACHE_SECRET: Final = "cache-keys"  # noqa: S105 - the name of a secret


class Worker(Struct, frozen=True, kw_only=True):
    """One process among several that serve together. It does not touch its siblings' exchanges."""

    mark: str  # 8 hexadecimal digits; the ids of its exchanges end with them
    ended: tuple[str, ...] | None = ()
    """The marks of the workers that it replaces: their pending exchanges are marked as interrupted. None: it serves
    alone, and all pending exchanges were left by an ended process."""
    counts: Meters | None = None  # where it counts, beside its siblings
    accepted: AcceptedFile | None = None  # where it finds, and keeps, the file of the settings that is in force
    budgets: mmap | None = None  # where it counts what tenants use, in the part of this number
    number: int = 0


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

        Without `worker` the process serves alone. `loaded` is the source of the settings: changes of it are followed
        while serving. `writer` writes exchanges. `away`: why the store could not be used just now.
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
        """Be ready for nothing new."""
        if self._services is not None:
            self._services.stopping.set()

    def cut_off(self) -> None:
        """End what is still running: its clients hear why."""
        if self._services is not None:
            self._services.app.background.stop_requests()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call: of HTTP, or of the server's life."""
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
        except Exception:  # noqa: BLE001 - the outermost place: the client gets an answer whatever happens
            _LOG.exception(_FAULT)
            await connection.fail(InternalError(_MISTAKE))
            return
        try:
            self._authenticator.check_host(connection.first.get(b"host"))
        except PalimpsestError as why:
            await connection.fail(why)
            return
        try:
            # Ids in paths may hold an encoded slash: routes see the path as it was quoted.
            await self._api({**scope, "path": path.decode("latin-1")}, receive, send)
        except Exception as why:  # noqa: BLE001 - the client has its answer, or sees that it broke off
            if isinstance(why.__cause__, PalimpsestError):  # it came after the answer had begun
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
                # A worker that takes the place of another one has the settings that the parent was started with.
                await stack.enter_async_context(reload.running(again=bool(worker.ended)))
            ended = worker.ended or ()
            await stack.enter_async_context(sweeping(store, settings.retention, ended, indexes=worker.number == 0))
            yield


def _of_azure(path: bytes) -> tuple[bytes, str]:
    """Return the path below `/v1` that a path of Azure's stands for, and the model of a deployment's."""
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
    """Delete sessions that are too old, or too many, and fold old sums, again and again until the block ends.

    All workers do; what one has done is not there for the others. Each gives up what the processes with the marks
    `ended` left pending: a database may store what a process asked for after that was killed. One of them `indexes`
    texts, if that is wanted.
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
        await anyio.sleep(seconds * random.uniform(0.5, 1.0))  # noqa: S311 - so that not all do it at once
        try:
            await work()
        except PalimpsestError as why:
            _LOG.warning("%s: %s", what, why.message)
        except Exception:  # noqa: BLE001 - what is done beside the requests must not end them
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
        await anyio.sleep(_FOLD_PAUSE)  # requests are stored in between


async def _index(store: Store) -> None:
    is_whole = False
    while not is_whole:
        is_whole = await store.index_texts(_INDEX_PAUSE)
        await anyio.sleep(_INDEX_PAUSE)  # half of the time is left to requests


def _takes(policies: Policies, app: AppServices, authenticator: Authenticator, budgets: Budgets) -> Takes:
    """Return the settings that can change while serving. Requests under way keep the old ones."""

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
    """Mark pending exchanges of the processes with these marks as interrupted; None: all pending ones."""
    interrupted = await store.interrupt_pending(int(time.time() * 1000), marks)
    if interrupted:
        _LOG.warning("%d exchanges were under way when a process ended: marked as interrupted", interrupted)


async def _refuse(request: Request, why: Exception) -> Response:
    status, headers = 0, None
    if isinstance(why, PalimpsestError | ClientDisconnect):  # others are logged with all they came through
        forget_way(why)
    if isinstance(why, PalimpsestError):
        error = why
    elif isinstance(why, RequestValidationError):
        first = why.errors()[0]
        name = str(first["loc"][-1])
        error = InvalidRequest(f"{name}: {first['msg']}", param=name)
    elif isinstance(why, HTTPException):  # there is no such path, or not by this method
        status, headers = why.status_code, why.headers
        error = NotFound(
            f"There is no {request.method} {request.scope['path']} here. "
            "Chat completions are at /v1/chat/completions, responses at /v1/responses, messages at /v1/messages "
            "(clients of Anthropic's API add /v1 to their base URL), everything else of the provider is below /v1/, "
            "the stored sessions are at /sessions.",
            code="unknown_url",
        )
    elif isinstance(why, ClientDisconnect):  # nobody reads it
        return Response(status_code=400)
    else:  # it is logged by `Application`
        error = InternalError(_MISTAKE)
    if error.retry_after is not None:
        headers = {"retry-after": str(error.retry_after)}
    return Response(orjson.dumps(error.body()), status or error.status, headers, media_type="application/json")


def _api(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """Return the FastAPI application with the routes that are not on raw ASGI."""
    api = FastAPI(
        title="Palimpsest",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # it would lead to whatever name the client calls us by
    )
    for module in (operations, sessions):
        api.include_router(module.router)
    for kind in (PalimpsestError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        api.add_exception_handler(kind, _refuse)
    return api
