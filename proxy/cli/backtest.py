"""`backtest`: sessions that happened, replayed under policies: what they would have cost and lost."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from proxy.backtest import (
    ORACLE,
    PREFIX,
    Backtest,
    PolicyStrategy,
    PriceClass,
    ReportTable,
    SessionHistory,
    Strategy,
    as_data,
    baseline,
    class_of,
    every_baseline,
    main_prices,
    page,
    read_file,
    report_tables,
    session_tables,
    standard_classes,
    stored,
    synthetic_agents,
)
from proxy.cli.options import AsJson, Config, Tenant
from proxy.config import BUILT_IN, BUILT_IN_NAME, OFF, Settings, load, select_policy, with_built_in
from proxy.errors import InvalidRequest, NotFound, StoreUnavailable
from proxy.models import Catalogue
from proxy.store import SqliteFile, Store, address_of
from proxy.tokens import TokenCounter

CLASSES: Final = "classes"
"""What `--prices` says for the five standard classes of prices."""

Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="A policy of the configuration, or baseline:NAME[=NUMBER]. Default: the one that would serve. "
        "All baselines stand beside, unless one is named.",
    ),
]
Sessions = Annotated[list[str] | None, typer.Option("--session", help="A stored session, by its id.")]
Files = Annotated[
    list[Path] | None,
    typer.Option("--file", help="JSON or JSON Lines of OpenAI messages, or what `sessions export` wrote."),
]
Synthetic = Annotated[bool, typer.Option("--synthetic", help="The two made-up agents of 100 turns too.")]
PriceNames = Annotated[
    list[str] | None,
    typer.Option(
        "--prices",
        help=f"A model whose prices are taken. Default: '{CLASSES}', the five most common classes.",
    ),
]
Dollars = Annotated[
    float, typer.Option(min=0, help="Dollars per million tokens of input, for the classes of prices.")
]
Model = Annotated[
    str, typer.Option(help="The model where a session names none. Default: the one whose prices are taken.")
]
Baselines = Annotated[bool, typer.Option(help="Whether the baselines stand beside what is named.")]
Recall = Annotated[
    bool, typer.Option(help="Whether it is found out what later tool calls used and is still sent.")
]
Report = Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write a page with every session too.")]


def backtest(  # noqa: PLR0913, PLR0917 - one for each option
    config: Config = None,
    policy: Policies = None,
    session: Sessions = None,
    file: Files = None,
    synthetic: Synthetic = False,
    prices: PriceNames = None,
    dollars: Dollars = 1.0,
    model: Model = "",
    tenant: Tenant = None,
    baselines: Baselines = True,
    recall: Recall = True,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Replay sessions under policies, offline: what it would have cost, and what been lost.

    Nothing is asked of any provider, and nothing is written but the report.
    """
    settings = load(config)
    priced = [name for name in prices or [] if name != CLASSES]
    model = model or (priced[0] if len(priced) == 1 else "")
    counter = TokenCounter(settings.tokens.method)
    catalogue = Catalogue(settings.models)
    histories = [history for each in file or () for history in read_file(each)]
    if session:
        histories += asyncio.run(_stored(settings, session, tenant))
    if synthetic:
        histories += synthetic_agents(counter, model)
    if not histories:
        raise InvalidRequest("There is nothing to replay: name --session ID, --file F or --synthetic.")
    # Without recall nobody knows the future.
    beside = [each for each in every_baseline() if recall or each.name != ORACLE] if baselines else []
    test = Backtest(
        _strategies(settings, policy or [], histories, model, beside=beside),
        _classes(settings, catalogue, prices or [CLASSES], dollars),
        counter,
        model=model,
        windows=lambda name: catalogue.facts(name, _base_url(settings, name)).context_window,
        marks=settings.cache.breakpoints == "auto",
        recall=recall,
    )
    with _progress(len(histories) * test.steps, shown=sys.stdout.isatty() and not as_json) as tick:
        result = test.run(histories, tick)
    head = [*_head(histories), *result.warnings]
    if report is not None:
        every = session_tables(result, [each.name for each in result.classes])
        _write(report, page("Backtest", head, [*report_tables(result), *every]))
    if as_json:
        typer.echo(orjson.dumps(as_data(result)).decode())
        return
    tables = [*report_tables(result)]
    if len(histories) > 1:
        tables += session_tables(result, [main_prices(result)])
    console = Console()
    _say(console, *head)
    for table in tables:
        _print(console, table)
    warned = {
        warning: number for each in result.strategies for warning, number in each.figures.warnings.items()
    }
    _say(console, *(f"{number:,} requests: {warning}" for warning, number in warned.items()))


def _head(histories: Sequence[SessionHistory]) -> list[str]:
    """Return what was replayed, in words."""
    requests = sum([len(history.requests) for history in histories])
    messages = sum([len(history.messages) for history in histories])
    return [f"{len(histories):,} sessions, {messages:,} messages, {requests:,} requests, each replayed."]


def _strategies(
    settings: Settings,
    names: Sequence[str],
    histories: Sequence[SessionHistory],
    model: str,
    *,
    beside: Sequence[Strategy],
) -> list[Strategy]:
    """Return what is compared: what is named, or the policies that would serve; and what stands beside it."""
    policies = [name for name in names if not name.startswith(PREFIX)]
    named = [baseline(name) for name in names if name.startswith(PREFIX)]
    if not names:
        serving = (
            select_policy(settings.policies, history.tenant, history.model or model)[0]
            for history in histories
        )
        policies = list(dict.fromkeys(serving))
    return [*(named or beside), *(_policy(settings, name) for name in policies)]


def _policy(settings: Settings, name: str) -> Strategy:
    known = {**with_built_in(settings.policies), BUILT_IN_NAME: BUILT_IN}
    if name == OFF:
        return baseline(f"{PREFIX}none")
    if name not in known:
        raise InvalidRequest(
            f"There is no policy named {name!r}. There are {', '.join(known)}, and "
            f"{', '.join(each.name for each in every_baseline())}."
        )
    about = "the built-in policy" if known[name] is BUILT_IN else "a policy of the configuration"
    return PolicyStrategy(name=name, policy=known[name], about=about)


def _classes(
    settings: Settings, catalogue: Catalogue, names: Sequence[str], dollars: float
) -> list[PriceClass]:
    """Return the classes of prices that are asked for."""
    classes: list[PriceClass] = []
    for name in dict.fromkeys(names):
        if name == CLASSES:
            classes += standard_classes(dollars)
            continue
        found = class_of(name, catalogue.facts(name, _base_url(settings, name)))
        if found is None:
            raise InvalidRequest(
                f"Nothing is known of the prices of {name!r}. Set them under `models` in the configuration, "
                f"or leave --prices out for the most common classes."
            )
        classes.append(found)
    return classes


def _base_url(settings: Settings, model: str) -> str:
    """Return the address that serves a model."""
    routes = settings.upstream.routes
    found = (route.base_url for route in routes if any(fnmatchcase(model, each) for each in route.models))
    return next(found, settings.upstream.base_url)


async def _stored(settings: Settings, names: Sequence[str], tenant: str | None) -> list[SessionHistory]:
    """Return stored sessions; the store is not even migrated.

    Raises:
        NotFound: there is no session of that id.
        InvalidRequest: several tenants have one, or it has no messages.
        StoreUnavailable: there is no store, or its tables are not those of this version.
    """
    address = address_of(settings.store.url)
    if isinstance(address, SqliteFile) and not address.path.exists():
        raise StoreUnavailable(
            f"The store cannot be used. There is no file {str(address.path.absolute())!r}: "
            "go to the folder of its configuration, or name that with --config."
        )
    store = await Store.open(settings.store.url, migrate=False)
    try:
        await store.ready()
        found: list[SessionHistory] = []
        for name in names:
            rows = [row for row in await store.find(name) if tenant is None or row.tenant == tenant]
            if not rows:
                raise NotFound(
                    f"There is no session {name!r}. `palimpsest sessions list` shows those there are."
                )
            if len(rows) > 1:
                raise InvalidRequest(
                    f"Several tenants have a session {name!r}. Name one with --tenant: "
                    + ", ".join(row.tenant for row in rows)
                )
            found.append(await stored(store, rows[0]))
        return found
    finally:
        await store.close()


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as why:
        raise InvalidRequest(f"{file} cannot be written: {why.strerror}. Name another file.") from why


@contextmanager
def _progress(total: int, *, shown: bool) -> Generator[Callable[[], None]]:
    """Show how far it is, where somebody looks; what is yielded is called after each step."""
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(), transient=True, disable=not shown) as bar:
        task = bar.add_task("replaying", total=total)
        yield lambda: bar.advance(task)


def _print(console: Console, table: ReportTable) -> None:
    """Print a table in aligned columns; nothing is cut, wherever it is shown."""
    widths = [max(map(len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
    words = len(table.columns) == 2
    _say(console, "", table.title)
    for row in (table.columns, *table.rows):
        cells = (
            cell.ljust(width) if place == 0 or words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        _say(console, "  " + "  ".join(cells).rstrip())
    if table.note:
        _say(console, f"  {table.note}")


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
