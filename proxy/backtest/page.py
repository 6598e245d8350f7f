"""A backtest's tables as one page of HTML: no script, nothing to load, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from proxy.backtest.sheets import Sheet

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.sheet { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8886; padding: .25rem .8rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .words td { text-align: left; }
thead th { border-bottom: 2px solid #888a; }
p { max-width: 60rem; }
"""


def page(title: str, lines: Iterable[str], sheets: Iterable[Sheet]) -> str:
    """Return the page: `lines` are paragraphs at its top."""
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in lines)]
    body += [_section(sheet) for sheet in sheets]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _section(sheet: Sheet) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in sheet.columns)
    rows = "\n".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{escape(cell)}</th>' if place == 0 else f"<td>{escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in sheet.rows
    )
    note = f"\n<p>{escape(sheet.note)}</p>" if sheet.note else ""
    words = ' class="words"' if len(sheet.columns) == 2 else ""
    return (
        f'<h2>{escape(sheet.title)}</h2>\n<div class="sheet"><table{words}>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>{note}"
    )
