"""What did the client send? Each case is a line of a dialogue: what the log holds, what comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.conversation.ids import ROOT, names_under
from proxy.conversation.reconcile import Arrival, Incoming, Kind, Last, Log, Manner, Mode, known_prefix, reconcile

# Names are short here: "u1" is the node of the first user message, "a1" that of the first reply.


class _Tree:
    """Nodes under each other, the first one under the root; `contents` where windows are looked for."""

    def __init__(self, nodes: Sequence[str], contents: Sequence[bytes] = ()) -> None:
        self._depths = {name: depth for depth, name in enumerate(nodes, 1)}
        self._parents = [ROOT, *nodes]
        self._contents = contents
        self.questions = 0

    def depths(self, names: Sequence[str]) -> Mapping[str, int]:
        self.questions += 1
        return {name: self._depths[name] for name in names if name in self._depths}

    def parents(self, content: bytes, depth: int) -> Sequence[str]:
        places = [place for place, each in enumerate(self._contents) if each == content]
        return [self._parents[place] for place in sorted(places, key=lambda place: abs(place + 1 - depth))]


def _log(
    *nodes: str, head: str = "", arrival: str = "resend", last: Last | None = None, manner: Manner | None = None
) -> Log:
    return Log(stored=_Tree(nodes), head=head or nodes[-1], depth=len(nodes), arrival=arrival, last=last, manner=manner)


_EMPTY = Log(stored=_Tree(()))


def test_an_empty_log_makes_everything_first() -> None:
    assert reconcile(Incoming(names=["u1", "a1", "u2"], replies=(1,)), _EMPTY) == Arrival(
        kind=Kind.FIRST, base=ROOT, known=0
    )
    for incoming in (Incoming(names=["u1"]), Incoming(names=[])):
        assert reconcile(incoming, _EMPTY) == Arrival(kind=Kind.FIRST, base=ROOT, known=0, at_head=True)


def test_of_first_requests_only_one_that_may_be_a_question_beside_the_conversation_yields() -> None:
    manner = Manner(instructions="i1", tools=None, model="m")
    asked = Incoming(names=["u1"], manner=manner)
    assert reconcile(asked, _EMPTY).yields
    for changed in ({"manner": None}, {"mode": Mode.APPEND}, {"mode": Mode.FULL}, {"replies": (0,)}):
        assert not reconcile(replace(asked, **changed), _EMPTY).yields


def test_of_two_first_messages_at_once_one_follows_the_other_unless_they_are_the_same() -> None:
    log = Log(stored=_Tree(()), last=Last(digest="u1", kind="first", base=ROOT, complete=False, pending=True))
    assert reconcile(Incoming(names=["x1"]), log).at_head
    assert not reconcile(Incoming(names=["u1"]), log).at_head
    assert not reconcile(Incoming(names=["x1"], mode=Mode.FULL), log).at_head


@pytest.mark.parametrize("arrival", ["first", "append"])
def test_new_messages_without_a_reply_are_appended_at_the_head(arrival: str) -> None:
    placed = reconcile(Incoming(names=["x"]), _log("u1", "a1", arrival=arrival))
    assert placed == Arrival(kind=Kind.APPEND, base="a1", known=0, at_head=True)
    assert placed.composed
    assert placed.moves_head


def test_equal_text_is_appended_again_once_it_was_answered() -> None:
    last = Last(digest="x", kind="append", base="a1", complete=True)
    placed = reconcile(Incoming(names=["x"]), _log("u1", "a1", "x2", "a2", arrival="append", last=last))
    assert placed == Arrival(kind=Kind.APPEND, base="a2", known=0, at_head=True)


@pytest.mark.parametrize(("retried", "complete"), [(True, True), (False, False), (True, False)])
def test_an_append_is_a_retry_if_it_says_so_or_was_not_answered_whole(retried: bool, complete: bool) -> None:
    last = Last(digest="x", kind="append", base="a1", complete=complete, replies=("a2",))
    log = _log("u1", "a1", "x2", "a2", arrival="append", last=last)
    placed = reconcile(Incoming(names=["x"], retried=retried), log)
    assert placed == Arrival(kind=Kind.APPEND, base="a1", known=0)
    assert placed.moves_head


@pytest.mark.parametrize(("complete", "pending"), [(False, False), (True, False), (False, True)])
def test_a_question_whose_answer_broke_off_may_be_followed_by_more(complete: bool, pending: bool) -> None:
    """The client threw away what came of the answer, and sends both its messages."""
    last = Last(digest="u1", kind="first", base=ROOT, complete=complete, pending=pending, replies=("a1",))
    placed = reconcile(Incoming(names=["u1", "u2"]), _log("u1", "a1", arrival="first", last=last))
    again = Arrival(kind=Kind.APPEND, base=ROOT, known=0)
    assert placed == (Arrival(kind=Kind.APPEND, base="a1", known=0, at_head=True) if complete or pending else again)


@pytest.mark.parametrize(
    ("base", "mode", "named", "follows"),
    [
        (ROOT, Mode.AUTO, False, True),
        (ROOT, Mode.APPEND, False, False),
        (ROOT, Mode.AUTO, True, False),
        ("a0", Mode.AUTO, False, False),
    ],
)
def test_more_may_follow_a_first_request_whose_answer_nobody_heard(
    base: str, mode: Mode, named: bool, follows: bool
) -> None:
    """A voice agent was interrupted before it spoke, and sends both questions."""
    last = Last(digest="u1", kind="append", base=base, complete=True, replies=("a1",))
    manner = None if named else Manner(instructions=None, tools=None, model="m")
    placed = reconcile(
        Incoming(names=["u1", "u2"], mode=mode, manner=manner), _log("u1", "a1", arrival="append", last=last)
    )
    again = Arrival(kind=Kind.APPEND, base=ROOT, known=0)
    assert placed == (again if follows else Arrival(kind=Kind.APPEND, base="a1", known=0, at_head=True))


def test_the_head_does_not_go_back_to_a_retry_that_comes_late() -> None:
    last = Last(digest="x", kind="append", base="a1", complete=True, replies=("a2",))
    log = _log("u1", "a1", "x2", "a2", "u3", "a3", arrival="append", last=last)
    placed = reconcile(Incoming(names=["x"], retried=True), log)
    assert placed == Arrival(kind=Kind.APPEND, base="a1", known=0, beside=True)
    assert not placed.moves_head


def test_the_same_append_twice_at_once_has_one_place() -> None:
    last = Last(digest="x", kind="append", base="a1", complete=False, pending=True)
    log = _log("u1", "a1", arrival="append", last=last)
    assert reconcile(Incoming(names=["x"]), log) == Arrival(kind=Kind.APPEND, base="a1", known=0)


def test_a_retry_of_what_failed_goes_to_the_head() -> None:
    last = Last(digest="x", kind="append", base="a1", complete=False)
    log = _log("u1", "a1", "u2", "a2", arrival="append", last=last)
    assert reconcile(Incoming(names=["x"]), log) == Arrival(kind=Kind.APPEND, base="a2", known=0, at_head=True)


def test_another_text_is_no_retry_even_if_it_is_called_one() -> None:
    last = Last(digest="x", kind="append", base="a1", complete=False)
    log = _log("u1", "a1", arrival="append", last=last)
    assert reconcile(Incoming(names=["y"], retried=True), log).at_head


def test_the_repetition_of_a_resend_is_no_append() -> None:
    last = Last(digest="x", kind="resend", base="a1", complete=False)
    log = _log("u1", "a1", arrival="append", last=last)
    assert reconcile(Incoming(names=["x"]), log).at_head


def test_a_history_that_ends_at_the_head_is_resent() -> None:
    placed = reconcile(Incoming(names=["u1", "a1", "u2"], replies=(1,)), _log("u1", "a1", arrival="first"))
    assert placed == Arrival(kind=Kind.RESEND, base="a1", known=2)
    assert not placed.composed


def test_a_history_that_ends_before_the_head_is_rewound() -> None:
    placed = reconcile(Incoming(names=["u1", "a1", "v2"], replies=(1,)), _log("u1", "a1", "u2", "a2"))
    assert placed == Arrival(kind=Kind.REWIND, base="a1", known=2)
    assert placed.moves_head


def test_asking_the_first_turn_again_is_a_rewind_where_the_session_resends() -> None:
    assert reconcile(Incoming(names=["u1"]), _log("u1", "a1", "u2", "a2")) == Arrival(
        kind=Kind.REWIND, base="u1", known=1
    )


def test_a_strange_history_with_replies_is_foreign() -> None:
    placed = reconcile(
        Incoming(names=["x1", "y1", "x2"], contents=[b"x1", b"y1", b"x2"], replies=[1]), _log("u1", "a1")
    )
    assert placed == Arrival(kind=Kind.FOREIGN, base=ROOT, known=0)
    assert placed.moves_head


def test_a_strange_question_in_a_session_that_resends_stands_aside() -> None:
    placed = reconcile(Incoming(names=["t1"]), _log("u1", "a1"))
    assert placed == Arrival(kind=Kind.SIDE, base=ROOT, known=0)
    assert not placed.moves_head


def test_results_alone_go_on_with_their_calls_in_a_session_that_resends_too() -> None:
    log = _log("u1", "a1", arrival="resend")
    assert reconcile(Incoming(names=["r1"], answers=True), log) == Arrival(
        kind=Kind.APPEND, base="a1", known=0, at_head=True, resends=True
    )


def test_the_client_can_say_that_it_appends() -> None:
    log = _log("u1", "a1", arrival="resend")
    assert reconcile(Incoming(names=["x"], replies=(1,), mode=Mode.APPEND), log).kind is Kind.APPEND


def test_the_client_can_say_that_it_sends_everything() -> None:
    log = _log("u1", "a1", arrival="first")
    assert reconcile(Incoming(names=["u1"], mode=Mode.FULL), log) == Arrival(kind=Kind.REWIND, base="u1", known=1)


def test_a_request_is_named_by_all_that_it_says() -> None:
    assert Incoming(names=["a", "b"]).digest == "b"
    assert Incoming(names=[]).digest == ROOT


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(-1, 3000))
def test_the_stored_prefix_is_found_by_few_questions(length: int, stored: int, head: int) -> None:
    names = [f"n{i}" for i in range(length)]
    tree = _Tree(names[:stored])
    found = known_prefix(names, tree.depths, f"n{head}" if head < min(length, stored) else ROOT)
    assert found == min(length, stored)
    assert tree.questions <= 3


def test_a_prefix_that_ends_at_the_head_takes_one_question() -> None:
    names = [f"n{i}" for i in range(1000)]
    tree = _Tree(names[:999])
    assert known_prefix(names, tree.depths, "n998") == 999
    assert tree.questions == 1


# ------------------------------------------------------------------------------- windows

_TEXTS = [b"%d" % number * 20 for number in range(8)]
"""What eight messages say, a question and a reply in turn."""
_NODES = names_under(ROOT, _TEXTS)


def _window(first: int, *new: bytes, head: int = 8, more: Sequence[bytes] = ()) -> Arrival:
    """Reconcile what begins at the message `first` of the eight, with `new` ones at its end."""
    contents = [*_TEXTS[first:], *new]
    replies = [place for place in range(len(contents)) if (place + first) % 2 == 1]
    texts = [*_TEXTS, *more]
    log = Log(stored=_Tree(names_under(ROOT, texts), texts), head=_NODES[head - 1], depth=head, arrival="resend")
    return reconcile(Incoming(names=names_under(ROOT, contents), contents=contents, replies=replies), log)


@pytest.mark.parametrize("first", [1, 2, 5])
def test_a_history_without_its_beginning_goes_on_where_its_run_ends(first: int) -> None:
    placed = _window(first, b"new")
    assert placed == Arrival(kind=Kind.WINDOWED, base=_NODES[-1], known=8 - first)
    assert placed.moves_head
    assert not placed.composed


def test_a_window_that_ends_before_the_head_is_a_branch_there() -> None:
    contents = [*_TEXTS[2:5], b"other"]
    log = Log(stored=_Tree(_NODES, _TEXTS), head=_NODES[-1], depth=8, arrival="resend")
    placed = reconcile(Incoming(names=names_under(ROOT, contents), contents=contents, replies=[1]), log)
    assert placed == Arrival(kind=Kind.WINDOWED, base=_NODES[4], known=3)


def test_a_run_without_a_reply_is_no_window() -> None:
    contents = [_TEXTS[6], b"a strange reply", b"new"]
    log = Log(stored=_Tree(_NODES, _TEXTS), head=_NODES[-1], depth=8, arrival="resend")
    assert (
        reconcile(Incoming(names=names_under(ROOT, contents), contents=contents, replies=[1]), log).kind is Kind.FOREIGN
    )


def test_of_several_places_the_longest_run_counts() -> None:
    texts = [b"go on", b"a", b"x", b"go on", b"a", b"y", b"z", b"b"]
    nodes = names_under(ROOT, [b"root", *texts])
    contents = [b"go on", b"a", b"y", b"new"]
    log = Log(stored=_Tree(nodes, [b"root", *texts]), head=nodes[-1], depth=9, arrival="resend")
    placed = reconcile(Incoming(names=names_under(ROOT, contents), contents=contents, replies=[1]), log)
    assert placed == Arrival(kind=Kind.WINDOWED, base=nodes[6], known=3)


# ------------------------------------------------------------------- beside the conversation

_USUAL = Manner(instructions="v1", tools="t1", model="big")
_TITLE = Manner(instructions="title", tools=None, model="small")


@pytest.mark.parametrize(
    ("usual", "asked"),
    [
        (_USUAL, Manner(instructions="title", tools=None, model="big")),
        (_USUAL, Manner(instructions="title", tools="t2", model="small")),
        (Manner(instructions="v1", tools=None, model="big"), Manner(instructions="title", tools=None, model="small")),
        (Manner(instructions=None, tools=None, model="big"), Manner(instructions="title", tools=None, model="small")),
        (Manner(instructions="v1", tools=None, model="big"), Manner(instructions="title", tools="t2", model="big")),
    ],
)
def test_other_instructions_with_other_tools_or_another_model_ask_beside(usual: Manner, asked: Manner) -> None:
    log = _log("u1", "a1", arrival="append", manner=usual)
    assert reconcile(Incoming(names=["x"], manner=asked), log) == Arrival(kind=Kind.SIDE, base=ROOT, known=0)


@pytest.mark.parametrize(
    "asked",
    [
        None,
        Manner(instructions=None, tools=None, model="small"),
        Manner(instructions="v1", tools=None, model="small"),
        Manner(instructions="v2", tools="t1", model="small"),
        _USUAL,
    ],
)
def test_what_asks_as_usual_goes_on_with_the_conversation(asked: Manner | None) -> None:
    log = _log("u1", "a1", arrival="append", manner=_USUAL)
    assert reconcile(Incoming(names=["x"], manner=asked), log).kind is Kind.APPEND


def test_another_model_alone_is_no_question_beside() -> None:
    log = _log("u1", "a1", arrival="append", manner=Manner(instructions="v1", tools=None, model="big"))
    assert (
        reconcile(Incoming(names=["x"], manner=Manner(instructions="v2", tools=None, model="big")), log).kind
        is Kind.APPEND
    )


@pytest.mark.parametrize("name", ["x", "u1"])
def test_other_instructions_alone_ask_beside_until_the_session_appends(name: str) -> None:
    asked = Manner(instructions="title", tools="t1", model="big")
    for arrival, kind in (("first", Kind.SIDE), ("append", Kind.APPEND)):
        log = _log("u1", "a1", arrival=arrival, manner=_USUAL)
        assert reconcile(Incoming(names=[name], manner=asked), log).kind is kind
        assert reconcile(Incoming(names=[name], manner=asked, mode=Mode.APPEND), log).kind is Kind.APPEND
    resending = _log("u1", "a1", arrival="resend", manner=_USUAL)
    kind = Kind.REWIND if name == "u1" else Kind.SIDE  # the first question asked again, under changed instructions
    assert reconcile(Incoming(names=[name], manner=asked), resending).kind is kind


@pytest.mark.parametrize("arrival", ["append", "resend"])
def test_a_question_beside_may_say_what_the_conversation_began_with(arrival: str) -> None:
    log = _log("u1", "a1", arrival=arrival, manner=_USUAL)
    assert reconcile(Incoming(names=["u1"], manner=_TITLE), log) == Arrival(kind=Kind.SIDE, base=ROOT, known=0)


def test_the_client_can_say_that_it_asks_nothing_beside() -> None:
    log = _log("u1", "a1", arrival="append", manner=_USUAL)
    assert reconcile(Incoming(names=["x"], mode=Mode.APPEND, manner=_TITLE), log).kind is Kind.APPEND
    assert reconcile(Incoming(names=["u1"], mode=Mode.FULL, manner=_TITLE), log).kind is Kind.REWIND


def test_who_speaks_for_the_model_asks_nothing_beside() -> None:
    log = _log("u1", "a1", arrival="append", manner=_USUAL)
    assert reconcile(Incoming(names=["u1", "a1", "u2"], replies=(1,), manner=_TITLE), log).kind is Kind.RESEND


def test_a_question_beside_may_come_while_the_first_one_is_answered() -> None:
    last = Last(digest="u1", kind="first", base=ROOT, complete=False, pending=True, manner=_USUAL)
    log = Log(stored=_Tree(()), last=last)
    assert reconcile(Incoming(names=["t1"], manner=_TITLE), log) == Arrival(kind=Kind.SIDE, base=ROOT, known=0)
    assert reconcile(Incoming(names=["x1"], manner=_USUAL), log).kind is Kind.FIRST
    failed = Log(stored=_Tree(()), last=replace(last, pending=False))
    assert reconcile(Incoming(names=["t1"], manner=_TITLE), failed).kind is Kind.FIRST


def test_nothing_is_beside_a_conversation_whose_manner_is_not_known() -> None:
    log = _log("u1", "a1", arrival="append")
    assert (
        reconcile(Incoming(names=["x"], manner=Manner(instructions="title", tools=None, model="small")), log).kind
        is Kind.APPEND
    )


@pytest.mark.parametrize(("head", "kind"), [("a1", Kind.RESEND), ("a2", Kind.REWIND)])
def test_what_is_known_to_be_stored_is_not_asked_for(head: str, kind: Kind) -> None:
    tree = _Tree(["u1", "a1"])
    log = Log(stored=tree, head=head, depth=2, arrival="resend", prefix=2)
    assert reconcile(Incoming(names=["u1", "a1", "u2"], replies=(1,)), log) == Arrival(kind=kind, base="a1", known=2)
    # A session without a head has answered nothing; what it holds is known all the same.
    assert reconcile(Incoming(names=["u1", "a1", "u2"], replies=(1,)), replace(log, head=ROOT)).known == 2
    assert tree.questions == 0
