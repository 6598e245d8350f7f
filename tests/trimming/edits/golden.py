"""Golden tables: what an edit makes of a history, in YAML, read by people as well as by tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from proxy.conversation import rounds, spans
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.protocol import CHAT
from proxy.trimming.draft import Draft
from proxy.trimming.edits import BaseEdit, Edit
from proxy.trimming.edits.edit import ToolOutputEdit
from proxy.trimming.model import Entry
from proxy.trimming.policy import Policy
from proxy.trimming.trim import protected
from tests.trimming.edits.held import outcome
from tests.trimming.notation import count, entries, lines, messages

TABLES = Path(__file__).parent.parent / "golden"
REF = "ref"


class Case:
    """One row of a table."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def __str__(self) -> str:
        return str(self.row["name"])

    def edit(self) -> BaseEdit:
        """Return the edit as it is configured."""
        edit: BaseEdit = TypeAdapter[Any](Edit).validate_python(self.row["edit"])
        return edit

    def draft(self) -> Draft:
        """Return the history before the edit."""
        log = messages(self.row["before"])
        policy = Policy.model_validate({"keep": self.row.get("keep", {"rounds": 0}), "pin": self.row.get("pin", [])})
        parts, turns = spans(log), rounds(log)
        return Draft(
            entries=tuple(entries(log)),
            messages=tuple(log),
            tokens=tuple(map(count, log)),
            spans=parts,
            rounds=turns,
            protected=protected(log, parts, turns, policy),
            count=count,
            fixed_tokens=self.row.get("fixed_tokens", 0),
            target=self.row.get("target"),
        )

    def check(self) -> None:
        """Compare what the edit makes of the history, sent with repairs, with what the table says."""
        before = self.draft()
        changes, summary = outcome(self.edit(), before)
        after = before.after(changes, summary)
        left = CHAT.repair([message for message in after.messages if message is not None]).messages
        expected = self.row["before"] if self.row["after"] == "same" else self.row["after"]
        assert lines(left) == expected, self.row["why"]
        assert bool(changes) == (self.row["after"] != "same")
        assert not {change.position for change in changes} & before.protected
        if "reasons" in self.row:
            assert list(dict.fromkeys(change.reason for change in changes)) == self.row["reasons"]
        if before.target is not None:
            assert (after.total > before.target) == self.row.get("missed", False)


def rows(edit: str) -> list[dict[str, Any]]:
    """Return the rows of an edit's table, its type filled in."""
    table: list[dict[str, Any]] = yaml.safe_load((TABLES / f"{edit}.yaml").read_text(encoding="utf-8"))
    return [{**row, "edit": {"type": edit, **row.get("edit", {})}} for row in table]


def cases(edit: str) -> list[Case]:
    """Return the cases of an edit that looks at whole histories."""
    return [Case(row) for row in rows(edit)]


def result(content: Any) -> Message:
    """Return a tool's output."""
    return ChatMessage.of({"role": "tool", "tool_call_id": "a", "content": content})


def entry(message: Message) -> Entry:
    """Return a result as trimming sees it; a letter is a token."""
    return Entry(message=message, tokens=len(message.text), ref=REF, position=0)


def shortened(edit: ToolOutputEdit, content: Any) -> Message | None:
    """Return what an edit of single outputs makes of one."""
    message = result(content)
    made = edit.shorten(message, entry(message))
    return made.message if made is not None else None


def check_output(edit: type[ToolOutputEdit], row: dict[str, Any]) -> None:
    """Compare what an edit makes of an output with what the table says."""
    message = result("".join(text * times for text, times in row["text"]))
    made = edit.model_validate(row["edit"]).shorten(message, entry(message))
    if row["after"] == "same":
        assert made is None, row["why"]
    else:
        assert made is not None
        assert made.message.text == row["after"], row["why"]
        assert made.reason == row.get("reason", made.reason)
