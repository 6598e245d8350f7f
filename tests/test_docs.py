"""The documentation agrees with the code: settings, routes, headers, commands, links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.main import get_command

from proxy.__main__ import app as command_line
from proxy.config import BUILT_IN, ModelPrices, ModelRule, PriceStep, Settings
from proxy.config.settings import AuthKey, Budget, ModelCache, Route
from proxy.pipeline import headers
from proxy.pipeline.receipt import PlanReport, log_line
from proxy.server.app import Application
from proxy.trimming import TOOL_OUTPUT_TYPES, Edit, Keep, Match, Pin, PlanningContext, Policy, Target, Trigger, bypass
from proxy.trimming.policy import ToolRules

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "policies" / "README.md"])
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text("utf-8")
POLICIES = (ROOT / "docs" / "policies.md").read_text("utf-8")
API = (ROOT / "docs" / "api.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield heading and model of every section of the configuration file."""
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation
    yield from (("upstream.routes", Route), ("auth.keys", AuthKey), ("policies", Policy), ("match", Match))
    yield from (("budgets", Budget), ("tools", ToolRules))
    yield from (("models", ModelRule), ("models.prices", ModelPrices), ("models.cache", ModelCache))
    yield "models.prices.steps", PriceStep
    yield from (("trigger and when", Trigger), ("target", Target), ("keep", Keep), ("pin", Pin))
    yield from edits()


def edits() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield type and model of every edit."""
    union, _ = get_args(Edit)
    for edit in get_args(union):
        yield edit.model_fields["type"].default, edit


ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
EVERY_EDIT_HAS = {"type", "when"}
"""Settings that are described once, under the heading Edits."""


def section(heading: str) -> str:
    """Return the text under a heading of the page."""
    wanted = f"\n## {heading}\n"
    assert CONFIGURATION.count(wanted) == 1
    return CONFIGURATION.partition(wanted)[2].partition("\n## ")[0]


def settings(heading: str, model: type[BaseModel]) -> dict[str, str]:
    """Return the settings that the page must list under a heading, with their defaults."""
    shared = EVERY_EDIT_HAS if heading in dict(edits()) else set()
    return {name: _default(field) for name, field in model.model_fields.items() if name not in shared}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"`{shown}`"


@pytest.mark.parametrize(("heading", "model"), list(sections()), ids=[name for name, _ in sections()])
def test_every_setting_is_documented_with_its_default(heading: str, model: type[BaseModel]) -> None:
    rows = {name: default for name, default, _ in ROW.findall(section(heading))}
    assert rows == settings(heading, model)


def test_the_list_of_edits_is_complete_and_marks_those_that_act_on_arrival() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(configuration\.md#\1\) \| .+ \| (yes)? ?\|$", POLICIES, re.MULTILINE)
    assert sorted(rows) == sorted((name, "yes" if name in TOOL_OUTPUT_TYPES else "") for name, _ in edits())


def test_the_built_in_policy_is_the_one_that_is_documented() -> None:
    part = CONFIGURATION.partition("\n### The built-in policy\n")[2]
    shown = yaml.safe_load(part.partition("```yaml\n")[2].partition("```")[0])
    assert Policy.model_validate(shown) == BUILT_IN


def routes() -> list[str]:
    schema = Application(Settings())._api.openapi()
    return [f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods]


def test_every_route_is_documented_and_no_other() -> None:
    documented = re.findall(r"^\| `((?:GET|POST|DELETE) /[^`?]*)", API, re.MULTILINE)
    named = [re.sub(r"\{id\}", "{}", line) for line in documented if "/v1/" not in line]
    assert sorted(re.sub(r"\{\w+\}", "{}", line) for line in named) == sorted(
        re.sub(r"\{\w+\}", "{}", line) for line in routes()
    )


OWN_HEADERS = [
    value
    for name, value in vars(headers).items()
    if name.isupper() and isinstance(value, str) and value.startswith("x-")
]


@pytest.mark.parametrize("name", OWN_HEADERS)
def test_every_header_is_documented(name: str) -> None:
    assert f"`{name}`" in API.lower()


def test_every_field_of_the_log_line_is_documented() -> None:
    report = PlanReport(
        session="s",
        exchange="e",
        kind="first",
        plan=bypass((), PlanningContext(count=lambda _: 0)),
        warnings=(),
        messages_before=0,
        messages_sent=0,
        tokens_before=0,
        tokens_sent=0,
        edits=(),
    )
    part = API.partition("\n## The log line\n")[2].partition("\n## ")[0]
    documented = {name for cell in re.findall(r"^\| (`.+?`) \|", part, re.MULTILINE) for name in cell.split(", ")}
    assert documented == {f"`{name}`" for name in log_line(report, "complete", 1.0)}


def test_the_words_of_warnings_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    part = page.partition("\n| words | meaning |\n")[2].partition("\n## ")[0]
    words = {
        word for cell in re.findall(r"^\| (`.+?`) \|", part, re.MULTILINE) for word in re.findall(r"`(.+?)`", cell)
    }
    code = "".join(path.read_text("utf-8") for path in (ROOT / "proxy").rglob("*.py"))
    assert words
    assert not {word for word in words if word not in code}


def test_every_command_is_in_the_readme() -> None:
    commands: dict[str, Any] = getattr(get_command(command_line), "commands")  # noqa: B009 - a group, seen as a command
    for name, command in commands.items():
        assert f"`palimpsest {name}" in README, name
        for below in getattr(command, "commands", {}):
            assert below in README, below


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text("utf-8")):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_are_there(page: Path) -> None:
    for name in re.findall(r"`((?:proxy|tests|docs|migrations)/[\w./-]+)`", page.read_text("utf-8")):
        assert (ROOT / name).exists(), name


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield page and content of every configuration that a page shows."""
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.+?)```", page.read_text("utf-8"), re.DOTALL):
            shown = yaml.safe_load(block)
            if set(shown) <= set(Settings.model_fields):
                yield page.name, shown


@pytest.mark.parametrize(("page", "shown"), list(configurations()))
def test_every_configuration_shown_is_valid(page: str, shown: dict[str, Any]) -> None:
    assert isinstance(Settings(**shown), Settings), page


def test_the_targets_of_make_that_the_readme_names_are_there() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake (\w+)", README))
    assert named
    assert named <= targets
