"""`sessions …`: the stored sessions, read from the store directly, whether the proxy runs or not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import orjson
import typer
from rich.console import Console
from rich.table import Table

from proxy.cli.options import AsJson, Config, Tenant
from proxy.config import Policies, Settings, load
from proxy.errors import InvalidRequest, NotFound, StoreUnavailable
from proxy.pipeline import (
    DEFAULT_TENANT,
    compact,
    opened,
    present,
    read_lines,
    session_document,
    session_id_of,
    summary_document,
    timestamp,
    valid_id,
    write_lines,
)
from proxy.store import SessionRow, SqliteFile, Store, SummaryRow, address_of
from proxy.summaries import Caller

Result = TypeVar("Result")
Session = Annotated[str, typer.Argument(help="The session's id.")]

_TRIES = 3
"""Answers of the summarizer that are waited for: one may be refused, and a long history takes several."""

app = typer.Typer(help="The stored sessions.", no_args_is_help=True, add_completion=False)


@app.command("list")
def list_sessions(
    config: Config = None,
    tenant: Tenant = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at the most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the sessions, the one used last first."""

    async def work(store: Store) -> list[SessionRow]:
        return (await store.sessions(tenant, limit=limit, after=None))[0]

    rows = _with_store(config, work)
    if as_json:
        typer.echo(json.dumps([session_document(row) for row in rows], ensure_ascii=False))
        return
    table = Table("session", "tenant", "messages", "rounds", "tokens", "sent", "saved", "used last")
    for row in rows:
        figures = (row.messages, row.rounds, row.tokens, row.tokens_sent, row.tokens_saved)
        table.add_row(row.id, row.tenant, *(f"{figure:,}" for figure in figures), timestamp(row.updated_at))
    Console().print(table)


@app.command("show")
def show(
    session: Session,
    config: Config = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Show the messages on the branch where the session stands."""

    async def work(store: Store) -> tuple[SessionRow, list[bytes]]:
        row = await _find(store, session, tenant)
        return row, [node.message.raw for node in await store.path(row.key, row.head)]

    row, messages = _with_store(config, work)
    if as_json:
        typer.echo(
            orjson.dumps(
                session_document(row) | {"data": [orjson.Fragment(raw) for raw in messages]}
            ).decode()
        )
        return
    console = Console()
    console.print(
        f"{row.id} ({row.tenant}): {row.messages} messages, {row.rounds} rounds, {row.tokens:,} tokens"
    )
    for number, raw in enumerate(messages, start=1):
        console.print(
            f"{number:>5} {_line_of(orjson.loads(raw))}", markup=False, highlight=False, soft_wrap=True
        )


@app.command("export")
def export(
    session: Session,
    config: Config = None,
    tenant: Tenant = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; standard output where none is named.")
    ] = None,
) -> None:
    """Write the whole session as JSON Lines, which `import` reads."""

    async def work(store: Store) -> None:
        row = await _find(store, session, tenant)
        with nullcontext(sys.stdout.buffer) if out is None else _opened(out) as file:
            async for line in write_lines(store.export(row.key)):
                file.write(line)

    _with_store(config, work)


@app.command("import")
def import_session(
    file: Annotated[Path, typer.Argument(help="What `export` wrote.", exists=True, dir_okay=False)],
    config: Config = None,
    tenant: Annotated[str, typer.Option(help="Whose session it becomes.")] = DEFAULT_TENANT,
    name: Annotated[str | None, typer.Option("--as", help="Id for the session, instead of its own.")] = None,
) -> None:
    """Store an exported session. Its id must be free."""
    records = read_lines(file.read_bytes())

    async def work(store: Store) -> SessionRow:
        return await store.load(tenant, valid_id(name or session_id_of(records), "--as"), records)

    row = _with_store(config, work, makes=True)
    typer.echo(f"{row.id} ({row.tenant}): {row.messages} messages")


@app.command("delete")
def delete(session: Session, config: Config = None, tenant: Tenant = None) -> None:
    """Delete a session with everything that belongs to it, for good."""

    async def work(store: Store) -> SessionRow:
        row = await _find(store, session, tenant)
        await store.delete(row.key)
        return row

    row = _with_store(config, work)
    typer.echo(f"{row.id} ({row.tenant}) is deleted.")


@app.command("fork")
def fork(
    session: Session,
    as_id: Annotated[str, typer.Option("--as", help="The new session's id.")],
    at: Annotated[
        str | None, typer.Option(help="The node up to which the history is shared; else all of it.")
    ] = None,
    config: Config = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Make a session that shares the history of another one."""

    async def work(store: Store) -> SessionRow:
        row = await _find(store, session, tenant)
        return await store.fork(row.tenant, row.key, at or row.head, valid_id(as_id, "--as"))

    row = _with_store(config, work)
    typer.echo(
        json.dumps(session_document(row), ensure_ascii=False)
        if as_json
        else f"{row.id} ({row.tenant}): {row.messages} messages"
    )


@app.command("compact")
def compact_session(
    session: Session,
    policy: Annotated[
        str | None, typer.Option(help="Whose settings are taken; else those of the policy that serves it.")
    ] = None,
    config: Config = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Sum up now what may be summed up; the session's next request uses it.

    The model is asked with `summarizer.api_key` or `upstream.api_key`: no client is there who has a key.
    """

    async def run() -> SummaryRow | None:
        settings = load(config)
        _must_exist(settings)
        async with opened(settings) as means:
            row = await _find(means.store, session, tenant)
            now = await present(row, policy, Policies(settings.policies), means)
            if now.policy is None:
                raise InvalidRequest("Nothing is summed up under 'off'. Name a policy.", param="--policy")
            patience = _TRIES * settings.summarizer.timeout
            return await compact(row, now, now.policy, Caller(tenant=row.tenant), means, patience=patience)

    made = asyncio.run(run())
    if as_json:
        typer.echo(json.dumps(summary_document(made) if made else {"summary": None}, ensure_ascii=False))
    elif made is None:
        typer.echo("There is nothing to sum up yet.")
    else:
        typer.echo(made.text)


def _opened(file: Path) -> BinaryIO:
    """Open a file to be written; raises `InvalidRequest` where that cannot be."""
    try:
        return file.open("wb")
    except OSError as why:
        raise InvalidRequest(f"{file} cannot be written: {why.strerror}. Name another file.") from why


def _with_store(
    config: Path | None, work: Callable[[Store], Awaitable[Result]], *, makes: bool = False
) -> Result:
    """Open the configured store, do the work, close it.

    Raises:
        StoreUnavailable: there is no store, and the work does not make one (`makes`).
    """

    async def run() -> Result:
        settings = load(config)
        if not makes:
            _must_exist(settings)
        store = await Store.open(settings.store.url, migrate=settings.store.migrate)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _must_exist(settings: Settings) -> None:
    """Raise `StoreUnavailable` where the store would be made by opening it."""
    address = address_of(settings.store.url)
    if isinstance(address, SqliteFile) and not address.path.exists():
        raise StoreUnavailable(
            f"The store cannot be used. There is no file {str(address.path.absolute())!r}: "
            "go to the folder of its configuration, or name that with --config."
        )


async def _find(store: Store, session: str, tenant: str | None) -> SessionRow:
    """Return the session of this id; where several tenants have one, the tenant must be named."""
    if tenant is not None:
        row = await store.session(tenant, session)
        rows = [] if row is None else [row]
    else:
        rows = await store.find(session)
    if not rows:
        raise NotFound(f"There is no session {session!r}. `palimpsest sessions list` shows those there are.")
    if len(rows) > 1:
        raise InvalidRequest(
            f"Several tenants have a session {session!r}. Name one with --tenant: "
            + ", ".join(row.tenant for row in rows)
        )
    return rows[0]


def _line_of(message: dict[str, Any]) -> str:
    """Return a message in one line of text."""
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    calls = [call.get("function", {}).get("name", "?") for call in message.get("tool_calls") or ()]
    shown = " ".join(text.split())
    return f"{message.get('role', '?'):<10} {shown[:160]}{'…' if len(shown) > 160 else ''}" + (
        f" -> {', '.join(calls)}" if calls else ""
    )
