"""What the client was not shown of replies, kept with them."""

from __future__ import annotations

import pytest

from proxy.store.records import Reply
from proxy.store.store import Store
from proxy.store.tree import HiddenRecord, hidden_at
from proxy.trimming import Hidden
from tests.support.asides import HIDDEN, reply, say, settle
from tests.support.talk import Talk, body

pytestmark = pytest.mark.anyio


async def kept(talk: Talk, *nodes: str, total: int = 1) -> dict[str, Hidden]:
    return await talk.store._database.read(lambda c: hidden_at(c, talk.key, nodes, total))


async def count(talk: Talk) -> int:
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    return row.hidden


def replies(*hidden: Hidden | None) -> list[Reply]:
    return [reply(f"answer {number}", each) for number, each in enumerate(hidden)]


async def test_it_comes_back_to_the_byte(store: Store) -> None:
    talk = Talk(store=store)
    settled = await say(talk, "one", *replies(HIDDEN))
    found = await kept(talk, *settled.nodes, *settled.replies)
    assert found == {settled.head: HIDDEN}
    assert [each.raw for each in found[settled.head].before] == [each.raw for each in HIDDEN.before]
    assert await count(talk) == 1
    assert await kept(Talk(store=store, session="other"), settled.head) == {}


async def test_each_reply_has_its_own(store: Store) -> None:
    talk = Talk(store=store)
    other = Hidden(before=(), reply=None, after=HIDDEN.after, tokens=4)
    settled = await say(talk, "one", *replies(HIDDEN, None, other))
    assert await kept(talk, *settled.replies, total=2) == {
        settled.replies[0]: HIDDEN,
        settled.replies[2]: other,
    }
    assert await count(talk) == 2


async def test_a_reply_that_is_there_already_stays_what_it_was(store: Store) -> None:
    """Views that hold it must not change, whether something was hidden of it or not."""
    talk = Talk(store=store)
    other = Hidden(before=HIDDEN.before, reply=None, after=(), tokens=4)
    for text, first, second in (("one", HIDDEN, other), ("two", None, other), ("three", HIDDEN, None)):
        made = await say(talk, text, *replies(first))
        asked = body("user", text)
        again = await talk.begin(asked, base=talk.bases[talk.exchanges[-1]], kind="rewind")
        repeated = await settle(
            talk, again, asked, replies=tuple(replies(second)), at_head=False, kind="rewind"
        )
        assert repeated.replies == made.replies
        assert (await kept(talk, *made.replies)).get(made.head) == first
    assert await count(talk) == 2


async def test_of_equal_replies_the_first_one_counts(store: Store) -> None:
    talk = Talk(store=store)
    other = Hidden(before=HIDDEN.before, reply=None, after=(), tokens=4)
    settled = await say(talk, "one", reply("same", HIDDEN), reply("same", other))
    assert await kept(talk, *settled.replies) == {settled.head: HIDDEN}
    assert await count(talk) == 1


async def test_the_store_is_asked_where_the_session_has_some(store: Store) -> None:
    talk = Talk(store=store)
    settled = await say(talk, "one", *replies(None))
    row = await store.session(talk.tenant, talk.session)
    assert row is not None
    assert await store.hidden(row, [settled.head]) == {}
    settled = await say(talk, "two", *replies(HIDDEN))
    row = await store.session(talk.tenant, talk.session)
    assert row is not None
    assert await store.hidden(row, [settled.head]) == {settled.head: HIDDEN}
    assert await store.hidden(row, []) == {}


@pytest.mark.parametrize("total", [3, 100])
async def test_they_are_found_among_few_and_among_many(
    store: Store, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    """By their own names where they are fewer than the messages, else by those of the messages."""
    talk = Talk(store=store)
    settled = [await say(talk, f"q{number}", *replies(HIDDEN)) for number in range(3)]
    nodes = [name for each in settled for name in (*each.nodes, *each.replies)]
    monkeypatch.setattr("proxy.store.tree._AT_ONCE", 2)
    assert await kept(talk, *nodes[:5], total=total) == {each.head: HIDDEN for each in settled[:2]}


@pytest.mark.parametrize("text", ["[]", '"text"', "{", ""])
def test_a_record_with_what_is_no_message_is_refused(text: str) -> None:
    for wrong in (
        HiddenRecord(node="node", before=(text,), reply=None, after=(), tokens=0, created_at=0),
        HiddenRecord(node="node", before=(), reply=text, after=(), tokens=0, created_at=0),
        HiddenRecord(node="node", before=(), reply=None, after=(text,), tokens=0, created_at=0),
    ):
        with pytest.raises(ValueError, match=r"no message|JSON|data|empty"):
            wrong.read()
    assert HiddenRecord(
        node="node", before=(), reply=None, after=(), tokens=3, created_at=0
    ).read() == Hidden(before=(), reply=None, after=(), tokens=3)
