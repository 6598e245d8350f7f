"""Requests that Schemathesis generates from the OpenAPI schema of the routes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from proxy.config import Settings
from proxy.server.app import Application
from tests.hostile.conftest import Answering
from tests.support.served import Served, config_file
from tests.support.stores import empty_store

pytestmark = pytest.mark.attack


def test_no_route_fails_at_what_its_schema_allows(answering: Answering, tmp_path: Path) -> None:
    schema = tmp_path / "openapi.json"
    schema.write_bytes(orjson.dumps(Application(Settings())._api.openapi()))
    config = config_file(tmp_path, answering, empty_store(tmp_path / "p.db"))
    program = Path(sys.executable).with_name("schemathesis")
    with Served(config) as served:
        url = served.wait().url
        command = [
            str(program),
            "run",
            str(schema),
            "--url",
            url,
            "--checks",
            "not_a_server_error",
            "--max-examples",
            "100",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603 - our own
        assert done.returncode == 0, done.stdout[-5000:]
        assert "Traceback" not in served.log, served.log[-5000:]
