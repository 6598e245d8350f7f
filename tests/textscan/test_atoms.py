from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan.atoms import (
    CHUNKS,
    MOST,
    atoms_of_arguments,
    find,
    labels_of,
    occurs,
    words_near,
    words_of,
)
from proxy.textscan.shape import LONGEST

# ------------------------------------------------------------------------------- what an atom is


def test_the_atoms_of_json_arguments_are_their_leaves_each_once() -> None:
    arguments = json.dumps(
        {
            "origin": "JFK",
            "passengers": [{"name": "Ana Lopez", "age": 34}, {"name": "Bo", "age": 34}],
            "bags": 3,
            "price": 1200.50,
            "insured": True,
            "note": None,
            "empty": " ",
            "class": "default",
        }
    )

    assert atoms_of_arguments(arguments) == ("JFK", "Ana Lopez", "34", "Bo", "1200.5")


def test_a_number_is_taken_as_it_is_written() -> None:
    assert atoms_of_arguments('{"a": 5000.10, "b": 1e3, "c": -0.5, "d": -40, "e": NaN}') == (
        "5000.10",
        "1e3",
        "-40",
    )


def test_what_has_a_shape_inside_of_a_longer_leaf_is_an_atom() -> None:
    command = "cd /srv/app && grep -n \"load_config\" src/main.py:120 | head -20 > 'out file.txt'"

    atoms = atoms_of_arguments(json.dumps({"command": command}))

    assert atoms == (
        command,
        "/srv/app",
        "load_config",
        "src/main.py",
        "main.py",
        "120",
        "20",
        "out file.txt",
        "file.txt",
    )


def test_the_steps_of_a_path_or_a_link_that_have_a_shape_are_atoms() -> None:
    arguments = '{"a": "/srv/my_app/9/list.txt", "b": "https://example.org/p/HAT136?day=2024-05-22"}'

    assert atoms_of_arguments(arguments) == (
        "/srv/my_app/9/list.txt",
        "my_app",
        "list.txt",
        "https://example.org/p/HAT136?day=2024-05-22",
        "example.org",
        "HAT136",
        "2024-05-22",
    )


def test_a_leaf_of_several_lines_is_no_atom_but_holds_some() -> None:
    arguments = json.dumps({"content": "<h1>Hello</h1>\nint main_loop(void) { return exitCode; }\n"})

    assert atoms_of_arguments(arguments) == ("main_loop", "exitCode")


def test_a_leaf_that_is_longer_than_an_atom_holds_some() -> None:
    assert atoms_of_arguments(json.dumps([f"see ORD-77 {'and so on ' * 30}"])) == ("ORD-77",)


def test_arguments_that_are_no_json_have_atoms_too() -> None:
    assert atoms_of_arguments('deploy --tag=v2.0.1 "blue green" {"half": 12') == (
        "v2.0.1",
        "blue green",
        "12",
    )


@pytest.mark.parametrize("arguments", ["", "{}", "[]", "{", "null", "{}{}", "\x00", "[" * 100_000])
def test_arguments_without_atoms(arguments: str) -> None:
    assert atoms_of_arguments(arguments) == ()


def test_of_very_many_atoms_the_first_ones_are_taken() -> None:
    atoms = atoms_of_arguments(json.dumps([f"item_{number}" for number in range(MOST + 50)]))

    assert atoms == tuple(f"item_{number}" for number in range(MOST))


def test_terms_of_cjk_text_lie_between_the_words_that_join_them() -> None:
    assert atoms_of_arguments('{"q": "北京和上海的外卖市场"}') == (
        "北京和上海的外卖市场",
        "北京",
        "上海",
        "外卖市场",
    )
    assert atoms_of_arguments('{"q": "\\u5317\\u4eac A12"}') == ("北京 A12", "北京", "A12")


# ----------------------------------------------------------------------------- where it stands


@pytest.mark.parametrize(
    ("atom", "text", "places"),
    [
        ("136", "HAT136 1360 136, (136)", [12, 18]),
        ("12", "3.12 12.5 12. 1.2", [10]),
        ("/srv/a", "x/srv/a /srv/a/b", [8]),
        ("a.py", "aa.py src/a.py a.pyc", [10]),
        ("user_id", "user_id user_ids _user_id", [0]),
        ("北京", "去北京玩 北京站", [1, 5]),
        ("A公司", "BA公司 A公司X", [5]),
        ("name", "\\nname \\tname xname", [2, 9]),
        ("na", "banana", []),
        ("aa", "aaa aa", [4]),
        ("é1", "é1 1é1", [0]),
        ("x", "", []),
        ("", "text", []),
    ],
)
def test_an_atom_is_found_at_word_boundaries(atom: str, text: str, places: list[int]) -> None:
    assert list(find(atom, text)) == places
    assert occurs(atom, text) == bool(places)


_TEXTS = st.text(alphabet="ab1_./-:京東 \n\\n\"',", max_size=40)


@given(before=_TEXTS, atom=_TEXTS.filter(CHUNKS.search), after=_TEXTS)
def test_wherever_an_atom_stands_its_chunks_are_chunks_of_the_text(
    before: str, atom: str, after: str
) -> None:
    text = before + atom + after
    chunks = {match.start(): match.group() for match in CHUNKS.finditer(text)}

    for start in find(atom, text):
        for match in CHUNKS.finditer(atom):
            place = start + match.start()
            escaped = (
                text[place - 2 : place - 1] == "\\"
                and chunks.get(place - 1) == text[place - 1] + match.group()
            )
            assert chunks.get(place) == match.group() or escaped


@settings(max_examples=40)
@given(
    st.recursive(
        st.text(max_size=12) | st.integers() | st.none(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_document_can_be_read(document: object) -> None:
    atoms = atoms_of_arguments(json.dumps(document))

    assert len(set(atoms)) == len(atoms)
    assert all(2 <= len(atom) <= LONGEST for atom in atoms)


# --------------------------------------------------------------------------- what names it


def test_the_keys_near_an_atom_name_it() -> None:
    text = '{"flight_number": "HAT136", "price": 120, "date": "2024-05-22"}'
    start = text.index("HAT136")

    assert labels_of(text, start, start + 6) == {"flight_number", "price", "date"}


def test_where_there_are_no_keys_the_words_of_its_line_do() -> None:
    text = "the first line\nyour Flight to Boston is HAT136 at noon\nthe last line"
    start = text.index("HAT136")

    assert labels_of(text, start, start + 6) == {"flight", "boston", "noon"}
    assert words_near(text, start, start + 6) == {"first", "line", "flight", "boston", "noon", "last"}


def test_what_stands_further_away_names_nothing() -> None:
    text = "price: " + "." * 120 + "HAT136" + "." * 120 + " total"
    start = text.index("HAT136")

    assert labels_of(text, start, start + 6) == words_near(text, start, start + 6) == frozenset()


def test_what_names_an_atom_is_among_the_words_near_it() -> None:
    text = "user-name = x; url: http://a.b/c, id=7 'kind': HAT136"
    start = text.index("HAT136")

    assert labels_of(text, start, start + 6) == {"user", "name", "url", "id", "kind"}
    assert labels_of(text, start, start + 6) <= words_near(text, start, start + 6)


def test_words_are_told_in_small_letters_and_cjk_by_terms() -> None:
    assert words_of("The Total of 北京和上海: HAT136 x") == {"total", "北京", "上海", "hat"}
