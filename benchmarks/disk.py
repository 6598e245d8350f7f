"""How many bytes of disk conversations take, beside an empty store: `python -m benchmarks.disk FILE…`.

Each reply of a recorded conversation becomes a request that resends what was said before, as SDKs do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from benchmarks.compiling import FOLDER
from benchmarks.subjects import NO_PROXY, POSTGRES, Subject, palimpsest
from proxy.store.sqlite import connect

RECORDED: Final = FOLDER.parent / "tests" / "data" / "trajectories"
_SECONDS: Final = 60
_TABLES: Final = (
    "SELECT sum(pg_total_relation_size(oid)) FROM pg_class "
    "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
)


def main(words: Sequence[str] | None = None) -> int:
    """Print the disk use of the files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="`{messages, tools}`; none: those of the tests")
    parser.add_argument("--keep", type=Path, help="leave the SQLite store here")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(Path(folder), given.files or sorted(RECORDED.glob("*.json")), lambda _: None, given.keep):
            print(
                f"{line['store']}: {line['messages']:,} messages of {line['raw'] / line['messages']:,.0f} bytes JSON; "
                f"{line['stored'] / line['messages']:,.0f} bytes stored for each, {line['stored'] / line['raw']:.2f} x"
            )
    return 0


def measure(
    folder: Path, files: Iterable[Path], say: Callable[[str], None], keep: Path | None = None
) -> list[dict[str, Any]]:
    """Return the disk use of the conversations on each database."""
    from tests.support import postgres  # noqa: PLC0415 - they are needed for this alone
    from tests.support.replay import Recording  # noqa: PLC0415
    from tests.support.upstream import Upstream  # noqa: PLC0415

    recordings = [Recording.read(file) for file in files]
    raw = sum(len(_json(recording.messages)) for recording in recordings)
    count = sum(len(recording.messages) for recording in recordings)
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        provider = stack.enter_context(Upstream())
        url = stack.enter_context(postgres.database(stack.enter_context(postgres.server())))
        file = keep or folder / "disk.db"
        sizes: dict[str, tuple[str, Callable[[], int]]] = {
            "SQLite": (f"sqlite:///{file}", lambda: _file_bytes(file)),
            POSTGRES: (url, lambda: _server_bytes(url)),
        }
        behind = Subject(name=NO_PROXY, port=provider.port, pid=os.getpid())
        for number, (name, (store, size)) in enumerate(sizes.items()):
            say(f"disk: {name}")
            with palimpsest(behind, folder, name=f"disk-{number}", store=store):
                pass
            empty = size()
            with palimpsest(behind, folder, name=f"disk-{number}", store=store) as subject:
                for recording in recordings:
                    provider.load(recording.name, [exchange.reply for exchange in recording.turns(append=False)])
                    for exchange in recording.turns(append=False):
                        _ask(subject, recording.name, exchange.messages, recording.tools)
                    provider.forget()
            lines.append({"store": name, "messages": count, "raw": raw, "stored": size() - empty})
    return lines


def _ask(subject: Subject, name: str, messages: list[Any], tools: list[Any]) -> None:
    body: dict[str, Any] = {"model": f"script:{name}+lenient", "messages": messages}
    if tools:
        body["tools"] = tools
    request = urllib.request.Request(
        f"http://127.0.0.1:{subject.port}/v1/chat/completions",
        data=_json(body),
        headers={"content-type": "application/json", "X-Session-ID": name},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_SECONDS) as answer:
        answer.read()


def _json(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def _file_bytes(path: Path) -> int:
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size


def _server_bytes(url: str) -> int:
    import psycopg  # noqa: PLC0415 - it need not be installed

    with psycopg.connect(url) as connection:
        found = connection.execute(_TABLES).fetchone()
    return int(found[0]) if found is not None else 0


if __name__ == "__main__":
    sys.exit(main())
