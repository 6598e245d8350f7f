"""Compiles the C programs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
BUILD: Final = FOLDER / "build"
"""Where the programs and the stores of a run go; the repository ignores it."""
_FLAGS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror=implicit-function-declaration")
_COMPILERS: Final = ("cc", "gcc", "clang")


class NoCompiler(Exception):
    """There is no C compiler on the PATH."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Paths of the compiled programs."""

    load: Path
    """The load generator."""
    upstream: Path
    """The fake upstream."""


def compile_programs(into: Path = BUILD) -> Programs:
    """Compile both programs into a folder and return their paths.

    Raises:
        NoCompiler: there is no C compiler.
        RuntimeError: the compiler failed; the message is the compiler's.
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
        made.replace(into / name)  # replaced atomically: another run may be using the old program
    return Programs(load=into / "load", upstream=into / "upstream")
