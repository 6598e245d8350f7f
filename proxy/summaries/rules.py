"""Rules: the sentences in which somebody says how things are to be done, in their own words.

A sentence is taken whole; where there is no room for it, its shortest form is the clause around the marker.
That it states a rule is told by a few words, English or Chinese, and by lists under a heading that announces
rules. Program code, logs and tables inside of a text state none. What is quoted (a mail, a block of code,
words in quotation marks, a text to be translated) is somebody else's, and is marked so; where it orders a
model about, it is left out. It errs on the side of taking too much: what a user wants must not be lost, and
what is taken besides costs a line.

It takes time that grows with the length of the text and no faster. It does not know who wrote the text, nor
whether a rule is a wise one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from proxy.summaries.markers import STRONG, WEAK, commands, marker_of, strength_of

_LONGEST: Final = 600
"""Characters of a sentence; a longer one is cut around what makes it a rule, with marks."""
_BEFORE: Final = 240
"""Characters that are kept before what makes it a rule."""
_WRAPPED: Final = 45
"""Characters of the shortest line that may go on in the next one."""
_NEAR: Final = 12
"""Characters before the end of a sentence in which an abbreviation is looked for."""
_CLAUSE: Final = 120
_CLAUSE_CHINESE: Final = 50
"""Characters of the longest sentence, and of a Chinese one, that is its own shortest form."""
_LEAST_CLAUSE: Final = 24
_LEAST_CLAUSE_CHINESE: Final = 10
"""Characters of the shortest clause that says enough."""
_ALONE: Final = 160
"""Characters of the longest line that is a paragraph of its own and is taken as it stands."""
_ITEM_WORDS: Final = 3
"""Words, or pairs of Chinese characters, of the shortest item of a list that is taken as it stands."""
_SYMBOLS: Final = 0.2
"""Share of brackets and operators from which on a line is no prose."""

_ANNOUNCES: Final = re.compile(
    r"\b(?:rules?|constraints?|requirements?|guidelines?|instructions?|conventions?|restrictions?"
    r"|preferences?"
    r"|policy|policies|important|remember|dos|don['’]?ts)\b|要求|规则|规定|约束|约定|注意|限制|须知"
    r"|偏好|原则|规范",
    re.IGNORECASE,
)
"""What a heading says under which rules are listed."""
_ITEM: Final = re.compile(
    r"\s*(?:[-*+•·–]\s+|\(?(?:\d{1,3}|[a-zA-Z])[.)、]\s*|[（(]?[一二三四五六七八九十]{1,3}[)）、]\s*)"
)
_MARKS: Final = re.compile(r"\s*(?:#{1,6}\s+|>\s*|[-*+•·–]\s+)*")
"""What Markdown puts before a line."""

_FENCE: Final = re.compile(r"\s*(?:```|~~~)")
_CODE: Final = re.compile(
    r"\s*(?:(?:def|class|func|fn|function|interface|struct|enum)\s+\w+\s*[({:<]|(?:let|var|const|static"
    r"|final)\s.*="
    r"|import\s+[\w.{*\"']+\s*(?:;|,|$|as\b|from\b)|from\s+[\w.]+\s+import\b|return\b.*;\s*$|(?:if|for"
    r"|while)\s*\("
    r"|#include|#!|//|/\*|\*/|>>>|\$ |@@|[+-]{3} |at [\w.$<>]+\s?[(:]|File \"|Traceback\b"
    r"|\d{1,6}(?:[|│→\t]|:\s{2,})|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d|\d\d:\d\d:\d\d"
    r"|\[?(?:INFO|DEBUG|TRACE|ERROR|FATAL|CRITICAL|error|fatal|\w{0,40}(?:Error|Exception))\]?\s{0,3}:"
    r"|</?[a-zA-Z!][^>]{0,200}>\s*$|[{}\[]\s*[\"'{\[]|[{}\[\](),;\s]+$|\|)"
)
"""How lines of programs, logs and tables begin."""
_LEAST_WORDS: Final = 4
"""Words of the shortest sentence in a block of code that is taken for one."""
_QUOTED_CODE: Final = re.compile(r"`[^`\n]{0,200}`")
_OPERATORS: Final = re.compile(r"[{}()\[\];=<>|\\$~^&*+#@%]")
_CJK: Final = re.compile("[\u3400-\u9fff\uf900-\ufaff]")
_WORD: Final = re.compile(r"[^\W\d_]+")
_GOES_ON: Final = re.compile(r"[^\W\d_A-Z]|\d|[(\"'`]")
_ENDS: Final = re.compile(r"[.!?。！？:：;；]['\"”’)）\]]*\s*$")
_END_OF_SENTENCE: Final = re.compile(
    r"(?:(?<=[a-z0-9)\"'”’%`\]A-Z])[.!?]+[\"'”’)\]]*(?=\s)|[。！？]+[”’」』）)]*)"
)
_ABBREVIATION: Final = re.compile(
    r"(?:\b(?:e\.g|i\.e|a\.m|p\.m|etc|vs|approx|no|nos|fig|sec|dr|mr|mrs|ms|prof|st|inc|ltd|co|corp|cf|resp"
    r"|max|min|incl|excl"
    r"|esp|dept|est|tel|ext|vol|pp|al|ca|ref|ver|[a-z])|^\d{1,3})\.$",
    re.IGNORECASE,
)
_LETTER: Final = re.compile(r"(?:^|\s)[A-Z]\.$")
_GOES_ON_SMALL: Final = re.compile(r"\s+[a-z]")
"""After a letter that stands for a thing ("never touch X. tell me"), and not for a name (J. Smith)."""
_QUOTE_LINE: Final = re.compile(r"\s{0,8}>")
_QUOTATION: Final = re.compile(
    r"\"[^\"\n]{12,600}\"|“[^”\n]{6,600}”|「[^」\n]{6,600}」|『[^』\n]{6,600}』|‘[^’\n]{12,600}’(?!\w)"
    r"|(?<!\w)'[^'\n]{12,600}'(?!\w)"
)
"""What somebody else says; a shorter one is a term."""
_POSES: Final = re.compile(
    r"\s{0,8}(?:(?:system|assistant|developer)(?: prompt| message)?\s?[:：]|</?(?:system|user|assistant"
    r"|transcript|summary)\b"
    r"|<\|[a-z_]{2,20}\||(?:系统|助手)(?:提示|消息|指令)?\s?[:：])",
    re.IGNORECASE,
)
"""How a line begins that poses as one of a transcript: no user writes so."""
_HANDED: Final = re.compile(
    r"(?:(?:please|can you|could you|would you|now|then|and)\s+){0,3}(?:translate|proofread|rephrase"
    r"|paraphrase|rewrite|summari[sz]e"
    r"|explain|polish)\b[^:：\n]{0,80}[:：]|[^:：，。\n]{0,24}(?:翻译|润色|改写|总结|概括|校对|解释)[^:：。\n]{0,24}[:：]",
    re.IGNORECASE,
)
"""How a line begins that hands a text over to be worked on."""
_BOUND: Final = re.compile(r"[,;:](?=\s)|\s[—–-](?=\s)|[，；：—]")


_MARK: Final = "> "
"""What is put before a sentence of somebody else's."""
_ITEMS: Final = 60
"""Rules that are taken from one list."""


class Rule(NamedTuple):
    """A sentence that says how something is to be done."""

    text: str
    """The sentence, verbatim but for line ends; a very long one cut, with marks."""
    strength: int
    """`STRONG` or `WEAK`."""
    is_quoted: bool = False
    """Whether it is somebody else's: it stands in a block of code (there, only whole sentences count that are
    strong rules), in a quoted line (with its mark), in quotation marks, or in a text that was handed over."""


class _Line(NamedTuple):
    """A line of prose."""

    text: str
    paragraph: int
    is_fenced: bool


def rules_of(text: str, *, closely: bool = False) -> Iterator[Rule]:
    """Yield the rules of a text in its order.

    Args:
        text: Read whole.
        closely: Whether it was written by hand: small words count too, items of any list, and a short line
            that is a paragraph of its own.
    """
    items = announced = 0
    handed = -1
    lines = list(_prose(text))
    sizes = Counter(line.paragraph for line in lines)
    for line in lines:
        plain = _without_marks(line.text)
        is_other_s = line.is_fenced or _QUOTE_LINE.match(line.text) or _POSES.match(line.text)
        if is_other_s or line.paragraph == handed:
            yield from _quoted(plain, line)
            continue
        if plain.endswith((":", "：")) and _HANDED.match(plain):
            handed = line.paragraph + (sizes[line.paragraph] == 1)
            yield from (rule for rule in _stated(plain, closely=False) if rule.strength == STRONG)
            continue
        is_item = _ITEM.match(line.text) is not None
        if items and is_item:
            items -= 1
            yield Rule(text=_cut(plain), strength=max(announced, strength_of(plain)))
            continue
        items = announced = 0
        found = list(_stated(plain, closely=closely))
        if closely and not found and _is_taken(plain, is_item=is_item, is_alone=sizes[line.paragraph] == 1):
            yield Rule(text=_cut(plain), strength=WEAK)
        yield from found
        if plain.endswith((":", "：")):
            last = found[-1] if found and plain.endswith(found[-1].text) else None
            announced = last.strength if last else WEAK if _ANNOUNCES.search(plain) else 0
            items = _ITEMS if announced else 0


def shortest(sentence: str) -> str:
    """Return the shortest form of a rule, verbatim: of a longer sentence the clause around its marker."""
    is_chinese = len(_CJK.findall(sentence)) > len(sentence) / 4
    most, least = (_CLAUSE_CHINESE, _LEAST_CLAUSE_CHINESE) if is_chinese else (_CLAUSE, _LEAST_CLAUSE)
    marker = marker_of(sentence)
    if len(sentence) <= most or marker is None:
        return sentence
    bounds = [0, *(bound.end() for bound in _BOUND.finditer(sentence)), len(sentence)]
    place = max(0, bisect_right(bounds, marker.end() - 1) - 1)
    start, stop = bounds[place], bounds[min(place + 1, len(bounds) - 1)]
    while place + 2 < len(bounds) and len(sentence[start:stop].strip()) < least:
        place += 1
        stop = bounds[place + 1]
    return _cut(sentence[min(start, marker.start()) : stop].strip(" \t,;:，；：—–"))


def _quoted(plain: str, line: _Line) -> Iterator[Rule]:
    """Yield what a line of somebody else's lays down, unless it orders a model about."""
    if commands(plain):
        return
    if line.is_fenced:
        if _is_sentence(plain) and strength_of(plain) == STRONG:
            yield Rule(text=_MARK + _cut(plain), strength=STRONG, is_quoted=True)
        return
    for sentence in sentences(plain):
        if strength := strength_of(sentence):
            yield Rule(text=_MARK + _cut(sentence), strength=strength, is_quoted=True)


def _stated(plain: str, *, closely: bool) -> Iterator[Rule]:
    """Yield the rules of a line that is the writer's own; what it quotes lays nothing down by itself."""
    masked = _QUOTATION.sub(lambda found: "_" * len(found.group()), plain)
    start = 0
    for sentence in sentences(masked):
        start = masked.index(sentence, start)
        whole = plain[start : start + len(sentence)]
        start += len(sentence)
        handed = _HANDED.match(sentence)
        own = sentence[: handed.end()] if handed else sentence
        if strength := strength_of(own, closely=closely):
            yield Rule(text=_cut(whole), strength=strength)
        elif own != whole and strength_of(whole) and not commands(whole):
            yield Rule(text=_cut(whole), strength=WEAK, is_quoted=True)


def _is_taken(plain: str, *, is_item: bool, is_alone: bool) -> bool:
    """Tell whether a line by hand is taken though no word of it says that it is a rule."""
    if not (is_item or is_alone) or len(plain) > _ALONE or plain.endswith((":", "：", "?", "？")):
        return False
    return len(plain.split()) + len(_CJK.findall(plain)) // 2 >= _ITEM_WORDS


def own_words(text: str) -> str:
    """Return a text without its lines that are somebody else's, and without its blocks of code."""
    lines: list[str] = []
    is_fenced = False
    for line in text.split("\n"):
        is_fence = _FENCE.match(line) is not None
        if not (is_fence or is_fenced or _QUOTE_LINE.match(line) or _POSES.match(line)):
            lines.append(line)
        is_fenced ^= is_fence
    return "\n".join(lines).strip()


def sentences(line: str) -> Iterator[str]:
    """Yield the sentences of a line, each with what ends it; together they are the line but for space."""
    start = 0
    for end in _END_OF_SENTENCE.finditer(line):
        if _ABBREVIATION.search(line, max(start, end.end() - _NEAR), end.end()) and not (
            _LETTER.search(line, max(start, end.end() - 3), end.end())
            and _GOES_ON_SMALL.match(line, end.end())
        ):
            continue
        yield line[start : end.end()].strip()
        start = end.end()
    if sentence := line[start:].strip():
        yield sentence


def _prose(text: str) -> Iterator[_Line]:
    """Yield the lines that are prose.

    A line that was wrapped is put together again; in a block of code none is, and none of a quoted one with
    what follows the quotation.
    """
    is_fenced = False
    whole = ""
    paragraph, is_begun = 0, False
    for line in text.split("\n"):
        goes_on = len(whole) >= _WRAPPED and not _ENDS.search(whole, len(whole) - _NEAR) and not is_fenced
        goes_on = goes_on and not _QUOTE_LINE.match(whole)
        if whole and goes_on and _GOES_ON.match(line.lstrip()) and _is_prose(line):
            whole = f"{whole.rstrip()} {line.strip()}"
            continue
        if whole:
            yield _Line(text=whole, paragraph=paragraph, is_fenced=is_fenced)
        whole = ""
        paragraph += bool(not line.strip() and is_begun)
        is_begun = bool(line.strip())
        if fence := _FENCE.match(line):
            is_fenced = not is_fenced
            line = "" if is_fenced else line[fence.end() :]  # noqa: PLW2901  something may follow the end of a block
        if _is_prose(line):
            whole = line
    if whole:
        yield _Line(text=whole, paragraph=paragraph, is_fenced=is_fenced)


def _is_prose(line: str) -> bool:
    """Tell whether a line says something in words."""
    if _CODE.match(line):
        return False
    bare = _QUOTED_CODE.sub("", line.strip())
    if len(_OPERATORS.findall(bare)) > _SYMBOLS * max(len(bare), 1):
        return False
    return len(_WORD.findall(line)) > 1 or bare.endswith(":") or _CJK.search(line) is not None


def _is_sentence(line: str) -> bool:
    """Tell whether a line begins and ends as a sentence does."""
    if not line.endswith((".", "!", "。", "！")):
        return False
    return _CJK.search(line) is not None or (line[:1].isupper() and len(line.split()) >= _LEAST_WORDS)


def _without_marks(line: str) -> str:
    """Return a line without what Markdown puts before it."""
    marks = _MARKS.match(line)
    return (line[marks.end() :] if marks else line).strip()


def _cut(sentence: str) -> str:
    """Return a sentence, or of a very long one what stands around that which makes it a rule."""
    if len(sentence) <= _LONGEST:
        return sentence
    found = marker_of(sentence)
    start = max(0, found.start() - _BEFORE) if found else 0
    stop = start + _LONGEST
    return f"{'…' if start else ''}{sentence[start:stop].strip()}{'…' if stop < len(sentence) else ''}"
