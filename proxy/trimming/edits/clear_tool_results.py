"""`clear_tool_results`: of older tool results a stub stays, with a digest of the values in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Struct
from pydantic import Field

from proxy.dialects import Message, Span
from proxy.textscan import digest_of, words_of
from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.plan import Change
from proxy.trimming.section import Natural
from proxy.trimming.stub import digest_in, shorter_arguments, shorter_text, stub_of

_LONGEST: Final = 6
"""A digest is at most so many times as long as `digest_chars`, whatever others have left over."""
_ADVANCE: Final = 3
"""Characters of so many digests may be taken in advance: what is cleared first is often built upon."""
_INPUT_SHARE: Final = 3
"""In a cleared argument, a digest has a third of the characters that one of a result has."""
_SHORTER: Final = 0.75
"""Where a digest is too dear, the next one tried has at most this part of its characters."""
_CHEAPEST: Final = 16
"""Tokens of the message with the shortest stub; what costs no more is not looked at."""


class _Result(Struct, frozen=True, kw_only=True):
    """A tool result that stands, and the call that it answers."""

    position: int
    span: Span
    tool: str
    arguments: str


class ClearToolResults(BaseEdit, frozen=True):
    """Older results are cleared, from the oldest, and a stub stays in the place of each.

    The stub names the tool, the arguments, the tokens that stood there and the ref under which all of it can
    be read again. Then comes a digest: of the values in the result those that a later step is most likely to
    need and that stand nowhere else. A stub stands only where it costs fewer tokens than what it replaces,
    and keeps its bytes from then on. With a target, no more is cleared than it takes to meet it.
    """

    piecemeal: ClassVar[bool] = True

    type: Literal["clear_tool_results"] = "clear_tool_results"
    """Which strategy this is."""
    keep: Natural = 3
    """So many results stay, the newest ones."""
    at_least: Natural = 0
    """Tokens that a move of the cut must free; where it could not, nothing is cleared."""
    exclude_tools: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Results of tools of these names are neither counted nor cleared."""
    clear_inputs: bool = False
    """Whether the long arguments of a call are cleared too, once all its results are."""
    digest_chars: Natural = 300
    """Characters of each digest, on average: what one leaves over a later one may take, the first ones may
    take some in advance, and one may have up to six times as many. With 0 there is no digest."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Clear results until the draft is within its target; none where that would free too little."""
        changes = tuple(_Clearing(self, draft).changes())
        if sum(map(_freed, changes)) >= self.at_least:
            yield from changes

    def results(self, draft: Draft) -> Sequence[_Result]:
        """Return the results that are counted, in order."""
        return [each for each in _results(draft) if each.tool not in self.exclude_tools]


class _Clearing:
    """One move's work: what is known and what is left over grows with each stub."""

    def __init__(self, edit: ClearToolResults, draft: Draft) -> None:
        self._edit = edit
        self._draft = draft
        results = edit.results(draft)
        self._old = results[: max(0, len(results) - edit.keep)]
        self._cleared = {result.position for result in results if self._is_stub(result.position)}
        self._known: set[str] | None = None
        self._spare = sum(edit.digest_chars - len(self._digest_at(position)) for position in self._cleared)

    def changes(self) -> Iterator[Change]:
        """Yield the stubs, the oldest first, and after the last one of a call its arguments."""
        draft, total, freed = self._draft, self._draft.total, 0
        for result in self._old:
            if draft.target is not None and total <= draft.target and freed >= self._edit.at_least:
                return
            for change in self._cleared_by(result):
                total -= _freed(change)
                freed += _freed(change)
                yield change

    def _cleared_by(self, result: _Result) -> Iterator[Change]:
        """Yield what clearing one result changes: nothing if it is protected, a stub, or cheaper as it is."""
        if result.position in self._draft.protected or result.position in self._cleared:
            return
        change = self._stub(result)
        if change is None:
            return
        self._cleared.add(result.position)
        yield change
        if self._edit.clear_inputs:
            yield from self._inputs(result.span)

    def _stub(self, result: _Result) -> Change | None:
        """Return the change that puts a stub in the place of a result; None where none would be cheaper.

        Whether one would is a matter of the result alone, not of the characters that happen to be left over:
        what stays at one move stays at the next. A digest that is too dear is made shorter.
        """
        draft, edit, position = self._draft, self._edit, result.position
        message = draft.messages[position]
        if message is None or draft.tokens[position] <= _CHEAPEST:
            return None
        room = max(0, self._spare + _ADVANCE * edit.digest_chars)
        budget = min(_LONGEST * edit.digest_chars, edit.digest_chars + room)
        original = draft.entries[position].message.text
        digest = digest_of(original, budget, self._words()) if budget else ""
        change = self._with_digest(result, message, digest)
        if _freed(change) <= 0 and _freed(self._with_digest(result, message, "")) <= 0:
            self._words().update(words_of(message.text))
            return None
        while _freed(change) <= 0:
            digest = digest_of(original, int(len(digest) * _SHORTER), self._words())
            change = self._with_digest(result, message, digest)
        self._spare = self._spare + edit.digest_chars - len(digest)
        self._words().update(words_of(digest))
        return change

    def _with_digest(self, result: _Result, message: Message, digest: str) -> Change:
        """Return the change that puts the stub with this digest in the place of a message."""
        entry = self._draft.entries[result.position]
        stub = stub_of(result.tool, result.arguments, entry.tokens, entry.ref, digest)
        reason = f"not among the newest {self._edit.keep} tool results"
        shorter = message.with_text(stub)
        return self._draft.replacing(result.position, self._edit.type, reason, shorter)

    def _inputs(self, span: Span) -> Iterator[Change]:
        """Yield the change that clears the arguments of calls, once no result of them stands."""
        draft, block = self._draft, self._draft.messages[span.start]
        standing = (at for at, message in draft.standing(span.start + 1, span.stop) if message.is_result)
        if block is None or not self._cleared.issuperset(standing):
            return
        reason = "all results of its calls are cleared"
        shorter = _with_shorter_inputs(block, self._edit.digest_chars // _INPUT_SHARE, self._words())
        change = draft.replacing(span.start, self._edit.type, reason, shorter)
        if _freed(change) > 0:
            yield change

    def _words(self) -> set[str]:
        """Return the words of all that is not going to be cleared, stubs included."""
        if self._known is None:
            texts = [
                _said(message, arguments=not self._edit.clear_inputs)
                for at, message in self._draft.standing(0, len(self._draft.messages))
                if not message.is_result or at in self._cleared
            ]
            self._known = words_of("\n".join(texts))
        return self._known

    def _is_stub(self, position: int) -> bool:
        made_by = self._draft.made_by
        return bool(made_by) and self._edit.type in made_by[position]

    def _digest_at(self, position: int) -> str:
        """Return the digest in a stub of an earlier move."""
        stub = self._draft.messages[position]
        return digest_in(stub.text, self._draft.entries[position].ref) if stub is not None else ""


def _results(draft: Draft) -> Iterator[_Result]:
    """Yield each result that stands, with the name and the arguments of its call."""
    for span in draft.spans:
        block = draft.entries[span.start].message
        for position, message in draft.standing(span.start, span.stop):
            if message.is_result:
                call = next((call for call in block.calls if message.answers_call(call)), None)
                tool = (call.name if call is not None else "") or message.name
                yield _Result(
                    position=position,
                    span=span,
                    tool=tool,
                    arguments=call.arguments if call is not None else "",
                )


def _said(message: Message, *, arguments: bool) -> str:
    """Return what a message says, and what its calls are given."""
    parts = [message.text]
    for call in message.calls if arguments else ():
        parts += [call.name, call.arguments]
    return "\n".join(parts)


def _with_shorter_inputs(block: Message, budget: int, known: set[str]) -> Message:
    """Return an assistant message with the long arguments of its calls cleared."""
    return block.with_arguments(
        [
            (shorter_text if call.custom else shorter_arguments)(call.arguments, budget, known)
            for call in block.calls
        ]
    )


def _freed(change: Change) -> int:
    return change.tokens_before - change.tokens_after
