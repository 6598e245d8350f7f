"""The tests mirror the package: proxy/wire/sse.py is tested by tests/wire/test_sse.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import LONG

ROOT = Path(__file__).parents[1]

ELSEWHERE: dict[str, str] = {
    "proxy/__main__.py": "tests/e2e/test_command_line.py",
}
"""Modules whose tests stand in a file of another name."""


def _holds_code(path: Path) -> bool:
    """Tell whether a module does anything: packages that are a docstring, and plain records, do not."""
    tree = ast.parse(path.read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, functions) for node in ast.walk(tree))


MODULES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "proxy").rglob("*.py"))
    if "_migrations" not in path.parts and _holds_code(path)
]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_with_code_has_a_test_file_of_its_own(module: str) -> None:
    parts = Path(module).relative_to("proxy")
    mirror = Path("tests", parts.parent, f"test_{parts.name}").as_posix()
    assert (ROOT / ELSEWHERE.get(module, mirror)).is_file()


def test_each_exception_is_one() -> None:
    assert ELSEWHERE.keys() <= set(MODULES)


@pytest.mark.parametrize("name", LONG)
def test_a_file_that_goes_first_is_there(name: str) -> None:
    assert (ROOT / name).is_file()
