"""`backtest`: replays recorded sessions under policies, and shows what they cost and lose."""

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
    RECALL,
    Backtest,
    BacktestResult,
    PolicyStrategy,
    PriceClass,
    SessionHistory,
    Strategy,
    as_data,
    baseline,
    candidates,
    class_of,
    every_baseline,
    headlines,
    main_prices,
    page,
    price_class,
    read_files,
    report_tables,
    session_tables,
    standard_classes,
    stored,
    suggested,
    synthetic_agents,
)
from proxy.cli.commands import AsJson, Config, Tenant, numbered, print_table
from proxy.cli.sessions import find_session, opened_file, require_store
from proxy.config import BUILT_IN, BUILT_IN_NAME, OFF, Policies, Settings, load, with_built_in
from proxy.errors import InvalidRequest
from proxy.models import Catalogue
from proxy.store import Store
from proxy.tokens import TokenCounter

_CLASSES: Final = "classes"

PolicyNames = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="A policy of the configuration, or baseline:NAME[=NUMBER]. Default: the policy that would be "
        "used. All baselines are compared too, unless one is named.",
    ),
]
Sessions = Annotated[list[str] | None, typer.Option("--session", help="Id of a stored session.")]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--file", help="JSON or JSON Lines of OpenAI messages, a file of `sessions export`, a folder, or a pattern."
    ),
]
Synthetic = Annotated[bool, typer.Option("--synthetic", help="Replay two synthetic agents of 100 turns too.")]
PriceNames = Annotated[
    list[str] | None,
    typer.Option(
        "--prices", help=f"A model whose prices are used. Default: '{_CLASSES}', the five most common classes."
    ),
]
Dollars = Annotated[float, typer.Option(min=0, help="Dollars per million input tokens, for the classes of prices.")]
Model = Annotated[str, typer.Option(help="Model of sessions that name none. Default: the model of --prices.")]
Baselines = Annotated[bool, typer.Option(help="Compare with the baselines.")]
Recall = Annotated[bool, typer.Option(help="Measure how much of what later tool calls use is still sent.")]
Suggest = Annotated[
    bool, typer.Option("--suggest", help="Try some policies and print the cheapest one that keeps enough, as YAML.")
]
Bound = Annotated[
    float, typer.Option(min=0, max=1, help="With --suggest: the part of the far values that must still be sent.")
]
Report = Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write a page with every session.")]


def backtest(  # noqa: PLR0913, PLR0917 - one for each option
    config: Config = None,
    policy: PolicyNames = None,
    session: Sessions = None,
    file: Files = None,
    synthetic: Synthetic = False,
    prices: PriceNames = None,
    dollars: Dollars = 1.0,
    model: Model = "",
    tenant: Tenant = None,
    baselines: Baselines = True,
    recall: Recall = True,
    suggest: Suggest = False,
    bound: Bound = RECALL,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Replay sessions under policies, offline: what they would have cost, and what would have been lost.

    No provider is called, and nothing is written but the report.
    """
    settings = load(config)
    priced = [name for name in prices or [] if name != _CLASSES]
    model = model or (priced[0] if len(priced) == 1 else "")
    counter = TokenCounter(settings.tokens.method)
    catalogue = Catalogue(settings.models)
    histories = [history for each in file or () for history in read_files(each)]
    if session:
        histories += asyncio.run(_stored(settings, session, tenant))
    if synthetic:
        histories += synthetic_agents(counter, model)
    if not histories:
        raise InvalidRequest(
            f"There is no conversation in {', '.join(map(str, file))}."
            if file
            else "There is nothing to replay. Give --session ID, --file F or --synthetic."
        )
    # The oracle needs the measured recall.
    beside = [each for each in every_baseline() if recall or each.name != ORACLE] if baselines else []
    named = [baseline(name) for name in policy or () if name.startswith(PREFIX)]
    policies = [name for name in policy or () if not name.startswith(PREFIX)]
    if not policy:  # the policies that would be selected
        known = Policies(settings.policies)
        policies = [known.select(each.tenant, each.model or model)[0] for each in histories]
    compared: list[Strategy] = [*(named or beside), *(_policy(settings, name) for name in dict.fromkeys(policies))]
    tried = list(candidates()) if suggest else []
    classes = _classes(settings, catalogue, prices or [_CLASSES], dollars)
    test = Backtest(
        tried or compared,
        [price_class(0.1, dollars=dollars)] if suggest and not prices else classes,
        counter,
        model=model,
        windows=lambda name: catalogue.facts(name, _base_url(settings, name)).context_window,
        marks=settings.cache.breakpoints != "never",
        recall=recall or suggest,
    )
    with _progress(len(histories) * test.steps, shown=sys.stdout.isatty() and not as_json) as tick:
        result = test.run(histories, tick)
    if suggest:
        _print_suggestion(result, tried, bound, as_json=as_json)
        return
    requests = sum([len(history.requests) for history in histories])
    messages = sum([len(history.messages) for history in histories])
    counts = ((len(histories), "session"), (messages, "message"), (requests, "request"))
    about = f"{', '.join([numbered(*each) for each in counts])}, each replayed."
    head = [*headlines(result), about, *result.warnings]
    if report is not None:
        every = session_tables(result, [each.name for each in result.classes])
        with opened_file(report) as html:
            html.write(page("Backtest", head, [*report_tables(result), *every]).encode())
    if as_json:
        typer.echo(orjson.dumps(as_data(result)).decode())
        return
    _print_tables(result, head, several=len(histories) > 1)


def _print_tables(result: BacktestResult, head: Sequence[str], *, several: bool) -> None:
    """Print the lines, then every table, then the warnings of replays."""
    typer.echo("\n".join(head))
    for table in (*report_tables(result), *(session_tables(result, [main_prices(result)]) if several else ())):
        typer.echo(f"\n{table.title}")
        print_table(table.columns, table.rows, texts=(0, 1) if len(table.columns) == 2 else (0,), indent="  ")
        if table.note:
            typer.echo(f"  {table.note}")
    warned = {warning: number for each in result.strategies for warning, number in each.figures.warnings.items()}
    for warning, number in warned.items():
        typer.echo(f"{numbered(number, 'request')}: {warning}")


def _print_suggestion(result: BacktestResult, tried: Sequence[PolicyStrategy], bound: float, *, as_json: bool) -> None:
    """Print the candidates, cheapest first, and the cheapest policy with a recall of at least `bound`."""
    prices = main_prices(result)
    best, every = suggested(result, tried, prices, bound)
    if not every:
        raise InvalidRequest("There is nothing to suggest by: these sessions hold no request.")
    if as_json:
        rows = [{"name": each.name, "ratio": each.ratio, "recall": each.recall} for each in every]
        found = None if best is None else {"name": best.name, "yaml": best.yaml}
        typer.echo(orjson.dumps({"prices": prices, "bound": bound, "suggestion": found, "tried": rows}).decode())
        return
    cells = [(each.name, f"{each.ratio:.3f}", f"{each.recall:.3f}") for each in every]
    print_table(("", f"cost at {prices}", "far values kept"), cells, texts=(0,))
    if best is None:
        typer.echo(f"\nNone keeps {bound:g} of the far values: leave these sessions untrimmed, or lower --bound.")
        return
    typer.echo(f"\n# {best.name}: {best.ratio:.0%} of the input cost, {best.recall:.1%} of the far values kept")
    typer.echo(best.yaml, nl=False)


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


def _classes(settings: Settings, catalogue: Catalogue, names: Sequence[str], dollars: float) -> list[PriceClass]:
    classes: list[PriceClass] = []
    for name in dict.fromkeys(names):
        if name == _CLASSES:
            classes += standard_classes(dollars)
        elif found := class_of(name, catalogue.facts(name, _base_url(settings, name))):
            classes.append(found)
        else:
            raise InvalidRequest(
                f"The prices of {name!r} are not known. Set them under `models` in the configuration, "
                f"or leave out --prices to use the most common classes."
            )
    return classes


def _base_url(settings: Settings, model: str) -> str:
    routes = settings.upstream.routes
    found = (route.base_url for route in routes if any(fnmatchcase(model, each) for each in route.models))
    return next(found, settings.upstream.base_url)


async def _stored(settings: Settings, names: Sequence[str], tenant: str | None) -> list[SessionHistory]:
    """Return stored sessions, without migrating the store."""
    require_store(settings)
    async with await Store.open(settings.store.url, migrate=False) as store:
        await store.ready()
        return [await stored(store, await find_session(store, name, tenant)) for name in names]


@contextmanager
def _progress(total: int, *, shown: bool) -> Generator[Callable[[], None]]:
    """Show a progress bar if `shown`. Yields a function to call after each step."""
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(), transient=True, disable=not shown) as bar:
        task = bar.add_task("replaying", total=total)
        yield lambda: bar.advance(task)
