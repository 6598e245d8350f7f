"""`stats`, `exchange show`, `key new`, `doctor`: commands for operators."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer

from proxy.cli.commands import AsJson, Config, Tenant, numbered, plain, print_table
from proxy.cli.sessions import Dialect, all_exchanges, find_session, line_of, require_store, with_store
from proxy.config import ConfigSource, Settings, UpstreamSettings, load
from proxy.errors import InvalidRequest, NotFound, PalimpsestError
from proxy.pipeline import open_services
from proxy.pipeline.inspection import SentView, exchange_view, view_document
from proxy.pipeline.statistics import statistics, stats_query
from proxy.store import ExchangeRow, SessionRow, SqliteFile, Store, address_of
from proxy.upstream import trusting

exchange_app = typer.Typer(help="Look at stored exchanges.", no_args_is_help=True, add_completion=False)
key_app = typer.Typer(help="Keys of clients.", no_args_is_help=True, add_completion=False)
exchange_app.callback()(lambda: None)  # a group, though it has one command
key_app.callback()(lambda: None)


def stats(
    config: Config = None,
    since: Annotated[str | None, typer.Option(help="2026-11-01, 2026-11-01T10:00Z, or 24h, 7d, 2w ago.")] = None,
    until: Annotated[str | None, typer.Option(help="As --since. Default: now.")] = None,
    group: Annotated[
        str, typer.Option(help="day, hour, model, policy, tenant, session, kind, status, dialect or miss.")
    ] = "day",
    tenant: Tenant = None,
    dialect: Dialect = None,
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what was asked, paid and saved. What was saved is reckoned against the same sessions untrimmed."""

    async def work(store: Store) -> dict[str, Any]:
        key = None if session is None else (await find_session(store, session, tenant, dialect)).key
        now = datetime.now(UTC)
        query = stats_query(now, group=group, since=since, until=until, tenant=tenant, session=key)
        return await statistics(store, query)

    told = with_store(config, work)
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    figures = ("requests", "sessions", "tokens", "sent", "cached")
    columns = (group, *figures, "requests $", "saved $", "summaries $", "net $")
    lines: list[list[str]] = []
    for row in (*told["data"], told["total"]):
        counts = [row[name] for name in ("requests", "sessions", "tokens_before", "tokens_sent", "tokens_cached")]
        dollars = [row[name] for name in ("cost", "cost_saved", "cost_summaries", "cost_saved_net")]
        lines.append([row["group"] or "-", *(f"{count:,}" for count in counts), *(f"{each:,.4f}" for each in dollars)])
    typer.echo(f"from {told['since'] or 'the beginning'} to {told['until']}")
    print_table(columns, lines, texts=(0,))
    total = told["total"]
    if total["priced"] < total["requests"]:
        unknown = numbered(total["requests"] - total["priced"], "request")
        typer.echo(f"The cost of {unknown} is not known.")


@exchange_app.command("show")
def show_exchange(
    exchange: Annotated[str, typer.Argument(help="Id of the exchange; with --request, of its session.")],
    config: Config = None,
    request: Annotated[int | None, typer.Option(min=1, help="Number of the session's request, from 1.")] = None,
    tenant: Tenant = None,
    dialect: Dialect = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show the history beside what was sent of it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the model was sent in an exchange."""

    async def run() -> tuple[ExchangeRow, SentView]:
        settings = load(config)
        require_store(settings)
        async with open_services(settings) as services:
            store = services.store
            if request is None:
                row = await store.exchange(exchange)
            else:
                row = await _numbered(store, await find_session(store, exchange, tenant, dialect), request)
            session = await store.session_at(row.session_key) if row is not None else None
            if row is None or session is None:
                raise NotFound(f"There is no exchange {exchange!r}. Of a session, name the request too: --request 17.")
            return row, await exchange_view(row, session, services)

    row, view = asyncio.run(run())
    if as_json:
        typer.echo(orjson.dumps(view_document(row, view, diff=diff)).decode())
        return
    typer.echo(
        plain(f"{row.id} of {row.session}, policy {row.policy}: ")
        + f"{row.tokens_sent:,} of {row.tokens_before:,} tokens"
    )
    if not diff:
        for number, message in enumerate((*view.instructions, *view.messages), start=1):
            typer.echo(plain(f"{number:>5} {line_of(message)}"))
        return
    for place, (entry, fate) in enumerate(zip(view.entries, view.fates, strict=True)):
        typer.echo(plain(f"{entry.position:>5} {fate:<10} {line_of(entry.message)}"))
        if fate != "sent":
            typer.echo(plain(f"{'':>17}{': '.join(filter(None, (view.edits[place], view.reasons[place])))}"))
        change = view.changes.get(place)
        if fate == "shortened" and change is not None and change.message is not None:
            typer.echo(plain(f"{'':>17}-> {line_of(change.message)}"))


async def _numbered(store: Store, session: SessionRow, number: int) -> ExchangeRow:
    """Return a request of a session by its number. The oldest is 1."""
    rows = await all_exchanges(store, session)
    if not rows:
        raise InvalidRequest(f"The session {session.id!r} has no requests.", param="--request")
    if number > len(rows):
        raise InvalidRequest(f"request must be 1 to {len(rows)}: the session has so many.", param="--request")
    return rows[number - 1]


@key_app.command("new")
def new_key(as_json: AsJson = False) -> None:
    """Make a key for a client. Put the hash into `auth.keys`; nobody can read the key from it."""
    key = f"pal-{secrets.token_urlsafe(32)}"
    digest = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    if as_json:
        typer.echo(json.dumps({"key": key, "hash": digest}))
        return
    typer.echo(f"key:  {key}\nhash: {digest}")


def doctor(config: Config = None, as_json: AsJson = False) -> None:
    """Check the configuration, the store and the upstreams."""
    source = ConfigSource(path=config)
    found = asyncio.run(_checks(source, source.read().settings))
    if as_json:
        typer.echo(json.dumps([{"check": name, "ok": ok, "detail": detail} for name, ok, detail in found]))
    else:
        for name, ok, detail in found:
            typer.echo(f"{'ok    ' if ok else 'FAILED'}  {name}: {plain(detail)}")
    if not all(ok for _, ok, _ in found):
        raise typer.Exit(1)


async def _checks(source: ConfigSource, settings: Settings) -> list[tuple[str, bool, str]]:
    """Run all checks. Returns name, success and finding of each."""
    read = str(source.file) if source.content() is not None else f"no {source.file}: defaults"
    policies = ", ".join(settings.policies) or "the built-in one"
    upstream = settings.upstream
    bases = [upstream.base_url, upstream.anthropic_base_url, *(route.base_url for route in upstream.routes)]
    reached = [await asyncio.to_thread(_reached, base, upstream) for base in dict.fromkeys(bases)]
    found = [("configuration", True, f"{read}; policies: {policies}"), ("store", *await _stored(settings))]
    if settings.store.on_failure == "forward":
        why = _unwritable(settings.store.spool)
        found.append(("spool", not why, why or f"{settings.store.spool} can be written"))
    found += [("upstream", *each) for each in reached]
    if settings.auth.mode == "none":
        found.append(("authentication", True, "none: this machine alone may use it"))
    else:
        admin = "an admin key" if settings.auth.admin_key is not None else "no admin key: nobody sees all tenants"
        found.append(("authentication", True, f"{settings.auth.mode}, {len(settings.auth.keys)} keys, {admin}"))
    return found


async def _stored(settings: Settings) -> tuple[bool, str]:
    address = address_of(settings.store.url)
    if isinstance(address, SqliteFile) and not address.path.exists():
        if not (folder := address.path.absolute().parent).exists():
            return False, f"the folder {folder} does not exist: make it, or name another one in store.url"
        if why := _unwritable(folder):
            return False, why
        return True, f"{address.path} is not there yet; `palimpsest serve` makes it"
    try:
        async with await Store.open(settings.store.url, migrate=False) as store:
            await store.ready()
            rows, following = await store.sessions(None, limit=1000)
            number = "more than 1,000 sessions" if following else numbered(len(rows), "session")
            return True, f"{number}, tables up to date"
    except PalimpsestError as why:
        return False, why.message


def _unwritable(folder: str | Path) -> str:
    """Return why no file can be created in a folder, or an empty text. The folder need not exist. Creates nothing."""
    path = Path(folder).absolute()
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written"


def _reached(base: str, upstream: UpstreamSettings) -> tuple[bool, str]:
    """Check whether a server answers at `base`, with the same proxy and CA as requests. No key is sent.

    An unreachable default address is not a failure if the configuration names only the other provider.
    """
    import httpx  # noqa: PLC0415 - only this command needs it

    try:
        verify = True if upstream.ca is None else trusting(upstream.ca)
        with httpx.Client(proxy=upstream.proxy, verify=verify, timeout=upstream.connect_timeout) as client:
            status = client.get(base).status_code
    except (httpx.HTTPError, OSError) as why:
        told = f"{base} cannot be reached: {why}"
        if base not in _unnamed(upstream):
            return False, told
        return True, f"{told}. It is the default, which matters only to clients of that provider"
    return True, f"{base} answers (HTTP {status} without a key)"


def _unnamed(upstream: UpstreamSettings) -> set[str]:
    """Return the default address of a provider that is not configured while the other one is, by address or key."""
    given = upstream.model_fields_set
    named = {name: not given.isdisjoint(fields) for name, fields in _PROVIDERS.items()}
    return {getattr(upstream, name) for name in named if any(named.values()) and not named[name]}


_PROVIDERS: Final = {
    "base_url": {"base_url", "api_key"},
    "anthropic_base_url": {"anthropic_base_url", "anthropic_api_key"},
}
"""The settings that configure a provider, by the setting of its address."""
