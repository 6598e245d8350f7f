from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from proxy.backtest.comparison import Backtest
from proxy.backtest.cost import standard_classes
from proxy.backtest.histories import SessionHistory, of_messages, read_file, read_files, stored, synthetic_agents
from proxy.backtest.replay import baseline
from proxy.dialects.chat.protocol import CHAT
from proxy.errors import InvalidRequest
from proxy.pipeline import write_lines
from proxy.store import Store
from proxy.tokens import TokenCounter
from tests.backtest.histories import call, figures_of, reply, result, user
from tests.support.stores import empty_store
from tests.support.talk import Talk, body

SYSTEM = {"role": "system", "content": "be brief"}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
SAID = [SYSTEM, user("one"), reply("1"), user("two"), reply("2")]


def written(path: Path, *values: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, values)), "utf-8")
    return path


def stripped(text: str) -> str:
    """Return a text without the codes that colour it."""
    return re.sub(r"\x1b\[[0-9]+m", "", text)


def told(history: SessionHistory) -> list[Any]:
    return [message.data for message in (*history.instructions, *history.messages)]


def test_leading_instructions_are_kept_apart(tmp_path: Path) -> None:
    said = [SYSTEM, {"role": "developer", "content": "really"}, user("hi"), SYSTEM, reply("ho")]
    (history,) = read_file(written(tmp_path / "talk.json", said))
    assert [message.role for message in history.instructions] == ["system", "developer"]
    assert [message.role for message in history.messages] == ["user", "system", "assistant"]
    assert told(history) == said
    assert history.name == "talk"


def test_an_object_names_itself_its_tools_and_its_model(tmp_path: Path) -> None:
    value = {"id": "mine", "model": "gpt-4o", "tools": TOOLS, "messages": SAID, "notes": "none"}
    (history,) = read_file(written(tmp_path / "a.json", value))
    assert (history.name, history.model, told(history)) == ("mine", "gpt-4o", SAID)
    assert history.tools is not None
    assert json.loads(history.tools) == TOOLS


def test_an_array_of_sessions_is_several(tmp_path: Path) -> None:
    other = {"messages": [user("else"), reply("so")], "tools": []}
    found = read_file(written(tmp_path / "a.json", [{"id": "x", "messages": SAID}, other]))
    assert [(history.name, len(history.messages), history.tools) for history in found] == [
        ("x", 4, None),
        ("a:2", 2, None),
    ]


def test_a_message_a_line_is_one_session(tmp_path: Path) -> None:
    for said in (SAID, SAID[1:2]):
        (history,) = read_file(written(tmp_path / "talk.jsonl", *said))
        assert (history.name, told(history)) == ("talk", said)


def test_requests_that_continue_each_other_are_one_session(tmp_path: Path) -> None:
    file = written(
        tmp_path / "log.jsonl",
        {"messages": SAID[:2]},
        {"messages": SAID[:4], "model": "m"},
        {"messages": [user("else")]},
        {"messages": [user("else"), reply("so"), user("?")]},
    )
    found = read_file(file)
    assert [(history.name, told(history)) for history in found] == [
        ("log:1", SAID[:4]),
        ("log:3", [user("else"), reply("so"), user("?")]),
    ]
    assert found[0].model == "m"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('{"role": "user"', "line 1"),
        ('{"role": "user", "content": "a"}\nnonsense', "line 2"),
        ("42", "an object with `messages`"),
        ('{"other": []}', "no array `messages`"),
        ('[{"content": "a"}]', "message 0"),
        ('[{"role": "user", "content": "a"}, 7]', "message 1"),
        ('{"messages": []}', "no message"),
        ('[{"role": "system", "content": "a"}]', "no message"),
    ],
)
def test_a_file_without_a_session_is_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=said) as refused:
        read_file(file)
    assert refused.value.message.startswith(str(file))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_file(tmp_path / "none.json")


def test_times_are_taken_out_of_messages() -> None:
    said = [
        {**SYSTEM, "timestamp": 1},
        {**user("a"), "created_at": 1_700_000_000},
        {**reply("b"), "timestamp": "2023-11-14T22:13:30+00:00"},
        {**user("c"), "created_at": 1_700_000_020_500},
        {**reply("d"), "timestamp": "2023-11-14T22:13:35"},
    ]
    history = of_messages("t", said)
    # The last is earlier than the one before it: times never fall.
    assert history.times == (1_700_000_000, 1_700_000_010, 1_700_000_020.5, 1_700_000_020.5)
    assert told(history) == [SYSTEM, user("a"), reply("b"), user("c"), reply("d")]


@pytest.mark.parametrize("wrong", [None, "yesterday", True, [], "missing"])
def test_times_are_unknown_unless_every_message_has_one(wrong: Any) -> None:
    last = {**reply("b"), **({} if wrong == "missing" else {"timestamp": wrong})}
    history = of_messages("t", [{**user("a"), "timestamp": 5}, last])
    assert history.times is None
    assert told(history) == [user("a"), reply("b")]


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "half.json"
    file.write_text('[{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "a"}]')
    (history,) = read_file(file)
    assert history.messages[0].text == "\ufffd"


def test_too_deep_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    deep = "[" * 3000 + "]" * 3000
    for text in (deep, f'[{{"role": "user", "content": {deep}}}]', f'{{"role": "user", "content": {deep}}}'):
        file.write_text(text)
        with pytest.raises(InvalidRequest, match="deeply"):
            read_file(file)


@pytest.mark.parametrize("levels", range(200, 1100, 45))
def test_json_of_any_depth_is_read_or_refused(tmp_path: Path, levels: int) -> None:
    file = tmp_path / "deep.json"
    file.write_text(f'[{{"role": "user", "content": {"[" * levels + "]" * levels}}}, {{"role": "assistant"}}]')
    try:
        (history,) = read_file(file)
    except InvalidRequest as why:
        assert levels > 800
        assert "deeply" in why.message  # noqa: PT017
    else:
        assert history.requests == (1,)


def test_there_was_a_request_before_each_reply_and_one_after_the_last_result() -> None:
    talk = of_messages("t", SAID)
    assert talk.requests == (1, 3)
    assert of_messages("t", SAID[:-1]).requests == (1, 3)
    calls = [user("go"), call("a", "b"), result("a", "1"), result("b", "2"), reply("ok"), call("c")]
    assert of_messages("t", calls).requests == (1, 4, 5)
    assert of_messages("t", [*calls, result("c", "3")]).requests == (1, 4, 5, 7)
    # What an assistant says first was not asked for, but where instructions asked for it.
    assert of_messages("t", [reply("welcome"), user("hi")]).requests == (2,)
    assert of_messages("t", [SYSTEM, reply("welcome"), user("hi")]).requests == (0, 2)


async def _filled(store: Store) -> None:
    talk = Talk(store=store, tenant="anne", session="kept")
    await talk.say("one", "first")
    await talk.say("two", "second")
    asked = body("user", "three")
    exchange = await talk.begin(asked)
    called = body("assistant", "", content=None, tool_calls=[call("c", text=None)["tool_calls"][0]])
    await talk.settle(exchange, asked, replies=(called,))


def test_the_store_and_its_export_tell_the_same(tmp_path: Path) -> None:
    url, file = empty_store(tmp_path / "sessions.db"), tmp_path / "kept.jsonl"

    async def both() -> SessionHistory:
        store = await Store.open(url)
        try:
            await _filled(store)
            (row,) = await store.find("kept")
            file.write_bytes(b"".join([line async for line in write_lines(store.export(row.key))]))
            return await stored(store, row)
        finally:
            await store.close()

    ours = asyncio.run(both())
    (theirs,) = read_file(file)
    assert [message.text for message in ours.messages][:4] == ["one", "first", "two", "second"]
    assert ours.messages[-1].calls[0].name == "look"
    assert (ours.name, ours.tenant, ours.times is not None) == ("kept", "anne", True)
    assert (theirs.name, theirs.tenant, theirs.times) == (ours.name, ours.tenant, ours.times)
    assert told(theirs) == told(ours)
    assert theirs.requests == ours.requests == (1, 3, 5)


def test_an_export_without_messages_or_with_one_missing_is_refused(tmp_path: Path) -> None:
    session = {"record": "session", "id": "s", "head": "n"}
    with pytest.raises(InvalidRequest, match="no messages"):
        read_file(written(tmp_path / "a.jsonl", session))
    node = {"record": "node", "node": "n", "parent": "", "body": "b"}
    with pytest.raises(InvalidRequest, match="text of node n"):
        read_file(written(tmp_path / "a.jsonl", session, node))
    unreadable = {"record": "body", "body": "b", "text": "{half"}
    with pytest.raises(InvalidRequest, match="text of node n"):
        read_file(written(tmp_path / "a.jsonl", session, node, unreadable))
    broken: dict[str, Any] = {"record": "body", "body": "b", "data": {**call("c"), "role": "assistant"}}
    broken["data"]["tool_calls"][0]["function"]["arguments"] = '{"half'
    whole = {"record": "body", "body": "w", "text": json.dumps(user("go"))}
    partial = {"record": "node", "node": "n", "parent": "m", "body": "b", "partial": True}
    first = {"record": "node", "node": "m", "parent": "", "body": "w"}
    (history,) = read_file(written(tmp_path / "a.jsonl", session, partial, first, broken, whole))
    assert told(history) == [user("go"), {"role": "assistant", "content": None}]


# ------------------------------------------------------------------------ synthetic sessions


COUNTER = TokenCounter("tiktoken")


@pytest.fixture(scope="module")
def agents() -> tuple[SessionHistory, SessionHistory]:
    return synthetic_agents(COUNTER)


def sizes(history: SessionHistory, role: str) -> list[int]:
    return [COUNTER.text(message.text, "") for message in history.messages if message.role == role]


def test_sizes_are_as_told(agents: tuple[SessionHistory, SessionHistory]) -> None:
    for history in agents:
        assert len(sizes(history, "tool")) == 100
        assert all(1780 <= size <= 1800 for size in sizes(history, "tool"))
        assert set(sizes(history, "assistant")) == {200}
        assert history.tools is not None
        fixed = COUNTER.text(history.instructions[0].text, "") + COUNTER.json(history.tools, "")
        assert 7990 <= fixed <= 8000
        assert CHAT.problems(history.messages) == []
        assert len(history.requests) == 101


def test_of_the_noisy_one_s_output_two_fifths_are_noise(agents: tuple[SessionHistory, SessionHistory]) -> None:
    plain, noisy = agents
    for message in noisy.messages:
        if message.role == "tool":
            left = COUNTER.text(stripped(message.text), "") / COUNTER.text(message.text, "")
            assert left == pytest.approx(0.6, abs=0.01)
    assert all(stripped(message.text) == message.text for message in plain.messages)


def test_no_text_comes_twice(agents: tuple[SessionHistory, SessionHistory]) -> None:
    lines = [line for message in agents[0].messages if message.role == "tool" for line in message.text.split("\n")]
    assert len(set(lines)) == len(lines)


def test_it_is_the_same_every_time(agents: tuple[SessionHistory, SessionHistory]) -> None:
    assert synthetic_agents(COUNTER) == agents


def test_no_trimming_costs_what_can_be_reckoned_by_hand(agents: tuple[SessionHistory, SessionHistory]) -> None:
    """A prefix of 8,000 tokens, 2,000 more at each of 101 requests, nearly all of it read from the cache."""
    outcome = Backtest([baseline("baseline:slide")], standard_classes(), COUNTER, recall=False).run(agents[:1])
    sent = sum(8_000 + 2_000 * turn for turn in range(101))
    new = 8_000 + 2_000 * 100
    for name, read, write in (("read 0.5", 0.5, 1), ("read 0.1", 0.1, 1), ("read 0.05, write 1.25", 0.05, 1.25)):
        figures = figures_of(outcome, "baseline:none", name, "synthetic")
        assert figures.sent == pytest.approx(sent, rel=0.02)
        dollars = (read * (sent - new) + write * new) / 1e6
        assert figures.cost.input == pytest.approx(dollars, rel=0.03)
    sliding = {each.prices: each.ratio for each in outcome.strategies if each.strategy == "baseline:slide"}
    assert (sliding["read 0.5"] or 9) < 0.5
    assert (sliding["read 0.1"] or 0) > 1.4
    assert (sliding["read 0.05, write 1.25"] or 0) > 2.5


def test_a_folder_and_a_pattern_name_all_files_with_sessions(tmp_path: Path) -> None:
    for name in ("b.json", "a.jsonl"):
        written(tmp_path / name, {"messages": SAID})
    written(tmp_path / "manifest.json", {"sessions": []})
    (tmp_path / "notes.txt").write_text("no session")
    (tmp_path / "inner").mkdir()
    assert [history.name for history in read_files(tmp_path)] == ["a", "b"]
    assert [history.name for history in read_files(tmp_path / "[ab].json*")] == ["a", "b"]
    assert [history.name for history in read_files(tmp_path / "b.json")] == ["b"]
    with pytest.raises(InvalidRequest, match="No file matches"):
        read_files(tmp_path / "c*.json")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_files(tmp_path / "c.json")


def test_a_session_is_cut_where_its_agent_compacted(tmp_path: Path) -> None:
    said = [SYSTEM, user("one"), reply("1"), user("sum"), reply("2"), user("three"), reply("3")]
    value = {"id": "mine", "messages": said, "compactions": [{"after_message": 2}, {"after_message": 99}, {}]}
    first, second = read_files(written(tmp_path / "a.json", value))
    assert (first.name, told(first)) == ("mine:1", said[:3])
    assert (second.name, told(second)) == ("mine:2", [SYSTEM, *said[3:]])
