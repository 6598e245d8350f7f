"""What an edit is: settings that can be asked what they would change.

An edit looks at the draft of a whole log. An edit of tool output decides about one result at a time, from its
content alone, and can therefore act on arrival as well.
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
    """One trimming strategy, configured. The settings are the strategy: nothing else is told to it."""

    piecemeal: ClassVar[bool] = False  # whether some of its changes may be left out: none depends on another

    type: str
    """Which strategy this is."""
    when: Trigger | None = None
    """Only then: all the keys that are set must be passed, judged as things stand when its turn comes."""

    @property
    def lacks_target(self) -> bool:
        """Whether, as it is set, it can do nothing unless the policy has a target."""
        return False

    @property
    def budget(self) -> Target | None:
        """A target of its own that it keeps to at every trim; None where it has none."""
        return None

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Settings that are written down and decide nothing, as the others are, with the reason."""
        return {}

    def is_done(self, draft: Draft) -> bool:
        """Tell whether nothing is left for it to do; what has a limit of its own goes by that."""
        return draft.within()

    @property
    def must_pay(self) -> bool:
        """Whether it runs only if what it frees pays for what it rewrites, whatever fired."""
        return self.when is not None and self.when.cost is not None

    @abstractmethod
    def apply(self, draft: Draft) -> Iterable[Change | Summary | SummaryRequest]:
        """Return what it changes in `draft`: at most one change per position, none where protected.

        What it made at an earlier trim stays as it is, or is made anew to take in what is new. One `Summary` may be
        among the changes that remove what it covers; or there is only a `SummaryRequest`, which would have been used.
        """

    def at_best(self, draft: Draft) -> Draft | None:  # noqa: ARG002 - most edits have no need of it
        """Return a draft in which no place has more tokens than this edit leaves there; None if that takes as long.

        Where even that would not pay, nothing is tried. What the edit leaves alone stands as it is.
        """
        return None

    def afterwards(self, draft: Draft) -> Iterable[Change]:  # noqa: ARG002 - most edits have no need of it
        """Return what must follow from what all the edits of a trim did; asked after each pass of them."""
        return ()

    def finished(self, before: Draft, draft: Draft) -> Iterable[Change]:  # noqa: ARG002 - most edits have no need of it
        """Return what it makes of its changes at the end of a trim: `before` is the draft that the trim began with.

        By then it is sure which of them last. A client's own window is left as it is.
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
        """Return the shorter form of a tool result, None where it stays.

        `message` is what stands there now, `entry` holds the original and its ref, `asked` are the arguments of the
        call that it answers. What is short already must stay.
        """

    def spares(self, message: Message, calls: Mapping[str, Call]) -> bool:  # noqa: ARG002 - most spare none
        """Tell whether a message with results stays as it is; `calls` are those that it may answer."""
        return False

    def shorten_all(
        self, message: Message, entry: Entry, calls: Mapping[str, Call], *, is_cleared: bool = False
    ) -> Shortened | None:
        """Return a message with the shorter form of each of its results; None where all stay.

        `calls` are those of the message before the results, by id. Where it `is_cleared`, stubs stay, and so does what
        is folded behind one: it has no ref of its own.
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
        """Shorten every tool result that is not protected or cleared and costs fewer tokens in the shorter form."""
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
"""Hexadecimal digits of a ref in a stub, if no other text of the session begins with them."""

_FOLDED: Final = "[then, shortened:]"


def stub_of(tokens: int, ref: str, digest: str) -> str:
    """Return the stub of a result that cost so many tokens."""
    return f"[cleared {tokens} tokens; ref={ref}{f'; {digest}' if digest else ''}]"


def folded_behind(text: str, lines: Iterable[str]) -> str:
    """Return what stands in the place of a result with these lines of other calls behind it."""
    return "\n".join([text, _FOLDED, *lines])


def is_stub(text: str, ref: str) -> bool:
    """Tell whether a text is the stub of the result with this ref, or begins with it."""
    name = ref.removeprefix(REF_PREFIX)[:REF_DIGITS]
    return text.startswith("[cleared ") and f" tokens; ref={name}" in text


def holds_folded(text: str) -> bool:
    """Tell whether lines of other calls stand behind a result; a tool can write the like itself."""
    return f"\n{_FOLDED}\n" in text
