"""Broken files, and what is said about them: the file, the line, the setting and the cure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from proxy.config.problems import dotted
from proxy.config.source import load
from proxy.errors import ConfigurationError


def lines_about(text: str) -> list[str]:
    Path("config.yaml").write_text(text, "utf-8")
    with pytest.raises(ConfigurationError) as refusal:
        load()
    return refusal.value.message.splitlines()


BROKEN: list[dict[str, str]] = yaml.safe_load((Path(__file__).parent / "broken.yaml").read_text("utf-8"))


@pytest.mark.parametrize("broken", BROKEN, ids=[broken["case"] for broken in BROKEN])
def test_a_mistake_is_reported_with_line_setting_and_hint(broken: dict[str, str]) -> None:
    (said,) = lines_about(broken["file"])
    pattern = ".*".join(map(re.escape, broken["says"].split("[…]")))
    assert re.fullmatch(pattern, said), said


def test_each_mistake_has_a_line_of_its_own() -> None:
    lines = lines_about("server:\n  port: -1\n  workers: 0\nauth:\n  mode: nobody\n")
    assert [line.partition(": ")[0] for line in lines] == ["config.yaml:2", "config.yaml:3", "config.yaml:5"]


@pytest.mark.parametrize(
    "text",
    [
        "upstream: hush\n",
        "upstream: {apikey: hush}\n",
        "upstream: {api_key: [hush]}\n",
        "upstream: {api_key: 'hush hush'}\n",
        "upstream: {base_url: 'hush://me:hush@host'}\n",
        "upstream: {proxy: 'http://me:hush@host/hush'}\n",
        "upstream: {routes: [hush]}\n",
        "store: {url: 'mysql://me:hush@host/db'}\n",
        "auth: {keys: [hush]}\n",
        "auth: {keys: {hush: tenant}}\n",
        "auth: {keys: [{key: {hush: 1}, tenant: a}]}\n",
        "auth: {admin_key: 'hush hush'}\n",
        "auth: hush\n",
    ],
)
def test_no_message_shows_a_possible_secret(text: str) -> None:
    assert "hush" not in "".join(lines_about(text))


@pytest.mark.parametrize("number", ["api_key: 1234567", "base_url: 1234567"])
def test_a_key_of_digits_is_not_shown(number: str) -> None:
    assert "1234567" not in "".join(lines_about(f"upstream: {{{number}}}\n"))


def test_the_error_hides_the_original_one_with_its_values() -> None:
    Path("config.yaml").write_text("upstream: {api_key: 'hush hush'}\n")
    with pytest.raises(ConfigurationError) as refusal:
        load()
    assert refusal.value.__suppress_context__


def test_unusual_names_are_quoted() -> None:
    assert dotted(("policies", "my policy", "edits", 0, "last")) == "policies['my policy'].edits[0].last"
