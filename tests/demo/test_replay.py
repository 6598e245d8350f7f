from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from proxy.cli.serving import server_config
from proxy.config import load
from proxy.demo import CONFIG, STORE, DemoOutcome, rehearse
from proxy.demo.replay import Recording, _same, configuration
from tests.demo.measured import FIRST, SECOND, outcome, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def measured(folder: Path) -> DemoOutcome:
    with pytest.MonkeyPatch.context() as environment:
        # What is set for the proxy in use is not for the demonstration.
        environment.setenv("PALIMPSEST_AUTH__MODE", "keys")
        return rehearse(server_config, folder)


def test_all_checks_of_the_demonstration_hold(measured: DemoOutcome) -> None:
    assert [claim for claim, holds in measured.checks.items() if not holds] == []


def test_every_request_was_measured_in_both_runs(measured: DemoOutcome) -> None:
    assert len(measured.trimmed.steps) == len(measured.whole.steps) == len(measured.recording.replies) == 30
    assert [step.tokens for step in measured.trimmed.steps] == [step.tokens for step in measured.whole.steps]


def test_no_request_is_above_the_trigger_and_each_trim_meets_the_target(measured: DemoOutcome) -> None:
    steps = measured.trimmed.steps
    assert all(step.forwarded_tokens <= measured.trigger for step in steps)
    assert all(step.forwarded_tokens <= measured.target for step in steps if step.moved)
    assert any(step.tokens > measured.trigger for step in steps)


def test_every_edit_of_the_policy_is_used(measured: DemoOutcome) -> None:
    worked = {edit for step in measured.trimmed.steps for edit in step.edits}
    assert worked == {"truncate_tool_output", "keep_tool_calls", "drop_oldest"}


def test_with_policy_off_nothing_changes(measured: DemoOutcome) -> None:
    assert all(step.tokens == step.forwarded_tokens and not step.edits for step in measured.whole.steps)


def test_the_store_and_its_configuration_stay_in_the_folder(measured: DemoOutcome, folder: Path) -> None:
    assert (folder / STORE).is_file()
    assert (folder / CONFIG).is_file()


def test_the_recording_ends_with_a_reply_and_names_its_source() -> None:
    recording = Recording.load()
    assert recording.messages[-1]["role"] == "assistant"
    assert recording.source.startswith("github:sierra-research/tau-bench@")
    assert recording.license.startswith("MIT")
    assert len(recording.tools) == 14


def test_the_log_follows_the_instructions() -> None:
    recording = Recording.load()
    assert recording.messages[0]["role"] == "system"
    assert recording.log == recording.messages[1:]


def test_each_reply_has_a_request_in_its_turn() -> None:
    said = ["user", "assistant", "tool", "assistant", "user", "assistant", "user"]
    messages = ({"role": "system"}, *({"role": role} for role in said))
    recording = Recording(id="x", source="s", license="l", tools=(), messages=messages)
    assert [(request.turn, request.position) for request in recording.requests()] == [(1, 2), (1, 4), (2, 6)]


def test_null_and_missing_fields_are_the_same() -> None:
    assert _same([{"role": "assistant", "content": None}], [{"role": "assistant"}])
    assert not _same([{"role": "assistant", "content": ""}], [{"role": "assistant", "content": "no"}])
    assert not _same([{"role": "assistant"}], [])


def test_the_written_file_is_a_valid_configuration(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(configuration(tmp_path, "http://127.0.0.1:9/v1"), encoding="utf-8")
    settings = load(tmp_path / CONFIG)
    assert settings.store.url.endswith(f"{tmp_path}/{STORE}")
    assert settings.upstream.base_url == "http://127.0.0.1:9/v1"
    assert [edit.type for edit in settings.policies["default"].edits] == ["keep_tool_calls", "drop_oldest"]


def test_the_name_of_the_folder_is_quoted(tmp_path: Path) -> None:
    folder = tmp_path / 'a "b": c #d'
    assert yaml.safe_load(configuration(folder, "http://h"))["store"]["url"].endswith(f"{folder}/{STORE}")


def test_a_run_sums_up_its_steps() -> None:
    measured = run(FIRST, SECOND)
    assert (measured.tokens, measured.forwarded, measured.cached, measured.moves) == (4000, 3000, 1500, 1)
    assert measured.saved_percent == 25.0


def test_an_outcome_without_faults_holds() -> None:
    assert outcome().holds
    assert all(outcome().checks.values())


@pytest.mark.parametrize(
    ("wrong", "claim"),
    [
        (outcome(refused=1), "requests refused by the upstream: 1 of 5"),
        (outcome(whole=run(FIRST, replies_equal=False)), "as it was recorded"),
        (outcome(trimmed=run(FIRST, SECOND, stored_equal=False)), "all 4 messages"),
        (outcome(trimmed=run(FIRST, replace(SECOND, moved=False))), "less was sent on"),
        (outcome(trimmed=run(FIRST, replace(SECOND, forwarded_tokens=3000))), "less was sent on"),
        (outcome(trimmed=run(FIRST, SECOND, extended=False)), "began with all of the last one"),
        (outcome(whole=run(FIRST, bytes_equal=False)), "byte for byte"),
    ],
    ids=["refused", "reply", "store", "no move", "nothing saved", "cache", "bytes"],
)
def test_each_fault_fails_exactly_one_check(wrong: DemoOutcome, claim: str) -> None:
    # What is wrong may cost money too.
    failed = [claim for claim, holds in wrong.checks.items() if not holds and "costs less" not in claim]
    assert len(failed) == 1
    assert claim in failed[0]
    assert not wrong.holds
