from __future__ import annotations

from html.parser import HTMLParser

from proxy.backtest.page import page
from proxy.backtest.sheets import Sheet

HOSTILE = "</style><script>alert('1')</script>&\"<img src=x onerror=y>"
SHEETS = [
    Sheet(title=HOSTILE, columns=("", HOSTILE), rows=((HOSTILE, "1"), ("会话", HOSTILE)), note=HOSTILE),
    Sheet(title="plain", columns=("name", "a", "b"), rows=(("x", "1", "2"),)),
]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.addresses: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in {"src", "href", "onerror"}]
        if tag in {"td", "th"}:
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in {"td", "th"} and data.strip():
            self.cells[-1] += data


def read(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader


def test_every_text_is_escaped_and_nothing_is_loaded() -> None:
    reader = read(page(HOSTILE, [HOSTILE], SHEETS))
    assert not {"script", "img", "link", "iframe"} & set(reader.tags)
    assert reader.addresses == []
    assert reader.cells == ["", HOSTILE, HOSTILE, "1", "会话", HOSTILE, "name", "a", "b", "x", "1", "2"]


def test_it_is_one_whole_page() -> None:
    text = page("Backtest", ["a line"], SHEETS)
    assert text.startswith("<!doctype html>\n<html lang=")
    assert text.endswith("</html>\n")
    assert [read(text).tags.count(tag) for tag in ("h1", "h2", "table", "tbody")] == [1, 2, 2, 2]
    assert "<p>a line</p>" in text
