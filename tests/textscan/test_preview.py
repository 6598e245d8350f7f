"""Previews: what of a document is shown, and that what is shown is so."""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from hashlib import sha512
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan.document import read_json, write_json
from proxy.textscan.preview import preview

BLOB = b64encode(b"".join(sha512(bytes([number])).digest() for number in range(20))).decode()


def page_text(value: Any, keep: int = 2, longest: int = 20, ref: str | None = None) -> Any:
    """Return what is shown of a value; None where all of it is."""
    made = preview(read_json(json.dumps(value)), keep, longest, ref)
    return None if made is None else json.loads(write_json(made))


def items(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "name": f"item {number}"} for number in range(count)]


def test_twenty_items_become_five_entries() -> None:
    value = {"success": True, "total": 20, "items": items(20), "next_cursor": "c"}
    assert page_text(value, ref="node_1") == {
        "success": True,
        "total": 20,
        "items_preview": [*items(2), "… (16 omitted)", *items(20)[-2:]],
        "next_cursor": "c",
        "compressed": True,
        "full_output": "node_1",
    }


def test_a_list_by_itself_and_lists_inside() -> None:
    assert page_text(items(20), keep=1) == {
        "items_preview": [items(1)[0], "… (18 omitted)", items(20)[19]],
        "compressed": True,
    }
    value = {"data": {"rows": items(9)}, "few": items(5), "numbers": list(range(10)), "more": list(range(12))}
    assert page_text(value) == {
        "data": {"rows_preview": [*items(2), "… (5 omitted)", *items(9)[-2:]], "compressed": True},
        "few": items(5),
        "numbers": list(range(10)),
        "more_preview": [0, 1, "… (8 omitted)", 10, 11],
        "compressed": True,
    }


@pytest.mark.parametrize(
    "value",
    [{}, [], items(5), {"a": "short", "b": [1, 2.50, True, None]}, {f"k{number}": number for number in range(40)}],
)
def test_what_is_short_is_shown_whole(value: Any) -> None:
    assert page_text(value) is None


def test_a_long_name_is_not_remembered() -> None:
    name = "name" * 1000
    before = sys.getrefcount(name)
    assert preview([((name, 1),)] * 30, 2, 20) is not None
    assert sys.getrefcount(name) == before


@pytest.mark.parametrize(
    "trouble",
    [
        {"id": 10, "name": "item", "status": "FAILED"},
        {"id": 10, "name": "item", "error": "no"},
        {"id": 10, "name": "item", "errors": [1]},
        {"id": 10, "name": "item", "error": 5},
        {"id": 10, "name": "item", "success": False},
        {"id": 10, "name": "item", "status_code": 503},
        {"id": 10, "name": "item", "result": {"message": "操作失败"}},
        "an exception",
    ],
)
def test_what_tells_of_trouble_is_shown(trouble: Any) -> None:
    assert page_text({"k": [*items(10), trouble, *items(10)]})["k_preview"] == [
        *items(2), "… (8 omitted)", trouble, "… (8 omitted)", *items(10)[-2:],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"error": None, "errors": [], "failed": 0, "exception": "", "warnings": "none", "is_error": False},
        {"success": True, "status": 200, "code": 4040, "price": 404},
        {"text": "an error is told of somewhere in a long text that any item may have " * 5},
        {"inner": {}, "more": {"error": False}, "list": ["error"]},
    ],
)
def test_what_does_not_tell_of_trouble_is_not(more: dict[str, Any]) -> None:
    value = [{"id": number, **more} for number in range(30)]
    assert len(page_text(value)["items_preview"]) == 5


def test_of_many_errors_the_first_are_shown_and_the_others_counted() -> None:
    made = page_text([{"id": number, "error": "x"} for number in range(40)])["items_preview"]
    assert [item["id"] for item in made if isinstance(item, dict)] == [*range(12), 38, 39]
    assert made[-4:-2] == ["… (26 omitted)", {"id": 38, "error": "x"}]
    assert made[-1] == "… (26 of those omitted tell of errors)"


def test_items_unlike_the_others_are_shown() -> None:
    value: list[dict[str, Any]] = [{"id": number, "state": "open", "on": True} for number in range(30)]
    value[10]["state"] = "closed"
    value[15]["on"] = False
    value[20]["note"] = "x"
    made = page_text(value)["items_preview"]
    assert [item["id"] for item in made if isinstance(item, dict)] == [0, 1, 10, 15, 20, 28, 29]


def test_items_of_many_kinds_are_like_each_other() -> None:
    value: list[Any] = [{f"k{number % 7}": str(number), "n": str(number)} for number in range(30)]
    assert len(page_text(value)["items_preview"]) == 5
    value = [{"state": f"{number % 9}", "text": "x" * (41 + number)} for number in range(30)]
    assert len(page_text(value)["items_preview"]) == 5
    assert len(page_text(items(6000))["items_preview"]) == 5
    assert len(page_text([*items(20), 1])["items_preview"]) == 5


def test_fields_beside_those_that_tell_most_go() -> None:
    item = {f"field{number}": number for number in range(12)} | {"inner": {"a": 1}, "url": "u", "status": "s"}
    made = page_text([item, item])["items_preview"][0]
    assert made == {f"field{number}": number for number in range(6)} | {
        "url": "u",
        "status": "s",
        "…": "(7 fields omitted)",
    }
    telling = {f"a{number}_id": number for number in range(11)}
    assert page_text([telling, "x" * 100])["items_preview"][0] == telling


def test_of_a_map_the_ends_and_what_tells_most_are_shown() -> None:
    value: dict[str, Any] = {f"k{number}": number for number in range(100)}
    value["k50"] = "it failed"
    value["total"] = 100
    value["last"] = 1
    made = page_text(value)
    assert made == {
        "k0": 0,
        "k1": 1,
        "k50": "it failed",
        "total": 100,
        "last": 1,
        "…": "(97 members omitted)",
        "compressed": True,
    }
    assert page_text(value, keep=80) is None


def test_long_texts() -> None:
    assert page_text({"a": "x" * 50}) is None
    assert page_text({"a": "x" * 51})["a"] == "x" * 20 + "… (31 characters omitted)"
    assert page_text({"a": BLOB})["a"] == f"… ({len(BLOB)} characters of base64 omitted)"
    log = "\n".join(["begins here", *["all well"] * 20, "ERROR: it broke", *["x"] * 20])
    told = page_text({"a": log})["a"]
    assert told.startswith("begins here\nall well… (")
    assert told.endswith(" characters omitted)\nERROR: it broke")
    count = int(told.split("… (")[1].split(" ")[0])
    assert count + 20 + len("ERROR: it broke") == len(log)


def test_names_that_are_taken() -> None:
    value = {"k": items(9), "k_preview": 1, "compressed": False}
    made = page_text(value, ref="r")
    assert made["output_preview"]["compressed"] is False
    assert made["output_preview"]["k_preview"] == 1
    assert len(made["output_preview"]["k"]) == 5
    assert (made["compressed"], made["full_output"]) == (True, "r")
    inner = page_text({"a": {"k": items(9), "compressed": False}})
    assert inner["a"]["compressed"] is False
    assert inner["compressed"] is True


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["error", "x" * 60, "a\nfailed\n" * 9])
)
NAMES = st.sampled_from(["id", "error", "success", "k", "status", "compressed", "items", "items_preview"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=15) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=12),
    max_leaves=25,
)


def leaves(value: Any) -> list[Any]:
    """Return the scalars of a value."""
    if isinstance(value, dict):
        return [leaf for member in value.values() for leaf in leaves(member)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


@settings(max_examples=60)
@given(st.lists(VALUES, max_size=30) | st.dictionaries(NAMES, VALUES), st.integers(1, 4))
def test_what_is_shown_is_verbatim_or_marked(value: Any, keep: int) -> None:
    made = page_text(value, keep, ref="node_1")
    if made is None:
        return
    assert (made["compressed"], made["full_output"]) == (True, "node_1")
    assert page_text(value, keep, ref="node_1") == made
    given_leaves = leaves(value)
    for leaf in leaves(made):
        assert leaf in given_leaves or leaf in (True, "node_1") or "omitted" in leaf


def test_items_show_only_what_names_them_and_what_is_asked_for() -> None:
    items = [{"id": at, "title": "t", "rating": 5, "words": "w"} for at in range(9)]
    asked = frozenset({"rating"})
    made = preview(
        read_json(json.dumps({"items": items, "bare": [{"a": [1], "b": [2]}, {"c": 1, "d": 2, "e": 3}, {}, 4]})),
        1,
        90,
        asked=asked,
    )
    assert made is not None
    assert json.loads(write_json(made)) == {
        "items_preview": [
            {"id": 0, "title": "t", "rating": 5, "…": "(1 fields omitted)"},
            "… (7 omitted)",
            {"id": 8, "title": "t", "rating": 5, "…": "(1 fields omitted)"},
        ],
        "bare_preview": [{"a": [1], "…": "(1 fields omitted)"}, "… (2 omitted)", 4],
        "compressed": True,
    }
    short = preview(read_json(json.dumps([{"c": 1, "d": 2, "e": 3}, {}, {"id": 1}])), 1, 90, asked=frozenset())
    assert short is not None
    shown_items = [{"c": 1, "d": 2, "…": "(1 fields omitted)"}, {}, {"id": 1}]
    assert json.loads(write_json(short)) == {"items_preview": shown_items, "compressed": True}
