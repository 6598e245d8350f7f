"""What is said of an exchange."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from proxy.dialects.chat.message import ChatMessage
from proxy.pipeline.receipt import (
    PlanReport,
    expanded,
    gap_lines,
    gap_messages,
    log_line,
    plan_lines,
    receipt_of,
    report_of,
    response_headers,
    runs_of,
)
from proxy.store import StandingCut
from proxy.trimming import Change, Cut, Entry, Gap, Plan, PlanningContext, Summary, bypass
from tests.support.talk import message

STUB = ChatMessage(b'{"role":"tool","tool_call_id":"c","content":"short"}')


NODES = ["n0", "n1", "n2", "n3"]
GAP = Gap(start=0, stop=1, edit="keep_tool_calls", reason="not among the newest 3 tool calls", tokens=9, tool_calls=1)


FOUND = StandingCut(
    cut=Cut(
        position=5,
        policy="default",
        version="v1",
        changes=(
            Change(
                position=2, edit="truncate_tool_output", reason="long", message=STUB, tokens_before=90, tokens_after=10
            ),
        ),
        tokens=50,
        messages=2,
        tool_calls=1,
        gaps=(GAP,),
    ),
    node="n3",
    kept=None,
)


def node_at(position: int) -> str | None:
    return NODES[position] if position < len(NODES) else None


def _drop(position: int, tokens: int = 10, reason: str = "old") -> Change:
    return Change(
        position=position, edit="drop_oldest", reason=reason, message=None, tokens_before=tokens, tokens_after=0
    )


def _shorten(position: int) -> Change:
    return Change(
        position=position, edit="truncate_tool_output", reason="long", message=STUB, tokens_before=90, tokens_after=9
    )


def _plan(*, moved: bool = True, arrivals: tuple[Change, ...] = (), warnings: tuple[str, ...] = ()) -> Plan:
    cut = Cut(
        position=5,
        policy="default",
        version="v1",
        changes=(),
        tokens=50,
        messages=2,
        tool_calls=1,
        gaps=(GAP, Gap(start=2, stop=4, edit="drop_oldest", reason="old", tokens=30, tool_calls=0)),
    )
    return Plan(
        policy="default",
        version="v1",
        cut=cut,
        trimmed=moved,
        fired="tokens 90 > 60" if moved else "",
        arrivals=arrivals,
        tokens_before=200,
        tokens_sent=50,
        view=(STUB,),
        warnings=warnings,
        made=(_drop(2), _drop(3, 20)) if moved else (),
        earlier=(GAP,) if moved else cut.gaps,
        messages_before=4,
    )


def report(plan: Plan, instructions: int = 1, *, session: str | None = "s", **context: Any) -> PlanReport:
    """Return the report of a plan; `context` are fields of the planning context."""
    warnings = context.pop("warnings", ())
    planning = PlanningContext(count=lambda _: 10, **context)
    return report_of("e1", placed(session, "resend", instructions), plan, planning, warnings)


def placed(session: str | None, kind: str, instructions: int) -> Any:
    """Return as much of a request's history as a report tells."""
    lead = (message("system", "S"),) * instructions
    return SimpleNamespace(placed_in=session, arrival=SimpleNamespace(kind=kind), instructions=lead)


def gaps_told(*gaps: Gap) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = receipt_of(report(replace(_plan(), earlier=gaps)), None)["gaps"]
    return told


def test_neighbours_that_one_edit_dropped_for_one_reason_are_one_run() -> None:
    changes = (_drop(0), _drop(1, 20), _drop(3), _drop(4, reason="too much"), _shorten(5), _shorten(6))
    runs = runs_of(changes)
    assert [(run["start"], run["before"]) for run in runs] == [(0, [10, 20]), (3, [10]), (4, [10]), (5, [90, 90])]
    lines = expanded(runs, node_at)
    assert lines == plan_lines(changes, node_at)
    assert [(line["position"], line["tokens_before"], line["tokens_after"]) for line in lines] == [
        (change.position, change.tokens_before, change.tokens_after) for change in changes
    ]


def test_a_change_is_shown_with_the_node_of_its_message() -> None:
    lines = plan_lines((_drop(3), _shorten(4)), node_at)
    assert [(line["node"], line["action"], line["tokens_after"]) for line in lines] == [
        ("n3", "drop", 0),
        (None, "replace", 9),
    ]


def test_the_receipt_of_a_trim_tells_its_changes() -> None:
    receipt = receipt_of(report(_plan()), None)
    assert receipt["cut"] == {
        "position": 5,
        "node": None,  # not there yet
        "version": "v1",
        "moved": True,
        "fired": "tokens 90 > 60",
    }
    assert [(run["start"], run["before"]) for run in receipt["plan"]] == [(2, [10, 20])]
    assert receipt["gaps"] == [{"edit": GAP.edit, "reason": GAP.reason, "start": 0, "stop": 1, "tokens": 9}]
    assert receipt["edits"] == ["keep_tool_calls", "drop_oldest"]
    assert (receipt["messages_before"], receipt["messages_sent"]) == (5, 2)


def test_a_later_receipt_tells_the_cut_and_its_own_changes() -> None:
    receipt = receipt_of(report(_plan(moved=False, arrivals=(_shorten(5),))), FOUND)
    assert receipt["cut"]["node"] == "n3"
    assert [run["start"] for run in receipt["plan"]] == [5]
    assert [(gap["start"], gap["stop"]) for gap in receipt["gaps"]] == [(0, 1), (2, 4)]


def test_gaps_that_the_cut_itself_tells_are_not_told_again() -> None:
    plan = _plan(moved=False)
    assert plan.cut is not None
    receipt = receipt_of(report(plan), replace(FOUND, cut=plan.cut))
    assert (receipt.get("gaps"), receipt["gaps_at"]) == (None, FOUND.node)
    assert len(receipt_of(report(plan), replace(FOUND, cut=plan.cut), borrowed=True)["gaps"]) == 2
    part = replace(plan, earlier=plan.earlier[1:])  # of a request that speaks of a part of the branch
    assert len(receipt_of(report(part), replace(FOUND, cut=plan.cut))["gaps"]) == 1


def test_a_trim_tells_what_earlier_trims_did_to_what_it_drops() -> None:
    receipt = receipt_of(report(_plan()), FOUND)
    told = [(run["edit"], run["action"], run["start"], run["before"], run["after"]) for run in receipt["plan"]]
    assert told == [("truncate_tool_output", "replace", 2, [90], [10]), ("drop_oldest", "drop", 2, [10, 20], [0, 0])]


def test_a_trim_of_another_policy_version_tells_nothing_of_earlier_trims() -> None:
    old = replace(FOUND, cut=replace(FOUND.cut, version="v0"))
    anew = replace(_plan(), earlier=())
    receipt = receipt_of(report(anew), old)
    assert [run["edit"] for run in receipt["plan"]] == ["drop_oldest"]


def test_a_receipt_tells_what_a_summary_stands_for() -> None:
    summary = Summary(
        text="So far.",
        role="system",
        until=4,
        tokens=12,
        kind="statistics",
        covered_messages=4,
        covered_tokens=130,
        generation=2,
        state={"of": "its own"},
    )
    receipt = receipt_of(report(replace(_plan(), summary=summary)), None)
    assert receipt["summary"] == {
        "kind": "statistics",
        "role": "system",
        "summarized_until": 4,
        "summary_tokens": 12,
        "message_count": 4,
        "original_tokens": 130,
        "generation": 2,
        "model": None,
    }
    assert receipt_of(report(_plan()), None)["summary"] is None


def test_tokens_are_told_as_upstream_counts_them() -> None:
    scaled = report(_plan(), context_window=1_000, fixed_tokens=20, scale=1.3)
    assert (scaled.tokens_before, scaled.tokens_sent) == (260, 65)
    headers = dict(response_headers(scaled))
    assert (headers[b"x-context-tokens-before"], headers[b"x-context-tokens-sent"]) == (b"260", b"65")
    assert receipt_of(scaled, None)["calibration"] == 1.3
    line = log_line(scaled, "complete", 1.0)
    told = ("instructions_tokens", "tokens_before", "tokens_sent", "window", "ratio")
    assert [line[name] for name in told] == [26, 260, 65, 1_000, 0.26]


def test_a_merged_summary_without_instructions_counts_as_one_more_message() -> None:
    summary = Summary(
        text="So far.", role="merge", until=4, tokens=12, kind="statistics", covered_messages=4, covered_tokens=130
    )
    plan = replace(_plan(), summary=summary)
    assert [report(plan, lead).messages_sent for lead in (0, 1)] == [2, 2]


def test_the_log_line_without_a_known_window() -> None:
    line = log_line(report(_plan()), "complete", 1.0)
    assert (line["window"], line["ratio"], line["budget"]) == (None, None, None)


GAPS = [GAP, Gap(start=2, stop=4, edit="drop_oldest", reason="old", tokens=30, tool_calls=0)]


def test_each_gap_of_a_receipt_is_one_line() -> None:
    told = gaps_told(*GAPS)
    lines = gap_lines(told, node_at, lambda _start, _stop: 0)
    (first,) = plan_lines(
        [Change(position=0, edit=GAP.edit, reason=GAP.reason, message=None, tokens_before=9, tokens_after=0)], node_at
    )
    (second,) = plan_lines([_drop(2, 30)], node_at)
    assert lines == [first | {"stop": 1, "messages": 1}, second | {"stop": 4, "messages": 2}]


def test_the_tokens_of_a_gap_are_counted_where_the_receipt_has_none() -> None:
    old = [{name: value for name, value in gap.items() if name != "tokens"} for gap in gaps_told(*GAPS)]
    lines = gap_lines(old, node_at, lambda start, stop: 100 * start + stop)
    assert [line["tokens_before"] for line in lines] == [1, 204]
    empty = gaps_told(Gap(start=0, stop=1, edit="drop_oldest", reason="old", tokens=0, tool_calls=0))
    assert gap_lines(empty, node_at, lambda _start, _stop: 7)[0]["tokens_before"] == 0


def test_gaps_are_shown_message_by_message() -> None:
    assert gap_messages(GAPS, node_at, [9, 8, 10, 20]) == plan_lines(
        [
            Change(position=0, edit=GAP.edit, reason=GAP.reason, message=None, tokens_before=9, tokens_after=0),
            _drop(2),
            _drop(3, 20),
        ],
        node_at,
    )


def test_response_headers_tell_what_was_done() -> None:
    plan = _plan(warnings=("a", "b\nc"))
    headers = dict(response_headers(report(plan, session="会话", warnings=("d\x00\x7f",))))
    assert headers[b"x-session-id"] == b"%E4%BC%9A%E8%AF%9D"
    assert headers[b"x-context-tokens-before"] == b"200"
    assert headers[b"x-context-messages-sent"] == b"2"
    assert headers[b"x-context-edits"] == b"keep_tool_calls,drop_oldest"
    assert headers[b"x-context-warning"] == b"a; b c; d??"


def test_a_stateless_request_has_no_session_header() -> None:
    nothing = bypass((), PlanningContext(count=lambda _: 10))
    headers = dict(response_headers(report(nothing, session=None)))
    assert b"x-session-id" not in headers
    assert headers[b"x-context-edits"] == b""
    assert b"x-context-warning" not in headers


def test_a_report_tells_what_is_known_of_an_exchange() -> None:
    messages = (message("user", "a"), message("assistant", "b"), message("user", "c"))
    entries = [Entry(message=each, tokens=10, ref=f"ref_{at}", position=at) for at, each in enumerate(messages)]
    known = PlanningContext(count=lambda _: 10, fixed_tokens=5, context_window=1_000, scale=2.0)
    told = report_of("e", placed("s", "first", 1), bypass(entries, known), known, ("told",))
    assert (told.session, told.exchange, told.window) == ("s", "e", 1_000)
    assert (told.messages_before, told.messages_sent) == (4, 4)
    assert (told.tokens_before, told.tokens_sent, told.instructions_tokens) == (70, 70, 10)
    assert told.warnings == ("told",)


def test_the_log_line_says_how_much_was_saved() -> None:
    line = log_line(report(_plan()), "complete", 12.4)
    assert (line["saved_percent"], line["ms"], line["kind"]) == (75.0, 12, "resend")
