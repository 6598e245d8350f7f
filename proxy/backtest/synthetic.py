"""A made-up agent that does the same at every turn, so that what a policy costs can be reckoned by hand.

    a prefix of 8,000 tokens, then 100 turns of 1,800 tokens of tool output and 200 of reply

It comes twice: with tool output that nothing makes shorter without losing some of it, and with tool output of
which 40 % is noise, colour codes of a terminal. Every text is made of common words drawn by a fixed rule: the
same in every process, of the same size by one counter. It measures costs: there is nothing in it to recall.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from proxy.backtest.histories import History, of_messages
from proxy.tokens import TokenCounter

PREFIX_TOKENS: Final = 8_000
"""Tokens of instructions and tools together, about: the message's own few beside."""
TURNS: Final = 100
OUTPUT_TOKENS: Final = 1_800
"""Tokens of the text of each tool output."""
REPLY_TOKENS: Final = 200
"""Tokens of the text of each reply; its call has a few more."""
NOISE: Final = 0.4
"""The part of the second agent's tool output that can go without loss."""

_VOCABULARY: Final = (
    "river stone market garden window winter silver letter bridge forest summer island village mountain "
    "station engine paper castle harbor doctor teacher student weather kitchen blanket picture history "
    "science language number signal system method result reason answer question moment morning evening "
    "country city street house table chair door wall floor roof glass metal wood water fire earth wind "
    "cloud storm snow rain sun moon star light shadow color sound music voice song dance story book page "
    "word line point circle square corner center north south east west left right open close begin finish "
    "carry bring build break choose follow gather happen "
)
_WORDS: Final = tuple(_VOCABULARY.split())
_COLOURS: Final = tuple(f"\x1b[{code}m" for code in (31, 32, 33, 34, 35, 36))
_RESET: Final = "\x1b[0m"
_ESCAPE: Final = re.compile(r"\x1b\[[0-9]+m")
_WORDS_A_LINE: Final = 14

Size = Callable[[str], int]


def synthetic_agents(counter: TokenCounter, model: str = "") -> tuple[History, History]:
    """Return both agents' sessions, sized by `counter` for `model`."""

    def size(text: str) -> int:
        return counter.text(text, model)

    return _session("synthetic", size, noisy=False), _session("synthetic-noisy", size, noisy=True)


def stripped(text: str) -> str:
    """Return a text without the codes that colour it."""
    return _ESCAPE.sub("", text)


def _session(name: str, size: Size, *, noisy: bool) -> History:
    words = _draw(sum(map(ord, name)))
    tools = [_tool()]
    room = PREFIX_TOKENS - size(orjson.dumps(tools).decode())
    said: list[dict[str, Any]] = [
        {"role": "system", "content": _text(words, room, size)},
        {"role": "user", "content": "Read every part, and tell what is in it."},
    ]
    for turn in range(1, TURNS + 1):
        call = {"name": "read_part", "arguments": orjson.dumps({"part": turn}).decode()}
        said += [
            {
                "role": "assistant",
                "content": _text(words, REPLY_TOKENS, size),
                "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": _output(words, size, noisy=noisy)},
        ]
    return of_messages(name, said, tools=tools)


def _tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"part": {"type": "integer"}}, "required": ["part"]}
    return {"type": "function", "function": {"name": "read_part", "parameters": parameters}}


def _output(words: Iterator[str], size: Size, *, noisy: bool) -> str:
    """Return a tool's output: plain, or with so many colour codes that they are the noise."""
    if not noisy:
        return _text(words, OUTPUT_TOKENS, size)
    plain = _text(words, round(OUTPUT_TOKENS * (1 - NOISE)), size).split(" ")

    def coloured(count: int) -> str:
        return " ".join(
            f"{_COLOURS[place % len(_COLOURS)]}{word}{_RESET}" if place < count else word
            for place, word in enumerate(plain)
        )

    return coloured(_longest(len(plain), OUTPUT_TOKENS, lambda count: size(coloured(count))))


def _text(words: Iterator[str], tokens: int, size: Size) -> str:
    """Return a text of lines of words, as long as `tokens` allow; most words are one token, none is many."""
    drawn = [next(words) for _ in range(tokens)]

    def lines(count: int) -> str:
        rows = range(0, count, _WORDS_A_LINE)
        return ",\n".join(" ".join(drawn[row : min(row + _WORDS_A_LINE, count)]) for row in rows)

    return lines(_longest(tokens, tokens, lambda count: size(lines(count))))


def _longest(most: int, room: int, size_of: Callable[[int], int]) -> int:
    """Return how many there may be, `most` at most, until their size is above `room`; it grows with them."""
    count = most
    while count and (size := size_of(count)) > room:
        count = min(count - 1, count * room // size)
    while count < most and size_of(count + 1) <= room:
        count += 1
    return count


def _draw(seed: int) -> Iterator[str]:
    """Yield words without end, by a generator of numbers that is the same everywhere."""
    state = seed
    while True:
        state = (state * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64
        yield _WORDS[(state >> 33) % len(_WORDS)]
