"""Reports an exchange: the response headers, the stored receipt, the log line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from proxy.dialects import JsonObject
from proxy.pipeline import headers
from proxy.pipeline.history import History
from proxy.store import StandingCut, SummaryRow
from proxy.trimming import Change, Gap, Plan, PlanningContext, Summary, SummaryRequest

Headers = list[tuple[bytes, bytes]]
_CONTROL: Final = re.compile(rb"[\x00-\x1f\x7f]")
_WARNING_BYTES: Final = 1000
NodeAt = Callable[[int], str | None]  # returns the node at a position of the branch; None if it never became a node


class PlanReport(Struct, frozen=True, kw_only=True):
    """The facts about a planned exchange, for the headers, the receipt and the log line.

    Tokens are scaled to the upstream's counts, as far as these are known. Messages include instructions.
    """

    session: str | None
    exchange: str
    kind: str  # how the request relates to its session
    plan: Plan
    warnings: tuple[str, ...]  # all warnings, the plan's first
    messages_before: int  # messages of the untrimmed request
    messages_sent: int
    tokens_before: int  # tokens of the untrimmed request, with all tools
    tokens_sent: int
    edits: tuple[str, ...]  # types of the edits that changed something
    window: int | None = None  # the model's context window in tokens, if known
    instructions_tokens: int = 0  # tokens of instructions and tools
    scale: float = 1.0  # tokens that the upstream counts for one counted here
    would_send: int | None = None  # tokens that a trim would have sent; set only if the policy observes
    would_edit: tuple[str, ...] = ()

    @property
    def beside(self) -> tuple[str, ...]:
        """The warnings that are not the plan's own."""
        return self.warnings[len(self.plan.warnings) :]

    @property
    def only_observed(self) -> bool:
        """Whether the policy only observes, so that the plan is recorded but not carried out."""
        return self.would_send is not None


def report_of(
    exchange: str,
    history: History,
    plan: Plan,
    context: PlanningContext,
    warnings: tuple[str, ...] = (),
    removed_tokens: int = 0,
) -> PlanReport:
    """Return the report of a plan.

    `warnings` are added to the plan's own. `removed_tokens` are the tokens of the tools that were left out.
    """
    summary, scale, instructions = plan.summary, context.scale, len(history.instructions)
    leads = summary is not None and summary.role == "merge" and not instructions
    return PlanReport(
        session=history.placed_in,
        exchange=exchange,
        kind=history.arrival.kind,
        plan=plan,
        warnings=plan.warnings + warnings,
        messages_before=instructions + plan.messages_before,
        messages_sent=instructions + len(plan.view) + leads,
        tokens_before=round((plan.tokens_before + removed_tokens) * scale),
        tokens_sent=round(plan.tokens_sent * scale),
        edits=plan.edits,
        window=context.context_window,
        instructions_tokens=round(context.fixed_tokens * scale),
        scale=scale,
    )


def observed(report: PlanReport, sent: Plan) -> PlanReport:
    """Return the report of a plan that is only recorded. `sent` is the untrimmed plan that is carried out."""
    plan = replace(
        report.plan, view=sent.view, tokens_sent=sent.tokens_sent, stable_ends=(), summary=None, summary_request=None
    )
    return replace(
        report,
        plan=plan,
        messages_sent=report.messages_before,
        tokens_sent=round(sent.tokens_sent * report.scale),
        edits=(),
        would_send=report.tokens_sent,
        would_edit=report.edits,
    )


def response_headers(report: PlanReport) -> Headers:
    """Return the headers that tell the client what the proxy did. docs/api.md lists them."""
    encode = headers.encode_value
    told = {
        headers.EXCHANGE_ID: report.exchange.encode(),
        headers.CONTEXT_KIND: report.kind.encode(),
        headers.CONTEXT_POLICY: encode(report.plan.policy),
        headers.CONTEXT_TOKENS_BEFORE: b"%d" % report.tokens_before,
        headers.CONTEXT_TOKENS_SENT: b"%d" % report.tokens_sent,
        headers.CONTEXT_MESSAGES_BEFORE: b"%d" % report.messages_before,
        headers.CONTEXT_MESSAGES_SENT: b"%d" % report.messages_sent,
        headers.CONTEXT_EDITS: encode(",".join(report.edits)) if report.edits else b"",
    }
    if report.session is not None:
        told[headers.SESSION_ID] = encode(report.session)
    if report.warnings:
        text = " ".join("; ".join(report.warnings).split()).encode("ascii", "replace")
        # A warning may quote the client or the provider, including control characters.
        told[headers.CONTEXT_WARNING] = _CONTROL.sub(b"?", text)[:_WARNING_BYTES]
    return list(zip(map(str.encode, told), told.values(), strict=True))


def receipt_of(report: PlanReport, found: StandingCut | None, *, borrowed: bool = False) -> JsonObject:
    """Return the plan's part of a receipt.

    `found` is the cut that stood before. If it is `borrowed`, it may not be stored yet.

    Changes by an earlier cut to messages that are still sent are in the receipt of the exchange that moved that cut.
    This receipt holds only the cut's position. `gaps` sums up what earlier trims dropped. If `found` has the same gaps,
    `gaps_at` names its node instead.
    """
    plan = report.plan
    cut = plan.cut
    dropped: JsonObject = {"gaps": told_gaps(plan.earlier)}
    if found is not None and not borrowed and plan.earlier == found.cut.gaps:
        dropped = {"gaps_at": found.node}
    return {
        "cut": None
        if cut is None
        else {
            "position": cut.position,
            # The position that the cut moved to becomes a node when the exchange is settled.
            "node": None if plan.trimmed or found is None else found.node,
            "version": cut.version,
            "moved": plan.trimmed,
            "fired": plan.fired,
        },
        "plan": runs_of(plan.arrivals + _overtaken(plan, found) + plan.made),
        **dropped,
        "messages_before": report.messages_before,
        "messages_sent": report.messages_sent,
        "edits": list(report.edits),
        "calibration": report.scale,
        "summary": _summary_told(plan.summary),
        "warnings": list(report.warnings),
    } | (
        {}
        if report.would_send is None
        else {"observed": {"tokens_sent": report.would_send, "edits": list(report.would_edit)}}
    )


def told_gaps(gaps: Iterable[Gap]) -> list[JsonObject]:
    """Return gaps in the form of a receipt."""
    return [
        {"edit": gap.edit, "reason": gap.reason, "start": gap.start, "stop": gap.stop, "tokens": gap.tokens}
        for gap in gaps
    ]


def shifted(receipt: Mapping[str, Any], start: int) -> JsonObject:
    """Return the receipt with positions in the branch. Before, they counted from the request's first message.

    `start` is the position of that message in the branch.
    """
    cut, summary = receipt.get("cut"), receipt.get("summary")
    return {
        **receipt,
        "cut": cut and {**cut, "position": cut["position"] + start},
        "plan": [{**run, "start": run["start"] + start} for run in receipt.get("plan", ())],
        "gaps": [
            {**gap, "start": gap["start"] + start, "stop": gap["stop"] + start} for gap in receipt.get("gaps", ())
        ],
        "summary": summary and {**summary, "summarized_until": summary["summarized_until"] + start},
        "start": start,
    }


def _overtaken(plan: Plan, found: StandingCut | None) -> tuple[Change, ...]:
    """Return the changes of the earlier cut that the new cut no longer holds, because it drops their messages."""
    if not plan.trimmed or plan.cut is None or found is None:
        return ()
    if found.cut.version != plan.version and not plan.earlier:
        return ()  # the trim decided anew about all messages
    left = set(plan.cut.changes)
    return tuple([change for change in found.cut.changes if change not in left])


def runs_of(changes: Iterable[Change]) -> list[JsonObject]:
    """Return changes without their texts. Neighbours with the same edit, reason and action are one run.

    A run is `{edit, reason, action, start, before, after}`. `start` is its first position; `before` and `after` list
    the tokens of each message.
    """
    runs: list[JsonObject] = []
    for change in changes:
        action = "drop" if change.message is None else "replace"
        named: JsonObject = {"edit": change.edit, "reason": change.reason, "action": action}
        last = runs[-1] if runs else None
        if (
            last is None
            or any(last[key] != value for key, value in named.items())
            or last["start"] + len(last["before"]) != change.position
        ):
            runs.append({**named, "start": change.position, "before": [], "after": []})
        last = runs[-1]
        last["before"].append(change.tokens_before)
        last["after"].append(change.tokens_after)
    return runs


def expanded(runs: Iterable[Mapping[str, Any]], node_at: NodeAt) -> list[JsonObject]:
    """Return runs for a reader, one line per message: `{edit, node, position, action, reason, tokens…}`."""
    return [
        _line(run, node_at, position, before, after)
        for run in runs
        for position, (before, after) in enumerate(zip(run["before"], run["after"], strict=True), run["start"])
    ]


def plan_lines(changes: Iterable[Change], node_at: NodeAt) -> list[JsonObject]:
    """Return changes for a reader, one line per message, as `expanded` does."""
    return expanded(runs_of(changes), node_at)


def gap_lines(
    gaps: Iterable[Mapping[str, Any]], node_at: NodeAt, tokens: Callable[[int, int], int]
) -> list[JsonObject]:
    """Return gaps of a receipt for a reader, one line per gap: the keys of `plan_lines`, with `stop` and `messages`.

    Position and node are those of the gap's first message; `tokens_before` is the sum over the gap. Older receipts do
    not hold that sum, so `tokens` computes it from a start and a stop position.
    """
    lines: list[JsonObject] = []
    for gap in gaps:
        start, stop = gap["start"], gap["stop"]
        before = gap["tokens"] if "tokens" in gap else tokens(start, stop)
        line = _line({**gap, "action": "drop"}, node_at, start, before, 0)
        lines.append({**line, "stop": stop, "messages": stop - start})
    return lines


def gap_messages(gaps: Iterable[Gap], node_at: NodeAt, tokens: Sequence[int]) -> list[JsonObject]:
    """Return gaps for a reader, one line per message like `plan_lines`. `tokens` are those of the branch's messages."""
    return [
        _line({"edit": gap.edit, "reason": gap.reason, "action": "drop"}, node_at, position, tokens[position], 0)
        for gap in gaps
        for position in range(gap.start, gap.stop)
    ]


def _line(run: Mapping[str, Any], node_at: NodeAt, position: int, before: int, after: int) -> JsonObject:
    return {
        "edit": run["edit"],
        "node": node_at(position),
        "position": position,
        "action": run["action"],
        "reason": run["reason"],
        "tokens_before": before,
        "tokens_after": after,
    }


def _summary_told(summary: Summary | None) -> JsonObject | None:
    """Return the receipt's entry for the summary that was sent."""
    if summary is None:
        return None
    return {
        "kind": summary.kind,
        "role": summary.role,
        "summarized_until": summary.until,
        "summary_tokens": summary.tokens,
        "message_count": summary.covered_messages,
        "original_tokens": summary.covered_tokens,
        "generation": summary.generation,
        "model": summary.model,
    }


def summary_request_of(
    wanted: SummaryRequest | None, attempt: SummaryRow | None, reason: str = ""
) -> JsonObject | None:
    """Return the receipt's entry for a wanted summary, or None if none is wanted.

    `reason` says why the summary is not being made; empty if it is.
    """
    if wanted is None:
        return None
    return {
        "until": wanted.stop,
        "urgent": wanted.urgent,
        "reason": reason or None,
        "attempt": None
        if attempt is None
        else {"id": attempt.id, "status": attempt.status.value, "reason": attempt.reason},
    }


def log_line(report: PlanReport, status: str, milliseconds: float) -> dict[str, Any]:
    """Return the fields of the log line of an exchange. There is one line per exchange."""
    plan, window = report.plan, report.window
    before, sent = report.tokens_before, report.tokens_sent
    return {
        "session": report.session,
        "exchange": report.exchange,
        "kind": report.kind,
        "status": status,
        "policy": plan.policy,
        "window": window,
        "ratio": round(before / window, 3) if window else None,
        "instructions_tokens": report.instructions_tokens,
        "messages_before": report.messages_before,
        "tokens_before": before,
        "budget": plan.target,
        "messages_sent": report.messages_sent,
        "tokens_sent": sent,
        "saved_percent": round(100 * (1 - sent / before), 1) if before else 0.0,
        "edits": ",".join(report.edits),
        "fired": plan.fired,
        "ms": round(milliseconds),
    }
