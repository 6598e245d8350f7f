"""Entries of a Responses conversation: read, rewritten, recognised."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.dialects import Message, ReasoningMode, dialect_named
from proxy.dialects.responses.canonical import canonical
from proxy.dialects.responses.items import Item, turn_of
from proxy.dialects.responses.request import parse_responses_request

API = dialect_named("responses")
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "status": None}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
CUSTOM = {"type": "custom_tool_call", "call_id": "c2", "name": "draw", "input": "a cat"}
SHELL = {"type": "local_shell_call", "call_id": "c3", "action": {"command": ["ls"]}}
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a cat"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}


def said(*texts: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": "assistant", "content": parts, **fields}


def turn(*items: dict[str, Any]) -> Item:
    return Item(turn_of([orjson.dumps(item) for item in items]))


def item(data: dict[str, Any]) -> Item:
    return Item(orjson.dumps(data))


def user(*parts: Any) -> Item:
    return item({"role": "user", "content": list(parts)})


def entries(*items: Any) -> tuple[Message, ...]:
    return parse_responses_request(orjson.dumps({"model": "m", "input": list(items)})).messages


TURN = turn(REASONING, said("I look.", id="msg_1"), CALL, CUSTOM)


# -------------------------------------------------------------------------------------------- reading


def test_a_turn_is_read_as_one_reply() -> None:
    assert (TURN.role, TURN.text, TURN.is_result, TURN.answers) == ("assistant", "I look.", False, None)
    assert TURN.is_turn
    assert [(call.id, call.name, call.arguments, call.custom) for call in TURN.calls] == [
        ("c1", "look", '{"at": 1}', False),
        ("c2", "draw", "a cat", True),
    ]
    assert [orjson.loads(raw)["type"] for raw in TURN.listed] == [
        "reasoning",
        "message",
        "function_call",
        CUSTOM["type"],
    ]
    assert (TURN.has_content, turn(REASONING, CALL).has_content, turn(SEARCH).has_content) == (True, False, True)
    assert TURN.plain_text == "I look."
    assert TURN.ids == ("c1", "c2", "msg_1")
    assert (item(OUTPUT).ids, item({"id": "msg_1"}).ids) == (("c1",), ("msg_1",))
    assert list(TURN.all_texts()) == ["I look.", "look", '{"at": 1}', "draw", "a cat"]
    assert TURN.countable().texts == ("I look.", "look", '{"at": 1}', "draw", "a cat")
    assert TURN.countable().reasoning == "hm"
    assert TURN.readable() == 'I look.\n[call of look: {"at": 1}]\n[call of draw: a cat]'


def test_a_turn_of_several_texts_may_be_an_earlier_text_and_the_reply() -> None:
    for whole in (turn(REASONING, said("one"), CALL), user("one", "two"), item(said("one", "two"))):
        assert not whole.parted
    assert turn(said("one")).continued(turn(said("two"))) is None
    texts = [said(f"{number}") for number in range(7)]
    parted = turn(*texts).parted
    assert [earlier.text for earlier, _ in parted] == ["012", "0123", "01234", "012345"]
    assert [reply.text for _, reply in parted] == ["3456", "456", "56", "6"]


def test_calls_of_every_kind_are_read() -> None:
    odd = {"type": "function_call", "call_id": 1, "name": 2, "arguments": {"a": 1}}
    bare = {"type": "function_call"}
    approval = {"type": "mcp_approval_request", "id": "mcpr_1", "name": "n", "arguments": "{}"}
    found = turn(SHELL, odd, bare, approval).calls
    assert [(call.id, call.name, call.arguments) for call in found] == [
        ("c3", "local_shell_call", '{"command":["ls"]}'),
        ("", "", '{"a":1}'),
        ("", "", ""),
        ("mcpr_1", "mcp_approval_request", ""),
    ]
    answer = item({"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True})
    assert (answer.role, answer.answers) == ("tool", "mcpr_1")


def test_results_and_other_items_are_read() -> None:
    output = item(OUTPUT)
    assert (output.role, output.text, output.answers, output.is_result) == ("tool", "a cat", "c1", True)
    assert output.texts == ("a cat",)
    silent = item({"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}})
    assert (silent.text, silent.plain_text, silent.attachments[0].description) == ("", None, "no address")
    other = item({"type": "additional_tools", "tools": []})
    assert (other.role, other.text, other.name, other.is_lasting) == ("", "", "", True)
    assert other.readable() == '[additional_tools: {"tools":[]}]'
    assert other.countable().texts == ('{"type":"additional_tools","tools":[]}',)
    (compaction,) = entries({"type": "compaction", "encrypted_content": "x"})
    assert (compaction.role, compaction.is_lasting, compaction.has_content) == ("assistant", True, True)
    assert compaction.ids == ("x",)
    assert turn({"type": "compaction", "id": "cmp_1", "encrypted_content": "x"}, CALL).ids == ("c1", "cmp_1", "x")
    assert not item({"role": "user", "content": 'a "compaction"'}).is_lasting
    assert not user({"type": "compaction"}).is_lasting
    assert (item({"role": "user", "content": None}).texts, item({"role": "user", "name": "Al"}).name) == (("",), "Al")
    assert item({"id": "msg_1"}).kind == "item_reference"
    assert list(item({"role": "user", "content": "hi", "name": "Al"}).all_texts()) == ["hi", "Al"]


def test_parts_that_hold_no_text_are_told() -> None:
    file = {"type": "input_file", "filename": "a.pdf"}
    mixed = user({"type": "input_text", "text": "See"}, IMAGE, file, {"image": 1}, "odd")
    assert [(each.place, each.kind, each.is_image) for each in mixed.attachments] == [
        (1, "input_image", True),
        (2, "input_file", False),
        (3, "part", False),
    ]
    assert [each.description for each in mixed.attachments] == ["image/png, 3 bytes", "a.pdf", "no address"]
    assert (mixed.countable().media, mixed.countable().small_images) == (2, 1)
    assert mixed.readable().startswith("Seeodd\n[input_image: image/png, 3 bytes; only text can be shown here]")
    assert mixed.plain_text is None
    assert mixed.with_notes({1: "(gone)"}).texts == ("See", "(gone)", "", "", "odd")
    long = user({"type": "input_image", "image_url": "https://example.org/" + "x" * 900})
    assert long.attachments[0].description.endswith("x…")
    refused = turn({**said(), "content": [{"type": "refusal", "refusal": "No."}]})
    assert (refused.readable(), refused.has_content, refused.plain_text) == ("No.", True, None)
    assert refused.countable().texts == ('{"type":"refusal","refusal":"No."}',)
    assert list(refused.all_texts()) == ["", "No."]


def test_what_text_calls_and_reasoning_tell_is_plain() -> None:
    assert TURN.is_plain
    assert not turn(REASONING, SEARCH, CALL).is_plain
    assert not turn({**said(), "content": [{"type": "refusal", "refusal": "No."}]}, CALL).is_plain
    assert item(OUTPUT).is_plain
    assert not item({**OUTPUT, "output": [IMAGE]}).is_plain


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "shell_call_output", "output": [{"stdout": "a", "outcome": {"type": "exit", "exit_code": 3}}]},
        {"type": "apply_patch_call_output", "status": "failed", "output": "no such file"},
        {"type": "tool_search_output", "tools": [{"type": "function", "name": "late"}]},
    ],
)
def test_a_result_that_says_more_than_its_text_is_not_plain(fields: dict[str, Any]) -> None:
    assert not item({"call_id": "c1", **fields}).is_plain


def test_our_own_fields_are_read_and_left_out() -> None:
    message = item({"role": "user", "content": "hi", "agent": "planner", "is_internal": True})
    assert (message.agent, message.is_internal) == ("planner", True)
    assert message.without_own_fields() == item({"role": "user", "content": "hi"})
    made = turn(REASONING, {**CALL, "agent": "planner"})
    assert (made.agent, made.is_internal, made.without_own_fields()) == ("planner", False, turn(REASONING, CALL))
    assert entries({"role": "user", "content": "hi"})[0].own_fields == ()


def test_broken_turns_of_an_import_are_read() -> None:
    assert Item(b'{"type":"turn","items":[1,{"type":"reasoning"}]}').items == [{"type": "reasoning"}]
    assert Item(b'{"type":"turn","items":[1,{"type":"reasoning"}]}').listed == (b'{"type":"reasoning"}',)
    assert Item(b'{"type":"turn"}').listed == ()
    assert Item(b'{"type":"turn"}').is_turn


def test_what_no_parser_takes_again_is_mended() -> None:
    assert Item.as_stored({"type": "message", "role": "user", "content": "\ud83d"}).text == "\ufffd"
    assert Item.as_stored({"role": "user"}) == item({"role": "user"})


# ------------------------------------------------------------------------------------------ rewriting


def test_the_text_of_an_entry_is_replaced() -> None:
    assert item(OUTPUT).with_text("gone").data == {**OUTPUT, "output": "gone"}
    assert item({"role": "user", "content": "hi"}).with_text("ho").data == {"role": "user", "content": "ho"}
    changed = turn(REASONING, said("a"), CALL, said("b")).with_text("c")
    assert (changed.text, [each["type"] for each in changed.items]) == ("c", ["reasoning", "message", "function_call"])
    added = turn(REASONING, CALL).with_text("c")
    assert [each["type"] for each in added.items] == ["reasoning", "message", "function_call"]
    assert turn(CALL).with_text("c").items[0]["type"] == "message"


def test_the_content_of_another_entry_is_taken_over() -> None:
    other = turn(said("new"), CUSTOM)
    assert [each["type"] for each in turn(said("old"), CALL).with_content_of(other).items] == [
        "message",
        "function_call",
    ]
    assert turn(said("old"), CALL).with_content_of(other).text == "new"
    assert item(OUTPUT).with_content_of(item({**OUTPUT, "output": "new"})).text == "new"


def test_texts_are_replaced_part_by_part() -> None:
    mixed = user({"type": "input_text", "text": "a", "x": 1}, IMAGE, {"type": "input_text", "text": "b"})
    changed = mixed.with_texts(["c", "kept", None])
    assert changed.data["content"] == [{"type": "input_text", "text": "c", "x": 1}, IMAGE]
    assert item(OUTPUT).with_texts(["gone"]).text == "gone"
    assert item(OUTPUT).with_texts([None]).text == ""
    assert turn(said("a", "b"), CALL).with_texts(["c", None]).text == "c"
    assert turn(CALL).with_texts(["c"]).text == "c"
    assert turn(CALL).with_texts([None]) == turn(CALL)


def test_text_is_appended() -> None:
    assert item({"role": "user", "content": "a"}).with_appended("b").text == "a\n\nb"
    assert item({"role": "user", "content": ""}).with_appended("b").text == "b"
    assert user(IMAGE).with_appended("b").data["content"][1] == {"type": "input_text", "text": "b"}
    assert turn(said("a")).with_appended("b").text == "ab"


def test_calls_are_left_out_with_the_reasoning_that_led_to_them_alone() -> None:
    other = {**CALL, "call_id": "c9"}
    two = turn(REASONING, CALL, {**REASONING, "id": "rs_2"}, other)
    assert [each.get("id") for each in two.with_calls({1}).items] == ["rs_2", "fc_1"]
    assert two.with_calls({0, 1}) == two
    assert two.with_calls(()).items == []
    assert two.without_reasoning() == turn(_without_id(CALL), _without_id(other))


def _without_id(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "id"}


def test_arguments_are_replaced() -> None:
    changed = turn(CALL, CUSTOM, SHELL).with_arguments(["{}", "a cat", "x"])
    assert changed == turn({**CALL, "arguments": "{}"}, CUSTOM, SHELL)
    assert changed.with_arguments(["{}"]) == changed


def test_reasoning_is_left_out_with_what_hangs_on_it() -> None:
    made = turn(SEARCH, REASONING, SEARCH, said("a", id="msg_1"), CALL).without_reasoning()
    assert made is not None
    assert [each["type"] for each in made.items] == ["web_search_call", "message", "function_call"]
    assert [each.get("id") for each in made.items] == ["ws_1", None, None]
    assert turn(REASONING).without_reasoning() is None
    plain, asked = turn(said("a", id="msg_1")), entries({"role": "user", "content": "hi"})[0]
    assert plain.without_reasoning() is plain
    assert asked.without_reasoning() is asked
    referring = turn(REASONING, {"type": "item_reference", "id": "fc_1"}).without_reasoning()
    assert referring is not None
    assert referring.items == [{"type": "item_reference", "id": "fc_1"}]


@pytest.mark.parametrize(
    ("call", "whole"),
    [
        (CALL, True),
        ({**CALL, "arguments": '{"at'}, False),
        ({**CALL, "arguments": None}, False),
        ({**CALL, "name": ""}, False),
        ({**CALL, "status": "in_progress"}, False),
        ({**CALL, "call_id": ""}, False),
        (CUSTOM, True),
        (SEARCH, True),
    ],
)
def test_calls_that_broke_off_are_left_out(call: dict[str, Any], whole: bool) -> None:
    assert (turn(said("a"), call).without_unfinished_calls().items[1:] != []) is whole


@pytest.mark.parametrize(
    ("reasoning", "partial", "kinds"),
    [("auto", False, ["reasoning", "function_call"]), ("drop", False, ["function_call"]), ("auto", True, [])],
)
def test_a_reply_takes_the_form_of_a_request(reasoning: ReasoningMode, partial: bool, kinds: list[str]) -> None:
    reply = turn(REASONING, {**CALL, "status": "in_progress"})
    made = reply.as_request(reasoning, partial=partial)
    assert [each["type"] for each in made.items] == kinds
    assert "status" not in (made.items or [{}])[0] or reasoning == "drop"
    assert turn(REASONING).as_request("drop", partial=False).text == ""


def test_what_rounds_said_is_left_out_of_a_reply_that_goes_without_ids() -> None:
    """As clients send it that store nothing at the provider."""
    first, second = ({**REASONING, "id": f"rs_{n}", "encrypted_content": f"sealed {n}"} for n in (1, 2))
    shown = [{name: value for name, value in each.items() if name != "id"} for each in (first, second)]
    rest = turn(*shown, said("Found.")).behind_rounds([turn(first, CALL), item(OUTPUT)])
    assert rest == turn(shown[1], said("Found."))


# ---------------------------------------------------------------------------------------- recognising


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "hi"}, {"type": "message", "role": "user", "content": "hi", "id": "msg_1"}),
        ({"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}),
        ({"role": "developer", "content": "hi"}, {"role": "system", "content": "hi", "agent": "a"}),
        (OUTPUT, {**OUTPUT, "output": [{"type": "input_text", "text": "a cat"}], "status": "completed"}),
        ({"role": "user", "content": [IMAGE]}, {"role": "user", "content": [{**IMAGE, "prompt_cache_breakpoint": {}}]}),
        ({"id": "msg_1"}, {"type": "item_reference", "id": "msg_1"}),
        ({"role": "user", "content": [1, IMAGE]}, {"role": "user", "content": [1, {**IMAGE, "file_id": None}]}),
    ],
)
def test_items_that_say_the_same_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(item(one)) == canonical(item(other))


@pytest.mark.parametrize(
    "other",
    [
        turn(said("I look."), CALL, CUSTOM),
        turn(CALL, CUSTOM, said(" I ", "look.\n")),
        turn(SEARCH, {"role": "assistant", "content": "I look."}, {**CALL, "arguments": '{"at":1}'}, CUSTOM),
    ],
)
def test_turns_that_say_the_same_are_the_same(other: Item) -> None:
    assert API.canonical(other) == API.canonical(TURN)


def test_a_turn_that_is_an_object_is_the_same_however_it_is_written() -> None:
    """VoltAgent sends parsed replies back like this."""
    replies = said('{"b": 1.0, "a": 2}'), said('{"a":2,"b":1}'), said("I see.")
    written, again, plain = [entries(reply)[0] for reply in replies]
    assert API.canonical(written) == API.canonical(again)
    assert API.earlier_canonicals(written) != API.earlier_canonicals(again)
    assert API.earlier_canonicals(plain) == (API.canonical(plain),)
    assert [each.facts is not None and each.facts.reshaped for each in (written, plain)] == [True, False]


def test_entries_that_say_other_things_differ() -> None:
    many = [
        TURN,
        turn(said("I look."), CALL),
        turn(REASONING),
        turn(SEARCH),
        turn({"type": "item_reference", "id": "a"}),
        turn({"type": "item_reference", "id": "b"}),
        turn({**said(), "content": [{"type": "refusal", "refusal": "I look."}]}),
        item(OUTPUT),
        user({"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}),
        user({"type": "input_text", "text": "ab"}),
        item({"type": "additional_tools", "role": "system", "tools": []}),
    ]
    assert len({API.canonical(each) for each in many}) == len(many)
