"""HTML as the text that it shows, with what an agent needs to go on.

Links keep their address, fields and buttons their id, name, value and label. The text is read once, tag by
tag, without a tree: the usual parsers take quadratic time on tags nested deeply or attributes by the
thousand. It does not know what a page is about.
"""

from __future__ import annotations

import re
from html import unescape
from typing import Final

from proxy.textscan.plaintext import omitted

_TAG: Final = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]*)([^<>]*)>")
_ATTRIBUTE: Final = re.compile(r"(?<![^\s\"'])([A-Za-z-]+)=(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'<>]+))")
_SPACE: Final = re.compile(r"\s+")
_HIDDEN: Final = re.compile(r"<(?:(script|style|svg|noscript|template|head)\b|!--)", re.IGNORECASE)
_TITLE: Final = re.compile(r"<title[^<>]*>([^<]*)<", re.IGNORECASE)
_PAGE: Final = ("<!doctype html", "<html", "<head", "<body")
_CLOSING: Final = re.compile(r"</(?:a|button|div|form|h[1-6]|label|li|p|section|span|table|td|tr|ul)>", re.IGNORECASE)
_FEWEST_CLOSINGS: Final = 8
_DENSITY: Final = 200

_BLOCKS: Final = frozenset(
    "address article aside blockquote body br dd details div dl dt fieldset figcaption figure "  # noqa: SIM905 - readable
    "footer form h1 h2 h3 h4 h5 h6 header hr html li main nav ol option p pre section select "
    "summary table tbody tfoot thead title tr ul".split()
)
"""Tags that begin a line."""
_CELLS: Final = frozenset({"td", "th"})
_SHOWN: Final = {
    "a": ("href", "id", "name", "aria-label", "title"),
    "button": ("id", "name", "value", "type", "aria-label", "title", "disabled"),
    "form": ("id", "name", "action", "method"),
    "iframe": ("src", "id", "name", "title"),
    "img": ("alt",),
    "input": ("id", "name", "type", "value", "placeholder", "aria-label", "checked", "disabled"),
    "label": ("for",),
    "option": ("value", "selected"),
    "select": ("id", "name", "aria-label"),
    "textarea": ("id", "name", "placeholder", "aria-label"),
}
"""Tags that stay, with the attributes that do."""
_FLAGS: Final = frozenset({"checked", "disabled", "selected"})
_FLAGGED: Final = frozenset(name for name, shown in _SHOWN.items() if not _FLAGS.isdisjoint(shown))
_LONGEST_VALUE: Final = 300


def is_markup(text: str) -> bool:
    """Tell whether a text is a page or a part of one: it begins with a tag and is full of them."""
    start = text[:2000].lstrip().lower()
    if start.startswith(_PAGE):
        return True
    if not start.startswith("<") or start.startswith("<?xml"):
        return False
    closings = len(_CLOSING.findall(text))
    return closings >= _FEWEST_CLOSINGS and closings * _DENSITY >= len(text)


def shown(text: str) -> str:
    """Return what a page shows, a line for each block."""
    title = _TITLE.search(text)
    text = _visible(text)
    lines: list[str] = [_SPACE.sub(" ", _entities(title[1])).strip()] if title is not None else []
    line: list[str] = []
    last = 0
    for tag in _TAG.finditer(text):
        start, stop = tag.span()
        if start > last:
            line.append(_entities(text[last:start]))
        last = stop
        closes, name = bool(tag[1]), tag[2].lower()
        if name in _BLOCKS:
            _end(line, lines)
        elif name in _CELLS:
            line.append("" if closes else " | ")
        if name in _SHOWN:
            line.append(_kept(closes, name, tag[3]))
    line.append(_entities(text[last:]))
    _end(line, lines)
    return "\n".join(lines)


def _end(line: list[str], lines: list[str]) -> None:
    """Put the pieces of a line together, where they say anything."""
    joined = " ".join("".join(line).split())
    if joined and joined != "|":
        lines.append(joined)
    line.clear()


def _kept(closes: bool, name: str, rest: str) -> str:
    """Return what stays of a tag."""
    shown_attributes = _SHOWN[name]
    if closes:
        return f"</{name}>" if name in {"a", "button"} else ""
    values: dict[str, str] = {}
    for attribute, double, single, bare in _ATTRIBUTE.findall(rest):
        key = attribute.lower()
        if key in shown_attributes and key not in values:
            values[key] = double or single or bare
    told = [f"{key}={_quoted(value)}" for key, value in values.items() if value and key not in _FLAGS]
    if name in _FLAGGED:
        flags = [word for word in rest.lower().split() if word in _FLAGS and word in shown_attributes]
        told += list(dict.fromkeys([*flags, *(key for key in values if key in _FLAGS)]))
    if name in {"img", "label", "option"} and not told:
        return ""
    return f"<{' '.join([name, *told])}>"


def _quoted(value: str) -> str:
    if value.isalnum() and len(value) <= _LONGEST_VALUE:
        return value
    value = _entities(_SPACE.sub(" ", value))
    if len(value) > _LONGEST_VALUE:
        value = value[:_LONGEST_VALUE] + omitted(f"{len(value) - _LONGEST_VALUE} characters")
    return value if value.isalnum() else f'"{value}"'


def _entities(text: str) -> str:
    if "&" not in text:
        return text
    try:
        return unescape(text)
    except ValueError:  # the number of a character with more digits than Python reads
        return text


def _visible(text: str) -> str:
    """Return the page without scripts, styles, drawings and comments; one that never ends stays."""
    kept: list[str] = []
    last = position = 0
    endless: set[str] = set()
    while (found := _HIDDEN.search(text, position)) is not None:
        name = (found[1] or "--").lower()
        position = found.end()
        if name in endless:
            continue
        end = _END[name].search(text, position)
        if end is None:
            endless.add(name)
            continue
        kept.append(text[last : found.start()])
        last = position = end.end()
    kept.append(text[last:])
    return " ".join(kept)


_END: Final = {
    "--": re.compile("-->"),
    **{
        name: re.compile(f"</{name}[^<>]*>", re.IGNORECASE)
        for name in ("script", "style", "svg", "noscript", "template", "head")
    },
}
