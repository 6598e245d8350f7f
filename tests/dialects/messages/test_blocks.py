"""One message of the Messages API: what is read of its blocks, and what rewriting leaves of them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.conversation import content_hash
from proxy.dialects import Call
from proxy.dialects.messages import DIALECT as MESSAGES
from proxy.dialects.messages.message import UNFINISHED, MessagesMessage

MARK = {"cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
LINK = {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}}
THOUGHT = {"type": "thinking", "thinking": "let me see", "signature": "sig"}
HIDDEN = {"type": "redacted_thinking", "data": "opaque"}
SERVER = [
    {"type": "server_tool_use", "id": "srv", "name": "web_search", "input": {"query": "cats"}},
    {"type": "web_search_tool_result", "tool_use_id": "srv", "content": [{"type": "web_search_result", "url": "u"}]},
]


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def use(name: str, identity: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": name, "input": given}


def result(identity: str, content: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identity, "content": content, **more}


def user(*blocks: Any, **fields: Any) -> MessagesMessage:
    return MessagesMessage.of({"role": "user", "content": list(blocks), **fields})


def reply(*blocks: Any) -> MessagesMessage:
    return MessagesMessage.of({"role": "assistant", "content": list(blocks)})


MIXED = user(result("a", "first"), result("b", [text("sec"), text("ond"), IMAGE]), text("and go on"), LINK)


# ------------------------------------------------------------------------------------------- reading


def test_what_text_calls_and_thinking_tell_is_plain() -> None:
    assert reply(THOUGHT, text("so"), use("look", "a")).is_plain
    assert not reply(*SERVER, use("look", "a")).is_plain
    assert user(result("a", [text("sec"), text("ond")])).is_plain
    assert user(result("a", is_error=False)).is_plain
    assert not user(result("a", is_error=True)).is_plain
    assert not user(result("a", [IMAGE])).is_plain
    assert not MIXED.is_plain


def test_a_user_message_with_results_belongs_to_the_calls() -> None:
    assert (MIXED.role, MIXED.is_result, MIXED.result_count) == ("tool", True, 2)
    assert (MIXED.answers, MIXED.answered) == ("a", ("a", "b"))
    assert MIXED.answers_call(Call(id="b", name="", arguments=""))
    assert not MIXED.answers_call(Call(id="", name="", arguments=""))
    assert MIXED.beside == "and go on"
    assert MIXED.text == "first\n\nsecond\n\nand go on"
    assert MIXED.texts == ("first", "second", "and go on", "")
    assert MIXED.plain_text is None
    first, second = MIXED.results
    assert (first.text, first.plain_text, first.answers) == ("first", "first", "a")
    assert (second.text, second.texts, second.plain_text) == ("second", ("sec", "ond", ""), None)
    assert user(text("hi")).beside == ""
    assert user(text("hi")).results == ()
    assert (user(text("hi")).answers, user(text("hi")).result_count) == (None, 0)


def test_one_result_alone_is_the_very_message() -> None:
    alone = user(result("a", "ok"))
    assert alone.results == (alone,)
    assert alone.results[0] is alone
    assert user(result("a")).name == ""
    assert user({"type": "tool_result", "tool_use_id": 7}).answered == ()


def test_a_content_that_is_a_string_is_one_text() -> None:
    plain = MessagesMessage.of({"role": "user", "content": "hi"})
    assert (plain.text, plain.texts, plain.plain_text) == ("hi", ("hi",), "hi")
    assert MessagesMessage.of({"role": "user"}).text == ""
    assert MessagesMessage.of({}).role == ""


def test_calls_are_read() -> None:
    message = reply(THOUGHT, text("I look."), use("look", "a", at=1), *SERVER, {"type": "tool_use", "input": "{"})
    assert message.calls == (Call(id="a", name="look", arguments='{"at":1}'), Call(id="", name="", arguments="{"))
    assert reply({"type": "tool_use"}).calls == (Call(id="", name="", arguments=""),)
    assert user(text("x")).calls == ()
    assert (message.text, message.plain_text) == ("I look.", None)
    assert message.has_content
    assert not reply(THOUGHT, use("look", "a"), text(" ")).has_content
    assert reply(*SERVER).has_content


def test_attachments_are_described() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "four"}}
    upload = {"type": "container_upload", "file_id": "f_1"}
    found = user(result("a", [text("x"), IMAGE]), document, LINK, upload, {"type": "image"}).attachments
    assert [(each.place, each.kind, each.is_image, each.description) for each in found] == [
        (1, "image", True, "image/png, 3 bytes"),
        (2, "document", False, "text/plain, 4 bytes"),
        (3, "image", True, "https://example.org/cat.png"),
        (4, "container_upload", False, "f_1"),
        (5, "image", True, "no address"),
    ]
    odd = {"type": "image", "source": {"data": "QUJD"}}
    assert user(odd).attachments[0].description == "unknown type, 4 bytes"
    assert len(user({"type": "image", "source": {"url": "x" * 999}}).attachments[0].description) == 201


def test_what_costs_tokens_is_counted() -> None:
    counted = reply(THOUGHT, HIDDEN, text("hi"), use("look", "a", at=1), *SERVER, 7).countable()
    assert counted.texts[:4] == ("let me see", "hi", "look", '{"at":1}')
    assert [orjson.loads(each) for each in counted.texts[4:]] == [*SERVER, 7]
    seen = MIXED.countable()
    assert (seen.texts, seen.media) == (("first", "sec", "ond", "and go on"), 2)
    assert user({"type": "tool_result", "tool_use_id": "a"}).countable().texts == ()


def test_a_message_is_readable() -> None:
    assert MIXED.readable() == (
        "first\n\nsecond\n\nand go on\n[image: image/png, 3 bytes; only text can be shown here]\n"
        "[image: https://example.org/cat.png; only text can be shown here]"
    )
    shown = reply(THOUGHT, use("look", "a", at=1), SERVER[0], 7).readable().split("\n")
    assert shown[0].startswith('[{"type":"server_tool_use"')
    assert shown[1:] == ["[7]", '[call of look: {"at":1}]']
    assert list(reply(text("hi"), use("look", "a")).all_texts()) == ["hi", "look", "{}"]
    assert list(user(text("hi"), agent="planner").all_texts()) == ["hi", "planner"]


# ----------------------------------------------------------------------------------------- rewriting


def test_single_results_are_replaced_and_left_out() -> None:
    first, second = MIXED.results
    cleared = MIXED.with_results([first.with_text("[cleared]"), second])
    assert cleared is not None
    assert cleared.data["content"][0] == result("a", "[cleared]")
    assert cleared.data["content"][1:] == MIXED.data["content"][1:]
    left = MIXED.with_results([None, None])
    assert left is not None
    assert (left.role, left.data["content"]) == ("user", [text("and go on"), LINK])
    assert user(result("a")).with_results([None]) is None


def test_texts_are_replaced() -> None:
    assert user(result("a", "x", is_error=True)).with_text("y").data["content"] == [result("a", "y", is_error=True)]
    assert MIXED.with_text("y").texts == ("y", "y", "and go on", "")
    assert user(text("x")).with_text("y").data["content"] == "y"
    spoken = reply(THOUGHT, text("x"), use("look", "a"))
    assert spoken.with_text("y").data["content"] == [THOUGHT, text("y"), use("look", "a")]
    assert spoken.with_text("").data["content"] == [THOUGHT, use("look", "a")]
    assert spoken.with_content_of(user(text("z"))).data["content"] == [text("z")]
    parts = user(result("a", [text("x"), IMAGE, text("y")]))
    assert parts.with_texts(["1", "", None]).data["content"] == [result("a", [text("1"), IMAGE])]
    assert user(result("a", "x")).with_texts(["1"]).data["content"] == [result("a", "1")]
    assert user(text("x"), IMAGE).with_texts(["1", None]).data["content"] == [text("1")]
    assert MIXED.with_texts(["1", "2", "3", ""]).texts == ("1", "2", "3", "")
    assert MessagesMessage.of({"role": "user", "content": "x"}).with_texts(["1"]).data["content"] == "1"


def test_a_text_is_appended() -> None:
    assert MessagesMessage.of({"role": "system", "content": "a"}).with_appended("b").data["content"] == "a\n\nb"
    assert MessagesMessage.of({"role": "system", "content": ""}).with_appended("b").data["content"] == "b"
    assert MessagesMessage.of({"role": "system", "content": [text("a")]}).with_appended("b").texts == ("a", "b")


def test_calls_are_left_out_and_their_arguments_replaced() -> None:
    message = MessagesMessage(
        b'{"role":"assistant","content":[{"type":"text","text":"\\u0061"},'
        b'{"type":"tool_use","id":"a","name":"look","input":{"at": 1.0}},'
        b'{"type":"tool_use","id":"b","name":"look","input":{}}]}'
    )
    assert message.with_calls({0}).raw == (
        b'{"role":"assistant","content":[{"type":"text","text":"\\u0061"},'
        b'{"type":"tool_use","id":"a","name":"look","input":{"at": 1.0}}]}'
    )
    changed = message.with_arguments(['{"at":2}', "free text"])
    assert [block.get("input") for block in changed.data["content"]] == [None, {"at": 2}, {"cleared": "free text"}]
    assert message.with_arguments(["[1]", "{}"]).calls[0].arguments == '{"cleared":"[1]"}'


def test_images_become_notes() -> None:
    noted = MIXED.with_notes({3: "[gone]", 5: "[gone too]"})
    assert noted.data["content"][1] == result("b", [text("sec"), text("ond"), text("[gone]")])
    assert noted.data["content"][3] == text("[gone too]")
    plain = MessagesMessage.of({"role": "user", "content": "x"})
    assert plain.with_notes({}).text == "x"
    assert user(7, IMAGE).with_notes({1: "x"}).data["content"] == [7, text("x")]
    said = MessagesMessage.of({"role": "assistant", "content": "x"})
    assert said.with_calls(()).data["content"] == [text("x")]
    assert said.as_request("auto", partial=False) is said


def test_thinking_is_left_out() -> None:
    message = reply(THOUGHT, HIDDEN, text("hi"))
    left = message.without_reasoning()
    assert left is not None
    assert left.data["content"] == [text("hi")]
    assert left.without_reasoning() is left
    assert reply(THOUGHT).without_reasoning() is None
    about = reply(text("thinking"))
    assert about.without_reasoning() is about
    assert MIXED.without_reasoning() is MIXED


def test_a_reply_takes_the_form_of_a_request() -> None:
    broken = reply(
        {"type": "thinking", "thinking": "half"}, text(" "), text("hi"), {**use("look", "a"), UNFINISHED: '{"a'}
    )
    assert broken.as_request("auto", partial=True).data["content"] == [text("hi")]
    assert broken.without_unfinished_calls().data["content"] == broken.data["content"][:-1]
    ran = {"type": "server_tool_use", "id": "s", "name": "look", "input": {}, UNFINISHED: '{"a'}
    cut = reply(text("hi"), ran, {**use("look", "a"), UNFINISHED: '{"a'})
    assert cut.as_request("auto", partial=False).data["content"] == [text("hi"), use("look", "a")]
    whole = reply(THOUGHT, HIDDEN, text("hi"), use("look", "a"), 7)
    assert whole.as_request("auto", partial=False) is whole
    assert whole.without_unfinished_calls() is whole
    assert whole.as_request("drop", partial=False).data["content"] == [text("hi"), use("look", "a"), 7]


def test_a_reply_goes_on_with_what_the_client_let_it_begin_with() -> None:
    whole = MessagesMessage.of({"role": "assistant", "content": "{"}).continued(reply(THOUGHT, text('"a": 1}')))
    assert whole is not None
    assert whole.data["content"] == [THOUGHT, text('{"a": 1}')]


def test_a_compaction_is_known_by_what_it_holds() -> None:
    summed = {"type": "compaction", "content": "All so far.", "encrypted_content": "gA1", "signature": None}
    assert reply(summed, use("f", "a")).ids == ("a", "gA1")
    assert reply(use("f", "a")).ids == ("a",)


def test_what_counts_for_all_that_follows_is_told() -> None:
    assert reply({"type": "compaction", "content": "All so far."}, text("I go on.")).is_lasting
    assert user(text("hi"), {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "look"}}).is_lasting
    assert user({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}).is_lasting
    assert not user(text("hi")).is_lasting
    assert not user(text('It says "compaction".')).is_lasting
    assert not user(text("x", named="compaction")).is_lasting


def test_what_no_parser_takes_is_mended() -> None:
    assert MessagesMessage.as_stored({"role": "user", "content": "a\ud800b"}).text == "a\ufffdb"


# -------------------------------------------------------------------------------------------- marks


def test_marks_are_read_put_and_left_out() -> None:
    marked = user(result("a", [text("x", **MARK)], **MARK), text("hi"))
    assert (marked.has_marks, marked.mark()) == (True, orjson.dumps(MARK["cache_control"]))
    assert not marked.without_marks().has_marks
    assert marked.without_marks().data["content"] == [result("a", [text("x")]), text("hi")]
    plain = user(text("hi"))
    assert plain.without_marks() is plain
    assert (plain.has_marks, plain.mark()) == (False, None)
    named = user(text("cache_control is a field"), 7)
    assert (named.mark(), named.without_marks().data) == (None, named.data)
    mark = orjson.dumps(MARK["cache_control"])
    put = user(text("a"), text(" "), 7).with_mark(mark)
    assert put is not None
    assert put.data["content"] == [text("a", **MARK), text(" "), 7]
    string = MessagesMessage.of({"role": "user", "content": "a"}).with_mark(mark)
    assert string is not None
    assert string.data["content"] == [text("a", **MARK)]
    assert MessagesMessage.of({"role": "user", "content": " "}).with_mark(mark) is None
    assert reply(THOUGHT).with_mark(mark) is None
    called = reply(use("look", "a")).with_mark(mark)
    assert called is not None
    assert called.data["content"][0]["cache_control"] == MARK["cache_control"]


def test_what_is_rewritten_loses_its_marks() -> None:
    marked = user(result("a", "long", **MARK))
    assert marked.with_text("short").data["content"] == [result("a", "short")]


# ------------------------------------------------------------------------------- bytes and documents


def test_what_stands_around_a_tool_of_the_provider_is_read_as_paragraphs() -> None:
    found = reply(text("I search."), *SERVER, text("It is "), text("deep", citations=[1]), text("."))
    assert found.display_text == "I search.\n\nIt is deep."
    assert found.readable().startswith("I search.\n\nIt is deep.\n[")
    assert found.text == "I search.It is deep."
    many = reply(*[text("word " * 50)] * 50_000)
    assert many.display_text == many.text  # in time that grows with the text


def test_bytes_in_a_result_of_the_provider_are_no_text() -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "QUJD" * 9000}
    page = {"type": "web_fetch_result", "url": "u", "content": {"type": "document", "source": source}}
    fetched = {"type": "web_fetch_tool_result", "tool_use_id": "srv", "content": page}
    image = {"type": "image", "source": {**source, "media_type": "image/png"}}
    seen = {"type": "mcp_tool_result", "tool_use_id": "mcp", "content": [image, text("seven")]}
    found = reply(fetched, seen)
    assert found.countable().media == 2
    assert sum(map(len, found.countable().texts)) < 500
    assert "seven" in found.readable()
    assert len(found.readable()) < 500


def test_a_document_that_is_given_as_text_is_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Call me Ishmael."}
    parts = {"type": "content", "content": [text("Some years ago"), IMAGE]}
    asked = user(
        {"type": "document", "source": plain, "title": "Moby Dick"},
        {"type": "document", "source": parts},
        {"type": "document", "source": {"type": "content", "content": "never mind"}},
        text("Who?"),
    )
    counted = asked.countable()
    assert counted.texts == ("Moby Dick", "Call me Ishmael.", "Some years ago", "never mind", "Who?")
    assert counted.media == 1
    assert user({"type": "document", "source": {"type": ["text"]}}).countable().media == 1  # whatever it is
    told = asked.readable().splitlines()
    assert told == ["Who?", "Moby Dick", "Call me Ishmael.", "Some years ago", "never mind"]


# ------------------------------------------------------------------------------------ canonical form

SEARCH = [{"type": "server_tool_use", "id": "s"}, {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}]
RESHAPED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (reply(text("It is "), text("deep", citations=[1]), text(". ")).data, reply(text("It is deep.")).data),
    (reply(*SEARCH, text("hi")).data, {"role": "assistant", "content": "hi"}),
    (reply(*SEARCH, use("f", "a")).data, reply(use("f", "a")).data),
    (reply(use("f", "a"), text("hi")).data, reply(text("hi"), use("f", "a")).data),
    (reply(text("<think>x</think>\n\nhi")).data, reply(text("hi")).data),
    (
        reply(use("Bash", "toolu_01A09q90qw90lq917835lq9", command="cd /home && ls")).data,
        reply(use("Bash", "toolu_01A09q90qw90lq917835lq9", command="ls", background=False)).data,
    ),
    (
        reply(text("I look."), use("Bash", "toolu_01A09q90qw90lq917835lq9")).data,
        reply(use("Bash", "toolu_01A09q90qw90lq917835lq9")).data,
    ),
    (reply(text("<think>x</think>"), use("f", "a")).data, reply(use("f", "a")).data),
    (reply(text(' {"b": 1.0, "a": 2}')).data, reply(text('{"a":2,"b":1}')).data),
]
"""Replies that were others in earlier versions."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "hi"}, {"content": [text("hi", annotations=[], **MARK)], "role": "user"}),
        ({"role": "assistant", "content": " hi\n"}, {"role": "assistant", "content": [text("hi"), text("")]}),
        (
            {"role": "assistant", "content": [THOUGHT, use("look", "a", at=1.0, to=2**53 + 1)]},
            {"role": "assistant", "content": [{**use("look", "a", at=1, to=2**53), "caller": {"type": "direct"}}]},
        ),
        (
            {"role": "user", "content": [result("a", "x", is_error=False)]},
            {"role": "user", "content": [result("a", [text("x", **MARK)], **MARK)]},
        ),
        ({"role": "user", "content": [result("a", "")]}, {"role": "user", "content": [result("a", [])]}),
        ({"role": "user", "content": "hi", "agent": "planner"}, {"role": "user", "content": "hi", "note": None}),
        (
            {"role": "system", "content": [text("x-anthropic-billing-header: a1;"), text("Be brief.", **MARK)]},
            {"role": "system", "content": [text("x-anthropic-billing-header: b2;"), text("Be brief.")]},
        ),
        *RESHAPED,
    ],
)
def test_what_clients_change_does_not_count(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert content_hash(MessagesMessage.of(one)) == content_hash(MessagesMessage.of(other))


@pytest.mark.parametrize(("one", "other"), RESHAPED)
def test_what_counted_in_earlier_versions_is_told(one: dict[str, Any], other: dict[str, Any]) -> None:
    request = {"model": "m", "max_tokens": 1, "messages": [one, {"role": "assistant", "content": " hi\n"}]}
    changed, plain = MESSAGES.requests.parse(orjson.dumps(request)).messages
    assert changed.facts is not None
    assert plain.facts is not None
    assert (changed.facts.reshaped, plain.facts.reshaped) == (True, False)
    assert MESSAGES.earlier_canonicals(changed)[-1] != MESSAGES.earlier_canonicals(MessagesMessage.of(other))[-1]
    for same in (plain, user(text("hi"), result("a", "x")), MessagesMessage.of({"role": "assistant", "content": 7})):
        assert MESSAGES.earlier_canonicals(same) == (MESSAGES.canonical(same),) * 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}),
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi", "name": "x"}),
        (
            {"role": "user", "content": [result("a", "x")]},
            {"role": "user", "content": [result("a", "x", is_error=True)]},
        ),
        ({"role": "assistant", "content": [THOUGHT]}, {"role": "assistant", "content": [HIDDEN]}),
        (reply(text("<think>x</think>")).data, reply(text("<think>y</think>")).data),
        (reply(*SEARCH).data, reply().data),
        ({"role": "assistant", "content": [use("f", "a", n=0)]}, {"role": "assistant", "content": [use("f", "a")]}),
        ({"role": "user", "content": [7]}, {"role": "user", "content": 7}),
    ],
)
def test_everything_else_counts(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert content_hash(MessagesMessage.of(one)) != content_hash(MessagesMessage.of(other))


def test_very_deep_inputs_are_compared_as_they_are() -> None:
    deep: Any = 1.0
    for _ in range(150):
        deep = [deep]
    assert MESSAGES.canonical(reply(use("f", "a", deep=deep)))
