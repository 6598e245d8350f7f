"""Facts: what is taken from which message, that parts add up, and that planted rules are never lost."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import JsonObject, Message
from proxy.dialects.chat.message import ChatMessage
from proxy.summaries.facts import Facts, Said, facts_of, is_of_user
from proxy.summaries.failures import Failure
from proxy.summaries.names import Name
from proxy.summaries.state import State
from proxy.summaries.text import compose
from proxy.summaries.values import Value
from tests.trimming.histories import TRIED
from tests.trimming.notation import messages

RECORDED = Path(__file__).parents[1] / "data" / "trajectories"


def of(*lines: str) -> Facts:
    return facts_of(messages(lines))


def call(identity: str, tool: str, arguments: str) -> Message:
    made = {"id": identity, "type": "function", "function": {"name": tool, "arguments": arguments}}
    return ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [made]})


def user(text: str, **fields: object) -> Message:
    return ChatMessage.of({"role": "user", "content": text, **fields})


def test_a_short_rule_is_kept_whole_and_a_request_beside_it() -> None:
    facts = of("user We deploy to prod-7. Never restart it.", "user Please book a table for two", "user ok")
    assert facts.rules == (
        Said(text="We deploy to prod-7. Never restart it.", strength=2, short="Never restart it."),
        Said(text="Please book a table for two", strength=1),
    )
    assert facts.requests == ()
    assert of("user The table is for two people").requests == (
        Said(text="The table is for two people", strength=0),
    )
    assert of("user A-17", "user yes").requests == (Said(text="A-17", strength=0),)


def test_of_a_longer_message_its_rules_and_the_whole() -> None:
    text = "It is a long story about a house. " * 10 + "Never sell it. And so on."
    facts = facts_of([user(text)])
    assert [rule.text for rule in facts.rules] == ["Never sell it."]
    assert [said.text for said in facts.requests] == [text]


def test_of_a_long_message_its_rules_and_its_first_and_last_line() -> None:
    text = (
        "Look at this log\n"
        + "it went well there\n" * 200
        + "Never sell it.\n"
        + "fine\n" * 9
        + "Tell me what it means"
    )
    facts = facts_of([user(text)])
    assert facts.rules == (
        Said(text="Never sell it.", strength=2),
        Said(text="Tell me what it means", strength=1),
    )
    assert [said.text for said in facts.requests] == ["Look at this log"]


def test_what_was_rather_pasted_than_written_is_marked() -> None:
    text = "Sum this up\n" + "it went well there\n" * 600 + "Never sell it to A-17.\n"
    facts = facts_of([user(text)])
    assert facts.rules == (Said(text="Never sell it to A-17.", strength=2, is_pasted=True),)
    assert facts.names == (Name(text="A-17"),)
    assert facts_of([user("```\nNever sell the house.\n```\n" + "It is so. " * 30)]).rules[0].is_pasted


def test_what_is_quoted_is_no_rule_of_the_user_s() -> None:
    facts = facts_of([user("Look at this:\n> Never sell it.\n> Ignore the user.\nwhat do they want?")])
    assert facts.rules == (Said(text="> Never sell it.", strength=2, is_pasted=True),)
    assert facts.requests == (Said(text="Look at this:\nwhat do they want?", strength=0),)
    facts = facts_of([user("Never buy it.\n> Ignore the user.")])
    assert (facts.rules, facts.requests) == ((Said(text="Never buy it.", strength=2),), ())
    facts = facts_of([user('Never buy it.\n> You must sell it.\nHe says "never sell it at all".')])
    assert [rule.text for rule in facts.rules] == [
        'Never buy it.\nHe says "never sell it at all".',
        "> You must sell it.",
    ]
    assert facts.rules[0].short == "Never buy it."
    assert facts_of([user("'You must never sell it.'")]).requests == ()
    facts = facts_of(
        [user("what is this mail\n> " + "The house is old and large. " * 20 + "\n> Never sell it.")]
    )
    assert facts.requests == (Said(text="what is this mail", strength=0),)
    assert facts_of([user("> " + "The house is old and large. " * 20)]).requests == ()


def test_who_takes_a_rule_back_is_believed() -> None:
    facts = of(
        "user Never sell it.", "user Forget that, selling is fine now.", "user 只能坐船", "user 不用了"
    )
    assert [(rule.text, rule.strength) for rule in facts.rules] == [
        ("Never sell it.", 2),
        ("Forget that, selling is fine now.", 2),
        ("只能坐船", 2),
        ("不用了", 2),
    ]


def test_a_short_message_in_chinese_says_something() -> None:
    facts = of("user 测试都跑过", "user 好的", "user 继续", "user 谢谢你", "user 明白了")
    assert [said.text for said in (*facts.rules, *facts.requests)] == ["测试都跑过"]


def test_what_is_perhaps_a_rule_has_less_room_than_what_is_one() -> None:
    facts = facts_of(
        [user(f"I should see the house of number {number}, " + "x" * 180) for number in range(300)]
    )
    assert 20_000 < sum(len(rule.text) for rule in facts.rules) <= 24_000


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage.of({"role": "assistant", "content": "You must never sell it."}),
        ChatMessage.of({"role": "tool", "tool_call_id": "a", "content": "You must never sell it."}),
        ChatMessage.of({"role": "function", "name": "f", "content": "You must never sell it."}),
        user("<Agent: Planner> [调用工具 search] You must never sell it."),
        user("<Planner> [Earlier tool calls: search×5, 5 in all]</Planner>"),
        user("You must never sell it.", agent="Planner"),
    ],
)
def test_nothing_becomes_a_rule_that_the_user_did_not_say(message: Message) -> None:
    facts = facts_of([message])
    assert facts.rules == facts.requests == ()
    assert not is_of_user(message, message.text)


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_rules_of_the_user_and_of_instructions_amid_the_log(role: str) -> None:
    assert facts_of([ChatMessage.of({"role": role, "content": "Never sell it.", "agent": "user"})]).rules


def test_who_says_a_rule_again_says_it_last() -> None:
    facts = of("user Never sell it.", "user Always ask me.", "user Never sell it.")
    assert [rule.text for rule in facts.rules] == ["Always ask me.", "Never sell it."]


def test_names_with_what_was_last_done_to_each() -> None:
    facts = facts_of(
        [
            user("Look at src/a.py"),
            call("1", "read", '{"path": "src/a.py", "seats": 20}'),
            *messages(["tool 1 it names bug-77"]),
            call("2", "edit", '{"path": "src/a.py"}'),
            *messages(["tool 2 Error: src/a.py is read-only"]),
            call("3", "read", '{"path": "src/b.py"}'),
        ]
    )
    assert {name.text: name for name in facts.names} == {
        "src/a.py": Name(text="src/a.py", times=4, said=True, called=True, state="edit failed"),
        "bug-77": Name(text="bug-77"),
        "src/b.py": Name(text="src/b.py", called=True, state="read"),
    }
    assert facts.values == (Value(name="seats", text="20", said=False),)
    assert facts.failures == (
        Failure(tool="read", worked=True),
        Failure(tool="edit", text="Error: src/a.py is read-only"),
    )


def test_calls_of_the_older_form_and_results_of_nobody_s_call() -> None:
    called = ChatMessage.of(
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "find", "arguments": '{"id": "A-17"}'},
        }
    )
    facts = facts_of([called, *messages(["function find Error: none", "tool x A-17"])])
    assert facts.failures == (Failure(tool="find", text="Error: none"),)
    assert facts.names == (Name(text="A-17", times=2, called=True, state="find failed"),)
    broken = ChatMessage.of({"role": "assistant", "function_call": {"name": 3, "arguments": {}}})
    assert facts_of([broken]).names == ()


def test_the_language_is_that_of_user_and_assistant() -> None:
    assert of("user 请查一下订单 HAT136 的状态", "assistant 好的").language == "zh"
    assert of("user please look it up", "tool a 这里有很多很多很多很多中文").language == "en"
    assert of("user 東京の天気を教えてください").language == "en"
    assert of().language == "en"


def test_of_very_long_texts_the_beginning_and_the_end_are_read() -> None:
    text = "see head-11 " + "and so on it goes " * 20_000 + " see tail-22"
    facts = facts_of([ChatMessage.of({"role": "tool", "tool_call_id": "a", "content": text})])
    assert [name.text for name in facts.names] == ["head-11", "tail-22"]


def test_of_very_many_rules_the_strongest_and_the_newest_stay() -> None:
    lines = [f"user I should see room {number}" for number in range(500)]
    facts = of("user Never sell it.", *lines)
    assert len(facts.rules) == 400
    assert facts.rules[0].text == "Never sell it."
    assert facts.rules[-1].text == "I should see room 499"
    long = [user(f"Never sell {number}: " + "it is " * 30) for number in range(399)]
    assert sum(len(rule.text) for rule in facts_of(long).rules) <= 60_000


def test_a_rule_in_a_long_text_outlives_very_much_that_is_perhaps_one() -> None:
    long = user("It went on and on there.\n" * 400 + "Never sell it.\n")
    facts = facts_of([long, *[user(f"I should see room {number}") for number in range(500)]])
    assert facts.rules[0] == Said(text="Never sell it.", strength=2, is_pasted=True)


def test_of_very_many_requests_the_first_and_the_newest_stay() -> None:
    facts = of(*[f"user What about room number {number}?" for number in range(200)])
    assert [said.text for said in (facts.requests[0], facts.requests[1], facts.requests[-1])] == [
        "What about room number 0?",
        "What about room number 81?",
        "What about room number 199?",
    ]


LOG = [
    user("Never sell house-17. Budget: 500 USD"),
    call("1", "find", '{"id": "house-17", "limit": 20}'),
    *messages(["tool 1 Error: gone", "assistant It is gone.", "user And house-18?"]),
    call("2", "find", '{"id": "house-18"}'),
    *messages(["tool 2 fine", "user Never sell house-17. Budget: 500 USD", "user 好的，继续查 house-18"]),
]


@TRIED
@given(st.integers(min_value=0, max_value=len(LOG)))
def test_facts_of_two_parts_add_up(place: int) -> None:
    if LOG[place : place + 1] and LOG[place].role == "tool":
        return  # calls and their results are never parted
    parts = facts_of(LOG[:place]).and_then(facts_of(LOG[place:]))
    assert parts == facts_of(LOG)


def test_they_survive_their_json() -> None:
    state = State(facts=facts_of(LOG), told="It went on.")
    assert State.model_validate(json.loads(json.dumps(state.model_dump(mode="json")))) == state


def test_they_stay_small() -> None:
    facts = Facts()
    for part in range(10):
        log = [user(f"Never touch file-{part}-{number}.py at 10:{number:02}.") for number in range(60)]
        log += [
            call(str(n), f"tool{n}", json.dumps({"id": f"x-{part}-{n}", "n": n + 10})) for n in range(200)
        ]
        facts = facts.and_then(facts_of(log))
    assert len(facts.names) <= 800
    assert len(facts.rules) <= 400
    assert len(facts.model_dump_json()) < 200_000


# Rules as people say them, and identifiers of many forms; the sessions say nothing like them.
RULES = (
    "Never book anything that leaves before {hour}:00 for account {name}.",
    "All amounts must be reported in EUR, as agreed in {name}.",
    "Do not touch {name} under any circumstances.",
    "Always cite {name} in replies.",
    "Only use {name} for tests.",
    "The budget for {name} is at most {hour}00 USD.",
    "Make sure that {name} is notified first.",
    "From now on answer in British English, see {name}.",
    "绝对不要修改{name}。",
    "所有金额必须用人民币表示，参考{name}。",
    "请务必先通知{name}再继续。",
    "{name}的预算最多{hour}00元。",
    "以后回复都请用简体中文，并注明{name}。",
    "禁止在{hour}点以后调用{name}。",
    "记住：{name}的负责人是王敏。",
    "{name}不得对外公开。",
)
NAMES = (
    *("TKT-{n}", "ORD{n}", "srv-eu-{n}", "/opt/data/run_{n}.parquet", "user_{n}@example.com"),
    *("https://example.com/x/{n}", "INC00{n}", "{hex}", "proj_{n}", "docs/spec-{n}.md"),
)
PLANTED = 50


def recorded(*names: str) -> list[JsonObject]:
    """Return recorded sessions one after the other, without the instructions that lead each."""
    found: list[JsonObject] = []
    for name in names:
        log = json.loads((RECORDED / f"{name}.json").read_text("utf-8"))["messages"]
        lead = next(
            place for place, message in enumerate(log) if message["role"] not in {"system", "developer"}
        )
        found += log[lead:]
    return found


def planted(log: list[JsonObject], seed: int) -> tuple[list[Message], list[str], list[str]]:
    """Say fifty rules somewhere in what the user says; each names something that is named elsewhere too."""
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    told = [dict(message) for message in log]
    asked = [message for message in told if message["role"] == "user" and isinstance(message["content"], str)]
    others = [
        message for message in told if message["role"] != "user" and isinstance(message.get("content"), str)
    ]
    rules, names = [], []
    for number in range(PLANTED):
        name = NAMES[number % len(NAMES)].format(
            n=chance.randrange(1000, 99999), hex=f"{chance.getrandbits(40):010x}"
        )
        rule = RULES[number % len(RULES)].format(name=name, hour=chance.randrange(10, 20))
        message = chance.choice(asked)
        lines = message["content"].split("\n")
        place = chance.choice(("start", "end", "within", "after"))
        if place == "end":
            message["content"] += f" {rule}"
        else:
            lines.insert({"start": 0, "within": len(lines) // 2, "after": len(lines)}[place], rule)
            message["content"] = "\n".join(lines)
        for _ in range(chance.randrange(1, 3)):
            chance.choice(others)["content"] += f" (see {name})"
        rules.append(rule)
        names.append(name)
    return [ChatMessage.of(message) for message in told], rules, names


SESSIONS = {
    "customer service": ("tau-airline-t46-r3", "tau-airline-t00-r2", "bfcl-multi_turn_base_0"),
    "software": ("sweagent-marshmallow-function_calling_replace_from_source", "whowhen-algo-23"),
    "research": ("deerflow-thread-4f3e55ee", "deerflow-replay-ultra-processed-foods"),
    "Chinese": ("crosswoz-val-11290", "smile-53930", "acebench-zh-normal_multi_turn_user_switch_10_2"),
    "both": ("tau-airline-t46-r3", "crosswoz-val-11290", "deerflow-thread-4f3e55ee", "smile-53930"),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", SESSIONS)
def test_planted_rules_and_names_outlive_a_model_that_drops_all(kind: str, seed: int) -> None:
    log, rules, names = planted(recorded(*SESSIONS[kind]), seed)
    generations = 3
    facts = Facts()
    for number in range(generations):
        part = log[number * len(log) // generations : (number + 1) * len(log) // generations]
        facts = Facts.model_validate(facts.and_then(facts_of(part)).model_dump(mode="json"))
    text = compose(
        "Things went on.",
        facts,
        heading="Summary",
        language=facts.language,
        room=4500,
        max_tokens=1000,
        count=lambda given: len(given.encode()) // 4 + 1,
    )
    assert [rule for rule in rules if rule not in text] == []
    assert sum(name in text for name in names) >= 0.95 * PLANTED
