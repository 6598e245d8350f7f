"""Failures: what a tool's result says that went wrong, in a few of its own words.

Of each tool the last failure is kept, and whether the tool has worked since. A result is written by whoever
made the page or the file: what speaks to a reader, or lays something down, is not kept, only the kind of
failure before it (`ValueError`, `Error`, `exit code 2`). It does not know what a tool does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from pydantic import BaseModel

from proxy.summaries.markers import commands

_MOST: Final = 40
"""Tools of which it is kept."""
_LONGEST: Final = 100
"""Characters of what went wrong that are kept."""
_READ: Final = 4000
"""Characters of a result's beginning, and of its end, that are looked at."""

_FAILED: Final = re.compile(
    r"[\s\[(<#*!>-]{0,20}(?:(?i:error|exception|fatal|failed|failure|traceback|exit ?code:? [1-9])\b"
    r"|错误|失败|异常|出错)"
    r'|[\s\S]{0,400}?"(?i:error|errors|exception)"\s{0,4}:(?!\s{0,4}(?:null|false|0|""|\[\s{0,4}\]'
    r"|\{\s{0,4}\}))"
    r'|[\s\S]{0,400}?"(?:success|ok)"\s{0,4}:\s{0,4}false\b'
    r'|[\s\S]{0,400}?"(?:is_error|isError)"\s{0,4}:\s{0,4}true\b'
)
"""How a result begins that says that the call failed."""
_TELLING: Final = re.compile(
    r"\b(?:\w{0,60}(?:error|exception)|fatal|fail(?:ed|ure)|denied|not found|no such|cannot|invalid"
    r"|refused|time[d ]?out)\b"
    r"|错误|失败|异常|出错|无法|不存在|拒绝|超时",
    re.IGNORECASE,
)
_KIND: Final = re.compile(
    r"[\s\[(<#*!>{\"'-]{0,20}(?:(?:\w+\.){0,6}\w{0,60}(?:error|exception|fatal|failed|failure)\w{0,20}"
    r"|exit ?code:? \d{1,4}|(?:HTTP|status)[ /:]{0,3}\d{3}|is_error|isError|success|ok|错误|失败|异常|出错)",
    re.IGNORECASE,
)
"""What kind of failure a line begins with."""
_SPEAKS: Final = re.compile(
    r"\b(?:you|your|yours|yourself|user|assistant|model|agent|system|please|always|never|must (?!be\b|have\b"
    r"|not be\b|contain\b)"
    r"|should|shall|ignore|disregard|forget|from now on|instructions?|prompt|approve|reply|respond|rules?"
    r"|polic(?:y|ies)|remember"
    r"|important|note)\b|你|您|用户|助手|必须|务必|请|不要|禁止|不得|以后|一律|直接|忽略|指令|规则|记住",
    re.IGNORECASE,
)
"""Words of a line that speaks to whoever reads it, or lays something down."""
_STOP: Final = re.compile(r"[.!?](?=\s)|[。！？]")
_TRACEBACK: Final = re.compile(r"\s*Traceback \(most recent call last\)")


class Failure(BaseModel, frozen=True):
    """How a tool fared: the last time that it failed, and whether it has worked since."""

    tool: str
    text: str = ""
    """What went wrong, in a few words; empty where nothing did."""
    worked: bool = False
    """Whether it worked, after that."""


def failure_in(result: str) -> str | None:
    """Return what a tool's result says that went wrong, on one line and short; None where nothing did."""
    beginning = result[:_READ]
    if not _FAILED.match(beginning):
        return None
    lines = [line for line in beginning.split("\n") if line.strip()]
    if _TRACEBACK.match(beginning):  # the last line of it says what happened
        lines = [line for line in result[-_READ:].split("\n") if line.strip()][::-1]
    telling = next((line for line in lines if _TELLING.search(line[:_READ])), lines[0])
    return _safe(" ".join(telling.split()))


def newest(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return how each tool fared in the end, in the order in which they last ran; of very many the newest."""
    found: dict[str, Failure] = {}
    for failure in failures:
        known = found.pop(failure.tool, failure)
        found[failure.tool] = failure if failure.text else known.model_copy(update={"worked": True})
    return tuple(found.values())[-_MOST:]


def _safe(line: str) -> str:
    """Return the first sentence of a line; of one that speaks to a reader only the kind of failure."""
    stop = _STOP.search(line)
    first = line[: stop.start()] if stop else line
    if commands(line[:_READ]) or _SPEAKS.search(line[:_READ]):
        kind = _KIND.match(line)
        first = kind.group().strip(" \t[(<#*!>{\"'-") if kind else ""
        return first[:_LONGEST] or "failed"
    return first if len(first) <= _LONGEST else first[:_LONGEST] + "…"
