"""What is said of an exchange."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from proxy.dialects.chat.message import ChatMessage
from proxy.pipeline.receipt import (
    PlanReport,
    expanded,
    gap_lines,
    gap_messages,
    gaps_told,
    log_line,
    plan_lines,
    receipt_of,
    runs_of,
)
from proxy.store import StandingCut
from proxy.trimming import Change, Cut, Gap, Plan, Summary

STUB = ChatMessage(b'{"role":"tool","tool_call_id":"c","content":"short"}')


NODES = ["n0", "n1", "n2", "n3"]
GAP = Gap(
    start=0,
    stop=1,
    edit="keep_tool_calls",
    reason="not among the newest 3 tool calls",
    tokens=9,
    tool_calls=1,
)


FOUND = StandingCut(
    cut=Cut(
        position=5,
        policy="default",
        version="v1",
        changes=(
            Change(
                position=2,
                edit="truncate_tool_output",
                reason="long",
                message=STUB,
                tokens_before=90,
                tokens_after=10,
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
        position=position,
        edit="drop_oldest",
        reason=reason,
        message=None,
        tokens_before=tokens,
        tokens_after=0,
    )


def _shorten(position: int) -> Change:
    return Change(
        position=position,
        edit="truncate_tool_output",
        reason="long",
        message=STUB,
        tokens_before=90,
        tokens_after=9,
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
        moved=moved,
        fired="tokens 90 > 60" if moved else "",
        arrivals=arrivals,
        tokens_before=200,
        tokens_sent=50,
        view=(STUB,),
        warnings=warnings,
        made=(_drop(2), _drop(3, 20)) if moved else (),
        earlier=(GAP,) if moved else cut.gaps,
    )


def ticket(plan: Plan, instructions: int, messages: int, **told: Any) -> PlanReport:
    return PlanReport(
        session="s", exchange="e", plan=plan, instructions=instructions, messages=messages, **told
    )


def test_neighbours_that_one_edit_dropped_for_one_reason_are_one_run() -> None:
    changes = (_drop(0), _drop(1, 20), _drop(3), _drop(4, reason="too much"), _shorten(5), _shorten(6))
    runs = runs_of(changes)
    assert [(run["start"], run["before"]) for run in runs] == [
        (0, [10, 20]),
        (3, [10]),
        (4, [10]),
        (5, [90, 90]),
    ]
    assert expanded(runs, node_at) == plan_lines(changes, node_at)


def test_a_change_is_shown_with_its_node_if_it_became_one() -> None:
    lines = plan_lines((_drop(3), _shorten(4)), node_at)
    assert [(line["node"], line["action"], line["tokens_after"]) for line in lines] == [
        ("n3", "drop", 0),
        (None, "replace", 9),
    ]


def test_the_exchange_that_moves_the_cut_tells_its_changes() -> None:
    receipt = receipt_of(ticket(_plan(), 1, 4), None)
    assert receipt["cut"] == {
        "position": 5,
        "node": None,  # not there yet
        "version": "v1",
        "moved": True,
        "fired": "tokens 90 > 60",
    }
    assert [(run["start"], run["before"]) for run in receipt["plan"]] == [(2, [10, 20])]
    assert receipt["gaps"] == gaps_told([GAP])
    assert receipt["edits"] == ["keep_tool_calls", "drop_oldest"]
    assert (receipt["messages_before"], receipt["messages_sent"]) == (5, 2)


def test_a_later_one_tells_where_the_cut_is_and_what_it_changed_itself() -> None:
    receipt = receipt_of(ticket(_plan(moved=False, arrivals=(_shorten(5),)), 1, 4), FOUND)
    assert receipt["cut"]["node"] == "n3"
    assert [run["start"] for run in receipt["plan"]] == [5]
    assert [(gap["start"], gap["stop"]) for gap in receipt["gaps"]] == [(0, 1), (2, 4)]


def test_a_move_tells_what_earlier_ones_did_to_what_it_drops() -> None:
    receipt = receipt_of(ticket(_plan(), 1, 4), FOUND)
    told = [
        (run["edit"], run["action"], run["start"], run["before"], run["after"]) for run in receipt["plan"]
    ]
    assert told == [
        ("truncate_tool_output", "replace", 2, [90], [10]),
        ("drop_oldest", "drop", 2, [10, 20], [0, 0]),
    ]


def test_a_move_of_another_version_began_anew() -> None:
    old = replace(FOUND, cut=replace(FOUND.cut, version="v0"))
    anew = replace(_plan(), earlier=())
    receipt = receipt_of(ticket(anew, 1, 4), old)
    assert [run["edit"] for run in receipt["plan"]] == ["drop_oldest"]


def test_a_summary_is_told_with_what_it_stands_for() -> None:
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
    receipt = receipt_of(ticket(replace(_plan(), summary=summary), 1, 4), None)
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
    assert receipt_of(ticket(_plan(), 1, 4), None)["summary"] is None


def test_counts_are_told_as_upstream_has_them() -> None:
    scaled = ticket(_plan(), 1, 4, window=1_000, fixed_tokens=20, scale=1.3)
    assert (scaled.tokens_before, scaled.tokens_sent) == (260, 65)
    headers = dict(scaled.headers())
    assert (headers[b"x-context-tokens-before"], headers[b"x-context-tokens-sent"]) == (b"260", b"65")
    assert receipt_of(scaled, None)["calibration"] == 1.3
    line = log_line(scaled, "resend", "complete", 1.0)
    told = ("instructions_tokens", "tokens_before", "tokens_sent", "window", "ratio")
    assert [line[name] for name in told] == [26, 260, 65, 1_000, 0.26]


def test_a_merged_summary_without_instructions_is_a_message_more() -> None:
    summary = Summary(
        text="So far.",
        role="merge",
        until=4,
        tokens=12,
        kind="statistics",
        covered_messages=4,
        covered_tokens=130,
    )
    plan = replace(_plan(), summary=summary)
    assert [ticket(plan, lead, 4).messages_sent for lead in (0, 1)] == [2, 2]


def test_the_log_line_of_a_window_that_is_not_known() -> None:
    line = log_line(ticket(_plan(), 1, 4), "resend", "complete", 1.0)
    assert (line["window"], line["ratio"], line["budget"]) == (None, None, None)


GAPS = [GAP, Gap(start=2, stop=4, edit="drop_oldest", reason="old", tokens=30, tool_calls=0)]


def test_gaps_are_one_line_each_in_a_receipt() -> None:
    told = gaps_told(GAPS)
    lines = gap_lines(told, node_at, lambda _start, _stop: 0)
    (first,) = plan_lines(
        [Change(position=0, edit=GAP.edit, reason=GAP.reason, message=None, tokens_before=9, tokens_after=0)],
        node_at,
    )
    (second,) = plan_lines([_drop(2, 30)], node_at)
    assert lines == [first | {"stop": 1, "messages": 1}, second | {"stop": 4, "messages": 2}]


def test_the_tokens_of_a_gap_are_counted_where_the_receipt_has_none() -> None:
    old = [{name: value for name, value in gap.items() if name != "tokens"} for gap in gaps_told(GAPS)]
    lines = gap_lines(old, node_at, lambda start, stop: 100 * start + stop)
    assert [line["tokens_before"] for line in lines] == [1, 204]
    empty = gaps_told([Gap(start=0, stop=1, edit="drop_oldest", reason="old", tokens=0, tool_calls=0)])
    assert gap_lines(empty, node_at, lambda _start, _stop: 7)[0]["tokens_before"] == 0


def test_gaps_are_shown_message_by_message() -> None:
    assert gap_messages(GAPS, node_at, [9, 8, 10, 20]) == plan_lines(
        [
            Change(
                position=0, edit=GAP.edit, reason=GAP.reason, message=None, tokens_before=9, tokens_after=0
            ),
            _drop(2),
            _drop(3, 20),
        ],
        node_at,
    )


def test_headers_tell_what_was_done() -> None:
    plan = _plan(warnings=("a", "b\nc"))
    headers = dict(
        PlanReport(
            session="会话", exchange="e1", plan=plan, instructions=1, messages=4, warnings=("d",)
        ).headers()
    )
    assert headers[b"x-session-id"] == b"%E4%BC%9A%E8%AF%9D"
    assert headers[b"x-context-tokens-before"] == b"200"
    assert headers[b"x-context-messages-sent"] == b"2"
    assert headers[b"x-context-edits"] == b"keep_tool_calls,drop_oldest"
    assert headers[b"x-context-warning"] == b"a; b c; d"


def test_a_stateless_request_has_no_session_to_name() -> None:
    headers = dict(
        PlanReport(
            session=None,
            exchange="e1",
            plan=Plan(
                policy="off",
                version="",
                cut=None,
                moved=False,
                fired="",
                arrivals=(),
                tokens_before=0,
                tokens_sent=0,
                view=(),
            ),
            instructions=0,
            messages=1,
        ).headers()
    )
    assert b"x-session-id" not in headers
    assert headers[b"x-context-edits"] == b""
    assert b"x-context-warning" not in headers


def test_the_log_line_says_how_much_was_saved() -> None:
    line = log_line(ticket(_plan(), 1, 4), "resend", "complete", 12.4)
    assert (line["saved_percent"], line["ms"], line["kind"]) == (75.0, 12, "resend")
