"""Names of nodes: content, place, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.conversation.ids import (
    ROOT,
    array_of,
    body_of,
    chain,
    content_hash,
    content_key,
    earlier_names,
    names_under,
    node_id,
    version_of,
)
from proxy.dialects import Facts, Message, body_id
from proxy.dialects.chat.message import ChatMessage

ASK = ChatMessage(b'{"role":"user","content":"hello"}')
SAME = ChatMessage(b'{ "content": [{"type":"text","text":"hello"}], "role": "user" }')
OTHER = ChatMessage(b'{"role":"user","content":"goodbye"}')

texts = st.lists(st.sampled_from(["a", "b", "c"]), max_size=8)


def _messages(contents: list[str]) -> list[Message]:
    return [ChatMessage.of({"role": "user", "content": content}) for content in contents]


def test_a_name_is_forty_hexadecimal_digits() -> None:
    assert len(node_id(ROOT, ASK)) == 40
    assert int(node_id(ROOT, ASK), 16) >= 0


def test_forms_of_one_message_have_one_name_at_one_place() -> None:
    assert node_id(ROOT, ASK) == node_id(ROOT, SAME)
    assert node_id(ROOT, ASK) != node_id(ROOT, OTHER)


def test_the_same_message_elsewhere_is_another_node() -> None:
    first = node_id(ROOT, ASK)
    assert node_id(first, ASK) != first


@given(texts, texts)
def test_two_histories_share_the_names_of_their_common_beginning_and_no_others(one: list[str], two: list[str]) -> None:
    shared = 0
    while shared < min(len(one), len(two)) and one[shared] == two[shared]:
        shared += 1
    left, right = chain(ROOT, _messages(one)), chain(ROOT, _messages(two))
    assert left[:shared] == right[:shared]
    assert not set(left[shared:]) & set(right[shared:])


def test_a_chain_can_be_continued() -> None:
    whole = chain(ROOT, [ASK, OTHER, ASK])
    assert chain(whole[0], [OTHER, ASK]) == whole[1:]


def test_a_body_is_named_by_its_bytes_alone() -> None:
    assert body_id(ASK.raw) == body_id(bytes(ASK.raw))
    assert body_id(ASK.raw) != body_id(SAME.raw)
    assert len(body_id(b"")) == 40


def test_a_row_of_names_is_made_of_the_names_one_by_one() -> None:
    first = node_id(ROOT, ASK)
    assert chain(ROOT, [ASK, OTHER]) == [first, node_id(first, OTHER)]


def test_a_message_is_looked_up_by_what_it_says() -> None:
    assert content_key(content_hash(ASK)) == content_key(content_hash(SAME))
    assert content_key(content_hash(ASK)) != content_key(content_hash(OTHER))
    assert len(content_key(content_hash(ASK))) == 16


def test_a_version_of_instructions_is_named_by_what_they_say() -> None:
    assert array_of([ASK, OTHER]) == b"[" + ASK.raw + b"," + OTHER.raw + b"]"
    assert array_of([]) == b"[]"
    assert version_of([ASK, OTHER]) == version_of([SAME, OTHER]) != version_of([OTHER, ASK])
    assert version_of([]) != version_of([ASK]) != version_of([ASK, ASK])


def _known(message: Message) -> Message:
    return ChatMessage(
        message.raw, None, Facts(raw=message.raw, role=message.role, has_own_fields=False, has_calls=True)
    )


@given(texts, texts)
def test_what_is_remembered_of_a_message_changes_no_name(one: list[str], two: list[str]) -> None:
    known = {content: _known(message) for content, message in zip("abc", _messages(["a", "b", "c"]), strict=True)}
    for contents in (one, two, one):
        plain, remembered = _messages(contents), [known[content] for content in contents]
        for parent in (ROOT, node_id(ROOT, ASK)):
            names = names_under(parent, map(content_hash, plain))
            assert chain(parent, plain) == names
            assert chain(parent, remembered) == names
        assert list(map(content_hash, remembered)) == list(map(content_hash, plain))
        assert list(map(body_of, remembered)) == list(map(body_of, plain)) == [body_id(m.raw) for m in plain]


def test_the_text_of_a_message_of_which_nothing_is_known_has_the_name_of_its_bytes() -> None:
    (message,) = _messages(["a"])
    assert message.facts is None
    assert body_of(message) == body_id(message.raw)


def test_a_known_message_is_hashed_once() -> None:
    message = _known(ASK)
    names = (chain(ROOT, [message]), content_hash(message), body_of(message))
    # From here on its text is not looked at: with another one it has the same names.
    message.raw = OTHER.raw
    message._data = OTHER.data
    assert (chain(ROOT, [message]), content_hash(message), body_of(message)) == names
    assert chain(names[0][0], [message]) == chain(names[0][0], [ASK])


def test_older_versions_named_messages_in_another_form_otherwise() -> None:
    spaced = ChatMessage(b'{"role":"assistant","content":"hello "}')
    stripped = ChatMessage(b'{"role":"assistant","content":"hello"}')
    assert chain(ROOT, [ASK, spaced, OTHER]) == chain(ROOT, [ASK, stripped, OTHER])
    private, strict, older = earlier_names(ROOT, [ASK, spaced, OTHER])
    assert private == strict == chain(ROOT, [ASK, spaced, OTHER])
    assert older[0] == node_id(ROOT, ASK)
    assert not set(older[1:]) & set(chain(ROOT, [ASK, spaced, OTHER]))
    assert list(earlier_names(ROOT, [ASK, stripped])) == [chain(ROOT, [ASK, stripped])] * 3
