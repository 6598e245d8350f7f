"""`clear_tool_results`: replaces older tool results with stubs that hold a digest of their values.

It can also shorten what the agent wrote itself: long arguments of calls, and texts. Consecutive calls may be folded:
only the first remains a call, and a line for each other call follows its result.

    [cleared 4210 tokens; ref=9f3ac41e; main,parse_args,EXIT_CODE=12]
    [then, shortened:]
    read path=src/main.c limit=20 → [cleared 318 tokens; ref=01d5e2c7; argv]
    bash command=make test → 12 passed

Values in a stub are verbatim (except for white space) or end with `…`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Annotated, ClassVar, Final, Literal, Self, TypeAlias

from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field, model_validator

from proxy.dialects import Call, Message, Span
from proxy.textscan import JsonValue, Mentions, Number, digest_of, is_items, is_members, read_json, words_of, write_json
from proxy.trimming.draft import Draft, Result, answered_by, by_id
from proxy.trimming.edits.edit import REF_DIGITS, REF_PREFIX, BaseEdit, folded_behind, holds_folded, is_stub, stub_of
from proxy.trimming.model import Change
from proxy.trimming.settings import Natural, Share

_SHARE: Final = 0.35  # divided by `digest_chars`: the chance of reuse per character that a value in a digest needs
_SHARE_OF_ARGUMENTS: Final = 0.1  # the same for what the agent wrote, which it uses again most often
_LONGEST: Final = 10  # a digest has at most so many times `digest_chars` characters,
_PART: Final = 0.15  # or this part of the characters of the text, if that is more
_CHEAPEST: Final = 16  # tokens of a message with the shortest stub; results that cost no more are skipped
_STRING: Final = 200  # strings in arguments up to so many characters stay as they are
_TEXT: Final = 120  # older texts of the agent up to so many characters stay as they are
_BEGINNING: Final = 80  # characters that are kept of a longer text
_ITEMS: Final = 10  # items that are kept of a list in arguments
_LEVELS: Final = 32  # depth to which arguments are shortened; deeper values are cleared
_FEWEST, _MOST = 2, 32  # number of spans that are folded into one
_INDENT: Final = "\n  "  # precedes further lines of a result, so that none looks like the line of a call
_TOLD: Final = "a line behind an earlier result was put in its place"


Digest: TypeAlias = Callable[[str], str]


class ClearToolResults(BaseEdit, frozen=True):
    """Clears older tool results, oldest first, and leaves a stub in the place of each.

    The stub states how many tokens it replaces, and the ref under which the whole result can be read. A digest follows:
    values that appear nowhere else and are likely enough to be used again to be worth their characters. A stub is used
    only if it costs fewer tokens than what it replaces, and keeps its bytes from then on. With a target, no more is
    cleared than needed to meet it.
    """

    piecemeal: ClassVar[bool] = True

    type: Literal["clear_tool_results"] = "clear_tool_results"
    """Name of the edit."""
    keep: Natural = 3
    """Number of newest results to keep."""
    keep_share: Share = 1.0
    """Maximum part of all tokens that the kept results may have. Above it, the oldest of them are cleared too, but
    never their newer half. If a cached token costs a quarter of the full price or more, all of them stay."""
    at_least: Natural = 0
    """Minimum tokens that a trim must free. If it cannot, nothing is cleared."""
    exclude_tools: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of tools whose results are neither counted nor cleared."""
    clear_inputs: bool = False
    """Whether to clear the long arguments of a call too, once its results are cleared or too short to clear."""
    clear_texts: bool = False
    """Whether to clear the agent's own longer texts too, if they are older than the kept results: its answers, and what
    it said with a call once the results of that call are cleared or too short to clear. The beginning and a
    digest stay."""
    fold_calls: bool = False
    """Whether to fold consecutive calls that one trim clears into the first. After its result, one line describes each
    of the other calls, and their messages are removed. Calls in a client's own window are not folded. Needs
    `clear_inputs`, because the lines repeat arguments in full."""
    digest_chars: Natural = 300
    """Size of digests. Twice as much also keeps values that are half as likely to be used again. 0 means no digest. A
    digest has at most ten times as many characters, or 15 per cent of the text if that is more. If a cached token costs
    more than a quarter of the full price, the value is raised, at most to its double."""

    @model_validator(mode="after")
    def _says_what_is_folded(self) -> Self:
        if self.fold_calls and not self.clear_inputs:
            raise ValueError("fold_calls needs clear_inputs: true")
        return self

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Clear results until the draft is within its target; none if that would free less than `at_least`."""
        changes = tuple(_ResultClearing(self, draft).changes())
        if sum(change.freed for change in changes) >= self.at_least:
            yield from changes

    def at_best(self, draft: Draft) -> Draft:
        """Return the draft without everything that may be cleared, since later edits may shorten stubs further."""
        return _ResultClearing(self, draft).at_best()

    def finished(self, before: Draft, draft: Draft) -> Iterator[Change]:
        """Fold the calls that this trim cleared and those between them. Calls before them keep their bytes."""
        if not self.fold_calls:
            return
        changed = {
            place
            for place, message in draft.remaining()
            if message is not before.messages[place] and self.type in draft.made_by[place]
        }
        if not changed:
            return
        first, last = min(changed), max(changed)
        results = {span: list(each) for span, each in groupby(draft.results(), key=attrgetter("span"))}
        run: list[_ToldSpan] = []
        for span in draft.spans:
            if span.stop <= first or not any(draft.remaining(span.start, span.stop)):
                continue
            given = results.get(span, [])
            is_cleared = bool(given) and is_stub(given[-1].message.text, given[-1].ref)
            is_done = span.stop <= last or span.start in changed or is_cleared
            lines = self._lines(draft, span, given) if is_done else []
            if lines:
                run.append(_ToldSpan(span=span, last=given[-1], calls=len(given), lines=lines))
            if not lines or len(run) == _MOST:
                yield from self._folded(draft, run)
                run.clear()
        yield from self._folded(draft, run)

    def _lines(self, draft: Draft, span: Span, results: Sequence[Result]) -> list[str]:
        """Return the lines for a span: the agent's text and its calls with their results.

        Returns none if lines cannot tell everything in the span, if it is protected, or if other calls are already
        folded into it.
        """
        block, places = draft.messages[span.start], range(span.start, span.stop)
        if block is None or not results or not block.is_plain:
            return []
        if not draft.protected.isdisjoint(places) or not draft.hidden.keys().isdisjoint(places):
            return []
        others = draft.remaining(span.start + 1, span.stop)
        if any(not message.is_result or message.beside for _, message in others):
            return []
        calls, gave = by_id(block.calls), dict[str, str]()
        for result in results:
            call, message = answered_by(result.message, calls), result.message
            if call is None or not message.is_plain or holds_folded(message.text) or result.tool in self.exclude_tools:
                return []
            gave[call.id] = message.text.strip().replace("\n", _INDENT)
        if len(gave) < len(block.calls):
            return []
        lines = [" ".join(text.split()) for text in block.texts if text.strip()]
        return [*lines, *(f"{shown_call(call)} → {gave[call.id]}" for call in block.calls)]

    def _folded(self, draft: Draft, run: Sequence[_ToldSpan]) -> Iterator[Change]:
        """Yield the changes that fold these spans into the first one; none if that frees no tokens."""
        if len(run) < _FEWEST:
            return
        first, others = run[0].last, run[1:]
        text = folded_behind(first.message.text, [line for each in others for line in each.lines])
        calls = sum(each.calls for each in others)
        reason = f"lines behind it tell of {calls} call{'s' if calls > 1 else ''} after it"
        told = {first.index: first.message.with_text(text)}
        changes = [draft.replacing_results(first.place, self.type, reason, told)]
        for each in others:
            for place, _ in draft.remaining(each.span.start, each.span.stop):
                changes.append(draft.removing(place, self.type, _TOLD))
        if sum(change.freed for change in changes) > 0:
            yield from changes


class _ToldSpan(Struct, frozen=True, kw_only=True):
    """A span as lines: the agent's text, and each call with its result."""

    span: Span
    last: Result  # the last result in the span
    calls: int
    lines: list[str]


class _ResultClearing:
    """Clears results in one trim. Each stub adds to the words that are known to be in the view."""

    def __init__(self, edit: ClearToolResults, draft: Draft) -> None:
        self._edit = edit
        self._draft = draft
        results = [result for result in draft.results() if result.tool not in edit.exclude_tools]
        self._kept = _kept(edit, results, draft)
        self._old = results[: len(results) - self._kept]
        # Results that are stubs already, or stay because no stub is cheaper.
        self._settled = {(result.place, result.index) for result in results if self._is_stub(result)}
        self._shortened: set[int] = set()  # places of messages whose calls were processed
        self._read = 0  # the place up to which answers were processed

    def changes(self) -> Iterator[Change]:
        """Yield the changes, the oldest first: stubs, and after the stubs of a span its shortened calls and text."""
        freed = 0
        for _, results in groupby(self._old, key=attrgetter("place")):
            if self._is_enough(freed):
                return
            for change in self._cleared_in(list(results), freed):
                freed += change.freed
                yield change

    def at_best(self) -> Draft:
        """Return the draft without everything that may be cleared, as if stubs cost nothing."""
        draft = self._draft
        cleared: set[int] = set()
        for result in self._old:
            if result.place in draft.protected:
                continue
            if (result.place, result.index) not in self._settled:
                cleared.add(result.place)
            if self._may_be_shorter(result.span.start):
                cleared.add(result.span.start)
        for place, message in draft.free(0, self._old[-1].span.start if self._old else 0):
            if not message.calls and self._is_long_text(place, message):
                cleared.add(place)
        messages = [None if at in cleared else message for at, message in enumerate(draft.messages)]
        tokens = [0 if at in cleared else count for at, count in enumerate(draft.tokens)]
        return replace(draft, messages=tuple(messages), tokens=tuple(tokens))

    def _may_be_shorter(self, place: int) -> bool:
        """Tell whether arguments or texts of a message with calls may be cleared."""
        message = self._draft.messages[place]
        if message is None or self._is_changed(place):
            return False
        arguments = [call.arguments for call in message.calls] if self._edit.clear_inputs else []
        is_long = any(len(each) > _STRING or "[" in each or each.count("{") > _LEVELS for each in arguments)
        return is_long or self._is_long_text(place, message)

    def _is_enough(self, freed: int) -> bool:
        """Tell whether the target is met and at least `at_least` tokens are freed."""
        target = self._draft.target
        return target is not None and self._draft.total - freed <= target and freed >= self._edit.at_least

    def _cleared_in(self, results: Sequence[Result], freed: int) -> Iterator[Change]:
        """Yield the changes that clear results of one message, their calls, and earlier answers, unless protected."""
        place, span = results[0].place, results[0].span
        if self._edit.clear_texts:
            for change in self._answers(span.start):
                freed += change.freed
                yield change
        if place in self._draft.protected:
            return
        stubs = self._stubs(results, freed)
        if stubs:
            reason = f"not among the newest {self._kept} tool results"
            yield self._draft.replacing_results(place, self._edit.type, reason, stubs)
        if self._edit.clear_inputs or self._edit.clear_texts:
            yield from self._call(span)

    def _stubs(self, results: Sequence[Result], freed: int) -> dict[int, Message]:
        """Return stubs for results of one message by index, until enough is freed. Each is cheaper than its text.

        `freed` is the number of tokens freed so far. The first result is processed in any case.
        """
        draft, stubs = self._draft, dict[int, Message]()
        for number, result in enumerate(results):
            key = result.place, result.index
            if number and self._is_enough(freed):
                break
            if key not in self._settled and draft.tokens[result.place] > _CHEAPEST:
                text = stub_of(result.tokens, self._short(result.ref), self._digest(result.original.text))
                stub = result.message.with_text(text)
                less = draft.count(result.message) - draft.count(stub)
                if less > 0:
                    stubs[result.index] = stub
                    freed += less
                self._words.update(words_of(text if less > 0 else result.message.text))
            self._settled.add(key)
        return stubs

    def _call(self, span: Span) -> Iterator[Change]:
        """Yield the change that shortens the calls of a span and their text, once all results are processed."""
        block = self._draft.messages[span.start]
        if block is None or self._is_changed(span.start) or span.start in self._shortened or self._is_open(span):
            return
        self._shortened.add(span.start)
        shorter = block
        if self._edit.clear_inputs:
            arguments = [
                (shorter_text if call.custom else shorter_arguments)(call.arguments, self._digest_of_own)
                for call in block.calls
            ]
            shorter = block.with_arguments(arguments)
        yield from self._said(span.start, shorter, "all results of its calls are cleared")

    def _is_open(self, span: Span) -> bool:
        """Tell whether a result of a span is still to be processed. Checked from the end, where one is found first."""
        for at in range(span.stop - 1, span.start, -1):
            message = self._draft.messages[at]
            if message is not None and any((at, index) not in self._settled for index in range(message.result_count)):
                return True
        return False

    def _answers(self, stop: int) -> Iterator[Change]:
        """Yield the changes that shorten the agent's messages without calls before `stop`."""
        for place, message in self._draft.free(self._read, stop):
            if message.role == "assistant" and not message.calls and not self._is_changed(place):
                yield from self._said(place, message, "older than the tool results that stay")
        self._read = max(self._read, stop)

    def _said(self, place: int, message: Message, reason: str) -> Iterator[Change]:
        """Yield the change to a `message` of the agent, whose long texts are shortened; none if it frees no tokens."""
        if self._is_long_text(place, message):
            said, message = message, with_shorter_text(message, self._digest_of_own)
            if message is said:
                self._words.update(words_of(said.text))
        if message == self._draft.messages[place]:
            return
        change = self._draft.replacing(place, self._edit.type, reason, message)
        if change.freed > 0:
            yield change

    def _digest_of_own(self, text: str) -> str:
        """Return the digest of what the agent wrote. Later digests do not repeat its values."""
        digest = self._digest(text, is_argument=True)
        self._words.update(words_of(digest))
        return digest

    def _digest(self, text: str, *, is_argument: bool = False) -> str:
        chars = int(self._edit.digest_chars * max(1.0, self._draft.dear))
        if not chars:
            return ""
        budget = max(_LONGEST * chars, int(_PART * len(text)))
        least = (_SHARE_OF_ARGUMENTS if is_argument else _SHARE) / chars
        return digest_of(text, budget, self._words, self._mentions, least=least, is_argument=is_argument)

    @cached_property
    def _words(self) -> set[str]:
        """The words of everything that will not be cleared, including stubs."""
        texts: list[str] = []
        for at, message in self._draft.remaining():
            if message.is_result:
                results = enumerate(message.results)
                texts += [message.beside, *(each.text for index, each in results if (at, index) in self._settled)]
                continue
            is_long = self._is_long_text(at, message)
            texts += [_beginning(text) if is_long and len(text) > _TEXT else text for text in message.texts]
            if not self._edit.clear_inputs:
                texts += [said for call in message.calls for said in (call.name, call.arguments)]
        return words_of("\n".join(texts))

    def _is_long_text(self, place: int, message: Message) -> bool:
        """Tell whether a message of the agent has a long text that is to be cleared."""
        if not self._edit.clear_texts or message.role != "assistant":
            return False
        if not any([len(text) > _TEXT for text in message.texts]):
            return False
        return place < self._old[-1].place and place not in self._draft.protected and not self._is_changed(place)

    @cached_property
    def _mentions(self) -> Mentions:
        """Where each word occurs in the original messages of the draft's log."""
        mentions = Mentions()
        for entry in self._draft.entries:
            message = entry.message
            mentions.add(message.role, message.text, [call.arguments for call in message.calls])
        return mentions

    def _short(self, ref: str) -> str:
        """Return a ref without its prefix, shortened to `REF_DIGITS` digits if that is unique in the log.

        The number of a result in its message is kept: `9f3ac41e-2`.
        """
        name, dash, number = ref.removeprefix(REF_PREFIX).partition("-")
        return (name if self._beginnings[name[:REF_DIGITS]] > 1 else name[:REF_DIGITS]) + dash + number

    @cached_property
    def _beginnings(self) -> Counter[str]:
        """The number of refs of the log with each beginning."""
        refs = {entry.ref.removeprefix(REF_PREFIX) for entry in self._draft.entries}
        return Counter(ref[:REF_DIGITS] for ref in refs)

    def _is_changed(self, place: int) -> bool:
        made_by = self._draft.made_by
        return bool(made_by) and self._edit.type in made_by[place]

    def _is_stub(self, result: Result) -> bool:
        if not self._is_changed(result.place):
            return False
        # If the message has several results, some may not be cleared yet.
        whole, text = self._draft.messages[result.place], result.message.text
        return whole is result.message or is_stub(text, result.ref) or holds_folded(text)


def _kept(edit: ClearToolResults, results: Sequence[Result], draft: Draft) -> int:
    """Return the number of newest results that stay."""
    most, least = min(edit.keep, len(results)), -(-edit.keep // 2)
    if draft.dear >= 1 or edit.keep_share == 1:
        return most
    room = edit.keep_share * draft.total
    counted: set[int] = set()  # places that were counted, since results of one message share its tokens
    for kept, result in enumerate(reversed(results[len(results) - most :])):
        if result.place not in counted:
            counted.add(result.place)
            room -= draft.tokens[result.place]
        if kept >= least and room < 0:
            return kept
    return most


def shown_call(call: Call) -> str:
    """Return a call as one line: `read path=src/main.c limit=20`. Arguments that are not an object stay as they are."""
    members = None if call.custom else read_json(call.arguments)
    shown = [call.arguments]
    if is_members(members):
        shown = [f"{name}={each if isinstance(each, str) else write_json(each)}" for name, each in members]
    return " ".join(" ".join([call.name, *shown]).split())


def shorter_arguments(arguments: str, digest: Digest) -> str:
    """Return arguments as JSON with digests instead of long strings, if that is shorter."""
    document = read_json(arguments)
    cleared = (
        _shorter(document, digest, _LEVELS) if is_members(document) else (("cleared", shorter_text(arguments, digest)),)
    )
    shorter = arguments if cleared == document else write_json(cleared)
    return shorter if len(shorter) < len(arguments) else arguments


def shorter_text(text: str, digest: Digest) -> str:
    """Return a text; a long one is replaced with its length and its digest, if that is shorter."""
    if len(text) <= _STRING:
        return text
    kept = digest(text)
    shorter = f"[cleared {len(text)} characters{f'; {kept}' if kept else ''}]"
    return shorter if len(shorter) < len(text) else text


def with_shorter_text(message: Message, digest: Digest) -> Message:
    """Return a message with each long text replaced with its beginning and a digest, if that is shorter."""
    texts = message.texts
    shorter = [_beginning_and_digest(text, digest) if len(text) > _TEXT else text for text in texts]
    return message if shorter == list(texts) else message.with_texts(shorter)


def _beginning_and_digest(text: str, digest: Digest) -> str:
    beginning = _beginning(text)
    kept = digest(text[len(beginning) :])
    shorter = f"{beginning}… [cleared {len(text) - len(beginning)} characters{f'; {kept}' if kept else ''}]"
    return shorter if len(shorter) < len(text) else text


def _beginning(text: str) -> str:
    """Return the beginning of a text that is kept: whole words, if there is a space in a good place."""
    beginning = text[:_BEGINNING]
    words, _, rest = beginning.rpartition(" ")
    return words if len(rest) < len(words) else beginning


def _shorter(value: JsonValue, digest: Digest, levels: int) -> JsonValue:
    if isinstance(value, str) and not isinstance(value, Number):
        return shorter_text(value, digest)
    if not levels and (is_members(value) or is_items(value)):
        return "[cleared]"
    if is_members(value):
        return tuple([(name, _shorter(member, digest, levels - 1)) for name, member in value])
    if is_items(value):
        kept = [_shorter(item, digest, levels - 1) for item in value[:_ITEMS]]
        more = len(value) - len(kept)
        return [*kept, f"[cleared {more} more]"] if more else kept
    return value
