from __future__ import annotations

import pytest

from proxy.config.policies import BUILT_IN, BUILT_INS, OFF, Policies, select_policy, with_built_in
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
def test_the_first_policy_that_matches_serves(tenant: str, model: str, name: str) -> None:
    policies = {"small": SMALL, "odd": ODD, "all": ALL}
    assert select_policy(policies, tenant, model) == (name, policies[name])


def test_the_name_that_the_client_sends_goes_before_the_match() -> None:
    assert select_policy({"small": SMALL, "all": ALL}, "x", "y", "small") == ("small", SMALL)


def test_without_a_policy_for_everything_the_built_in_one_comes_last() -> None:
    assert with_built_in({}) == {"default": BUILT_IN}
    assert with_built_in({"small": SMALL}) == {"small": SMALL, "default": BUILT_IN}
    assert with_built_in({"default": SMALL}) == {"default": SMALL, "built-in": BUILT_IN}
    assert with_built_in({"all": ALL}) == {"all": ALL}
    assert select_policy({"small": SMALL}, "x", "y") == ("default", BUILT_IN)
    assert select_policy({}, "x", "y", "default") == ("default", BUILT_IN)


def test_the_built_in_policy_changes_nothing_on_arrival_and_trims_only_where_it_pays_or_must() -> None:
    assert BUILT_IN.on_arrival == ()
    assert BUILT_IN.trigger == Trigger(cost="auto", ratio=0.9)
    assert [edit.type for edit in BUILT_IN.edits] == ["clear_tool_results", "drop_oldest"]
    assert BUILT_IN.edits[1].when == Trigger(ratio=0.9)


def test_the_names_of_the_built_in_policy_are_those_that_extends_knows() -> None:
    assert with_built_in({}).items() <= BUILT_INS.items()
    assert with_built_in({"default": SMALL})["built-in"] is BUILT_INS["built-in"]


def test_the_policies_in_force_are_exchanged_as_a_whole() -> None:
    policies = Policies({"all": ALL})
    assert policies.select("team-a", "gpt-5") == ("all", ALL)
    policies.current = {"small": SMALL}
    assert policies.select("team-a", "gpt-5") == ("small", SMALL)
    with pytest.raises(InvalidRequest):
        policies.select("team-a", "gpt-5", "all")


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        select_policy({"small": SMALL}, "x", "y", "big")
    assert refusal.value.status == 400
    assert refusal.value.param == "X-Context-Policy"
    for word in ("'big'", "small", "default", OFF):
        assert word in refusal.value.message
