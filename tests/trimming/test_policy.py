"""What a policy file may say, and what is told to who says something else."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from proxy.trimming.edits import TOOL_OUTPUT_TYPES
from proxy.trimming.edits.dropping import DropOldest
from proxy.trimming.edits.summarize import COMPACTION
from proxy.trimming.policy import Match, Pin, Policy
from proxy.trimming.settings import Target, Trigger
from tests.trimming.notation import message

FULL: dict[str, Any] = {
    "match": {"models": ["gpt-*"], "tenants": ["team-a"]},
    "trigger": {"tokens": 50000},
    "target": {"tokens": 30000},
    "keep": {"rounds": 1, "spans": 4, "first_user": True},
    "pin": [{"regex": "(?i)\\b(never|must not)\\b|不要|必须", "roles": ["user"]}],
    "on_arrival": [{"type": "truncate_tool_output", "max_lines": 500}],
    "edits": [{"type": "keep_tool_calls", "last": 3, "when": {"messages": 10}}, {"type": "drop_oldest"}],
}


def test_a_full_policy_is_read() -> None:
    policy = Policy.model_validate(FULL)
    assert (policy.trigger, policy.target) == (Trigger(tokens=50000), Target(tokens=30000))
    assert policy.edits[1] == DropOldest()
    assert policy.arrival_edits == policy.on_arrival
    assert policy.keep.first_user


def test_what_is_written_of_a_policy_can_stand_in_a_file() -> None:
    policy = Policy.model_validate(FULL)
    written = policy.written()
    assert written["edits"] == [{"type": "keep_tool_calls", "when": {"messages": 10}}, {"type": "drop_oldest"}]
    assert written["on_arrival"] == FULL["on_arrival"]
    assert Policy.model_validate(written) == policy
    assert Policy().written() == {}


def test_an_empty_policy_sends_everything() -> None:
    policy = Policy.model_validate({})
    assert (policy.trigger, policy.edits, policy.on_arrival, policy.pin) == (None, (), (), ())
    assert policy.match.covers("anyone", "any/model")


DROP = {"type": "drop_oldest"}
CALLS = {"type": "keep_tool_calls"}
ALWAYS = {"every_request": True}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"trigger": {"tokens": 10}, "target": {"tokens": 11}, "edits": [DROP]},
            r"target\.tokens \(11\) is above trigger\.tokens \(10\)",
        ),
        (
            {"trigger": {"ratio": 0.5}, "target": {"ratio": 0.6}, "edits": [DROP]},
            r"target\.ratio \(0\.6\) is above trigger\.ratio \(0\.5\)",
        ),
        ({"trigger": ALWAYS, "edits": [DROP]}, r"drop_oldest needs a target: set target\.tokens or target\.ratio"),
        ({"edits": [CALLS]}, r"need a trigger; it takes any of tokens, ratio, messages, .*, every_request"),
        ({"target": {"tokens": 5}}, "need a trigger"),
        ({"trigger": ALWAYS}, "a trigger without edits trims nothing"),
        ({"on_arrival": [CALLS]}, "keep_tool_calls may not stand under on_arrival; allowed here: truncate_tool_output"),
        ({"on_arrival": [DROP]}, "drop_oldest may not stand under on_arrival; allowed here: truncate_tool_output"),
        ({"edits": [{"type": "forget"}]}, "'keep_tool_calls', .*'drop_oldest'"),
        ({"edits": [{"last": 3}]}, "Unable to extract tag using discriminator 'type'"),
        ({"edits": [{"type": "keep_tool_calls", "last": -1}]}, "greater than or equal to 0"),
        ({"edits": [{"type": "keep_tool_calls", "lasst": 1}]}, "Extra inputs are not permitted"),
        ({"edits": [{"type": "keep_tool_calls", "scope": "some"}]}, "'history' or 'all'"),
        ({"on_arrival": [{"type": "truncate_tool_output", "max_bytes": 0}]}, "greater than 0"),
        ({"on_arrival": [{"type": "truncate_tool_output", "direction": "middle"}]}, "'head', 'tail' or 'head_tail'"),
        ({"keep": {"rounds": -1}}, "greater than or equal to 0"),
        ({"pin": [{"regex": "(?=ahead)"}]}, "not a pattern that RE2 takes: invalid perl operator"),
        ({"pin": [{"regex": "("}]}, "not a pattern that RE2 takes: missing"),
        ({"pin": [{"regex": ""}]}, "at least 1 character"),
        (
            {"pin": [{"regex": "x", "roles": ["boss"]}]},
            "'system', 'developer', 'user', 'assistant', 'tool' or 'function'",
        ),
        ({"pin": [{"regex": "x", "roles": []}]}, "at least 1 item"),
        ({"match": {"models": []}}, "at least 1 item"),
        ({"match": {"models": "gpt-*"}}, "valid tuple"),
        ({"triger": ALWAYS}, "Extra inputs are not permitted"),
    ],
)
def test_mistakes_are_errors_that_say_what_is_allowed(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Policy.model_validate(keys)


CUT = {"type": "truncate_tool_output", "max_lines": 9}


@pytest.mark.parametrize(
    ("keys", "at"),
    [
        ({"edits": [CALLS, CALLS]}, ("edits", 1)),
        ({"edits": [DROP, CALLS, DROP]}, ("edits", 2)),
        ({"edits": [CALLS, DROP, {**CALLS, "when": {"messages": 9}}]}, ("edits", 2)),
        ({"edits": [{**CALLS, "when": {"messages": 9}}, {**CALLS, "when": {"messages": 9}}]}, ("edits", 1)),
        ({"edits": [{**CALLS, "last": 3}, {**CALLS, "last": 5}]}, ("edits", 1)),
        ({"on_arrival": [CUT, {**CUT, "direction": "tail"}, CUT]}, ("on_arrival", 2)),
    ],
)
def test_an_edit_to_which_one_before_it_leaves_nothing_is_an_error(keys: dict[str, Any], at: tuple[str, int]) -> None:
    with pytest.raises(ValidationError, match="can never do anything here") as refusal:
        Policy.model_validate({"trigger": {"tokens": 10}, "target": {"tokens": 5}, "edits": [CALLS], **keys})
    (error,) = refusal.value.errors()
    assert error["ctx"]["at"] == at


@pytest.mark.parametrize(
    "edits",
    [
        [{**CALLS, "last": 5}, {**CALLS, "last": 3}],
        [{**CALLS, "scope": "history"}, {**CALLS, "scope": "all"}],
        [{**CALLS, "when": {"messages": 9}}, CALLS],
        [{**CALLS, "when": {"messages": 9}}, {**CALLS, "when": {"messages": 8}}],
        [CUT, {**CUT, "max_lines": 10}],
        [CALLS, CUT, DROP],
    ],
)
def test_two_edits_of_a_type_that_may_both_do_something_are_fine(edits: list[dict[str, Any]]) -> None:
    policy = Policy.model_validate({"trigger": {"tokens": 10}, "target": {"tokens": 5}, "edits": edits})
    assert len(policy.edits) == len(edits)
    assert policy.warnings == ()


@pytest.mark.parametrize(
    ("keys", "at"),
    [
        ({"trigger": {"every_request": True, "messages": 4}}, [("trigger", "messages")]),
        ({"trigger": {"every_request": True, "cost": "auto"}}, []),
        ({"trigger": {"every_request": True}}, []),
        ({"edits": [], "mode": "observe", "trigger": None, "target": None}, [("mode",)]),
        ({"mode": "observe"}, []),
        ({"edits": [DROP, CALLS]}, [("edits", 0)]),
        ({"edits": [{**DROP, "when": {"messages": 9}}, CALLS]}, []),
        ({"edits": [{**DROP, "target": {"tokens": 7}}, CALLS]}, []),
        ({"edits": [DROP, CALLS], "trigger": {"cost": "auto"}}, []),
        ({"edits": [DROP, CALLS], "target": {"ratio": 0.5}}, []),
        ({"trigger": {"tokens": 100}, "target": {"tokens": 91}}, [("target", "tokens")]),
        ({"trigger": {"tokens": 100}, "target": {"tokens": 90}}, []),
        ({"trigger": {"ratio": 0.8}, "target": {"ratio": 0.8}}, [("target", "ratio")]),
        ({"trigger": {"tokens": 50000}, "edits": [{"type": "recent_window", "tokens": 49920}]}, [("edits", 0)]),
        ({"trigger": {"tokens": 100}, "edits": [{**DROP, "target": {"tokens": 95}}]}, [("edits", 0)]),
        ({"edits": [{"type": "summarize", "mode": "model", "prompt": "a", "soft": 0.5}]}, []),
        (
            {"edits": [{"type": "summarize", "mode": "statistics", "soft": 0.5, "prompt": "a", "max_tokens": 9}]},
            [("edits", 0, "prompt"), ("edits", 0, "soft")],
        ),
        ({"on_arrival": [{"type": "compact_tool_output", "methods": []}]}, [("on_arrival", 0, "methods")]),
    ],
)
def test_what_is_allowed_and_does_nothing_is_told(keys: dict[str, Any], at: list[tuple[str, ...]]) -> None:
    given = {"trigger": {"tokens": 10}, "target": {"tokens": 5}, "edits": [CALLS, DROP], **keys}
    assert [tuple(place) for _, *place in Policy.model_validate(given).warnings] == at


def test_a_target_in_another_unit_than_the_trigger_is_fine() -> None:
    policy = Policy.model_validate({"trigger": {"ratio": 0.8}, "target": {"tokens": 10**9}, "edits": [DROP]})
    assert policy.target == Target(tokens=10**9)


def test_wrong_patterns_are_told_once_and_not_by_the_library(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValidationError):
        Pin(regex="(")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("match", "tenant", "model", "covered"),
    [
        (Match(), "", "", True),
        (Match(models=("gpt-*",)), "t", "gpt-5", True),
        (Match(models=("gpt-*",)), "t", "GPT-5", False),
        (Match(models=("x", "o?")), "t", "o3", True),
        (Match(tenants=("team-*",)), "team-a", "m", True),
        (Match(tenants=("team-*",)), "b", "m", False),
    ],
)
def test_whom_a_policy_serves(match: Match, tenant: str, model: str, *, covered: bool) -> None:
    assert match.covers(tenant, model) is covered


def test_pins_search_the_text_of_messages_of_their_roles() -> None:
    policy = Policy(pin=(Pin(regex="(?i)never|必须", roles=("user",)), Pin(regex="keep this")))
    assert policy.pins(message("user NEVER again"))
    assert policy.pins(message("user 你必须"))
    assert not policy.pins(message("assistant never again"))
    assert policy.pins(message("tool a please keep this line"))
    assert not Policy().pins(message("user never"))


def test_the_version_stands_for_what_the_policy_does() -> None:
    version = Policy.model_validate(FULL).version
    assert len(version) == 12
    assert int(version, 16) >= 0
    assert Policy.model_validate(FULL).version == version
    assert Policy.model_validate({**FULL, "keep": {"spans": 4, "first_user": True}}).version == version
    assert Policy.model_validate({**FULL, "match": {}}).version == version
    assert Policy.model_validate({**FULL, "extends": "base"}).version == version
    assert Policy.model_validate({**FULL, "keep": {"spans": 5}}).version != version
    assert Policy.model_validate({**FULL, "edits": FULL["edits"][::-1]}).version != version


def test_the_version_is_the_same_in_every_process() -> None:
    # It changes when a setting gets another default: policies then do something else.
    assert Policy().version == "a5bb28a4dfdb"


def test_what_follows_from_settings_follows_from_those_of_a_copy() -> None:
    lean = Policy.model_validate(
        {"trigger": {"cost": "auto"}, "edits": [{"type": "summarize", "mode": "model", "upper": 900}]}
    )
    before = (lean.version, lean.uses_cost, lean.summarizer, lean.budget, lean.arrival_edits)
    copy = lean.model_copy(update={"trigger": Trigger(tokens=5), "edits": (DropOldest(),)})
    assert (copy.summarizer, copy.uses_cost) == (None, False)
    assert copy.version != lean.version
    assert lean.model_copy() == lean
    assert (lean.version, lean.uses_cost, lean.summarizer, lean.budget, lean.arrival_edits) == before


def test_the_budget_is_the_first_that_an_edit_keeps_to() -> None:
    def budget(*edits: dict[str, Any]) -> Target | None:
        return Policy.model_validate({"trigger": {"tokens": 9}, "edits": edits}).budget

    own = {"type": "recent_window", "target": {"tokens": 70}}
    assert budget({"type": "drop_internal"}) is None
    assert budget({"type": "drop_internal"}, own, {**own, "target": {"tokens": 50}}) == Target(tokens=70)


def test_a_policy_survives_being_written_and_read() -> None:
    policy = Policy.model_validate(FULL)
    assert Policy.model_validate_json(policy.model_dump_json()) == policy


def test_the_schema_carries_the_words_of_the_fields() -> None:
    schema = Policy.model_json_schema()
    for name, section in [("Policy", schema), *schema["$defs"].items()]:
        for field, described in section["properties"].items():
            assert described.get("description"), f"{name}.{field}"


def test_edits_of_tool_output_are_known_by_what_they_are() -> None:
    assert {"truncate_tool_output", "compact_tool_output"} <= set(TOOL_OUTPUT_TYPES)
    assert not {"drop_oldest", "keep_tool_calls"} & set(TOOL_OUTPUT_TYPES)


@pytest.mark.parametrize(
    ("keys", "reckons"),
    [
        ({}, False),
        ({"trigger": ALWAYS, "edits": [CALLS]}, False),
        ({"trigger": {"cost": "auto"}, "edits": [CALLS]}, True),
        ({"trigger": ALWAYS, "edits": [{**CALLS, "when": {"messages": 3}}]}, False),
        ({"trigger": ALWAYS, "edits": [CUT, {**CALLS, "when": {"cost": "auto"}}]}, True),
    ],
)
def test_it_reckons_where_anything_depends_on_what_a_move_costs(keys: dict[str, Any], reckons: bool) -> None:
    assert Policy.model_validate(keys).uses_cost is reckons


def test_how_a_model_sums_up_is_what_the_policy_says_first_or_what_is_common() -> None:
    counted = {"type": "summarize", "mode": "statistics"}
    written = {"type": "summarize", "mode": "model", "heading": "Before"}
    always = {"trigger": {"every_request": True}}
    policy = Policy.model_validate({**always, "edits": [counted, written, {**written, "heading": "Then"}]})
    assert policy.summarizer is policy.summarizing
    assert policy.summarizing.heading == "Before"
    for other in (Policy(), Policy.model_validate({**always, "edits": [counted]})):
        assert other.summarizer is None
        assert other.summarizing is COMPACTION
