"""Runs the command line in this process, which is faster than starting a new one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from proxy.__main__ import main


def run_command(
    patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[bytes], *arguments: str | Path
) -> tuple[int, str, str]:
    """Run `palimpsest` with these arguments; return exit code, output and errors."""
    patch.setattr(sys, "argv", ["palimpsest", *map(str, arguments)])
    capture.readouterr()
    with pytest.raises(SystemExit) as end:
        main()
    sys.stdout.flush()
    out, errors = capture.readouterr()
    return int(end.value.code or 0), out.decode(), errors.decode()
