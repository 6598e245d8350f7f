r"""The text under its wrapping, so that values stand alone in it and keys stand before their values.

Tools print JSON inside of strings (`\"id\": \"A1\"`, `\\n`), pages with their markup, and colours. What looks
like an escape may be a step of a Windows path (`C:\temp\run-42.log`): where a text does not show which of the
two it is, the word behind it is left out, for either reading of it may be wrong.
Everything takes time that grows with the length of the text and no faster. It does not know what a
value is.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from proxy.textscan.values import beginning_of, end_of

HEAD: Final = 24_000
"""Characters of the beginning that are read."""
TAIL: Final = 8_000
"""Characters of the end that are read."""
CUT: Final = "…"
"""Stands where something is left out: what holds it is no value."""
_TAGS: Final = 5
"""So many closing tags make a page."""

_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_BACKSLASHES: Final = re.compile(
    r"""\\(?<!\\\\)(?:(?<=\b[A-Za-z]:\\)(\\*+)(?=[^\\/:*?"'<>|\s])(?![nrt](?![\w.%~$()-]))"""
    r"""(?:[^\\/:*?"'<>|,;\n]{1,255}+\\\1(?!\\))*+[^\\\s/:*?"'<>|,;]{0,255}+"""
    r"""|\\*+(?:(["'/])|([nrt])|(u)[0-9a-fA-F]{4}))"""
)
_DRIVE: Final = 1
_MARK: Final = 2
_LETTER: Final = 3
_CODE: Final = 4
"""Backslashes and what they stand before; or those of a path on a drive, as many as are alike.

It begins with a backslash, so that a search looks for that alone.
"""
_PATH_CHARACTER: Final = re.compile(r"[\w.%~$()-]")
_NO_PATH: Final = re.compile(r"[^\w.%~$()-]")
_STEP: Final = re.compile(r"\\[^\\nrtu]")
_LINE: Final = re.compile(r"\\[nrt][A-Z]")
_SPACE: Final = re.compile(r"\s")
_CERTAIN: Final = re.compile(r"\\(?<!\\\\)(\\*+)[nr](?:(?![\w.%~$()-])|(?<=[{}\[\],;!?]\\[nr]))")
"""The end of a line where no path has a step: the text is escaped so many times."""
_PLAIN: Final = re.compile(r"\\(?<!\\\\)(?:\\\\)*+(?!\\)[A-Zac-eg-mo-qsvwyz_.]")
"""What says that it is not: a backslash before what no escape has."""
_OPENING: Final = re.compile(r"""(?:^|[=:,(\[{>])\s{0,2}[bru]?["']""", re.MULTILINE)
"""How a string begins in JSON and in what programs print."""
_HALF: Final = re.compile("[\ud800-\udfff]")
_TAG: Final = re.compile(r"<[/A-Za-z!][^<>]{0,400}>")
_ATTRIBUTE: Final = re.compile(r"""\b(?:href|src|title|alt|content)=["' ]{0,4}([^"'>]{1,200})""")
_ENTITY: Final = re.compile(r"&(?:[a-z]{2,6}|#\d{1,6});")
_UNSEEN: Final = (("<style", "</style>"), ("<script", "</script>"))


def ends_of(text: str) -> str:
    """Return the text, or of a long one its beginning and its end, on two lines.

    No value is cut in two. A line that is cut has a mark where it is.
    """
    if len(text) <= HEAD + TAIL:
        return text
    head, tail = beginning_of(text, HEAD), end_of(text, TAIL)
    after = "" if text[len(head)] == "\n" else CUT
    before = "" if text[len(text) - len(tail) - 1] == "\n" else CUT
    return f"{head}{after}\n{before}{tail}"


def readable(text: str) -> str:
    """Return the text without colours, escapes and tags; of a tag its link or title stays, on a line."""
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    if "\\" in text:
        text = _unescaped(text)
    if text.count("</") >= _TAGS:
        for opening, closing in _UNSEEN:
            text = _without(text, opening, closing)
        text = _ENTITY.sub(" ", _TAG.sub(_seen, text))
    return text


def _unescaped(text: str) -> str:
    """Return the text with escapes undone, those of JSON inside of JSON too, where they are any for sure."""
    depths = _depths(text)
    kept: list[str] = []
    end = line_end = opened = deepest = 0
    for found in _BACKSLASHES.finditer(text):
        start, stop = found.span()
        if start >= line_end:
            line_start = text.rfind("\n", 0, start) + 1
            line_end = text.find("\n", start) + 1 or len(text)
            opening = _OPENING.search(text, line_start, line_end)
            opened, deepest = opening.end() if opening is not None else line_end, 0
        which = found.lastindex
        if which == _MARK:
            depth = stop - start - 1
            if depth > deepest and text[stop - 1] == '"':
                deepest = depth
            kept.append(text[end:start])
            end = stop - 1
            continue
        kept.append(text[end:start])
        end = stop
        if which == _CODE:
            kept.append(_character(int(text[stop - 4 : stop], 16)))
            continue
        # It stands inside of a string, whose quotation mark has as many backslashes less one.
        depth = stop - start - 1 if which == _LETTER else len(found[_DRIVE]) + 1
        is_shown = depth in depths and (deepest >= max(1, depth - 1) or (depth == 1 and start >= opened))
        if which == _LETTER and (is_shown or _PATH_CHARACTER.match(text, stop) is None):
            kept.append(" " if text[stop - 1] == "t" else "\n")
        elif which == _DRIVE and not is_shown and _is_path(found[0]):
            kept.append(found[0])
        else:
            kept.append(CUT)
            end = _end_of_word(text, stop)
    whole = "".join([*kept, text[end:]])
    if whole.isascii() or not _HALF.search(whole):
        return whole
    # Two halves that stand side by side are one character; what is left alone is none.
    return whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\ufffd", " ")


def _depths(text: str) -> Collection[int]:
    """Return how many times the text is surely escaped, in parts of it: the backslashes of a line's end."""
    if _PLAIN.search(text) is not None:
        return ()
    return {len(found[1]) + 1 for found in _CERTAIN.finditer(text)}


def _is_path(steps: str) -> bool:
    """Tell whether steps after a drive are those of a path, not lines of text after a colon."""
    return _STEP.search(steps) is not None or not (_SPACE.search(steps) or _LINE.search(steps))


def _end_of_word(text: str, start: int) -> int:
    """Return the place after the characters of a path from `start` on."""
    found = _NO_PATH.search(text, start)
    return len(text) if found is None else found.start()


def _character(code: int) -> str:
    """Return what an escape of four hexadecimal digits stands for; a space for what is not printed."""
    meant = chr(code)
    return meant if meant.isprintable() or _HALF.match(meant) else " "


def _seen(tag: re.Match[str]) -> str:
    """Return what a reader sees of a tag, or may follow."""
    return f"\n{' '.join(_ATTRIBUTE.findall(tag.group()))}\n"


def _without(text: str, opening: str, closing: str) -> str:
    """Return the text without what stands between two tags; one that is never closed stays."""
    kept: list[str] = []
    start = 0
    while (found := text.find(opening, start)) >= 0 and (stop := text.find(closing, found)) >= 0:
        kept.append(text[start:found])
        start = stop
    return "".join([*kept, text[start:]])
