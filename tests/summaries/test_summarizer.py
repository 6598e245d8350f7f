"""Requests to the summarizer, against a server that answers with given bytes; and the breaker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

import orjson
import pytest

from proxy.config import SummarizerSettings, UpstreamSettings
from proxy.config.settings import Route
from proxy.errors import NoAnswer
from proxy.summaries import Caller, Summarizer
from proxy.summaries.prompt import Prompt
from proxy.summaries.summarizer import FAILURES, LONGEST_PAUSE, PAUSE, Breaker, ModelAnswer
from proxy.upstream import Upstream

pytestmark = pytest.mark.anyio

ASKED = Prompt(system="sum up", user="it")
CALLER = Caller(
    tenant="anne",
    headers=(
        (b"Authorization", b"Bearer sk-anne"),
        (b"OpenAI-Project", b"proj"),
        (b"Idempotency-Key", b"k1"),
        (b"Content-Type", b"text/plain"),
        (b"Cookie", b"c=1"),
    ),
    query=b"api-version=7",
)


def response(status: int, body: Any, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    lines = [f"HTTP/1.1 {status} S", f"content-length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def completion(content: Any, finish: str | None = "stop", **message: Any) -> bytes:
    said = {"role": "assistant", "content": content, **message}
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    choices = [{"index": 0, "message": said, "finish_reason": finish}]
    return response(200, {"id": "x", "model": "m-2024", "choices": choices, "usage": usage})


class Provider:
    """Answers each request with the next of `answers`, then always with the last; None means no answer."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.came = asyncio.Semaphore(0)
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.came.release()
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer is None:
                    await reader.read()
                    break
                if not answer:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def headers(self, number: int = -1) -> dict[str, str]:
        lines = self.requests[number].partition(b"\r\n\r\n")[0].decode().split("\r\n")
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}

    @property
    def target(self) -> str:
        return self.requests[-1].split(b" ")[1].decode()

    @property
    def body(self) -> Any:
        return orjson.loads(self.requests[-1].partition(b"\r\n\r\n")[2])


@asynccontextmanager
async def asking(provider: Provider, **settings: Any) -> AsyncIterator[Summarizer]:
    server = await asyncio.start_server(provider, "127.0.0.1", 0)
    provider.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    upstream_settings = settings.pop("upstream", {})
    breaker = settings.pop("breaker", None)
    for name in ("base_url",):
        if name in settings:
            settings[name] = provider.url + settings[name]
    if "routes" in upstream_settings:
        upstream_settings["routes"] = tuple(
            Route(**{**route, "base_url": provider.url + route["base_url"]}) for route in upstream_settings["routes"]
        )
    upstream = Upstream(UpstreamSettings(base_url=f"{provider.url}/v1", **upstream_settings), shares_key=False)
    try:
        yield Summarizer(SummarizerSettings(**settings), upstream, breaker)
    finally:
        await upstream.aclose()
        server.close()


async def ask(summarizer: Summarizer, model: str = "gpt", caller: Caller = CALLER) -> ModelAnswer:
    return await summarizer.ask(summarizer.target(model, caller), ASKED)


async def refused(summarizer: Summarizer) -> NoAnswer:
    with pytest.raises(NoAnswer) as caught:
        await ask(summarizer)
    return caught.value


async def arrived(provider: Provider, requests: int) -> None:
    async with asyncio.timeout(20):
        for _ in range(requests):
            await provider.came.acquire()


# ------------------------------------------------------------------------------------ who is asked, and how


async def test_the_default_target_is_that_of_the_sessions_requests_with_their_key() -> None:
    provider = Provider(completion("a summary"))
    async with asking(provider) as summarizer:
        answer = await ask(summarizer)
    assert answer == ModelAnswer(
        text="a summary",
        finish="stop",
        calls=False,
        usage={"prompt_tokens": 11, "completion_tokens": 3},
        model="m-2024",
    )
    assert provider.target == "/v1/chat/completions?api-version=7"
    assert provider.body == {
        "model": "gpt",
        "messages": [{"role": "system", "content": "sum up"}, {"role": "user", "content": "it"}],
    }
    sent = provider.headers()
    assert sent["authorization"] == "Bearer sk-anne"
    assert sent["openai-project"] == "proj"
    assert sent["content-type"] == "application/json"
    assert sent["accept-encoding"] == "identity"
    assert sent["user-agent"].startswith("palimpsest/")
    assert not {"idempotency-key", "cookie"} & sent.keys()


async def test_an_own_base_url_gets_no_header_of_the_client() -> None:
    provider = Provider(completion("a summary"))
    async with asking(provider, base_url="/other", model="small") as summarizer:
        await ask(summarizer)
    assert provider.target == "/other/chat/completions"
    assert provider.body["model"] == "small"
    assert not {"authorization", "openai-project"} & provider.headers().keys()


async def test_an_own_key_is_sent_in_place_of_the_clients() -> None:
    provider = Provider(completion("a summary"))
    async with asking(provider, base_url="/other", api_key="sk-own") as summarizer:
        await ask(summarizer)
        assert provider.headers()["authorization"] == "Bearer sk-own"
        assert "sk-own" not in repr(summarizer.target("gpt", CALLER))
        assert "sk-anne" not in repr(CALLER)
    async with asking(provider, api_key="sk-own") as summarizer:
        await ask(summarizer)
    assert provider.target == "/v1/chat/completions"  # the client's query may hold its key
    assert provider.headers()["authorization"] == "Bearer sk-own"


@pytest.mark.parametrize("models", ["deep-*", "*"])  # with the second one the client's own requests go there, too
async def test_a_routed_model_is_asked_at_its_route_without_the_clients_key(models: str) -> None:
    provider = Provider(completion("a summary"))
    routes = ({"models": (models,), "base_url": "/deep", "api_key": "sk-deep"},)
    async with asking(provider, model="deep-1", upstream={"routes": routes}) as summarizer:
        await ask(summarizer)
    assert provider.target == "/deep/chat/completions"
    assert provider.headers()["authorization"] == "Bearer sk-deep"


# ------------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize(
    ("body", "text", "finish", "calls"),
    [
        (completion([{"type": "text", "text": "par"}, {"type": "text", "text": "ts"}]), "parts", "stop", False),
        (completion("<think>\nhm, <b>\n</think>\n\nso"), "so", "stop", False),
        (completion("hm, a template opened it\n</think>\n\nso"), "so", "stop", False),
        (completion("<think>\nhm, it never ends"), "", "stop", False),
        (completion("no <think> at the start </think>"), "no <think> at the start </think>", "stop", False),
        (completion("no <think> at the start"), "no <think> at the start", "stop", False),
        (completion(None, "tool_calls", tool_calls=[{"id": "c"}]), "", "tool_calls", True),
        (completion("cut o", "length"), "cut o", "length", False),
        (completion(" \n"), "", "stop", False),
        (completion("x", None), "x", None, False),
    ],
)
async def test_an_answer_is_read(body: bytes, text: str, finish: str | None, calls: bool) -> None:
    async with asking(Provider(body)) as summarizer:
        answer = await ask(summarizer)
    assert (answer.text, answer.finish, answer.calls) == (text, finish, calls)


async def test_an_answer_without_usage_and_model_is_read() -> None:
    choices = [{"message": {"content": "s"}}]
    async with asking(Provider(response(200, {"choices": choices}))) as summarizer:
        answer = await ask(summarizer)
    assert (answer.text, answer.usage, answer.model) == ("s", None, "gpt")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (response(502, b"<html><h1>Bad Gateway</h1></html>"), "the summarizer answered 502"),
        (response(500, {"error": {"message": "sk-1 is bad", "type": "server_error"}}), "500 (server_error)"),
        (response(401, {"error": {"message": "sk-a", "code": "invalid_api_key"}}), "401 (invalid_api_key)"),
        (response(400, {"error": {"message": "no", "code": "has blanks", "type": 3}}), "answered 400"),
        (response(400, {"error": "no"}), "answered 400"),
        (response(404, b"[]"), "answered 404"),
        (response(200, b"<html></html>"), "is not JSON"),
        (response(200, b'{"choices": ['), "is not JSON"),
        (response(200, b"[1]"), "is not a completion"),
        (response(200, {"choices": []}), "is not a completion"),
        (response(200, {"error": {"code": "overloaded"}}), "is an error (overloaded)"),
        (b"", "cannot be reached, or the connection broke"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", "did not answer within 0.2 s"),
        (None, "did not answer within 0.2 s"),
        (response(200, b"[" + b" " * 5_000_000 + b"]"), "too long to be a summary"),
    ],
)
async def test_the_reason_of_a_failure_quotes_no_message(body: bytes | None, reason: str) -> None:
    slow = body is None or body.endswith(b"abc")
    async with asking(Provider(body), timeout=0.2 if slow else 60) as summarizer:
        why = await refused(summarizer)
    assert reason in why.message
    assert str(why) == why.message
    assert "sk-" not in why.message


async def test_an_unreachable_summarizer_is_the_reason() -> None:
    provider = Provider()
    async with asking(provider, base_url="/x") as summarizer:
        pass
    upstream = Upstream(UpstreamSettings(base_url=f"{provider.url}/v1"), shares_key=False)
    summarizer = Summarizer(SummarizerSettings(), upstream)
    assert "cannot be reached" in (await refused(summarizer)).message
    await upstream.aclose()


async def test_a_full_connection_pool_is_the_reason() -> None:
    provider = Provider(None)
    few = {"max_connections": 1, "connect_timeout": 0.5}
    async with asking(provider, upstream=few) as summarizer, asyncio.TaskGroup() as group:
        first = group.create_task(ask(summarizer))
        await arrived(provider, 1)
        assert "in use" in (await refused(summarizer)).message
        first.cancel()


async def test_the_upstreams_read_timeout_may_be_shorter() -> None:
    async with asking(Provider(None), upstream={"read_timeout": 0.05}) as summarizer:
        assert (await refused(summarizer)).message == "the summarizer did not answer in time"


async def test_a_request_that_is_too_long_is_no_failure_of_the_summarizer() -> None:
    said = "This model's maximum context length is 100 tokens. However, you requested 200 tokens."
    provider = Provider(response(400, {"error": {"message": said}}))
    async with asking(provider) as summarizer:
        for _ in range(FAILURES + 1):
            why = await refused(summarizer)
            assert (why.too_long, why.window) == (True, 100)
        assert summarizer.pause(summarizer.target("gpt", CALLER)) == 0


# ------------------------------------------------------------------------------------ not again and again


async def test_a_busy_summarizer_is_asked_once_more_after_a_short_wait() -> None:
    busy = response(429, {"error": {"code": "rate_limited"}}, "retry-after: 0.01")
    provider = Provider(busy, completion("a summary"))
    async with asking(provider) as summarizer:
        assert (await ask(summarizer)).text == "a summary"
    assert len(provider.requests) == 2


@pytest.mark.parametrize("header", ["retry-after: 300", "retry-after: DATE", "retry-after-ms: 300000"])
async def test_a_long_retry_after_opens_the_breaker_at_once(header: str) -> None:
    date = formatdate(time.time() + 300, usegmt=True)
    provider = Provider(response(429, {}, header.replace("DATE", date)))
    async with asking(provider) as summarizer:
        assert "429" in (await refused(summarizer)).message
        assert 200 < summarizer.pause(summarizer.target("gpt", CALLER)) <= 300
        assert "paused" in (await refused(summarizer)).message
    assert len(provider.requests) == 1


@pytest.mark.parametrize("header", ["x-other: 1", "retry-after: soon"])
async def test_a_busy_summarizer_without_retry_after_is_not_asked_again(header: str) -> None:
    provider = Provider(response(503, {}, header))
    async with asking(provider) as summarizer:
        await refused(summarizer)
        assert summarizer.pause(summarizer.target("gpt", CALLER)) == 0
    assert len(provider.requests) == 1


async def test_repeated_failures_open_the_breaker_for_this_client() -> None:
    provider = Provider(response(500, {}))
    async with asking(provider) as summarizer:
        reasons = [(await refused(summarizer)).message for _ in range(FAILURES + 2)]
        assert "paused" in reasons[-1]
        assert len(provider.requests) == FAILURES
        # The client's own key is a part of it: another client's may be better.
        with pytest.raises(NoAnswer, match="500"):
            await ask(summarizer, caller=Caller(tenant="bert"))
        assert len(provider.requests) == FAILURES + 1


async def test_a_cancelled_request_is_no_failure() -> None:
    clock = [0.0]
    breaker = Breaker(lambda: clock[0])
    provider = Provider(*[response(500, {})] * FAILURES, None)
    async with asking(provider, breaker=breaker) as summarizer:
        for _ in range(FAILURES):
            await refused(summarizer)
        clock[0] += 1_000
        target = summarizer.target("gpt", CALLER)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(ask(summarizer))
            await arrived(provider, FAILURES + 1)
            assert summarizer.pause(target) > 0  # one is under way
            task.cancel()
        assert summarizer.pause(target) == 0


# ------------------------------------------------------------------------------------ the breaker


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def fail(breaker: Breaker, times: int, name: str = "a") -> None:
    for _ in range(times):
        assert breaker.admits(name)
        breaker.failed(name)


async def test_the_breaker_opens_after_failures_in_a_row(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES - 1)
    assert breaker.pause("a") == 0
    fail(breaker, 1)
    assert not breaker.admits("a")
    assert breaker.pause("a") == PAUSE
    clock.now += PAUSE - 1
    assert not breaker.admits("a")
    assert breaker.pause("a") == 1


async def test_a_success_resets_the_count(breaker: Breaker) -> None:
    fail(breaker, FAILURES - 1)
    breaker.succeeded("a")
    fail(breaker, FAILURES - 1)
    assert breaker.admits("a")


async def test_targets_are_counted_separately(breaker: Breaker) -> None:
    fail(breaker, FAILURES)
    assert breaker.admits("b")


async def test_after_the_pause_one_request_passes(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    clock.now += PAUSE
    assert breaker.admits("a")
    assert not breaker.admits("a")
    assert breaker.pause("a") > 0
    breaker.succeeded("a")
    assert breaker.admits("a")
    fail(breaker, FAILURES - 1)
    assert breaker.admits("a")


async def test_each_further_pause_is_twice_as_long_up_to_a_limit(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    lengths = [breaker.pause("a")]
    for _ in range(8):
        clock.now += breaker.pause("a")
        fail(breaker, 1)
        lengths.append(breaker.pause("a"))
    assert lengths[:4] == [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE]
    assert lengths[-1] == LONGEST_PAUSE


async def test_a_cancelled_request_lets_another_pass(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    clock.now += PAUSE
    assert breaker.admits("a")
    breaker.abandoned("a")
    assert breaker.admits("a")
    breaker.abandoned("never heard of")


async def test_a_retry_after_starts_a_pause_at_once(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("a", 7.0)
    assert breaker.pause("a") == 7
    clock.now += 7
    assert breaker.admits("a")
    breaker.failed("a", 1e9)
    assert breaker.pause("a") == LONGEST_PAUSE


async def test_late_failures_do_not_shorten_a_pause(breaker: Breaker) -> None:
    fail(breaker, FAILURES)
    breaker.failed("a")  # it was let through before
    assert breaker.pause("a") == PAUSE


async def test_the_oldest_targets_are_forgotten(breaker: Breaker) -> None:
    fail(breaker, FAILURES, "first")
    for number in range(2_000):
        fail(breaker, FAILURES, f"name {number}")
    assert breaker.admits("first")
    assert not breaker.admits("name 1999")
