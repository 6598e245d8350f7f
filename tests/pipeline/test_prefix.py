"""How the last long request of a session began: kept for it alone, and a prepared request is the same with it."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from proxy.dialects import LONG_BODY
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.request import parse_chat_request
from proxy.pipeline import ClientRequest
from proxy.pipeline.prefix import KnownPrefixes, KnownRequest
from proxy.pipeline.prepare import Prepared, Preparer
from proxy.trimming import Policy
from tests.support.house import LONG, Heard, House

MARK = "0123abcd"
YES = {"role": "assistant", "content": "yes"}


def call(
    messages: list[dict[str, Any]], *headers: tuple[bytes, bytes], tenant: str = "t", **fields: Any
) -> ClientRequest:
    asked = {"model": "echo", "messages": messages, **fields}
    sent = [*headers, (b"x-session-id", b"s")]
    return ClientRequest(dialect=CHAT, tenant=tenant, headers=sent, query=b"", body=orjson.dumps(asked))


def known(call: ClientRequest) -> KnownRequest:
    return KnownRequest(request=parse_chat_request(call.body), names=(), contents=())


@pytest.mark.anyio
async def test_a_request_is_kept_for_its_tenant_and_session() -> None:
    prefixes = KnownPrefixes(["X-Session-ID", "X-Other"])
    asked = call(LONG)
    assert len(asked.body) >= LONG_BODY
    key = prefixes.key_of(asked)
    assert key is not None
    await prefixes.keep(key, first := known(asked))
    assert prefixes.find(key) is first

    others = [call(LONG, tenant="u"), call(LONG, (b"x-session-id", b"S")), replace(asked, headers=[(b"x-other", b"s")])]
    keys = [prefixes.key_of(other) for other in others]
    assert len({key, *keys}) == 4
    assert all(each is not None and prefixes.find(each) is None for each in keys)
    assert prefixes.key_of(replace(asked, headers=[])) is None
    assert prefixes.key_of(replace(asked, headers=[(b"x-session-id", b"")])) is None


@pytest.mark.anyio
async def test_what_is_kept_is_bounded_by_its_bytes() -> None:
    bodies = [call([*LONG, {"role": "user", "content": str(number)}]) for number in range(4)]
    size = len(bodies[0].body) + 600 * (len(LONG) + 1)
    prefixes = KnownPrefixes(["X-Session-ID"], room=2 * size + 100)
    keys = [("chat", "t", "x-session-id", b"%d" % number) for number in range(4)]
    for key, each in zip(keys[:3], bodies, strict=False):
        await prefixes.keep(key, known(each))
    assert [prefixes.find(key) is None for key in keys[:3]] == [True, False, False]

    tight = KnownPrefixes(["X-Session-ID"], room=size - 100)
    await tight.keep(keys[0], known(bodies[0]))
    assert tight.find(keys[0]) is None


@pytest.mark.anyio
async def test_what_was_parsed_of_a_kept_request_is_forgotten() -> None:
    kept = known(call(LONG))
    parsed = kept.request.messages[0].data
    await KnownPrefixes(["X-Session-ID"]).keep(("chat", "t", "x-session-id", b"s"), kept)
    assert kept.request.messages[0].data is not parsed


@pytest.mark.anyio
async def test_the_next_request_of_a_session_is_read_from_its_new_messages_on(house: House) -> None:
    preparer = Preparer(house.settings, house.services, MARK)
    first = await preparer.prepare(call(LONG))
    again = await preparer.prepare(call([*LONG, YES, {"role": "user", "content": "go on"}]))
    assert (first.request.kept, again.request.kept) == (0, len(LONG))
    assert again.request.messages[0] is first.request.messages[0]

    other = call(LONG, tenant="u")
    assert (await preparer.prepare(other)).request.kept == 0
    assert (await preparer.prepare(call(LONG, (b"x-session-id", b"other")))).request.kept == 0
    assert (await preparer.prepare(call(LONG))).request.kept == len(LONG)
    assert (await preparer.prepare(call(LONG[:1]))).request.kept == 0


@pytest.mark.anyio
async def test_of_a_body_that_goes_on_only_the_rest_is_to_be_admitted(house: House) -> None:
    preparer = Preparer(house.settings, house.services, MARK)
    admitted: list[tuple[int, int]] = []

    async def admit(messages: int, size: int) -> None:
        admitted.append((messages, size))

    first = await preparer.prepare(replace(call(LONG), admit=admit))
    await preparer.prepare(replace(call([*LONG, YES]), admit=admit))
    assert admitted == [(0, 0), (len(LONG), first.request.ends[len(LONG)])]


@pytest.mark.anyio
async def test_what_was_planned_and_joined_before_serves_the_next_request(house: House) -> None:
    """Not planned again, and of what is sent only the new texts are joined: the result is that of a new process."""
    lean = {"trigger": {"messages": 60}, "target": {"tokens": 2500}, "edits": [{"type": "drop_oldest"}]}
    house.chat.policies.current = {"default": Policy.model_validate(lean)}
    messages: list[dict[str, Any]] = list(LONG)
    preparer = house.chat._preparer  # pyright: ignore[reportPrivateUsage] - the one that keeps
    planned: list[bool] = []
    for number in range(4):
        asked = call(messages)
        key = preparer._prefixes.key_of(asked)  # pyright: ignore[reportPrivateUsage]
        assert key is not None
        before = preparer._prefixes.find(key)  # pyright: ignore[reportPrivateUsage]
        planned.append(before is not None and before.planned is not None)
        await house.chat.answer(asked, Heard())
        messages = [*messages, YES, {"role": "user", "content": f"more {number}"}]
    assert planned == [False, False, True, True]  # the first request trims


def told(prepared: Prepared) -> dict[str, Any]:
    """Return what a prepared request says, whatever was known before."""
    history, request, plan = prepared.history, prepared.request, prepared.report.plan
    return {
        "history": replace(history, known=None, variants=(), updated_at=None),
        "request": replace(request, kept=0, ends=(), fields={}, joined=None),
        "fields": list(request.fields.items()),
        "plan": plan,
        "body": prepared.call.dialect.requests.compose(
            request, instructions=history.instructions, messages=plan.view, tools=prepared.tools
        ),
    }


_CHANGES: list[dict[str, Any]] = [
    {"model": "gpt-4o"},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"stream": True},
    {},
]


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(6))
async def test_a_prepared_request_is_the_same_whatever_was_known(house: House, seed: int) -> None:
    """Clients go on, regenerate, edit, drop their oldest messages, name agents; policies change meanwhile."""
    chance = random.Random(seed)  # noqa: S311 - the same conversation in every run, no secret
    lean = {"trigger": {"messages": 60}, "target": {"tokens": 2500}, "edits": [{"type": "drop_oldest"}]}
    policies = [{}, lean, lean | {"target": {"tokens": 2000}}]
    messages: list[dict[str, Any]] = list(LONG)
    if seed % 2:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    for number in range(8):
        house.chat.policies.current = {"default": Policy.model_validate(chance.choice(policies))}
        asked = call(messages, **chance.choice(_CHANGES))
        cold = Preparer(house.settings, house.services, MARK)
        cold.policies.current = house.chat.policies.current
        expected = await cold.prepare(asked)
        warm = await house.chat._preparer.prepare(asked)
        assert told(warm) == told(expected)
        client = Heard()
        await house.chat.answer(asked, client)
        reply = (
            orjson.loads(client.got)["choices"][0]["message"]
            if client.status == 200 and client.got[:1] == b"{"
            else YES
        )
        question = {"role": "user", "content": f"more {number}"} | ({"agent": "a"} if chance.random() < 0.2 else {})
        match chance.randrange(5):
            case 0:
                messages = [*messages[:-1], question]
            case 1:
                place = chance.randrange(1, len(messages))
                messages = [*messages[:place], {"role": "user", "content": "edited"}, *messages[place + 1 :], question]
            case 2:
                messages = [*messages[2:], reply, question]
            case _:
                messages = [*messages, reply, question]
