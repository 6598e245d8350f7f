"""`docs/strategies.md`, made of what the edits really do to recorded sessions.

`python -m tests.support.strategies` writes it. What is said of each edit, and what is shown of which session,
stands in tests/data/strategies/strategies.yaml; all numbers and all texts before and after are measured here.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from proxy.conversation import body_of
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.recall import ref_of
from proxy.tokens import TokenCounter
from proxy.trimming import TOOL_OUTPUT_TYPES, BaseEdit, Edit, Entry, Plan, PlanningContext, Policy, plan
from tests.support.replay import Recording

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "strategies.md"
DATA = ROOT / "tests" / "data" / "strategies"
FOLDERS = (ROOT / "tests" / "data" / "trajectories", DATA)
MODEL = "gpt-5"
READ = 0.1
"""What a token read from the provider's cache costs, relative to one that is not in it."""
LONGEST = 320
"""Characters that are shown of a text as it was."""
LONGEST_AFTER = 900
"""Characters that are shown of what an edit made."""
TAIL = 90
"""Of these, characters from its end."""

INTRO = """\
# Strategies

What each edit does, on a session that really happened: what was there, what is sent, what is kept, what is
lost, what it costs. The page is made by `make strategies` from the code and the recordings in
`tests/data/trajectories` and `tests/data/strategies`, whose sources and licences stand in them; a test
compares the two, so that what is shown is what the edits do. Settings and defaults are in
[configuration.md](configuration.md); whole policies are in [examples/policies](../examples/policies).

Nothing is ever taken from what is stored. What is lost is lost to the model until it is asked for by its ref
(`GET /sessions/{id}/refs/{ref}`) or found again with a tool.

Three things decide what trimming costs:

- The provider's cache holds the beginning of what was sent. Whatever changes, all that follows is read at the
  full price once. So a cut should move seldom; between two moves the beginning keeps its bytes.
- Under `on_arrival` an edit of tool output acts before a result is sent first: no cache is lost.
- `trigger: {cost: auto}` moves the cut when that pays by the model's prices, and not before.

What a policy would have cost on your own sessions, and which values later calls would have missed, is told by
`palimpsest backtest`: see [backtest.md](backtest.md).
"""

READING = """\
## How to read the examples

Each line begins with the position of a message in the session, from 0, instructions not counted. `→` is a
tool call. Long texts are cut for this page, and marked as ⟪so many characters not shown here⟫; every other
mark is the edit's own. Control characters are written out. Of the current round only the newest span is kept
(`keep: {rounds: 1, spans: 1}`; by default four are), so that short sessions show something. Tokens are those
of the messages alone, counted with the vocabulary of OpenAI's newer models. "Paid back" supposes that all of
it was in the cache and that a cached token costs a tenth: it is the number of later requests after which
trimming was the cheaper way.
"""


@dataclass(frozen=True)
class Shown:
    """One edit at work on one session."""

    edit: str
    session: str
    of: tuple[tuple[int, int], ...]
    """The first and the last position of each part that is shown."""
    settings: Mapping[str, Any]
    target: Mapping[str, Any] | None = None
    note: str = ""
    longest: int = LONGEST_AFTER
    """Characters that are shown of what the edit made."""
    told_by: str | None = None
    """Show the session's calls as what this agent tells of them."""
    internal: tuple[int, ...] = ()
    """Positions that are given the mark of internal messages."""
    more: tuple[Mapping[str, Any], ...] = ()
    """What is said after the end of the recording."""

    @property
    def positions(self) -> list[int]:
        """All positions that are shown."""
        return [position for first, last in self.of for position in range(first, last + 1)]

    @property
    def policy(self) -> Policy:
        """The policy that is shown: this edit alone, at every request."""
        target = {} if self.target is None else {"target": self.target}
        edits = [{"type": self.edit, **self.settings}]
        keep = {"rounds": 1, "spans": 1}
        return Policy.model_validate(
            {"trigger": {"every_request": True}, "keep": keep, "edits": edits, **target}
        )

    @property
    def entries(self) -> list[Entry]:
        """The session as trimming sees it, up to its last question or result."""
        recording = Recording.read(next(path for path in map(self._file, FOLDERS) if path.exists()))
        said = recording.messages[recording.lead :]
        if self.more:
            said = [*said, *map(dict, self.more)]
        while said[-1]["role"] == "assistant":
            said = said[:-1]
        if self.told_by is not None:
            said = [*broadcasts(said, self.told_by), {"role": "user", "content": "Where do we stand?"}]
        messages = [ChatMessage.of(message) for message in said]
        counts = COUNTER.messages(messages, MODEL)
        return [
            Entry(
                message=message,
                tokens=tokens,
                ref=ref_of(body_of(message)),
                position=at,
                is_internal=at in self.internal,
            )
            for at, (message, tokens) in enumerate(zip(messages, counts, strict=True))
        ]

    def _file(self, folder: Path) -> Path:
        return folder / f"{self.session}.json"


COUNTER = TokenCounter()


@dataclass(frozen=True)
class Effect:
    """What an edit did."""

    shown: Shown
    entries: Sequence[Entry]
    plan: Plan

    @classmethod
    def of(cls, shown: Shown) -> Effect:
        entries = shown.entries
        known = PlanningContext(count=lambda message: COUNTER.message(message, MODEL))
        return cls(shown, entries, plan(entries, shown.policy, "shown", known))

    @property
    def freed(self) -> int:
        """Tokens."""
        return self.plan.tokens_before - self.plan.tokens_sent

    @property
    def rewritten(self) -> int:
        """Tokens of what is sent from the first change on."""
        first = 0 if self.plan.summary is not None else min(change.position for change in self.plan.made)
        before = sum(entry.tokens for entry in self.entries[:first])
        return self.plan.tokens_sent - before

    @property
    def paid_back(self) -> int:
        """Requests after which it was cheaper than no trimming."""
        return max(
            1, math.ceil((self.rewritten - READ * (self.rewritten + self.freed)) / (READ * self.freed))
        )

    def before(self, positions: Iterable[int]) -> Iterator[str]:
        """Yield what stood at these positions."""
        for position in positions:
            yield told(position, self.entries[position].message)

    def after(self, positions: Iterable[int]) -> Iterator[str]:
        """Yield what is sent of them: what was changed, and runs of what went and of what stayed."""
        summary = self.plan.summary
        if summary is not None:
            where = "at the end of the instructions" if summary.role == "merge" else "before all others"
            yield f"     ({where}) {abridged(summary.text, 2_000)}"
        stands = {change.position: change.message for change in self.plan.changes}
        gone = {position for position, message in stands.items() if message is None}
        for run in _runs(positions, lambda position: (position in gone, position in stands)):
            message = stands.get(run[0])
            if message is not None:
                for position in run:
                    yield told(position, stands[position] or message, self.shown.longest)
            elif run[0] in gone:
                yield _told_of_run(_widened(run, gone), "not sent")
            else:
                yield _told_of_run((run[0], run[-1]), "as before")


def shows() -> list[tuple[Mapping[str, Any], list[Shown]]]:
    """Return what is said of each edit, and what is shown of it."""
    said = yaml.safe_load((DATA / "strategies.yaml").read_text("utf-8"))
    return [(each, [_shown(each["edit"], case) for case in each["shown"]]) for each in said]


def page() -> str:
    """Return the page."""
    edits: dict[str, type[BaseEdit]] = {
        edit.model_fields["type"].default: edit for edit in get_args(get_args(Edit)[0])
    }
    said = shows()
    parts = [INTRO, _table([each for each, _ in said], edits), READING]
    for each, cases in said:
        parts.append(_section(each, edits[each["edit"]], cases))
    return "\n".join(parts)


def told(position: int, message: Message, longest: int = LONGEST) -> str:
    """Return a message as the page shows it."""
    data = message.data
    lines = [f"{position:>4} {message.role}: {abridged(_said(data.get('content')), longest)}".rstrip()]
    lines += [f"     → {call.name}({abridged(call.arguments, 200)})" for call in message.calls]
    return "\n".join(lines)


def abridged(text: str, longest: int) -> str:
    """Return a text with its middle left out, where it is long, and with control characters written out."""
    if len(text) > longest + TAIL:
        left = len(text) - longest
        head, tail = text[: longest - TAIL], text[len(text) - TAIL :]
        text = f"{head}⟪{left:,} characters not shown here⟫{tail}"
    text = "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)
    return re.sub(" +$", "", text.replace("\n", "\n     "), flags=re.MULTILINE)


def broadcasts(messages: Sequence[Mapping[str, Any]], speaker: str) -> list[dict[str, Any]]:
    """Return what an agent would tell others of these calls."""
    return [
        {"role": "user", "content": f"<{speaker}> [调用工具 {call['function']['name']}]"}
        for message in messages
        for call in message.get("tool_calls") or ()
    ]


def _shown(edit: str, case: Mapping[str, Any]) -> Shown:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in case.items()
    }
    fields["of"] = tuple((first, last) for first, last in case["of"])
    return Shown(edit=edit, **fields)


def _table(said: Sequence[Mapping[str, Any]], edits: Mapping[str, type[BaseEdit]]) -> str:
    """Return the overview."""
    rows = ["| edit | under `on_arrival` | needs a target | what is lost |", "| --- | --- | --- | --- |"]
    for each in said:
        name = each["edit"]
        arrival = "yes" if name in TOOL_OUTPUT_TYPES else "no"
        target = "yes, or a limit of its own" if edits[name].needs_target else "no"
        loss = re.split(r"(?<=[.])\s", each["loses"])[0]
        rows.append(f"| [`{name}`](#{name}) | {arrival} | {target} | {loss} |")
    return "\n".join(rows) + "\n"


def _section(said: Mapping[str, Any], edit: type[BaseModel], cases: Sequence[Shown]) -> str:
    """Return what the page says of one edit."""
    doc = re.sub(r"\n(?!\n)", " ", inspect.cleandoc(edit.__doc__ or "").replace("\n\n", "\n\n\n"))
    parts = [f"## {said['edit']}\n", re.sub(r"\n\s*", "\n\n", doc) + "\n"]
    parts += [
        f"- **Keeps:** {said['keeps']}",
        f"- **Loses:** {said['loses']}",
        f"- **Costs:** {said['costs']}\n",
    ]
    parts += [_case(shown) for shown in cases]
    return "\n".join(parts)


def _case(shown: Shown) -> str:
    """Return one edit at work."""
    effect = Effect.of(shown)
    settings = {"type": shown.edit, **shown.settings}
    written = ", ".join(f"{name}: {_yaml(value)}" for name, value in settings.items())
    target = "" if shown.target is None else f", with `target: {_yaml(shown.target)}`"
    head = f"`{{{written}}}`{target}, on `{shown.session}`:"
    made, back = effect.plan, effect.paid_back
    figures = (
        f"{len(effect.entries)} messages of {made.tokens_before:,} tokens become {len(made.view)} of "
        f"{made.tokens_sent:,}. {effect.rewritten:,} tokens are written anew, which is paid back after "
        f"{back} request{'s' if back > 1 else ''}."
    )
    if shown.edit in TOOL_OUTPUT_TYPES:
        figures += " Under `on_arrival` nothing is."
    parts = [head, ""]
    parts += [f"{shown.note.strip()}\n"] if shown.note else []
    parts += [
        "~~~~text",
        "before",
        *effect.before(shown.positions),
        "",
        "after",
        *effect.after(shown.positions),
    ]
    parts += ["~~~~", ""]
    return "\n".join([*parts, figures, ""])


def _runs(positions: Iterable[int], kind: Callable[[int], object]) -> Iterator[list[int]]:
    """Yield positions in a row that are of one kind."""
    run: list[int] = []
    for position in positions:
        if run and (position != run[-1] + 1 or kind(position) != kind(run[-1])):
            yield run
            run = []
        run.append(position)
    if run:
        yield run


def _widened(run: Sequence[int], gone: Collection[int]) -> tuple[int, int]:
    """Return the first and the last of all messages in a row that went, of which `run` is a part."""
    first, last = run[0], run[-1]
    while first - 1 in gone:
        first -= 1
    while last + 1 in gone:
        last += 1
    return first, last


def _told_of_run(ends: tuple[int, int], what: str) -> str:
    first, last = ends
    return f"{first:>4} {what}" if first == last else f"{first:>4} to {last}: {what}"


def _said(content: Any) -> str:
    """Return a message's content as text."""
    if isinstance(content, list):
        return "\n".join(part["text"] if part.get("type") == "text" else json.dumps(part) for part in content)
    return content or ""


def _yaml(value: Any) -> str:
    """Return a setting as it could be written."""
    return json.dumps(value).replace('"', "")


def _escaped(char: str) -> str:
    return repr(char)[1:-1]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
