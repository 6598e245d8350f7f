"""One trim: what is protected, what the edits change, what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from proxy.conversation import rounds, spans
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.messages.message import MessagesMessage
from proxy.trimming.cost import NO_CHANGE, Costs
from proxy.trimming.draft import Draft
from proxy.trimming.edits import BaseEdit
from proxy.trimming.edits.clear_tool_results import ClearToolResults
from proxy.trimming.edits.dropping import DropOldest
from proxy.trimming.history import ResultBlocks, TrimmedHistory, arrive, trimmed_history
from proxy.trimming.model import Account, Change, Cut, Entry, Gap, Hidden, Prices, Summary
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from proxy.trimming.settings import Target, Trigger
from proxy.trimming.trim import BEYOND_KEEP, ReleaseHidden, Trim, protected, recalled_lately, rescue, trim
from tests.trimming.edits.held import draft_of
from tests.trimming.growing import hidden
from tests.trimming.notation import KNOWN, count, lines, log, messages

# -------------------------------------------------------------------------------------------- move

TEN = [f"user {place}{'.' * 89}" for place in range(10)]
"""Ten messages of a hundred tokens each."""
PRICES = Prices(read=0.1, write=1.25, output=5.0, lifetime=300.0, minimum=0, source="known")


class Puts(BaseEdit, frozen=True):
    """Puts these texts in these places; with None nothing stands there. What stands so already stays."""

    type: str = "puts"
    texts: Mapping[int, str | None]

    def apply(self, draft: Draft) -> Iterator[Change | Summary]:
        for place, text in self.texts.items():
            standing = draft.messages[place]
            if standing is None or standing.text == text:
                continue
            if text is None:
                yield draft.removing(place, self.type, "why")
            else:
                yield draft.replacing(place, self.type, "why", user(text))


class PutsOneByOne(Puts, frozen=True):
    """The same, of which any part can be left out."""

    type: str = "puts_one_by_one"
    piecemeal: ClassVar[bool] = True


class Sums(Puts, frozen=True):
    """Removes, and says in a summary that it did."""

    type: str = "sums"

    def apply(self, draft: Draft) -> Iterator[Change | Summary]:
        yield Summary(
            text="So far.", role="merge", until=4, tokens=30, kind="statistics", covered_messages=4, covered_tokens=400
        )
        yield from super().apply(draft)


class PutsBack(Puts, frozen=True):
    """Does nothing by itself; puts its texts where they do not stand, once the first message is gone."""

    type: str = "puts_back"

    def apply(self, draft: Draft) -> Iterator[Change | Summary]:  # noqa: ARG002 - it is told of no draft
        return iter(())

    def afterwards(self, draft: Draft) -> Iterator[Change]:
        if draft.messages[0] is None:
            yield from (change for change in super().apply(draft) if isinstance(change, Change))


class ClearsWhole(BaseEdit, frozen=True):
    """Clears tool results that stand as they came; what it leaves is longer than a pointer."""

    type: str = "clears_whole"
    keep: int

    def apply(self, draft: Draft) -> Iterator[Change]:
        found = [at for at, message in draft.remaining() if message.role == "tool"]
        for at in found[: len(found) - self.keep]:
            if draft.messages[at] == (message := draft.entries[at].message):
                cleared = message.replacing("content", f"[cleared {at}" + "-" * 150)
                yield draft.replacing(at, self.type, "why", cleared)


def user(text: str) -> Message:
    return ChatMessage.of({"role": "user", "content": text})


def policy(*edits: BaseEdit, **keys: Any) -> Policy:
    """Return a policy with these edits, some of which no file can name."""
    given = Policy.model_validate({"keep": {"rounds": 0}, **keys})
    return given.model_copy(update={"edits": edits})


def base(*given: str, cut: Cut | None = None) -> TrimmedHistory:
    return trimmed_history(arrive(log(*(given or TEN)), Policy(), KNOWN), cut)


def costs(standing: TrimmedHistory, **fields: Any) -> Costs:
    """Return the costs where the last request had all but two of the messages."""
    known: dict[str, Any] = {
        "prices": PRICES,
        "warm": True,
        "messages": standing.messages,
        "tokens": standing.tokens,
        "summary": standing.summary,
        "fixed": 0,
        "cached": len(standing.messages) - 2,
        "account": Account(turns=10, untrimmed=10**6, saved=0.0),
        "earlier": 0,
        "reads": (30,) * len(standing.messages),
    }
    return Costs(**{**known, **fields})


def places(move: Trim) -> list[int]:
    return [change.position for change in move.made]


SHORT = "." * 10
"""The text of a message of twenty tokens."""


def test_edits_run_in_order_until_the_target_is_met() -> None:
    edits = [Puts(texts={at: SHORT}) for at in (4, 2, 6)]
    assert places(trim(base(), policy(*edits), KNOWN, 840, None)) == [2, 4]
    assert places(trim(base(), policy(*edits), KNOWN, None, None)) == [2, 4, 6]
    assert places(trim(base(), policy(*edits), KNOWN, 1000, None)) == []


def test_an_edit_runs_only_where_its_condition_holds_by_then() -> None:
    fewer = Puts.model_validate({"texts": {1: None}, "when": {"messages": 9}})
    edits = (fewer, fewer.model_copy(update={"texts": {2: None}}))
    assert places(trim(base(), policy(*edits), KNOWN, None, None)) == [1]


ROUNDS = [
    line
    for number in range(6)
    for line in (
        f"user {number}{'.' * 89}",
        f"assistant | c{number} look",
        f"tool c{number} {'of' * 30} AX-1270 {'in' * 30}",
    )
]
"""Six rounds of a question of a hundred tokens, a call, and a result of 139 in which stands an id."""


def test_what_is_dropped_in_any_case_is_dropped_before_it_is_shortened() -> None:
    drop = DropOldest.model_validate({"when": {"tokens": 550}, "target": {"tokens": 300}})
    move = trim(base(*ROUNDS), policy(ClearToolResults(keep=0), drop), KNOWN, None, None)
    # With three rounds less it is below 550. It goes on until the target is met, when the results are cleared.
    assert [(change.position, change.edit) for change in move.made] == [
        *((at, "drop_oldest") for at in range(11)),
        (11, "clear_tool_results"),
        (11, "drop_oldest"),
        (14, "clear_tool_results"),
        (17, "clear_tool_results"),
    ]
    assert move.draft.total == 296
    less = drop.model_copy(update={"target": Target(tokens=180)})
    move = trim(base(*ROUNDS), policy(ClearToolResults(keep=0), less), KNOWN, None, None)
    stub = move.draft.messages[17]
    assert stub is not None
    assert "AX-1270" in stub.text  # no stub that is gone said so


def test_nothing_is_dropped_first_where_it_might_stay() -> None:
    clear, drop = ClearToolResults(keep=0), DropOldest(target=Target(tokens=300))
    for edits in (
        (clear, drop.model_copy(update={"target": Target(tokens=700)})),
        (clear, drop.model_copy(update={"when": Trigger(tokens=700)})),
        (clear.model_copy(update={"when": Trigger(tokens=900)}), drop),
        (clear.model_copy(update={"at_least": 400}), drop),
        (clear, Puts(texts={}), drop),
        (clear, drop, Puts(texts={})),
    ):
        made = trim(base(*ROUNDS), policy(*edits), KNOWN, None, None).made
        assert (made[2].position, made[2].edit) == (2, "clear_tool_results")
    alone = trim(base(*ROUNDS), policy(drop), KNOWN, None, None).made
    assert {change.edit for change in alone} == {"drop_oldest"}


def test_what_a_move_leaves() -> None:
    standing = base(
        cut=Cut(
            position=8,
            policy="p",
            version="v",
            changes=(
                Change(position=3, edit="puts", reason="w", message=user(SHORT), tokens_before=100, tokens_after=20),
            ),
            tokens=0,
            messages=0,
            tool_calls=0,
        )
    )
    edits = (Puts(texts={0: None, 3: SHORT, 5: SHORT, 6: None}), Puts(texts={6: "", 3: ""}))
    move = trim(standing, policy(*edits), KNOWN, None, None)
    assert [(change.position, change.tokens_before, change.tokens_after) for change in move.made] == [
        (0, 100, 0),
        (3, 20, 10),
        (5, 100, 20),
        (6, 100, 0),
    ]
    assert move.gaps == [
        Gap(start=0, stop=1, edit="puts", reason="why", tokens=100, tool_calls=0),
        Gap(start=6, stop=7, edit="puts", reason="why", tokens=100, tool_calls=0),
    ]
    # What an earlier move did to a message that is still sent comes first.
    assert [(change.position, change.tokens_after) for change in move.changes] == [(3, 20), (3, 10), (5, 20)]
    assert move.draft.tokens == (0, 100, 100, 10, 100, 20, 0, 100, 100, 100)
    assert (move.draft.total, move.last, move.draft.summary, move.balance) == (630, 5, None, NO_CHANGE)
    nothing = trim(base(), policy(), KNOWN, None, None)
    assert (nothing.made, nothing.gaps, nothing.changes, nothing.last) == ((), [], (), None)


def test_what_does_not_pay_is_not_done_unless_others_rewrite_it_anyway() -> None:
    pays = {"when": {"cost": "auto"}}
    late = Puts.model_validate({"texts": {2: SHORT}, **pays})
    standing = base()
    # It would cost 590 now and save 8 at each of ten requests.
    assert places(trim(standing, policy(late), KNOWN, None, costs(standing))) == []
    # Where nobody reckons, nobody knows that it pays.
    assert places(trim(standing, policy(late), KNOWN, None, None)) == []
    early = Puts(texts={1: SHORT})
    both = trim(standing, policy(late, early), KNOWN, None, costs(standing))
    assert places(both) == [1, 2]
    # 80 tokens are read, 160 freed, 760 written; else 800 are read and 200 written.
    assert both.balance.loss == 0.1 * 100 + 1.25 * 740 - (80 + 250)
    # Those that run are not asked once more, those that are refused twice are left out.
    other = Puts.model_validate({"texts": {0: "." * 80}, **pays})
    assert places(trim(standing, policy(late, other, early), KNOWN, None, costs(standing))) == [1, 2]


def test_where_a_move_must_pay_each_edit_must() -> None:
    standing = base()
    edits = (Puts(texts={1: SHORT}), Puts(texts={9: SHORT}))
    assert places(trim(standing, policy(*edits), KNOWN, None, costs(standing), paying=True)) == [9]
    assert places(trim(standing, policy(*edits), KNOWN, None, costs(standing))) == [1, 9]
    long = costs(standing, account=Account(turns=100, untrimmed=10**6, saved=0.0))
    assert places(trim(standing, policy(*edits), KNOWN, None, long, paying=True)) == [1, 9]


def test_of_what_can_be_done_one_by_one_the_best_part_is() -> None:
    standing = base()
    some = PutsOneByOne(texts={0: "." * 80, 6: ""})
    move = trim(standing, policy(some), KNOWN, None, costs(standing), paying=True)
    assert places(move) == [6]
    assert (move.balance.freed, move.balance.rewritten) == (90, 310)
    # From 6 on it costs 117.5, and each request since then has paid 9 for it.
    early, late = (costs(standing, reads=(requests,) * 10) for requests in (13, 14))
    assert places(trim(standing, policy(some), KNOWN, None, early, paying=True)) == []
    assert places(trim(standing, policy(some), KNOWN, None, late, paying=True)) == [6]
    assert places(trim(standing, policy(some), KNOWN, None, costs(standing))) == [0, 6]
    # Beside an edit that is all or nothing, all of it is done.
    all_or_nothing = Puts(texts={8: SHORT})
    both = policy(all_or_nothing, some)
    assert places(trim(standing, both, KNOWN, None, costs(standing), paying=True)) == [0, 6, 8]
    # So it is where what is sent now is not what the edits began with.
    other = costs(standing, messages=(None, *standing.messages[1:]), tokens=(0, *standing.tokens[1:]))
    assert places(trim(standing, policy(some), KNOWN, None, other, paying=True)) == [0, 6]


def test_a_summary_takes_the_place_of_what_is_removed() -> None:
    standing = base()
    sums = Sums(texts=dict.fromkeys(range(4)))
    move = trim(standing, policy(sums), KNOWN, None, costs(standing))
    assert move.draft.summary == Summary(
        text="So far.", role="merge", until=4, tokens=30, kind="statistics", covered_messages=4, covered_tokens=400
    )
    assert (move.gaps, move.changes) == (
        [Gap(start=0, stop=4, edit="sums", reason="why", tokens=400, tool_calls=0)],
        (),
    )
    assert move.draft.total == 630
    # Nothing of the log is in the cache any more.
    assert move.balance.rewritten == 630
    assert places(trim(standing, policy(sums), KNOWN, None, costs(standing), paying=True)) == []


def test_what_must_follow_from_what_the_others_did_follows() -> None:
    back = PutsBack(texts={5: "." * 50})
    move = trim(base(), policy(back, Puts(texts={0: None, 5: SHORT})), KNOWN, None, None)
    assert [(change.edit, change.position, change.tokens_after) for change in move.made] == [
        ("puts", 0, 0),
        ("puts", 5, 20),
        ("puts_back", 5, 60),
    ]
    assert [change.tokens_after for change in move.changes] == [20, 60]
    assert places(trim(base(), policy(back, Puts(texts={5: SHORT})), KNOWN, None, None)) == [5]


SAME = "=" * 200
TWICE = [
    *("user one", "assistant | a f", f"tool a {SAME}", "assistant so"),
    *("user two", "assistant | b f", f"tool b {SAME}", "assistant so"),
    *("user three", "assistant | c f", f"tool c {SAME}", "assistant so"),
    "user four",
]


def test_where_what_was_put_back_takes_too_much_room_more_goes() -> None:
    edits = Policy.model_validate(
        {
            "keep": {"rounds": 0},
            "trigger": {"tokens": 600},
            "target": {"tokens": 330},
            "edits": [{"type": "deduplicate_results"}, {"type": "drop_oldest"}],
        }
    )
    standing = base(*TWICE)
    pointing = trim(standing, edits, KNOWN, 600, None)
    assert places(pointing) == [6, 10]
    assert pointing.draft.total < 600
    move = trim(standing, edits, KNOWN, 330, None)
    # Without the first round both results are whole again, or one points to the other: that is too much.
    assert lines(message for message in move.draft.messages if message is not None) == TWICE[8:]
    assert move.draft.total == sum(count(entry.message) for entry in log(*TWICE)[8:]) <= 330
    assert trim(standing, edits, KNOWN, 20, None).draft.total == 14


SEVERAL = [
    "user look at it again and again",
    *(line for at in range(6) for line in (f"assistant | c{at} read", f"tool c{at} {SAME * 5 if at < 4 else SAME}")),
    "assistant so",
    "user and now",
]
"""Four results that are the same, at 2, 4, 6 and 8, and two that are other ones."""


def twice(keep: int, **keys: Any) -> Policy:
    """Return a policy that points back first and clears then."""
    edits = [{"type": "deduplicate_results"}, {"type": "clear_tool_results", "keep": keep, "digest_chars": 0}]
    return Policy.model_validate({"trigger": {"every_request": True}, "keep": {"rounds": 1}, "edits": edits, **keys})


def kinds(move: Trim) -> dict[int, str]:
    """Return for each result how it stands."""
    starts = {"[same": "pointer", "[clea": "stub", "=====": "whole"}
    return {
        place: starts[message.text[:5]]
        for place, message in enumerate(move.draft.messages)
        if message is not None and message.role == "tool"
    }


def dangling(move: Trim) -> list[str]:
    """Return pointers to what does not stand whole."""
    whole = {f"ref_{place}" for place, kind in kinds(move).items() if kind == "whole"}
    texts = [message.text for message in move.draft.messages if message is not None and message.role == "tool"]
    refs = [text.rpartition("ref=")[2].rstrip("]") for text in texts if text.startswith("[same")]
    return [ref for ref in refs if ref not in whole]


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize("keep", range(7))
def test_what_one_edit_puts_back_another_trims_in_the_same_move(keep: int, longer: bool) -> None:
    standing = base(*SEVERAL)
    pointing, clearing = twice(keep).edits
    edits = policy(pointing, ClearsWhole(keep=keep) if longer else clearing)
    move = trim(standing, edits, KNOWN, None, None)
    cleared = trim(standing, policy(*edits.edits[1:]), KNOWN, None, None)
    assert move.draft.total <= cleared.draft.total
    old = [*kinds(move)][: 6 - keep]
    assert all(kinds(move)[place] != "whole" for place in old if place < 10) or keep == 6
    assert dangling(move) == []
    # Once more changes nothing: there was nothing left to do.
    later = base(
        *SEVERAL,
        cut=Cut(
            position=15,
            policy="p",
            version="v",
            changes=move.changes,
            tokens=move.draft.total,
            messages=15,
            tool_calls=6,
        ),
    )
    assert trim(later, edits, KNOWN, None, None).made == ()


def test_of_an_output_that_came_very_often_one_copy_may_stay_until_the_next_move() -> None:
    copies = [line for at in range(12) for line in (f"assistant | c{at} read", f"tool c{at} {SAME * 5}")]
    given = ["user look", *copies, "assistant so", "user and now"]
    found: list[list[str]] = []
    cut = None
    edits = policy(twice(0).edits[0], ClearsWhole(keep=0))
    for _ in range(3):
        move = trim(base(*given, cut=cut), edits, KNOWN, None, None)
        assert dangling(move) == []
        found.append([*kinds(move).values()])
        cut = Cut(
            position=len(given),
            policy="p",
            version="v",
            changes=move.changes,
            tokens=move.draft.total,
            messages=len(given),
            tool_calls=12,
        )
    assert found[0] == ["stub"] * 8 + ["whole"] + ["pointer"] * 3
    assert found[1] == found[2] == ["stub"] * 12


def test_what_was_put_back_and_stays_is_no_change() -> None:
    standing = base(*TWICE)
    back = trim(standing, policy(*twice(1).edits[:1], Puts(texts={2: ""})), KNOWN, None, None)
    # The second result was made a pointer and put back; the third points to it now.
    assert [(change.edit, change.position) for change in back.made] == [
        ("puts", 2),
        ("deduplicate_results", 10),
        ("deduplicate_results", 10),
    ]
    assert back.draft.messages[6] == standing.messages[6]


def test_edits_that_undo_each_other_end() -> None:
    back = PutsBack(texts={5: "." * 50})
    move = trim(base(), policy(back, Puts(texts={0: None, 5: SHORT})), KNOWN, None, None)
    assert (move.draft.messages[5], move.draft.messages[0]) == (user("." * 50), None)


def test_what_is_left_out_since_it_does_not_pay_is_not_done_at_another_pass() -> None:
    given = ["user look at this", "assistant " + "." * 4000, *SEVERAL]
    standing = base(*given)
    early = PutsOneByOne(texts={0: "look"})  # it frees next to nothing, and rewrites all
    both = twice(1).model_copy(update={"edits": (*twice(1).edits, early)})
    assert trim(standing, both, KNOWN, None, None).made[0].position == 0
    firsts: set[int] = set()
    for requests in range(60):
        known = costs(
            standing, reads=(requests,) * len(given), account=Account(turns=requests, untrimmed=10**6, saved=0.0)
        )
        move = trim(standing, both, KNOWN, None, known, paying=True)
        first = min(places(move), default=len(given))
        firsts.add(first)
        assert move.draft.messages[:first] == standing.messages[:first]
        assert dangling(move) == []
        assert move.draft.total == sum(count(message) for message in move.draft.messages if message is not None)
        if move.made:
            assert move.balance.freed == sum(standing.tokens) - move.draft.total
            assert known.timely(move.balance, move.draft.tokens)
    assert firsts == {4, len(given)}


def test_what_followed_from_a_part_that_is_left_out_is_undone() -> None:
    """A pointer to what was put back only in the part that is not made would dangle."""
    pointing = trim(base(*TWICE[:8]), policy(*twice(1).edits[:1]), KNOWN, None, None)
    standing = base(
        *TWICE,
        cut=Cut(
            position=8,
            policy="p",
            version="v",
            changes=pointing.changes,
            tokens=pointing.draft.total,
            messages=8,
            tool_calls=2,
        ),
    )
    assert kinds(pointing) == {2: "whole", 6: "pointer"}
    some = policy(*twice(1).edits[:1], PutsOneByOne(texts={2: SAME[:-9], 11: ""}))
    every = trim(standing, some, KNOWN, None, costs(standing))
    assert dangling(every) == []
    known = costs(standing, reads=(10,) * len(TWICE))
    move = trim(standing, some, KNOWN, None, known, paying=True)
    assert move.draft.messages[2] == standing.messages[2]
    assert dangling(move) == []


def turns(first: int, last: int) -> list[str]:
    """Return lines of rounds of forty tokens."""
    return [line for n in range(first, last + 1) for line in (f"user {n:010}", f"assistant {n:010}")]


def test_a_rescue_drops_what_is_oldest_though_no_edit_says_so() -> None:
    standing = base(*turns(1, 4))
    move, warnings = rescue(standing, policy(keep={"rounds": 1, "spans": 2}), KNOWN, 90, None)
    assert (places(move), warnings) == ([0, 1, 2, 3], ())
    assert (move.draft.total, [gap.edit for gap in move.gaps]) == (80, ["drop_oldest"])
    # Its own edits run before, and `drop_oldest` goes to this target, whatever its own says.
    short = Puts(texts={6: ""})
    both = policy(
        *Policy.model_validate(
            {"trigger": {"tokens": 9}, "edits": [{"type": "drop_oldest", "target": {"tokens": 9}}]}
        ).edits,
        short,
    )
    move, _ = rescue(standing, both, KNOWN, 90, None)
    assert places(move) == [0, 1, 2, 3, 6]


def test_a_rescue_goes_beyond_keep_where_nothing_else_helps_and_says_so() -> None:
    standing = base(*turns(1, 4))
    kept = policy(keep={"rounds": 4, "spans": 2, "first_user": True})
    move, warnings = rescue(standing, kept, KNOWN, 90, None)
    assert (move.draft.total, warnings) == (80, (BEYOND_KEEP,))
    # The latest user message stays, whatever upstream says; nothing that was kept could go.
    least = base("user a question that is too long by itself")
    move, warnings = rescue(least, policy(keep={"rounds": 1}), KNOWN, 20, None)
    assert (places(move), warnings) == ([], ())


def test_a_rescue_cuts_tool_output_before_it_drops_the_newest() -> None:
    asked = [*turns(1, 4), "user look", "assistant | c1 look, c2 look"]
    kept = policy(keep={"rounds": 1, "spans": 2})
    one = base(*asked, "tool c1 " + "x" * 8000, "tool c2 short")
    move, warnings = rescue(one, kept, KNOWN, 1000, None)
    assert (set(places(move)), warnings, list(move.gaps)) == ({10}, (BEYOND_KEEP,), [])
    assert move.draft.total <= 1000
    cut = move.draft.messages[10]
    assert cut is not None
    assert "ref_" in cut.text
    # Several that are too much together are cut further, and stay.
    several = base(*asked, "tool c1 " + "x" * 8000, "tool c2 " + "y" * 8000)
    move, warnings = rescue(several, kept, KNOWN, 1200, None)
    assert (set(places(move)), warnings, list(move.gaps)) == ({10, 11}, (BEYOND_KEEP,), [])
    assert move.draft.total <= 1200


def test_a_rescue_counts_what_is_sent_beside_the_log() -> None:
    cut = Cut(
        position=4,
        policy="p",
        version="v",
        changes=(),
        tokens=0,
        messages=0,
        tool_calls=0,
        summary=Summary(
            text="So.", role="merge", until=2, tokens=50, kind="statistics", covered_messages=2, covered_tokens=40
        ),
    )
    standing, kept = base(*turns(1, 4), cut=cut), policy(keep={"rounds": 2, "spans": 9})
    known = replace(KNOWN, fixed_tokens=30)
    # The log alone would fit when two rounds are left: 80 tokens. With the rest that is 160.
    move, warnings = rescue(standing, kept, known, 150, None)
    assert (move.draft.total, warnings) == (80 + 40, (BEYOND_KEEP,))
    move, warnings = rescue(standing, kept, known, 160, None)
    assert (move.draft.total, warnings) == (160, ())


# -------------------------------------------------------------------------------------- protection

LOG = messages(
    [
        "assistant welcome",  # 0, round 0
        "user first",  # 1, round 1
        "assistant | a search",  # 2
        "tool a never forget",  # 3
        "assistant done",  # 4
        "user second",  # 5, round 2
        "assistant | a search, b fetch",  # 6
        "tool a one",  # 7
        "tool b two",  # 8
        "assistant more | c search",  # 9
        "tool c three",  # 10
    ]
)
OPEN = [*LOG, *messages(["assistant | d search, e search", "tool d four"])]
NOTHING = {"rounds": 0}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        pytest.param({"rounds": 0, "spans": 4}, {5}, id="the latest user message, whatever else"),
        pytest.param({"rounds": 1, "spans": 0}, {5}, id="no span of a round"),
        pytest.param({"rounds": 1, "spans": 1}, {5, 9, 10}, id="the newest span of the current round"),
        pytest.param({"rounds": 1, "spans": 2}, {5, 6, 7, 8, 9, 10}, id="whole spans"),
        pytest.param({"rounds": 1, "spans": 9}, {5, 6, 7, 8, 9, 10}, id="never beyond the rounds"),
        pytest.param({"rounds": 2, "spans": 1}, {4, 5, 9, 10}, id="the newest of each round"),
        pytest.param({"rounds": 3, "spans": 1}, {0, 4, 5, 9, 10}, id="the preamble is a round"),
        pytest.param({"rounds": 9, "spans": 9}, set(range(11)), id="all of it"),
        pytest.param({"rounds": 0, "first_user": True}, {1, 5}, id="the first user message"),
    ],
)
def test_keep(keep: dict[str, Any], expected: set[int]) -> None:
    policy = Policy.model_validate({"keep": keep})
    assert protected(LOG, spans(LOG), rounds(LOG), policy) == expected


@pytest.mark.parametrize(
    ("pin", "expected"),
    [
        pytest.param({"regex": "never"}, {2, 3, 5}, id="a pin protects the whole span"),
        pytest.param({"regex": "never", "roles": ["user"]}, {5}, id="only of its roles"),
        pytest.param({"regex": "^done$"}, {4, 5}, id="one message"),
    ],
)
def test_pins(pin: dict[str, Any], expected: set[int]) -> None:
    policy = Policy.model_validate({"keep": NOTHING, "pin": [pin]})
    assert protected(LOG, spans(LOG), rounds(LOG), policy) == expected


def test_calls_that_wait_are_protected_with_the_results_that_came() -> None:
    policy = Policy.model_validate({"keep": NOTHING})
    assert protected(OPEN, spans(OPEN), rounds(OPEN), policy) == {5, 11, 12}


def test_tools_that_are_declared_amid_a_log_stay_with_all_of_their_span() -> None:
    policy = Policy.model_validate({"keep": {"rounds": 0}})
    blocks: list[list[dict[str, Any]]] = [
        [{"type": "tool_use", "id": "a", "name": "look", "input": {}}],
        [{"type": "tool_result", "tool_use_id": "a", "content": "x"}, {"type": "tool_addition", "tool": {}}],
    ]
    called, seen = [
        MessagesMessage.of({"role": role, "content": each})
        for role, each in zip(("assistant", "user"), blocks, strict=True)
    ]
    asked, said = [MessagesMessage.of({"role": role, "content": "hi"}) for role in ("user", "assistant")]
    talk = [asked, called, seen, said, asked, said, asked]
    assert protected(talk, spans(talk), rounds(talk), policy) == {1, 2, 6}


def test_an_empty_log_and_one_without_a_question() -> None:
    policy = Policy.model_validate({"keep": {"first_user": True, "spans": 1}, "pin": [{"regex": "x"}]})
    assert protected([], [], [], policy) == frozenset()
    alone = LOG[:1]
    assert protected(alone, spans(alone), rounds(alone), policy) == {0}


def test_without_a_question_the_last_span_stays_so_that_something_is_sent() -> None:
    policy = Policy.model_validate({"keep": NOTHING})
    log = messages(["assistant hello", "assistant | a f", "tool a 1"])
    assert protected(log, spans(log), rounds(log), policy) == {1, 2}


def test_what_comes_later_pins_nothing_on_arrival() -> None:
    policy = Policy.model_validate({"pin": [{"regex": "two"}]})
    blocks = ResultBlocks(LOG, policy)
    assert [blocks.is_pinned(position) for position in (7, 8, 10)] == [False, True, False]
    by_its_block = Policy.model_validate({"pin": [{"regex": "more", "roles": ["assistant"]}]})
    assert ResultBlocks(LOG, by_its_block).is_pinned(10)
    assert not ResultBlocks(LOG, Policy()).is_pinned(8)
    orphan = messages(["assistant two | a f", "tool a 1", "function f 2"])  # what answers no call of the block is alone
    assert [ResultBlocks(orphan, policy).is_pinned(position) for position in (1, 2)] == [True, False]


# ----------------------------------------------------------------------------------------- release

TALK = [line for n in range(1, 6) for line in (f"user {n}", f"assistant {n}")]


def hiding(lines: list[str], *places: int) -> list[Entry]:
    """Return a log in which the replies at these places have hidden rounds."""
    made = log(*lines)
    return [replace(each, hidden=hidden(each, KNOWN)) if at in places else each for at, each in enumerate(made)]


def draft(target: int | None, *protected: int) -> Draft:
    """Return the draft of a talk in which three replies have hidden rounds each."""
    entries = hiding(TALK, 1, 3, 9)
    found: dict[int, Hidden] = {at: each.hidden for at, each in enumerate(entries) if each.hidden is not None}
    tokens = tuple(each.tokens + (each.hidden.tokens if each.hidden else 0) for each in entries)
    made = draft_of(entries)
    return replace(made, tokens=tokens, hidden=found, target=target, protected=frozenset(protected))


def test_what_is_old_goes_from_the_oldest_until_the_target_is_met() -> None:
    each = draft(None).hidden[1].tokens
    assert [change.position for change in ReleaseHidden().apply(draft(None))] == [1, 3, 9]
    assert [change.position for change in ReleaseHidden().apply(draft(None, 3))] == [1, 9]
    before = draft(None)
    assert [change.position for change in ReleaseHidden().apply(draft(before.total - each))] == [1]
    (change,) = ReleaseHidden().apply(draft(before.total - each))
    assert change == Change(
        position=1,
        edit="hidden_rounds",
        reason=change.reason,
        message=before.messages[1],
        tokens_before=11 + each,
        tokens_after=11,
    )
    after = before.after([change])
    assert (after.total, sorted(after.hidden)) == (before.total - each, [3, 9])
    assert after.messages == before.messages


def test_what_costs_nothing_or_is_gone_stays_as_it_is() -> None:
    before = draft(None)
    free = replace(before, tokens=tuple(each.tokens for each in before.entries))
    assert list(ReleaseHidden().apply(free)) == []
    gone = replace(before, messages=(None,) * 10)
    assert list(ReleaseHidden().apply(gone)) == []


def test_of_the_newest_rounds_it_stays() -> None:
    given = messages(TALK)
    parts, turns = spans(given), rounds(given)
    assert recalled_lately(parts, turns, ()) == frozenset()
    assert recalled_lately(parts, turns, (1, 3, 5, 9)) == {5, 9}
    assert recalled_lately(parts[:2], turns[:1], (1,)) == {1}


def test_of_one_long_round_the_newest_spans_count() -> None:
    calls = [line for n in range(20) for line in (f"assistant | c{n} f", f"tool c{n} 1")]
    given = messages(["user 1", *calls])
    assert recalled_lately(spans(given), rounds(given), range(1, 41, 2)) == set(range(9, 41))


def test_a_move_lets_it_go_before_anything_else_and_the_view_stays_so() -> None:
    entries = hiding(TALK, 1, 3, 9)
    policy = Policy.model_validate(
        {
            "trigger": {"tokens": 150},
            "target": {"tokens": 140},
            "keep": {"rounds": 0},
            "edits": [{"type": "drop_oldest"}],
        }
    )
    made = plan(entries, policy, "p", KNOWN)
    assert [change.edit for change in made.made] == ["hidden_rounds", "hidden_rounds"]
    assert made.edits == ()
    newest = entries[9].hidden
    assert newest is not None
    assert made.view == (*(each.message for each in entries[:9]), *newest.before, entries[9].message)
    every = [entry.hidden for entry in entries if entry.hidden is not None]
    assert made.tokens_before == 110 + sum(hidden.tokens for hidden in every)
    assert made.messages_before == 10 + sum(hidden.messages for hidden in every)
    assert made.tokens_sent == 110 + newest.tokens
    assert made.stable_ends == (4,)
    more = [*entries, *log(*TALK, "user 6")[10:]]
    again = plan(more, policy, "p", KNOWN, made.cut)
    assert not again.trimmed
    assert again.view == (*made.view, more[-1].message)
    off = Policy()
    assert len(plan(entries, off, "p", KNOWN).view) == 16
