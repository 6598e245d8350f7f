from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from proxy.config.load import Source, load, schema_of
from proxy.config.model import Settings
from proxy.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):  # noqa: TID251 - the test must not depend on who runs it
        if name.upper().startswith("PALIMPSEST_"):
            monkeypatch.delenv(name)


def test_without_a_file_the_defaults_hold() -> None:
    assert load().server.port == 8080


def test_config_yaml_of_the_working_folder_is_read_if_it_is_there() -> None:
    Path("config.yaml").write_text("server: {port: 1}")
    assert load().server.port == 1


def test_a_file_that_is_named_must_be_there() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("other.yaml: there is no such file")):
        load(Path("other.yaml"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_a_source_reads_again_what_it_read() -> None:
    source = Source(overrides={"server": {"port": 3, "host": None}})
    assert (source.file, source.content()) == (Path("config.yaml"), None)
    assert source.read().settings.server.port == 3
    Path("config.yaml").write_text("server: {port: 1, max_body_bytes: 7}")
    loaded = source.read()
    assert loaded.content == b"server: {port: 1, max_body_bytes: 7}"
    assert (loaded.settings.server.port, loaded.settings.server.max_body_bytes) == (3, 7)
    assert source.parse(b"").settings == source.parse(None).settings
    assert pickle.loads(pickle.dumps(loaded)) == loaded  # noqa: S301 - our own: so it comes to a worker


def test_what_was_read_is_not_printed() -> None:
    Path("config.yaml").write_text("auth: {admin_key: hush}\nupstream: {api_key: hush}")
    assert "hush" not in repr(Source().read())


def test_what_is_allowed_and_does_nothing_is_told_once_with_its_line() -> None:
    Path("config.yaml").write_text(
        "policies:\n"
        "  a: {extends: base}\n"
        "  base:\n"
        "    trigger: {every_request: true, tokens: 9, cost: auto}\n"
        "    edits: [{type: keep_tool_calls}]\n"
        "  late:\n"
        "    extends: base\n"
        "    trigger: {every_request: false, cost: null}\n"
        "    target: {tokens: 5}\n"
        "    edits:\n"
        "      - {type: drop_oldest}\n"
        "      - {type: keep_tool_calls}\n"
    )
    assert Source().read().doubts == (
        "config.yaml:4: policies.base.trigger.tokens: beside every_request, tokens decides nothing",
        (
            "config.yaml:11: policies.late.edits[0]: drop_oldest goes on until the target is met, "
            "and leaves nothing to keep_tool_calls: put it last"
        ),
    )


def test_a_policy_of_the_file_is_extended_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.yaml").write_text("policies: {base: {keep: {rounds: 2}}}")
    monkeypatch.setenv("PALIMPSEST_POLICIES__A", '{"extends": "base", "keep": {"spans": 9}}')
    assert (load().policies["a"].keep.rounds, load().policies["a"].keep.spans) == (2, 9)
    monkeypatch.setenv("PALIMPSEST_POLICIES__A__EXTENDS", "bse")
    with pytest.raises(
        ConfigurationError, match=r"^PALIMPSEST_POLICIES__A__EXTENDS: policies\.a\.extends: unk"
    ):
        load()


def test_the_file_the_environment_and_the_command_line_go_one_before_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("config.yaml").write_text(
        "server: {host: localhost, port: 1, max_body_bytes: 7}\nsessions: {headers: [A, B]}\n"
    )
    monkeypatch.setenv("PALIMPSEST_SERVER__PORT", "2")
    monkeypatch.setenv("PALIMPSEST_SERVER__HOST", "::1")
    monkeypatch.setenv("PALIMPSEST_SESSIONS__HEADERS", '["C"]')
    settings = load(overrides={"server": {"port": 3, "host": None}, "auth": {"mode": None}})
    assert settings.server.port == 3
    assert settings.server.host == "::1"
    assert settings.server.max_body_bytes == 7
    assert settings.sessions.headers == ("C",)


def test_policies_of_file_and_environment_are_merged_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.yaml").write_text("policies: {a: {keep: {rounds: 2}}}")
    monkeypatch.setenv("PALIMPSEST_POLICIES__A__KEEP__SPANS", "9")
    monkeypatch.setenv("PALIMPSEST_POLICIES__B", "{}")
    policies = load().policies
    assert (policies["a"].keep.rounds, policies["a"].keep.spans) == (2, 9)
    assert list(policies) == ["a", "b"]


def test_an_empty_section_means_its_defaults() -> None:
    Path("config.yaml").write_text("policies:\n  # none yet\nserver:\n")
    assert load().policies == {}


def test_a_fault_in_a_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.yaml").write_text("server:\n  port: 1\n")
    monkeypatch.setenv("PALIMPSEST_SERVER__PORT", "many")
    monkeypatch.setenv("PALIMPSEST_SERVER__PROT", "1")
    with pytest.raises(ConfigurationError) as refusal:
        load()
    first, second = refusal.value.message.splitlines()
    assert first.startswith("PALIMPSEST_SERVER__PORT: server.port: Input should be a valid integer")
    assert first.endswith("(got 'many')")
    assert second.startswith("PALIMPSEST_SERVER__PROT: server.prot: unknown key 'prot'")


def test_a_fault_of_the_command_line_says_so() -> None:
    Path("config.yaml").write_text("server:\n  port: 1\n")
    with pytest.raises(ConfigurationError, match=r"^command line: server\.host: without authentication"):
        load(overrides={"server": {"host": "0.0.0.0"}})


def test_a_fault_between_file_and_environment_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.yaml").write_text("upstream:\n  api_key: hush\n")
    monkeypatch.setenv("PALIMPSEST_AUTH__MODE", "passthrough")
    with pytest.raises(
        ConfigurationError, match=r"^config\.yaml:2: upstream\.api_key: auth\.mode 'passthrough'"
    ):
        load()


def test_the_example_is_valid_and_says_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    example = load(Path("config.example.yaml"))
    assert list(example.policies) == ["default"]
    assert example.model_copy(update={"policies": {}}) == Settings()


def _names(schema: dict[str, Any]) -> set[str]:
    """Return the names of all settings in a JSON Schema."""
    found = set(schema.get("properties", {}))
    for definition in schema.get("$defs", {}).values():
        found |= _names(definition)
    return found


NAMES = _names(schema_of())


def test_the_schema_covers_every_setting_and_describes_it() -> None:
    assert {"server", "base_url", "max_body_bytes", "body_fields", "on_arrival", "exclude_tools"} <= NAMES
    schema = schema_of()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["additionalProperties"] is False
    assert "description" in schema["$defs"]["ServerSettings"]["properties"]["port"]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_setting_stands_in_the_example_or_the_documentation(name: str) -> None:
    texts = [ROOT / "config.example.yaml", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(re.search(rf"\b{name}\b", path.read_text("utf-8")) for path in texts if path.exists())
