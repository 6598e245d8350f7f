"""Facts: what code takes from a conversation, so that no summary can lose it.

    rules      sentences in which the user says how things are to be done, verbatim
    requests   other short messages of the user, and where longer ones begin and end
    names      identifiers, with what was last done to each
    values     exact values by name
    failures   how the tools fared

Facts of two parts, one after the other, add up to those of both, so that the beginning of a conversation
need not be read again. They are kept within a fixed size. Rules and requests come from what the user (or
the operator, where instructions stand amid the log) said, never from what a tool gave, a model wrote or
another agent told: nothing that was read somewhere becomes a rule. It does not know how facts are shown,
nor that a model is asked at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from pydantic import BaseModel

from proxy.conversation import spans
from proxy.dialects import Message
from proxy.dialects.chat.message import INSTRUCTION_ROLES
from proxy.summaries.failures import Failure, failure_in, newest
from proxy.summaries.markers import STRONG, commands
from proxy.summaries.names import Name, merged, names_given, names_in
from proxy.summaries.rules import Rule, own_words, rules_of, shortest
from proxy.summaries.values import Value, latest, values_given, values_said
from proxy.textscan import beginning_of, end_of
from proxy.trimming import BUILT_IN, Language, broadcast_digest, broadcast_of

_HEAD: Final = 150_000
_TAIL: Final = 50_000
"""Characters of the beginning and of the end of a longer text that are read."""
_SHORT: Final = 240
"""Characters of the longest message that is a rule as a whole where it states one."""
_MIDDLING: Final = 800
"""Characters of the longest message, or line, that is kept whole as a request."""
_LONG: Final = 8000
"""Characters from which on what a user sends was rather pasted than written."""
_RULES: Final = 400
_RULE_CHARACTERS: Final = 60_000
_WEAK_CHARACTERS: Final = 24_000
"""Characters of rules, and of those of them that are perhaps none."""
_STEP: Final = 200
"""Characters by which the length of rules is told apart: a long one is the less direct."""
_REQUESTS: Final = 120
_SPOKEN: Final = 20_000
"""Characters of a message by which its language is told."""
_CHINESE_SHARE: Final = 0.3
"""Chinese characters, of these and of words of other writing, from which on a conversation is Chinese."""
_BETWEEN: Final = " … "
"""What stands between parts of a message."""
_HAN_LETTERS: Final = 4
_NODS: Final = re.compile(
    "好的?|继续|谢谢你?|没问题|明白了?|收到|可以的?|对的?|是的?|知道了|嗯+|行|辛苦了|你好|请|再见|不客气"
    "|当然|没有|太好了|下一[步个]"
)
_LEAST_REQUEST: Final = 12
"""A request of fewer letters and no identifier ("ok", "continue", "yes please") says nothing later on."""

_PATTERNS: Final = tuple(BUILT_IN)
_USERS: Final = frozenset({"", "user", "human", "用户"})
_HAN: Final = re.compile("[\u3400-\u9fff]")
_KANA: Final = re.compile("[\u3040-\u30ff\uac00-\ud7af]")
_WORD: Final = re.compile("[^\\W\\d_\u3400-\u9fff]+")
_LETTER: Final = re.compile(r"[^\W\d_]")


class Said(BaseModel, frozen=True):
    """Something that the user said, verbatim; a very long sentence cut, with marks."""

    text: str
    strength: int
    """2: a rule; 1: perhaps one; 0: a request."""
    is_pasted: bool = False
    """Whether it stands in a long text, which may be another's, or is quoted."""
    short: str = ""
    """Its shortest form, verbatim: of a message the sentences, or clauses, that make it a rule; empty where
    it has none shorter."""


class Facts(BaseModel, frozen=True):
    """Of a part of a conversation; its JSON form is what the next ones are made from."""

    messages: int = 0
    """How many they were taken from."""
    rules: tuple[Said, ...] = ()
    """In the order in which they were last said."""
    requests: tuple[Said, ...] = ()
    """In the order in which they were last said."""
    names: tuple[Name, ...] = ()
    """In the order of their newest mention."""
    values: tuple[Value, ...] = ()
    """In the order of their newest mention."""
    failures: tuple[Failure, ...] = ()
    """One for each tool, in the order in which they last ran."""
    han: int = 0
    """Chinese characters of what user and assistant said, where it is not Japanese or Korean."""
    words: int = 0
    """Words in other writing."""

    @property
    def language(self) -> Language:
        """The language that user and assistant speak."""
        return "zh" if self.han > _CHINESE_SHARE * (self.han + self.words) else "en"

    def and_then(self, newer: Facts) -> Facts:
        """Return the facts of both parts, `newer` being the later one."""
        return Facts(
            messages=self.messages + newer.messages,
            rules=_rules(self.rules + newer.rules),
            requests=_requests(self.requests + newer.requests),
            names=merged(self.names + newer.names),
            values=latest(self.values + newer.values),
            failures=newest(self.failures + newer.failures),
            han=self.han + newer.han,
            words=self.words + newer.words,
        )


def facts_of(messages: Sequence[Message]) -> Facts:
    """Return the facts of messages, given as they are stored (with the fields of ours)."""
    said: list[Said] = []
    names: dict[str, Name] = {}
    values: list[Value] = []
    failures: list[Failure] = []
    han = words = 0
    for span in spans(messages):
        given: dict[str, frozenset[str]] = {}
        tools: dict[str, str] = {}
        for message in messages[span.start : span.stop]:
            text = _read(message.text)
            if message.is_result:
                identity = message.answers or ""
                failure = failure_in(text)
                tool = tools.get(identity) or _name(message.data.get("name"))
                if tool:
                    failures.append(Failure(tool=tool, text=failure or "", worked=failure is None))
                state = f"{tool} {'ok' if failure is None else 'failed'}" if tool else ""
                done = given.get(identity, frozenset())
                _add(names, {each: Name(text=each) for each in names_in(text)})
                for each in done:
                    names[each] = names[each].model_copy(update={"state": state})
                continue
            own = is_of_user(message, text)
            is_pasted = len(text) > _LONG
            found = {each: Name(text=each, said=own and not is_pasted) for each in names_in(text)}
            for identity, tool, arguments in _calls(message):
                read = _read(arguments)
                each_given = frozenset(names_given(read))
                given[identity], tools[identity] = each_given, tool
                found |= {each: Name(text=each, called=True, state=tool) for each in each_given}
                values += values_given(read)
            _add(names, found)
            if own:
                said += _said(text, is_pasted=is_pasted)
                values += values_said(text)
            if message.role in {"user", "assistant"}:
                spoken = text[:_SPOKEN]
                han += max(0, len(_HAN.findall(spoken)) - 2 * len(_KANA.findall(spoken)))
                words += len(_WORD.findall(spoken))
    return Facts(
        messages=len(messages),
        rules=_rules(each for each in said if each.strength),
        requests=_requests(each for each in said if not each.strength),
        names=merged(names.values()),
        values=latest(values),
        failures=newest(failures),
        han=han,
        words=words,
    )


def is_of_user(message: Message, text: str) -> bool:
    """Tell whether a message is the user's own word, or the operator's: no other agent's and no tool's."""
    if message.role in INSTRUCTION_ROLES:
        return True
    if message.role != "user":
        return False
    agent = message.agent
    if agent is not None and agent.strip().casefold() not in _USERS:
        return False
    return broadcast_of(text, _PATTERNS, None) is None and broadcast_digest(text.strip()) is None


def _read(text: str) -> str:
    """Return what is read of a text: of a very long one its beginning and its end."""
    if len(text) <= _HEAD + _TAIL:
        return text
    return f"{beginning_of(text, _HEAD)}\n{end_of(text, _TAIL)}"


def _calls(message: Message) -> Iterator[tuple[str, str, str]]:
    """Yield id, tool and arguments of each call of a message."""
    for call in message.calls:
        yield call.id, call.name, call.arguments


def _name(name: object) -> str:
    return name if isinstance(name, str) else ""


def _add(names: dict[str, Name], found: Mapping[str, Name]) -> None:
    """Add the names of one message to those before it: the newest last."""
    for text, name in found.items():
        known = names.pop(text, None)
        names[text] = name if known is None else known.and_then(name)


def _said(text: str, *, is_pasted: bool) -> Iterator[Said]:
    """Yield what is kept of a message of the user's: rules and, of a longer one, only beginning and end."""
    whole = text.strip()
    rules = list(rules_of(whole, closely=not is_pasted and len(whole) > _SHORT))
    if len(whole) <= _SHORT:
        yield from _said_shortly(whole, rules)
        return
    for rule in rules:
        yield _in_short(rule, is_pasted=is_pasted)
    asked = own_words(whole)
    if len(asked) <= _MIDDLING:
        if _tells(asked):
            yield Said(text=asked, strength=0)
        return
    first, last = asked[: _MIDDLING + 1].split("\n", 1)[0], asked[-_MIDDLING - 1 :].rsplit("\n", 1)[-1]
    for line in dict.fromkeys((first.strip(), last.strip())):
        if _LEAST_REQUEST <= len(line) <= _MIDDLING and all(rule.text != line for rule in rules):
            yield Said(text=line, strength=0, is_pasted=is_pasted)


def _said_shortly(whole: str, rules: Sequence[Rule]) -> Iterator[Said]:
    """Yield what is kept of a short message: the whole of it, but for lines that it quotes."""
    own = [rule for rule in rules if not rule.is_quoted]
    quoted = [rule for rule in rules if rule.is_quoted]
    bare = own_words(whole) if quoted or commands(whole) else whole
    if own:
        strength = max(rule.strength for rule in own)
        short = _BETWEEN.join(shortest(rule.text) for rule in own if rule.strength == strength)
        yield Said(text=bare, strength=strength, short=short if len(short) < len(bare) else "")
    elif all(rule.text != bare for rule in quoted) and (_tells(bare) or next(names_in(bare), None)):
        yield Said(text=bare, strength=0)
    for rule in quoted:
        if not own or rule.text not in bare:
            yield _in_short(rule, is_pasted=True)


def _in_short(rule: Rule, *, is_pasted: bool) -> Said:
    """Return a rule with its shortest form."""
    short = shortest(rule.text)
    return Said(
        text=rule.text,
        strength=rule.strength,
        is_pasted=is_pasted or rule.is_quoted,
        short=short if len(short) < len(rule.text) else "",
    )


def _tells(text: str) -> bool:
    """Tell whether a text says something later on; a Chinese character says as much as four letters."""
    bare = _NODS.sub("", text)
    return len(_LETTER.findall(bare)) + (_HAN_LETTERS - 1) * len(_HAN.findall(bare)) >= _LEAST_REQUEST


def _rules(said: Iterable[Said]) -> tuple[Said, ...]:
    """Return rules, each once, where it was last said; of very many the strongest, shorter and newer ones."""
    kept = _once(said)
    ranked = sorted(
        range(len(kept)),
        key=lambda place: (
            -kept[place].strength,
            kept[place].is_pasted,
            len(kept[place].short or kept[place].text) // _STEP,
            -place,
        ),
    )
    stay: set[int] = set()
    room = _RULE_CHARACTERS
    weak = _WEAK_CHARACTERS
    for place in ranked[:_RULES]:
        size = len(kept[place].text)
        room -= size
        weak -= size if kept[place].strength != STRONG else 0
        if room < 0:
            break
        if weak >= 0 or kept[place].strength == STRONG:
            stay.add(place)
    return tuple(each for place, each in enumerate(kept) if place in stay)


def _requests(said: Iterable[Said]) -> tuple[Said, ...]:
    """Return requests, each once, where it was last said; of very many the first and the newest."""
    kept = _once(said)
    if len(kept) > _REQUESTS:
        kept = [kept[0], *kept[len(kept) - _REQUESTS + 1 :]]
    return tuple(kept)


def _once(said: Iterable[Said]) -> list[Said]:
    """Return what was said, each once, where it was last said."""
    found: dict[str, Said] = {}
    for each in said:
        found.pop(each.text, None)
        found[each.text] = each
    return list(found.values())
