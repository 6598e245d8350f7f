"""Changes and cuts as text: exact, and small even where a hundred thousand messages were dropped.

A JSON object, each member left out where it is empty:

    why    [[edit, reason], …]: each pair once
    drop   [[why, rank, [[start, [tokens_before, …]], …]], …]: what is not sent, in runs of positions
    put    [[position, rank, why, tokens_before, tokens_after, text], …]: every other change, with the
           text of the message that is sent instead (null where there is none)

and of a cut also

    gaps   [[why, start, stop, tokens, tool_calls], …]: runs of messages that are not sent any more
    kept   [node, …]: the messages before the cut that lie in no gap, by position; left out where it is not
           known, as in cuts that were stored before there were gaps: all they dropped is under `drop`
    summary, account
           the summary that stands in the place of some gaps, and what input had cost

`why` is a place in the first list. `rank` counts the changes of one position, so that their order is kept. It knows
nothing of what the changes mean.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from proxy.dialects import Message, dialect_named
from proxy.dialects.jsontext import is_array, is_object
from proxy.trimming import Account, Change, Gap, Summary

_Run: TypeAlias = tuple[int, list[int]]
_Drop: TypeAlias = tuple[int, int, list[_Run]]
_Put: TypeAlias = tuple[int, int, int, int, int, str | None]
_Gap: TypeAlias = tuple[int, int, int, int, int]
_Why: TypeAlias = dict[tuple[str, str], int]


class _Changes(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The JSON object of the module's docstring."""

    why: list[tuple[str, str]] = []
    drop: list[_Drop] = []
    put: list[_Put] = []


class _Cut(_Changes, omit_defaults=True, forbid_unknown_fields=True):
    """The same of a cut."""

    gaps: list[_Gap] = []
    kept: list[str] | None = None
    summary: Summary | None = None
    account: Account | None = None


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """What a cut does, as it was read."""

    changes: tuple[Change, ...]
    gaps: tuple[Gap, ...]
    kept: tuple[str, ...] | None
    """The nodes before it that lie in no gap; None where it is not known."""
    summary: Summary | None = None
    account: Account | None = None


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Changes)
_CUT_DECODER = msgspec.json.Decoder(_Cut)
_NONE = "{}"
_CHAT: Final = dialect_named("chat")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def stored_message(raw: bytes) -> Message:
    """Return the message with a stored text. Every session speaks Chat Completions so far."""
    return _CHAT.message(raw)


def encode_changes(changes: Collection[Change]) -> str:
    """Return `changes` as text. It is read back by position, the order for each position kept."""
    if not changes:
        return _NONE
    why: _Why = {}
    drop, put = _parted(changes, why)
    return _ENCODER.encode(_Changes(why=list(why), drop=drop, put=put)).decode()


def decode_changes(text: str) -> tuple[Change, ...]:
    """Return the changes that `text` was made from, by position."""
    if text == _NONE:
        return ()
    return _changes(_DECODER.decode(text))


def encode_cut(
    changes: Iterable[Change],
    gaps: Iterable[Gap],
    kept: Sequence[str] | None,
    summary: Summary | None = None,
    account: Account | None = None,
) -> str:
    """Return what a cut does as text; `kept` are the nodes before it that lie in no gap, None if unknown.

    Half an emoji in a summary is read back as U+FFFD: no text holds it.
    """
    why: _Why = {}
    rows = [
        (why.setdefault((gap.edit, gap.reason), len(why)), gap.start, gap.stop, gap.tokens, gap.tool_calls)
        for gap in gaps
    ]
    drop, put = _parted(changes, why)
    names = None if kept is None else list(kept)
    cut = _Cut(why=list(why), drop=drop, put=put, gaps=rows, kept=names, summary=summary, account=account)
    try:
        return _ENCODER.encode(cut).decode()
    except UnicodeEncodeError:
        if summary is None:
            raise
        cut.summary = replace(summary, text=_whole(summary.text), state=_whole(summary.state))
        return _ENCODER.encode(cut).decode()


def decode_cut(text: str) -> Decided:
    """Return what `text` was made from."""
    read = _CUT_DECODER.decode(text)
    gaps = tuple(
        [
            Gap(start=start, stop=stop, edit=named[0], reason=named[1], tokens=tokens, tool_calls=tool_calls)
            for reason, start, stop, tokens, tool_calls in read.gaps
            for named in [_named(read, reason)]
        ]
    )
    kept = None if read.kept is None else tuple(read.kept)
    return Decided(changes=_changes(read), gaps=gaps, kept=kept, summary=read.summary, account=read.account)


def encode_data(data: Mapping[str, Any]) -> str:
    """Return JSON data as text; half an emoji in it is read back as U+FFFD."""
    try:
        return _ENCODER.encode(data).decode()
    except UnicodeEncodeError:
        return _ENCODER.encode(_whole(dict(data))).decode()


def _whole(value: Any) -> Any:
    """Return JSON data with a mark in the place of each lone surrogate, which UTF-8 cannot hold."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if is_object(value):
        return {_whole(name): _whole(member) for name, member in value.items()}
    return [_whole(item) for item in value] if is_array(value) else value


def _parted(changes: Iterable[Change], why: _Why) -> tuple[list[_Drop], list[_Put]]:
    """Return changes as rows; reasons that are new are added to `why`."""
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
    return [(reason, rank, _runs(places)) for (reason, rank), places in dropped.items()], put


def _changes(read: _Changes) -> tuple[Change, ...]:
    ranked = [*_dropped(read), *_put(read)]
    ranked.sort(key=lambda item: (item[1].position, item[0]))
    return tuple(change for _, change in ranked)


def _named(read: _Changes, reason: int) -> tuple[str, str]:
    """Return edit and reason by their place in the list."""
    if not 0 <= reason < len(read.why):
        raise ValueError("the changes name a reason that they do not list")
    return read.why[reason]


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
        edit, words = _named(read, reason)
        for start, run in runs:
            for position, tokens in enumerate(run, start):
                yield (
                    rank,
                    Change(
                        position=position, edit=edit, reason=words, message=None, tokens_before=tokens, tokens_after=0
                    ),
                )


def _put(read: _Changes) -> Iterator[tuple[int, Change]]:
    for position, rank, reason, before, after, raw in read.put:
        edit, words = _named(read, reason)
        yield (
            rank,
            Change(
                position=position,
                edit=edit,
                reason=words,
                message=None if raw is None else stored_message(raw.encode()),
                tokens_before=before,
                tokens_after=after,
            ),
        )
