"""Fits the weights by which digests tell what a later call is likely to use again (`proxy.textscan.digest`).

    python -m benchmarks.reuse FILE...            prints the weights for `WEIGHTS`
    python -m benchmarks.reuse --families FILE... fits without one family of sessions at a time and tests on it

Every value of an old tool result or of an old call's arguments is one example: what was known of it when ten newer
results were there, and whether a later call used it then (`proxy.backtest.recall`). Values that stand in a text
anyway need no digest and are left out, and each value of a session counts once. A logistic regression weighs the
features; a session counts with the square root of its examples. A family is a file name up to its first hyphen.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path
from typing import Final

from msgspec import Struct

from proxy.backtest import read_file
from proxy.backtest.histories import SessionHistory
from proxy.backtest.recall import References
from proxy.dialects import Message
from proxy.textscan import Mentions, leaves_of, words_of
from proxy.textscan.digest import chance_of, features_of, reading_of

NEWER: Final = 10  # newest results, which the built-in policy keeps whole
RIDGE: Final = 5.0  # keeps the weights of rare features small
ROUNDS: Final = 8  # iterations of Newton's method
SHORTEST: Final = 100  # fewest characters of a text that is worth a digest
LONG_LEAF: Final = 200  # fewest characters of an argument that is cleared
MARKS: Final = (0.1, 0.2, 0.3, 0.5)  # shares of all characters at which the table shows how much reuse is kept


class Example(Struct, frozen=True, kw_only=True):
    """A value that might have been kept."""

    features: tuple[float, ...]
    used: bool
    characters: int


def examples_of(history: SessionHistory) -> Iterator[Example]:
    """Yield the values of a session's old results and arguments, each value once."""
    messages = history.messages
    uses = _uses(history)
    results = [place for place, message in enumerate(messages) if message.is_result]
    mentions, known, seen = Mentions(), set[str](), set[str]()
    read = 0
    for place, message in enumerate(messages):
        newer = results[bisect_right(results, place) :][:NEWER]
        until = newer[-1] if len(newer) == NEWER else len(messages)
        for one in messages[read:until]:
            mentions.add(one.role, one.text, [call.arguments for call in one.calls])
            if not one.is_result:
                known |= words_of(one.text)
        read = max(read, until)
        for text, is_argument in _texts(message):
            for candidate in reading_of(text, is_argument=is_argument).candidates:
                value = candidate.text
                if value in seen or value in known or known.issuperset(value.split()):
                    continue
                seen.add(value)
                features = tuple(features_of(candidate, mentions, is_argument=is_argument))
                used = any(position >= until for position in uses[value])
                yield Example(features=features, used=used, characters=len(value) + 2)


def _uses(history: SessionHistory) -> defaultdict[str, list[int]]:
    """Return by value the positions of the calls that used it as a far value (see `proxy.backtest.recall`)."""
    references = References(history.instructions, history.messages, tools=(history.tools or b"").decode())
    uses: defaultdict[str, list[int]] = defaultdict(list)
    for position in references.positions:
        for call in references.references(position):
            for reference in call:
                if "far" in reference.strata:
                    uses[references.atoms[reference.atom]].append(position)
    return uses


def _texts(message: Message) -> Iterator[tuple[str, bool]]:
    if message.is_result and len(message.text) >= SHORTEST:
        yield message.text, False
    for call in message.calls:
        for leaf in leaves_of(call.arguments) or ():
            if len(leaf.text) > LONG_LEAF:
                yield leaf.text, True


def fitted(sessions: Sequence[Sequence[Example]]) -> list[float]:
    """Return the weights that best predict which values are used again."""
    size = len(sessions[0][0].features)
    weights = [0.0] * size
    for _ in range(ROUNDS):
        slope = [-RIDGE * each for each in weights]
        curve = [[RIDGE * (row == column) for column in range(size)] for row in range(size)]
        scale = sum(len(session) for session in sessions) / sum(sqrt(len(session)) for session in sessions)
        for session in sessions:
            share = scale / sqrt(len(session))
            for example in session:
                chance = _chance(weights, example.features)
                some = [(at, value) for at, value in enumerate(example.features) if value]
                error, bend = share * (example.used - chance), share * chance * (1 - chance)
                for at, value in some:
                    slope[at] += error * value
                    row = curve[at]
                    for other, beside in some:
                        row[other] += bend * value * beside
        weights = [each + step for each, step in zip(weights, _solved(curve, slope), strict=True)]
    return weights


def _chance(weights: Sequence[float], features: Sequence[float]) -> float:
    return chance_of(features, weights)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Return the solution of a system of linear equations, by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(rows[row][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            rows[below] = [mine - factor * other for mine, other in zip(rows[below], rows[at], strict=True)]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(rows[at][other] * found[other] for other in range(at + 1, size))
        found[at] = (rows[at][size] - rest) / rows[at][at]
    return found


def kept(weights: Sequence[float], examples: Sequence[Example]) -> list[float]:
    """Return the share of the reused values that is kept at each of `MARKS`."""
    ranked = sorted(examples, key=lambda each: -_chance(weights, each.features) / each.characters)
    characters, uses = sum(each.characters for each in ranked), sum(each.used for each in ranked)
    shares: list[float] = []
    for mark in MARKS:
        room, found = mark * characters, 0
        for each in ranked:
            room -= each.characters
            if room < 0:
                break
            found += each.used
        shares.append(round(found / uses, 3))
    return shares


def main() -> None:
    """Fit on the sessions of the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--families", action="store_true")
    given = parser.parse_args()
    families: defaultdict[str, list[list[Example]]] = defaultdict(list)
    for path in given.files:
        for history in read_file(path):
            examples = list(examples_of(history))
            if any(example.used for example in examples):
                families[path.stem.partition("-")[0]].append(examples)
    every = [session for sessions in families.values() for session in sessions]
    if given.families:
        for name, tested in families.items():
            weights = fitted([session for session in every if session not in tested])
            examples = [example for session in tested for example in session]
            print(name, len(examples), sum(example.used for example in examples), kept(weights, examples))
            print("   ", json.dumps([round(each, 2) for each in weights]))
    weights = fitted(every)
    print("all", json.dumps([round(each, 2) for each in weights]))


if __name__ == "__main__":
    main()
