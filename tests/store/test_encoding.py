from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import ChatMessage
from proxy.store.cuts import Decided, decode_changes, decode_cut, encode_changes, encode_cut, encode_data
from proxy.trimming import Account, Change, Gap, Summary

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
messages = st.builds(lambda text: ChatMessage.of({"role": "tool", "content": text}), words)
counts = st.integers(0, 10**6)
dropped = st.builds(
    Change,
    position=st.integers(0, 40),
    edit=st.sampled_from(["drop_oldest", "keep_rounds"]),
    reason=words,
    message=st.none(),
    tokens_before=counts,
    tokens_after=st.just(0),
)
changed = st.builds(
    Change,
    position=st.integers(0, 40),
    edit=words,
    reason=words,
    message=st.none() | messages,
    tokens_before=counts,
    tokens_after=counts,
)
gaps = st.lists(
    st.builds(Gap, start=counts, stop=counts, edit=words, reason=words, tokens=counts, tool_calls=counts), max_size=5
)
kept = st.none() | st.lists(words, max_size=5).map(tuple)
states = st.dictionaries(words, counts | words | st.lists(words, max_size=2), max_size=3)
roles = st.sampled_from(["merge", "system", "user"])
summaries = st.none() | st.builds(
    Summary,
    text=words,
    role=roles,
    until=counts,
    tokens=counts,
    kind=st.just("statistics"),
    covered_messages=counts,
    covered_tokens=counts,
    generation=counts,
    state=states,
)
accounts = st.none() | st.builds(Account, turns=counts, untrimmed=st.floats(0, 1e9), saved=st.floats(-1e9, 1e9))


@given(st.lists(dropped | changed))
def test_changes_come_back_exactly_by_position(changes: list[Change]) -> None:
    in_order = tuple(sorted(changes, key=lambda change: change.position))  # stable: each position keeps its order
    assert decode_changes(encode_changes(changes), CHAT) == in_order


@given(st.lists(dropped | changed))
def test_equal_changes_are_equal_texts(changes: list[Change]) -> None:
    assert encode_changes(decode_changes(encode_changes(changes), CHAT)) == encode_changes(changes)


@given(st.lists(dropped | changed), gaps, kept, summaries, accounts)
def test_cuts_come_back_exactly(
    changes: list[Change],
    gaps: list[Gap],
    kept: tuple[str, ...] | None,
    summary: Summary | None,
    account: Account | None,
) -> None:
    in_order = tuple(sorted(changes, key=lambda change: change.position))
    decided = Decided(changes=in_order, gaps=tuple(gaps), kept=kept, summary=summary, account=account)
    assert decode_cut(encode_cut(decided), CHAT) == decided


@given(st.lists(dropped | changed))
def test_a_cut_that_was_stored_as_changes_alone_is_read(changes: list[Change]) -> None:
    text = encode_changes(changes)
    assert decode_cut(text, CHAT) == Decided(changes=decode_changes(text, CHAT))


def test_half_an_emoji_in_a_summary_is_stored_as_a_mark() -> None:
    summary = Summary(
        text="abc\ud83d",
        role="merge",
        until=2,
        tokens=9,
        kind="statistics",
        covered_messages=2,
        covered_tokens=30,
        state={"rounds": 2, "k\ud83d": [{"text": "Z\udc00"}, None, 1.5]},
    )
    read = decode_cut(encode_cut(Decided(summary=summary)), CHAT).summary
    assert read is not None
    assert read.text == "abc\ufffd"
    assert read.state == {"rounds": 2, "k\ufffd": [{"text": "Z\ufffd"}, None, 1.5]}


def test_what_else_is_no_text_is_refused() -> None:
    gap = Gap(start=0, stop=1, edit="drop_oldest", reason="\ud83d", tokens=1, tool_calls=0)
    with pytest.raises(UnicodeEncodeError):
        encode_cut(Decided(gaps=(gap,)))


def test_a_cut_over_a_hundred_thousand_messages_takes_next_to_no_room() -> None:
    gap = Gap(
        start=0,
        stop=100_000,
        edit="drop_oldest",
        reason="its round was the oldest",
        tokens=12_000_000,
        tool_calls=30_000,
    )
    assert len(encode_cut(Decided(gaps=(gap,), kept=()))) < 200


def test_thousands_of_dropped_messages_take_little_room() -> None:
    changes = [
        Change(
            position=place,
            edit="drop_oldest",
            reason="older than the target allows",
            message=None,
            tokens_before=120,
            tokens_after=0,
        )
        for place in range(5_000)
    ]
    assert len(encode_changes(changes)) < 5 * len(changes)


def test_a_message_keeps_its_bytes() -> None:
    raw = '{ "content":"é\\u0000\\n", "role":"tool","n":1.0e3 }'.encode()
    (change,) = decode_changes(
        encode_changes(
            [
                Change(
                    position=3,
                    edit="truncate",
                    reason="long",
                    message=ChatMessage(raw),
                    tokens_before=9,
                    tokens_after=4,
                )
            ]
        ),
        CHAT,
    )
    assert change.message is not None
    assert change.message.raw == raw


def test_nothing_is_next_to_nothing() -> None:
    assert encode_changes([]) == "{}"
    assert decode_changes("{}", CHAT) == ()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"why":1}', '{"other":[]}', '{"drop":[[0,0,[[1,[5]]]]]}', '{"put":[[1,0,0,5,5,null]]}']
)
def test_what_is_no_such_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_changes(text, CHAT)
    with pytest.raises(ValueError, match=r"."):
        decode_cut(text, CHAT)


@pytest.mark.parametrize(
    "text",
    [
        '{"gaps":[[0,0,1,5,0]]}',
        '{"why":[["e","r"]],"gaps":[[-1,0,1,5,0]]}',
        '{"why":[["e","r"]],"gaps":[[0,0,1,5]]}',
        '{"kept":[1]}',
    ],
)
def test_what_is_no_text_of_a_cut_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_cut(text, CHAT)


def test_what_was_decided_on_arrival_has_no_gaps() -> None:
    with pytest.raises(ValueError, match="gaps"):
        decode_changes('{"why":[["e","r"]],"gaps":[[0,0,1,5,0]]}', CHAT)


def test_data_is_read_back_but_for_half_an_emoji() -> None:
    data = {"b": [1, 2.5, None, {"é": "\x00"}], "a": "\u2028"}
    assert json.loads(encode_data(data)) == data
    assert list(json.loads(encode_data(data))) == ["b", "a"]
    assert json.loads(encode_data({"k\ud83e": ["x\udd8a", data]})) == {"k\ufffd": ["x\ufffd", data]}
