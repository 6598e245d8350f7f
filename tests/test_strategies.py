"""docs/strategies.md is up to date and has a working example of every edit."""

from __future__ import annotations

from typing import get_args

import pytest
import yaml

from proxy.trimming import Edit
from tests.support.strategies import DATA, LONGEST, PAGE, Effect, Shown, abridged, page, shows

TYPES = [edit.model_fields["type"].default for edit in get_args(get_args(Edit)[0])]
CASES = [case for _, cases in shows() for case in cases]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `make strategies`, and read what has changed"


def test_every_edit_is_listed_once_with_what_it_keeps_loses_and_costs() -> None:
    said = [each for each, _ in shows()]
    assert sorted(each["edit"] for each in said) == sorted(TYPES)
    for each in said:
        assert each["keeps"]
        assert each["loses"]
        assert each["costs"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.edit}-{case.session}")
def test_each_example_shows_a_change(case: Shown) -> None:
    effect = Effect.of(case)
    assert effect.freed > 0
    assert effect.plan.edits == (case.edit,)
    assert not effect.plan.warnings
    assert list(effect.before(case.positions)) != list(effect.after(case.positions))
    changed = {change.position for change in effect.plan.changes}
    assert changed & set(case.positions)


def test_recordings_of_this_folder_name_their_source_and_are_shown() -> None:
    named = (DATA / "README.md").read_text("utf-8")
    files = [path for path in DATA.iterdir() if path.suffix == ".json"]
    assert files
    for path in files:
        assert f"`{path.stem}`" in named
        data = yaml.safe_load(path.read_text("utf-8"))
        assert data["source"]
        assert data["license"]
        assert any(case.session == path.stem for case in CASES)


def test_a_long_text_is_shown_without_its_middle() -> None:
    assert abridged("short", LONGEST) == "short"
    text = "a" * 5000 + "b"
    shown = abridged(text, LONGEST)
    assert shown.endswith("b")
    mark = f"⟪{5001 - LONGEST:,} characters⟫"
    assert len(shown) == LONGEST + len(mark)
    assert mark in shown


def test_a_text_is_shown_on_one_line_with_control_characters_escaped() -> None:
    assert abridged("one\n  two\x1b[1m\n", LONGEST) == "one⏎two\\x1b[1m"
