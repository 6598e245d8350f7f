"""The configuration in force, and the policy lab: a session under another policy, without sending anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, Final

import msgspec
import orjson
import yaml
from msgspec.structs import asdict
from sqlalchemy import make_url

from proxy.backtest import Backtest, BacktestResult, PolicyStrategy, Strategy, class_of, standard_classes, stored
from proxy.backtest import baseline as baseline_named
from proxy.config import OFF, Policies, Settings, with_built_in
from proxy.dashboard.overview import RangeQuery
from proxy.dashboard.render import Page
from proxy.dashboard.text import clip
from proxy.dialects import Dialect, dialect_named
from proxy.errors import InvalidRequest
from proxy.pipeline import compute, preview, session_view
from proxy.pipeline.context import Charge
from proxy.pipeline.statistics import statistics
from proxy.server.authentication import Identity
from proxy.server.dependencies import Services
from proxy.store import SessionRow
from proxy.trimming import Policy

LIMITS: Final = {
    "dollars_per_day": "dollars today (UTC)",
    "dollars_per_month": "dollars this month (UTC)",
    "requests_per_minute": "requests within a minute",
    "tokens_per_minute": "tokens within a minute",
}
TYPED: Final = "typed"  # the name of a policy that the user typed
_RAW: Final = msgspec.json.Decoder(list[msgspec.Raw])
_SERVED: Final = ("requests", "sessions", "tokens_before", "tokens_sent", "cost_untrimmed", "cost_saved_net")
SERVED: Final = "30d"
_NONE: Final = "baseline:none"
_MOST_MESSAGES: Final = 600  # most messages of a session that are replayed
_MOST_BYTES: Final = 4 << 20  # most bytes of these messages
_REPLAY_BYTES: Final = 8 << 20  # a size for `compute` that makes the replay run in a thread
_SHOWN: Final = 50  # messages of a view, and lines of its plan, that are shown
_COLUMNS: Final = ("policy", "requests", "tokens_before", "tokens_sent", "largest", "trims", "cost", "recall")


async def policies_page(services: Services, reader: Identity, lab: Mapping[str, str]) -> Page:
    """Return the page of the policies in matching order: all, or those that may serve the reader."""
    sees_all = reader.admin or services.settings.auth.mode == "none"
    only_for = None if sees_all else reader.tenant
    known = with_built_in(services.policies.current)
    policies = {
        name: policy for name, policy in known.items() if only_for is None or policy.match.covers_tenant(only_for)
    }
    asked = RangeQuery(since=SERVED, tenant=None if reader.admin else reader.tenant)
    served = await statistics(services.app.store, asked.within("policy", datetime.now(UTC)))
    budgets = await services.budgets.usage(None if sees_all else reader)
    used = {row["group"]: row for row in served["data"]}
    rows = [_policy_line(name, policy, only_for, used.get(name)) for name, policy in policies.items()]
    data = {
        "policies": rows,
        "gone": [row for name, row in used.items() if name not in policies],
        "served": {"since": served["since"], "until": served["until"], "total": served["total"]},
        "budgets": [{**asdict(use), "name": LIMITS[use.limit]} for use in budgets],
        "settings": _settings(services.in_force) if sees_all else None,
        "lab": {"policy": next(iter(policies), OFF), "typed": "", "names": [*policies, OFF], **lab},
        "result": None,
    }
    columns = ("name", "models", "tenants", "mode", "share", "trigger", "target", "on_arrival", "edits", *_SERVED)
    return Page(template="policies.html", title="Policies", data=data, columns=columns, rows=rows)


def _policy_line(name: str, policy: Policy, only_for: str | None, used: Mapping[str, Any] | None) -> dict[str, Any]:
    written = policy.written()
    whole = policy.model_dump(mode="json")
    match = whole["match"]
    if only_for is not None:  # do not show which other tenants it serves
        written.pop("match", None)
    return {
        "name": name,
        "models": match["models"],
        "tenants": match["tenants"] if only_for is None else [only_for],
        "mode": whole.get("mode", "trim"),
        "share": whole.get("share", 1.0),
        "trigger": written.get("trigger"),
        "target": written.get("target"),
        "on_arrival": [edit.type for edit in policy.on_arrival],
        "edits": [edit.type for edit in policy.edits],
        **{each: 0 if used is None else used[each] for each in _SERVED},
        "yaml": yaml.safe_dump(written, sort_keys=False, allow_unicode=True) if written else "{}\n",
    }


def _settings(settings: Settings) -> str:
    """Return the settings as YAML. Keys are masked, and so is the password in the store's URL."""
    data = settings.model_dump(mode="json", exclude={"policies"})
    data["store"]["url"] = make_url(settings.store.url).render_as_string(hide_password=True)
    if settings.upstream.proxy is not None:
        data["upstream"]["proxy"] = make_url(settings.upstream.proxy).render_as_string(hide_password=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


# -------------------------------------------------------------------------------------------------------- the lab


async def lab_page(
    page: Page, session: SessionRow, name: str, typed: Policy | None, services: Services, charge: Charge
) -> Page:
    """Return the page of the policies with the effect of one on a session. Nothing is sent or stored.

    `charge` is called as in `session_view`.
    """
    app, policies = services.app, services.policies
    known = Policies({**policies.current, TYPED: typed}) if typed is not None else policies
    today = await session_view(session, None, policies, app, charge)
    if not today.rows:
        raise InvalidRequest("The session has no messages.", param="session")
    other = await session_view(session, TYPED if typed is not None else name, known, app, rows=today.rows)
    sizes = accumulate(len(row.message.raw) for row in today.rows[:_MOST_MESSAGES])
    most = max(1, sum([size <= _MOST_BYTES for size in sizes]))
    history = await stored(app.store, session, today.rows[:most])
    facts = app.knowledge.facts(today.model, today.dialect)
    prices = class_of(today.model, facts) or standard_classes()[2]
    strategies: list[Strategy] = [
        baseline_named(_NONE) if view.policy is None else PolicyStrategy(name=view.policy_name, policy=view.policy)
        for view in (today, other)
    ]
    test = Backtest(
        strategies,
        [prices],
        app.counter,
        model=today.model,
        windows=lambda _: facts.context_window,
        marks=services.settings.cache.breakpoints != "never",
    )
    replay = await compute(_REPLAY_BYTES, test.run, [history])
    names = (strategies[0].name, strategies[1].name)
    rows, dialect = _figures(replay, names), dialect_named(session.dialect)
    result = {
        "session": session.id,
        "names": names,
        "figures": rows,
        "prices": replay.classes[0].name,
        "replayed": len(history.messages),
        "messages": len(today.rows),
        "views": [_view(name, await preview(view), dialect) for name, view in zip(names, (today, other), strict=True)],
        "warnings": list(replay.warnings),
    }
    return Page(
        template=page.template, title="Policy lab", data=page.data | {"result": result}, columns=_COLUMNS, rows=rows
    )


def _figures(replay: BacktestResult, names: Sequence[str]) -> list[dict[str, Any]]:
    found = {each.strategy: each for each in replay.strategies}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys((_NONE, *names)):
        each = found[name]
        figures, recall = each.figures, each.figures.recall
        rows.append(
            {
                "policy": "no trimming" if name == _NONE else name,
                "requests": figures.requests,
                "tokens_before": figures.untrimmed,
                "tokens_sent": figures.sent,
                "largest": figures.largest,
                "trims": figures.moves,
                "cost": figures.cost.input,
                "ratio": each.ratio,
                "recall": None if recall is None else recall.every.recall,
            }
        )
    return rows


def _view(name: str, view: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    sent = [dialect.message(bytes(raw)) for raw in _RAW.decode(orjson.dumps(view["messages"][-_SHOWN:]))]
    shown = [{"role": message.role, "text": clip(message.readable())} for message in sent]
    return {
        "policy": name,
        "tokens_before": view["tokens_before"],
        "tokens_sent": view["tokens_sent"],
        "messages": len(view["messages"]),
        "shown": shown,
        "fired": None if view["cut"] is None else view["cut"]["fired"],
        "plan": view["plan"][:_SHOWN],
        "changes": len({line["position"] for line in view["plan"]}),
        "steps": len(view["plan"]),
        "warnings": view["warnings"],
    }
