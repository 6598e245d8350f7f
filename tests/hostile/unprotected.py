"""The proxy without its limits, to measure what the limits cost an ordinary request.

    python -m tests.hostile.unprotected /tmp/unprotected
    python -m benchmarks --against /tmp/unprotected --only small-1-json --only medium-16-json

The first command writes a folder that looks like a checkout. The second one puts the same load on the proxy with and
without limits, in alternating rounds. It removes the checks of heads and of pace, the count of values and messages, the
memory budget, the checks of origin, content type, host and doubled headers, and those of the upstream's answers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAM = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.hostile.unprotected import serve
serve()
"""


def _nothing(*given: Any, **named: Any) -> None:
    return None


def serve() -> None:
    """Run the command line without the limits."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # noqa: PLC0415 - the proxy is imported later

    from proxy.__main__ import main as command  # noqa: PLC0415
    from proxy.cli import serving  # noqa: PLC0415
    from proxy.server import authentication, endpoint, limits  # noqa: PLC0415
    from proxy.upstream import client  # noqa: PLC0415

    async def admit(*given: Any) -> None:
        return None

    def http(*given: Any) -> type[HttpToolsProtocol]:
        return HttpToolsProtocol

    made = endpoint.DialectEndpoint.__init__

    def make(self: endpoint.DialectEndpoint, *given: Any) -> None:
        made(self, *given)
        self._countable = -1  # nothing is counted before it is parsed

    for owner, name, instead in (
        (serving, "limited_http", http),
        (limits.Reservation, "add", _nothing),
        (endpoint.DialectEndpoint, "__init__", make),
        (endpoint.DialectEndpoint, "_admit", admit),
        (authentication.Authenticator, "check_host", _nothing),
        (authentication.Authenticator, "check_content_type", _nothing),
        (authentication.Authenticator, "_check_origin", _nothing),
        (authentication, "_check_single", _nothing),
        (client, "check_values", _nothing),
    ):
        assert hasattr(owner, name), name
        setattr(owner, name, instead)
    command()


def main(folder: Path) -> None:
    """Write a folder that looks like a checkout."""

    program = folder / ".venv" / "bin" / "palimpsest"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(PROGRAM.format(python=sys.executable, root=str(ROOT)))
    program.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
