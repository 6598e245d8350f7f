"""`docs/strategies.md`: one example per edit, computed from recorded sessions.

`python -m tests.support.strategies` writes the page. tests/data/strategies/strategies.yaml has the text about
each edit and names the part of a session that is shown. All figures and outputs are computed here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from proxy.conversation import body_of
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.recall import ref_of
from proxy.tokens import TokenCounter
from proxy.trimming import Entry, Plan, PlanningContext, Policy, plan
from proxy.trimming.edits.compact_tool_output import CompactToolOutput
from tests.support.outputs import OUTPUTS
from tests.support.replay import Recording

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "strategies.md"
DATA = ROOT / "tests" / "data" / "strategies"
FOLDERS = (ROOT / "tests" / "data" / "trajectories", DATA)
MODEL = "gpt-5"
READ = 0.1
"""Price of a cached token, relative to an uncached one."""
LONGEST = 60
"""Characters shown of an original text."""
LONGEST_AFTER = 200
"""Characters shown of an edit's output."""
TAIL = 25
"""How many of these characters come from the end."""

INTRO = """\
# Strategies

What each edit does to a recorded session, computed by `make strategies`.

- A line begins with the position of a message. `→` is a tool call, `⏎` a line break.
- `⟪…⟫`: left out here. `keep` is `{rounds: 1, spans: 1}`.
- Costs: what a trim rewrites in the provider's cache. "Pays back": after so many requests the trim was cheaper, if a
  cached token costs a tenth.

See [settings](configuration.md#edits), [policies](../examples/policies), [`palimpsest backtest`](backtest.md).
"""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One edit at work on one session."""

    edit: str
    session: str
    of: tuple[tuple[int, int], ...]
    """First and last position of each part that is shown."""
    settings: Mapping[str, Any]
    target: Mapping[str, Any] | None = None
    note: str = ""
    longest: int = LONGEST_AFTER
    """Characters shown of the edit's output."""
    told_by: str | None = None
    """If set, show the session's calls as this agent would report them."""
    internal: tuple[int, ...] = ()
    """Positions that are marked as internal."""
    more: tuple[Mapping[str, Any], ...] = ()
    """Messages after the end of the recording."""

    @property
    def positions(self) -> list[int]:
        """All positions that are shown."""
        return [position for first, last in self.of for position in range(first, last + 1)]

    @property
    def policy(self) -> Policy:
        """A policy with only this edit, which runs at every request."""
        target = {} if self.target is None else {"target": self.target}
        edits = [{"type": self.edit, **self.settings}]
        keep = {"rounds": 1, "spans": 1}
        return Policy.model_validate({"trigger": {"every_request": True}, "keep": keep, "edits": edits, **target})

    @property
    def entries(self) -> list[Entry]:
        """The session up to its last question or tool result."""
        file = next(path for folder in FOLDERS if (path := folder / f"{self.session}.json").exists())
        recording = Recording.read(file)
        said = [*recording.messages[recording.lead :], *map(dict, self.more)]
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


COUNTER = TokenCounter()


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What an edit did."""

    shown: Shown
    entries: Sequence[Entry]
    plan: Plan

    @classmethod
    def of(cls, shown: Shown) -> Effect:
        entries = shown.entries
        known = PlanningContext(count=lambda message: COUNTER.message(message, MODEL))
        return cls(shown=shown, entries=entries, plan=plan(entries, shown.policy, "shown", known))

    @property
    def freed(self) -> int:
        """Tokens freed."""
        return self.plan.tokens_before - self.plan.tokens_sent

    @property
    def rewritten(self) -> int:
        """Tokens sent from the first change on."""
        first = 0 if self.plan.summary is not None else min(change.position for change in self.plan.made)
        return self.plan.tokens_sent - sum(entry.tokens for entry in self.entries[:first])

    @property
    def paid_back(self) -> int:
        """Number of requests after which the edit was cheaper than no trimming."""
        cost = self.rewritten - READ * (self.rewritten + self.freed)
        return max(1, math.ceil(cost / (READ * self.freed)))

    def before(self, positions: Iterable[int]) -> Iterator[str]:
        """Yield the originals at these positions."""
        for position in positions:
            yield told(position, self.entries[position].message)

    def after(self, positions: Iterable[int]) -> Iterator[str]:
        """Yield what is sent for them: changed messages, and runs of dropped and of unchanged ones."""
        summary = self.plan.summary
        if summary is not None:
            where = "in the instructions" if summary.role == "merge" else "first message"
            yield f"     ({where}) {abridged(summary.text, 2 * self.shown.longest)}"
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
                yield _told_of_run((run[0], run[-1]), "unchanged")


def shows() -> list[tuple[Mapping[str, Any], list[Shown]]]:
    """Return the text about each edit, with its examples."""
    said = yaml.safe_load((DATA / "strategies.yaml").read_text("utf-8"))
    return [(each, [_shown(each["edit"], case) for case in each["shown"]]) for each in said]


def page() -> str:
    """Return the page."""
    return "\n".join([INTRO, *(_section(said, cases) for said, cases in shows()), _outputs()])


LOST = {
    "git diff": "middle of the context",
    "ls -lR": "lines",
    "grep -n": "matches",
    "pytest -v": "passed tests",
    "npm install": "steps",
    "Java trace": "library frames",
    "HTML page": "styles, second menu",
    "JSON list": "records",
    "CSV": "rows",
    "base64": "bytes",
}
"""What is removed from each output if all methods are allowed."""


def _outputs() -> str:
    """Return the table of ten outputs: tokens as they are, without loss, and with every method."""
    rows = ["## Ten tool outputs", "", "Tokens under `compact_tool_output`; the ref reads what is lost.", ""]
    rows += ["| output | before | `minify`, `table` | all methods | lost then |", "|---|---|---|---|---|"]
    for name, text in OUTPUTS.items():
        message = ChatMessage.of({"role": "tool", "tool_call_id": "a", "content": text})
        counts = [COUNTER.message(message, MODEL)]
        entry = Entry(message=message, tokens=counts[0], ref=ref_of(body_of(message)), position=0)
        for methods in (("minify", "table"), ("minify", "table", "preview", "log", "noise")):
            short = CompactToolOutput(methods=methods).shorten(message, entry)
            counts.append(COUNTER.message(short.message if short is not None else message, MODEL))
        lost = LOST[name] if counts[2] < counts[1] else "nothing"
        rows.append(f"| {name} | {' | '.join(f'{count:,}' for count in counts)} | {lost} |")
    return "\n".join([*rows, ""])


def told(position: int, message: Message, longest: int = LONGEST) -> str:
    """Return a message as the page shows it."""
    lines = [f"{position:>4} {message.role}: {abridged(_said(message.data.get('content')), longest)}".rstrip()]
    lines += [f"     → {call.name}({abridged(call.arguments, longest)})" for call in message.calls]
    return "\n".join(lines)


def abridged(text: str, longest: int) -> str:
    """Return a text on one line, without its middle if it is long, with control characters escaped."""
    if len(text) > longest + TAIL:
        left = len(text) - longest
        text = f"{text[: longest - TAIL]}⟪{left:,} characters⟫{text[len(text) - TAIL :]}"
    text = re.sub(r"\s*\n\s*", "⏎", text.strip())
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def broadcasts(messages: Sequence[Mapping[str, Any]], speaker: str) -> list[dict[str, Any]]:
    """Return how an agent would report these calls to others."""
    return [
        {"role": "user", "content": f"<{speaker}> [调用工具 {call['function']['name']}]"}
        for message in messages
        for call in message.get("tool_calls") or ()
    ]


def _shown(edit: str, case: Mapping[str, Any]) -> Shown:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in case.items()}
    fields["of"] = tuple((first, last) for first, last in case["of"])
    return Shown(edit=edit, **fields)


def _section(said: Mapping[str, Any], cases: Sequence[Shown]) -> str:
    """Return the page's section on one edit."""
    parts = [f"## {said['edit']}\n"]
    parts += [f"**{word.title()}:** {said[word]}." for word in ("keeps", "loses", "costs")]
    return "\n".join([*parts, "", *map(_case, cases)])


def _case(shown: Shown) -> str:
    """Return one example."""
    effect = Effect.of(shown)
    settings = {"type": shown.edit, **shown.settings}
    written = ", ".join(f"{name}: {_yaml(value)}" for name, value in settings.items())
    target = "" if shown.target is None else f", `target: {_yaml(shown.target)}`"
    made, back = effect.plan, effect.paid_back
    figures = (
        f"{made.tokens_before:,} → {made.tokens_sent:,} tokens, {effect.rewritten:,} rewritten; pays back after {back}."
    )
    parts = [f"`{{{written}}}`{target}, on `{shown.session}`. {shown.note}".strip(), "", "~~~~text"]
    parts += ["before", *effect.before(shown.positions), "after", *effect.after(shown.positions)]
    return "\n".join([*parts, "~~~~", "", figures, ""])


def _runs(positions: Iterable[int], kind: Callable[[int], object]) -> Iterator[list[int]]:
    """Yield consecutive positions of one kind."""
    run: list[int] = []
    for position in positions:
        if run and (position != run[-1] + 1 or kind(position) != kind(run[-1])):
            yield run
            run = []
        run.append(position)
    if run:
        yield run


def _widened(run: Sequence[int], gone: Collection[int]) -> tuple[int, int]:
    """Return the first and last of the consecutive dropped messages that `run` belongs to."""
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
    """Return a setting as it could be written in YAML."""
    return json.dumps(value).replace('"', "")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
