"""Names: what identifies something, how often it stands somewhere, and which stay of very many."""

from __future__ import annotations

import pytest

from proxy.summaries.names import Name, merged, names_given, names_in, ranked, tier


def test_identifiers_of_a_text_numbers_that_name_something_among_them() -> None:
    text = "见订单ORD-8821的 src/a.py, bob@example.com, https://example.com/x/7, 48213, 1234, a 24-hour trip"
    assert list(names_in(text)) == [
        "ORD-8821",
        "src/a.py",
        "bob@example.com",
        "https://example.com/x/7",
        "48213",
        "订单ORD-8821",
    ]


def test_what_holds_marks_is_there_as_it_was_written_besides_its_parts() -> None:
    assert list(names_in("see lib/read.rs:88")) == ["lib/read.rs", "lib/read.rs:88"]
    assert list(names_given('{"host": "172.20.3.9:6379"}')) == ["172.20.3.9:6379"]


def test_a_code_of_capitals_is_a_name_where_a_call_was_given_it() -> None:
    assert list(names_given('{"reservation": "IFOYYZ", "cabin": "economy", "path": "/etc/hosts"}')) == [
        "IFOYYZ",
        "/etc/hosts",
    ]
    assert list(names_in("NEVER book IFOYYZ")) == []


def test_the_same_identifier_of_two_parts_is_one() -> None:
    older = (Name(text="a-1", times=2, said=True, state="read ok"), Name(text="b-2"))
    newer = (Name(text="c-3"), Name(text="a-1", called=True, state="edit failed"))
    assert merged(older + newer) == (
        Name(text="b-2"),
        Name(text="c-3"),
        Name(text="a-1", times=3, said=True, called=True, state="edit failed"),
    )
    assert merged((Name(text="a-1", state="read ok"), Name(text="a-1"))) == (
        Name(text="a-1", times=2, state="read ok"),
    )


def test_what_recurs_and_was_asked_for_matters_most() -> None:
    once = Name(text="r-1")
    again = Name(text="r-2", times=3)
    given = Name(text="r-3", called=True)
    said = Name(text="r-4", said=True)
    used = Name(text="r-5", times=2, called=True)
    named = Name(text="r-7", times=2, said=True)
    certain = Name(text="r-1234", times=2, called=True)
    word = Name(text="one_way", times=9, called=True)
    folder = Name(text="docs/", times=9)
    member = Name(text="Math.max", times=9, called=True)
    spoken = Name(text="this.text", times=9, said=True)
    assert ranked([once, word, member, folder, spoken, again, given, said, used, certain, named]) == [
        named,
        certain,
        used,
        again,
        said,
        word,
        folder,
        given,
        once,
        spoken,
        member,
    ]
    newest = Name(text="r-6")
    assert ranked([once, newest]) == [newest, once]


def test_of_very_many_those_stay_that_matter() -> None:
    many = [Name(text=f"x-{number}") for number in range(1000)]
    kept = merged([Name(text="mine-1", said=True), *many])
    assert len(kept) == 800
    assert kept[0].text == "mine-1"
    assert kept[-1].text == "x-999"
    assert Name(text="x-0") not in kept


def test_in_how_many_messages_a_name_stands_matters_up_to_a_number() -> None:
    four, nine, three = (Name(text=f"r-{times}00", times=times, said=True) for times in (4, 9, 3))
    assert ranked([three, nine, four]) == [four, nine, three]


@pytest.mark.parametrize(
    "text",
    [
        *("TCK-58813", "f3a9c1e7", "PNR8QZ", "172.20.3.9:6379", "arn:aws:iam::771:role/reader", "#48213"),
        *("bob@example.com", "/srv/data/list.parquet", "https://example.com/x", "config.yaml", "db.internal"),
        *("com.example.billing.Retry", "555-0199", "9781492056355", "feature/limit", "京A88888", "IFOYYZ"),
        *("0xDEADBEEF", "v4.18.2-rc3", "~/notes.md", "+49 30 555 0142", "order 88120347"),
    ],
)
def test_what_looks_like_an_identifier_is_worth_its_room_where_it_recurs(text: str) -> None:
    assert tier(Name(text=text, times=2)) == 1
    assert tier(Name(text=text, called=True)) == tier(Name(text=text, said=True)) == 2
    assert tier(Name(text=text)) == 0


@pytest.mark.parametrize(
    "text",
    [
        "one_way",
        "getUserById",
        "MAX_RETRIES",
        "users.created_at",
        "docs/",
        "@mona",
        "arg10",
        "step_2",
        "#ff00aa",
        "Makefile",
        "808080",
        "setTheme()",
    ],
)
def test_names_made_of_words_are_worth_what_is_left_over(text: str) -> None:
    assert tier(Name(text=text, times=2)) == 2
    assert tier(Name(text=text, called=True)) == 0


@pytest.mark.parametrize(
    "text",
    [
        *(
            "Math.max",
            "this.text",
            "chalk.bold",
            "console.log",
            "this.agent.state.model",
            "x1b[B",
            "31m",
            "u2014",
        ),
        *("1mhello", "utf8", "sha256", "int64", "h1", "2nd", "100000", "${total}%", "a.b?.c", "1-2"),
    ],
)
def test_what_identifies_nothing_is_worth_no_room_unless_the_user_says_it_again(text: str) -> None:
    assert tier(Name(text=text, times=9, called=True)) == 0
    assert tier(Name(text=text, times=2, said=True)) == 2


def test_whether_what_was_last_done_to_it_failed() -> None:
    assert Name(text="a-1", state="read failed").has_failed
    assert not Name(text="a-1", state="read ok").has_failed
