"""The C programs, compiled on the spot."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
BUILD: Final = FOLDER / "build"
"""Where programs and stores of a run go; nothing in it is kept in the repository."""
_FLAGS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror=implicit-function-declaration")
_COMPILERS: Final = ("cc", "gcc", "clang")


class NoCompiler(Exception):
    """This machine has no C compiler on its path."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the compiled programs stand."""

    load: Path
    """The load generator."""
    upstream: Path
    """The fake upstream."""


def compile_programs(into: Path = BUILD) -> Programs:
    """Compile both programs into a folder and return where they are.

    Raises:
        NoCompiler: there is none.
        RuntimeError: the compiler refused; the message is its own.
    """
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler("A C compiler is needed: install gcc or clang.")
    into.mkdir(parents=True, exist_ok=True)
    for name in ("load", "upstream"):
        sources = [str(FOLDER / "c" / f"{part}.c") for part in (name, "connections")]
        made = into / f"{name}.new"
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", str(made), *sources], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        made.replace(into / name)  # another run may be at it with the one that was there
    return Programs(load=into / "load", upstream=into / "upstream")
