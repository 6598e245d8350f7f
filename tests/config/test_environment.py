from __future__ import annotations

import os

import pytest

from proxy.config.environment import Environment
from proxy.errors import ConfigurationError


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):  # noqa: TID251 - the test must not depend on who runs it
        if name.upper().startswith("PALIMPSEST_"):
            monkeypatch.delenv(name)


def test_two_underscores_lead_into_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_SERVER__PORT", "9000")
    monkeypatch.setenv("PALIMPSEST_AUTH__KEYS", '[{"key": "k", "tenant": "t"}]')
    monkeypatch.setenv("PALIMPSEST_POLICIES__small__trigger", '{"tokens": 100}')
    assert Environment.read().data == {
        "server": {"port": "9000"},
        "auth": {"keys": [{"key": "k", "tenant": "t"}]},
        "policies": {"small": {"trigger": {"tokens": 100}}},
    }


def test_a_section_may_be_json_and_a_single_variable_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_SERVER", '{"port": 1, "host": "localhost"}')
    monkeypatch.setenv("PALIMPSEST_SERVER__PORT", "2")
    assert Environment.read().data == {"server": {"port": "2", "host": "localhost"}}


def test_an_empty_variable_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_UPSTREAM__API_KEY", "")
    assert Environment.read().data == {}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PALIMPSEST_SERVR__PORT", "1", "unknown section 'servr'; there are: server, "),
        ("PALIMPSEST_SERVR__PORT", "1", "did you mean PALIMPSEST_SERVER__…?"),
        (
            "PALIMPSEST_SERVER_PORT",
            "1",
            "two underscores stand between section and setting: PALIMPSEST_SERVER__PORT",
        ),
        ("PALIMPSEST_AUTH__KEYS", "[hush", "this is not JSON"),
        ("PALIMPSEST_UPSTREAM", "hush", "this is not JSON"),
    ],
)
def test_a_variable_that_means_nothing_is_named_without_its_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as refusal:
        Environment.read()
    assert refusal.value.message.startswith(f"{name}: ")
    assert words in refusal.value.message
    assert "hush" not in refusal.value.message


def test_all_faults_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_AUTH__KEYS", "x")
    monkeypatch.setenv("PALIMPSEST_UPSTREAM__ROUTES", "x")
    monkeypatch.setenv("PALIMPSEST_NONE__SUCH", "x")
    with pytest.raises(ConfigurationError) as refusal:
        Environment.read()
    assert len(refusal.value.message.splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PALIMPSEST_TEST_POSTGRES_URL", "postgresql://x"),
        ("PALIMPSEST_SERVER_PORT", "tcp://10.0.0.1:80"),
        ("PALIMPSEST_SERVER_SERVICE_HOST", "10.0.0.1"),
        ("PALIMPSEST_POLICIES_X", "1"),
    ],
)
def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert Environment.read().data == {}


def test_it_knows_the_variable_of_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_AUTH__KEYS", '[{"key": "k"}]')
    monkeypatch.setenv("palimpsest_server__port", "1")
    environment = Environment.read()
    assert environment.variable(("auth", "keys", 0, "tenant")) == "PALIMPSEST_AUTH__KEYS"
    assert environment.variable(("server", "port")) == "palimpsest_server__port"
    assert environment.variable(("server", "host")) is None
