"""The values of a text, the shapes of pieces, and where they stand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan.scan import (
    CHUNKS,
    LONGEST,
    MOST,
    Labels,
    Value,
    atoms_of_arguments,
    beginning_of,
    end_of,
    find,
    identifiers,
    kind_of,
    labels_of,
    naming_words,
    occurs,
    values_of,
    values_of_document,
    values_of_text,
    words_near,
)

# ------------------------------------------------------------------------------------------- shape


@pytest.mark.parametrize(
    ("piece", "kind"),
    [
        ("https://example.org/a?b=c&d=12", "url"),
        ("ana.lopez+home@example.org", "email"),
        ("/srv/data/report.txt", "path"),
        ("src/views/list", "path"),
        ("report.txt", "path"),
        ("a.c", "path"),
        ("2024-05-22", "date"),
        ("2024-05-22T10:30:00Z", "date"),
        ("2024-05-22 10:30", "date"),
        ("22/05/2024", "date"),
        ("10:30", "date"),
        ("136", "number"),
        ("-12.5", "number"),
        ("1,250,000", "number"),
        ("45%", "number"),
        ("300ms", "number"),
        ("HAT136", "id"),
        ("user_id", "id"),
        ("buildDir", "id"),
        ("v1.2.3", "id"),
        ("module.name.parts", "id"),
        ("#1042", "id"),
        ("@ana_lopez", "id"),
        ("555-0199", "id"),
        ("3f9a2c1", "id"),
        ("外卖市场", "cjk"),
        ("東京タワー", "cjk"),
        ("ordinary", None),
        ("Ordinary", None),
        ("two words", None),
        ("and/or", None),
        ("well-known", None),
        ("12-3", None),
        ("a=b", None),
        ("@", None),
        ("true", None),
        ("e.g", None),
        ("x", None),
        ("///", None),
        ("_____", None),
        ("混合text", None),
        ("外" * 13, None),
        ("a1" * LONGEST, None),
    ],
)
def test_a_piece_has_the_shape_of(piece: str, kind: str | None) -> None:
    assert kind_of(piece) == kind


# ------------------------------------------------------------------------------------------ values

_TEXTS = st.text(alphabet="ab1_./-:京東 \n\\n\"',", max_size=40)


def test_json_inside_of_json_is_opened() -> None:
    inner = json.dumps({"order": "W99", "paid": 310})

    assert values_of(json.dumps({"body": inner})) == [
        Value(text="W99", kind="id", label="order", is_leaf=True),
        Value(text="310", kind="number", label="paid", is_leaf=True),
    ]


def test_json_nested_too_often_is_read_as_text() -> None:
    document = json.dumps({"id": "A1"})
    for _ in range(4):
        document = json.dumps([document])

    assert "A1" in [value.text for value in values_of(document)]


def test_values_of_text_carry_the_key_before_them_or_the_word() -> None:
    text = "Order W-1200: total=45.10, items: K12, K13; K14\nnear Gate B22\n"
    text += "'seat': '14C' \"notes\": \"aisle\" 12A"

    assert [(value.text, value.kind, value.label) for value in values_of(text)] == [
        ("W-1200", "id", "Order"),
        ("45.10", "number", "total"),
        ("K12", "id", "items"),
        ("K13", "id", "items"),
        ("K14", "id", "items"),
        ("B22", "id", "Gate"),
        ("14C", "number", "seat"),
        ("aisle", "quoted", "notes"),
        ("12A", "number", "notes"),
    ]


def test_a_key_that_is_an_identifier_is_a_value_itself() -> None:
    text = '"lineHeight": "tall", "plain": \'x\' "--" "true"'
    found = [value.text for value in values_of(text)]

    assert found == ["lineHeight", "tall"]


def test_the_name_of_a_tag_is_no_value_but_a_link_between_angles_is() -> None:
    found = [value.text for value in values_of("<h1>Total</h1> <https://example.org/x>")]

    assert found == ["https://example.org/x"]


def test_encoded_data_is_no_value() -> None:
    assert values_of("data " + "QUJD=" * 200 + " end") == []


def test_a_value_without_anything_before_it_has_no_label() -> None:
    assert values_of("A12 B7") == [Value(text="A12", kind="id", label=""), Value(text="B7", kind="id", label="")]


@given(_TEXTS)
def test_every_value_of_a_text_stands_in_it(text: str) -> None:
    for value in values_of(text):
        assert value.text in text


_HARD = {
    "spaces": " ",
    "one letter": "a",
    "quotation marks": '"',
    "quotes that open and never close": "'a ",
    "digits": "1",
    "dots": "a.",
    "colons": "a:",
    "at signs": "a@",
    "slashes": "/",
    "underscores": "_",
    "opening brackets": "[",
    "escapes": "\\n",
    "assignments": "a=b&",
    "angle brackets": "<a ",
    "cjk": "在北京外卖市场",
    "letters of another script": "Привет мир ",
}


def test_of_a_very_long_text_the_ends_are_read_and_no_value_is_cut() -> None:
    ids = [f"HAT{number}" for number in range(40_000)]

    found = [value.text for value in values_of(" ".join(ids))]

    gap = next(place for place, value in enumerate(found) if value != ids[place])
    assert found == ids[:gap] + ids[gap - len(found) :]
    assert 140_000 < len(" ".join(ids[:gap])) < 150_000
    assert 40_000 < len(" ".join(ids[gap - len(found) :])) < 50_000


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (r'{"name": "abc\ud83d", "id": "Z-\uDE001", "note": "see K77 \ud83d now", "n": 12}', ["K77", "12"]),
        (r'{"na\ud83dme": "K77", "x": "K78"}', ["K77", "K78"]),
        (r'{"inner": "{\"id\": \"K77\ud83d\", \"key\": \"K78\"}"}', ["K78"]),
        ("K77\ud83d K78 \ud83d", ["K78"]),
        (r'{"name": "abc \ud83d\ude00", "id": "K77"}', ["abc \U0001f600", "K77"]),
    ],
)
def test_what_holds_half_an_emoji_is_no_value(text: str, values: list[str]) -> None:
    found = values_of(text)
    assert [value.text for value in found] == values
    for value in found:
        f"{value.text} {value.label}".encode()


@pytest.mark.parametrize(
    ("text", "beginning", "end"),
    [
        ("K1 K2", "K1 K2", "K1 K2"),
        ("HAT136 " * 40, " ".join(["HAT136"] * 14), "HAT136 " * 14),
        ("HAT136,HAT137\n" * 20, "HAT136,HAT137\n" * 6 + "HAT136,HAT137", "HAT136,HAT137\n" * 7),
        ("HAT136," * 40, ",".join(["HAT136"] * 14), "HAT136," * 14),
        ("x" * 300, "x" * 100, "x" * 100),
    ],
)
def test_the_ends_of_a_text_hold_no_value_that_is_cut(text: str, beginning: str, end: str) -> None:
    assert beginning_of(text, 100) == beginning
    assert end_of(text, 100) == end


def test_of_a_text_that_is_little_but_values_not_all_are_told() -> None:
    numbers = [str(number) for number in range(10, 30_000)]
    text = json.dumps([int(number) for number in numbers])

    found = [value.text for value in values_of(text)]

    assert found == numbers[: 5000 + len(text) // 16]
    assert len(found) < len(numbers)


@pytest.mark.parametrize("labels", ["all", "none"])
def test_of_a_plain_text_that_is_little_but_values_not_all_are_told(labels: Labels) -> None:
    ids = [f"a{number}" for number in range(10, 30_000)]
    text = " ".join(ids)
    assert [value.text for value in values_of(text, labels)] == ids[: 5000 + len(text) // 16]


def test_a_long_document_that_is_little_but_brackets_is_a_text() -> None:
    assert values_of("[" + "[1,2]," * 20_000 + "[1, 12]]") == [Value(text="12", kind="number", label="")]
    assert Value(text="12", kind="number", label="", is_leaf=True) in values_of("[" + "[1,2]," * 200 + "[1, 12]]")


def test_labels_are_looked_for_where_they_are_wanted() -> None:
    text = "total: 42, HAT136\nowner: user_7"
    assert [value.label for value in values_of(text)] == ["total", "total", "owner"]
    assert [value.label for value in values_of(text, "numbers")] == ["total", "", ""]
    assert [value.label for value in values_of(text, "none")] == ["", "", ""]


@pytest.mark.parametrize("unit", _HARD.values(), ids=_HARD)
def test_a_long_text_of_any_kind_is_read_to_its_end(unit: str) -> None:
    # Were the time quadratic in the length of the text, this would take hours.
    text = unit * (300_000 // len(unit))

    found = {value.text for value in values_of(text + " HAT136")}

    assert found <= {"HAT136", "北京外卖市场"}
    assert "HAT136" in found


@given(_TEXTS, st.sampled_from(["all", "numbers", "none"]))
def test_a_text_that_is_no_document_has_the_same_values_whoever_looks(text: str, labels: Labels) -> None:
    assert values_of_text(text, labels) == values_of(text, labels)
    assert values_of_document(text, labels) == ([], [])
    assert [(value.text, value.kind) for value in values_of(text, labels)] == [
        (value.text, value.kind) for value in values_of(text)
    ]


def test_the_values_of_a_document_are_told_of_documents_alone() -> None:
    text = json.dumps({"id": "K77", "note": "see K78 and K79, at 12"})
    assert values_of_document(text) == (values_of(text), [])
    assert [value.is_leaf for value in values_of(text)] == [True, True, False, False, False]
    assert [value.label for value in values_of(text, "numbers")] == ["id", "note", "", "", "at"]
    assert values_of_document("[" + "[1,2]," * 20_000 + "[1, 12]]") == ([], [])


def test_texts_in_a_document_come_apart_from_its_values() -> None:
    printed, log = "one\ntwo K1\nthree\nfour", "[info] K2\n[info] K3\n\n[info] done"
    document = json.dumps({"id": "K77", "output": printed, "more": [{"log": log, "note": "K4\nK5"}]})

    values, texts = values_of_document(document)

    assert [value.text for value in values] == ["K77", "K4", "K5"]
    assert texts == [printed, log]


def test_of_a_document_in_a_string_both_ends_are_read_too() -> None:
    rows = json.dumps([f"K{number}" for number in range(1000)])
    values, _ = values_of_document(json.dumps({"content": [{"type": "text", "text": rows}]}), "all", (60, 40))
    found = [value.text for value in values]
    assert {"K0", "K999"} <= set(found)
    assert len(found) < 30


def test_of_a_leaf_that_is_no_value_the_first_one_inside_stands_for_it() -> None:
    text = json.dumps({"note": "first line\nowner: K78 and K79", "more": "second\nK80"})
    assert values_of(text, "numbers") == [
        Value(text="K78", kind="id", label="owner", is_leaf=True),
        Value(text="K79", kind="id", label=""),
        Value(text="K80", kind="id", label="more", is_leaf=True),
    ]


# ------------------------------------------------------------------------------------------- atoms


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
    assert atoms_of_arguments('{"a": 5000.10, "b": 1e3, "c": -0.5, "d": -40, "e": NaN}') == ("5000.10", "1e3", "-40")


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
    assert atoms_of_arguments('deploy --tag=v2.0.1 "blue green" {"half": 12') == ("v2.0.1", "blue green", "12")


@pytest.mark.parametrize("arguments", ["", "{}", "[]", "{", "null", "{}{}", "\x00", "[" * 100_000])
def test_arguments_without_atoms(arguments: str) -> None:
    assert atoms_of_arguments(arguments) == ()


def test_of_very_many_atoms_the_first_ones_are_taken() -> None:
    atoms = atoms_of_arguments(json.dumps([f"item_{number}" for number in range(MOST + 50)]))

    assert atoms == tuple(f"item_{number}" for number in range(MOST))


def test_terms_of_cjk_text_lie_between_the_words_that_join_them() -> None:
    assert atoms_of_arguments('{"q": "北京和上海的外卖市场"}') == ("北京和上海的外卖市场", "北京", "上海", "外卖市场")
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


_TEXTS_ATOMS = st.text(alphabet="ab1_./-:京東 \n\\n\"',", max_size=40)


@given(before=_TEXTS_ATOMS, atom=_TEXTS_ATOMS.filter(CHUNKS.search), after=_TEXTS_ATOMS)
def test_wherever_an_atom_stands_its_chunks_are_chunks_of_the_text(before: str, atom: str, after: str) -> None:
    text = before + atom + after
    chunks = {match.start(): match.group() for match in CHUNKS.finditer(text)}

    for start in find(atom, text):
        for match in CHUNKS.finditer(atom):
            place = start + match.start()
            escaped = text[place - 2 : place - 1] == "\\" and chunks.get(place - 1) == text[place - 1] + match.group()
            assert chunks.get(place) == match.group() or escaped


@settings(max_examples=40)
@given(
    st.recursive(
        st.text(max_size=12) | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
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
    assert naming_words("The Total of 北京和上海: HAT136 x") == {"total", "北京", "上海", "hat"}


def test_identifiers_are_the_values_that_name_something() -> None:
    text = 'open src/main.c of HAT136 for "two words", 12 or 2024-05-01; https://a.example/x, a@b.example'
    assert identifiers(text) == ["src/main.c", "HAT136", "https://a.example/x", "a@b.example"]
