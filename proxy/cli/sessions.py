"""`sessions …`, `upgrade`, `downgrade`: access the store directly, whether or not the proxy runs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, TypeVar

import orjson
import typer
from rich.console import Console

from proxy.cli.commands import AsJson, Config, Tenant, numbered, plain, print_table
from proxy.config import Policies, Settings, load
from proxy.dialects import DIALECTS, Message
from proxy.errors import InvalidRequest, NotFound, StoreUnavailable
from proxy.pipeline import (
    DEFAULT_TENANT,
    compact,
    erase_tenant,
    open_services,
    read_lines,
    session_document,
    session_id_of,
    session_view,
    spool_at,
    summary_document,
    timestamp,
    valid_id,
    valid_tenant,
    write_lines,
)
from proxy.pipeline.inspection import past_of, receipt_document, search_texts
from proxy.pipeline.statistics import sessions_asked
from proxy.store import (
    BranchRow,
    ExchangeRow,
    ListedSession,
    Masker,
    SessionListQuery,
    SessionRow,
    SqliteFile,
    Store,
    SummaryRow,
    address_of,
)
from proxy.store import downgrade as migrate_back
from proxy.store import upgrade as migrate_forward
from proxy.summaries import Caller

Result = TypeVar("Result")
Session = Annotated[str, typer.Argument(help="Id of the session.")]
Dialect = Annotated[str | None, typer.Option(help="chat, responses or messages, where several sessions have the id.")]
_PAGE: Final = 200  # exchanges per read

app = typer.Typer(help="List, show, move and delete stored sessions.", no_args_is_help=True, add_completion=False)


@app.command("list")
def list_sessions(
    config: Config = None,
    tenant: Tenant = None,
    sort: Annotated[str, typer.Option(help="newest, largest, dearest or saved.")] = "newest",
    since: Annotated[str | None, typer.Option(help="Used since: 2026-11-01, or 7d.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of sessions.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the sessions, the most recently used first."""
    asked = sessions_asked(datetime.now(UTC), sort, since=since, tenant=tenant, limit=limit)

    async def work(store: Store) -> list[ListedSession]:
        return (await store.listed(asked))[0]

    rows = with_store(config, work)
    if as_json:
        typer.echo(json.dumps([session_document(each.row, (), each.cost_saved) for each in rows], ensure_ascii=False))
        return
    figures_of = ("messages", "rounds", "tokens", "sent", "saved", "paid $", "saved $")
    lines: list[list[str]] = []
    for each in rows:
        row = each.row
        figures = (row.messages, row.rounds, row.tokens, row.tokens_sent, row.tokens_saved)
        dollars = ["-" if amount is None else f"{amount:,.4f}" for amount in (row.cost, each.cost_saved)]
        named = (row.id, row.tenant, row.dialect)
        lines.append([*named, *(f"{figure:,}" for figure in figures), *dollars, timestamp(row.updated_at)])
    print_table(("session", "tenant", "dialect", *figures_of, "last used"), lines, texts=(0, 1, 2, 10))


@app.command("search")
def search(
    words: Annotated[list[str], typer.Argument(help="Words, all of which a message must hold.")],
    config: Config = None,
    tenant: Tenant = None,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of messages.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Find messages by their words, those of the newest sessions first. Without an index it looks for a second."""

    async def work(store: Store) -> dict[str, Any]:
        return await search_texts(store, " ".join(words), tenant, limit=limit)

    found = with_store(config, work)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    for each in found["data"]:
        typer.echo(
            plain(f"{each['session']} ({each['tenant']}) {each['created_at']} {each['role']}: {each['snippet']}")
        )
    looked = found["searched"]
    if looked["index"]:
        more = "" if looked["complete"] else f" back to {looked['back_to']}"
        typer.echo(f"{len(found['data'])} found by the index{more}.")
        return
    end = "all there are" if looked["complete"] else f"back to {looked['back_to']}"
    typer.echo(
        f"{len(found['data']):,} found in {numbered(looked['messages'], 'message')} of "
        f"{numbered(looked['sessions'], 'session')}, {end}."
    )
    if looked["not_stored"]:
        typer.echo(f"The content of {numbered(looked['not_stored'], 'message')} is not stored.")


@app.command("show")
def show(
    session: Session,
    config: Config = None,
    branch: Annotated[
        str | None, typer.Option(help="Node at the end of the branch. Default: that of the last request.")
    ] = None,
    tenant: Tenant = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
) -> None:
    """Show the messages of a branch, and how many branches there are."""

    async def work(store: Store) -> tuple[SessionRow, float | None, list[Message], list[BranchRow]]:
        row = await find_session(store, session, tenant, dialect)
        listed, _ = await store.listed(SessionListQuery(key=row.key))
        nodes = await store.path(row.key, branch or row.head)
        if branch is not None and not nodes:
            raise InvalidRequest(f"There is no node {branch!r} in this session.", param="--branch")
        saved = listed[0].cost_saved if listed else None
        return row, saved, [node.message for node in nodes], await store.branches(row.key)

    row, saved, messages, branches = with_store(config, work)
    if as_json:
        typer.echo(
            orjson.dumps(
                session_document(row, cost_saved=saved)
                | {"data": [orjson.Fragment(raw) for message in messages for raw in message.listed]}
            ).decode()
        )
        return
    typer.echo(f"{_title(row)}, {numbered(row.rounds, 'round')}, {numbered(row.tokens, 'token')}")
    for each in branches if len(branches) > 1 else ():
        shown = " (shown)" if each.head == (branch or row.head) else ""
        typer.echo(f"--branch {each.head}: {numbered(each.depth, 'message')}, {timestamp(each.updated_at)}{shown}")
    for number, message in enumerate(messages, start=1):
        typer.echo(plain(f"{number:>5} {line_of(message)}"))


@app.command("exchanges")
def list_exchanges(
    session: Session,
    config: Config = None,
    tenant: Tenant = None,
    dialect: Dialect = None,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of exchanges: the last ones.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List a session's exchanges, the last one at the end. `exchange show` takes their ids."""

    async def work(store: Store) -> tuple[list[ExchangeRow], int, list[dict[str, Any]]]:
        found = await find_session(store, session, tenant, dialect)
        every = await all_exchanges(store, found)
        rows = every[-limit:]
        past = await past_of(rows, store) if as_json else None
        return rows, len(every), [] if past is None else [receipt_document(row, past) for row in rows]

    rows, total, receipts = with_store(config, work)
    if as_json:
        typer.echo(orjson.dumps(receipts).decode())
        return
    columns = ("", "exchange", "began", "kind", "status", "policy", "model", "tokens", "sent", "cost $")
    lines: list[list[str]] = []
    for number, row in enumerate(rows, start=total - len(rows) + 1):
        cost: float | None = row.receipt.get("cost")
        figures = (f"{row.tokens_before:,}", f"{row.tokens_sent:,}", "-" if cost is None else f"{cost:,.4f}")
        names = (row.kind, row.status, row.policy, row.model)
        lines.append([str(number), row.id, timestamp(row.created_at), *names, *figures])
    print_table(columns, lines, texts=range(1, 7))


@app.command("export")
def export(
    session: Session,
    config: Config = None,
    tenant: Tenant = None,
    dialect: Dialect = None,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: standard output.")] = None,
) -> None:
    """Write the whole session as JSON Lines, for `import`."""

    async def work(store: Store) -> None:
        row = await find_session(store, session, tenant, dialect)
        with nullcontext(sys.stdout.buffer) if out is None else opened_file(out) as file:
            async for line in write_lines(store.export(row.key)):
                file.write(line)

    with_store(config, work)


@app.command("import")
def import_session(
    file: Annotated[Path, typer.Argument(help="File that `export` wrote. -: standard input.")],
    config: Config = None,
    tenant: Annotated[str, typer.Option(help="Tenant that gets the session.")] = DEFAULT_TENANT,
    name: Annotated[str | None, typer.Option("--as", help="Id of the new session. Default: its own.")] = None,
) -> None:
    """Store an exported session. Its id must be free."""
    try:
        content = sys.stdin.buffer.read() if file == Path("-") else file.read_bytes()
    except OSError as why:
        raise InvalidRequest(f"{file} cannot be read: {why.strerror}.", param="file") from None
    records = read_lines(content)
    kept = load(config).store
    if kept.content == "none":
        raise InvalidRequest("An import holds content, and none is stored (store.content: none).")
    Masker(kept.mask, b"").check(records)

    async def work(store: Store) -> SessionRow:
        owner = valid_tenant(tenant, "--tenant")
        return await store.load(owner, valid_id(name or session_id_of(records), "--as"), records)

    row = with_store(config, work, makes=True)
    typer.echo(_title(row))


@app.command("delete")
def delete(
    session: Session,
    config: Config = None,
    tenant: Tenant = None,
    dialect: Dialect = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Without a terminal nobody is asked.")] = False,
) -> None:
    """Delete a session and everything that belongs to it, for good; in each dialect that has it, if none is named."""
    removed: set[str] = set()

    async def work(store: Store) -> SessionRow:
        row = await find_session(store, session, tenant, dialect)
        if sys.stdin.isatty() and not yes:
            every = "" if dialect is not None else ", and what else has this id in other dialects,"
            typer.confirm(f"Delete {_title(row)}{every} for good?", abort=True)
        removed.update(await store.delete_named(row.tenant, row.id, dialect))
        return row

    row = with_store(config, work)
    spool_at(load(config)).drop(lambda key, _: key in removed)
    typer.echo(f"{row.id} ({row.tenant}) is deleted.")


@app.command("erase")
def erase(
    tenant: Annotated[str, typer.Argument(help="Tenant whose sessions and statistics go.")],
    config: Config = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Without a terminal nobody is asked.")] = False,
) -> None:
    """Delete everything that is stored of a tenant, for good."""
    if sys.stdin.isatty() and not yes:
        typer.confirm(f"Delete everything of the tenant {plain(tenant)}, for good?", abort=True)

    async def work(store: Store) -> int:
        return await erase_tenant(store, spool_at(load(config)), tenant)

    number = with_store(config, work)
    typer.echo(f"{numbered(number, 'session')} of {plain(tenant)} {'is' if number == 1 else 'are'} deleted.")


@app.command("fork")
def fork(
    session: Session,
    as_id: Annotated[str, typer.Option("--as", help="Id of the new session.")],
    at: Annotated[str | None, typer.Option(help="Last node of the shared history. Default: all.")] = None,
    config: Config = None,
    tenant: Tenant = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
) -> None:
    """Create a session that shares the history of another one."""

    async def work(store: Store) -> SessionRow:
        row = await find_session(store, session, tenant, dialect)
        return await store.fork(row.tenant, row.key, at or row.head, valid_id(as_id, "--as"))

    row = with_store(config, work)
    typer.echo(json.dumps(session_document(row), ensure_ascii=False) if as_json else _title(row))


@app.command("compact")
def compact_session(
    session: Session,
    policy: Annotated[str | None, typer.Option(help="Policy to use. Default: the session's own.")] = None,
    config: Config = None,
    tenant: Tenant = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
) -> None:
    """Summarize the history now. The session's next request uses the summary.

    The request to the model uses `summarizer.api_key` or `upstream.api_key`, since there is no client's key.
    """

    async def run() -> SummaryRow | None:
        settings = load(config)
        require_store(settings)
        async with open_services(settings) as means:
            row = await find_session(means.store, session, tenant, dialect)
            now = await session_view(row, policy, Policies(settings.policies), means)
            if now.policy is None:
                raise InvalidRequest("The policy 'off' has no summaries. Name another policy.", param="--policy")
            # One response may be rejected, and a long history takes several.
            patience = 3 * settings.summarizer.timeout
            return await compact(
                row, now, now.policy, Caller(tenant=row.tenant, dialect=row.dialect), means, patience=patience
            )

    made = asyncio.run(run())
    if as_json:
        typer.echo(
            json.dumps(summary_document(made, made.created_at) if made else {"summary": None}, ensure_ascii=False)
        )
    elif made is None:
        typer.echo("There is nothing to summarize yet.")
    else:
        typer.echo(made.text)


def upgrade(
    config: Config = None, revision: Annotated[str, typer.Argument(help="Revision to migrate to.")] = "head"
) -> None:
    """Migrate the store's tables to this version. `serve` does it too, unless `store.migrate` is false.

    A store of an older layout is converted, session by session: stopped, it goes on where it was.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn  # noqa: PLC0415

    columns = ("Converting", BarColumn(), MofNCompleteColumn(), "sessions", TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stderr.isatty(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", visible=False)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        asyncio.run(migrate_forward(load(config).store.url, revision, progress=show))
    typer.echo("The store is up to date.")


def downgrade(
    revision: Annotated[str, typer.Argument(help="Revision to migrate back to, such as -1 or base.")],
    config: Config = None,
) -> None:
    """Migrate the store's tables back. Data that only newer tables hold is lost."""
    asyncio.run(migrate_back(load(config).store.url, revision))
    typer.echo("The store is downgraded.")


def require_store(settings: Settings) -> None:
    """Raise `StoreUnavailable` if opening the store would create it."""
    address = address_of(settings.store.url)
    if isinstance(address, SqliteFile) and not address.path.exists():
        raise StoreUnavailable(
            f"Nothing is stored yet. There is no file {str(address.path.absolute())!r}: `palimpsest serve` makes it. "
            "If it is elsewhere, go to the folder of its configuration, or name that with --config."
        )


async def all_exchanges(store: Store, session: SessionRow) -> list[ExchangeRow]:
    """Return the exchanges of a session, oldest first."""
    rows, after = await store.exchanges(session.key, limit=_PAGE)
    while after is not None:
        page, after = await store.exchanges(session.key, limit=_PAGE, after=after)
        rows += page
    return rows[::-1]


async def find_session(store: Store, session: str, tenant: str | None, dialect: str | None = None) -> SessionRow:
    """Return the session with this id. Raises `InvalidRequest` if several tenants have one and `tenant` is None.

    If one tenant has the id in several dialects, the first is returned; Chat Completions comes first. Raises `NotFound`
    if there is none.
    """
    if dialect is not None and dialect not in DIALECTS:
        raise InvalidRequest(f"--dialect is {' or '.join(DIALECTS)}, not {dialect!r}.", param="--dialect")
    rows = await store.find(session, tenant, dialect)
    if not rows:
        raise NotFound(f"There is no session {session!r}. `palimpsest sessions list` shows all sessions.")
    tenants = list(dict.fromkeys(row.tenant for row in rows))
    if len(tenants) > 1:
        named = f"Several tenants have a session {session!r}. Name one with --tenant: "
        raise InvalidRequest(named + ", ".join(tenants))
    return rows[0]


def opened_file(file: Path) -> BinaryIO:
    """Open a file for writing. Raises `InvalidRequest` if that fails."""
    try:
        return file.open("wb")
    except OSError as why:
        raise InvalidRequest(f"{file} cannot be written: {why.strerror}. Name another file.") from why


def with_store(config: Path | None, work: Callable[[Store], Awaitable[Result]], *, makes: bool = False) -> Result:
    """Run `work` on the configured store. The store is not migrated, since an older proxy may be serving it.

    With `makes`, the store is created or migrated first, as `serve` does.
    """

    async def run() -> Result:
        settings = load(config)
        if not makes:
            require_store(settings)
        async with await Store.open(settings.store.url, migrate=makes and settings.store.migrate) as store:
            store.searches_index = settings.store.search == "index"
            await store.ready()
            return await work(store)

    return asyncio.run(run())


def _title(row: SessionRow) -> str:
    return f"{plain(row.id)} ({plain(row.tenant)}): {numbered(row.messages, 'message')}"


def line_of(message: Message) -> str:
    """Return a message on one line: its role, the beginning of its text, and the tools that it calls."""
    parts = [message.text, *[f"[{each.kind}: {each.description}]" for each in message.attachments]]
    shown = " ".join(" ".join(parts).split())
    calls = ", ".join([call.name or "?" for call in message.calls])
    cut = f"{shown[:160]}{'…' if len(shown) > 160 else ''}"
    return f"{message.role or '?':<10} {cut}" + (f" -> {calls}" if calls else "")
