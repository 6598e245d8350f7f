"""Facts about the repository as a whole: what no file in it may hold, and what its pins must."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import proxy
from tests.conftest import LONG

ROOT = Path(__file__).parents[1]

# Joined from pieces, so that this file does not contain the names that it searches for.
_HOSTS = ("pypi" + ".org", "pythonhosted" + ".org", "npmjs" + ".com", "npmjs" + ".org", "debian" + ".org")
_FOLDERS = ("work", "root", "farm")
_PATHS = (rf"/(?:{'|'.join(_FOLDERS)})/[a-z.]", r"\.\./shared", r"\.\./\.library")
FORBIDDEN = re.compile("|".join([*map(re.escape, _HOSTS), *_PATHS]))


def _files() -> list[Path]:
    """Return every file that is tracked or could be; without git, every file that is not obviously generated."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - git of the path
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    made = {".venv", ".git", "node_modules", "__pycache__", "dist", "build"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not made & set(path.parts)]


# Regular expressions, since parsing every file takes seconds.
_CLASS = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)
_IMPORT = re.compile(r"^ *from ([\w.]+) import (?:\(([^)]*)\)|(.*))", re.MULTILINE)
USERS = ("proxy", "tests", "benchmarks", "migrations")


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    files = _files()
    assert ROOT / "pyproject.toml" in files
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in files
        for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), start=1)
        if (match := FORBIDDEN.search(line))
    ]
    assert found == []


def test_the_search_finds_what_it_looks_for() -> None:
    assert FORBIDDEN.search(f"https://{_HOSTS[0]}/simple")
    assert FORBIDDEN.search("see /" + "root/x")
    assert FORBIDDEN.search("../" + "shared/x")
    assert not FORBIDDEN.search("the work of roots")


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_every_pin_has_its_hashes_and_no_address(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    pins = re.findall(r"^([A-Za-z0-9_.\[\],-]+)==\S+.*\\\n    --hash=sha256:", text, re.MULTILINE)
    requirements = re.findall(r"^[A-Za-z0-9].*$", text, re.MULTILINE)
    assert len(pins) == len(requirements) > 30
    assert "://" not in text
    assert not re.search(r"^-", text, re.MULTILINE)


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    groups = project["dependency-groups"]
    runtime = [*project["project"]["dependencies"], *groups["build"]]
    everything = [*runtime, *(entry for entry in groups["dev"] if isinstance(entry, str))]
    for name, wanted in (("requirements.txt", runtime), ("requirements-dev.txt", everything)):
        pinned = set(re.findall(r"^([a-z0-9-]+)(?:\[[^\]]*\])?==", (ROOT / name).read_text("utf-8"), re.MULTILINE))
        named = {re.split(r"[\[<>=; ]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
        assert named - pinned == set()


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert proxy.__version__ == project["version"]


def test_no_class_name_is_used_twice() -> None:
    names = Counter(name for path in (ROOT / "proxy").rglob("*.py") for name in _CLASS.findall(path.read_text("utf-8")))
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("room", sorted((ROOT / "proxy").glob("*/__init__.py")), ids=lambda path: path.parent.name)
def test_the_docstring_of_a_room_names_all_that_is_in_it(room: Path) -> None:
    told = ast.get_docstring(ast.parse(room.read_text(encoding="utf-8"))) or ""
    inside = {path.stem for path in room.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    missing = sorted(name for name in inside - {"__init__"} if not re.search(rf"\b{name}\b", told))
    assert not missing


def test_what_the_face_of_a_room_imports_is_used_elsewhere() -> None:
    """Linters do not report these imports as unused, since they are there for other packages."""
    used: defaultdict[str, set[str]] = defaultdict(set)
    for path in (path for top in USERS for path in (ROOT / top).rglob("*.py")):
        for room, several, one in _IMPORT.findall(path.read_text("utf-8")):
            used[room].update(re.findall(r"(\w+)(?: as \w+)?", several or one))
    assert {"Served", "run_command"} <= used["tests.support.served"] | used["tests.support.command"]
    idle: list[str] = []
    for path in (ROOT / "proxy").rglob("__init__.py"):
        tree = ast.parse(path.read_text("utf-8"))
        room = ".".join(path.parent.relative_to(ROOT).parts)
        mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
        names = {alias.asname or alias.name for node in imports for alias in node.names}
        idle += [f"{room}.{name}" for name in sorted(names - used[room] - mentioned)]
    assert idle == []


@pytest.mark.parametrize("name", LONG)
def test_a_test_file_that_runs_first_exists(name: str) -> None:
    assert (ROOT / name).is_file()
