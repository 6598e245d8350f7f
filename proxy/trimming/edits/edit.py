"""The interface of edits. An edit is a settings class with methods that return changes.

An edit reads the draft of a whole log. An edit of tool output decides about one result at a time, from its content
alone, so it can also run on arrival.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final

from msgspec import Struct

from proxy.dialects import Call, Message
from proxy.trimming.draft import Draft, answered_by, by_id, calls_in, results_of
from proxy.trimming.model import Change, Entry, Summary, SummaryRequest
from proxy.trimming.settings import Section, Target, Trigger


class BaseEdit(Section, ABC, frozen=True):
    """One configured trimming strategy. It has no parameters but its settings."""

    piecemeal: ClassVar[bool] = False  # whether its changes are independent, so that some may be left out

    type: str
    """Name of the edit."""
    when: Trigger | None = None
    """Run the edit only if all keys that are set fire, judged when its turn comes."""

    @property
    def lacks_target(self) -> bool:
        """Whether the edit with these settings does nothing unless the policy has a target."""
        return False

    @property
    def budget(self) -> Target | None:
        """The edit's own target, which it keeps to at every trim; None if it has none."""
        return None

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Settings that were given but have no effect because of other settings, with the reason."""
        return {}

    def is_done(self, draft: Draft) -> bool:
        """Tell whether the edit need not run. An edit with its own limit overrides this."""
        return draft.within()

    @property
    def must_pay(self) -> bool:
        """Whether the edit runs only if what it frees pays for what it rewrites, no matter what fired."""
        return self.when is not None and self.when.cost is not None

    @abstractmethod
    def apply(self, draft: Draft) -> Iterable[Change | Summary | SummaryRequest]:
        """Return the changes of `draft`: at most one per place, none at protected places.

        What the edit made at an earlier trim stays as it is, or is made anew to include new content. The changes may
        include one `Summary`, with changes that remove what it covers. If the summary is not ready, a `SummaryRequest`
        is the only item.
        """

    def at_best(self, draft: Draft) -> Draft | None:  # noqa: ARG002 - most edits have no need of it
        """Return a draft whose tokens are a lower bound, at each place, of what this edit leaves there.

        Returns None if a bound would take as long as `apply`. If not even the bound pays, the trim is not tried. Places
        that the edit does not change are as in `draft`.
        """
        return None

    def afterwards(self, draft: Draft) -> Iterable[Change]:  # noqa: ARG002 - most edits have no need of it
        """Return changes that the changes of all edits make necessary. Called after each pass of the edits."""
        return ()

    def finished(self, before: Draft, draft: Draft) -> Iterable[Change]:  # noqa: ARG002 - most edits have no need of it
        """Return further changes at the end of a trim, when it is known which changes last.

        `before` is the draft that the trim began with. Not called if the log is a client's own window.
        """
        return ()


class Shortened(Struct, frozen=True, kw_only=True):
    """A tool result in a shorter form."""

    message: Message
    reason: str


class ToolOutputEdit(BaseEdit, frozen=True):
    """An edit that decides about one tool result at a time, from its content alone."""

    piecemeal: ClassVar[bool] = True

    @abstractmethod
    def shorten(self, message: Message, entry: Entry, asked: str = "") -> Shortened | None:
        """Return the shorter form of a tool result, or None if it stays as it is.

        `message` is the current message, `entry` holds the original and its ref, `asked` are the arguments of the call
        that it answers. A result that is already short must stay.
        """

    def spares(self, message: Message, calls: Mapping[str, Call]) -> bool:  # noqa: ARG002 - most spare none
        """Tell whether a message with results is exempt from `apply`; `calls` are the calls that it may answer."""
        return False

    def shorten_all(
        self, message: Message, entry: Entry, calls: Mapping[str, Call], *, is_cleared: bool = False
    ) -> Shortened | None:
        """Return a message with the shorter form of each of its results; None if all stay as they are.

        `calls` are the calls of the message before the results, by id. If the message `is_cleared`, stubs stay, and so
        do lines folded behind a result, since these have no ref of their own.
        """
        made: list[Message | None] = []
        reasons: list[str] = []
        for _, result, alone in results_of(message, entry):
            if is_cleared and (is_stub(result.text, alone.ref) or holds_folded(result.text)):
                made.append(result)
                continue
            call = answered_by(result, calls)
            shortened = self.shorten(result, alone, call.arguments if call is not None else "")
            if result is message:
                return shortened
            made.append(result if shortened is None else shortened.message)
            reasons += [] if shortened is None else [shortened.reason]
        whole = message.with_results(made) if reasons else None
        return Shortened(message=whole, reason="; ".join(reasons)) if whole is not None else None

    def at_best(self, draft: Draft) -> Draft:
        """Return the draft with its results shortened."""
        return draft.after(tuple(self.apply(draft)))

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Shorten every tool result that is neither protected nor cleared, if the shorter form costs fewer tokens."""
        for span in draft.spans:
            standing = [
                (place, message)
                for place, message in draft.remaining(span.start, span.stop)
                if message.is_result and (place not in draft.protected or place in draft.cuttable)
            ]
            calls = by_id(calls_in(draft.entries, span)) if standing else {}
            for place, message in standing:
                is_cleared = bool(draft.made_by) and CLEAR_TOOL_RESULTS in draft.made_by[place]
                shortened = self.shorten_all(message, draft.entries[place], calls, is_cleared=is_cleared)
                if shortened is None or self.spares(message, calls):
                    continue
                change = draft.replacing(place, self.type, shortened.reason, shortened.message)
                if change.freed > 0:
                    yield change


# --------------------------------------------------------------------------------------- the stub of a cleared result

CLEAR_TOOL_RESULTS: Final = "clear_tool_results"

REF_PREFIX: Final = "ref_"
REF_DIGITS: Final = 8
"""Hexadecimal digits of a ref in a stub; the whole ref is used if another ref of the session begins with the same."""

_FOLDED: Final = "[then, shortened:]"


def stub_of(tokens: int, ref: str, digest: str) -> str:
    """Return the stub of a result that had so many tokens."""
    return f"[cleared {tokens} tokens; ref={ref}{f'; {digest}' if digest else ''}]"


def folded_behind(text: str, lines: Iterable[str]) -> str:
    """Return the text of a result with the lines of other calls folded behind it."""
    return "\n".join([text, _FOLDED, *lines])


def is_stub(text: str, ref: str) -> bool:
    """Tell whether a text is, or begins with, the stub of the result with this ref."""
    name = ref.removeprefix(REF_PREFIX)[:REF_DIGITS]
    return text.startswith("[cleared ") and f" tokens; ref={name}" in text


def holds_folded(text: str) -> bool:
    """Tell whether lines of other calls are folded behind a result. May be wrong if a tool prints the same marker."""
    return f"\n{_FOLDED}\n" in text
