r"""Wholes: identifiers that hold marks at which a text is otherwise divided.

    10.42.7.19:5432      00:1A:2B:3C:4D:5E      arn:aws:s3:::reports      C:\Users\dana\plan.docx
    sha256:9ab4e1        python:3.11-slim       src/retry.py:214          libssl3=3.0.2-0ubuntu1
    #48213               order 88120347         +49 30 555 0142           京A88888

Who looks for one later looks for it as it was written. Names made of plain words that are names all the same
(`Makefile`) are wholes too. It looks at the pieces of a text alone, each once, in time that grows with its
length and no faster; it does not know what any of them is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from proxy.textscan import CJK, leaves_of

_LONGEST: Final = 200
_PARTS: Final = 4
"""Names before a whole that are taken off."""
_SHORT: Final = 48
"""Characters of a word from which on it is not remembered what is in it."""
_SEEN: Final = 16_384
_MOST: Final = 5000
"""Numbers of a text before which a word is looked for."""
_TOKENS: Final = re.compile(rf"[^\s\"'`<>(){{}}\[\],;|*“”‘’，。、：；？！（）《》【】「」…·{CJK}]+")
_MARKED: Final = re.compile(r"[:\\@#+=]|\d\.\d+\.\d+\.\d|file|README|LICENSE|CHANGELOG|CODEOWNERS").search
"""What a whole has at least."""
_EDGES: Final = ".:,!?=&$^~-/\\"
_EDGES_BEFORE: Final = ":,!?=&$^-"
_DOUBLED: Final = re.compile(r"(?<!\\)\\(?!\\)[nrtbf]?")
_ESCAPES: Final = re.compile(r"\\[nrt]?")
_WINDOWS: Final = re.compile(
    r"(?<![A-Za-z])(?:[A-Za-z]:\\|\\\\[\w.$-]{2,60}\\)[\w.$~+@-]{1,80}(?:\\[\w.$~+@-]{1,80}){0,20}"
)

_HEX: Final = "[0-9a-fA-F]"
_WHOLE: Final = re.compile(
    "|".join(
        (
            # Addresses of machines.
            r"(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5})?(?:/\d{1,2})?",
            rf"(?:{_HEX}{{1,4}}:){{1,6}}(?::{_HEX}{{1,4}}){{1,6}}(?:%\w+)?(?:/\d{{1,3}})?",
            rf"(?:{_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}(?:/\d{{1,3}})?",
            rf"(?:{_HEX}{{2}}[:-]){{5}}{_HEX}{{2}}",
            # Names with a scheme: arn:aws:…, urn:…, doi:10.1000/x, sha256:…, user:9281:cart.
            r"(?:arn|urn|doi|did|spotify|chrome|pkg|cpe):[\w:/.*+=@$%-]{3,}",
            rf"[a-z][a-z0-9-]{{1,11}}:(?=\d*[a-fA-F]){_HEX}{{6,128}}",
            r"[A-Za-z][\w-]{1,30}(?::[\w.@/+-]{1,60}){2,8}",
            r"[\w.-]{1,40}@[\w.-]{1,60}:[\w./~-]{2,120}",
            # A file or a host, and a number: src/retry.py:214, db.internal:5432.
            r"/?(?:[\w@.+~-]{1,80}/){0,12}[\w@+-][\w@.+-]{0,80}\.[A-Za-z]\w{0,12}(?::\d{1,6}){1,2}",
            r"localhost:\d{2,5}",
            # Images and packages with a version.
            r"(?:[\w.-]{1,60}(?::\d{1,5})?/){0,6}[a-z][\w.-]{1,60}:v?\d[\w.-]*[.-][\w.-]+",
            r"(?:[\w.-]{1,60}(?::\d{1,5})?/){1,6}[a-z][\w.-]{1,60}:[\w][\w.-]{0,60}",
            r"[A-Za-z][\w.+-]{1,60}(?:==\d[\w.+~:-]*|=(?!\d+\.\d+\.\d+\.\d)\d+\.\d+[.-][\w.+~:-]+)",
            r"@?[\w./-]{2,80}@v?\d+\.\d[\w.+-]*",
            # Numbers with a mark, and somebody's handle.
            r"\+\d[\d-]{6,18}\d",
            r"#\d{2,12}",
            r"@[A-Za-z][\w-]{2,38}",
            # Files without an ending.
            r"(?:GNU)?[Mm]akefile|(?!Pro)[A-Z][a-z]{2,10}file|README|LICENSE|CHANGELOG|CODEOWNERS",
            r"\.(?:env|git|docker|npm|nvm|eslint|prettier|babel|bash|zsh|editor|pre-commit)[\w.-]*",
        )
    )
)
_CLOCK: Final = re.compile(r"(?:[A-Za-z]+:)?\d{1,2}:\d{2}(?::\d{2})?[\d.]*")
_TELLING: Final = re.compile(r"\d|[a-zA-Z]{3}")

_PLATE: Final = re.compile(
    "[京津沪渝冀豫云辽黑湘皖鲁新苏浙赣鄂桂甘晋蒙陕吉闽贵粤青藏川宁琼][A-Z]·?[A-Z0-9]{4,5}"
    "[A-Z0-9挂学警港澳]"
    "(?![A-Za-z0-9])"
)
_SPACED: Final = re.compile(r"(?<![\w+])\+\d{1,3}(?: \d{2,5}){2,5}(?![\w-])")
_NUMBERS: Final = re.compile(rf"[ #{CJK}](\d{{4,20}})(?![A-Za-z0-9_])(?![.,]\d)")
_REACH: Final = 24
_CHINESE_KIND: Final = (
    "(?:订单|工单|运单|保单|快递|发票|合同|车牌|账户|手机|电话|身份证|会员|客户|用户|房间|航班|车次|病历|流水|批次"
    "|案件|项目|产品|商品|任务|申请|学|工|卡|编|单|票|账)(?:单号|编号|号码|号|码|单)?"
)
_KIND: Final = re.compile(
    r"(?:(?<![A-Za-z0-9_])(?:order|ticket|case|issue|PR|MR|pull request|merge request|invoice|account"
    r"|customer|user|booking|reservation|reference|ref|flight|item|product|SKU|job|run|build|task|request|commit"
    r"|change|bug|incident|session|transaction|payment|shipment|parcel|tracking|card|member|policy|claim|contract"
    r"|batch|lot|serial|patient|employee|student|room|port|container|deployment|record|document|PID|ID)"
    r"(?: (?:number|no\.?|id|code))?[ ]"
    rf"|{_CHINESE_KIND})$",
    re.IGNORECASE,
)
"""What a number is the number of, right before it."""
_AFTER_KIND: Final = re.compile(rf"{_CHINESE_KIND}(?=([A-Za-z]{{1,8}}[-_]?\d[A-Za-z0-9_-]{{2,40}}))")


def wholes_in(text: str) -> Iterator[str]:
    """Yield the wholes of a text, JSON or not, each once."""
    if "\\" in text and text.lstrip()[:1] in {"{", "["}:
        leaves = leaves_of(text)
        if leaves is not None:
            text = "\n".join(leaf.text for leaf in leaves)
    found: dict[str, None] = {}
    for word in dict.fromkeys(text.split()):
        if _MARKED(word) or "." in word[:2] or ("." in word and not word.isascii()):
            found.update(dict.fromkeys(_in_word_seen(word) if len(word) < _SHORT else _in_word(word)))
    if not text.isascii():
        found.update(dict.fromkeys(_PLATE.findall(text)))
        found.update((match.group() + match.group(1), None) for match in _AFTER_KIND.finditer(text))
    if "+" in text:
        found.update(dict.fromkeys(_SPACED.findall(text)))
    found.update(dict.fromkeys(_numbered(text)))
    yield from found


def is_whole(piece: str) -> bool:
    """Tell whether a piece without space is a whole."""
    if "\\" in piece:
        return _WINDOWS.fullmatch(piece) is not None
    return _WHOLE.fullmatch(piece) is not None and not _CLOCK.fullmatch(piece)


def _in_word(word: str) -> tuple[str, ...]:
    """Return the wholes of what stands between white space."""
    tokens = (token for token in _TOKENS.findall(word) if len(token) <= _LONGEST)
    return tuple(dict.fromkeys(whole for token in tokens for whole in _wholes_of(token)))


_in_word_seen: Final = lru_cache(_SEEN)(_in_word)
"""Most words stand there again and again."""


def _wholes_of(token: str) -> tuple[str, ...]:
    """Return the wholes of a run without space."""
    if "://" in token:
        return ()
    found = (each for run in _unescaped(token) for each in _in_run(run, _PARTS))
    return tuple(each for each in found if _TELLING.search(each))


def _in_run(run: str, parts: int) -> Iterator[str]:
    """Yield the wholes of a run: all of it, or of `name=value` and `name:value` a side, `parts` times."""
    bare = run.rstrip(_EDGES).lstrip(_EDGES_BEFORE)
    if is_whole(bare):
        yield bare
        return
    for joint in "=:" if parts else "":
        before, found, after = bare.partition(joint)
        if found:
            if is_whole(before):
                yield before
            yield from _in_run(after, parts - 1)
            return


def _unescaped(token: str) -> tuple[str, ...]:
    """Return the runs of a token in which escapes may stand, as in JSON inside of JSON."""
    if "\\" not in token:
        return (token,)
    if "\\\\" in token and not token.startswith("\\\\"):
        return tuple(part.replace("\\\\", "\\") for part in _DOUBLED.split(token))
    path = _WINDOWS.search(token)
    return (path.group(),) if path else tuple(_ESCAPES.split(token))


def _numbered(text: str) -> Iterator[str]:
    """Yield the numbers that have what they are the number of right before them, both as they stand there."""
    seen: set[str] = set()
    for match in _NUMBERS.finditer(text):
        start = match.start(1)
        start -= text[start - 1] == "#"
        number = text[start : match.end(1)]
        if number in seen:
            continue
        if len(seen) == _MOST:
            return
        seen.add(number)
        kind = _KIND.search(text[max(0, start - _REACH) : start])
        if kind is not None:
            yield kind.group() + number
