"""Tools that the provider may run, and results in other forms than a text: shells, searches for tools, programs."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.dialects import Message, dialect_named
from proxy.dialects.responses.items import Item
from proxy.dialects.responses.reply import read_body
from tests.dialects.responses.test_items import entries, item, said, turn

API = dialect_named("responses")
ASK = {"role": "user", "content": "What is there?"}
EXITED = {"type": "exit", "exit_code": 2}
RUN = {"type": "shell_call", "id": "sh_1", "call_id": "c1", "action": {"commands": ["ls", "id"]}}
WROTE = {"stdout": "a\nb\n", "stderr": "no id", "outcome": EXITED}
RAN = {
    "type": "shell_call_output",
    "call_id": "c1",
    "output": [WROTE, {"stdout": "c", "stderr": "", "outcome": EXITED}],
}
HOSTED = {**RAN, "id": "sho_1", "status": "completed"}
SEARCH = {"type": "tool_search_call", "id": "tsc_1", "call_id": "c2", "execution": "client", "arguments": {"q": "x"}}
FOUND = {
    "type": "tool_search_output",
    "call_id": "c2",
    "execution": "client",
    "tools": [{"type": "function", "name": "f"}],
}
SCREEN = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
SEEN = {"type": "computer_call_output", "call_id": "c3", "output": SCREEN}
PROGRAM = {"type": "program", "id": "pr_1", "call_id": "p1", "code": "f()", "fingerprint": "x"}
ENDED = {"type": "program_output", "id": "po_1", "call_id": "p1", "result": "done", "status": "completed"}


def called(name: str) -> dict[str, Any]:
    caller = {"type": "program", "caller_id": "p1"}
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}", "caller": caller}


def answered(name: str) -> Item:
    return item({"type": "function_call_output", "call_id": name, "output": "seen"})


def test_what_the_provider_ran_in_a_shell_is_a_part_of_the_reply() -> None:
    output = [RUN, HOSTED, said("Two files.")]
    (reply,) = read_body(orjson.dumps({"output": output, "status": "completed"})).messages
    assert [message.role for message in entries(ASK, *output, ASK)] == ["user", "assistant", "user"]
    assert API.canonical(entries(ASK, *output)[1]) == API.canonical(reply)
    assert (reply.calls, reply.text) == ((), "Two files.")
    assert any("no id" in text for text in reply.countable().texts)
    told = reply.readable()
    assert '"commands":["ls","id"]' in told
    assert '[shell_call_output: {"output":[{"stdout":"a\\nb\\n"' in told


def test_what_the_client_ran_in_a_shell_is_a_result() -> None:
    first, ran = entries(RUN, RAN)
    assert [call.id for call in first.calls] == ["c1"]
    assert first.calls[0].arguments == '{"commands":["ls","id"]}'
    assert (ran.role, ran.answers, ran.text) == ("tool", "c1", "a\nb\nno idc")
    assert (ran.plain_text, ran.attachments) == (ran.text, ())
    assert ran.countable().texts == ("a\nb\nno id", "c")
    assert ran.countable().media == 0


def test_what_a_shell_wrote_is_replaced_where_it_stands() -> None:
    ran = item(RAN)
    assert ran.with_text("cleared").data["output"] == [
        {"stdout": "cleared", "stderr": "", "outcome": EXITED},
        {"stdout": "", "stderr": "", "outcome": EXITED},
    ]
    shorter = ran.with_texts(["a\nb\nno id", None]).data["output"]
    assert shorter == [WROTE, {"stdout": "", "stderr": "", "outcome": EXITED}]
    assert ran.with_texts(["a", "c"]).data["output"][0] == {"stdout": "a", "stderr": "", "outcome": EXITED}
    assert item({**RAN, "output": "plain"}).with_text("cleared").data["output"] == "cleared"


@pytest.mark.parametrize(
    "result", [SEEN, FOUND, {"type": "mcp_approval_response", "approval_request_id": "m1", "approve": True}]
)
def test_a_result_that_takes_no_text_stays_as_it_is(result: dict[str, Any]) -> None:
    (entry,) = entries(result)
    assert entry.role == "tool"
    assert entry.with_text("cleared") is entry
    assert entry.with_notes({0: "image omitted"}) is entry


def test_a_search_for_tools_is_answered_by_whom_it_names() -> None:
    here = entries(ASK, SEARCH, FOUND)
    assert [message.role for message in here] == ["user", "assistant", "tool"]
    assert [(call.id, call.name, call.arguments) for call in here[1].calls] == [("c2", "tool_search_call", '{"q":"x"}')]
    assert any('"name":"f"' in text for text in here[2].countable().texts)
    assert here[1].without_reasoning() == here[1]
    thought = turn({"type": "reasoning", "id": "rs_1", "summary": []}, SEARCH).without_reasoning()
    assert thought is not None
    assert [call.id for call in thought.calls] == ["c2"]
    there = entries(ASK, {**SEARCH, "execution": "server"}, {**FOUND, "execution": "server"}, said("I found it."))
    assert [message.role for message in there] == ["user", "assistant"]
    assert there[1].calls == ()
    assert API.repair(here).notes == API.repair(there).notes == ()


def test_the_output_of_a_local_shell_may_name_its_call_as_its_id() -> None:
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}}
    output = {"type": "local_shell_call_output", "id": "c1", "output": "a"}
    talk = entries(ASK, call, output)
    assert talk[2].answers == "c1"
    assert API.repair(talk).notes == ()
    assert API.repair(entries(ASK, {**call, "id": "c1"}, output)).notes == ()


def test_a_program_of_the_provider_s_is_one_span_with_all_that_it_calls() -> None:
    talk: list[Message] = [
        item(ASK),
        turn(PROGRAM, called("c1")),
        answered("c1"),
        turn(called("c2")),
        answered("c2"),
        turn(ENDED, said("It is done.")),
        item(ASK),
        turn({**PROGRAM, "call_id": "p2"}, {**ENDED, "call_id": "p2"}, said("So is this.")),
        turn(said("And more.")),
    ]

    def spans(stop: int) -> list[tuple[int, int]]:
        return [(span.start, span.stop) for span in API.spans(talk[:stop])]

    assert spans(3) == [(0, 1), (1, 3)]
    assert spans(5) == [(0, 1), (1, 5)]
    assert spans(9) == [(0, 1), (1, 6), (6, 7), (7, 8), (8, 9)]


def test_what_the_provider_ran_is_told_with_what_it_gave() -> None:
    ran = {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "find", "output": "seven", "error": None}
    made = {"type": "image_generation_call", "id": "ig_1", "result": "QUFB" * 9000, "revised_prompt": "a cat"}
    asks = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "s", "name": "drop", "arguments": "{}"}
    (reply,) = entries(ran, made, {"type": "compaction", "encrypted_content": "gAAA"}, asks)
    assert reply.readable().splitlines() == [
        '[mcp_approval_request: {"server_label":"s","name":"drop","arguments":"{}"}]',
        '[mcp_call: {"server_label":"s","name":"find","output":"seven"}]',
        '[image_generation_call: {"revised_prompt":"a cat"}]',
        "[compaction]",
    ]
    assert '"name":"drop"' in "".join(reply.countable().texts)


def test_an_image_that_the_provider_made_counts_as_an_image() -> None:
    made = {"type": "image_generation_call", "id": "ig_1", "result": "QUFB" * 9000}
    drawn = [{"type": "image", "url": "data:image/png;base64," + "QUFB" * 9000}, {"type": "logs", "logs": "seven"}]
    (reply,) = entries(made, {"type": "code_interpreter_call", "id": "ci_1", "code": "f()", "outputs": drawn})
    counted = reply.countable()
    assert counted.media == 2
    assert sum(map(len, counted.texts)) < 300
    assert any("seven" in text for text in counted.texts)


def test_what_a_tool_of_the_provider_wrote_is_text_even_with_an_image_in_it() -> None:
    page = '<img src="data:image/png;base64,QUFB"> and "data:image/png;base64,QUFB"'
    (reply,) = entries({"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "find", "output": page})
    counted = reply.countable()
    assert counted.media == 0
    assert [orjson.loads(text)["output"] for text in counted.texts] == [page]


def test_messages_of_one_reply_are_read_as_paragraphs() -> None:
    more = {**said(""), "content": [{"type": "output_text", "text": "Two "}, {"type": "output_text", "text": "files."}]}
    no = {
        **said(""),
        "content": [{"type": "output_text", "text": "Read."}, {"type": "refusal", "refusal": "Not more."}],
    }
    (reply,) = entries(said("I look."), HOSTED | {"type": "web_search_call"}, more, no)
    assert reply.display_text == "I look.\n\nTwo files.\n\nRead.\n\nNot more."
    assert reply.text == "I look.Two files.Read."
    (many,) = entries({**said(""), "content": [{"type": "output_text", "text": "word " * 50}] * 50_000})
    assert many.display_text == many.text  # in time that grows with the text
