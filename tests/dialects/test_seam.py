"""The dialect seam: a history in another JSON shape is named, placed, trimmed, repaired and searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest

from proxy.conversation import (
    ROOT,
    Arrival,
    Incoming,
    Kind,
    Log,
    Mode,
    body_of,
    chain,
    content_hash,
    open_calls,
    reconcile,
    rounds,
    spans,
)
from proxy.dialects import DIALECTS, Call, Message, dialect_named
from proxy.recall import RECALL, OwnTools, Recall, RecallBranch, ref_of
from proxy.trimming import Entry, Plan, PlanningContext, Policy, plan
from tests.support.toy_dialect import NO_RESULT, TOY, ToyMessage, bot, human, result

LINES = "\n".join(f"line {number}: the cat sat at place {number}" for number in range(60))
RECORDS = orjson.dumps([{"name": f"cat {n}", "age": n, "home": None} for n in range(80)]).decode()
TALK: list[Message] = [
    human("Which cats are there?"),
    bot("I look.", a=("look", {"at": "list"})),
    result("a", RECORDS),
    bot("There are eighty."),
    human("And where do they sit?"),
    bot(b=("seats", {"of": "all"}), c=("look", {"at": "list"})),
    result("b", LINES, "seats"),
    result("c", RECORDS),
    bot("Everywhere."),
    human("Thank you. What was my first question?"),
]


# --------------------------------------------------------------------------------- names and placement


def test_a_message_is_named_by_its_canonical_form() -> None:
    plain = ToyMessage(b'{"who":"human","says":["hi"]}')
    same = ToyMessage(b'{"says": "hi", "who": "human", "agent": "planner"}')
    assert content_hash(plain) == content_hash(same) != content_hash(human("ho"))
    assert chain(ROOT, [plain, bot("yes")]) == chain(ROOT, [same, bot("yes")])
    assert body_of(plain) != body_of(same)
    assert content_hash(bot("hi")) != content_hash(human("hi"))


def test_our_own_fields_are_read_and_left_out() -> None:
    message = human("hi", agent="planner", is_internal=True)
    assert (message.agent, message.is_internal) == ("planner", True)
    assert message.without_own_fields() == human("hi")


def test_calls_and_their_results_are_one_span() -> None:
    found = [(span.start, span.stop, span.round) for span in spans(TALK)]
    assert found == [(0, 1, 1), (1, 3, 1), (3, 4, 1), (4, 5, 2), (5, 8, 2), (8, 9, 2), (9, 10, 3)]
    assert [(each.start, each.stop) for each in rounds(TALK)] == [(0, 4), (4, 9), (9, 10)]
    assert open_calls(TALK) == ()
    assert open_calls(TALK[:7])


class _Nodes:
    """Nodes under each other, the first one under the root."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._depths = {name: depth for depth, name in enumerate(nodes, 1)}

    def depths(self, names: Sequence[str]) -> Mapping[str, int]:
        return {name: self._depths[name] for name in names if name in self._depths}

    def parents(self, content: bytes, depth: int) -> Sequence[str]:
        raise AssertionError((content, depth))


def _arrival(stored: Sequence[Message], sent: Sequence[Message], mode: Mode = Mode.AUTO) -> Arrival:
    nodes = chain(ROOT, stored)
    incoming = Incoming(
        names=chain(ROOT, sent),
        contents=[content_hash(message) for message in sent],
        replies=[place for place, message in enumerate(sent) if message.role == "assistant"],
        retried=False,
        mode=mode,
        answers=sent[0].answers is not None,
        manner=None,
    )
    log = Log(stored=_Nodes(nodes), head=nodes[-1], depth=len(nodes), arrival="resend", last=None, manner=None)
    return reconcile(incoming, log)


def test_a_resend_a_rewind_and_an_append_are_told_apart() -> None:
    nodes = chain(ROOT, TALK[:4])
    resend = _arrival(TALK[:4], [*TALK[:4], human("more")])
    assert (resend.kind, resend.base, resend.known) == (Kind.RESEND, nodes[3], 4)
    rewind = _arrival(TALK[:4], [TALK[0], human("other")])
    assert (rewind.kind, rewind.base, rewind.known) == (Kind.REWIND, nodes[0], 1)
    append = _arrival(TALK[:4], [human("more")], Mode.APPEND)
    assert (append.kind, append.base, append.composed) == (Kind.APPEND, nodes[3], True)


# -------------------------------------------------------------------------------------------- trimming


def _count(message: Message) -> int:
    return 4 + len(message.raw) // 4


def _entries(messages: Sequence[Message]) -> list[Entry]:
    return [
        Entry(message=message, tokens=_count(message), ref=ref_of(body_of(message)), position=position)
        for position, message in enumerate(messages)
    ]


def _planned(
    *edits: dict[str, Any],
    messages: Sequence[Message] = TALK,
    trigger: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    composed: bool = False,
) -> Plan:
    chosen: dict[str, Any] = {"trigger": trigger or {"every_request": True}, "edits": edits}
    chosen |= {"keep": {"rounds": 1}} | ({"target": target} if target else {})
    context = PlanningContext(count=_count)
    made = plan(_entries(messages), Policy.model_validate(chosen), "toy", context, None, composed=composed)
    assert all(isinstance(message, ToyMessage) for message in made.view)
    assert TOY.problems(made.view) == []
    return made


def _actions(made: Plan) -> dict[int, str]:
    return {change.position: change.edit for change in made.changes}


def test_without_a_trim_the_view_is_the_very_messages() -> None:
    made = _planned({"type": "keep_rounds"}, trigger={"messages": 99})
    assert [id(message) for message in made.view] == [id(message) for message in TALK]


def test_old_tool_results_are_cleared() -> None:
    made = _planned({"type": "clear_tool_results", "keep": 1})
    assert _actions(made) == {2: "clear_tool_results", 6: "clear_tool_results"}
    cleared = made.view[2]
    assert (cleared.data["who"], cleared.answers, cleared.name) == ("result", "a", "look")
    assert f"ref={body_of(TALK[2])[:8]}" in cleared.text
    assert made.view[7] is TALK[7]
    assert made.tokens_sent < made.tokens_before


def test_old_tool_results_are_cleared_with_the_arguments_of_their_calls() -> None:
    long = [human("a"), bot(a=("write", {"text": "many words " * 50})), result("a", LINES), *TALK[4:]]
    made = _planned({"type": "clear_tool_results", "keep": 1, "clear_inputs": True}, messages=long)
    (call,) = made.view[1].calls
    assert (call.id, call.name) == ("a", "write")
    assert len(call.arguments) < 300


def test_the_oldest_rounds_are_dropped() -> None:
    made = _planned({"type": "drop_oldest"}, target={"tokens": 1})
    assert list(made.view) == TALK[9:]


def test_the_newest_rounds_are_kept() -> None:
    made = _planned({"type": "keep_rounds", "last": 1})
    assert list(made.view) == TALK[4:]


def test_long_tool_output_is_truncated() -> None:
    made = _planned({"type": "truncate_tool_output", "max_lines": 4})
    assert _actions(made) == {6: "truncate_tool_output"}
    assert (made.view[6].answers, made.view[6].data["who"]) == ("b", "result")
    assert made.view[6].text.startswith("line 0")
    assert len(made.view[6].text) < len(LINES)


def test_tool_output_is_compacted() -> None:
    made = _planned({"type": "compact_tool_output", "over_tokens": 50, "methods": ["minify", "table"]})
    assert _actions(made)[2] == "compact_tool_output"
    assert "cat 79" in made.view[2].text
    assert len(made.view[2].raw) < len(TALK[2].raw)


def test_a_result_that_says_the_same_as_an_older_one_refers_to_it() -> None:
    made = _planned({"type": "deduplicate_results"})
    assert _actions(made) == {7: "deduplicate_results"}
    assert made.view[2] is TALK[2]
    assert (made.view[7].answers, made.view[7].data["who"]) == ("c", "result")
    assert "cat 79" not in made.view[7].text


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_summary_of_what_was_dropped_is_a_message_of_the_dialect(role: str) -> None:
    summarize = {"type": "summarize", "mode": "statistics", "role": role, "upper": 300, "lower": 200}
    made = _planned({**summarize, "min_messages": 2, "min_new_messages": 1, "keep_rounds": 0})
    assert made.summary is not None
    first, *rest = made.view
    assert first.role == role
    assert "look" in first.text
    assert rest == TALK[9:]


def test_several_edits_and_a_later_request_go_on_from_the_same_cut() -> None:
    policy = Policy.model_validate(
        {
            "trigger": {"tokens": 900},
            "target": {"tokens": 500},
            "keep": {"rounds": 1},
            "edits": [
                {"type": "deduplicate_results"},
                {"type": "compact_tool_output", "over_tokens": 50},
                {"type": "clear_tool_results", "keep": 0},
                {"type": "drop_oldest"},
            ],
        }
    )
    context = PlanningContext(count=_count)
    made = plan(_entries(TALK), policy, "toy", context, None)
    assert made.trimmed
    assert made.tokens_sent <= 900 < made.tokens_before
    more = [*TALK, bot("Which cats there are."), human("Right.")]
    later = plan(_entries(more), policy, "toy", context, made.cut)
    assert not later.trimmed
    assert list(later.view[: len(made.view)]) == list(made.view)
    assert later.view[-1] is more[-1]


# ------------------------------------------------------------------------------- the protocol's repair


def test_a_broken_history_is_repaired_by_the_rules_of_its_dialect() -> None:
    broken = [human("a"), bot(a=("look", {}), b=("look", {})), result("b", "x"), result("z", "y"), human("c")]
    assert TOY.problems(broken) == ["message 3: result of nothing", "message 1: missing result"]
    made = _planned({"type": "keep_rounds"}, trigger={"messages": 99}, messages=broken, composed=True)
    assert list(made.view) == [*broken[:3], TOY.result("a", NO_RESULT), human("c")]
    assert len(made.warnings) == 2


# ---------------------------------------------------------------------------------------------- recall


@pytest.mark.anyio
async def test_earlier_messages_are_found_and_read_again() -> None:
    store: Any = None  # the request brings all of it
    branch = RecallBranch(key="k", tip=ROOT, depth=0, fresh=tuple(TALK))
    own = OwnTools([RECALL], Recall(store), branch)

    async def recalled(**arguments: str) -> str:
        return await own.answer(Call(id="r", name=RECALL, arguments=orjson.dumps(arguments).decode()))

    found = await recalled(query="cat place 42")
    assert ref_of(body_of(TALK[6])) in found
    assert "place 42" in found
    original = await recalled(ref=ref_of(body_of(TALK[6])))
    assert "line 0: the cat sat at place 0" in original
    call = await recalled(ref=ref_of(body_of(TALK[1])))
    assert "I look." in call
    assert '[call of look: {"at":"list"}]' in call


def test_a_message_is_readable() -> None:
    picture = ToyMessage.of({"who": "human", "says": ["See:", {"picture": "cat.png"}]})
    assert picture.readable() == "See:\n[picture: cat.png]"
    assert picture.plain_text is None
    assert picture.with_notes({1: "(gone)"}).text == "See:(gone)"


def test_a_dialect_is_known_by_its_name() -> None:
    dialect_named.cache_clear()
    assert dialect_named("chat").name == "chat"
    with pytest.raises(KeyError):
        dialect_named("os")


def test_what_a_dialect_need_not_say_has_an_answer() -> None:
    call = bot("I look.", a=("look", {}))
    assert call.ids == ("a",)
    assert result("a", "seen").ids == ("a",)
    assert not call.has_reasoning
    assert human("hi").begins_turn
    assert not call.begins_turn
    assert TOY.earlier_canonicals(call) == ()


def test_a_question_of_the_proxy_s_own_is_a_system_and_a_user_message() -> None:
    chat = dialect_named("chat")
    asked = chat.requests.parse(chat.question("m", "Be brief.", "Why?"))
    assert (asked.model, asked.instructions[0].text, asked.messages[0].text) == ("m", "Be brief.", "Why?")
    assert asked.messages[0].listed == (asked.messages[0].raw,)


FUNCTION = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "run_code"}
DECLARED: list[tuple[str, list[Any], list[str | None]]] = [
    ("chat", [{"type": kind, kind: {"name": "named"}} for kind in ("function", "custom")], ["named", "named"]),
    ("chat", [{"function": {"name": "untyped"}}, FUNCTION], ["untyped", "look_up"]),
    ("responses", [FUNCTION, CUSTOM, {"type": "web_search"}], ["look_up", "run_code", None]),
    ("messages", [{"name": "bare", "input_schema": {}}, CUSTOM], ["bare", "run_code"]),
    ("messages", [{"type": "web_search_20250305", "name": "web_search"}], [None]),
]


@pytest.mark.parametrize(("dialect", "tools", "names"), DECLARED)
def test_a_declared_tool_has_its_name_unless_the_provider_runs_it(
    dialect: str, tools: list[Any], names: list[str | None]
) -> None:
    found = dialect_named(dialect).requests.declared(orjson.dumps(tools))
    assert [name for name, _ in found] == names
    assert [bytes(text) for _, text in found] == [orjson.dumps(tool) for tool in tools]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_no_tool_has_no_name(dialect: str) -> None:
    tools = b'[{"type":"function","name":3},{},"text",null]'
    assert [name for name, _ in dialect_named(dialect).requests.declared(tools)] == [None] * 4
