"""`clear_tool_results`: of older tool results a stub stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.conversation import rounds, spans
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.messages.message import MessagesMessage
from proxy.dialects.responses.items import Item
from proxy.textscan import digest_of
from proxy.trimming.draft import Draft
from proxy.trimming.edits.clear_tool_results import (
    ClearToolResults,
    shorter_arguments,
    shorter_text,
    stub_of,
    with_shorter_text,
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


def test_the_stub_says_how_much_was_cleared_and_where_it_is() -> None:
    stub = text_at(cleared(draft(called('{"path": "notes.txt"}'), result(LONG))), 1)
    assert stub == f"[cleared {cost(result(LONG))} tokens; ref=1; buildDir,src/main.c]"


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


def test_of_what_is_kept_the_older_half_stays_only_within_its_share() -> None:
    results = [result(f"{'many ' if at == 2 else ''}words " * (300 if at == 2 else 20), at) for at in range(6)]
    given = draft(called(*["{}"] * 6), *results)
    assert list(cleared(given, keep=5)) == [1]
    assert list(cleared(given, keep=5, keep_share=0.9)) == [1]
    assert list(cleared(given, keep=5, keep_share=0.5)) == [1, 2, 3]  # two large ones would stay with what is newer
    assert list(cleared(given, keep=5, keep_share=0.01)) == [1, 2, 3]  # the newest three stay in any case
    assert list(cleared(replace(given, dear=1.0), keep=5, keep_share=0.01)) == [1]


def test_where_cached_tokens_are_dear_digests_say_more() -> None:
    given = draft(called("{}"), result(keys(1) + keys(2)))

    def digest(chars: int, dear: float) -> str:
        return digest_at(cleared(replace(given, dear=dear), digest_chars=chars), 1)

    assert digest(200, 2.0) == digest(400, 0.4)
    assert digest(200, 1.5) == digest(300, 0.4)
    assert digest(200, 1.0) == digest(200, 0.4) != digest(200, 2.0)


NOTHING = "no value in it, " * 20


def keys(at: int) -> str:
    """Return a result that is full of ids, which stand in no other one."""
    return json.dumps([f"key-{at:02d}-{each:03d}" for each in range(120)])


def digest_at(changed: dict[int, Message | None], position: int) -> str:
    return text_at(changed, position).partition(f"ref={position}; ")[2].removesuffix("]")


def test_a_digest_grows_with_its_characters_and_has_a_limit() -> None:
    log = draft(called("{}"), result(keys(1) + keys(2)))
    sizes = [len(digest_at(cleared(log, digest_chars=chars), 1)) for chars in (0, 20, 100, 300)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert all(size <= 10 * chars for size, chars in zip(sizes, (0, 20, 100, 300), strict=True))


def test_what_is_mentioned_again_is_kept_first() -> None:
    said = ChatMessage.of(
        {"role": "assistant", "content": None, "tool_calls": called("look at key-00-117").data["tool_calls"]}
    )
    log = draft(called("{}"), result(keys(0)), said, result("nothing"), said, result("nothing"))
    digest = digest_at(cleared(log, digest_chars=100, clear_inputs=True), 1)
    assert "key-00-117" in digest
    assert "key-00-116" not in digest


def test_a_result_whose_digest_says_as_much_stays() -> None:
    text = " ".join(f"K{at}" for at in range(100, 130))
    assert not cleared(draft(called("{}"), result(text)), digest_chars=30_000)


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
            "edits": [{"type": "clear_tool_results", "keep": 0, "digest_chars": 50}],
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
    assert json.loads(block.calls[0].arguments) == {"path": "src/a.c", "content": "[cleared 420 characters; drawChart]"}
    assert 0 not in cleared(log)


def test_of_very_many_results_of_one_message_each_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def counted(message: Message) -> int:
        nonlocal looked
        looked += 1
        return 1 if message.is_result else 0

    monkeypatch.setattr(ChatMessage, "result_count", property(counted))
    many, arguments = 200, json.dumps({"content": "int drawChart(void); " * 20})
    log = draft(called(*[arguments] * many), *(result(f"{LONG} {at}", at) for at in range(many)))
    changed = cleared(log, clear_inputs=True)
    assert len(changed) == many + 1
    assert looked <= 4 * many


SAID = "I looked at what draws the chart, and this is what I found out about it, file by file:"


def said(text: str) -> Message:
    return ChatMessage.of({"role": "assistant", "content": text})


def test_of_older_texts_of_the_agent_the_beginning_and_a_digest_stay() -> None:
    text = SAID + " nothing that anybody needs in drawChart of src/chart.c." * 3
    log = draft(
        said(text), called("{}", text=text), result(LONG), said(text), called("{}"), result(LONG), said(SAID * 2)
    )
    changed = cleared(log, clear_texts=True)
    beginning = "I looked at what draws the chart, and this is what I found out about it, file"
    assert (
        text_at(changed, 0) == f"{beginning}… [cleared {len(text) - len(beginning)} characters; drawChart,src/chart.c]"
    )
    # What was said once is not said again.
    assert (
        text_at(changed, 1) == text_at(changed, 3) == f"{beginning}… [cleared {len(text) - len(beginning)} characters]"
    )
    assert list(changed) == [0, 2, 1, 3, 5]  # what comes after the last result that is cleared stays
    assert list(cleared(log)) == [2, 5]
    assert list(cleared(log, clear_texts=True, keep=1)) == [0, 2, 1]
    assert not cleared(draft(said(text), said(text)), clear_texts=True)  # without tools it is a talk


def test_texts_and_arguments_of_one_message_are_cleared_together() -> None:
    arguments = json.dumps({"content": LONG})
    block = cleared(draft(called(arguments, text=SAID * 3), result(LONG)), clear_texts=True, clear_inputs=True)[0]
    assert block is not None
    assert block.text.startswith("I looked at what draws")
    assert "… [cleared " in block.text
    assert json.loads(block.calls[0].arguments)["content"].startswith("[cleared 252 characters")


def test_texts_stay_that_are_short_protected_or_of_the_user() -> None:
    user = ChatMessage.of({"role": "user", "content": SAID * 3})
    log = draft(user, said("x" * 120), said(SAID * 3), called("{}"), result(LONG))
    assert list(cleared(replace(log, protected=frozenset({2})), clear_texts=True)) == [4]


def test_what_values_a_text_that_stays_holds_is_known() -> None:
    text = " ".join(f"K{at}-{at}" for at in range(100, 125))  # its digest would be as long
    log = draft(said(text), called("{}"), result(f"K100-100 K101-101 K900-900 {NOTHING}"))
    changed = cleared(log, clear_texts=True, digest_chars=3000)
    assert list(changed) == [2]
    assert digest_at(changed, 2) == "K900-900"


def test_a_text_that_was_cleared_keeps_its_bytes() -> None:
    before = draft(said(SAID * 3), called("{}", "{}"), result(LONG), result("HAT136 HAT137 " + LONG, 1))
    first = cleared(before, keep=1, clear_texts=True)
    assert list(first) == [0, 2]
    messages = tuple(first.get(at, message) for at, message in enumerate(before.messages))
    again = replace(
        before, messages=messages, made_by=tuple(("clear_tool_results",) * (at in first) for at in range(4))
    )
    assert list(cleared(again, clear_texts=True)) == [3]


def test_each_long_part_of_a_text_is_shortened() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [image, {"type": "text", "text": "short"}, *({"type": "text", "text": SAID * n, "x": n} for n in (2, 3))]
    log = draft(ChatMessage.of({"role": "assistant", "content": parts}), called("{}"), result(LONG))
    changed = cleared(log, clear_texts=True)[0]
    assert changed is not None
    first, second, *long = changed.data["content"]
    assert [first, second] == parts[:2]
    beginning = SAID[:77]
    assert long == [
        {"type": "text", "text": f"{beginning}… [cleared {n * len(SAID) - 77} characters]", "x": n} for n in (2, 3)
    ]


def test_texts_around_a_search_of_the_provider_stay_apart_and_lose_their_sources() -> None:
    source = {"type": "url_citation", "url": "https://e.org", "title": "t", "start_index": 200, "end_index": 210}
    text = {"type": "output_text", "text": SAID * 3, "annotations": [source]}
    said_ = {"type": "message", "role": "assistant", "content": [text]}
    items = [said_, {"type": "web_search_call", "id": "ws", "status": "completed"}, said_]
    after = with_shorter_text(Item.of({"type": "turn", "role": "assistant", "items": items}), nothing)
    first, search, last = after.data["items"]
    assert first["content"] == last["content"]
    assert first["content"][0]["text"].startswith(SAID[:77])
    assert first["content"][0]["annotations"] == []
    assert search == items[1]
    cited = {"type": "text", "text": SAID * 3, "citations": [{"type": "char_location", "cited_text": "x"}]}
    short = {**cited, "text": "short"}
    blocks = with_shorter_text(MessagesMessage.of({"role": "assistant", "content": [cited, short]}), nothing).data
    assert "citations" not in blocks["content"][0]
    assert blocks["content"][1] == short


def test_an_answer_that_stays_keeps_what_the_client_was_not_shown() -> None:
    log = draft(said("short"), called("{}"), result(LONG))
    more = replace(log, tokens=(log.tokens[0] + 100, *log.tokens[1:]))  # with those of a hidden round
    assert list(cleared(more, clear_texts=True)) == [2]


MESSAGES_TURN: dict[str, Any] = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": SAID * 2},
        {"type": "tool_use", "id": "c0", "name": "write", "input": {"a": 1}},
    ],
}
RESPONSES_TURN: dict[str, Any] = {
    "type": "turn",
    "role": "assistant",
    "items": [
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": SAID * 2}]},
        {"type": "function_call", "call_id": "c0", "name": "write", "arguments": "{}"},
    ],
}


@pytest.mark.parametrize(("kind", "turn"), [(MessagesMessage, MESSAGES_TURN), (Item, RESPONSES_TURN)])
def test_reasoning_and_calls_beside_a_text_stay_in_every_api(kind: type[Message], turn: dict[str, Any]) -> None:
    before = kind.of(turn)
    after = with_shorter_text(before, nothing)
    assert after.text == f"{SAID[:77]}… [cleared {2 * len(SAID) - 77} characters]"
    assert after.calls == before.calls
    assert len(before.calls) == 1
    field = "content" if "content" in turn else "items"
    assert [after.data[field][at] for at in (0, 2)] == [turn[field][at] for at in (0, 2)]


def test_a_text_stays_that_would_cost_as_much_without_its_end() -> None:
    text = "x" * 80 + " reads it out of src/charts.cc and is done"
    shorter = with_shorter_text(said(text), lambda _: "src/charts.cc")
    assert len(shorter.text) == len(text) - 2
    assert cost(shorter) >= cost(said(text))
    assert list(cleared(draft(said(text), called("{}"), result(LONG)), clear_texts=True)) == [2]


def test_a_text_without_spaces_is_cut_anywhere() -> None:
    shorter = with_shorter_text(said("图表由主程序绘制" * 40), nothing)
    assert shorter.text == "图表由主程序绘制" * 10 + "… [cleared 240 characters]"


def test_short_arguments_stay() -> None:
    assert 0 not in cleared(draft(called('{"path": "a"}'), result(LONG)), clear_inputs=True)


def test_arguments_in_every_form() -> None:
    custom = cleared(draft(called(LONG, form="custom"), result("word " * 60)), clear_inputs=True)[0]
    assert custom is not None
    assert custom.calls[0].arguments == "[cleared 252 characters; buildDir,src/main.c]"
    function = {"name": "write", "arguments": json.dumps({"content": LONG})}
    older = ChatMessage.of({"role": "assistant", "content": None, "function_call": function})
    answer = ChatMessage.of({"role": "function", "name": "write", "content": LONG})
    changed = cleared(draft(older, answer), clear_inputs=True)[0]
    assert changed is not None
    assert json.loads(changed.data["function_call"]["arguments"])["content"].startswith("[cleared ")


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
    assert "[cleared " in text_at(cleared(draft(result(LONG)), clear_inputs=True), 0)


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
    assert sum(b"[cleared " in raw for raw in sent) == len(sent) // 2


# -------------------------------------------------------------------------------------------- stub


def test_a_stub_and_the_digest_in_it() -> None:
    assert stub_of(42, "r1", "main") == "[cleared 42 tokens; ref=r1; main]"
    assert stub_of(42, "r1", "") == "[cleared 42 tokens; ref=r1]"


def test_a_short_ref_is_that_of_one_text() -> None:
    log = draft(called("{}", "{}", "{}"), result(LONG), result(LONG + "1", 1), result(LONG + "2", 2))
    refs = ("ref_0", "ref_0123456789abcdef", "ref_0123456799999999", "ref_8888888899999999")
    named = replace(log, entries=tuple(replace(entry, ref=ref) for entry, ref in zip(log.entries, refs, strict=True)))
    changed = cleared(named)
    assert [text_at(changed, at).partition("ref=")[2].rstrip("]").partition(";")[0] for at in (1, 2, 3)] == [
        "0123456789abcdef",
        "0123456799999999",
        "88888888",
    ]


def nothing(_: str) -> str:
    return ""


def test_arguments_stay_json_and_keep_what_is_short() -> None:
    document = {"path": "src/a.c", "line": 12345678901234567890, "x": 1.5, "text": "see buildDir in K77. " * 12}
    shorter = json.loads(shorter_arguments(json.dumps(document), lambda text: digest_of(text, 60)))
    assert {**shorter, "text": document["text"]} == document
    assert shorter["text"] == "[cleared 252 characters; buildDir,K77]"


def test_long_lists_and_deep_documents_are_cut() -> None:
    document = {"rows": list(range(25)), "few": [1], "deep": json.loads("[" * 40 + "]" * 40)}
    shorter = json.loads(shorter_arguments(json.dumps(document), nothing))
    assert shorter["rows"] == [*range(10), "[cleared 15 more]"]
    assert shorter["few"] == [1]
    assert "[cleared]" in json.dumps(shorter["deep"])


@pytest.mark.parametrize("arguments", ["[" * 100_000, "no json " * 30, json.dumps(["x"] * 99), '{"a": "' + "x" * 300])
def test_what_is_no_json_object_becomes_one(arguments: str) -> None:
    assert list(json.loads(shorter_arguments(arguments, nothing))) == ["cleared"]


@pytest.mark.parametrize(
    "arguments", ["", "no json", "[1, 2]", '{"a": NaN}', '{ "a" : 1.10 }', "[" * 20, json.dumps({"a": ["x"] * 11})]
)
def test_what_would_not_get_shorter_stays(arguments: str) -> None:
    assert shorter_arguments(arguments, nothing) == arguments


def test_what_stays_of_arguments_is_as_it_was_written() -> None:
    kept = r'"a":1e400,"b":1.10,"c":12345678901234567.25,"k":1,"k":2,"half":"abc\ud83d","n":NaN,"z":null'
    shorter = shorter_arguments("{" + kept + ',"text":"' + "x y " * 60 + '"}', nothing)
    assert shorter == "{" + kept + ',"text":"[cleared 240 characters]"}'


def test_half_an_emoji_in_a_digest_stays_an_escape() -> None:
    shorter = shorter_arguments(r'{"text":"Error: K77\ud83d; %s"}' % ("see x " * 50), lambda text: digest_of(text, 90))
    assert "\\ud83d" in shorter
    shorter.encode()


def test_a_short_text_stays() -> None:
    assert shorter_text("short", nothing) == "short"
    assert shorter_text("x" * 201, nothing) == "[cleared 201 characters]"
    assert shorter_text("x" * 201, lambda text: text) == "x" * 201


@pytest.mark.parametrize(
    "settings", [{}, {"clear_inputs": True}, {"clear_texts": True}, {"clear_inputs": True, "clear_texts": True}]
)
def test_at_best_no_place_has_more_tokens_than_clearing_leaves(settings: dict[str, bool]) -> None:
    numbers = json.dumps({"lines": list(range(100))})
    log = (
        *(called('{"path": "a.txt"}', text=SAID * 3), result(LONG), said(SAID * 3)),
        *(called(json.dumps({"text": LONG})), result("ok"), called(numbers), result(LONG)),
        *(called('{"path": "kept.txt"}'), result(LONG), called('{"path": "new.txt"}'), result(LONG)),
    )
    given = replace(draft(*log), count=lambda message: len(message.raw) // 4, protected=frozenset({7, 8}))
    given = replace(given, tokens=tuple([given.count(message) for message in log]))
    edit = ClearToolResults.model_validate({"type": "clear_tool_results", "keep": 1, **settings})
    best, made = edit.at_best(given), given.after(list(edit.apply(given)))
    assert all(least <= left for least, left in zip(best.tokens, made.tokens, strict=True))
    untouched = {7, 8, 9, 10} | ({0, 3, 5} if not settings else set())
    assert all(best.messages[at] is log[at] and best.tokens[at] == given.tokens[at] for at in untouched)
    assert sum(best.tokens) < sum(made.tokens) < sum(given.tokens)
    assert best.tokens[1] == 0  # whatever stub stands there: a later edit may make it shorter
    again = edit.at_best(made)  # what is cleared stays as it is
    assert [again.tokens[at] for at in (1, 6)] == [made.tokens[at] for at in (1, 6)]
    summed_up = replace(given, messages=(None, *log[1:]), tokens=(0, *given.tokens[1:]))
    assert edit.at_best(summed_up).tokens[0] == 0


def test_at_best_nothing_goes_where_no_result_is_old() -> None:
    given = draft(called("{}"), result(LONG))
    edit = ClearToolResults(keep=1, clear_texts=True)
    assert edit.at_best(given) == given
