"""HTML as text: what is read stays, and what an agent acts upon."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan.plaintext import is_markup, page_text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(
            "<html><body><h1>Big</h1><p>Some <b>bold</b>\n text</p></body></html>", "Big\nSome bold text", id="blocks"
        ),
        pytest.param("<head><title>A &amp; B</title><meta x=1></head><p>x", "A & B\nx", id="a title"),
        pytest.param('<a class="c" href="/go?a=1&amp;b=2">Go</a> on', '<a href="/go?a=1&b=2">Go</a> on', id="a link"),
        pytest.param(
            "<form id=f action='/s'><input type=text name=\"q\" value='' aria-label='Search here' disabled>"
            "<select name=s><option value=1 selected>One<option>Two</select>"
            "<textarea name=t></textarea><button id=go class=x>Go!</button></form>",
            '<form id=f action="/s"><input type=text name=q aria-label="Search here" disabled>\n'
            "<select name=s>\n<option value=1 selected>One\nTwo\n<textarea name=t><button id=go>Go!</button>",
            id="a form",
        ),
        pytest.param('<input checked="checked" id=a>', "<input id=a checked>", id="a flag with a value"),
        pytest.param(
            '<p><img src="x.png"><img alt="a cat" src=y><label>L</label>', '<img alt="a cat">L', id="pictures"
        ),
        pytest.param(
            "<table><tr><th>a</th><th>b</th></tr><tr><td>1<td>2</tr><tr><td></td></tr>",
            "| a | b\n| 1 | 2",
            id="a table",
        ),
        pytest.param(
            "x<script>var a = '<p>';</script><style>p {}</style><!-- no -->y<svg><path d='m'></svg>",
            "x y",
            id="what is not shown",
        ),
        pytest.param("x<script>y <!-- z", "xy <!-- z", id="what never ends"),
        pytest.param("a &lt;b&gt; 1 &#60; 2", "a <b> 1 < 2", id="entities"),
        pytest.param("a &#" + "9" * 5000 + "; b", "a &#" + "9" * 5000 + "; b", id="a character that there is not"),
        pytest.param("1 < 2 and 3 > 2 <>", "1 < 2 and 3 > 2 <>", id="no tags"),
        pytest.param(
            "<a href='" + "x" * 400 + "'>y</a>",
            '<a href="' + "x" * 300 + '… (100 characters omitted)">y</a>',
            id="a long address",
        ),
    ],
)
def test_what_a_page_shows(page: str, text: str) -> None:
    assert page_text(page) == text


@pytest.mark.parametrize(
    ("text", "is_page"),
    [
        (" <!DOCTYPE html><p>", True),
        ("<html lang=en>", True),
        ("<div><p>a</p></div>" * 10, True),
        ("<div><p>a</p></div>", False),
        ("<div>" + "words " * 1000 + "</p>" * 10, False),
        ('<?xml version="1.0"?>' + "<p>a</p>" * 20, False),
        ("import x\n" + "<p>a</p>" * 20, False),
        ("", False),
    ],
)
def test_which_texts_are_pages(text: str, is_page: bool) -> None:
    assert is_markup(text) == is_page


@pytest.mark.parametrize(
    "page",
    [
        "<div>" * 200_000, "<a " + " ".join(f"b{number}=1" for number in range(100_000)) + ">",
        "<" * 1_000_000, "<script>" * 120_000, "<!--" * 250_000, "<title>" * 140_000, '<a b="' * 150_000,
        "<a " + "a=" * 400_000 + ">", "&amp" * 250_000, "&#" + "9" * 1_000_000,
        "<a href=" + "'" * 1_000_000, "<p>" + " " * 1_000_000,
    ],
)  # fmt: skip
def test_hostile_pages(page: str) -> None:
    assert len(page_text(page)) <= len(page) + 1000


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["<p>", "</p>", "<a href=x>", "word ", "&lt;", "<b>", "</td>", '"', "\n"])))
def test_no_word_is_lost(parts: list[str]) -> None:
    text = page_text("".join(parts))
    assert text.count("word") == parts.count("word ")
    assert text.count('"') == parts.count('"')
    assert "<p>" not in text
