"""`compact_tool_output`: its table, what it does to any text, real tool results, texts made to be slow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.conversation import rounds, spans
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.textscan import weight
from proxy.tokens import TokenCounter
from proxy.trimming.draft import Draft
from proxy.trimming.edits.compact_tool_output import CompactToolOutput, _ends_of
from proxy.trimming.edits.truncate_tool_output import TruncateToolOutput
from proxy.trimming.model import Entry, PlanningContext
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from tests.trimming.edits.golden import REF, check_output, entry, result, rows
from tests.trimming.edits.golden import shortened as compacted

TRAJECTORIES = Path(__file__).parents[2] / "data" / "trajectories"
LOSSLESS = CompactToolOutput(methods=("minify", "table", "noise"))


@pytest.mark.parametrize("row", rows("compact_tool_output"), ids=lambda row: row["name"])
def test_golden(row: dict[str, Any]) -> None:
    check_output(CompactToolOutput, row)


# ------------------------------------------------------------------------------- content in parts

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def part(text: str, **more: str) -> dict[str, str]:
    return {"type": "text", "text": text, **more}


def test_results_of_calls_that_name_a_file_are_spared() -> None:
    records = json.dumps([{"id": f"A-{at}", "status": "open"} for at in range(40)], indent=2)
    for arguments, changed in (('{"path": "src/data.json"}', []), ('{"query": "orders"}', [1])):
        calls = [{"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}]
        log = (ChatMessage.of({"role": "assistant", "content": None, "tool_calls": calls}), result(records))
        given = Draft(
            entries=tuple(replace(entry(message), position=at) for at, message in enumerate(log)),
            messages=log,
            tokens=tuple(len(message.raw) for message in log),
            spans=spans(log),
            rounds=rounds(log),
            protected=frozenset(),
            count=lambda message: len(message.raw),
        )
        assert [change.position for change in CompactToolOutput(spare_files=True).apply(given)] == changed
        assert [change.position for change in CompactToolOutput().apply(given)] == [1]


def test_text_parts_are_put_in_form_and_others_stay() -> None:
    content = [part('{"a":    1}', mine="x"), IMAGE, part("words  \n" * 90), part(""), "no part"]
    after = compacted(CompactToolOutput(over_tokens=10), content)
    assert after is not None
    assert after.data["content"] == [
        part('{"a":1}', mine="x"),
        IMAGE,
        part("words\n… (88 lines omitted: 88 x words)\nwords\n[... compacted; full output: ref ...]"),
        part(""),
        "no part",
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_a_part_of_which_only_blanks_would_be_left_goes(*, strict: bool) -> None:
    edit = CompactToolOutput(over_tokens=10, strict=strict)
    made = compacted(edit, [part("\x1b[0m\x1b[2K\r"), part(" "), part("words  \n" * 90)])
    assert made is not None
    texts = [each["text"] for each in made.data["content"]]
    assert len(texts) == 1
    assert texts[0].endswith(f"[... compacted; full output: {REF} ...]")


def test_beside_an_image_the_text_alone_is_judged() -> None:
    message = result([part('{"a":    1}'), IMAGE])
    dear = Entry(message=message, tokens=1000, ref=REF, position=0)
    assert CompactToolOutput(over_tokens=10).shorten(message, dear) is None
    shortened = CompactToolOutput(over_tokens=2).shorten(message, dear)
    assert shortened is not None
    assert shortened.message.text == '{"a":1}'


@pytest.mark.parametrize("content", [None, "", [], [IMAGE], 7, {"a": 1}])
def test_what_has_no_text_stays(content: Any) -> None:
    assert compacted(CompactToolOutput(over_tokens=0), content) is None


@pytest.mark.parametrize("text", [" " * 5000, "\n \n" * 3000, "\x1b[31m\x1b[0m" * 900])
def test_what_is_nothing_but_blanks_and_colours_says_so(text: str) -> None:
    made = compacted(CompactToolOutput(over_tokens=10), text)
    assert made is not None
    assert made.text == f"[... compacted; full output: {REF} ...]"


def test_other_fields_keep_their_bytes() -> None:
    message = ChatMessage(b'{"tool_call_id": "a", "role":"tool", "content":"[1,   2]", "n": 1.00}')
    shortened = CompactToolOutput(over_tokens=1).shorten(message, entry(message))
    assert shortened is not None
    assert shortened.message.raw == b'{"tool_call_id":"a","role":"tool","content":"[1,2]","n":1.00}'


# ------------------------------------------------------------------------- met again, and others

LOG = "".join(f"request {number} served\n" for number in range(200))


def test_what_was_cut_before_is_made_anew_from_the_original_where_that_is_shorter() -> None:
    original = result(LOG)
    cut = TruncateToolOutput(max_lines=150).shorten(original, entry(original))
    assert cut is not None
    alone = CompactToolOutput().shorten(original, entry(original))
    assert CompactToolOutput().shorten(cut.message, entry(original)) == alone
    much = TruncateToolOutput(max_lines=1, max_bytes=20).shorten(original, entry(original))
    assert much is not None
    assert CompactToolOutput().shorten(much.message, entry(original)) is None


def test_what_another_edit_made_of_it_is_put_in_form_itself() -> None:
    original = result(json.dumps({"a": list(range(100))}))
    other = result(json.dumps({"b": "text", "c": [1, 2]}))
    shortened = CompactToolOutput(over_tokens=10).shorten(other, entry(original))
    assert shortened is not None
    assert shortened.message.text == '{"b":"text","c":[1,2]}'
    assert CompactToolOutput(over_tokens=30).shorten(other, entry(original)) is None
    assert CompactToolOutput(over_tokens=9).shorten(result("gone from here"), entry(result(""))) is None


def test_a_document_too_large_for_a_table_is_cut_and_stays_whole_without_preview() -> None:
    text = json.dumps([{"number": number, "city": f"c{number}"} for number in range(600)])
    cut = compacted(CompactToolOutput(), text)
    assert cut is not None
    assert json.loads(cut.text)["items_preview"][2] == "… (596 omitted)"
    whole = compacted(LOSSLESS, text)
    assert whole is not None
    assert len(json.loads(whole.text)["{number,city}"]) == 600


def test_a_step_that_makes_nothing_shorter_is_not_taken() -> None:
    blob = "Ab3" * 5 + "xY9zQ7wE5rT1" * 20
    text = f"{blob} {'word ' * 10}end"
    assert compacted(CompactToolOutput(over_tokens=10), text) is None
    list_of_few = json.dumps({"a": list(range(11))}, separators=(",", ":"))
    assert compacted(CompactToolOutput(over_tokens=10), list_of_few) is None


def test_near_the_limit_the_weight_decides_whether_anything_must_be_lost() -> None:
    # Of its bytes a table keeps four fifths, of its words and signs little more than half.
    letters = "abcdefghijklmnopqrstuvwxyzabcd"
    text = json.dumps([{"k1": letters[number:] + letters[:number]} for number in range(30)])
    message = result(text)
    for limit, rows_shown in ((700, 30), (400, 0)):
        edit = CompactToolOutput(over_tokens=limit)
        shortened = edit.shorten(message, Entry(message=message, tokens=1000, ref=REF, position=0))
        assert shortened is not None
        assert len(json.loads(shortened.message.text).get("{k1}", [])) == rows_shown


# --------------------------------------------------------------------------------- any text at all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["failed", "x" * 300]),
    lambda inner: (
        st.lists(inner, max_size=12)
        | st.dictionaries(st.sampled_from(["id", "name", "error", "city", "compressed"]), inner)
    ),
    max_leaves=40,
)
PIECES = st.one_of(
    st.text(max_size=20),
    JSON.map(lambda value: json.dumps(value, indent=1)),
    JSON.map(json.dumps),
    JSON.map(lambda value: f"text={json.dumps(value)!r}"),
    st.sampled_from(
        ["\n", "\n\n\n", "\x1b[31m", "a line 1\n" * 9, "10%\r20%\r", "<html><p>", "&lt;p>", '["\\ud800", 1]', "  \n"]
    ),
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)
METHODS = st.lists(st.sampled_from(["minify", "table", "preview", "log", "noise"]), unique=True).map(tuple)
EDITS = st.builds(
    CompactToolOutput,
    over_tokens=st.integers(0, 300),
    keep_items=st.integers(1, 3),
    max_string=st.integers(1, 50),
    methods=METHODS,
)


@settings(max_examples=60)
@given(EDITS, TEXTS)
def test_it_gets_shorter_the_same_each_time_and_its_own_work_stays(edit: CompactToolOutput, text: str) -> None:
    original = result(text)
    once = edit.shorten(original, entry(original))
    assert edit.shorten(result(text), entry(original)) == once
    if once is None:
        return
    assert len(once.message.text.encode()) < len(text.encode())
    assert edit.shorten(once.message, entry(original)) is None
    assert original == result(text)


# -------------------------------------------------------------------------------- real tool results

HEAVY = ["tau-airline-t00-r2.json", "tau-airline-t46-r3.json"]
"""Conversations whose tool results are JSON for the most part."""


class Digits(str):
    """A number, as it was written."""

    __slots__ = ()


def leaves(value: Any) -> Iterator[str]:
    """Yield every name and value, a number by its digits."""
    if isinstance(value, dict):
        for name, member in value.items():
            yield name
            yield from leaves(member)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, str):
        yield value
    else:
        yield json.dumps(value)


def results(name: str) -> Iterator[Message]:
    """Yield the tool results of a recorded conversation."""
    data = json.loads((TRAJECTORIES / name).read_text(encoding="utf-8"))
    return (ChatMessage.of(each) for each in data["messages"] if each["role"] == "tool")


@pytest.mark.parametrize("name", HEAVY)
def test_a_fifth_of_the_tokens_is_free(name: str) -> None:
    counter = TokenCounter()
    before = after = 0
    for message in results(name):
        tokens = counter.message(message, "gpt-4o")
        shortened = LOSSLESS.shorten(message, Entry(message=message, tokens=tokens, ref=REF, position=0))
        form = shortened.message if shortened is not None else message
        before, after = before + tokens, after + min(tokens, counter.message(form, "gpt-4o"))
    assert after <= 0.8 * before


@pytest.mark.parametrize("name", [path.name for path in sorted(TRAJECTORIES.glob("*.json"))])
def test_every_name_and_value_can_still_be_found(name: str) -> None:
    edit = LOSSLESS.model_copy(update={"over_tokens": 1})
    for message in results(name):
        shortened = edit.shorten(message, entry(message))
        try:
            value = json.loads(message.text, parse_int=Digits, parse_float=Digits)
        except ValueError:
            continue
        text = shortened.message.text if shortened is not None else message.text
        for leaf in leaves(value):
            assert leaf in text or json.dumps(leaf, ensure_ascii=False)[1:-1] in text


@pytest.mark.parametrize("name", [path.name for path in sorted(TRAJECTORIES.glob("*.json"))])
def test_any_recorded_result_gets_shorter_or_stays(name: str) -> None:
    for message in results(name):
        given_entry = Entry(message=message, tokens=len(message.text) // 4, ref=REF, position=0)
        for edit in (CompactToolOutput(), LOSSLESS):
            shortened = edit.shorten(message, given_entry)
            if shortened is not None:
                assert len(shortened.message.text.encode()) < len(message.text.encode())
                assert edit.shorten(shortened.message, given_entry) is None


# ------------------------------------------------------------------------------- texts made to be slow

RECORDS = [{"id": number, "name": f"n{number}", "price": number * 1.5} for number in range(3_000)]


@pytest.mark.no_cover  # it is the size that is tried
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(json.dumps(RECORDS, indent=1), id="records"),
        pytest.param("\n".join(map(json.dumps, RECORDS)), id="records by line"),
        pytest.param("[" + "1," * 200_000 + "1]", id="little but commas"),
        pytest.param("[" * 200_000, id="brackets"),
        pytest.param("[" * 10_000 + "]" * 10_000, id="ten thousand levels"),
        pytest.param('{"a":\n' * 30_000, id="objects that do not end"),
        pytest.param(': ["a ' * 200_000, id="a beginning after each colon"),
        pytest.param("='{" * 100_000, id="strings that do not end"),
        pytest.param("='[" + "\\" * 999_999, id="escapes"),
        pytest.param("x" * 10_000_000, id="ten megabytes on one line"),
        pytest.param("a line of text\n" * 100_000, id="a hundred thousand lines"),
        pytest.param(" " * 1_000_000, id="a million spaces"),
        pytest.param("".join(map(chr, range(256))) * 4000, id="binary"),
        pytest.param(json.dumps({"a": "x" * 3_000_000}), id="a long text in JSON"),
        pytest.param(json.dumps({f"k{number}": number for number in range(30_000)}), id="many keys"),
        pytest.param(json.dumps(RECORDS)[:-1], id="JSON that is broken at its end"),
        pytest.param("<html>" + "<div>" * 100_000, id="tags in tags"),
    ],
)
def test_large_texts(text: str) -> None:
    message = result(text)
    shortened = CompactToolOutput().shorten(message, entry(message))
    if shortened is not None:
        assert len(shortened.message.text) < len(text)
        assert CompactToolOutput().shorten(shortened.message, entry(message)) is None


# -------------------------------------------------------------------------------------- a strict limit

STRICT = CompactToolOutput(over_tokens=200, strict=True)
PROSE = " ".join(f"Sentence {at} says something that only a reader of it would need." for at in range(400))


def strictly(text: str, asked: str = "") -> str:
    message = result(text)
    tokens = TokenCounter().message(message, "gpt-4o")
    shortened = STRICT.shorten(message, Entry(message=message, tokens=tokens, ref=REF, position=0), asked)
    assert shortened is not None
    assert TokenCounter().message(shortened.message, "gpt-4o") <= STRICT.over_tokens
    return shortened.message.text


def records(fields: int) -> str:
    item = {"id": 7, "title": "a title", "rating": 4.5, **{f"field_{at}": f"words {at}" for at in range(fields)}}
    return json.dumps({"count": 40, "results": [item] * 40})


def test_items_that_are_too_large_show_the_fields_that_name_them_and_those_asked_for() -> None:
    assert "rating" not in strictly(records(30))
    shown = json.loads(strictly(records(30), '{"sort_by": "rating"}'))
    assert shown["results_preview"][0] == {"id": 7, "title": "a title", "rating": 4.5, "…": "(30 fields omitted)"}
    assert shown["count"] == 40
    assert shown["compressed"] is True


def test_what_no_preview_makes_short_enough_is_its_beginning_and_its_end() -> None:
    deep = json.dumps({f"key_{at}": {f"inner_{at}": "some words here"} for at in range(35)})
    for text in (PROSE, deep, "x" * 5000, f"{PROSE}\n  error: disk full  \n{PROSE}", f"Found: {records(30)} and more"):
        left = strictly(text)
        assert left[:3] == text[:3]
        assert f"full output: {REF}" in left or f'"full_output":"{REF}"' in left
        assert ("error: disk full" in left) == ("error: disk full" in text)
    halves = result([{"type": "text", "text": PROSE}, {"type": "text", "text": PROSE}])
    shortened = STRICT.shorten(halves, Entry(message=halves, tokens=9000, ref=REF, position=0))
    assert shortened is not None
    assert all("characters omitted" in part for part in shortened.message.texts)


def in_parts(*texts: str, edit: CompactToolOutput = STRICT) -> list[str]:
    """Return the parts of a result that is cut until it is within the limit."""
    message = result([{"type": "text", "text": text} for text in texts])
    counter = TokenCounter()
    given_entry = Entry(message=message, tokens=counter.message(message, "gpt-4o"), ref=REF, position=0)
    shortened = edit.shorten(message, given_entry)
    assert shortened is not None
    assert counter.message(shortened.message, "gpt-4o") <= edit.over_tokens
    assert edit.shorten(shortened.message, given_entry) is None
    assert shortened.message.text.count("compacted; full output") == 1
    return list(shortened.message.texts)


def test_the_longest_parts_are_cut_and_the_last_of_them_says_so() -> None:
    for texts in (("exit code 1", PROSE), (PROSE, "exit code 1"), ("", "exit code 1", PROSE, "done")):
        parts = in_parts(*texts)
        assert [part == text for part, text in zip(parts, texts, strict=True)] == [text != PROSE for text in texts]
        assert len("".join(parts)) > 400
    first, short, last = in_parts(PROSE, "exit code 1", PROSE)
    assert "characters omitted" in first
    assert "compacted" not in first
    assert short == "exit code 1"
    assert last.endswith(f"\n[... compacted; full output: {REF} ...]")


def test_of_very_many_parts_those_at_both_ends_stay() -> None:
    texts = [
        f"Part {at} says something that only a reader of this part of it would ever need. " * 2 for at in range(50)
    ]
    parts = in_parts(*texts)
    assert 4 <= len(parts) < 20
    assert parts[0].startswith("Part 0 ")
    assert parts[-1].startswith("Part 49 ")
    assert sum("parts omitted" in part for part in parts) == 1
    assert "say 7" in in_parts(*(f"say {at}" for at in range(2000)))


def test_a_part_that_is_hardly_longer_than_its_share_stays_whole() -> None:
    made = _ends_of(["word " * 200, "b" * 205], 400, 10)
    assert list(made) == [0]
    assert "characters omitted" in str(made[0])


def test_lines_counted_in_one_part_are_told_where_the_last_is_cut() -> None:
    log = "".join(f"GET /items/{at} 200\n" for at in range(60))
    counted, cut = in_parts(log, PROSE)
    assert "GET /items/0 200" in counted
    assert "compacted" not in counted
    assert "compacted" in cut
    cut, counted = in_parts(PROSE, log)
    assert "compacted" not in cut
    assert "compacted" in counted


def test_an_image_stays_where_parts_of_text_are_left_out() -> None:
    content = [{"type": "text", "text": f"{at}: {PROSE[:150]}"} for at in range(40)]
    made = compacted(STRICT, [*content[:20], IMAGE, *content[20:]])
    assert made is not None
    assert IMAGE in made.data["content"]
    assert len(made.data["content"]) < 12


@given(
    st.lists(st.text(max_size=300) | st.integers(0, 2000).map(lambda size: PROSE[:size]), max_size=9),
    st.integers(0, 300),
)
@settings(max_examples=100)
def test_no_part_gets_longer_but_by_the_line_that_says_so(texts: list[str], limit: int) -> None:
    message = result([{"type": "text", "text": text} for text in texts])
    edit = CompactToolOutput(over_tokens=limit, strict=True)
    shortened = edit.shorten(message, entry(message))
    if shortened is not None:
        assert len(shortened.message.text.encode()) < len(message.text.encode())
        assert edit.shorten(shortened.message, entry(message)) is None
        if len(shortened.message.texts) == len(texts) and any(map(str.strip, shortened.message.texts)):
            for part, text in zip(shortened.message.texts, texts, strict=True):
                assert part == text or len(part.encode()) < len(text.encode())


def test_what_arrived_is_weighed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[int] = []

    def counted(text: str) -> int:
        weighed.append(len(text))
        return weight(text)

    monkeypatch.setattr("proxy.trimming.edits.compact_tool_output.weight", counted)
    text = "\n".join(f"{at} {PROSE[at : at + 60]}" for at in range(9000))
    compacted(STRICT, text)
    assert sum(weighed) < 2.1 * len(text)


def test_no_limit_is_too_small_to_end() -> None:
    message = result(PROSE)
    shortened = CompactToolOutput(over_tokens=0, strict=True).shorten(message, entry(message))
    assert shortened is not None
    assert len(shortened.message.text) < 100


def test_a_trim_and_an_arrival_both_know_what_was_asked_for() -> None:
    function = {"name": "find", "arguments": '{"sort_by": "rating"}'}
    asking = ChatMessage.of(
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    )
    log = (ChatMessage.of({"role": "user", "content": "hi"}), asking, result(records(30)))
    entries = [replace(entry(message), position=at, tokens=len(message.raw) // 4) for at, message in enumerate(log)]
    context = PlanningContext(count=lambda message: len(message.raw) // 4, fixed_tokens=0)
    for edits in ({"on_arrival": [STRICT]}, {"edits": [STRICT], "trigger": {"every_request": True}}):
        policy = Policy.model_validate({**edits, "keep": {"rounds": 0, "spans": 0}})
        later = [*entries, replace(entry(log[0]), position=3)] if "edits" in edits else entries
        view = plan(later, policy, "strict", context).view
        assert '"rating":4.5' in view[2].text, edits
