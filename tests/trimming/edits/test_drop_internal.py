"""`drop_internal`: its table, and what holds of it on any history."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.dialects import Message
from proxy.trimming.draft import Draft
from proxy.trimming.edits.drop_internal import DropInternal
from proxy.trimming.model import Change
from tests.trimming.edits.golden import Case, rows
from tests.trimming.edits.held import check, draft_of, recorded, standing
from tests.trimming.histories import TRIED, valid


def marking(draft: Draft, places: Iterable[int]) -> Draft:
    marked = set(places)
    return replace(
        draft,
        entries=tuple(
            replace(entry, is_internal=place in marked) for place, entry in enumerate(draft.entries)
        ),
    )


class MarkedCase(Case):
    """A row that says which messages are marked."""

    def draft(self) -> Draft:
        return marking(super().draft(), self.row.get("internal", []))


@pytest.mark.parametrize("case", [MarkedCase(row) for row in rows("drop_internal")], ids=str)
def test_golden(case: MarkedCase) -> None:
    case.check()


def test_what_an_earlier_edit_removed_is_left_alone() -> None:
    draft = MarkedCase(
        {"before": ["user q1", "assistant | a f", "tool a 1", "user q2"], "internal": [1, 2]}
    ).draft()
    emptied = draft.after(
        [Change(position=1, edit="other", reason="", message=None, tokens_before=10, tokens_after=0)]
    )
    assert [change.position for change in DropInternal().apply(emptied)] == [2]


def test_in_a_recorded_session_the_notes_between_agents_go() -> None:
    session = recorded("deerflow-replay-ultra-processed-foods")
    spoken = [place for place, message in enumerate(session) if message.role == "assistant"]
    draft = marking(draft_of(session), spoken[:2])
    after = check(DropInternal(), draft)
    assert [message.role for message in session][:4] == ["user", "assistant", "assistant", "tool"]
    assert standing(after) == [session[0], *session[4:]]


@TRIED
@given(valid(), st.data(), st.integers(0, 2))
def test_it_is_safe_on_any_history(log: list[Message], data: st.DataObject, kept: int) -> None:
    marked = data.draw(st.sets(st.integers(0, max(0, len(log) - 1))))
    draft = marking(draft_of(log, {"rounds": kept, "spans": 2}), marked)
    after = check(DropInternal(), draft)
    left = {position for position, _ in after.remaining(0, len(log))}
    assert left & marked <= draft.protected
