from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.dialects.sse import Event, EventDecoder

PIECES = st.sampled_from(
    [
        b"\n",
        b"\r",
        b"\r\n",
        b"data: x",
        b"data:",
        b"data",
        b"event: e",
        b":",
        b": c",
        b"id: 1",
        b"\xef\xbb\xbf",
        b"\xe4\xbc",
        b" ",
        b"[DONE]",
    ]
)
STREAMS = st.lists(PIECES, max_size=25).map(b"".join)
FAST = st.sampled_from([b"data: a\n\n", b'data: {"a": "some words"}\n\n', b"data: [DONE]\n\n"])
"""What is read the fast way: one line of data, its ends LF."""
SLOW = st.sampled_from([b"data:a\n\n", b": c\n\n", b"\n", b"data: a\r\n\r\n", b"\xef\xbb\xbfdata: a\n\n"])
MIXED = st.lists(st.tuples(FAST | SLOW, st.booleans(), st.integers(0, 30)), min_size=1, max_size=5)
"""Events, each with whether it is cut off from the one before, and where it is cut itself."""


def decode(pieces: Iterable[bytes]) -> list[Event]:
    decoder = EventDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events + decoder.flush()


def cut(data: bytes, places: Iterable[int]) -> Iterator[bytes]:
    start = 0
    for place in sorted({place % (len(data) + 1) for place in places}):
        yield data[start:place]
        start = place
    yield data[start:]


@given(STREAMS | st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=12))
@example(b"data: a\r\r\ndata: b\r\r", [9])
@example(b"data: a\r\n\r\n", [10])
@example(b"\r\n\r\r\n\n\r", [1, 2, 3, 4, 5, 6])
@settings(max_examples=100)
def test_any_cut_of_the_bytes_gives_the_same_events_and_no_byte_is_lost(data: bytes, places: list[int]) -> None:
    whole = decode([data])

    assert decode(cut(data, places)) == whole
    assert decode(bytes([byte]) for byte in data) == whole
    assert b"".join(event.raw for event in whole) == data
    assert all(event.raw for event in whole)


@given(MIXED)
@settings(max_examples=100)
def test_any_cut_gives_the_same_events_where_some_are_read_fast_and_some_are_not(
    events: list[tuple[bytes, bool, int]],
) -> None:
    data, places = b"", []
    for event, apart, place in events:
        places += [len(data)] * apart + [len(data) + min(place, len(event))]
        data += event

    assert decode(cut(data, places)) == decode([data])


@given(
    st.lists(st.binary(max_size=8).filter(lambda data: not set(data) & {10, 13}), min_size=1),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.sampled_from([b"", b" "]),
)
def test_data_reads_back_whatever_ends_the_lines(lines: list[bytes], end: bytes, space: bytes) -> None:
    text = b"".join(b"data:" + space + line + end for line in lines) + end
    data = b"\n".join(lines if space else [line.removeprefix(b" ") for line in lines])

    assert decode([text * 2]) == [Event(raw=text, data=data, is_done=data.strip() == b"[DONE]")] * 2


@pytest.mark.parametrize("event", [b"data: a\n\n", b"data: a\r\n\r\n", b"data: a\r\r", b": c\n\n", b"data: a\r\n\n"])
def test_an_event_is_complete_with_its_last_byte(event: bytes) -> None:
    decoder = EventDecoder()

    for byte in event[:-1]:
        assert decoder.feed(bytes([byte])) == []
    assert [found.raw for found in decoder.feed(event[-1:])] == [event]
    assert decoder.flush() == []


def test_a_blank_line_in_cr_after_an_lf_waits_for_the_byte_that_tells() -> None:
    decoder = EventDecoder()

    assert decoder.feed(b"data: a\n\r") == []
    assert decoder.feed(b"\ndata: b\n\r") == [Event(raw=b"data: a\n\r\n", data=b"a")]
    assert decoder.feed(b"data: c") == [Event(raw=b"data: b\n\r", data=b"b")]


def test_an_lf_that_comes_after_cr_cr_belongs_to_the_next_event() -> None:
    decoder = EventDecoder()

    assert decoder.feed(b"data: a\r\r") == [Event(raw=b"data: a\r\r", data=b"a")]
    assert decoder.feed(b"\n") == []
    assert decoder.feed(b"data: b\r\r") == [Event(raw=b"\ndata: b\r\r", data=b"b")]
    assert decoder.feed(b"\n") == []
    assert decoder.flush() == [Event(raw=b"\n", data=None)]


def test_blank_lines_alone_are_passed_on_at_once() -> None:
    decoder = EventDecoder()

    assert decoder.feed(b"\n") == [Event(raw=b"\n", data=None)]
    assert decoder.feed(b"\r\n") == [Event(raw=b"\r\n", data=None)]
    assert decoder.feed(b"\r") == []
    assert decoder.feed(b"data: a\r\r") == [Event(raw=b"\r", data=None), Event(raw=b"data: a\r\r", data=b"a")]
    assert decoder.feed(b"\r") == [Event(raw=b"\r", data=None)]


@pytest.mark.parametrize("rest", [b"\r", b"data: a\n\r"])
def test_a_cr_that_waited_at_the_end_of_the_stream_ended_its_event(rest: bytes) -> None:
    decoder = EventDecoder()

    assert decoder.feed(rest) == []
    (event,) = decoder.flush()
    assert (event.raw, event.complete) == (rest, True)


@pytest.mark.parametrize(
    ("text", "data", "name"),
    [
        (b"data: a\ndata: b\n\n", b"a\nb", None),
        (b"data:a\n\n", b"a", None),
        (b"data:  a \n\n", b" a ", None),
        (b"data\n\n", b"", None),
        (b"data:\n\n", b"", None),
        (b"data: \n\n", b"", None),
        (b"data: a:b\n\n", b"a:b", None),
        (b": comment\n\n", None, None),
        (b":\ndata: a\n:x\n\n", b"a", None),
        (b"event: error\ndata: {}\n\n", b"{}", "error"),
        (b"event:x\nevent: y\n\n", None, "y"),
        (b"event: \xff\n\n", None, "\ufffd"),
        (b"id: 7\nretry: 10\ndatas: 1\n data: 2\n\n", None, None),
        (b"data: \xe2\x80\xa8\x0b\x0c\x85\x1c\n\n", b"\xe2\x80\xa8\x0b\x0c\x85\x1c", None),
        (b"data: a\rdata: b\r\ndata: c\n\n", b"a\nb\nc", None),
        (b"\xef\xbb\xbfdata: a\n\n", b"a", None),
    ],
)
def test_fields_are_read_as_the_standard_says(text: bytes, data: bytes | None, name: str | None) -> None:
    assert decode([text]) == [Event(raw=text, data=data, name=name)]


def test_a_byte_order_mark_counts_at_the_start_alone() -> None:
    assert [event.data for event in decode([b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n"])] == [b"a", None]


def test_a_byte_order_mark_after_events_that_were_read_fast_does_not_count() -> None:
    decoder = EventDecoder()

    assert decoder.feed(b"data: a\n\n") == [Event(raw=b"data: a\n\n", data=b"a")]
    (event,) = decoder.feed(b"\xef\xbb\xbfdata: b\n\n")
    assert event.data is None


def test_where_the_search_went_on_in_a_slow_event_does_not_bind_what_comes_after_a_fast_one() -> None:
    pieces = [b"data:a\n\ndata: d", b"bbbbb\n\n", b": c\n\n"]

    assert [event.raw for event in decode(pieces)] == [b"data:a\n\n", b"data: dbbbbb\n\n", b": c\n\n"]
    assert [event.complete for event in decode(pieces)] == [True, True, True]


def test_an_event_that_breaks_off_is_marked_incomplete() -> None:
    decoder = EventDecoder()

    assert decoder.feed(b'data: {"a":1}\n\ndata: {"b') == [Event(raw=b'data: {"a":1}\n\n', data=b'{"a":1}')]
    assert decoder.flush() == [Event(raw=b'data: {"b', data=b'{"b', name=None, complete=False)]
    assert decoder.flush() == []
    assert decoder.feed(b"data: c\n\n") == [Event(raw=b"data: c\n\n", data=b"c")]


@pytest.mark.parametrize(
    ("text", "is_done"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b"data: [DONE] \n\n", True),
        (b": [DONE]\n\n", False),
        (b'data: "[DONE]"\n\n', False),
        (b"data: [DONE]\ndata: x\n\n", False),
    ],
)
def test_the_end_of_a_completion_is_recognised(text: bytes, is_done: bool) -> None:
    (event,) = decode([text])

    assert event.is_done is is_done


def test_a_large_event_in_small_pieces_is_looked_at_once() -> None:
    decoder = EventDecoder()
    text = b"data: " + b"x" * 10_000_000 + b"\n\n"

    # Looking at all of it again for each piece would take minutes here, not a moment.
    events = [event for start in range(0, len(text), 1000) for event in decoder.feed(text[start : start + 1000])]

    assert [event.raw for event in events] == [text]


def test_an_api_says_by_what_event_its_streams_end() -> None:
    stream = b"event: piece\ndata: 1\n\nevent: over\ndata: 2\n\n"
    assert [event.is_done for event in EventDecoder((b"over",)).feed(stream)] == [False, True]
    assert [event.is_done for event in EventDecoder((b"2",)).feed(b"data: 1\n\ndata: 2\n\n")] == [False, True]


def test_the_bytes_of_an_unfinished_event_are_counted() -> None:
    decoder = EventDecoder()
    decoder.feed(b"data: 1\n\ndata: 23")
    assert decoder.waiting == len(b"data: 23")
