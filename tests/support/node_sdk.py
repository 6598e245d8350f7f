"""OpenAI's SDK for Node, in a folder where Node finds it."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "openai@6"


def node_sdk_folder() -> Path:
    """Return the folder. It is in the virtual environment, so that the SDK is downloaded only once.

    Skips the test if this machine has no Node or cannot download the SDK.
    """
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("this machine has no node and npm")
    folder = Path(sys.prefix) / "node-sdk"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (folder / "node_modules" / "openai").is_dir():
            (folder / "package.json").write_text('{"private": true, "type": "module"}')
            command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock", PACKAGE]
            done = subprocess.run(  # noqa: S603 - fixed words
                command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
            )
            if done.returncode != 0:
                why = (done.stderr or done.stdout)[-200:]
                pytest.skip(f"npm cannot install {PACKAGE} on this machine: {why}")
    return folder


def run_script(folder: Path, name: str, script: str, *arguments: str) -> str:
    """Run a Node script in the folder; return its output."""
    (folder / name).write_text(script)
    command = ["node", name, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - fixed words
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
