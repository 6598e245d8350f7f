"""Which policy serves a request, and what `extends` takes over. Wrong ones: broken.yaml."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from proxy.config.policies import (
    BUILT_IN,
    BUILT_INS,
    OFF,
    Policies,
    ancestry,
    extended,
    laid_over,
    problems,
    unreachable,
    with_built_in,
)
from proxy.config.settings import Settings
from proxy.errors import InvalidRequest
from proxy.trimming import Match, Policy, Trigger

SMALL = Policy(match=Match(models=("gpt-*",), tenants=("team-*",)))
ODD = Policy(match=Match(models=("odd",)))
ALL = Policy(match=Match())


@pytest.mark.parametrize(
    ("tenant", "model", "name"),
    [
        ("team-a", "gpt-5", "small"),
        ("team-a", "odd", "odd"),
        ("other", "gpt-5", "all"),
        ("team-a", "GPT-5", "all"),
        ("team-a", "", "all"),
    ],
)
def test_the_first_policy_that_matches_is_used(tenant: str, model: str, name: str) -> None:
    policies = {"small": SMALL, "odd": ODD, "all": ALL}
    assert Policies(policies).select(tenant, model) == (name, policies[name])


def test_the_name_in_the_header_wins_over_the_match() -> None:
    assert Policies({"small": SMALL, "all": ALL}).select("x", "y", "small") == ("small", SMALL)


def test_without_a_catch_all_the_built_in_policy_comes_last() -> None:
    assert with_built_in({}) == {"default": BUILT_IN}
    assert with_built_in({"small": SMALL}) == {"small": SMALL, "default": BUILT_IN}
    assert with_built_in({"default": SMALL}) == {"default": SMALL, "built-in": BUILT_IN}
    assert with_built_in({"all": ALL}) == {"all": ALL}
    assert Policies({"small": SMALL}).select("x", "y") == ("default", BUILT_IN)
    assert Policies({}).select("x", "y", "default") == ("default", BUILT_IN)


@pytest.mark.parametrize("policies", [{}, {"all": ALL}, {"default": SMALL}])
def test_the_header_may_always_name_the_built_in_policy(policies: dict[str, Policy]) -> None:
    assert Policies(policies).select("x", "y", "built-in") == ("built-in", BUILT_IN)


def test_the_built_in_policy_trims_only_to_save_money_or_to_fit_the_window() -> None:
    assert BUILT_IN.on_arrival == ()
    assert BUILT_IN.trigger == Trigger(cost="auto", ratio=0.9)
    assert [edit.type for edit in BUILT_IN.edits] == ["clear_tool_results", "compact_tool_output", "drop_oldest"]
    assert BUILT_IN.edits[-1].when == Trigger(ratio=0.9)


def test_extends_knows_the_names_of_the_built_in_policy() -> None:
    assert with_built_in({}).items() <= BUILT_INS.items()
    assert with_built_in({"default": SMALL})["built-in"] is BUILT_INS["built-in"]


def test_a_reload_replaces_all_policies() -> None:
    policies = Policies({"all": ALL})
    assert policies.select("team-a", "gpt-5") == ("all", ALL)
    policies.current = {"small": SMALL}
    assert policies.select("team-a", "gpt-5") == ("small", SMALL)
    with pytest.raises(InvalidRequest):
        policies.select("team-a", "gpt-5", "all")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Policies({"small": SMALL}).select("team-a", "y", "big")
    assert refusal.value.status == 400
    assert refusal.value.param == "X-Context-Policy"
    for word in ("'big'", "small", "default", "built-in", OFF):
        assert word in refusal.value.message


def test_a_refused_name_tells_nothing_of_policies_for_others_alone() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Policies({"of-team-a": SMALL, "all": ALL}).select("x", "y", "big")
    assert "of-team-a" not in refusal.value.message
    assert "all" in refusal.value.message


BASE: dict[str, Any] = {
    "match": {"models": ["gpt-*"]},
    "trigger": {"tokens": 50},
    "target": {"tokens": 30},
    "keep": {"rounds": 2, "spans": 9},
    "pin": [{"regex": "never"}],
    "edits": [{"type": "keep_tool_calls", "last": 2}, {"type": "drop_oldest"}],
}


def merged(name: str = "a", **policies: Any) -> Policy:
    return Settings(policies=policies).policies[name]


def test_extends_takes_over_everything_but_the_match() -> None:
    base = merged("base", base=BASE)
    taken = merged(a={"extends": "base"}, base=BASE)
    assert taken == base.model_copy(update={"match": Match(), "extends": "base"})
    assert taken.version == base.version


def test_mappings_are_merged_and_lists_are_replaced() -> None:
    own = {
        "extends": "base",
        "match": {"tenants": ["anne"]},
        "trigger": {"messages": 10},
        "keep": {"spans": 1},
        "edits": [{"type": "drop_oldest"}],
    }
    policy = merged(base=BASE, a=own)
    assert policy == Policy.model_validate(
        {
            "extends": "base",
            "match": {"tenants": ["anne"]},
            "trigger": {"tokens": 50, "messages": 10},
            "target": {"tokens": 30},
            "keep": {"rounds": 2, "spans": 1},
            "pin": [{"regex": "never"}],
            "edits": [{"type": "drop_oldest"}],
        }
    )
    assert policy.version != merged("base", base=BASE).version


def test_null_removes_a_key() -> None:
    policy = merged(base=BASE, a={"extends": "base", "target": {"tokens": None, "ratio": 0.5}})
    assert policy.target is not None
    assert (policy.target.tokens, policy.target.ratio) == (None, 0.5)
    with pytest.raises(ValidationError, match="drop_oldest needs a target"):
        merged(base=BASE, a={"extends": "base", "target": None})
    policy = merged(base=BASE, a={"extends": "base", "pin": None, "keep": {"rounds": None}, "on_arrival": None})
    assert (policy.pin, policy.keep.rounds, policy.on_arrival) == ((), 1, ())
    with pytest.raises(ValidationError, match="match"):
        merged(base=BASE, a={"extends": "base", "match": None})


def test_chains_are_followed_in_any_order() -> None:
    policies = {
        "c": {"extends": "b", "keep": {"spans": 3}},
        "b": {"extends": "a", "match": {"models": ["x"]}, "keep": {"rounds": 5}, "pin": []},
        "a": BASE,
    }
    policy = merged("c", **policies)
    assert (policy.keep.rounds, policy.keep.spans, policy.pin) == (5, 3, ())
    assert policy.match == Match()
    assert policy.extends == "b"
    assert ancestry("c", policies) == ["b", "a"]


def test_the_version_changes_with_the_extended_policy() -> None:
    other = {**BASE, "trigger": {"tokens": 60}}
    child = {"extends": "base", "keep": {"spans": 3}}
    assert merged(base=BASE, a=child).version != merged(base=other, a=child).version


@pytest.mark.parametrize("name", ["default", "built-in"])
def test_a_built_in_policy_can_be_extended(name: str) -> None:
    taken = Policy.model_validate(extended("a", {"a": {"extends": name, "keep": {"spans": 1}}}))
    assert (taken.keep.first_user, taken.keep.spans, taken.edits) == (True, 1, BUILT_IN.edits)
    assert taken.match == Match()


def test_a_policy_may_extend_the_built_in_one_of_the_same_name() -> None:
    policies = {"default": {"extends": "default", "keep": {"spans": 1}}, "a": {"extends": "default"}}
    assert list(problems(policies)) == []
    found = {name: Policy.model_validate(extended(name, policies)) for name in policies}
    assert found["default"].keep.spans == found["a"].keep.spans == 1
    assert found["default"].edits == found["a"].edits == BUILT_IN.edits


def test_a_policy_object_can_be_extended_and_takes_over_nothing() -> None:
    settings = Settings(policies={"base": Policy.model_validate(BASE), "a": {"extends": "base"}})  # type: ignore[dict-item]  # pydantic reads it
    assert settings.policies["a"].edits == settings.policies["base"].edits
    again = Settings(policies=settings.policies)
    assert again.policies == settings.policies


def test_merged_policies_can_be_written_and_read_again() -> None:
    settings = Settings(policies={"a": {"extends": "base", "keep": {"spans": 1}}, "base": BASE})  # type: ignore[dict-item]  # pydantic reads it
    assert Settings.model_validate(settings.model_dump(mode="json")).policies == settings.policies


def test_each_policy_of_a_circle_is_reported() -> None:
    policies = {"a": {"extends": "b"}, "b": {"extends": "c"}, "c": {"extends": "b"}, "d": {"extends": "d2"}, "d2": 7}
    assert dict(problems(policies)) == {
        "b": "a policy cannot extend itself: b -> c -> b",
        "c": "a policy cannot extend itself: c -> b -> c",
    }


def test_each_unknown_base_is_reported() -> None:
    with pytest.raises(ValidationError) as refusal:
        merged(a={"extends": "x"}, b={"extends": "y"}, c={"extends": "a"})
    assert [error["loc"] for error in refusal.value.errors()] == [
        ("policies", "a", "extends"),
        ("policies", "b", "extends"),
    ]


def test_an_invalid_base_is_reported_as_such() -> None:
    with pytest.raises(ValidationError) as refusal:
        merged(a={"extends": "base"}, base=7)
    assert [error["loc"] for error in refusal.value.errors()] == [("policies", "base")]
    with pytest.raises(ValidationError, match="valid dictionary"):
        Settings(policies=[1])  # type: ignore[arg-type]  # that is what is shown


@pytest.mark.parametrize(
    ("below", "above", "both"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"x": 1, "y": {"z": 1}}}, {"a": {"y": {"w": 2}}}, {"a": {"x": 1, "y": {"z": 1, "w": 2}}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"x": 1}}, {"a": None}, {"a": None}),
        ({"a": None}, {"a": {"x": 1}}, {"a": {"x": 1}}),
        ({"a": {"x": 1}}, {"a": {}}, {"a": {"x": 1}}),
    ],
)
def test_laid_over_merges_mappings_and_replaces_everything_else(
    below: dict[str, Any], above: dict[str, Any], both: dict[str, Any]
) -> None:
    assert laid_over(below, above) == both


def test_laid_over_changes_neither_mapping() -> None:
    below, above = {"a": {"x": 1}}, {"a": {"y": 2}}
    laid_over(below, above)["a"]["z"] = 3
    assert (below, above) == ({"a": {"x": 1}}, {"a": {"y": 2}})


def test_a_match_after_a_catch_all_is_unreachable() -> None:
    by_name = Policy()
    policies = {"small": SMALL, "first": ALL, "by-name": by_name, "late": ODD, "all": ALL}
    assert list(unreachable(policies)) == [("late", "first"), ("all", "first")]
    assert list(unreachable({"base": by_name, "late": ODD})) == [("late", "base")]
    assert list(unreachable({"small": SMALL, "all": ALL})) == []


def test_a_policy_that_no_match_reaches_can_be_named() -> None:
    policies = Policies({"all": ALL, "late": ODD})
    assert policies.select("x", "odd") == ("all", ALL)
    assert policies.select("x", "y", "late") == ("late", ODD)
