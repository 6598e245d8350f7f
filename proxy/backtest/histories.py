"""Sessions that happened, wherever they are kept: in the store, or in files of chat messages.

A file may be, in JSON: an object with `messages` (and `tools`, `model`, `id`), an array of such objects, or
an array of messages; in JSON Lines: what `sessions export` writes, one message a line, or one request a
line, of which those that go on from the one before are the same session.

System and developer messages that lead are the instructions. Where messages carry the time at which they
came (`created_at` or `timestamp`: seconds or milliseconds since 1970, or ISO 8601), it is taken out of them
and kept beside. Nothing is written, and nothing is known of policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from proxy.dialects import OWN_FIELDS, Facts, JsonObject, Message
from proxy.dialects.chat.message import INSTRUCTION_ROLES, ChatMessage, has_calls, without_unfinished_calls
from proxy.dialects.jsontext import is_array, is_object, read, sound, write
from proxy.errors import InvalidRequest
from proxy.store import NodeRow, SessionRow, Store

_TIMES: Final = ("created_at", "timestamp")
"""Names of fields that hold the time of a message."""
_MILLISECONDS: Final = 1e11
"""Numbers above are milliseconds since 1970: in seconds they would be the year 5138."""


@dataclass(frozen=True, slots=True)
class History:
    """A session as it happened."""

    name: str
    """The session's id, or the file's name."""
    messages: tuple[Message, ...]
    """The log, oldest first, our own fields included, instructions not."""
    instructions: tuple[Message, ...] = ()
    tools: bytes | None = None
    """The JSON text of the tools that every request offers; None where none are known."""
    model: str = ""
    """The model that was asked; empty where it is not known."""
    tenant: str = "default"
    times: tuple[float, ...] | None = None
    """When each message came, in seconds since 1970, never falling; None where it is not known of all."""

    @property
    def requests(self) -> tuple[int, ...]:
        """The requests that an agent sent, each by the number of messages of the log that it held.

        There was one before each assistant message, and there is one more where the log ends with something
        that waits for a reply. A log that begins with an assistant message did so before the first request.
        """
        ends = [place for place, message in enumerate(self.messages) if message.role == "assistant"]
        if self.messages and self.messages[-1].role != "assistant":
            ends.append(len(self.messages))
        return tuple([end for end in ends if end or self.instructions])


def of_messages(
    name: str, values: Iterable[Any], *, tools: Any = None, model: Any = None, tenant: str = "default"
) -> History:
    """Return the history of parsed messages, leading instructions included.

    Raises:
        InvalidRequest: one of them is no chat message; the error says which.
    """
    messages: list[Message] = []
    times: list[float | None] = []
    for place, value in enumerate(values):
        if not is_object(value) or not isinstance(value.get("role"), str):
            raise InvalidRequest(f"{name}: message {place} is no object with a role.")
        said, at = _timed(value)
        messages.append(_message(said))
        times.append(at)
    lead = next((i for i, one in enumerate(messages) if one.role not in INSTRUCTION_ROLES), len(messages))
    if lead == len(messages):
        raise InvalidRequest(f"{name}: there is no message beside instructions in it.")
    return History(
        name=name,
        messages=tuple(messages[lead:]),
        instructions=tuple(messages[:lead]),
        tools=write(sound(tools)) if is_array(tools) and tools else None,
        model=model if isinstance(model, str) else "",
        tenant=tenant,
        times=_rising(times[lead:]),
    )


def read_file(path: Path) -> list[History]:
    """Return the sessions that a file holds, at least one.

    Raises:
        InvalidRequest: it cannot be read, or is of none of the forms; the message says what was found.
    """
    try:
        text = path.read_bytes()
    except OSError as why:
        raise InvalidRequest(f"{path} cannot be read: {why.strerror}.") from why
    name = path.stem
    try:
        value = read(text)
    except ValueError:
        return _of_lines(name, _lines(path, text))
    return _of_value(name, value)


def _lines(path: Path, text: bytes) -> list[Any]:
    """Return the values of JSON Lines, at least one."""
    lines = [line for line in text.split(b"\n") if line.strip()]
    values: list[Any] = []
    for number, line in enumerate(lines, start=1):
        try:
            values.append(read(line))
        except ValueError as why:
            raise InvalidRequest(f"{path} is neither JSON nor JSON Lines: line {number}: {why}.") from why
    if not values:
        raise InvalidRequest(f"{path} is empty.")
    return values


async def stored(store: Store, session: SessionRow) -> History:
    """Return what the store holds of a session, on the branch where it stands.

    Raises:
        InvalidRequest: it has no messages.
        StoreUnavailable: the store cannot be read.
    """
    rows = await store.path(session.key, session.head)
    if not rows:
        raise InvalidRequest(f"{session.id}: the session has no messages.")
    instructions = await store.instructions(session.key)
    return History(
        name=session.id,
        messages=tuple(map(_sent_back, rows)),
        instructions=instructions.messages if instructions is not None else (),
        tools=await store.tools(session.key, session.tools) if session.tools is not None else None,
        model=session.model or "",
        tenant=session.tenant,
        times=_rising([row.created_at / 1000 for row in rows]),
    )


def _sent_back(row: NodeRow) -> Message:
    """Return a stored message as a client would send it; calls that broke off are not sent back."""
    return _message(without_unfinished_calls(row.message.data)) if row.partial else row.message


def _of_value(name: str, value: Any) -> list[History]:
    """Return the sessions of a whole JSON document."""
    if is_object(value) and (value.get("record") == "session" or "role" in value):
        return _of_lines(name, [value])  # of which there is one
    if is_object(value):
        return [_of_object(name, value)]
    if is_array(value) and value and all(is_object(item) and "messages" in item for item in value):
        return _of_requests(name, value)
    if is_array(value):
        return [of_messages(name, value)]
    raise InvalidRequest(f"{name}: an object with `messages`, or an array of messages, is needed.")


def _of_lines(name: str, values: Sequence[Any]) -> list[History]:
    """Return the sessions of a file of JSON Lines."""
    first = values[0]
    if is_object(first) and first.get("record") == "session":
        return [_of_export(name, [value for value in values if is_object(value)])]
    if all(is_object(value) and is_array(value.get("messages")) for value in values):
        return _of_requests(name, values)
    return [of_messages(name, values)]


def _of_object(name: str, value: JsonObject) -> History:
    messages = value.get("messages")
    if not is_array(messages):
        raise InvalidRequest(f"{name}: there is no array `messages` in it.")
    return of_messages(_named(value, name), messages, tools=value.get("tools"), model=value.get("model"))


def _of_requests(name: str, values: Sequence[JsonObject]) -> list[History]:
    """Return sessions or requests; of requests that go on from the one before, the last one."""
    found: list[History] = []
    for number, value in enumerate(values, start=1):
        history = _of_object(f"{name}:{number}", value)
        last = found[-1] if found else None
        if last is not None and history.messages[: len(last.messages)] == last.messages:
            found[-1] = replace(history, name=last.name)
        else:
            found.append(history)
    return found


def _named(value: JsonObject, name: str) -> str:
    known = value.get("id")
    return known if isinstance(known, str) and known else name


def _of_export(name: str, records: Sequence[JsonObject]) -> History:
    """Return the session of an export, on the branch where it stands."""
    session = records[0]
    nodes = {record.get("node"): record for record in records if record.get("record") == "node"}
    bodies = {record.get("body"): record for record in records if record.get("record") == "body"}
    path: list[JsonObject] = []
    at = nodes.get(session.get("head"))
    while at is not None and len(path) <= len(nodes):
        path.append(at)
        at = nodes.get(at.get("parent"))
    if not path:
        raise InvalidRequest(f"{name}: the exported session has no messages.")
    versions = {record.get("version"): record for record in records if record.get("record") == "instructions"}
    lead = _content(versions.get(session.get("instructions")))
    said: list[Any] = []
    for node in reversed(path):
        value = _content(bodies.get(node.get("body")))
        if not is_object(value):
            raise InvalidRequest(f"{name}: the text of node {node.get('node')} is not in the export.")
        value = without_unfinished_calls(value) if node.get("partial") else value
        at = node.get("created_at")
        said.append({**value, _TIMES[0]: at / 1000 if isinstance(at, int) else None})
    history = of_messages(
        _named(session, name),
        [*(lead if is_array(lead) else []), *said],
        tools=_content(bodies.get(session.get("tools"))),
        model=session.get("model"),
    )
    tenant = session.get("tenant")
    return replace(history, tenant=tenant) if isinstance(tenant, str) and tenant else history


def _content(record: JsonObject | None) -> Any:
    """Return the value of a record's text; None where there is none."""
    if record is None:
        return None
    text = record.get("text")
    if not isinstance(text, str):
        return record.get("data")
    try:
        return read(text.encode())
    except ValueError:
        return None


def _message(data: JsonObject) -> Message:
    """Return the message with this content. What is known of it beforehand makes reading it faster.

    Raises:
        InvalidRequest: it is nested more deeply than any reader takes.
    """
    try:
        raw = write(sound(data))
        data = orjson.loads(raw)
    except (ValueError, RecursionError) as why:
        raise InvalidRequest("A message is nested too deeply.") from why
    own = not data.keys().isdisjoint(OWN_FIELDS)
    facts = Facts(raw, data["role"], has_own_fields=own, has_calls=has_calls(data))
    return ChatMessage(raw, data, facts)


def _timed(value: JsonObject) -> tuple[JsonObject, float | None]:
    """Return a message without its time, and the time in seconds since 1970."""
    found = next((at for name in _TIMES if (at := _seconds(value.get(name))) is not None), None)
    if not any(name in value for name in _TIMES):
        return value, None
    return {name: item for name, item in value.items() if name not in _TIMES}, found


def _seconds(value: Any) -> float | None:
    """Read a time; None where it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value / 1000 if value > _MILLISECONDS else float(value)
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _rising(times: Sequence[float | None]) -> tuple[float, ...] | None:
    """Return the times so that none is before an earlier one; None where one is missing."""
    return tuple(_latest(times)) if times and None not in times else None


def _latest(times: Iterable[float | None]) -> Iterator[float]:
    latest = float("-inf")
    for at in times:
        latest = max(latest, at if at is not None else latest)
        yield latest
