"""Names of nodes: content, place, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.history.nodes import ROOT, body_id, chain, node_id
from proxy.wire.messages import Message

ASK = Message(b'{"role":"user","content":"hello"}')
SAME = Message(b'{ "content": [{"type":"text","text":"hello"}], "role": "user" }')
OTHER = Message(b'{"role":"user","content":"goodbye"}')

texts = st.lists(st.sampled_from(["a", "b", "c"]), max_size=8)


def _messages(contents: list[str]) -> list[Message]:
    return [Message.of({"role": "user", "content": content}) for content in contents]


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
def test_two_histories_share_the_names_of_their_common_beginning_and_no_others(
    one: list[str], two: list[str]
) -> None:
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
