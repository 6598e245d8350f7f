"""`clear_tool_results`: of older tool results a stub stays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.conversation import rounds, spans
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming.draft import Draft
from proxy.trimming.edits.clear_tool_results import (
    ClearToolResults,
    digest_in,
    shorter_arguments,
    shorter_text,
    stub_of,
)
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from tests.trimming.edits.golden import Case, cases
from tests.trimming.notation import KNOWN, entries

# ------------------------------------------------------------------------------ clear_tool_results

LONG = "buildDir and src/main.c are named in this text, which is long enough to be cleared, " * 3


@pytest.mark.parametrize("case", cases("clear_tool_results"), ids=str)
def test_golden(case: Case) -> None:
    case.check()


def called(*arguments: Any, form: str = "function", text: str = "") -> Message:
    inner = "arguments" if form == "function" else "input"
    calls = [{"id": f"c{at}", "type": form, form: {"name": "write", inner: each}} for at, each in enumerate(arguments)]
    return ChatMessage.of({"role": "assistant", "content": text, "tool_calls": calls})


def result(content: Any, at: int = 0) -> Message:
    return ChatMessage.of({"role": "tool", "tool_call_id": f"c{at}", "content": content})


def cost(message: Message) -> int:
    return len(message.raw)


def draft(*log: Message) -> Draft:
    made = [replace(entry, tokens=cost(entry.message)) for entry in entries(log)]
    return Draft(
        entries=tuple(made),
        messages=log,
        tokens=tuple(map(cost, log)),
        spans=spans(log),
        rounds=rounds(log),
        protected=frozenset(),
        count=cost,
    )


def cleared(given: Draft, **settings: Any) -> dict[int, Message | None]:
    edit = ClearToolResults.model_validate({"type": "clear_tool_results", "keep": 0, **settings})
    return {change.position: change.message for change in edit.apply(given)}


def text_at(changed: dict[int, Message | None], position: int) -> str:
    message = changed[position]
    assert message is not None
    return message.text


def test_the_stub_repeats_the_arguments() -> None:
    stub = text_at(cleared(draft(called('{"path": "notes.txt"}'), result(LONG))), 1)
    assert stub.startswith('[cleared: write {"path": "notes.txt"}; ')
    assert stub.endswith("; ref=ref_1; buildDir,src/main.c]")


def test_parts_of_a_result_become_one_stub() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400}}
    stub = text_at(cleared(draft(called("{}"), result([{"type": "text", "text": LONG}, image]))), 1)
    assert "buildDir" in stub


def test_a_stub_of_an_earlier_move_keeps_its_bytes() -> None:
    before = draft(called("{}", "{}"), result(LONG), result("HAT136 HAT137 " + LONG, 1))
    first = cleared(before, keep=1)
    again = cleared(
        replace(
            before,
            messages=tuple(first.get(at, message) for at, message in enumerate(before.messages)),
            made_by=((), ("clear_tool_results",), ()),
        )
    )
    assert list(first) == [1]
    assert list(again) == [2]
    assert "HAT137" in text_at(again, 2)
    assert "buildDir" not in text_at(again, 2)


def test_a_stub_that_another_edit_removed_is_nothing_to_look_at() -> None:
    before = draft(called("{}", "{}"), result(LONG), result(LONG, 1))
    gone = replace(
        before, messages=(before.messages[0], None, before.messages[2]), made_by=((), ("clear_tool_results",), ())
    )
    assert list(cleared(gone)) == [2]


def test_what_one_digest_leaves_over_a_later_one_may_take() -> None:
    ids = json.dumps([f"key-{at:04d}" for at in range(400)])
    sizes = [len(text_at(cleared(draft(called("{}"), result(ids)), digest_chars=100), 1))]
    after = cleared(draft(called("{}", "{}"), result("no value in it, " * 20), result(ids, 1)), digest_chars=100)
    sizes.append(len(text_at(after, 2)))
    assert 90 < sizes[1] - sizes[0] <= 100


def test_a_digest_has_a_limit_whatever_is_left_over() -> None:
    ids = json.dumps([f"key-{at:04d}" for at in range(400)])
    log = [called(*["{}"] * 21), *(result("no value in it, " * 20, at) for at in range(20)), result(ids, 20)]
    digest = text_at(cleared(draft(*log), digest_chars=100), 21).partition("ref=ref_21; ")[2]
    assert 500 < len(digest) <= 601


NOTHING = "no value in it, " * 20


def keys(at: int) -> str:
    """Return a result that is full of ids, which stand in no other one."""
    return json.dumps([f"key-{at:02d}-{each:03d}" for each in range(120)])


def sizes(changed: Mapping[int, Message | None]) -> list[int]:
    """Return the characters of the digest in each stub."""
    return [len(digest_in(message.text, f"ref_{at}")) for at, message in changed.items() if message is not None]


def test_the_first_digest_may_take_characters_in_advance_and_the_others_make_up_for_it() -> None:
    log = [called(*["{}"] * 9), *(result(keys(at), at) for at in range(9))]
    first, *others = sizes(cleared(draft(*log), digest_chars=100))
    # What it has of its own, and that of three more.
    assert 380 < first <= 400
    # Each of the others has its own, and the few characters that no value of one before it fitted into.
    assert len(others) == 8
    assert all(80 < each < 120 for each in others)
    assert first + sum(others) <= (9 + 3) * 100


def test_what_was_taken_in_advance_is_not_taken_again_at_the_next_move() -> None:
    before = draft(called(*["{}"] * 4), *(result(keys(at), at) for at in range(4)))
    first = cleared(before, digest_chars=100, keep=3)
    after = replace(
        before,
        messages=tuple(first.get(at, message) for at, message in enumerate(before.messages)),
        made_by=((), ("clear_tool_results",), (), (), ()),
    )
    again = cleared(after, digest_chars=100)
    assert list(again) == [2, 3, 4]
    assert 380 < sizes(first)[0] <= 400
    assert all(80 < each < 120 for each in sizes(again))
    assert sum(sizes(first) + sizes(again)) <= (4 + 3) * 100


@pytest.mark.parametrize("digest_chars", [20, 100, 300])
@pytest.mark.parametrize(
    "full",
    [[True] * 30, [False] * 4 + [True] * 26, [True, True, False] * 10, [True] * 10 + [False] * 10 + [True] * 10],
    ids=["each", "all but the first", "two of three", "the first and the last"],
)
def test_on_average_digests_have_so_many_characters(full: Sequence[bool], digest_chars: int) -> None:
    texts = [keys(at) if each else NOTHING for at, each in enumerate(full)]
    log = [called(*["{}"] * len(full)), *(result(text, at) for at, text in enumerate(texts))]
    changed = cleared(draft(*log), digest_chars=digest_chars)
    found = sizes(changed)
    assert len(found) == len(full)
    # Whenever it ends, no more than the advance was taken beyond what there was.
    assert all(sum(found[:stop]) <= (stop + 3) * digest_chars for stop in range(1, len(full) + 1))
    assert max(found) <= 6 * digest_chars
    # What one leaves over is used, though a digest ends with the last value that fits.
    assert sum(found) > 0.8 * len(full) * digest_chars


def test_a_digest_that_would_be_too_dear_is_made_shorter() -> None:
    text = " ".join(f"K{at}" for at in range(100, 130))
    changed = cleared(draft(called("{}"), result(text)), digest_chars=300)
    stub = text_at(changed, 1)
    assert len(stub) < len(text)
    assert "; K" in stub


def test_a_result_that_no_stub_is_cheaper_than_stays_whatever_is_left_over() -> None:
    short = "K100 K101 K102 K103"
    log = [called("{}", "{}", "{}"), result(NOTHING * 9), result(short, 1), result(keys(2), 2)]
    for digest_chars in (0, 20, 300, 3000):
        assert list(cleared(draft(*log), digest_chars=digest_chars)) == [1, 3]


def test_a_second_move_changes_nothing_where_nothing_is_new() -> None:
    policy = Policy.model_validate(
        {
            "trigger": {"every_request": True},
            "keep": {"rounds": 0, "spans": 1},
            "edits": [{"type": "clear_tool_results", "keep": 0}],
        }
    )
    texts = [" ".join(f"K{at}-{each}" for each in range(at)) for at in range(1, 40)]
    log = [each for text in texts for each in (called("{}"), result(text))] + [called("{}"), result("x")]
    first = plan(entries(log), policy, "p", KNOWN)
    again = plan(entries(log), policy, "p", KNOWN, first.cut)
    assert first.made
    assert again.made == ()
    assert again.view == first.view


def test_arguments_of_a_call_go_with_its_last_result() -> None:
    arguments = json.dumps({"path": "src/a.c", "content": "int drawChart(void); " * 20})
    log = draft(called(arguments, "{}", text="I write."), result(LONG), result(LONG, 1))
    assert 0 not in cleared(log, clear_inputs=True, keep=1)
    changed = cleared(log, clear_inputs=True)
    block = changed[0]
    assert block is not None
    assert block.text == "I write."
    assert json.loads(block.calls[0].arguments) == {
        "path": "src/a.c",
        "content": "[cleared: 420 characters; drawChart]",
    }
    assert 0 not in cleared(log)


def test_short_arguments_stay() -> None:
    assert 0 not in cleared(draft(called('{"path": "a"}'), result(LONG)), clear_inputs=True)


def test_arguments_in_every_form() -> None:
    custom = cleared(draft(called(LONG, form="custom"), result("word " * 60)), clear_inputs=True)[0]
    assert custom is not None
    assert custom.calls[0].arguments == "[cleared: 252 characters; buildDir,src/main.c]"
    function = {"name": "write", "arguments": json.dumps({"content": LONG})}
    older = ChatMessage.of({"role": "assistant", "content": None, "function_call": function})
    answer = ChatMessage.of({"role": "function", "name": "write", "content": LONG})
    changed = cleared(draft(older, answer), clear_inputs=True)[0]
    assert changed is not None
    assert json.loads(changed.data["function_call"]["arguments"])["content"].startswith("[cleared: ")


@pytest.mark.parametrize("odd", [None, 5, {"id": "x"}, {"id": "x", "function": {"arguments": 7}}])
def test_calls_that_are_none_stay(odd: Any) -> None:
    block = called(json.dumps({"content": LONG}))
    odder = block.replacing("tool_calls", [*block.data["tool_calls"], odd])
    changed = cleared(draft(odder, result(LONG)), clear_inputs=True)[0]
    assert changed is not None
    assert changed.data["tool_calls"][1] == odd


def test_a_result_without_its_call_has_no_arguments_to_clear() -> None:
    block = called("{}")
    alone = replace(draft(block, result(LONG)), messages=(None, result(LONG)))
    assert list(cleared(alone, clear_inputs=True)) == [1]
    assert "[cleared: a tool; " in text_at(cleared(draft(result(LONG)), clear_inputs=True), 0)


def test_between_two_moves_no_byte_of_a_stub_changes() -> None:
    policy = Policy.model_validate(
        {
            "trigger": {"every_request": True},
            "keep": {"rounds": 0},
            "edits": [{"type": "clear_tool_results", "keep": 1}],
        }
    )
    log = [each for at in range(12) for each in (called('{"n": 10}'), result(f"HAT{100 + at} {LONG}"))]
    cut = None
    sent: list[bytes] = []
    for stop in range(2, len(log) + 1, 2):
        made = plan(entries(log[:stop]), policy, "p", KNOWN, cut)
        cut = made.cut
        assert [message.raw for message in made.view[: len(sent)]] == sent
        sent = [message.raw for message in made.view[:-2]]
    assert sum(b"[cleared: " in raw for raw in sent) == len(sent) // 2


# -------------------------------------------------------------------------------------------- stub


@pytest.mark.parametrize(
    ("tool", "arguments", "digest", "expected"),
    [
        ("read", '{"path": "a.c"}', "main", '[cleared: read {"path": "a.c"}; 42 tokens; ref=r1; main]'),
        ("read", "{}", "", "[cleared: read; 42 tokens; ref=r1]"),
        ("", "", "", "[cleared: a tool; 42 tokens; ref=r1]"),
        ("two\nlines", '{"a":\n  1}', "", '[cleared: two lines {"a": 1}; 42 tokens; ref=r1]'),
    ],
)
def test_a_stub_and_the_digest_in_it(tool: str, arguments: str, digest: str, expected: str) -> None:
    stub = stub_of(tool, arguments, 42, "r1", digest)
    assert stub == expected
    assert digest_in(stub, "r1") == digest


@pytest.mark.parametrize("arguments", ["x" * 81, " " * 400 + "x", "x " * 200])
def test_long_arguments_are_cut_and_say_so(arguments: str) -> None:
    said = stub_of("t", arguments, 1, "r", "").removeprefix("[cleared: t ").removesuffix("; 1 tokens; ref=r]")
    assert said.endswith("…")
    assert len(said) <= 80


def test_arguments_stay_json_and_keep_what_is_short() -> None:
    document = {"path": "src/a.c", "line": 12345678901234567890, "x": 1.5, "text": "see buildDir in K77. " * 9}
    shorter = json.loads(shorter_arguments(json.dumps(document), 60, frozenset()))
    assert {**shorter, "text": document["text"]} == document
    assert shorter["text"] == "[cleared: 189 characters; K77 buildDir]".replace("K77 buildDir", "buildDir,K77")


def test_long_lists_and_deep_documents_are_cut() -> None:
    document = {"rows": list(range(25)), "few": [1], "deep": json.loads("[" * 40 + "]" * 40)}
    shorter = json.loads(shorter_arguments(json.dumps(document), 0, frozenset()))
    assert shorter["rows"] == [*range(10), "[cleared: 15 more]"]
    assert shorter["few"] == [1]
    assert "[cleared]" in json.dumps(shorter["deep"])


@pytest.mark.parametrize("arguments", ["[" * 100_000, "no json " * 20, json.dumps(["x"] * 99), '{"a": "' + "x" * 99])
def test_what_is_no_json_object_becomes_one(arguments: str) -> None:
    assert list(json.loads(shorter_arguments(arguments, 0, frozenset()))) == ["cleared"]


@pytest.mark.parametrize(
    "arguments", ["", "no json", "[1, 2]", '{"a": NaN}', '{ "a" : 1.10 }', "[" * 20, json.dumps({"a": ["x"] * 12})]
)
def test_what_would_not_get_shorter_stays(arguments: str) -> None:
    assert shorter_arguments(arguments, 0, frozenset()) == arguments


def test_what_stays_of_arguments_is_as_it_was_written() -> None:
    kept = r'"a":1e400,"b":1.10,"c":12345678901234567.25,"k":1,"k":2,"half":"abc\ud83d","n":NaN,"z":null'
    shorter = shorter_arguments("{" + kept + ',"text":"' + "x y " * 50 + '"}', 0, frozenset())
    assert shorter == "{" + kept + ',"text":"[cleared: 200 characters]"}'


def test_half_an_emoji_in_a_digest_stays_an_escape() -> None:
    shorter = shorter_arguments(r'{"text":"Error: K77\ud83d; %s"}' % ("see x " * 50), 90, frozenset())
    assert "\\ud83d" in shorter
    shorter.encode()


def test_a_short_text_stays() -> None:
    assert shorter_text("short", 60, frozenset()) == "short"
    assert shorter_text("x" * 81, 60, frozenset()) == "[cleared: 81 characters]"
