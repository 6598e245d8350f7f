"""Sessions to replay: from the store, from files, or synthetic.

A file holds one of these, compressed if its name ends in `.gz`:

    JSON          an object with `messages` (and `tools`, `model`, `id`), an array of such objects, an array of messages
    JSON Lines    the output of `sessions export`, one message per line, or one request per line

Consecutive requests that continue each other are one session. An object may also be a request of the Responses API
(`input` instead of `messages`) or of Anthropic's API (`messages` and `system`). An array may hold items of the
Responses API.

An object may have `compactions` (objects with `after_message`). There the recorded agent compacted its own context,
so each part is a session of its own.

Leading system and developer messages are the instructions. The time of a message (`created_at` or `timestamp`:
seconds or milliseconds since 1970, or ISO 8601) is removed from it and kept in `times`.
"""

from __future__ import annotations

import gzip
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace

from proxy.dialects import DIALECTS, INSTRUCTION_ROLES, JsonObject, Message, dialect_named
from proxy.dialects.jsontext import is_array, is_object, read, sound, write
from proxy.errors import InvalidRequest
from proxy.store import NodeRow, SessionRow, Store, require_content
from proxy.tokens import TokenCounter

_TIMES: Final = ("created_at", "timestamp")
_SUFFIXES: Final = frozenset({".json", ".jsonl", ".ndjson"})  # files in a folder with other suffixes are skipped
_PACKED: Final = ".gz"  # the suffix of a compressed file, after one of these
_MILLISECONDS: Final = 1e11  # larger numbers are milliseconds since 1970: as seconds they would be after the year 5138


class SessionHistory(Struct, frozen=True, kw_only=True):
    """A session as it happened."""

    name: str  # the session's id, or the file's name
    messages: tuple[Message, ...]  # the messages after the instructions, oldest first, with our own fields
    instructions: tuple[Message, ...] = ()
    tools: bytes | None = None  # the JSON text of the tools of every request; None if there are none
    model: str = ""  # the model of the requests; empty if it is unknown
    tenant: str = "default"
    times: tuple[float, ...] | None = None
    """The time of each message in seconds since 1970, never decreasing; None unless all are known."""

    @property
    def requests(self) -> tuple[int, ...]:
        """The client's requests, each as its number of messages.

        There was one before each assistant message, and one more if the last message awaits a reply. An assistant
        message at the very beginning answers no request, unless there are instructions.
        """
        ends = [place for place, message in enumerate(self.messages) if message.role == "assistant"]
        if self.messages and self.messages[-1].role != "assistant":
            ends.append(len(self.messages))
        return tuple([end for end in ends if end or self.instructions])


def of_messages(
    name: str, values: Iterable[Any], *, tools: Any = None, model: Any = None, dialect: str = "chat"
) -> SessionHistory:
    """Return the history made of parsed messages, which include leading instructions."""
    messages: list[Message] = []
    times: list[float | None] = []
    for place, value in enumerate(values):
        if not is_object(value) or (dialect == "chat" and not isinstance(value.get("role"), str)):
            raise InvalidRequest(f"{name}: message {place} is not an object with a role.")
        messages.append(_message({key: item for key, item in value.items() if key not in _TIMES}, dialect))
        times.append(next((at for key in _TIMES if (at := _seconds(value.get(key))) is not None), None))
    lead = next((i for i, one in enumerate(messages) if one.role not in INSTRUCTION_ROLES), len(messages))
    if lead == len(messages):
        raise InvalidRequest(f"{name}: there is no message except instructions.")
    return SessionHistory(
        name=name,
        messages=tuple(messages[lead:]),
        instructions=tuple(messages[:lead]),
        tools=write(sound(tools)) if is_array(tools) and tools else None,
        model=model if isinstance(model, str) else "",
        times=_rising(times[lead:]),
    )


def read_files(path: Path) -> list[SessionHistory]:
    """Return the sessions in a file, in the files of a folder that hold any, or in the files that match a pattern."""
    if path.is_dir():
        return [history for file in sorted(path.iterdir()) if file.is_file() for history in _any_in(file)]
    if path.exists() or not any(sign in str(path) for sign in "*?["):
        return read_file(path)
    named = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not named:
        raise InvalidRequest(f"No file matches {path}.")
    return [history for file in named if file.is_file() for history in read_file(file)]


def _any_in(file: Path) -> list[SessionHistory]:
    """Return the sessions of a file; none if it holds anything else."""
    try:
        packed = Path(file.stem) if file.suffix == _PACKED else file
        return read_file(file) if packed.suffix in _SUFFIXES else []
    except InvalidRequest:
        return []


def read_file(path: Path) -> list[SessionHistory]:
    """Return the sessions in a file, at least one."""
    name = Path(path.stem).stem if path.suffix == _PACKED else path.stem
    try:
        text = path.read_bytes()
        text = gzip.decompress(text) if path.suffix == _PACKED else text
    except (OSError, EOFError, zlib.error) as why:
        raise InvalidRequest(f"{path} cannot be read: {getattr(why, 'strerror', None) or why}.") from why
    try:
        value = read(text)
    except ValueError:
        value = _lines(path, text)
    try:
        return _of_value(name, value)
    except InvalidRequest as why:
        # Name the file by its path, since several files may have the same name.
        said = why.message.removeprefix(name) if why.message.startswith(f"{name}:") else f": {why.message}"
        raise InvalidRequest(f"{path}{said}") from why


def _lines(path: Path, text: bytes) -> list[Any]:
    values: list[Any] = []
    for number, line in enumerate([line for line in text.split(b"\n") if line.strip()], start=1):
        try:
            values.append(read(line))
        except ValueError as why:
            raise InvalidRequest(f"{path} is neither JSON nor JSON Lines: line {number}: {why}.") from why
    if not values:
        raise InvalidRequest(f"{path} is empty.")
    return values


async def stored(store: Store, session: SessionRow, rows: Sequence[NodeRow] | None = None) -> SessionHistory:
    """Return the head branch of a stored session. `rows` are its messages, if the caller has already read them."""
    if rows is None:
        rows = await store.path(session.key, session.head)
    require_content([row.message for row in rows])
    if not rows:
        raise InvalidRequest(f"{session.id}: the session has no messages.")
    instructions = await store.instructions(session.key)
    return SessionHistory(
        name=session.id,
        messages=tuple([row.message.without_unfinished_calls() if row.partial else row.message for row in rows]),
        instructions=instructions.messages if instructions is not None else (),
        tools=await store.tools(session.key, session.tools) if session.tools is not None else None,
        model=session.model or "",
        tenant=session.tenant,
        times=_rising([row.created_at / 1000 for row in rows]),
    )


def _of_value(name: str, value: Any) -> list[SessionHistory]:
    """Return the sessions of a JSON document. JSON Lines are given as a list."""
    values: list[Any] = value if is_array(value) else [value]
    first = values[0] if values else None
    if is_object(first) and first.get("record") == "session":
        return [_of_export(name, [each for each in values if is_object(each)])]
    if is_object(value) and "role" not in value and "type" not in value:
        return list(_of_recording(name, value))
    if values and all(is_object(each) and ("messages" in each or "input" in each) for each in values):
        return _of_requests(name, values)
    if any(is_object(each) and "role" not in each and "type" in each for each in values):
        return [_of_request(name, {"input": values}, "responses")]
    if is_object(value) or is_array(value):
        return [of_messages(name, values)]
    raise InvalidRequest(f"{name}: an object with `messages`, or an array of messages, is needed.")


def _of_recording(name: str, value: JsonObject) -> Iterator[SessionHistory]:
    """Yield the session of an object, divided where the recorded agent compacted its own context."""
    whole, messages, compacted = _of_object(name, value), value.get("messages", []), value.get("compactions")
    places = [each.get("after_message") for each in compacted if is_object(each)] if is_array(compacted) else []
    cuts = sorted({at + 1 for at in places if isinstance(at, int) and 0 <= at < len(messages) - 1})
    if not cuts:
        yield whole
        return
    lead = messages[: len(whole.instructions)]
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(messages)], strict=True), start=1):
        part = messages[start:stop] if start == 0 else [*lead, *messages[start:stop]]
        yield _of_object(f"{whole.name}:{number}", {**value, "messages": part, "id": f"{whole.name}:{number}"})


def _of_object(name: str, value: JsonObject) -> SessionHistory:
    if "input" in value and "messages" not in value:
        return _of_request(name, value, "responses")
    if "system" in value and is_array(value.get("messages")):
        return _of_request(name, value, "messages")
    if not is_array(value.get("messages")):
        raise InvalidRequest(f"{name}: it has no array `messages`.")
    return of_messages(
        str(value.get("id") or name), value["messages"], tools=value.get("tools"), model=value.get("model")
    )


def _of_request(name: str, value: JsonObject, dialect: str) -> SessionHistory:
    """Return the history in the body of a request, parsed by its dialect."""
    listed = "input" if dialect == "responses" else "messages"
    items: Any = value.get(listed)
    if is_array(items):
        timeless = [{key: part for key, part in each.items() if key not in _TIMES} for each in items if is_object(each)]
        items = timeless if len(timeless) == len(items) else items
    kept = {key: value[key] for key in ("instructions", "system", "tools", "model") if value.get(key)}
    if dialect == "messages":
        kept["max_tokens"] = 1  # required by the API
    try:
        request = dialect_named(dialect).requests.parse(write(sound({**kept, listed: items})))
    except InvalidRequest as why:
        raise InvalidRequest(f"{name}: {why.message}") from why
    if not request.messages:
        raise InvalidRequest(f"{name}: there is no message except instructions.")
    return SessionHistory(
        name=str(value.get("id") or name),
        messages=request.messages,
        instructions=request.instructions,
        tools=request.tools,
        model=request.model,
    )


def _of_requests(name: str, values: Sequence[JsonObject]) -> list[SessionHistory]:
    """Return the sessions of requests. A request that continues the one before replaces it."""
    found: list[SessionHistory] = []
    for number, value in enumerate(values, start=1):
        history = _of_object(f"{name}:{number}", value)
        if found and history.messages[: len(found[-1].messages)] == found[-1].messages:
            history = replace(history, name=found.pop().name)
        found.append(history)
    return found


def _of_export(name: str, records: Sequence[JsonObject]) -> SessionHistory:
    """Return the head branch of an exported session."""
    session = records[0]
    dialect = next((known for known in DIALECTS if known == session.get("dialect")), "chat")
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
    lead = _content(versions.get(session.get("instructions"), {}))
    said: list[Any] = []
    for node in reversed(path):
        value = _content(bodies.get(node.get("body"), {}))
        if not is_object(value):
            raise InvalidRequest(f"{name}: the text of node {node.get('node')} is missing from the export.")
        if node.get("partial") and (dialect != "chat" or isinstance(value.get("role"), str)):
            value = _message(value, dialect).without_unfinished_calls().data
        at = node.get("created_at")
        said.append({**value, _TIMES[0]: at / 1000 if isinstance(at, int) else None})
    history = of_messages(
        str(session.get("id") or name),
        [*(lead if is_array(lead) else []), *said],
        tools=_content(bodies.get(session.get("tools"), {})),
        model=session.get("model"),
        dialect=dialect,
    )
    return replace(history, tenant=str(session.get("tenant") or history.tenant))


def _content(record: JsonObject) -> Any:
    """Return the value of a record's text; None if there is none."""
    text = record.get("text")
    if not isinstance(text, str):
        return record.get("data")
    try:
        return read(text.encode())
    except ValueError:
        return None


def _message(data: JsonObject, dialect: str) -> Message:
    try:
        raw = write(sound(data))
        orjson.loads(raw)
    except (ValueError, RecursionError) as why:
        raise InvalidRequest("A message is nested too deeply.") from why
    return dialect_named(dialect).message(raw)


def _seconds(value: Any) -> float | None:
    """Return a time in seconds since 1970; None if `value` is not a time."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value / 1000 if value > _MILLISECONDS else float(value)
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _rising(times: Sequence[float | None]) -> tuple[float, ...] | None:
    """Return the times, raised so that they never decrease; None unless all are known."""
    known = [at for at in times if at is not None]
    return tuple(accumulate(known, max)) if times and len(known) == len(times) else None


_PREFIX_TOKENS: Final = 8_000  # tokens of instructions and tools together, about
_OUTPUT_TOKENS: Final = 1_800  # tokens of each tool output
_NOISE: Final = 0.4  # share of noise (terminal colour codes) in the second agent's tool output

_VOCABULARY: Final = (
    "river stone market garden window winter silver letter bridge forest summer island village mountain "
    "station engine paper castle harbor doctor teacher student weather kitchen blanket picture history "
    "science language number signal system method result reason answer question moment morning evening "
    "country city street house table chair door wall floor roof glass metal wood water fire earth wind "
    "cloud storm snow rain sun moon star light shadow color sound music voice song dance story book page "
    "word line point circle square corner center north south east west left right open close begin finish "
    "carry bring build break choose follow gather happen "
)
_WORDS: Final = tuple(_VOCABULARY.split())
_WORDS_A_LINE: Final = 14


def synthetic_agents(counter: TokenCounter, model: str = "") -> tuple[SessionHistory, SessionHistory]:
    """Return the sessions of two synthetic agents whose costs can be checked by hand.

    Each has a prefix of 8,000 tokens and 100 turns with 1,800 tokens of tool output and 200 of reply, as `counter`
    counts for `model`. In the second session 40 % of the tool output is noise. No later call uses an earlier value.
    """
    size = partial(counter.text, model=model)
    return _session("synthetic", size, noisy=False), _session("synthetic-noisy", size, noisy=True)


def _session(name: str, size: Callable[[str], int], *, noisy: bool) -> SessionHistory:
    words = _draw(sum(map(ord, name)))
    parameters = {"type": "object", "properties": {"part": {"type": "integer"}}, "required": ["part"]}
    tools = [{"type": "function", "function": {"name": "read_part", "parameters": parameters}}]
    room = _PREFIX_TOKENS - size(orjson.dumps(tools).decode())
    said: list[dict[str, Any]] = [
        {"role": "system", "content": _text(words, room, size)},
        {"role": "user", "content": "Read every part, and tell what is in it."},
    ]
    for turn in range(1, 101):
        call = {"name": "read_part", "arguments": orjson.dumps({"part": turn}).decode()}
        calls = [{"id": f"call_{turn}", "type": "function", "function": call}]
        said.append({"role": "assistant", "content": _text(words, 200, size), "tool_calls": calls})
        output = _noisy_text(words, _OUTPUT_TOKENS, size) if noisy else _text(words, _OUTPUT_TOKENS, size)
        said.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": output})
    return of_messages(name, said, tools=tools)


def _noisy_text(words: Iterator[str], tokens: int, size: Callable[[str], int]) -> str:
    """Return a text of at most `tokens` in which as many words as possible have terminal colour codes."""
    plain = _text(words, round(tokens * (1 - _NOISE)), size).split(" ")

    def coloured(count: int) -> str:
        colours = [f"\x1b[{31 + place % 6}m{word}\x1b[0m" for place, word in enumerate(plain[:count])]
        return " ".join([*colours, *plain[count:]])

    return _longest(coloured, len(plain), tokens, size)


def _text(words: Iterator[str], tokens: int, size: Callable[[str], int]) -> str:
    """Return lines with as many words as fit into `tokens`. Most words are one token."""
    drawn = [next(words) for _ in range(tokens)]

    def lines(count: int) -> str:
        rows = range(0, count, _WORDS_A_LINE)
        return ",\n".join(" ".join(drawn[row : min(row + _WORDS_A_LINE, count)]) for row in rows)

    return _longest(lines, tokens, tokens, size)


def _longest(text_of: Callable[[int], str], most: int, tokens: int, size: Callable[[str], int]) -> str:
    """Return `text_of` the largest number, up to `most`, whose text has at most `tokens` tokens."""
    fitting = bisect_right(range(most + 1), tokens, key=lambda count: size(text_of(count))) - 1
    return text_of(max(fitting, 0))


def _draw(seed: int) -> Iterator[str]:
    """Yield words without end, the same in every process."""
    state = seed
    while True:
        state = (state * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64
        yield _WORDS[(state >> 33) % len(_WORDS)]
