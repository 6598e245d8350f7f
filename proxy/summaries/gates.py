r"""Gates: what a summary must pass before it may stand in for a conversation.

In this order; the first that it fails is the reason why it is refused.

    it says something           more than an acknowledgement; it does not decline
    it is a summary             no call of a tool, no text that the conversation told a model to answer with,
                                nothing of the prompt
    it is short enough          less than what it replaces, and within its room
    it gives no orders          it reports (orders), and puts no words into the user's mouth
    it is in the language       that user and assistant speak, or that was asked for
    it invents nothing          every identifier, and every number from 10 on, stands in its source, or is the
                                sum or the difference of two that stand in its line
    it is about something       words of its source, or at least of a conversation

A model may wrap its answer in a fence or say "Here is the summary:"; that is taken off, and so is a line
that is nothing but a token which the source lacks: it says nothing. Whether headings are there is not
asked: they help a reader, and a model that leaves them out has not lied.

It errs on the side of refusing where something may be invented, and else on the side of letting pass. It
does not know what is done with what was refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from proxy.summaries.facts import Facts, Said
from proxy.summaries.inventions import invented
from proxy.summaries.markers import STRONG
from proxy.summaries.orders import Kind as Ordered
from proxy.summaries.orders import order_in
from proxy.summaries.prompt import told_in
from proxy.summaries.source import Source, plain
from proxy.summaries.tongue import Tongue, tongue_of
from proxy.textscan import kind_of
from proxy.trimming import Language

_LOOKED_FOR: Final = 50
"""Identifiers and numbers that the source lacks after which no more are looked for: each look takes time."""
_SHOWN: Final = 3
"""Of what was invented, so many are named in the reason."""
_REASON: Final = 60
"""Characters of one of them."""

_FENCE: Final = re.compile(r"\A```\w{0,20}\n(.*?)\n?```\Z", re.DOTALL)
_WRAPPED: Final = re.compile(r"\A<(summary|摘要)>\s*(.*?)\s*</\1>\Z", re.DOTALL | re.IGNORECASE)
_PREAMBLE: Final = re.compile(
    r"\A(?:sure|certainly|of course|okay|ok|here(?:['’]s| is)|below is|the following is|好的|以下是"
    r"|下面是|这是)[^\n]{0,100}[:：]\s*\n+(?=\S)",
    re.IGNORECASE,
)
_TAG: Final = re.compile(r"</?(?:transcript|summary)-[0-9a-f]{8,}>")
_ITEM: Final = re.compile(r"\s*(?:[-*+•]|#{1,6}|\(?\d{1,3}[.)、:：])\s*")
"""What may stand before a line: its number says nothing."""

_WORD: Final = re.compile(r"[^\W\d_\u3400-\u9fff]+")
_HAN: Final = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
"""A character of Chinese, or of another writing that seldom has spaces."""
_LEAST_WORDS: Final = 2
_LEAST_HAN: Final = 4
_NODS: Final = frozenset(
    "ok okay k yes yep yeah no sure done understood noted acknowledged alright fine great thanks thank you "  # noqa: SIM905 - readable
    "got it will do hello hi ready roger affirmative confirmed please im i ll am m".split()
)
_NODS_CHINESE: Final = re.compile(
    "好的?|收到|明白了?|了解|知道了|完成了?|是的?|可以|没问题|谢谢|已|我|您?你?好|了"
)
_DECLINES: Final = re.compile(
    r"\W{0,5}(?:(?:i['’]?m|i am)(?: very| so)? sorry|sorry\b|i apologi[sz]e|(?:i|we) (?:can['’]?t"
    r"|cannot|can not|am unable|won['’]?t)"
    r"|(?:i['’]?m|i am) (?:unable|not able)|as an? (?:ai|language model)|unfortunately,? i"
    r"|there is (?:nothing|no (?:transcript|conversation)) to"
    r"|抱歉|对不起|很抱歉|非常抱歉|我(?:无法|不能|没法)|作为(?:一个|一名)?(?:ai|人工智能|语言模型))",
    re.IGNORECASE,
)
_CHATS: Final = re.compile(
    r"\A\W{0,5}(?:(?:hello|hi|sure|certainly|of course)\b[^\n]{0,60})?\b(?:how (?:can|may) i (?:help"
    r"|assist)|i can help|let me\b"
    r"|i['’]ll (?:now|be)|what would you like)"
    r"|\A\W{0,5}(?:您?你?好[，,。！!])?(?:请问)?(?:有)?什么可以帮|\A\W{0,5}好的[，,]我(?:这就|马上|会)",
    re.IGNORECASE,
)
"""How somebody begins who answers instead of summing up."""
_CALLS: Final = re.compile(
    r"\A\s*(?:\{[\s\S]{0,200}\"(?:name|tool|function|tool_calls)\"\s*:|<(?:tool_call|function_call"
    r"|invoke|function=)|\[TOOL_CALLS\])"
)
_TOLD_TO: Final = re.compile(
    r"\b(?:reply|respond|answer|say|output|print|write|return|repeat|type|echo)\b[^.!?\n]{0,60}\Z"
    r"|(?:回复|回答|输出|只说|打印|返回|重复)[^。！？\n]{0,30}\Z"
)
"""What stands before something that a model is told to answer with."""
_TOLD_REACH: Final = 80
_ECHO: Final = 300
"""Characters of the longest answer that may be one that the conversation told a model to give."""

_ORDERED: Final[Mapping[Ordered, str]] = {
    "system": "it gives orders to its reader",
    "lifts": "it says that rules no longer hold, and the user did not",
    "waives": "it permits what the user did not",
    "speaks": "it gives orders to its reader",
    "replies": "it gives orders to its reader",
    "bids": "it gives orders to its reader",
}
_VERBATIM: Final = re.compile(
    r"\A\s*(?:#{1,6}\s|\*\*)[^\n]*(?:\b(?:verbatim|word for word|in (?:his|her|their) own words)\b"
    r"|原话|逐字|原文)",
    re.IGNORECASE,
)
_USERS: Final = re.compile(
    r"\b(?:users?|customers?|clients?|rules?|laid down)\b|用户|客户|规定|规则", re.IGNORECASE
)
"""A heading under which the user's own words are said to stand."""
_SPEAKS_OF: Final = re.compile(
    r"\b(?:users?|customers?|clients?|persons?|people|assistants?|agents?|conversations?|sessions?"
    r"|chats?|dialog(?:ue)?s?"
    r"|discuss\w*|talk(?:s|ed|ing)?|work(?:s|ed|ing)?|tasks?|goals?|decisions?|decided|states?|status"
    r"|plans?|steps?"
    r"|requests?|requested|summar\w+|nothing|topics?|subjects?|questions?|asked|continu\w+|progress"
    r"|kept)\b"
    r"|用户|客户|顾客|助手|对话|会话|聊天|讨论|交流|任务|工作|目标|决定|状态|现状|计划|步骤|请求|摘要|继续|进行",
    re.IGNORECASE,
)
"""What a summary speaks of that is about nothing in particular."""
_OF_IT: Final = 0.25
"""Part of an answer's words that the source has, at least."""
_IDLE: Final = frozenset(
    "about above after again also been before being below both came come does doing done each else even ever "  # noqa: SIM905 - readable
    "every everything from give given gives goes going have having here into just know like made make many "
    "more most much must only other over said same says shall should some such sure take than thank thanks "
    "that their them then there these they thing things this those told very want well were what when "
    "where which while will with would your okay please the and for you are was not all can has had its "
    "but out now certainly how who did got get let yes ready".split()
)
"""Words that stand in any text."""

_LEAST_LATIN: Final = 8
_LEAST_SMALL: Final = 3
_LEAST_OTHER: Final = 8
"""Words, small words of a language, words or characters of another script, from which on it is judged."""
_SPEAKS: Final = 0.03
"""Part of what user and assistant say that small words of a language make up where they speak it: seldom less
than a tenth; and hardly anything where they do not."""
_PROSE: Final = 0.08
"""The same of prose in a language that is known, at least."""
_VOCABULARY: Final = 150
_COMMON: Final = 0.25
"""Where no language is told by small words: part of a summary's words that stand in a source of so many. In
the same language it is more than half, in another seldom a tenth."""
_WRITES: Final = 0.05
"""Part of it that is in a script which they use."""
_ASKED: Final = {"zh": "Chinese", "en": "Latin"}

_FOREIGN: Final = "it is written in another language"


class Verdict(NamedTuple):
    """What is thought of an answer."""

    ok: bool
    reason: str
    """Why it is refused, in a few words; empty where it is not."""
    text: str
    """The answer as it may be used; empty where it is refused."""


def judge(
    answer: str,
    source: Source,
    *,
    room: int,
    replaced: int,
    count: Callable[[str], int],
    language: Language | None = None,
) -> Verdict:
    """Judge what a model answered that was to sum up.

    Args:
        answer: Its text.
        source: What is summed up.
        room: Tokens that the summary may have.
        replaced: Tokens of what it takes the place of.
        count: Counts the tokens of a text.
        language: What it was asked to write in; it may also write as user and assistant do. None: not judged.
    """
    text = _bare(answer, source)
    reason = (
        _says_nothing(text)
        or _is_no_summary(text, source)
        or _is_long(count(text), room, replaced)
        or _gives_orders(text, source)
        or _puts_words(text, source)
        or (_is_foreign(text, source, language) if language else "")
        or _invents(text, source)
        or (_is_of_nothing(text, source) if language else "")
    )
    return Verdict(ok=not reason, reason=reason, text="" if reason else text)


def missing(text: str, facts: Facts) -> tuple[str, ...]:
    """Return the user's rules, those that surely are, that a summary should hold and does not, even short."""
    held = _on_one_line(text)
    sure = (rule for rule in facts.rules if rule.strength == STRONG and not rule.is_pasted)
    return tuple(rule.text for rule in sure if not any(_on_one_line(form) in held for form in _forms(rule)))


def _forms(rule: Said) -> Iterator[str]:
    """Yield the forms in which a rule may stand, as a whole and, where room is short, shorter."""
    yield rule.text
    if rule.short:
        yield rule.short


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _bare(answer: str, source: Source) -> str:
    """Return an answer without what a model puts around it, and without lines that say nothing."""
    text = answer.strip()
    for around in (_FENCE, _WRAPPED):
        if found := around.match(text):
            text = found[found.re.groups].strip()
    text = _TAG.sub("", _PREAMBLE.sub("", text))
    lines = text.split("\n")
    tokens = islice((line for line in lines if _is_token(_without_item(line).strip())), _LOOKED_FOR)
    unknown = {line for line in tokens if not source.has(_without_item(line).strip())}
    return "\n".join(line for line in lines if line not in unknown).strip()


def _is_token(text: str) -> bool:
    """Tell whether a text is nothing but an identifier with a digit."""
    return kind_of(text) == "id" and any(map(str.isdigit, text))


def _without_item(line: str) -> str:
    """Return a line without what stands before an item of a list."""
    item = _ITEM.match(line)
    return line[item.end() :] if item else line


def _says_nothing(text: str) -> str:
    """Return why an answer is none, where it is none."""
    if not text:
        return "it is empty"
    words = [word for word in _WORD.findall(text.lower()) if word not in _NODS]
    han = _HAN.findall(_NODS_CHINESE.sub("", text))
    if len(words) < _LEAST_WORDS and len(han) < _LEAST_HAN:
        return "it says nothing"
    return "it declines" if _DECLINES.match(text) else ""


def _is_of_nothing(text: str, source: Source) -> str:
    """Return why an answer is about nothing: neither about its source nor about a conversation."""
    if _SPEAKS_OF.search(text) or tongue_of(text).script != source.spoken.script:
        return ""
    words = {word for word in _WORD.findall(text.lower()) if len(word) > 2} - _IDLE
    han = "".join(_HAN.findall(text))
    if any(han[at : at + 2] in source.text for at in range(len(han) - 1)):
        return ""
    if not han and len(source.words) < _VOCABULARY:
        return ""
    spoken = len(words & source.words) >= max(1, _OF_IT * len(words))
    return "" if spoken else "it speaks of nothing that its source speaks of"


def _is_no_summary(text: str, source: Source) -> str:
    """Return what an answer is instead of a summary, where it is something else."""
    if _CALLS.match(text):
        return "it calls a tool instead of summing up"
    if any(not source.has_text(each) for each in told_in(text)):
        return "it repeats what it was told"
    if len(text) > _ECHO:
        return ""
    if _CHATS.match(text):
        return "it takes part in the conversation instead of summing up"
    answer = plain(text).strip(" \t\n\"'“”‘’.!。！")
    start = source.text.find(answer)
    while start >= 0:
        if _TOLD_TO.search(source.text[max(0, start - _TOLD_REACH) : start]):
            return "it answers as the transcript told a model to"
        start = source.text.find(answer, start + 1)
    return ""


def _is_long(tokens: int, room: int, replaced: int) -> str:
    """Return why an answer is too long, where it is."""
    if tokens >= replaced:
        return f"it has {tokens} tokens, and what it replaces {replaced}"
    return f"it has {tokens} tokens, and room for {room}" if tokens > room else ""


def _gives_orders(text: str, source: Source) -> str:
    """Return which order an answer gives its reader, unless the user gave it so or it is reported."""
    order = order_in(text, source.own)
    return f"{_ORDERED[order.kind]} ({_cut(order.text)})" if order is not None else ""


def _puts_words(text: str, source: Source) -> str:
    """Return what an answer gives as the user's own words that the user did not say."""
    under = False
    for line in text.split("\n"):
        if line.lstrip().startswith(("#", "**")):
            under = bool(_VERBATIM.match(line) and _USERS.search(line))
        elif under and (said := _without_item(line).strip(" \t\"'“”‘’「」*-")) and not source.said(said):
            return f"it gives as the user's words what the user did not say ({_cut(said)})"
    return ""


def _is_foreign(text: str, source: Source, language: Language) -> str:
    """Return in which other language an answer is written, where that is sure."""
    written, spoken = tongue_of(text), source.spoken
    script = written.script
    if not script or not spoken.size:
        return ""
    # A prompt in English is not for those alone who speak it; but who is asked in Chinese should answer so,
    # and where a conversation in Chinese is summed up under an English prompt, English was asked for.
    if script == _ASKED[language] and (language == "zh" or spoken.script == "Chinese"):
        return ""
    if script == "Latin":
        return _is_foreign_latin(text, written, source)
    used = spoken.scripts.get(script, 0) >= _WRITES * spoken.size
    return "" if used or written.scripts[script] < _LEAST_OTHER else f"{_FOREIGN} ({script})"


def _is_foreign_latin(text: str, written: Tongue, source: Source) -> str:
    """Return in which other language an answer in Latin script is written, where that is sure."""
    spoken = source.spoken
    if written.scripts["Latin"] < _LEAST_LATIN or not _is_prose(spoken):
        return ""
    first, second = [*sorted(written.small.items(), key=lambda item: -item[1]), ("", 0), ("", 0)][:2]
    if first[1] >= _LEAST_SMALL and first[1] >= 2 * second[1]:
        return "" if spoken.small.get(first[0], 0) >= _SPEAKS * spoken.size else f"{_FOREIGN} ({first[0]})"
    words = [word for word in _WORD.findall(text) if len(word) > 2 and word.islower()]
    if len(words) < _LEAST_LATIN or len(source.words) < _VOCABULARY:
        return ""
    return "" if sum(word in source.words for word in words) >= _COMMON * len(words) else _FOREIGN


def _is_prose(spoken: Tongue) -> bool:
    """Tell whether it is known what user and assistant speak: by a script, or by small words."""
    return spoken.script not in ("", "Latin") or max(spoken.small.values(), default=0) >= _PROSE * spoken.size


def _invents(text: str, source: Source) -> str:
    """Return what an answer names that its source lacks."""
    found = dict.fromkeys(
        islice(invented("\n".join(map(_without_item, text.split("\n"))), source), _LOOKED_FOR)
    )
    if not found:
        return ""
    named = ", ".join(_cut(each) for each in list(found)[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"it names what its source lacks: {named}{more}"


def _cut(text: str) -> str:
    """Return a piece of text for a reason: on one line, not long."""
    plainly = " ".join(text.split())
    return plainly if len(plainly) <= _REASON else plainly[:_REASON] + "…"
