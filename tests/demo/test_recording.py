from proxy.demo.recording import Recording, same_message


def test_it_ends_with_a_reply_and_says_where_it_is_from() -> None:
    recording = Recording.load()
    assert recording.messages[-1]["role"] == "assistant"
    assert recording.source.startswith("github:sierra-research/tau-bench@")
    assert recording.license.startswith("MIT")
    assert len(recording.tools) == 14


def test_the_log_is_what_follows_the_instructions() -> None:
    recording = Recording.load()
    assert recording.messages[0]["role"] == "system"
    assert recording.log == recording.messages[1:]


def test_every_reply_was_asked_for_in_its_turn() -> None:
    said = ["user", "assistant", "tool", "assistant", "user", "assistant", "user"]
    messages = [{"role": "system"}, *({"role": role} for role in said)]
    recording = Recording.of({"id": "x", "source": "s", "license": "l", "tools": None, "messages": messages})
    assert [(request.turn, request.position) for request in recording.requests()] == [(1, 2), (1, 4), (2, 6)]
    assert len(recording.messages) == 7
    assert recording.tools == ()


def test_null_and_missing_say_the_same() -> None:
    assert same_message({"role": "assistant", "content": None}, {"role": "assistant"})
    assert not same_message({"role": "assistant", "content": ""}, {"role": "assistant", "content": "no"})
