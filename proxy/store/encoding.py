"""Changes as text: exact, and small even where thousands of messages were dropped.

A JSON object of three members, each left out where it is empty:

    why    [[edit, reason], …]: each pair once
    drop   [[why, rank, [[start, [tokens_before, …]], …]], …]: what is not sent, in runs of positions
    put    [[position, rank, why, tokens_before, tokens_after, text], …]: every other change, with the
           text of the message that is sent instead (null where there is none)

`why` is a place in the first list. `rank` counts the changes of one position, so that their order is kept.
It knows nothing of what the changes mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from proxy.trimming.plan import Change
from proxy.wire.messages import Message

_Run: TypeAlias = tuple[int, list[int]]
_Drop: TypeAlias = tuple[int, int, list[_Run]]
_Put: TypeAlias = tuple[int, int, int, int, int, str | None]


class _Changes(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The JSON object of the module's docstring."""

    why: list[tuple[str, str]] = []
    drop: list[_Drop] = []
    put: list[_Put] = []


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Changes)
_NONE = "{}"


def encode_changes(changes: Iterable[Change]) -> str:
    """Return `changes` as text. It is read back by position, the order for each position kept."""
    why: dict[tuple[str, str], int] = {}
    dropped: dict[tuple[int, int], list[tuple[int, int]]] = {}
    put: list[_Put] = []
    ranks: Counter[int] = Counter()
    for change in sorted(changes, key=_position):
        rank = ranks[change.position]
        ranks[change.position] += 1
        reason = why.setdefault((change.edit, change.reason), len(why))
        if change.message is None and change.tokens_after == 0:
            dropped.setdefault((reason, rank), []).append((change.position, change.tokens_before))
        else:
            raw = None if change.message is None else change.message.raw.decode()
            put.append((change.position, rank, reason, change.tokens_before, change.tokens_after, raw))
    drop = [(reason, rank, _runs(places)) for (reason, rank), places in dropped.items()]
    return _ENCODER.encode(_Changes(list(why), drop, put)).decode()


def decode_changes(text: str) -> tuple[Change, ...]:
    """Return the changes that `text` was made from, by position.

    Raises:
        ValueError: it is no such text.
    """
    if text == _NONE:
        return ()
    read = _DECODER.decode(text)
    try:
        ranked = [*_dropped(read), *_put(read)]
    except IndexError as why:
        raise ValueError("the changes name a reason that they do not list") from why
    ranked.sort(key=lambda item: (item[1].position, item[0]))
    return tuple(change for _, change in ranked)


def _position(change: Change) -> int:
    return change.position


def _runs(places: list[tuple[int, int]]) -> list[_Run]:
    """Put (position, tokens), by position and each position once, into runs without a gap."""
    runs: list[_Run] = []
    for position, tokens in places:
        if runs and position == runs[-1][0] + len(runs[-1][1]):
            runs[-1][1].append(tokens)
        else:
            runs.append((position, [tokens]))
    return runs


def _dropped(read: _Changes) -> Iterator[tuple[int, Change]]:
    for reason, rank, runs in read.drop:
        edit, words = read.why[reason]
        for start, run in runs:
            for position, tokens in enumerate(run, start):
                yield rank, Change(position, edit, words, None, tokens, 0)


def _put(read: _Changes) -> Iterator[tuple[int, Change]]:
    for position, rank, reason, before, after, raw in read.put:
        edit, words = read.why[reason]
        yield (
            rank,
            Change(position, edit, words, None if raw is None else Message(raw.encode()), before, after),
        )
