"""Findings of fuzzing and measuring, each reproduced over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.hostile.measure import DOES, answers, endless_stream
from tests.hostile.provider import EVENTS, JSON, LAST, Does, HostileProvider
from tests.hostile.seeds import DIALECTS, MESSAGES, RESPONSES, Seeds
from tests.support.raw_socket import chat, seconds_of, sent
from tests.support.served import Served, config_file, peak, resident
from tests.support.stores import empty_store
from tests.support.waiting import until

MEGABYTE = 1_048_576


@pytest.fixture(scope="module")
def provider(_direct: None) -> Iterator[HostileProvider]:
    # The proxy keeps 48 MB of a stream.
    with HostileProvider(DOES | {"endless stream": endless_stream(60)}) as found:
        yield found


@pytest.fixture(scope="module")
def served(provider: HostileProvider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    sections = {"server": {"max_memory": 512 * MEGABYTE}, "virtual_tools": {"recall_context": True}}
    config = config_file(folder, provider, empty_store(folder / "p.db"), **sections)
    with Served(config) as process:
        yield process.wait()
        assert "Traceback" not in process.log


def asked(served: Served, seeds: Seeds, model: str, *, stream: bool = False, **more: Any) -> httpx.Response:
    body = seeds.body(seeds.talks[-1], {"model": model, "stream": stream, **more})
    return httpx.post(served.url + seeds.path, json=body, timeout=60, trust_env=False)


@pytest.fixture(params=DIALECTS)
def seeds(request: pytest.FixtureRequest) -> Seeds:
    return DIALECTS[request.param]


def test_refused_bodies_take_no_memory_with_them(served: Served) -> None:
    port = int(served.url.rpartition(":")[2])
    body = MESSAGES.raw_body(b",".join([b'{"role":"user","content":"a"}'] * 500_000))
    assert sent(port, chat(body))[0] == 400
    before = resident(served.process.pid)
    for _ in range(8):
        assert sent(port, chat(body))[0] == 400
    assert resident(served.process.pid) - before < 3 * len(body)


@pytest.mark.parametrize("model", ["event", "values of an event"])
def test_a_stream_that_is_too_large_ends_with_an_error_event(served: Served, seeds: Seeds, model: str) -> None:
    assert b"upstream_too_large" in asked(served, seeds, model, stream=True).content[-2000:]
    until(lambda: resident(served.process.pid) <= 300 * MEGABYTE, "its memory is given back")


def test_a_stream_without_end_is_passed_on_and_not_kept(served: Served, seeds: Seeds) -> None:
    size = most = 0
    body = seeds.body(seeds.talks[-1], {"model": "endless stream", "stream": True})
    # On an overloaded machine the store counts as unavailable for a while. That case is not tested here.
    until(lambda: httpx.get(f"{served.url}/readyz", trust_env=False).status_code == 200, "the store is there")
    with (
        httpx.Client(timeout=60, trust_env=False) as client,
        client.stream("POST", served.url + seeds.path, json=body, headers={"x-session-id": "endless"}) as answer,
    ):
        assert answer.status_code == 200
        for piece in answer.iter_raw():
            size += len(piece)
            most = max(most, resident(served.process.pid))
    assert size > 56 * MEGABYTE
    assert most < 600 * MEGABYTE
    place = f"{served.url}/exchanges/{answer.headers['x-exchange-id']}"
    until(lambda: httpx.get(place, trust_env=False).status_code == 200, "its receipt is there")
    receipt = httpx.get(place, trust_env=False).json()
    assert (receipt["status"], "too long to be stored whole" in receipt["error"]) == ("partial", True)


def test_what_follows_the_last_event_without_an_end_is_not_kept(
    served: Served, provider: HostileProvider, seeds: Seeds
) -> None:
    async def does(writer: Any, seeds: Seeds, streams: bool) -> None:
        writer.write(EVENTS + LAST + seeds.streamed([(name, orjson.dumps(data)) for name, data in seeds.events]))
        for _ in range(1000):
            writer.write(b": more\n\n" * 131_072)
            await writer.drain()

    provider.does["no end"] = does
    assert len(asked(served, seeds, "no end", stream=True).content) < 4 * MEGABYTE


def test_others_are_served_while_a_long_error_is_read(served: Served, provider: HostileProvider, seeds: Seeds) -> None:
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\n"
    provider.does["long error"] = answers(*[b"<p>not found</p>" * 65_536] * 60, head=head)
    port, waited = int(served.url.rpartition(":")[2]), list[float]()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(asked, served, seeds, "long error")
        while not answer.done():
            waited.append(seconds_of(port))
    assert answer.result().status_code == 400
    assert max(waited) < 1


@pytest.mark.parametrize("model", ["deep", "digits", "members", "raw deflate"])
def test_an_odd_answer_that_can_be_relayed_is_relayed(served: Served, seeds: Seeds, model: str) -> None:
    assert asked(served, seeds, model).status_code == 200


@pytest.mark.parametrize("model", ["600", "999", "control", "cut", "100 MB", "values"])
def test_an_answer_that_cannot_be_relayed_is_a_502(served: Served, seeds: Seeds, model: str) -> None:
    answer = asked(served, seeds, model)
    assert (answer.status_code, "error" in answer.json()) == (502, True)


def test_answers_that_are_too_large_are_not_held(served: Served) -> None:
    Path(f"/proc/{served.process.pid}/clear_refs").write_text("5")  # forget the peak
    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(lambda _: asked(served, DIALECTS["chat"], "bomb"), range(10)))
    assert {answer.status_code for answer in answers} == {502}
    assert peak(served.process.pid) < 500 * MEGABYTE


@pytest.mark.parametrize("kind", [["text"], {"a": 1}, 7, None])
def test_the_type_of_a_block_may_be_anything(served: Served, kind: Any) -> None:
    block = {"type": kind, "text": "a"}
    for seeds, content in ((MESSAGES, [block]), (RESPONSES, [block])):
        for role in ("user", "assistant"):
            body = seeds.body([{"role": role, "content": content}, *seeds.talks[-1]], {"model": "plain"})
            answer = httpx.post(served.url + seeds.path, json=body, timeout=60, trust_env=False)
            assert answer.status_code != 500


def test_a_name_in_a_warning_may_hold_control_characters(served: Served) -> None:
    call = {"id": "a\x1b\x00", "type": "function", "function": {"name": "f\x7f\x01", "arguments": "{"}}
    for role in ("assistant", "\x00user", "\x1b[31m"):
        messages = [{"role": "user", "content": "a"}, {"role": role, "tool_calls": [call]}] * 2
        body = {"model": "plain\x01", "messages": messages}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code != 500


def test_an_event_that_is_no_text_is_relayed(served: Served, provider: HostileProvider) -> None:
    events = [(name, orjson.dumps(data)) for name, data in RESPONSES.events]
    name, data = events[8]
    events[8] = name, data[:-1] + b',"\xed\xa0\x80":1}'
    stream = RESPONSES.streamed(events)
    provider.does["no text"] = told(stream)
    answer = asked(served, RESPONSES, "no text", stream=True)
    assert answer.content == stream


def told(body: bytes, head: bytes = EVENTS) -> Does:
    async def does(writer: Any, seeds: Seeds, streams: bool) -> None:
        writer.write(head + LAST + body)
        await writer.drain()
        writer.close()

    return does


@pytest.mark.parametrize("details", ["a", 7, [], {"cached_tokens": "a"}])
def test_the_usage_of_an_answer_may_be_anything(served: Served, provider: HostileProvider, details: Any) -> None:
    changed = DIALECTS["chat"].answer | {"usage": {"prompt_tokens": 9, "prompt_tokens_details": details}}
    body = orjson.dumps(changed)
    provider.does["odd usage"] = told(body, JSON)
    headers = {"x-session-id": "odd-usage"}
    asking = DIALECTS["chat"].body(DIALECTS["chat"].talks[-1], {"model": "odd usage"})
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=asking, headers=headers, timeout=60, trust_env=False)
    assert answer.content == body
    for path in ("/ui/sessions/odd-usage.json", "/sessions/odd-usage/exchanges", "/stats"):
        assert httpx.get(served.url + path, trust_env=False).status_code == 200, path


def asked_with_tools(served: Served, seeds: Seeds, model: str, *, stream: bool) -> httpx.Response:
    return asked(served, seeds, model, **seeds.more[0], stream=stream)


@pytest.mark.parametrize("name", [["f"], {"a": 1}, 7, None])
@pytest.mark.parametrize("stream", [False, True])
def test_the_name_of_a_call_may_be_anything_beside_tools_of_the_proxy(
    served: Served, provider: HostileProvider, seeds: Seeds, stream: bool, name: Any
) -> None:
    def with_name(data: Any) -> bytes:
        return orjson.dumps(data).replace(b'"name":"f"', b'"name":' + orjson.dumps(name))

    body = seeds.streamed([(event, with_name(data)) for event, data in seeds.events])
    provider.does["odd name"] = told(body) if stream else told(with_name(seeds.answer), JSON)
    answer = asked_with_tools(served, seeds, "odd name", stream=stream)
    assert answer.status_code == 200
    assert b"internal_error" not in answer.content
    assert "fine" in answer.text or b'"fi"' in answer.content


@pytest.mark.parametrize("name", [["f"], {"a": 1}, 7, None])
def test_the_name_of_a_tool_may_be_anything_beside_tools_of_the_proxy(served: Served, seeds: Seeds, name: Any) -> None:
    offered = orjson.dumps(seeds.more[0])
    changed = offered.replace(b'"name":"f"', b'"name":' + orjson.dumps(name))
    assert changed != offered
    assert asked(served, seeds, "plain", **orjson.loads(changed)).status_code == 200


def test_the_end_of_a_stream_may_be_no_json_beside_tools_of_the_proxy(
    served: Served, provider: HostileProvider
) -> None:
    *events, (name, data) = [(name, orjson.dumps(data)) for name, data in RESPONSES.events]
    body = RESPONSES.streamed([*events, (name, data[:-1] + b',"a":"\\u12"}')])
    provider.does["odd end"] = told(body)
    answer = asked_with_tools(served, RESPONSES, "odd end", stream=True)
    assert answer.status_code == 200
    assert b"internal_error" not in answer.content


def test_the_output_of_a_call_may_be_a_list_of_texts(served: Served) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": ["line 1\n" * 2_000, {"type": "input_text"}]}
    body = RESPONSES.body([{"role": "user", "content": "a"}, call, result], {"model": "plain"})
    assert httpx.post(served.url + RESPONSES.path, json=body, timeout=60, trust_env=False).status_code != 500


@pytest.mark.parametrize("odd", ["a block that never begins", "blocks from 1 on", "a block twice"])
def test_blocks_are_shown_as_they_come_beside_tools_of_the_proxy(
    served: Served, provider: HostileProvider, odd: str
) -> None:
    events = [(name, orjson.dumps(data)) for name, data in MESSAGES.events]
    begins = next(at for at, (name, _) in enumerate(events) if name == "content_block_start")
    if odd == "a block that never begins":
        del events[begins]
    elif odd == "a block twice":
        events.insert(begins, events[begins])
    else:
        for index in (1, 0):
            old, new = b'"index":%d' % index, b'"index":%d' % (index + 1)
            events = [(name, data.replace(old, new)) for name, data in events]
    stream = MESSAGES.streamed(events)
    provider.does["odd blocks"] = told(stream)
    assert asked_with_tools(served, MESSAGES, "odd blocks", stream=True).content == stream


def test_of_a_long_error_a_receipt_keeps_the_beginning(served: Served, provider: HostileProvider, seeds: Seeds) -> None:
    words = "cannot read " + "what you asked " * 100_000
    body = orjson.dumps({"error": {"message": words}})
    provider.does["words"] = told(body, b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n")
    answer = asked(served, seeds, "words")
    assert answer.content == body
    receipt = httpx.get(f"{served.url}/exchanges/{answer.headers['x-exchange-id']}", trust_env=False).json()
    assert receipt["error"] == words[:4_000]
