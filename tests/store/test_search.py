"""The full-text index: its words, what it finds and forgets, and what it leaves to a scan of the texts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select

from proxy.errors import InvalidRequest
from proxy.pipeline.inspection import search_texts
from proxy.store import Store, Withholder, archive, downgrade, portions, search, session_key
from proxy.store.database import StoreConnection
from proxy.store.sqlite import connect
from tests.support.talk import Talk

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("said", "terms"),
    [
        ("Order_12-ab, order 12!", "order 12 ab"),
        ("预算表 ok", "预算 算表 表 ok"),
        ("GPT预算", "gpt 预算 算"),
        ("Straße", "strasse"),
        ("… --", ""),
        ("x" * 70, "x" * 64),
    ],
)
async def test_a_text_has_words(said: str, terms: str) -> None:
    assert search.terms_of(said) == terms


@pytest.mark.parametrize(
    ("words", "sqlite", "postgres"),
    [
        (["par"], '"par" *', "'par':*"),
        (["order-12"], '"order" "12" *', "'order' & '12':*"),
        (["预算表"], '"预算" "算表"', "'预算' & '算表'"),
        (["预"], '"预" *', "'预':*"),
        (["ok", "x" * 70], f'"{"x" * 64}" "ok" *', f"'{'x' * 64}' & 'ok':*"),
    ],
)
async def test_words_are_looked_for(words: list[str], sqlite: str, postgres: str) -> None:
    assert search.question_of(words, "sqlite") == sqlite
    assert search.question_of(words, "postgresql") == postgres
    assert search.question_of([*words, "->"], "sqlite") is None


@given(st.text())
async def test_each_word_of_a_text_is_found_in_its_terms(said: str) -> None:
    terms = search.terms_of(said).split()
    for word in said.casefold().split():
        asked = search.question_of([word], "postgresql")
        for each in [] if asked is None else asked.split(" & "):
            term, begins = each.removesuffix(":*").strip("'"), each.endswith(":*")
            assert any(found.startswith(term) if begins else found == term for found in terms)


async def test_a_very_long_text_has_as_many_words_as_there_is_room_for(store: Store) -> None:
    said = " ".join(f"wörd{number}" for number in range(200_000))
    terms = search.terms_of(said)
    assert 880_000 < len(terms.encode()) <= 900_000
    assert terms.split()[-1] in said.split()
    store.searches_index = True
    await Talk(store=store).say(said, "yes")
    assert await found_in(store, "wörd77") == ["user"]


async def found_in(store: Store, words: str, tenant: str | None = None) -> list[str]:
    """Return the roles of the messages that the index finds."""
    found = await search_texts(store, words, tenant)
    assert found["searched"]["index"]
    return [each["role"] for each in found["data"]]


async def test_the_index_finds_what_is_stored_in_any_script(store: Store) -> None:
    store.searches_index = True
    talk = Talk(store=store)
    await talk.say("The parcel 4711 is on its way.", "Noted: parcel_4711.")
    assert await found_in(store, "PARC 4711") == ["assistant", "user"]
    assert await found_in(store, "arcel") == []  # no beginning of a word
    await talk.say("请把预算表发给我。", "好的")  # it is found at once
    for words in ("预算", "预算表", "算", "表", "发给我"):
        assert await found_in(store, words) == ["user"], words
    assert await found_in(store, "算预") == []
    assert await found_in(store, "预算", "tenant") == ["user"]
    assert await found_in(store, "预算", "another") == []
    assert await found_in(store, "4711 预算") == []
    plain = await search_texts(store, "--", None)  # the texts are looked through
    assert not plain["searched"]["index"]


async def test_an_old_store_is_indexed_later_and_pages_go_on_where_they_were(store: Store) -> None:
    for number in range(7):
        await Talk(store=store, session=f"s{number}").say(f"apple pie {number}", "yes")
    store.searches_index = True
    assert await store.index_texts(0) is False
    assert await store.index_texts(60) is True
    seen: list[str] = []
    after: str | None = None
    while True:
        found = await search_texts(store, "apple", None, limit=3, after=after)
        seen += [each["session"] for each in found["data"]]
        after = found["next"]
        if after is None:
            break
    whole = await search_texts(store, "apple", None)
    assert sorted(seen) == [f"s{number}" for number in range(7)]
    assert seen == [each["session"] for each in whole["data"]]
    assert whole["searched"]["complete"]
    with pytest.raises(InvalidRequest, match="after must be"):
        await search_texts(store, "apple", None, after="nowhere")


async def test_what_very_many_messages_hold_is_left_to_those_who_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.searches_index = True
    monkeypatch.setattr(search, "MOST", 2)
    talk = Talk(store=store)
    for number in range(3):
        await talk.say(f"apple {number}", "yes")
    found = await search_texts(store, "apple", None)
    assert len(found["data"]) == 3
    assert not found["searched"]["index"]


@pytest.mark.parametrize("most", [portions._DELETED, portions._SESSIONS], ids=["at once", "in portions"])
async def test_with_a_session_its_words_are_deleted(most: int, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "_DELETED", most)
    store.searches_index = True
    await Talk(store=store, session="a").say("xylophone zither", "yes")
    await Talk(store=store, session="b").say("xylophone", "yes")
    assert await found_in(store, "xylophone") == ["user", "user"]
    assert await store.delete(session_key("tenant", "a"))
    assert await found_in(store, "xylophone") == ["user"]
    assert await found_in(store, "zither") == []

    def rows(connection: StoreConnection) -> list[int]:
        tables = (search._TEXTS, search._MARKS)
        counts = [connection.execute(select(func.count()).select_from(each)).scalar_one_or_none() for each in tables]
        return [int(count or 0) for count in counts]

    assert await store._database.read(rows) == [2, 1]
    await Talk(store=store, session="a").say("oboe", "yes")  # the same name again
    assert await found_in(store, "oboe") == ["user"]
    if store._url.startswith("sqlite"):
        path = Path(store._url.partition(":///")[2])
        with closing(connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for file in path.parent.iterdir():
            assert b"zither" not in file.read_bytes(), file


async def test_a_fork_that_is_indexed_while_it_is_made_is_indexed_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.searches_index = True
    talk = Talk(store=store, tenant="team", session="story")
    for number in range(3):
        await talk.say(f"question{number}", f"answer{number}")
    source = await store.session("team", "story")
    assert source is not None
    monkeypatch.setattr(archive, "PORTION", 2)
    write = type(store._database).write

    async def written(*given: Any, **named: Any) -> Any:
        result = await write(*given, **named)
        monkeypatch.setattr(type(store._database), "write", write)
        await store.index_texts(10)
        monkeypatch.setattr(type(store._database), "write", written)
        return result

    monkeypatch.setattr(type(store._database), "write", written)
    await store.fork("team", source.key, source.head, "copy")
    monkeypatch.undo()
    found = await search_texts(store, "answer2", "team")
    assert sorted(each["session"] for each in found["data"]) == ["copy", "story"]


async def test_what_is_not_stored_is_not_indexed(store: Store) -> None:
    store.masker = Withholder(b"secret")
    store.searches_index = True
    await Talk(store=store).say("xylophone", "yes")
    assert await found_in(store, "xylophone") == []
    assert await found_in(store, "stored") == []


async def test_a_downgrade_drops_the_index_and_a_new_one_can_be_made(store: Store) -> None:
    store.searches_index = True
    await Talk(store=store).say("xylophone", "yes")
    assert await found_in(store, "xylophone") == ["user"]
    await downgrade(store._url, "0015")
    await store.renew()
    store._migrate = True
    await store.renew()
    assert await found_in(store, "xylophone") == ["user"]
