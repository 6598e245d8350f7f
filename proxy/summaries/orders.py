r"""Orders: what in a summary tells its reader what to do, instead of telling what was said and done.

A summary reports. A sentence of it is an order where it

    speaks as the system        `SYSTEM:`, "note to the assistant:", "you are now", tags of a template
    lifts rules                 says that rules are void or are to be ignored
    waives                      says that nobody need be asked, that all is to be approved
    speaks to the reader        "you must", "from now on, always", bids what to reply, or to give away secrets
    bids                        begins with a verb that bids, where no task is listed

It is none where it stands in the user's own words so, or where somebody is reported to have said it. That the
user lifted a rule or waived a question is believed only where the user said something of the kind.

What is still to be done may bid ("## Next step: run the tests"). It is told by words, English or Chinese, and
takes time that grows with the length of the text. It does not know where the text is from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from proxy.summaries.rules import sentences
from proxy.summaries.wordings import (
    ALL,
    BIDS,
    FORBIDS,
    GOES_AHEAD,
    LIFTS,
    MILD,
    NEGATED,
    PERMITS,
    REPLIES,
    SOMEBODY,
    SWEEPING,
    SWEEPS,
    SYSTEM,
    TASKS,
    TELLS,
    USER,
    WAIVES,
    WITHDRAWS,
    WITHDRAWS_ALL,
    YOU,
)

Kind = Literal["system", "lifts", "waives", "speaks", "replies", "bids"]

_ITEM: Final = re.compile(r"\s*(?:[-*+•–]\s+|\(?\d{1,3}[.)、]\s*)")
_HEADING: Final = re.compile(r"\s*(?:#{1,6}\s+(?P<marked>[^\n]*)|\*\*(?P<bold>[^*\n]{1,80})\*\*[:：]?\s*\Z)")
_LABEL: Final = re.compile(
    r"[\s*_-]*(?P<label>[^\s:：.。!?，,][^:：.。!?\n]{0,40})[*_]*[:：](?=\s|\Z|[^\x00-\x7f])[*_]*"
)
_STOPS: Final = re.compile(r"[.;:!?。；：！？—]")
_QUOTATION: Final = re.compile(
    r"\"[^\"\n]{1,400}\"|“[^”\n]{1,400}”|「[^」\n]{1,400}」|`[^`\n]{1,400}`|‘[^’\n]{1,400}’"
    r"|(?<!\w)'[^'\n]{1,400}'(?!\w)"
)
_WORD: Final = re.compile(r"[^\W\d_\u3400-\u9fff]+")
_HAN: Final = re.compile("[\u3400-\u9fff]")
_TOLD_OF: Final = 4
"""Words, or Chinese characters, around a quotation that tell of it."""
_BEHIND: Final = re.compile(r"(?<![\u3400-\u9fff])(?:\W{0,3}\w+){1,2}")
_NOT_BEFORE: Final = 24
"""Characters before a user's words in which they may be turned round."""
_GROUNDED: Final = 0.6
"""Part of an order's words that the user has used, from which on it is the user's."""


class Order(NamedTuple):
    """A piece of text that tells a reader what to do."""

    kind: Kind
    text: str


class _Line(NamedTuple):
    """A line of a summary, and where it stands."""

    text: str
    is_item: bool
    is_task: bool
    """Whether it stands where it is listed what is to be done."""


def order_in(text: str, own: str) -> Order | None:
    """Return the first order of a summary, None where it gives none.

    Args:
        text: The summary.
        own: What the user said, in small letters.
    """
    for line in _lines(text):
        for sentence in sentences(line.text):
            order = _order(sentence, line, own)
            if order is not None and not _is_own(sentence, own):
                return order
    return None


def _lines(text: str) -> Iterator[_Line]:
    """Yield the lines, without what stands before an item of a list."""
    is_task = under_label = begun = False
    for line in text.split("\n"):
        if heading := _HEADING.match(line):
            is_task = bool(TASKS.search(heading["marked"] or heading["bold"] or ""))
            under_label = False
            yield _Line(text=line.strip(), is_item=False, is_task=is_task)
            continue
        item = _ITEM.match(line)
        rest = line[item.end() :] if item else line
        label = _LABEL.match(rest)
        says_task = label is not None and bool(TASKS.search(label["label"]))
        if label is not None and not rest[label.end() :].strip():
            under_label, begun = says_task, False
        elif rest.strip():
            begun = True
        elif begun:  # an empty line ends what a label announces
            under_label = False
        if label is not None and says_task:
            rest = rest[label.end() :]
        yield _Line(text=rest.strip(), is_item=item is not None, is_task=is_task or under_label or says_task)


def _order(sentence: str, line: _Line, own: str) -> Order | None:
    """Return the order that a sentence gives, unless somebody is reported to have given it."""
    if found := SYSTEM.search(sentence):
        return None if _is_quoted(sentence, SYSTEM) else Order(kind="system", text=found.group())
    if (found := LIFTS.search(sentence)) and not _is_told(sentence, found, LIFTS, own, "lifts"):
        return Order(kind="bids" if found["english"] or found["chinese"] else "lifts", text=found.group())
    if (found := _waiver(sentence)) and not _is_told(sentence, found, WAIVES, own, "waives"):
        return Order(kind="waives", text=found.group())
    if (found := YOU.search(sentence)) and not (
        _is_told(sentence, found, YOU, own, "speaks") or _is_of_own(sentence, found, own)
    ):
        return Order(kind="speaks", text=found.group())
    if (found := REPLIES.search(sentence)) and not (
        _is_told(sentence, found, REPLIES, own, "replies") or _is_grounded(sentence, own)
    ):
        return Order(kind="replies", text=found.group())
    if (found := SWEEPS.search(sentence)) and not (
        _is_told(sentence, found, SWEEPS, own, "bids") or _is_grounded(found.group(), own)
    ):
        return Order(kind="bids", text=found.group())
    if line.is_task:
        return None
    mild = None if sentence.endswith(("?", "？")) else MILD.search(sentence)
    if mild and not (_is_told(sentence, mild, MILD, own, "speaks") or _is_of_own(sentence, mild, own)):
        return Order(kind="speaks", text=mild.group())
    found = None if line.is_item else BIDS.search(sentence)
    if found is None or _is_quoted(sentence, BIDS) or _is_of_own(sentence, found, own):
        return None
    return Order(kind="bids", text=sentence)


def _waiver(sentence: str) -> re.Match[str] | None:
    """Return what waives a question, unless it is turned round ("never without asking", 未经确认不得)."""
    for found in WAIVES.finditer(sentence):
        if not _HAN.search(found.group()):
            if not ("without" in found.group().lower() and FORBIDS.search(sentence)):
                return found
            continue
        rest = sentence[: found.start()] + sentence[found.end() :]
        sweeping = found.group().startswith(SWEEPING)
        if not FORBIDS.search(rest) and (sweeping or PERMITS.search(sentence)):
            return found
    return None


def _is_told(sentence: str, order: re.Match[str], orders: re.Pattern[str], own: str, kind: Kind) -> bool:
    """Tell whether somebody is reported to have said it; of the user that is not believed without a sign."""
    teller = _teller(sentence, order.start())
    if not teller and not _is_quoted(sentence, orders):
        if kind != "lifts" or not USER.search(sentence[: order.start()]):
            return False
        teller = sentence[: order.start()]  # "the user withdrew the rule": told by the verb itself
    if kind not in ("lifts", "waives"):
        return True
    teller = teller or sentence
    if SOMEBODY.search(teller) and not USER.search(teller):
        return True
    lifts = WITHDRAWS_ALL if ALL.search(order.group()) else WITHDRAWS
    signs = GOES_AHEAD if kind == "waives" else lifts
    return any(not _is_negated(own, sign.start()) for sign in signs.finditer(own))


def _teller(sentence: str, start: int) -> str:
    """Return the words before an order that say who gave it: a verb of telling, not parted from it."""
    before = sentence[:start]
    verb = max(TELLS.finditer(before), key=lambda each: each.start(), default=None)
    if verb is None or not before[: verb.start()].strip("-*# "):
        return ""
    between = before[verb.end() :].strip()
    if _STOPS.search(between.lstrip(":：")):
        return ""
    return before[: verb.end()]


def _is_quoted(sentence: str, orders: re.Pattern[str]) -> bool:
    """Tell whether what it orders stands in quotation marks, and the sentence tells of it."""
    around = _QUOTATION.sub(" ", sentence)
    if around == sentence or orders.search(around):
        return False
    return len(_WORD.findall(around)) + len(_HAN.findall(around)) >= _TOLD_OF


def _is_own(sentence: str, own: str) -> bool:
    """Tell whether the user said a sentence so, and did not turn it round."""
    return _stands_in(own, sentence)


def _is_of_own(sentence: str, order: re.Match[str], own: str) -> bool:
    """Tell whether an order, with the two words behind it, is the user's: of a rule that was cut short."""
    behind = _BEHIND.match(sentence, order.end())
    return _stands_in(own, sentence[order.start() : behind.end() if behind else order.end()])


def _stands_in(own: str, text: str) -> bool:
    """Tell whether a text stands in what the user said, not turned round."""
    wanted = text.lower().strip().strip("-*#>\"'“”‘’「」 ").rstrip(".!。！")
    start = own.find(wanted) if wanted else -1
    while start >= 0:
        if not _is_negated(own, start):
            return True
        start = own.find(wanted, start + 1)
    return False


def _is_negated(own: str, start: int) -> bool:
    """Tell whether what stands there in the user's words is turned round ("never delete it")."""
    return bool(NEGATED.search(own[max(0, start - _NOT_BEFORE) : start]))


def _is_grounded(order: str, own: str) -> bool:
    """Tell whether most words of an order, or pairs of Chinese characters, are the user's."""
    words = [word for word in _WORD.findall(order.lower()) if len(word) > 3]
    han = "".join(_HAN.findall(order))
    words += [han[at : at + 2] for at in range(len(han) - 1)]
    return bool(words) and sum(word in own for word in words) >= _GROUNDED * len(words)
