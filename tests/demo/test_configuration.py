from pathlib import Path

import yaml

from proxy.config import load
from proxy.demo.configuration import CONFIG, STORE, configuration


def test_the_file_is_a_valid_configuration(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(configuration(tmp_path, "http://127.0.0.1:9/v1"), encoding="utf-8")
    settings = load(tmp_path / CONFIG)
    assert settings.store.url.endswith(f"{tmp_path}/{STORE}")
    assert settings.upstream.base_url == "http://127.0.0.1:9/v1"
    assert [edit.type for edit in settings.policies["default"].edits] == ["keep_tool_calls", "drop_oldest"]


def test_a_folder_of_any_name_is_quoted(tmp_path: Path) -> None:
    folder = tmp_path / 'a "b": c #d'
    assert yaml.safe_load(configuration(folder, "http://h"))["store"]["url"].endswith(f"{folder}/{STORE}")
