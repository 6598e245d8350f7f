"""What did the client send? Each case is a line of a dialogue: what the log holds, what comes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.history.nodes import ROOT
from proxy.history.reconcile import Arrival, Incoming, Kind, Last, Log, Mode, known_prefix, reconcile

# Names are short here: "u1" is the node of the first user message, "a1" that of the first reply.


def _log(*nodes: str, head: str = "", arrival: str = "resend", last: Last | None = None) -> Log:
    return Log(head or nodes[-1], arrival, frozenset(nodes), last)


def test_an_empty_log_makes_everything_first() -> None:
    assert reconcile(Incoming(["u1", "a1", "u2"], speaks=True), Log()) == Arrival(Kind.FIRST, ROOT, 0)
    for incoming in (Incoming(["u1"], speaks=False), Incoming([], speaks=False)):
        assert reconcile(incoming, Log()) == Arrival(Kind.FIRST, ROOT, 0, at_head=True)


def test_of_two_first_messages_at_once_one_follows_the_other_unless_they_are_the_same() -> None:
    log = Log(last=Last("u1", "first", ROOT, complete=False, pending=True))
    assert reconcile(Incoming(["x1"], speaks=False), log).at_head
    assert not reconcile(Incoming(["u1"], speaks=False), log).at_head
    assert not reconcile(Incoming(["x1"], speaks=False, mode=Mode.FULL), log).at_head


@pytest.mark.parametrize("arrival", ["first", "append"])
def test_new_messages_without_a_reply_are_appended_at_the_head(arrival: str) -> None:
    placed = reconcile(Incoming(["x"], speaks=False), _log("u1", "a1", arrival=arrival))
    assert placed == Arrival(Kind.APPEND, "a1", 0, at_head=True)
    assert placed.composed
    assert placed.moves_head


def test_equal_text_is_appended_again_once_it_was_answered() -> None:
    last = Last("x", "append", "a1", complete=True)
    placed = reconcile(
        Incoming(["x"], speaks=False), _log("u1", "a1", "x2", "a2", arrival="append", last=last)
    )
    assert placed == Arrival(Kind.APPEND, "a2", 0, at_head=True)


@pytest.mark.parametrize(("retried", "complete"), [(True, True), (False, False), (True, False)])
def test_an_append_is_a_retry_if_it_says_so_or_was_not_answered_whole(retried: bool, complete: bool) -> None:
    last = Last("x", "append", "a1", complete=complete, replies=("a2",))
    log = _log("u1", "a1", "x2", "a2", arrival="append", last=last)
    placed = reconcile(Incoming(["x"], speaks=False, retried=retried), log)
    assert placed == Arrival(Kind.APPEND, "a1", 0)
    assert placed.moves_head


def test_the_head_does_not_go_back_to_a_retry_that_comes_late() -> None:
    last = Last("x", "append", "a1", complete=True, replies=("a2",))
    log = _log("u1", "a1", "x2", "a2", "u3", "a3", arrival="append", last=last)
    placed = reconcile(Incoming(["x"], speaks=False, retried=True), log)
    assert placed == Arrival(Kind.APPEND, "a1", 0, beside=True)
    assert not placed.moves_head


def test_the_same_append_twice_at_once_has_one_place() -> None:
    last = Last("x", "append", "a1", complete=False, pending=True)
    log = _log("u1", "a1", arrival="append", last=last)
    assert reconcile(Incoming(["x"], speaks=False), log) == Arrival(Kind.APPEND, "a1", 0)


def test_a_retry_of_what_failed_goes_to_the_head() -> None:
    last = Last("x", "append", "a1", complete=False)
    log = _log("u1", "a1", "u2", "a2", arrival="append", last=last)
    assert reconcile(Incoming(["x"], speaks=False), log) == Arrival(Kind.APPEND, "a2", 0, at_head=True)


def test_another_text_is_no_retry_even_if_it_is_called_one() -> None:
    last = Last("x", "append", "a1", complete=False)
    log = _log("u1", "a1", arrival="append", last=last)
    assert reconcile(Incoming(["y"], speaks=False, retried=True), log).at_head


def test_the_repetition_of_a_resend_is_no_append() -> None:
    last = Last("x", "resend", "a1", complete=False)
    log = _log("u1", "a1", arrival="append", last=last)
    assert reconcile(Incoming(["x"], speaks=False), log).at_head


def test_a_history_that_ends_at_the_head_is_resent() -> None:
    placed = reconcile(Incoming(["u1", "a1", "u2"], speaks=True), _log("u1", "a1", arrival="first"))
    assert placed == Arrival(Kind.RESEND, "a1", 2)
    assert not placed.composed


def test_a_history_that_ends_before_the_head_is_rewound() -> None:
    placed = reconcile(Incoming(["u1", "a1", "v2"], speaks=True), _log("u1", "a1", "u2", "a2"))
    assert placed == Arrival(Kind.REWIND, "a1", 2)
    assert placed.moves_head


def test_asking_the_first_turn_again_is_a_rewind_where_the_session_resends() -> None:
    assert reconcile(Incoming(["u1"], speaks=False), _log("u1", "a1", "u2", "a2")) == Arrival(
        Kind.REWIND, "u1", 1
    )


def test_a_strange_history_with_replies_is_foreign() -> None:
    placed = reconcile(Incoming(["x1", "y1", "x2"], speaks=True), _log("u1", "a1"))
    assert placed == Arrival(Kind.FOREIGN, ROOT, 0)
    assert placed.moves_head


def test_a_strange_question_in_a_session_that_resends_stands_aside() -> None:
    placed = reconcile(Incoming(["t1"], speaks=False), _log("u1", "a1"))
    assert placed == Arrival(Kind.SIDE, ROOT, 0)
    assert not placed.moves_head


def test_the_client_can_say_that_it_appends() -> None:
    log = _log("u1", "a1", arrival="resend")
    assert reconcile(Incoming(["x"], speaks=True, mode=Mode.APPEND), log).kind is Kind.APPEND


def test_the_client_can_say_that_it_sends_everything() -> None:
    log = _log("u1", "a1", arrival="first")
    assert reconcile(Incoming(["u1"], speaks=False, mode=Mode.FULL), log) == Arrival(Kind.REWIND, "u1", 1)


def test_a_request_is_named_by_all_that_it_says() -> None:
    assert Incoming(["a", "b"], speaks=False).digest == "b"
    assert Incoming([], speaks=False).digest == ROOT


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_stored_prefix_is_found_by_halving(length: int, stored: int) -> None:
    names = [f"n{i}" for i in range(length)]
    known = frozenset(names[:stored])
    assert known_prefix(names, known) == min(length, stored)
