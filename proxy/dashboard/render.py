"""Renders a page as HTML, JSON or CSV, and serves static files. Pages load nothing from other sites."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote, urlencode

import orjson
from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Struct

from proxy.dashboard import text
from proxy.errors import NotFound
from proxy.server.dependencies import DOTTED

_HERE: Final = Path(__file__).parent
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
_FORMULAS: Final = tuple("=+-@\t\r\n＝＋－＠")  # first characters that make a cell a formula in spreadsheets
_YEAR: Final = "public, max-age=31536000, immutable"


class Page(Struct, frozen=True, kw_only=True):
    """One page, independent of its format."""

    template: str
    title: str
    data: dict[str, Any]  # JSON data: returned by `.json`, and shown by the template
    columns: tuple[str, ...] = ()  # columns of the table for `.csv`: keys of `rows`
    rows: Sequence[Mapping[str, Any]] = ()


_FILES: Final = {path.name: path.read_bytes() for path in sorted((_HERE / "static").iterdir()) if path.suffix in _TYPES}
"""The static files by name."""
_VERSION: Final = blake2b(b"".join(_FILES.values()), digest_size=6).hexdigest()


def static_response(name: str) -> Response:
    """Return a static file. Its address changes with its content, so browsers may cache it for a year."""
    if name not in _FILES:
        raise NotFound(f"There is no file {name!r}.")
    return Response(_FILES[name], media_type=_TYPES[Path(name).suffix], headers={"cache-control": _YEAR})


def _made_visible(value: Any) -> Any:
    """Return the shown value of a template expression. All texts pass through here, so control characters show."""
    if value is None:
        return text.NOTHING
    return text.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _query(path: str, **parameters: Any) -> str:
    """Return an address with these query parameters. None and empty values are left out."""
    given = {name: value for name, value in parameters.items() if value not in {None, ""}}
    return f"{path}?{urlencode(given)}" if given else path


def _address(name: str) -> str:
    """Return a name quoted as one path segment. Dots are quoted too, or `.json` in a name would select a format."""
    return quote(DOTTED.get(name, name), safe="").replace(".", "%2E")


def _asset(name: str) -> str:
    """Return the address of a static file."""
    return f"/ui/static/{name}?v={_VERSION}"


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_made_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(
        number=text.number,
        short=text.short,
        dollars=text.dollars,
        ms=text.milliseconds,
        when=text.when,
        hour=text.hour,
        clip=text.clip,
        returned=text.returned,
        segment=_address,
        json=lambda value: orjson.dumps(value).decode(),
    )
    cast("dict[str, Any]", made.tests)["tall"] = text.is_tall
    cast("dict[str, Any]", made.globals).update(query=_query, percent=text.percent, asset=_asset)
    return made


_TEMPLATES: Final = _environment()


def html(template: str, context: dict[str, Any], status: int = 200) -> Response:
    """Render a template as an HTML response."""
    return Response(_TEMPLATES.get_template(template).render(context), status, media_type="text/html; charset=utf-8")


def form_of(request: Request) -> str:
    """Return the format that a path names: `html`, `json` or `csv`."""
    _, dot, ending = request.url.path.rpartition(".")
    return ending if dot and ending in {"json", "csv"} else "html"


def as_json(page: Page) -> Response:
    """Return the data of a page as JSON."""
    return Response(orjson.dumps(page.data, option=orjson.OPT_NON_STR_KEYS), media_type="application/json")


def as_csv(page: Page) -> Response:
    """Return the table of a page as CSV."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(page.columns)
    writer.writerows([_cell(row.get(name)) for name in page.columns] for row in page.rows)
    headers = {"content-disposition": f'attachment; filename="{page.template.removesuffix(".html")}.csv"'}
    return Response(out.getvalue().encode("utf-8", "replace"), media_type="text/csv; charset=utf-8", headers=headers)


def _cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        value = orjson.dumps(value).decode()
    if isinstance(value, str):
        shown = text.visible(value)
        return f"'{shown}" if shown.startswith(_FORMULAS) else shown
    return value
