"""What `extends` takes over. What is said of wrong ones: broken.yaml."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from proxy.config.inheritance import ancestry, extended, problems
from proxy.config.model import Settings
from proxy.trimming import Match, Policy

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


def test_everything_is_taken_over_but_the_match() -> None:
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


def test_null_takes_a_key_away() -> None:
    policy = merged(base=BASE, a={"extends": "base", "target": {"tokens": None, "ratio": 0.5}})
    assert policy.target is not None
    assert (policy.target.tokens, policy.target.ratio) == (None, 0.5)
    with pytest.raises(ValidationError, match="drop_oldest needs a target"):
        merged(base=BASE, a={"extends": "base", "target": None})


def test_chains_are_followed_wherever_the_policies_stand() -> None:
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


def test_a_policy_changes_with_what_it_extends() -> None:
    other = {**BASE, "trigger": {"tokens": 60}}
    child = {"extends": "base", "keep": {"spans": 3}}
    assert merged(base=BASE, a=child).version != merged(base=other, a=child).version


BUILT_IN = Policy.model_validate({**BASE, "match": {"models": ["built"]}})
BUILT_INS = {"default": BUILT_IN, "built-in": BUILT_IN}


@pytest.mark.parametrize("name", ["default", "built-in"])
def test_a_built_in_policy_can_be_extended(name: str) -> None:
    (policy,) = extended({"a": {"extends": name, "keep": {"spans": 1}}}, BUILT_INS).values()
    taken = Policy.model_validate(policy)
    assert (taken.keep.rounds, taken.keep.spans, taken.edits) == (2, 1, BUILT_IN.edits)
    assert taken.match == Match()


def test_a_policy_of_the_built_in_ones_name_extends_that() -> None:
    policies = {"default": {"extends": "default", "keep": {"spans": 1}}, "a": {"extends": "default"}}
    assert list(problems(policies, BUILT_INS)) == []
    found = {name: Policy.model_validate(policy) for name, policy in extended(policies, BUILT_INS).items()}
    assert found["default"].keep.spans == found["a"].keep.spans == 1
    assert found["default"].edits == found["a"].edits == BUILT_IN.edits


def test_a_policy_that_is_one_already_can_be_extended_and_takes_over_nothing() -> None:
    settings = Settings(policies={"base": Policy.model_validate(BASE), "a": {"extends": "base"}})  # type: ignore[dict-item]  # pydantic reads it
    assert settings.policies["a"].edits == settings.policies["base"].edits
    again = Settings(policies=settings.policies)
    assert again.policies == settings.policies


def test_what_was_merged_can_be_written_and_read_again() -> None:
    settings = Settings(policies={"a": {"extends": "base", "keep": {"spans": 1}}, "base": BASE})  # type: ignore[dict-item]  # pydantic reads it
    assert Settings.model_validate(settings.model_dump(mode="json")).policies == settings.policies


def test_every_policy_of_a_circle_is_told_and_no_other() -> None:
    policies = {
        "a": {"extends": "b"},
        "b": {"extends": "c"},
        "c": {"extends": "b"},
        "d": {"extends": "d2"},
        "d2": 7,
    }
    assert dict(problems(policies, {})) == {
        "b": "a policy cannot extend itself: b -> c -> b",
        "c": "a policy cannot extend itself: c -> b -> c",
    }


def test_each_unknown_name_is_told() -> None:
    with pytest.raises(ValidationError) as refusal:
        merged(a={"extends": "x"}, b={"extends": "y"}, c={"extends": "a"})
    assert [error["loc"] for error in refusal.value.errors()] == [
        ("policies", "a", "extends"),
        ("policies", "b", "extends"),
    ]


def test_what_is_no_policy_is_left_to_be_told_as_that() -> None:
    with pytest.raises(ValidationError) as refusal:
        merged(a={"extends": "base"}, base=7)
    assert [error["loc"] for error in refusal.value.errors()] == [("policies", "base")]
    with pytest.raises(ValidationError, match="valid dictionary"):
        Settings(policies=[1])  # type: ignore[arg-type]  # that is what is shown
