import orjson

from proxy.demo.answers import completion, events

USAGE = {"prompt_tokens": 3}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"text":"' + "x" * 60 + '"}'},
}


def parsed(stream: list[bytes]) -> list[dict[str, object]]:
    assert stream[-1] == b"data: [DONE]\n\n"
    return [orjson.loads(event.removeprefix(b"data: ")) for event in stream[:-1]]


def test_a_completion_holds_the_reply_as_it_is() -> None:
    reply = {"content": None, "role": "assistant", "tool_calls": [CALL]}
    data = orjson.loads(completion(7, "m", reply, USAGE))
    assert data["choices"][0]["message"] == reply
    assert data["choices"][0]["finish_reason"] == "tool_calls"
    assert (data["object"], data["usage"], data["id"]) == ("chat.completion", USAGE, "chatcmpl-practice-7")


def test_text_comes_word_by_word_and_is_whole() -> None:
    text = " Two  words,\nthen more.\n"
    chunks = parsed(list(events(0, "m", {"role": "assistant", "content": text}, None)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert len(deltas) == 1 + 4 + 1
    assert all("usage" not in chunk for chunk in chunks)


def test_arguments_come_in_pieces() -> None:
    chunks = parsed(list(events(0, "m", {"role": "assistant", "content": None, "tool_calls": [CALL]}, None)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index]
    assert deltas[0] == {"role": "assistant", "content": None}
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert pieces[0]["id"] == "call_1"
    assert len(pieces) > 3
    assert "".join(piece["function"]["arguments"] for piece in pieces) == CALL["function"]["arguments"]  # type: ignore[index]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"  # type: ignore[index]


def test_usage_is_the_last_event_where_it_was_asked_for() -> None:
    chunks = parsed(list(events(0, "m", {"role": "assistant", "content": "hi"}, USAGE)))
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], USAGE)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
