"""Checks of the narrative that a model wrote.

not empty               after a code fence around it is removed
shorter                 fewer tokens than what it replaces
no imitation            no control tokens of chat templates, no line that imitates a turn
in the language         in a script that the conversation uses or the prompt asked for
grounded                every identifier, and every number from 10 on, occurs in the conversation
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

from proxy.dialects import Message, one_line
from proxy.textscan import IDENTIFYING, SMALLEST_NUMBER, kind_of, leaves_of, values_of
from proxy.trimming import Language

_FENCE: Final = re.compile(r"\A```\w{0,20}\n(.*?)\n?```\Z", re.DOTALL)
_TAG: Final = re.compile(r"</?(?:transcript|summary|record)-[0-9a-f]{8,}>")
_CONTROL: Final = re.compile(
    r"<[|｜][^|｜<>\n]{1,60}[|｜]>|\[/?INST\]|<</?SYS>>|</?(?:start_of_turn|end_of_turn)>"
    r"|^[ \t]*(?:human|user|assistant|system|developer|tool)[ \t]*[:：]"
    r"|^[ \t]*#{2,6}[ \t]*(?:instructions?|response|input|human|user|assistant|system)[ \t]*+:?[ \t]*+$",
    re.IGNORECASE | re.MULTILINE,
)
"""Control tokens of chat templates, and lines that imitate a turn."""

_SCRIPTS: Final[Mapping[str, re.Pattern[str]]] = {
    "Latin": re.compile("[A-Za-z\u00c0-\u024f\u1e00-\u1eff]{2,}"),
    "Chinese": re.compile("[\u3400-\u9fff]"),
    "Japanese": re.compile("[\u3040-\u30ff]"),
    "Korean": re.compile("[\uac00-\ud7af]"),
    "Cyrillic": re.compile("[\u0400-\u04ff]{2,}"),
    "Greek": re.compile("[\u0370-\u03ff]{2,}"),
    "Arabic": re.compile("[\u0600-\u06ff]{2,}"),
    "Hebrew": re.compile("[\u0590-\u05ff]{2,}"),
    "Devanagari": re.compile("[\u0900-\u097f]{2,}"),
    "Thai": re.compile("[\u0e00-\u0e7f]"),
}
"""A word of each script; a character if the script has no spaces."""
_SPACELESS_WORD: Final = 2  # characters of a script without spaces that count as a word
_SPACELESS: Final = frozenset({"Chinese", "Japanese", "Thai"})
_ASKED: Final[Mapping[Language, str]] = {"zh": "Chinese", "en": "Latin"}
_USED: Final = 0.5  # a script counts as used if it has this part of the main script's number of words
_LEAST_WORDS: Final = 5  # the script of texts with fewer words is not checked
_CHINESE_SHARE: Final = 0.2  # above this share a conversation is Chinese; low, since it often contains much English
_SPOKEN: Final = 20_000  # characters of a message that are read to detect its script
_CODE: Final = re.compile(r"`[^`\n]{1,200}`")
_ASCII_RUN: Final = re.compile("[!-~]+")
_NOT_PROSE: Final = re.compile(r"[/\\_@=\d]|\w\.\w")  # part of a path, an identifier or code, which has no language

_NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?")
_RUN: Final = re.compile(r"\d+")
_SCALED: Final = re.compile(r"(?<![\d,.])(\d[\d,]{0,20}+(?:\.\d{1,9}+)?+)\s?([kKmMbB千万亿]|百万)(?![a-zA-Z])")
_SCALES: Final = {"k": 1e3, "m": 1e6, "b": 1e9, "千": 1e3, "万": 1e4, "百万": 1e6, "亿": 1e8}
_DATE: Final = re.compile(r"\b(\d{4}[-/.])\d{1,2}([-/.]\d{1,2})\b|\b\d{1,2}:(\d{2})\b")
"""A date or a time. Its month may be spelled out in the source, and its hour may be in another format or time zone."""
_ITEM: Final = re.compile(r"^[^\S\n]*(?:[-*+•]|#{1,6}|\(?\d{1,3}[.)、:：])\s*", re.MULTILINE)
"""The bullet or number at the beginning of a line."""
_WORD: Final = re.compile(r"[^\W\d_]+")
_QUANTITY: Final = re.compile(r"\d+(?:\.\d+)?(?:[-–]?[a-z]++)++|[a-z]+(?:[-–][a-z]+)*[-–]\d+")
"""A number with its unit, or words with a number (24-hour, 5GB, step-2)."""
_SHORTEST: Final = 3  # identifiers with fewer characters (Q3) are not checked
_JOINTS: Final = re.compile(r"[\s\-–—_./\\:#'\"`,()\[\]]+")
"""Characters inside an identifier that may differ between two texts."""
_STEP: Final = re.compile(r"[^/\\?&=#:\s]+")
_WIDE: Final = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full-width characters and their ordinary forms
_SHOWN: Final = 3  # ungrounded identifiers and numbers that a reason names at most
_REASON: Final = 60  # maximum characters of each


def bare(answer: str) -> str:
    """Return an answer without a code fence around it and without the prompt's tags in it."""
    text = answer.strip()
    if found := _FENCE.match(text):
        text = found[1]
    return _TAG.sub("", text).strip()


def refusal(text: str, source: CoveredText, *, tokens: int, replaced: int, language: Language) -> str:
    """Return why a bare answer cannot be used as the narrative; empty if it can.

    `tokens` is its size, `replaced` the size of what it replaces. `language` is the language that the prompt asked
    for; the conversation's own is accepted too.
    """
    if not text:
        return "it is empty"
    if tokens >= replaced:
        return f"it has {tokens} tokens, and what it replaces {replaced}"
    if found := _CONTROL.search(text):
        return f"it imitates a turn of a conversation ({one_line(found.group(), _REASON)})"
    if script := _foreign_script(text, source.scripts, language):
        return f"it is written in another language ({script})"
    unknown = list(dict.fromkeys(ungrounded(text, source)))
    if not unknown:
        return ""
    shown = [one_line(each, _REASON) for each in unknown[:_SHOWN]]
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    return f"it mentions what was never said: {', '.join(shown)}{more}"


# ------------------------------------------------------------------------------------ language


def scripts_of(text: str) -> dict[str, int]:
    """Return the number of words of each script in a text, without code and identifiers."""
    prose = _ASCII_RUN.sub(lambda run: " " if _NOT_PROSE.search(run.group()) else run.group(), _CODE.sub(" ", text))
    counts = {script: len(words.findall(prose)) for script, words in _SCRIPTS.items()}
    return {
        script: -(-number // _SPACELESS_WORD) if script in _SPACELESS else number
        for script, number in counts.items()
        if number
    }


def language_of(scripts: Mapping[str, int]) -> Language:
    """Return the language of the prompt for a conversation: Chinese for a Chinese one, else English."""
    chinese = scripts.get("Chinese", 0) - scripts.get("Japanese", 0)
    return "zh" if chinese > _CHINESE_SHARE * sum(scripts.values()) else "en"


def _foreign_script(text: str, spoken: Mapping[str, int], language: Language) -> str:
    """Return the main script of a text if the conversation does not use it; else an empty string."""
    written = scripts_of(text)
    if not spoken or sum(written.values()) < _LEAST_WORDS:
        return ""
    script = max(written, key=lambda each: written[each])
    main = max(spoken, key=lambda each: spoken[each])
    used = spoken.get(script, 0) >= _USED * spoken[main]
    # The prompt is English for all languages but Chinese, so it counts as a request for English only in a Chinese
    # conversation.
    asked = script == _ASKED[language] and (language == "zh" or main == "Chinese")
    return "" if used or asked else script


# ------------------------------------------------------------------------------------ grounding


class CoveredText:
    """The texts that a summary may use: everything in the messages that it covers."""

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        before: Sequence[str] = (),
        names: Iterable[str] = (),
        messages_before: int = 0,
    ) -> None:
        """Read the messages. This is slow.

        The number of earlier messages is `messages_before`. Of them, only the user's words and the narrative (`before`)
        and the identifiers (`names`) are known.
        """
        texts = [*before, *(text for message in messages for text in _texts(message))]
        spoken = [message.text[:_SPOKEN] for message in messages if message.role in {"user", "assistant"}]
        self.scripts: Final = scripts_of("\n".join([*spoken, *before])) or scripts_of("\n".join(texts))
        """The number of words in each script that user and assistant used."""
        self._messages = len(messages) + messages_before
        texts += names
        self._text = _plain("\n".join(texts))

    def has(self, identifier: str) -> bool:
        """Tell whether the texts contain an identifier, or all steps of a path. Case and punctuation are ignored."""
        wanted = _plain(identifier)
        if wanted in self._text:
            return True
        squeezed = _JOINTS.sub("", wanted)
        if not squeezed or squeezed in self._squeezed:
            return True
        if "/" not in wanted or "://" in wanted:
            return False
        steps: list[str] = _STEP.findall(wanted)
        return all(step in self._text for step in steps) and any(kind_of(step) for step in steps)

    def has_number(self, number: str) -> bool:
        """Tell whether the texts contain a number in any notation (3k, 3,000, 3000.0)."""
        return _value(number) in self._numbers

    @cached_property
    def _squeezed(self) -> str:
        return _JOINTS.sub("", self._text)

    @cached_property
    def _numbers(self) -> frozenset[str]:
        found = {_value(each) for pattern in (_NUMBER, _RUN) for each in pattern.findall(self._text)}
        found.update(scaled for scaled, _ in _scaled_in(self._text))
        return frozenset([*found, str(self._messages)])


def ungrounded(text: str, source: CoveredText) -> Iterator[str]:
    """Yield what a text holds and the source lacks: identifiers, then decimals and numbers from 10 on."""
    rest = _ITEM.sub("", text)
    for value in values_of(rest, "none"):
        name = value.text
        if value.kind not in IDENTIFYING or len(name) < _SHORTEST:
            continue
        if _WORD.fullmatch(name) or _QUANTITY.fullmatch(name):  # JavaScript, 24-hour
            continue
        if not source.has(name):
            yield name
        rest = rest.replace(name, " ")
    for scaled, written in list(_scaled_in(rest)):
        if source.has_number(scaled):
            rest = rest.replace(written, " ")
    rest = _DATE.sub(lambda date: f"{date[1]} {date[2]}" if date[1] else f" {date[3]}", rest)
    for number in re.findall(rf"(?<![A-Za-z0-9_.]){_NUMBER.pattern}", rest):
        large = "." in number or float(number.replace(",", "")) >= SMALLEST_NUMBER
        if large and not source.has_number(number):
            yield number


def _texts(message: Message) -> Iterator[str]:
    for text in message.all_texts():
        yield text
        if "\\" in text:
            yield from (leaf.text for leaf in leaves_of(text) or ())


def _scaled_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield (value, text) of the numbers of the form 3k or 3万."""
    for found in _SCALED.finditer(text):
        value = float(found[1].replace(",", "")) * _SCALES[found[2].lower()]
        yield _value(f"{value:.6f}"), found[0]


def _value(number: str) -> str:
    """Return a number without commas, leading zeros, and trailing zeros of decimals."""
    whole, dot, decimals = number.replace(",", "").partition(".")
    decimals = decimals.rstrip("0")
    return (whole.lstrip("0") or "0") + (dot + decimals if decimals else "")


def _plain(text: str) -> str:
    """Return a text in lower case, with full-width characters replaced by ordinary ones."""
    return (text if text.isascii() else text.translate(_WIDE)).lower()
