from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from proxy.dialects import JsonObject
from proxy.errors import InvalidRequest
from proxy.store.archive import read_records
from proxy.store.store import Store
from tests.support.story import told

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> list[JsonObject]:
    """The records of that story."""

    async def tell() -> list[JsonObject]:
        store = await Store.open(f"sqlite:///{tmp_path_factory.mktemp('story') / 'palimpsest.db'}")
        records = await told(store)
        await store.close()
        return records

    return asyncio.run(tell())


def _set(**values: Any) -> Callable[[JsonObject], None]:
    return lambda record: record.update(values)


def _drop(name: str) -> Callable[[JsonObject], None]:
    def drop(record: JsonObject) -> None:
        del record[name]

    return drop


def _dropping(position: int) -> JsonObject:
    return {"why": [["drop_oldest", "old"]], "drop": [[0, 0, [[position, [5]]]]]}


def _gaps(*gaps: tuple[int, int, int, int], **more: Any) -> Callable[[JsonObject], None]:
    """Set gaps of (start, stop, tokens, tool_calls), and say nothing of what was kept."""
    changes = {"why": [["drop_oldest", "old"]], "gaps": [[0, *gap] for gap in gaps]}
    return _set(changes=changes | more)


def _summing(**changes: Any) -> Callable[[JsonObject], None]:
    summary = {"text": "So far.", "role": "system", "until": 1, "tokens": 3, "kind": "statistics"}
    return _set(changes={"summary": summary | {"covered_messages": 1, "covered_tokens": 4} | changes})


def _putting(text: str) -> JsonObject:
    return {"why": [["drop_oldest", "old"]], "put": [[0, 0, 0, 5, 1, text]]}


@pytest.mark.parametrize(
    ("kind", "spoil", "says"),
    [
        ("session", _set(format=2), "its format is 2"),
        ("session", _set(head="ab" * 20), "its head abab"),
        ("session", _set(instructions="ab" * 20), "its instructions abab"),
        ("session", _set(record="chapter"), "'chapter'"),
        ("session", _set(created_at="now"), "created_at"),
        ("session", _set(created_at=10**18), "created_at"),  # a year that no calendar has
        ("session", _set(arrival="a\x00b"), "arrival holds a NUL"),
        ("instructions", _set(data=[{"role": "system", "content": "other"}]), "its version is"),
        ("instructions", _drop("data"), "neither `data` nor `text`"),
        ("body", _set(data={"role": "user", "content": "other"}, text=None), "its body is"),
        ("body", _set(text="{"), "unexpected end of data"),
        ("body", _set(text='"\ud800"'), "surrogate"),
        ("node", _set(parent="ab" * 20), "its parent abab"),
        ("node", _set(node="ab" * 20), "its node is abab"),
        ("node", _set(body="ab" * 20), "there is no message with the text abab"),
        ("node", _set(tokens=-1), "tokens"),
        ("node", _set(tokens=2**40), "tokens"),
        ("node", _set(source="dream"), "source"),
        ("node", _set(agent="a\x00b"), "agent holds a NUL"),
        ("cut", _set(node="ab" * 20), "it stands at abab"),
        ("cut", _set(changes={"drop": 1}), "drop"),
        ("cut", _set(changes={"drop": [[0, 0, [[1, [5]]]]]}), "name a reason"),
        ("cut", _set(policy="a\x00b"), "policy holds a NUL"),
        ("cut", _set(position=2), "its position is 2, and its node has 1 messages"),
        ("cut", _set(position=0), "stands at position 0, which"),
        ("cut", _set(changes=_dropping(1)), "stands at position 1, which"),
        ("cut", _set(changes=_dropping(-1)), "stands at position -1, which"),
        ("cut", _gaps((0, 2, 5, 0)), "a gap from 0 to 2 is not in order from 0 to 1"),
        ("cut", _gaps((-1, 1, 5, 0)), "a gap from -1 to 1"),
        ("cut", _gaps((0, 0, 5, 0)), "a gap from 0 to 0"),
        ("cut", _gaps((0, 1, 5, 0), (0, 1, 5, 0)), "a gap from 0 to 1 is not in order from 1 to 1"),
        ("cut", _gaps((0, 1, -5, 0)), "the gap at 0 counts"),
        ("cut", _gaps((0, 1, 5, 2)), "the gap at 0 counts what 1 messages cannot have"),
        ("cut", _gaps(kept=[]), "are not the messages outside its gaps"),
        ("cut", _gaps((0, 1, 5, 0), kept=["ab" * 20]), "are not the messages outside its gaps"),
        ("cut", _summing(until=2), "its summary covers 2 messages, and it stands after 1"),
        ("cut", _summing(until=-1), "its summary covers -1"),
        ("cut", _summing(tokens=-1), "its summary counts what 1 messages cannot have"),
        ("cut", _summing(covered_messages=2), "its summary counts what 1 messages cannot have"),
        ("cut", _summing(covered_tokens=2**40), "its summary counts"),
        ("cut", _summing(role="tool"), "role"),
        ("cut", _set(changes={"account": {"turns": 1}}), "account"),
        ("cut", _set(changes=_putting("[]")), "puts what is no message"),
        ("cut", _set(changes=_putting("{")), "unexpected end of data"),
        ("hidden", _set(node="ab" * 20), "it belongs to abab"),
        ("hidden", _set(before=["[]"]), "is no message"),
        ("hidden", _set(after="[]"), "after"),
        ("hidden", _set(tokens=-1), "tokens"),
        ("summary", _set(node="ab" * 20), "a branch with abab"),
        ("summary", _set(until=2), "it covers 2 messages"),
        ("summary", _set(predecessor="sum_0"), "its predecessor sum_0 does not stand in a line above"),
        ("summary", _set(state=[]), "state"),
        ("node", _set(policy="a\x00b"), "policy holds a NUL"),
        ("node", _set(arrival=_dropping(1)), "stands at position 1, which"),
        ("node", _set(arrival=[]), "array"),
        ("node", _set(arrival=_putting('"text"')), "puts what is no message"),
    ],
)
def test_a_record_that_is_wrong_is_named_by_its_line(
    story: list[JsonObject], kind: str, spoil: Callable[[JsonObject], None], says: str
) -> None:
    records = copy.deepcopy(story)
    line, record = next((line, one) for line, one in enumerate(records, 1) if one["record"] == kind)
    spoil(record)
    with pytest.raises(InvalidRequest, match=says) as refused:
        read_records(records)
    assert refused.value.message.startswith(f"Line {line}: ")
    assert refused.value.param == f"[{line - 1}]"


def test_what_a_cut_kept_is_of_its_branch(story: list[JsonObject]) -> None:
    records = copy.deepcopy(story)
    (cut,) = (record for record in records if record["record"] == "cut" and record["position"] == 3)
    depth_three = [node for node in _nodes_at(records, 3) if node != cut["node"]]
    assert len(depth_three) == 1
    read_records(records)
    cut["changes"]["kept"][1] = depth_three[0]
    with pytest.raises(InvalidRequest, match="what it kept is not of its branch"):
        read_records(records)


@pytest.mark.parametrize(
    ("kind", "says"), [("hidden", "another line says already"), ("summary", "there are two summaries sum_b")]
)
def test_what_is_there_once_is_not_said_twice(story: list[JsonObject], kind: str, says: str) -> None:
    twice = [record for record in story if record["record"] == kind][-1:]
    with pytest.raises(InvalidRequest, match=says):
        read_records([*story, *twice])


def _nodes_at(records: list[JsonObject], depth: int) -> list[str]:
    names = [""]
    for _ in range(depth):
        names = [one["node"] for one in records if one["record"] == "node" and one["parent"] in names]
    return names


@pytest.mark.parametrize(
    ("records", "says"), [([], "hold 0"), ([1], "Line 1"), ([{"record": "node"}], "Line 1")]
)
def test_what_is_no_export_is_refused(records: list[Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_records(records)
