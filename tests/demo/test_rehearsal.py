from pathlib import Path

import pytest

from proxy.cli.serving import server_config
from proxy.demo.configuration import CONFIG, STORE
from proxy.demo.measures import Outcome
from proxy.demo.rehearsal import rehearse


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def measured(folder: Path) -> Outcome:
    with pytest.MonkeyPatch.context() as environment:
        # What is set for the proxy in use is not for the demonstration.
        environment.setenv("PALIMPSEST_AUTH__MODE", "keys")
        return rehearse(server_config, folder)


def test_all_of_it_holds(measured: Outcome) -> None:
    assert [check.claim for check in measured.checks if not check.holds] == []


def test_every_request_was_measured_in_both_runs(measured: Outcome) -> None:
    assert len(measured.trimmed.steps) == len(measured.whole.steps) == len(measured.recording.replies) == 30
    assert [step.tokens for step in measured.trimmed.steps] == [step.tokens for step in measured.whole.steps]


def test_no_request_is_above_the_trigger_and_each_move_meets_the_target(measured: Outcome) -> None:
    steps = measured.trimmed.steps
    assert all(step.forwarded_tokens <= measured.trigger for step in steps)
    assert all(step.forwarded_tokens <= measured.target for step in steps if step.moved)
    assert any(step.tokens > measured.trigger for step in steps)


def test_every_edit_of_the_policy_worked(measured: Outcome) -> None:
    worked = {edit for step in measured.trimmed.steps for edit in step.edits}
    assert worked == {"truncate_tool_output", "keep_tool_calls", "drop_oldest"}


def test_without_trimming_nothing_changes(measured: Outcome) -> None:
    assert all(step.tokens == step.forwarded_tokens and not step.edits for step in measured.whole.steps)


def test_the_store_and_its_configuration_are_left(measured: Outcome, folder: Path) -> None:
    assert (folder / STORE).is_file()
    assert (folder / CONFIG).is_file()
