"""Broken files, and what is said about them: the file, the line, the setting and the cure."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from proxy.config.load import load
from proxy.config.problems import dotted
from proxy.errors import ConfigurationError


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):  # noqa: TID251 - the test must not depend on who runs it
        if name.upper().startswith("PALIMPSEST_"):
            monkeypatch.delenv(name)


def said_of(text: str) -> list[str]:
    Path("config.yaml").write_text(text, "utf-8")
    with pytest.raises(ConfigurationError) as refusal:
        load()
    return refusal.value.message.splitlines()


BROKEN: list[dict[str, str]] = yaml.safe_load((Path(__file__).parent / "broken.yaml").read_text("utf-8"))


@pytest.mark.parametrize("broken", BROKEN, ids=[broken["case"] for broken in BROKEN])
def test_a_broken_file_is_told_line_setting_and_cure(broken: dict[str, str]) -> None:
    (said,) = said_of(broken["file"])
    pattern = ".*".join(map(re.escape, broken["says"].split("[…]")))
    assert re.fullmatch(pattern, said), said


def test_each_mistake_has_a_line_of_its_own() -> None:
    lines = said_of("server:\n  port: -1\n  workers: 0\nauth:\n  mode: nobody\n")
    assert [line.partition(": ")[0] for line in lines] == ["config.yaml:2", "config.yaml:3", "config.yaml:5"]


@pytest.mark.parametrize(
    "text",
    [
        "upstream: hush\n",
        "upstream: {apikey: hush}\n",
        "upstream: {api_key: [hush]}\n",
        "upstream: {api_key: 'hush hush'}\n",
        "upstream: {base_url: 'hush://me:hush@host'}\n",
        "upstream: {routes: [hush]}\n",
        "store: {url: 'mysql://me:hush@host/db'}\n",
        "auth: {keys: [hush]}\n",
        "auth: {keys: {hush: tenant}}\n",
        "auth: {keys: [{key: {hush: 1}, tenant: a}]}\n",
        "auth: {admin_key: 'hush hush'}\n",
        "auth: hush\n",
    ],
)
def test_no_message_shows_what_may_be_a_secret(text: str) -> None:
    assert "hush" not in "".join(said_of(text))


@pytest.mark.parametrize("number", ["api_key: 1234567", "base_url: 1234567"])
def test_a_key_in_digits_is_not_shown_either(number: str) -> None:
    assert "1234567" not in "".join(said_of(f"upstream: {{{number}}}\n"))


def test_the_error_carries_no_other_one_that_would_print_the_values() -> None:
    Path("config.yaml").write_text("upstream: {api_key: 'hush hush'}\n")
    with pytest.raises(ConfigurationError) as refusal:
        load()
    assert refusal.value.__suppress_context__


def test_names_that_are_no_plain_words_are_quoted() -> None:
    assert dotted(("policies", "my policy", "edits", 0, "last")) == "policies['my policy'].edits[0].last"
