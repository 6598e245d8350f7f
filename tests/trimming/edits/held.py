"""What holds of every edit, whatever it does: a check of one draft, and the drafts to try it on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from proxy.conversation import rounds, spans
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.protocol import CHAT
from proxy.trimming.draft import Draft
from proxy.trimming.edits import BaseEdit
from proxy.trimming.model import Change, Entry, Summary
from proxy.trimming.policy import Policy
from proxy.trimming.trim import protected
from tests.trimming.notation import count, entries

RECORDED = Path(__file__).parents[2] / "data" / "trajectories"
NO_KEEP = {"rounds": 0}


def draft_of(given: Sequence[Message] | Sequence[Entry], keep: dict[str, Any] | None = None, **fields: Any) -> Draft:
    """Return the draft of a log in which nothing was edited; unless told otherwise `keep` keeps nothing."""
    log = [each if isinstance(each, Entry) else entries([each])[0] for each in given]
    log = [
        replace(each, position=place, ref=f"ref_{place}") if each.ref == "ref_0" else each
        for place, each in enumerate(log)
    ]
    messages = [entry.message for entry in log]
    parts, turns = spans(messages), rounds(messages)
    policy = Policy.model_validate({"keep": keep or NO_KEEP})
    return Draft(
        entries=tuple(log),
        messages=tuple(messages),
        tokens=tuple(entry.tokens for entry in log),
        spans=parts,
        rounds=turns,
        protected=protected(messages, parts, turns, policy),
        count=count,
        **fields,
    )


def recorded(name: str) -> list[Message]:
    """Return a recorded session without its instructions."""
    messages = json.loads((RECORDED / f"{name}.json").read_text("utf-8"))["messages"]
    return [ChatMessage.of(each) for each in messages if each["role"] not in {"system", "developer"}]


def outcome(edit: BaseEdit, draft: Draft) -> tuple[list[Change], Summary | None]:
    """Return the changes that an edit makes, and its summary."""
    made = list(edit.apply(draft))
    summaries = [each for each in made if isinstance(each, Summary)]
    assert len(summaries) <= 1
    return [each for each in made if isinstance(each, Change)], summaries[0] if summaries else None


def standing(draft: Draft) -> list[Message]:
    """Return what stands."""
    return [message for message in draft.messages if message is not None]


def texts(draft: Draft) -> list[str]:
    """Return the texts of what stands."""
    return [message.text for message in standing(draft)]


def check(edit: BaseEdit, draft: Draft) -> Draft:
    """Check that an edit is safe on this draft, and return the draft after it.

    It breaks no rule of the protocol that was kept, touches nothing protected, changes a place once, says the
    same when it is asked again, and leaves its own work alone.
    """
    changes, summary = outcome(edit, draft)
    places = [change.position for change in changes]
    assert len(set(places)) == len(places)
    assert not set(places) & draft.protected
    for change in changes:
        left = draft.count(change.message) if change.message is not None else 0
        assert (change.edit, change.tokens_before, change.tokens_after) == (
            edit.type,
            draft.tokens[change.position],
            left,
        )
    again = replace(draft, entries=tuple(replace(entry) for entry in draft.entries))
    assert outcome(type(edit).model_validate_json(edit.model_dump_json()), again) == (changes, summary)
    after = draft.after(changes, summary)
    if not CHAT.problems(standing(draft)):
        assert not CHAT.problems(standing(after))
    assert list(edit.afterwards(after)) == []
    assert outcome(edit, after) == ([], None)
    return after
