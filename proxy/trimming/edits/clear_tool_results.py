"""`clear_tool_results`: of older tool results a stub stays, with a digest of the values in them.

    [cleared: read_file {"path":"src/main.c"}; 4210 tokens; ref=9f3a; main,parse_args,EXIT_CODE=12]

What a stub repeats is verbatim (white space aside) or ends with `…`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from proxy.dialects import Span
from proxy.textscan import JsonValue, Number, digest_of, is_items, is_members, read, words_of, write
from proxy.trimming.draft import Draft, Result, ResultChanges
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change
from proxy.trimming.settings import Natural

_LONGEST: Final = 6  # a digest is at most so many times as long as `digest_chars`, whatever others have left over
_ADVANCE: Final = 3  # characters of so many digests may be taken in advance: what is cleared first is often built upon
_INPUT_SHARE: Final = 3  # in a cleared argument, a digest has a third of the characters that one of a result has
_SHORTER: Final = 0.75  # where a digest is too dear, the next one tried has at most this part of its characters
_CHEAPEST: Final = 16  # tokens of the message with the shortest stub; what costs no more is not looked at
_NAME: Final = 100  # characters of a tool's name that are repeated
_ARGUMENTS: Final = 80  # characters of a call's arguments that are repeated
_STRING: Final = 80  # characters of a string among arguments that stays as it is
_ITEMS: Final = 10  # items of a list among arguments that stay
_LEVELS: Final = 32  # levels of arguments that are looked into


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
    """Tokens that a trim must free; where it could not, nothing is cleared."""
    exclude_tools: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Results of tools of these names are neither counted nor cleared."""
    clear_inputs: bool = False
    """Whether the long arguments of a call are cleared too, once all its results are."""
    digest_chars: Natural = 300
    """Characters of each digest, on average: what one leaves over a later one may take, the first ones may
    take some in advance, and one may have up to six times as many. With 0 there is no digest."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Clear results until the draft is within its target; none where that would free too little."""
        changes = tuple(_ResultClearing(self, draft).changes())
        if sum(change.freed for change in changes) >= self.at_least:
            yield from changes


class _ResultClearing:
    """One trim's work: what is known and what is left over grows with each stub."""

    def __init__(self, edit: ClearToolResults, draft: Draft) -> None:
        self._edit = edit
        self._draft = draft
        results = [result for result in draft.results() if result.tool not in edit.exclude_tools]
        self._old = results[: max(0, len(results) - edit.keep)]
        stubs = [result for result in results if self._is_stub(result)]
        self._cleared = {(result.place, result.index) for result in stubs}
        self._changes = ResultChanges(draft, edit.type)
        self._known: set[str] | None = None
        self._spare = sum(edit.digest_chars - len(digest_in(stub.message.text, stub.ref)) for stub in stubs)

    def changes(self) -> Iterator[Change]:
        """Yield the stubs, the oldest first, and after the last one of a call its arguments."""
        draft, total, freed = self._draft, self._draft.total, 0
        for result in self._old:
            if draft.target is not None and total <= draft.target and freed >= self._edit.at_least:
                return
            for change in self._cleared_by(result):
                total -= change.freed
                freed += change.freed
                yield change

    def _cleared_by(self, result: Result) -> Iterator[Change]:
        """Yield what clearing one result changes: nothing if it is protected, a stub, or cheaper as it is."""
        if result.place in self._draft.protected or (result.place, result.index) in self._cleared:
            return
        change = self._stub(result)
        if change is None:
            return
        self._cleared.add((result.place, result.index))
        yield self._changes.keep(change)
        if self._edit.clear_inputs:
            yield from self._inputs(result.span)

    def _stub(self, result: Result) -> Change | None:
        """Return the change that puts a stub in the place of a result; None where none would be cheaper.

        That depends on the result alone, so that what stays at one trim stays at the next.
        """
        edit, message = self._edit, result.message
        if self._draft.tokens[result.place] <= _CHEAPEST:
            return None
        room = max(0, self._spare + _ADVANCE * edit.digest_chars)
        budget = min(_LONGEST * edit.digest_chars, edit.digest_chars + room)
        original = result.original.text
        digest = digest_of(original, budget, self._words()) if budget else ""
        change = self._with_digest(result, digest)
        if change.freed <= 0 and self._with_digest(result, "").freed <= 0:
            self._words().update(words_of(message.text))
            return None
        while change.freed <= 0:
            digest = digest_of(original, int(len(digest) * _SHORTER), self._words())
            change = self._with_digest(result, digest)
        self._spare = self._spare + edit.digest_chars - len(digest)
        self._words().update(words_of(digest))
        return change

    def _with_digest(self, result: Result, digest: str) -> Change:
        arguments = result.call.arguments if result.call is not None else ""
        stub = stub_of(result.tool, arguments, result.tokens, result.ref, digest)
        reason = f"not among the newest {self._edit.keep} tool results"
        return self._changes.change(result, reason, result.message.with_text(stub))

    def _inputs(self, span: Span) -> Iterator[Change]:
        draft, block = self._draft, self._draft.messages[span.start]
        left = [
            (at, index)
            for at, message in draft.remaining(span.start + 1, span.stop)
            for index in range(message.result_count)
        ]
        if block is None or not self._cleared.issuperset(left):
            return
        reason = "all results of its calls are cleared"
        budget, known = self._edit.digest_chars // _INPUT_SHARE, self._words()
        arguments = [
            (shorter_text if call.custom else shorter_arguments)(call.arguments, budget, known) for call in block.calls
        ]
        change = draft.replacing(span.start, self._edit.type, reason, block.with_arguments(arguments))
        if change.freed > 0:
            yield change

    def _words(self) -> set[str]:
        """Return the words of all that is not going to be cleared, stubs included."""
        if self._known is None:
            texts: list[str] = []
            for at, message in self._draft.remaining():
                if message.is_result:
                    results = enumerate(message.results)
                    texts += [result.text for index, result in results if (at, index) in self._cleared]
                    texts.append(message.beside)
                else:
                    texts.append(message.text)
                    if not self._edit.clear_inputs:
                        texts += [said for call in message.calls for said in (call.name, call.arguments)]
            self._known = words_of("\n".join(texts))
        return self._known

    def _is_stub(self, result: Result) -> bool:
        made_by, place = self._draft.made_by, result.place
        if not made_by or self._edit.type not in made_by[place]:
            return False
        message = self._draft.messages[place]
        # Of several in one message, some may not be cleared yet.
        return message is result.message or is_stub(result.message.text, result.ref)


def stub_of(tool: str, arguments: str, tokens: int, ref: str, digest: str) -> str:
    """Return the stub of a result of `tool`, called with `arguments`, that cost so many tokens."""
    named = _cut(tool, _NAME) or "a tool"
    called = _cut(arguments, _ARGUMENTS)
    said = f"{named} {called}" if called not in ("", "{}") else named
    return f"[cleared: {said}; {tokens} tokens; ref={ref}{f'; {digest}' if digest else ''}]"


def is_stub(text: str, ref: str) -> bool:
    """Tell whether a text is a stub that names `ref`."""
    return text.startswith("[cleared: ") and f"; ref={ref}" in text


def digest_in(stub: str, ref: str) -> str:
    """Return the digest of a stub that names `ref`; empty where it has none."""
    return stub.partition(f"ref={ref}; ")[2].removesuffix("]")


def shorter_arguments(arguments: str, budget: int, known: Collection[str]) -> str:
    """Return arguments as JSON, each long string with a digest of `budget` characters, if that is shorter."""
    document = read(arguments)
    if is_members(document):
        cleared = _shorter(document, budget, known, _LEVELS)
    else:
        cleared = (("cleared", shorter_text(arguments, budget, known)),)
    shorter = arguments if cleared == document else write(cleared)
    return shorter if len(shorter) < len(arguments) else arguments


def shorter_text(text: str, budget: int, known: Collection[str]) -> str:
    """Return a text, or in the place of a long one its length and a digest of at most `budget` characters."""
    if len(text) <= _STRING:
        return text
    digest = digest_of(text, budget, known)
    return f"[cleared: {len(text)} characters{f'; {digest}' if digest else ''}]"


def _shorter(value: JsonValue, budget: int, known: Collection[str], levels: int) -> JsonValue:
    if isinstance(value, str) and not isinstance(value, Number):
        return shorter_text(value, budget, known)
    if not levels and (is_members(value) or is_items(value)):
        return "[cleared]"
    if is_members(value):
        return tuple([(name, _shorter(member, budget, known, levels - 1)) for name, member in value])
    if is_items(value):
        kept = [_shorter(item, budget, known, levels - 1) for item in value[:_ITEMS]]
        more = len(value) - len(kept)
        return [*kept, f"[cleared: {more} more]"] if more else kept
    return value


def _cut(text: str, most: int) -> str:
    """Return a text on one line, cut where it is longer than `most` characters."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}…"
