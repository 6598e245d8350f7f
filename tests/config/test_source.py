"""Where settings come from: the file, the environment, the command line."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from proxy.config.settings import Settings
from proxy.config.source import SECRETS, ConfigSource, Environment, json_schema, load
from proxy.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


def test_without_a_file_the_defaults_hold() -> None:
    assert load().server.port == 8080


def test_config_yaml_of_the_working_folder_is_read_if_it_is_there() -> None:
    Path("config.yaml").write_text("server: {port: 1}")
    assert load().server.port == 1


def test_a_named_file_must_exist() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("other.yaml: there is no such file")):
        load(Path("other.yaml"))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_a_source_reads_again_what_it_read() -> None:
    source = ConfigSource(overrides={"server": {"port": 3, "host": None}})
    assert (source.file, source.content()) == (Path("config.yaml"), None)
    assert source.read().settings.server.port == 3
    Path("config.yaml").write_text("server: {port: 1, max_body_bytes: 7}")
    loaded = source.read()
    assert loaded.content == b"server: {port: 1, max_body_bytes: 7}"
    assert (loaded.settings.server.port, loaded.settings.server.max_body_bytes) == (3, 7)
    assert source.parse(b"").settings == source.parse(None).settings
    assert pickle.loads(pickle.dumps(loaded)) == loaded  # noqa: S301 - our own: so it comes to a worker


def test_the_content_is_not_printed() -> None:
    Path("config.yaml").write_text("auth: {admin_key: hush-hush-hush-hush}\nupstream: {api_key: hush}")
    assert "hush" not in repr(ConfigSource().read())


def test_a_setting_without_effect_is_a_warning_with_its_line() -> None:
    Path("config.yaml").write_text(
        "policies:\n"
        "  a: {extends: base, match: {tenants: [a]}}\n"
        "  base:\n"
        "    match: {models: [x]}\n"
        "    trigger: {every_request: true, tokens: 9, cost: auto}\n"
        "    edits: [{type: keep_tool_calls}]\n"
        "  late:\n"
        "    extends: base\n"
        "    match: {tenants: [b]}\n"
        "    trigger: {every_request: false, cost: null}\n"
        "    target: {tokens: 5}\n"
        "    edits:\n"
        "      - {type: drop_oldest}\n"
        "      - {type: keep_tool_calls}\n"
    )
    assert ConfigSource().read().warnings == (
        "config.yaml:5: policies.base.trigger.tokens: beside every_request, tokens decides nothing",
        (
            "config.yaml:13: policies.late.edits[0]: drop_oldest goes on until the target is met, "
            "and leaves nothing to keep_tool_calls: put it last"
        ),
    )


def test_a_policy_of_the_file_is_extended_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.yaml").write_text("policies: {base: {keep: {rounds: 2}}}")
    monkeypatch.setenv("PALIMPSEST_POLICIES__A", '{"extends": "base", "keep": {"spans": 9}}')
    assert (load().policies["a"].keep.rounds, load().policies["a"].keep.spans) == (2, 9)
    monkeypatch.setenv("PALIMPSEST_POLICIES__A__EXTENDS", "bse")
    with pytest.raises(ConfigurationError, match=r"^PALIMPSEST_POLICIES__A__EXTENDS: policies\.a\.extends: unk"):
        load()


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_mistake_in_a_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.yaml").write_text("server:\n  port: 1\n")
    monkeypatch.setenv("PALIMPSEST_SERVER__PORT", "many")
    monkeypatch.setenv("PALIMPSEST_SERVER__PROT", "1")
    with pytest.raises(ConfigurationError) as refusal:
        load()
    first, second = refusal.value.message.splitlines()
    assert first == "PALIMPSEST_SERVER__PORT: server.port: a whole number is expected here (got 'many')"
    assert second.startswith("PALIMPSEST_SERVER__PROT: server.prot: unknown key 'prot'")


def test_a_mistake_on_the_command_line_is_named_so() -> None:
    Path("config.yaml").write_text("server:\n  port: 1\n")
    with pytest.raises(ConfigurationError, match=r"^command line: server\.host: without authentication"):
        load(overrides={"server": {"host": "0.0.0.0"}})


def test_a_mistake_between_file_and_environment_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.yaml").write_text("upstream:\n  api_key: hush\n")
    monkeypatch.setenv("PALIMPSEST_AUTH__MODE", "passthrough")
    with pytest.raises(ConfigurationError, match=r"^config\.yaml:2: upstream\.api_key: auth\.mode 'passthrough'"):
        load()


def test_the_example_is_valid_and_has_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
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


NAMES = _names(json_schema())


def test_the_schema_covers_every_setting_and_describes_it() -> None:
    assert {"server", "base_url", "max_body_bytes", "body_fields", "on_arrival", "exclude_tools"} <= NAMES
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["additionalProperties"] is False
    assert "description" in schema["$defs"]["ServerSettings"]["properties"]["port"]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_setting_is_in_the_example_or_the_documentation(name: str) -> None:
    texts = [ROOT / "config.example.yaml", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(re.search(rf"\b{name}\b", path.read_text("utf-8")) for path in texts if path.exists())


def test_two_underscores_separate_section_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_SERVER__PORT", "9000")
    monkeypatch.setenv("PALIMPSEST_AUTH__KEYS", '[{"key": "k", "tenant": "t"}]')
    monkeypatch.setenv("PALIMPSEST_POLICIES__small__trigger", '{"tokens": 100}')
    assert Environment.read().data == {
        "server": {"port": "9000"},
        "auth": {"keys": [{"key": "k", "tenant": "t"}]},
        "policies": {"small": {"trigger": {"tokens": 100}}},
    }


def test_a_section_may_be_json_and_a_single_variable_wins_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("PALIMPSEST_SERVER_PORT", "1", "write two underscores between section and setting: PALIMPSEST_SERVER__PORT"),
        ("PALIMPSEST_AUTH__KEYS", "[hush", "this is not JSON"),
        ("PALIMPSEST_UPSTREAM", "hush", "this is not JSON"),
    ],
)
def test_an_unknown_variable_is_named_without_its_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as refusal:
        Environment.read()
    assert refusal.value.message.startswith(f"{name}: ")
    assert words in refusal.value.message
    assert "hush" not in refusal.value.message


def test_all_mistakes_of_the_environment_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_unrelated_variables_are_ignored(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert Environment.read().data == {}


def test_the_variable_of_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_AUTH__KEYS", '[{"key": "k"}]')
    monkeypatch.setenv("palimpsest_server__port", "1")
    environment = Environment.read()
    assert environment.variable(("auth", "keys", 0, "tenant")) == "PALIMPSEST_AUTH__KEYS"
    assert environment.variable(("server", "port")) == "palimpsest_server__port"
    assert environment.variable(("server",)) == "palimpsest_server__port"
    assert environment.variable(("server", "host")) == environment.variable(()) == "environment"


def test_a_mistake_in_the_environment_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_SERVER__PORT", "99999")
    monkeypatch.setenv("PALIMPSEST_BUDGETS__0__TENANT", "a")
    with pytest.raises(ConfigurationError) as refusal:
        ConfigSource().read()
    assert refusal.value.message.splitlines() == [
        "PALIMPSEST_SERVER__PORT: server.port: a number of at most 65535 is expected here (got '99999')",
        "PALIMPSEST_BUDGETS__0__TENANT: budgets: a list is expected here (got a mapping): put it in brackets: [{…}]",
    ]


def test_a_match_after_a_catch_all_is_a_warning() -> None:
    Path("config.yaml").write_text("policies:\n  all: {}\n  late:\n    match: {models: [odd]}\n")
    (warning,) = ConfigSource().read().warnings
    assert warning == (
        "config.yaml:4: policies.late.match: this is never tried, because 'all' matches every request: "
        "put 'late' before 'all'"
    )


@pytest.mark.parametrize("mode", ["none", "passthrough"])
def test_keys_that_are_not_used_are_a_warning(mode: str) -> None:
    Path("config.yaml").write_text(
        f"auth:\n  mode: {mode}\n  admin_key: key-of-the-admin\n  keys: [{{key: hush-hush-hush-hush, tenant: a}}]\n"
    )
    (warning,) = ConfigSource().read().warnings
    assert warning == (
        f"config.yaml:4: auth.keys: auth.mode is '{mode}', so these keys are not used: set auth.mode to 'keys'"
    )


@pytest.mark.parametrize(
    ("upstream", "warns"),
    [
        ("{}", True),
        ("{base_url: 'https://api.anthropic.com/v1'}", True),
        ("{base_url: 'http://127.0.0.1:8000/v1'}", False),
        ("{api_key: sk-0}", False),
        ("{anthropic_api_key: sk-ant-0}", False),
        ("{routes: [{models: [a], base_url: 'http://127.0.0.1:8000/v1'}]}", False),
    ],
)
def test_keys_of_clients_that_open_no_provider_are_a_warning(upstream: str, warns: bool) -> None:
    auth = "auth: {mode: keys, keys: [{key: hush-hush-hush-hush, tenant: a}]}\n"
    Path("config.yaml").write_text(f"{auth}upstream: {upstream}\n")
    warnings = ConfigSource().read().warnings
    assert [line.partition(" wants a key")[1] != "" for line in warnings] == [True] * warns


def test_the_proxy_does_not_serve_with_its_own_address_as_the_provider_s() -> None:
    """Other commands do: they do not know of `serve --port`."""
    Path("config.yaml").write_text("upstream: {base_url: 'http://localhost:8080/v1'}\n")
    own = "config.yaml:1: upstream.base_url: this is the address of the proxy itself"
    (warning,) = ConfigSource().read().warnings
    assert warning.startswith(own)
    with pytest.raises(ConfigurationError, match=own):
        ConfigSource(serves=True).read()
    elsewhere = ConfigSource(serves=True, overrides={"server": {"port": 8081}}).read()
    assert elsewhere.warnings == ()


@pytest.mark.parametrize(
    ("auth", "idle"),
    [
        ("{}", [(0, "tenant", "called 'default'"), (2, "key", "has this name")]),
        ("{mode: passthrough}", [(2, "key", "has this name")]),
        ("{mode: keys, keys: [{key: hush-hush-hush-hush, tenant: a}]}", [(1, "tenant", "none of"), (2, "key", "name")]),
        ("{mode: keys, keys: [{key: hush-hush-hush-hush, tenant: default, name: k}]}", [(0, "tenant", "none of")]),
    ],
)
def test_a_budget_that_limits_nobody_is_a_warning(auth: str, idle: list[tuple[int, str, str]]) -> None:
    limits = "requests_per_minute: 5"
    budgets = ", ".join(f"{{{whose}, {limits}}}" for whose in ("tenant: a", "tenant: default", "key: k"))
    Path("config.yaml").write_text(
        f"auth: {auth}\nbudgets: [{budgets}]\nupstream: {{base_url: 'http://127.0.0.1/v1'}}\n"
    )
    warnings = ConfigSource().read().warnings
    for line, (place, name, words) in zip(warnings, idle, strict=True):
        assert line.startswith(f"config.yaml:2: budgets[{place}].{name}: ")
        assert line.endswith(", so this budget limits nobody")
        assert words in line


def secret(setting: SecretStr | None) -> str | None:
    return setting.get_secret_value() if setting is not None else None


def test_a_variable_is_put_into_a_text_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-1")
    monkeypatch.setenv("PORT", "81")
    Path("config.yaml").write_text(
        "server: {port: '${PORT}'}\n"
        "upstream:\n"
        "  api_key: ${MY_KEY}\n"
        "  routes:\n"
        "    - models: ['$${MY_KEY}', $PORT]\n"
        "      base_url: http://a:${PORT}/${MY_KEY}\n"
        "      api_key: a-${MY_KEY}-b\n"
    )
    upstream = load().upstream
    (route,) = upstream.routes
    assert (load().server.port, secret(upstream.api_key), secret(route.api_key)) == (81, "sk-1", "a-sk-1-b")
    assert (route.models, route.base_url) == (("${MY_KEY}", "$PORT"), "http://a:81/sk-1")


def test_regexes_and_prompts_of_policies_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM", "anne")
    Path("config.yaml").write_text(
        "policies:\n"
        "  a:\n"
        "    match: {tenants: ['${TEAM}']}\n"
        "    trigger: {tokens: 9}\n"
        "    pin: [{regex: '${TEAM}$'}]\n"
        "    edits:\n"
        "      - {type: digest_agent_calls, patterns: ['(?P<tool>.)${TEAM}']}\n"
        "      - {type: summarize, mode: model, upper: 9, lower: 5,\n"
        "         prompt: 'p ${TEAM}', heading: 'h ${TEAM}'}\n"
    )
    policy = load().policies["a"]
    shown = json.dumps(policy.model_dump(mode="json"))
    assert policy.match.tenants == ("anne",)
    assert policy.pin[0].regex == "${TEAM}$"
    assert all(text in shown for text in ("(?P<tool>.)${TEAM}", "p ${TEAM}", "h ${TEAM}"))


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    Path("config.yaml").write_text("upstream:\n  api_key: ${MY_KEY}\nsummarizer:\n  api_key: x${MY_KEY}\n")
    with pytest.raises(ConfigurationError) as refusal:
        load()
    assert refusal.value.message.splitlines() == [
        "config.yaml:2: upstream.api_key: the variable MY_KEY is not set in the environment",
        "config.yaml:4: summarizer.api_key: the variable MY_KEY is not set in the environment",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "server: {port: 'x${HUSH}'}",
        "telemetry: {log_level: 'x${HUSH}'}",
        "upstream: {read_timeout: '${HUSH}', base_url: '${HUSH}', api_key: '${HUSH} x'}",
        "policies: {b: {extends: a}, a: {keep: {rounds: '${HUSH}'}}}",
        "policies: {a: {trigger: {tokens: 1}, edits: ['${HUSH}', {type: '${HUSH}'}]}}",
        "policies: {a: {extends: '${HUSH}'}}",
        "upstream: {api_key_file: '/${HUSH}'}",
        "upstream: '${HUSH}'",
    ],
)
def test_the_value_of_a_variable_is_never_shown(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HUSH", "5secret")
    Path("config.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as refusal:
        load()
    assert "5secret" not in refusal.value.message
    assert "config.yaml:1" in refusal.value.message


def test_a_value_of_a_variable_is_shown_as_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUSH", "90%")
    Path("config.yaml").write_text("policies: {b: {extends: a}, a: {keep: {rounds: '${HUSH}'}}}")
    with pytest.raises(ConfigurationError) as refusal:
        load()
    assert refusal.value.message == (
        "config.yaml:1: policies.a.keep.rounds: a whole number is expected here (got ${HUSH})"
    )
    monkeypatch.setenv("PALIMPSEST_POLICIES__A__KEEP__ROUNDS", "two")
    with pytest.raises(ConfigurationError, match=r"^PALIMPSEST_\S+ policies.* \(got 'two'\)$"):
        load()


def test_a_list_that_contains_itself_is_refused() -> None:
    Path("config.yaml").write_text("sessions: {headers: &a [*a]}")
    with pytest.raises(ConfigurationError, match=r"^config\.yaml:1: sessions\.headers"):
        load()


def test_every_secret_may_be_read_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "three", "four", "five"):
        Path(name).write_text(f"  key-of-clients-{name}\n\n")
    monkeypatch.setenv("FOLDER", str(Path.cwd()))
    Path("config.yaml").write_text(
        "upstream:\n"
        "  api_key: null\n"
        "  api_key_file: ${FOLDER}/one\n"
        "  routes: [{models: [a], base_url: 'http://a', api_key_file: two}]\n"
        "auth: {mode: keys, admin_key_file: three, keys: [{key_file: four, tenant: t}]}\n"
        "summarizer: {api_key_file: five, base_url: 'http://b'}\n"
    )
    found = load()
    assert [
        secret(found.upstream.api_key),
        secret(found.upstream.routes[0].api_key),
        secret(found.auth.admin_key),
        secret(found.auth.keys[0].key),
        secret(found.summarizer.api_key),
    ] == [f"key-of-clients-{name}" for name in ("one", "two", "three", "four", "five")]


def test_the_table_of_secrets_is_complete() -> None:
    found = json_schema()["$defs"]
    with_file = {name for model in found.values() for name in model["properties"] if name.endswith("_file")}
    secrets = {
        name for model in found.values() for name, field in model["properties"].items() if "password" in repr(field)
    }
    assert secrets == {name for _, name in SECRETS}
    assert with_file == {f"{name}_file" for name in secrets}
    assert found["AuthKey"]["required"] == ["tenant"]
    assert found["AuthKey"]["oneOf"] == [{"required": ["key"]}, {"required": ["key_file"]}]


def test_a_variable_may_name_a_secret_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("secret").write_text("k-1-of-the-clients")
    Path("config.yaml").write_text("upstream: {api_key: k-0}")
    monkeypatch.setenv("PALIMPSEST_UPSTREAM__API_KEY_FILE", "secret")
    monkeypatch.setenv("PALIMPSEST_AUTH__KEYS", '[{"key_file": "secret", "tenant": "${T}"}]')
    assert secret(load().upstream.api_key) == "k-1-of-the-clients"
    assert (secret(load().auth.keys[0].key), load().auth.keys[0].tenant) == ("k-1-of-the-clients", "${T}")
    Path("config.yaml").write_text("upstream: {api_key_file: none}")
    monkeypatch.delenv("PALIMPSEST_UPSTREAM__API_KEY_FILE")
    monkeypatch.setenv("PALIMPSEST_UPSTREAM__API_KEY", "k-2")
    with pytest.raises(ConfigurationError):
        load()  # a file that cannot be read is a mistake, even if another source wins
    Path("none").write_text("k-3")
    assert secret(load().upstream.api_key) == "k-2"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "the file cannot be read: No such file or directory"),
        (b" \n", "the file is empty"),
        (b"\xff", "the file is not UTF-8 text"),
    ],
)
def test_a_secret_file_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, content: bytes | None, says: str
) -> None:
    if content is not None:
        Path("hush").write_bytes(content)
    monkeypatch.setenv("PALIMPSEST_UPSTREAM__API_KEY_FILE", "hush")
    Path("config.yaml").write_text("summarizer:\n  api_key_file: hush\n")
    with pytest.raises(ConfigurationError) as refusal:
        load()
    assert refusal.value.message.splitlines() == [
        f"config.yaml:2: summarizer.api_key_file: {says}",
        f"PALIMPSEST_UPSTREAM__API_KEY_FILE: upstream.api_key_file: {says}",
    ]


def test_a_wrong_key_in_a_secret_file_names_the_line_of_the_file() -> None:
    Path("hush").write_text("two words")
    Path("config.yaml").write_text("auth:\n  mode: none\n  admin_key_file: hush\n")
    with pytest.raises(ConfigurationError, match=r"^config\.yaml:3: auth\.admin_key: a key is one or more"):
        load()


def test_one_underscore_before_a_secret_file_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_UPSTREAM_API_KEY_FILE", "x")
    with pytest.raises(ConfigurationError, match="PALIMPSEST_UPSTREAM__API_KEY_FILE"):
        Environment.read()


def test_a_price_may_end_with_three_zeros() -> None:
    file = Path("config.yaml")
    file.write_text("models: [{match: [a], prices: {input: 3.000}}]\npolicies: {a: {}}\n")
    (rule,) = load(file).models
    assert rule.prices is not None
    assert rule.prices.input == 3
