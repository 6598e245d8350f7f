"""Tests of Dockerfile and docker-compose.yml without a container engine.

The wheel is built from the files that go into the image. Its program is then started with the image's entry
point and only the environment of the image and the compose file, in an empty folder, with a real
PostgreSQL and the stand-in provider. What only a container engine does (users, mounts, networks)
is checked in the text and not run.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import yaml
from openai import AuthenticationError, DefaultHttpxClient, OpenAI

import proxy
from proxy.cli.serving import GRACE_SECONDS
from proxy.config import Settings
from tests.support import postgres
from tests.support.upstream import Upstream
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
PROXY: dict[str, Any] = COMPOSE["services"]["proxy"]
DATABASE: dict[str, Any] = COMPOSE["services"]["db"]
ANNE, BERT, ADMIN, PROVIDER = "pk-anne-0123456789", "pk-bert-0123456789", "pk-admin-0123456789", "sk-provider"
SECRETS = {
    "PALIMPSEST_AUTH__KEYS": json.dumps([{"key": ANNE, "tenant": "anne"}, {"key": BERT, "tenant": "bert"}]),
    "PALIMPSEST_AUTH__ADMIN_KEY": ADMIN,
    "PALIMPSEST_UPSTREAM__API_KEY": PROVIDER,
    "POSTGRES_PASSWORD": "any characters: /@%'\"",
}
"""The settings that .env must have."""
SECONDS = 60
"""How long a process may take to start or to end."""

Instruction = tuple[str, str]


def instructions() -> list[list[Instruction]]:
    """Return the Dockerfile by stages, each a list of instructions with their arguments in one line."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    stages: list[list[Instruction]] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append([])
        stages[-1].append((word, rest.strip()))
    return stages


BUILD, IMAGE = instructions()


def only(word: str) -> str:
    """Return the arguments of an instruction that occurs exactly once in the last stage."""
    (found,) = [rest for name, rest in IMAGE if name == word]
    return found


def pairs(word: str) -> dict[str, str]:
    """Return the pairs that ENV or LABEL sets in the last stage."""
    written = [part for name, rest in IMAGE if name == word for part in shlex.split(rest)]
    return dict(part.split("=", 1) for part in written)


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """Substitute variables as Compose does: `${NAME}`, `${NAME:-default}`, `${NAME:?why it must be set}`."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if kind == ":?":
            raise LookupError(f"{name}: {rest}")
        assert kind == ":-", f"{name} may be missing, and nothing says what happens then"
        return str(rest)

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", value, text)


def environment(service: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that Compose gives a service."""
    return {name: interpolated(str(value), variables) for name, value in service["environment"].items()}


def is_sent(path: Path) -> bool:
    """Tell whether .dockerignore lets a file of the checkout into the build context."""
    sent = True
    parts = path.relative_to(ROOT).parts
    above = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        pattern = line.lstrip("!").removeprefix("**/")
        if line and not line.startswith("#"):
            names = parts if "**/" in line else above
            sent = line.startswith("!") if any(fnmatch(name, pattern) for name in names) else sent
    return sent


# ------------------------------------------------------------------------------------------ the image


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as in the Dockerfile: from the files that it copies, with the pinned build tool."""
    context = tmp_path_factory.mktemp("context")
    for word, rest in BUILD:
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                found = ROOT / source
                files = [path for path in found.rglob("*") if path.is_file()] if found.is_dir() else [found]
                for file in filter(is_sent, files):
                    folder = context / target
                    copy = folder / (file.relative_to(found) if found.is_dir() else file.name)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, copy)
    made = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(made)]
    done = subprocess.run(command, cwd=context, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    assert done.returncode == 0, done.stderr
    (file,) = made.iterdir()
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as the wheel installs it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_contains_every_file_of_the_package(installed: Path) -> None:
    for folder in (ROOT / "proxy", ROOT / "migrations"):
        inside = installed / ("proxy" if folder.name == "proxy" else "proxy/_migrations")
        wanted = {
            path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        }
        held = {path.relative_to(inside) for path in inside.rglob("*") if path.is_file()}
        assert wanted <= held, wanted - held
    assert list((installed / "proxy" / "tokens" / "vocab").glob("*.xz"))
    assert list((installed / "proxy" / "_migrations" / "versions").glob("*.py"))


def test_nothing_secret_gets_into_the_build() -> None:
    for name in (".env", ".git/config", "config.yaml", "palimpsest.db", "tests/conftest.py", ".venv/pyvenv.cfg"):
        assert not is_sent(ROOT / name), name
    assert not is_sent(ROOT / "proxy" / "__pycache__" / "app.pyc")
    for word, rest in BUILD:
        for source in rest.split()[:-1] if word == "COPY" else ():
            assert is_sent(ROOT / source), source


def test_the_image_has_this_version() -> None:
    assert pairs("LABEL")["org.opencontainers.image.version"] == proxy.__version__


def test_the_program_gets_signals_and_runs_without_privileges() -> None:
    for word in ("ENTRYPOINT", "CMD"):
        assert isinstance(json.loads(only(word)), list)  # the other form would start a shell
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", only("USER"))
    assert IMAGE.index(("USER", only("USER"))) > max(n for n, (word, _) in enumerate(IMAGE) if word == "RUN")


def test_the_image_writes_to_its_volume_only_and_needs_authentication() -> None:
    said = pairs("ENV")
    assert said["PALIMPSEST_STORE__URL"].startswith(f"sqlite:///{only('VOLUME')}/")
    assert said["PALIMPSEST_SERVER__HOST"] == "0.0.0.0"
    with pytest.raises(ValueError, match=r"auth\.mode"):
        Settings(server={"host": said["PALIMPSEST_SERVER__HOST"]})  # type: ignore[arg-type]  # pydantic reads it


def test_every_install_of_the_image_is_pinned() -> None:
    installs = [rest for word, rest in BUILD if word == "RUN" and " install " in rest]
    assert len(installs) == 2
    assert "--require-hashes" in installs[0]
    assert "--no-deps --no-build-isolation" in installs[1]
    known = set(re.findall(r"^\S+==\S+", (ROOT / "requirements-dev.txt").read_text("utf-8"), re.MULTILINE))
    for extra, needed in (("psycopg", "psycopg[binary]=="), ("otel", "opentelemetry-sdk==")):
        pinned = re.findall(r"^\S+==\S+", (ROOT / f"requirements-{extra}.txt").read_text("utf-8"), re.MULTILINE)
        assert any(pin.startswith(needed) for pin in pinned)
        assert set(pinned) <= known
        assert f"requirements-{extra}.txt" in installs[0]


# ------------------------------------------------------------------------------------ the compose file


@pytest.mark.parametrize("name", SECRETS)
def test_without_a_secret_nothing_starts(name: str) -> None:
    assert environment(PROXY, SECRETS)
    for empty in ({}, {name: ""}):
        with pytest.raises(LookupError, match=rf"{name}: must be .*\.env\.example"):
            environment(PROXY, {key: value for key, value in SECRETS.items() if key != name} | empty)


def test_the_env_example_names_every_secret_and_gives_none() -> None:
    lines = (ROOT / ".env.example").read_text("utf-8").splitlines()
    assert {line for line in lines if line and not line.startswith("#")} == {f"{name}=" for name in SECRETS}
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", text):
        assert f"# {name}={default}" in lines


def test_keys_of_both_providers_reach_the_proxy() -> None:
    for name in ("PALIMPSEST_UPSTREAM__API_KEY", "PALIMPSEST_UPSTREAM__ANTHROPIC_API_KEY"):
        assert environment(PROXY, SECRETS | {name: "sk-mine"})[name] == "sk-mine"
    assert not environment(PROXY, SECRETS)["PALIMPSEST_UPSTREAM__ANTHROPIC_API_KEY"]  # empty is the same as not set


def test_database_and_proxy_agree() -> None:
    url = httpx.URL(environment(PROXY, SECRETS)["PALIMPSEST_STORE__URL"])
    theirs, ours = environment(DATABASE, SECRETS), environment(PROXY, SECRETS)
    assert (url.scheme, url.host, url.port) == ("postgresql", "db", 5432)
    assert (url.username, url.path) == (theirs["POSTGRES_USER"], f"/{theirs['POSTGRES_DB']}")
    assert ours["PGPASSWORD"] == theirs["POSTGRES_PASSWORD"]
    assert "db" in COMPOSE["services"]
    assert set(PROXY["networks"]) & set(DATABASE["networks"]) == {"back"}


@pytest.mark.parametrize("service", [PROXY, DATABASE], ids=["proxy", "db"])
def test_the_containers_are_restricted(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in {entry.partition(":")[0] for entry in service["tmpfs"]}
    assert service["deploy"]["resources"]["limits"]["memory"]
    assert service["restart"] == "unless-stopped"


def test_ports_and_networks() -> None:
    (published,) = PROXY["ports"]
    port = pairs("ENV")["PALIMPSEST_SERVER__PORT"]
    assert interpolated(published, {}) == f"127.0.0.1:8080:{port}"
    assert "ports" not in DATABASE
    assert COMPOSE["networks"]["back"]["internal"] is True
    assert DATABASE["networks"] == ["back"]


def test_the_configuration_is_a_folder_that_may_be_empty() -> None:
    """A mounted file must exist before the start, and would stay the old one when an editor replaces it."""
    source, target, mode = PROXY["volumes"][0].split(":")
    assert (source, target, mode) == ("./config", only("WORKDIR"), "ro")
    assert not Path(source).suffix
    assert "command" not in PROXY  # a file named by --config would have to exist
    assert not is_sent(ROOT / "config" / "config.yaml")


def test_what_waits_for_the_database_is_on_a_volume_with_a_name() -> None:
    """Each new container gets a new volume if the volume has no name."""
    (mounted,) = PROXY["volumes"][1:]
    name, target = mounted.split(":")
    assert name in COMPOSE["volumes"]
    assert Path(pairs("ENV")["PALIMPSEST_STORE__SPOOL"]).is_relative_to(target)


def test_start_order_and_stop_period() -> None:
    assert PROXY["depends_on"]["db"]["condition"] == "service_healthy"
    assert DATABASE["healthcheck"]["test"][0] == "CMD"
    assert int(PROXY["stop_grace_period"].removesuffix("s")) >= 2 * GRACE_SECONDS


# --------------------------------------------------------------------------------------------- running


@dataclass
class Running:
    """The image's program, as Compose starts it."""

    process: subprocess.Popen[bytes]
    url: str
    environment: dict[str, str]
    folder: Path
    log: Path


def files_of(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.fixture(scope="module")
def running(
    installed: Path, postgres_server: str, provider: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder, outside = tmp_path_factory.mktemp("etc"), tmp_path_factory.mktemp("outside")
    folder.chmod(0o555)
    variables = SECRETS | {"PALIMPSEST_UPSTREAM__BASE_URL": provider.base_url}
    with postgres.database(postgres_server) as store, socket.socket() as holder:
        # It reserves the port while it is bound. It never listens, so that the program can.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        given = pairs("ENV") | environment(PROXY, variables)
        # Different from the container: the paths of the program, the database, and the port.
        given |= {
            "PATH": str(Path(sys.executable).parent),
            "PYTHONPATH": str(installed),
            "PALIMPSEST_STORE__URL": store,
            "PALIMPSEST_SERVER__PORT": str(port),
        }
        command = [*json.loads(only("ENTRYPOINT")), *json.loads(only("CMD"))]
        assert command[0] == "palimpsest"
        with (outside / "log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own
                [shutil.which(command[0], path=given["PATH"]) or "", *command[1:]],
                env=given,
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        it = Running(
            process=process, url=f"http://127.0.0.1:{port}", environment=given, folder=folder, log=outside / "log"
        )
        try:

            def healthy() -> bool:
                assert process.poll() is None, it.log.read_text("utf-8")
                with httpx.Client(trust_env=False) as client:
                    try:
                        return client.get(f"{it.url}/readyz").status_code == 200
                    except httpx.TransportError:
                        return False

            until(healthy, "it is ready", SECONDS)
            yield it
        finally:
            process.kill()
            process.wait()


def healthcheck(given: dict[str, str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run the image's health check."""
    options, _, command = only("HEALTHCHECK").partition("CMD ")
    assert "--start-period=" in options
    program, *arguments = json.loads(command)
    found = shutil.which(program, path=given["PATH"]) or ""
    return subprocess.run([found, *arguments], env=given, cwd=folder, capture_output=True, check=False)  # noqa: S603 - our own


def client(running: Running, key: str) -> OpenAI:
    own = DefaultHttpxClient(trust_env=False)
    return OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, http_client=own)


def test_the_installed_program_runs(running: Running, installed: Path) -> None:
    python = shutil.which("python", path=running.environment["PATH"]) or ""
    asked = "from proxy.store.migrate import config; print(config().get_main_option('script_location'))"
    told = subprocess.check_output([python, "-c", asked], env=running.environment, cwd=running.folder)  # noqa: S603 - our own
    assert Path(told.decode().strip()) == installed / "proxy" / "_migrations"


def test_the_health_check(running: Running) -> None:
    # An HTTP proxy for outgoing requests must not be used for the health check.
    given = running.environment | {"HTTP_PROXY": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1"}
    done = healthcheck(given, running.folder)
    assert (done.returncode, done.stderr) == (0, b"")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # nothing listens
        elsewhere = given | {"PALIMPSEST_SERVER__PORT": str(holder.getsockname()[1])}
        assert healthcheck(elsewhere, running.folder).returncode == 1


class Degraded(BaseHTTPRequestHandler):
    """A proxy that serves whole histories while its store is unavailable."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_a_container_whose_store_is_away_is_healthy_and_not_restarted(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Degraded) as server:
        Thread(target=server.handle_request).start()
        given = {"PATH": str(Path(sys.executable).parent), "PALIMPSEST_SERVER__PORT": str(server.server_port)}
        assert healthcheck(given, tmp_path).returncode == 0


def test_an_sdk_with_a_valid_key_gets_an_answer(running: Running, upstream: Upstream) -> None:
    with client(running, ANNE) as anne:
        headers = {"X-Session-ID": "shipped"}
        for text in ("hello", "again"):
            said = anne.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": text}], extra_headers=headers
            )
            assert said.choices[0].message.content == f"echo: {text}"
        stream = anne.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "flow"}], extra_headers=headers, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(pieces) == "echo: flow"
    assert [message["content"] for message in upstream.last.messages] == [
        *("hello", "echo: hello", "again", "echo: again", "flow")
    ]
    for received in upstream.log:
        assert received.header("authorization") == f"Bearer {PROVIDER}"
        assert ANNE not in str(received.headers)
        assert ANNE.encode() not in received.body
        assert "x-session-id" not in received.names
    with httpx.Client(base_url=running.url, trust_env=False) as http:

        def sessions(key: str) -> list[tuple[str, str]]:
            answer = http.get("/sessions", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            return [(row["id"], row["tenant"]) for row in answer.json()["data"]]

        assert sessions(ANNE) == sessions(ADMIN) == [("shipped", "anne")]
        assert sessions(BERT) == []


@pytest.mark.parametrize("key", ["nobody", PROVIDER])
def test_a_client_without_a_key_is_refused(running: Running, upstream: Upstream, key: str) -> None:
    with client(running, key) as other, pytest.raises(AuthenticationError):
        other.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hello"}])
    with httpx.Client(base_url=running.url, trust_env=False) as http:
        body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
        assert http.post("/v1/chat/completions", json=body).status_code == 401
        assert http.get("/sessions").status_code == 401
    assert upstream.log == []


def test_it_stops_cleanly_writes_nothing_and_logs_no_secret(running: Running, installed: Path) -> None:
    """This test must be the last one: it ends the program."""
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    log = running.log
    assert running.process.wait(SECONDS) == 0, log.read_text("utf-8")
    assert files_of(running.folder) == set()
    assert [path for path in files_of(installed) if "__pycache__" in path.parts] == []
    told = log.read_text("utf-8")
    assert "Traceback" not in told
    for secret in (ANNE, BERT, ADMIN, PROVIDER, SECRETS["POSTGRES_PASSWORD"]):
        assert secret not in told
