"""One conversation in each of the three APIs: what a client sends, what the stand-in provider reads and answers.

A conversation is given as chat messages. `CHAT`, `RESPONSES` and `MESSAGES` translate it to their API (`entries`,
`body`), read a body back (`chat_body`, with the rules that only this API has), and answer (`answer`, `events`).
The module is written from the references of the APIs, independently of the package under test.

Reasoning is sealed (`Seals`): like those of newer models, a block holds a digest of everything before it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Final

import orjson

from tests.support.api_rules import Refused

Data = dict[str, Any]
SEALED: Final = "sealed"
"""The field of a chat message that holds the seals of its reasoning, in order."""
INSTRUCTIONS: Final = ("system", "developer")


class Seals:
    """Reasoning that is bound to its prefix: a block's seal depends on what came before it, and on the last block."""

    def __init__(self, body: Data) -> None:
        """Read a request; `dropped` and `kept` count its blocks."""
        self.dropped = self.kept = 0
        self._digest = hashlib.sha256(orjson.dumps(body.get("tools")))
        self._last = ""
        for message in body["messages"]:
            for seal in message.get(SEALED, ()):
                nonce, previous = seal.split(".")
                if nonce.startswith(self._here()) and self._last in {"", previous}:
                    self.kept += 1
                    self._last = nonce
                else:
                    self.dropped += 1
            said = {name: message.get(name) or "" for name in ("role", "tool_calls", "tool_call_id")}
            content = text_or_parts(_unmarked(parts_of(message.get("content"))))  # cache marks change nothing
            self._digest.update(orjson.dumps({**said, "content": content}))

    def _here(self) -> str:
        return self._digest.hexdigest()[:16]

    def seal(self, number: int) -> str:
        """Return the seal of a new block."""
        return f"{self._here()}-{number}.{self._last}"


class Tongue(ABC):
    """One of the APIs."""

    name: ClassVar[str]
    path: ClassVar[str]
    listed: ClassVar[str] = "messages"
    """The field of a body that lists its entries."""
    headers: ClassVar[dict[str, str]] = {}

    @abstractmethod
    def entries(self, messages: Sequence[Data]) -> list[Data]:
        """Return chat messages as entries of this API, without those that it puts elsewhere in the body."""

    def body(self, messages: Sequence[Data], model: str, *, tools: Sequence[Data] = (), **fields: Any) -> Data:
        """Return the request with these messages: chat messages, entries of the API, or both."""
        return {"model": model, self.listed: self.entries(messages), **self._tools(tools), **fields}

    def _tools(self, tools: Sequence[Data]) -> Data:
        return {"tools": list(tools)} if tools else {}

    @abstractmethod
    def reply(self, content: bytes, *, stream: bool) -> list[Data]:
        """Return the entries of an answer, as a client sends them back."""

    @abstractmethod
    def chat_body(self, body: Data) -> Data:
        """Return a request as a chat completion. Raise `Refused` where only this API would refuse it."""

    @abstractmethod
    def answer(self, body: Data, message: Data, usage: Data) -> Data:
        """Return the answer with this chat message."""

    @abstractmethod
    def events(self, body: Data, message: Data, usage: Data) -> Iterator[bytes]:
        """Yield the same answer as a stream."""

    def said(self, content: bytes, *, stream: bool) -> Data:
        """Return the chat message of an answer, without reasoning."""
        return self.told([{"role": "user", "content": "-"}, *self.reply(content, stream=stream)])[-1]

    def told(self, entries: Sequence[Data]) -> list[Data]:
        """Return entries of this API as chat messages without reasoning."""
        body: Data = {self.listed: entries} | ({"max_tokens": 1} if self.name == "messages" else {})
        found: list[Data] = self.chat_body(body)["messages"]
        return [{name: value for name, value in message.items() if name != SEALED} for message in found]

    def chat(self, body: Data) -> list[Data]:
        """Return a body as chat messages, without empty fields and without seals."""
        return [
            {name: value for name, value in message.items() if value and name != SEALED}
            for message in self.chat_body(body)["messages"]
        ]


def events_in(content: bytes) -> list[Data]:
    """Return the data of each event of a stream."""
    lines = [line.removeprefix(b"data: ") for line in content.splitlines() if line.startswith(b"data: {")]
    return [orjson.loads(line) for line in lines]


def parts_of(content: Any) -> list[Data]:
    """Return content as text parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) and content else list(content or ())


def text_or_parts(parts: list[Data]) -> Any:
    """Return the parts, or a string if there is only one part and it has only text."""
    if len(parts) == 1 and parts[0].keys() <= {"type", "text", "annotations", "logprobs"} and "text" in parts[0]:
        return parts[0]["text"]
    return parts or None


class _Chat(Tongue):
    name = "chat"
    path = "/v1/chat/completions"

    def entries(self, messages: Sequence[Data]) -> list[Data]:
        return list(messages)

    def reply(self, content: bytes, *, stream: bool) -> list[Data]:
        if not stream:
            return [orjson.loads(content)["choices"][0]["message"]]
        said: Data = {"role": "assistant", "content": None}
        calls: dict[int, Data] = {}
        for event in events_in(content):
            for delta in [choice["delta"] for choice in event["choices"]]:
                for name in ("content", "reasoning_content", "reasoning_details"):
                    if delta.get(name):
                        said[name] = (said.get(name) or type(delta[name])()) + delta[name]
                for part in delta.get("tool_calls") or ():
                    call = calls.setdefault(
                        part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                    )
                    call["id"] += part.get("id") or ""
                    given: Data = part.get("function") or {}
                    for name, piece in given.items():
                        call["function"][name] += piece or ""
        return [said | ({"tool_calls": list(calls.values())} if calls else {})]

    def chat_body(self, body: Data) -> Data:
        if b'"reasoning_details"' not in orjson.dumps(body):
            return body
        sealed = [[part["data"] for part in m.get("reasoning_details") or ()] for m in body["messages"]]
        bare = [{k: v for k, v in m.items() if k != "reasoning_details"} for m in body["messages"]]
        return {**body, "messages": [m | ({SEALED: s} if s else {}) for m, s in zip(bare, sealed, strict=True)]}

    def answer(self, body: Data, message: Data, usage: Data) -> Data:
        raise NotImplementedError("tests.support.answers does")

    def events(self, body: Data, message: Data, usage: Data) -> Iterator[bytes]:
        raise NotImplementedError("tests.support.answers does")


class _Responses(Tongue):
    name = "responses"
    path = "/v1/responses"
    listed = "input"
    _PARAMETERS: Final = {
        *("include", "input", "instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls"),
        *("prompt_cache_key", "reasoning", "store", "stream", "temperature", "text", "tool_choice", "tools", "user"),
    }
    _BY_MODEL: Final = {"reasoning", "function_call", "output"}

    def body(self, messages: Sequence[Data], model: str, *, tools: Sequence[Data] = (), **fields: Any) -> Data:
        return super().body(
            messages, model, tools=tools, **{"store": False, "include": ["reasoning.encrypted_content"], **fields}
        )

    def _tools(self, tools: Sequence[Data]) -> Data:
        made = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
        return {"tools": made} if made else {}

    def entries(self, messages: Sequence[Data]) -> list[Data]:
        found: list[Data] = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if "type" in message:
                found.append(message)
            elif role == "tool":
                output = content if isinstance(content, str) else self._parts(content, "input_text")
                found.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": output})
            elif role != "assistant":
                said = content if isinstance(content, str) else self._parts(content, "input_text")
                found.append({"type": "message", "role": role, "content": said})
            else:
                if content or not message.get("tool_calls"):
                    parts = self._parts(parts_of(content or " "), "output_text")
                    found.append({"type": "message", "role": role, "content": parts})
                calls = message.get("tool_calls") or ()
                found += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
        return found

    @staticmethod
    def _parts(parts: Any, text: str) -> list[Data]:
        return [
            {**part, "type": text}
            if part["type"] == "text"
            else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
            for part in parts
        ]

    def reply(self, content: bytes, *, stream: bool) -> list[Data]:
        output: list[Data] = (events_in(content)[-1]["response"] if stream else orjson.loads(content))["output"]
        return output

    def chat_body(self, body: Data) -> Data:
        if unknown := sorted(set(body) - self._PARAMETERS):
            raise Refused(f"Unknown parameter: '{unknown[0]}'.", unknown[0])
        given = body.get("input")
        items: list[Data] = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
        messages: list[Data] = []
        if body.get("instructions"):
            messages.append({"role": "system", "content": body["instructions"]})
        self._check_reasoning(items)
        turn: Data | None = None
        for place, item in enumerate(items):
            kind = item.get("type") or "message"
            if kind in {"reasoning", "function_call"} or item.get("role") == "assistant":
                if turn is None or (kind != "function_call" and (turn["content"] or turn.get("tool_calls"))):
                    turn = {"role": "assistant", "content": None}
                    messages.append(turn)
                self._say(turn, kind, item)
                continue
            turn = None
            if kind == "function_call_output":
                said = {"role": "tool", "tool_call_id": item["call_id"], "content": self._text(item["output"])}
            elif kind == "message":
                said = {"role": item["role"], "content": self._text(item["content"])}
            else:
                raise Refused(f"Invalid value: '{kind}'.", f"input[{place}].type")
            messages.append(said)
        tools = [{"type": "function", "function": {"name": tool["name"]}} for tool in body.get("tools") or ()]
        return {"model": body.get("model"), "messages": messages, "stream": body.get("stream")} | (
            {"tools": tools} if tools else {}
        )

    @staticmethod
    def _check_reasoning(items: Sequence[Data]) -> None:
        for item, after in pairwise([*items, {}]):
            follows = after.get("type") == "function_call" or after.get("role") == "assistant"
            if item.get("type") == "reasoning" and not follows:
                raise Refused("Item of type 'reasoning' was provided without its required following item.", "input")

    def _say(self, turn: Data, kind: str, item: Data) -> None:
        """Add the content of an item by the model to a reply."""
        if kind == "reasoning":
            turn.setdefault(SEALED, []).append(item["encrypted_content"])
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        else:
            turn["content"] = self._text(item["content"])

    @staticmethod
    def _text(content: Any) -> Any:
        """Return content in the form of chat completions."""
        if isinstance(content, str):
            return content
        return text_or_parts([{**part, "type": "text"} if "text" in part else part for part in content])

    def answer(self, body: Data, message: Data, usage: Data) -> Data:
        output = [
            {"type": "reasoning", "id": f"rs_{seal}", "summary": [], "encrypted_content": seal}
            for seal in message.get(SEALED, ())
        ]
        parts = [{"annotations": [], **part, "type": "output_text"} for part in parts_of(message.get("content"))]
        if parts:
            identity = f"msg_{len(body['messages'])}"
            said = {"type": "message", "id": identity, "status": "completed", "role": "assistant", "content": parts}
            output.append(said)
        for call in message.get("tool_calls") or ():
            made = {"call_id": call["id"], **call["function"], "status": "completed"}
            output.append({"type": "function_call", "id": f"fc_{call['id']}", **made})
        told = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return {
            "id": "resp_test",
            "object": "response",
            "created_at": 1_700_000_000,
            "status": "completed",
            "model": body["model"],
            "output": output,
            "usage": {**told, "total_tokens": usage["total_tokens"], "input_tokens_details": {"cached_tokens": 0}},
        }

    def events(self, body: Data, message: Data, usage: Data) -> Iterator[bytes]:
        response = self.answer(body, message, usage)
        opened = {**response, "status": "in_progress", "output": [], "usage": None}
        made: list[tuple[str, Data]] = [("created", {"response": opened}), ("in_progress", {"response": opened})]
        for place, item in enumerate(response["output"]):
            at = {"output_index": place, "item_id": item["id"]}
            bare: dict[str, Data] = {"message": {"content": []}, "function_call": {"arguments": ""}}
            made.append(("output_item.added", {"output_index": place, "item": {**item, **bare.get(item["type"], {})}}))
            for index, part in enumerate(item.get("content") or ()):
                here = {**at, "content_index": index}
                made.append(("content_part.added", {**here, "part": {**part, "text": ""}}))
                made += [("output_text.delta", {**here, "delta": piece}) for piece in pieces_of(part["text"])]
                made.append(("output_text.done", {**here, "text": part["text"]}))
                made.append(("content_part.done", {**here, "part": part}))
            if item["type"] == "function_call":
                deltas = pieces_of(item["arguments"])
                made += [("function_call_arguments.delta", {**at, "delta": piece}) for piece in deltas]
                made.append(("function_call_arguments.done", {**at, "arguments": item["arguments"]}))
            made.append(("output_item.done", {"output_index": place, "item": item}))
        made.append(("completed", {"response": response}))
        for number, (name, data) in enumerate(made):
            yield event_of(f"response.{name}", {"sequence_number": number, **data})


class _Messages(Tongue):
    name = "messages"
    path = "/v1/messages"
    headers: ClassVar[dict[str, str]] = {"anthropic-version": "2023-06-01"}
    _PARAMETERS: Final = {
        *("max_tokens", "messages", "metadata", "model", "stop_sequences", "stream", "system", "temperature"),
        *("thinking", "tool_choice", "tools", "top_k", "top_p", "cache_control", "context_management"),
    }

    def body(self, messages: Sequence[Data], model: str, *, tools: Sequence[Data] = (), **fields: Any) -> Data:
        system = [part for m in messages if m.get("role") in INSTRUCTIONS for part in parts_of(m["content"])]
        lead: Data = {"system": system} if system else {}
        return super().body(messages, model, tools=tools, **{"max_tokens": 64000, **lead, **fields})

    def _tools(self, tools: Sequence[Data]) -> Data:
        made = [
            {
                "name": tool["function"]["name"],
                "input_schema": {"type": "object", **tool["function"].get("parameters", {})},
            }
            for tool in tools
        ]
        return {"tools": made} if made else {}

    def entries(self, messages: Sequence[Data]) -> list[Data]:
        found: list[Data] = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if role in INSTRUCTIONS:
                continue
            if role == "tool":
                shown = content if isinstance(content, str) else self._blocks(content)
                block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": shown}
                if found and _holds_results(found[-1]):
                    found[-1] = {"role": "user", "content": [*found[-1]["content"], block]}
                else:
                    found.append({"role": "user", "content": [block]})
            elif role == "user" and found and _holds_results(found[-1]) and not _is_native(message):
                blocks = [*found[-1]["content"], *self._blocks(parts_of(content))]
                found[-1] = {"role": "user", "content": blocks}
            elif role == "user" or not message.get("tool_calls"):
                found.append({"role": role, "content": content if isinstance(content, str) else self._blocks(content)})
            else:
                calls = [
                    {
                        "type": "tool_use",
                        "id": call["id"],
                        "name": call["function"]["name"],
                        "input": orjson.loads(call["function"]["arguments"] or b"{}"),
                    }
                    for call in message["tool_calls"]
                ]
                found.append({"role": role, "content": [*self._blocks(parts_of(content)), *calls]})
        return found

    @staticmethod
    def _blocks(parts: Any) -> list[Data]:
        return [
            {"type": "image", "source": {"type": "url", "url": part["image_url"]["url"]}}
            if part["type"] == "image_url"
            else part
            for part in parts
        ]

    def reply(self, content: bytes, *, stream: bool) -> list[Data]:
        if not stream:
            return [{"role": "assistant", "content": orjson.loads(content)["content"]}]
        blocks: list[Data] = []
        arguments: dict[int, str] = {}
        for event in events_in(content):
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        block[name] += delta[name]
                if "partial_json" in delta:
                    arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
        for place, given in arguments.items():
            blocks[place]["input"] = orjson.loads(given or "{}")
        return [{"role": "assistant", "content": blocks}]

    def chat_body(self, body: Data) -> Data:
        if unknown := sorted(set(body) - self._PARAMETERS):
            raise Refused(f"{unknown[0]}: Extra inputs are not permitted", unknown[0])
        if "max_tokens" not in body:
            raise Refused("max_tokens: Field required", "max_tokens")
        if not body["messages"] or body["messages"][0]["role"] != "user":
            raise Refused('messages: first message must use the "user" role', "messages")
        if orjson.dumps(body).count(b'"cache_control"') > 4:
            raise Refused("A maximum of 4 blocks with cache_control may be provided.")
        self._check_thinking(body)
        messages: list[Data] = [{"role": "system", "content": part["text"]} for part in parts_of(body.get("system"))]
        for place, message in enumerate(body["messages"]):
            messages += self._chat(place, message)
        tools = [{"type": "function", "function": {"name": tool["name"]}} for tool in body.get("tools") or ()]
        return {"model": body.get("model"), "messages": messages, "stream": body.get("stream")} | (
            {"tools": tools} if tools else {}
        )

    @staticmethod
    def _check_thinking(body: Data) -> None:
        """Check that with thinking enabled, the last reply of a tool loop begins with thinking."""
        replies = [message for message in body["messages"] if message["role"] == "assistant"]
        if (body.get("thinking") or {}).get("type") != "enabled" or not _holds_results(body["messages"][-1]):
            return
        if replies[-1]["content"][0]["type"] != "thinking":
            raise Refused("Expected `thinking` or `redacted_thinking`, but found `tool_use`.")

    def _chat(self, place: int, message: Data) -> Iterator[Data]:
        """Yield one message as chat messages: its results first, then the rest."""
        said: Data = {"role": message["role"], "content": None}
        rest: list[Data] = []
        blocks = (
            [{"type": "text", "text": message["content"]}]
            if isinstance(message["content"], str)
            else message["content"]
        )
        if not blocks:
            raise Refused(f"messages.{place}: all messages must have non-empty content")
        for block in blocks:
            kind = block["type"]
            if kind == "tool_result":
                if rest:
                    raise Refused(f"messages.{place}: `tool_result` blocks must come first")
                content = block.get("content", "")
                shown = content if isinstance(content, str) else text_or_parts(_unmarked(content))
                yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": shown}
            elif kind == "thinking":
                said.setdefault(SEALED, []).append(block["signature"])
            elif kind == "tool_use":
                function = {"name": block["name"], "arguments": orjson.dumps(block["input"]).decode()}
                call = {"id": block["id"], "type": "function", "function": function}
                said.setdefault("tool_calls", []).append(call)
            else:
                if kind == "text" and not block["text"].strip():
                    raise Refused(f"messages.{place}: text content blocks must contain non-whitespace text")
                rest.append(block)
        if rest or len(said) > 2:
            yield {**said, "content": text_or_parts(_unmarked(rest))}

    def answer(self, body: Data, message: Data, usage: Data) -> Data:
        content = [
            {"type": "thinking", "thinking": "thinking about it", "signature": seal} for seal in message.get(SEALED, ())
        ]
        content += [{"type": "text", "text": part["text"]} for part in parts_of(message.get("content")) if part["text"]]
        content += [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": orjson.loads(call["function"]["arguments"] or b"{}"),
            }
            for call in message.get("tool_calls") or ()
        ]
        told = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return {
            "id": "msg_test",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": content or [{"type": "text", "text": " "}],
            "stop_reason": "tool_use" if message.get("tool_calls") else "end_turn",
            "stop_sequence": None,
            "usage": told,
        }

    def events(self, body: Data, message: Data, usage: Data) -> Iterator[bytes]:
        answer = self.answer(body, message, usage)
        yield event_of("message_start", {"message": {**answer, "content": [], "stop_reason": None}})
        for place, block in enumerate(answer["content"]):
            bare: dict[str, Data] = {
                "text": {"text": ""},
                "thinking": {"thinking": "", "signature": ""},
                "tool_use": {"input": {}},
            }
            begun = {**block, **bare[block["type"]]}
            yield event_of("content_block_start", {"index": place, "content_block": begun})
            deltas: list[Data] = []
            if block["type"] == "tool_use":
                given = orjson.dumps(block["input"]).decode()
                deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces_of(given)]
            elif block["type"] == "thinking":
                deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces_of(block["thinking"])]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            else:
                deltas = [{"type": "text_delta", "text": piece} for piece in pieces_of(block["text"])]
            for delta in deltas:
                yield event_of("content_block_delta", {"index": place, "delta": delta})
            yield event_of("content_block_stop", {"index": place})
        ended = {"delta": {"stop_reason": answer["stop_reason"], "stop_sequence": None}, "usage": answer["usage"]}
        yield event_of("message_delta", ended)
        yield event_of("message_stop", {})


def _holds_results(entry: Data) -> bool:
    blocks = entry["content"] if isinstance(entry["content"], list) else ()
    return any(block["type"] == "tool_result" for block in blocks)


def _is_native(message: Data) -> bool:
    """Tell whether a user message already holds results in this API's form."""
    return _holds_results(message)


def _unmarked(blocks: Sequence[Data]) -> list[Data]:
    return [{name: value for name, value in block.items() if name != "cache_control"} for block in blocks]


def pieces_of(text: str) -> list[str]:
    """Split a text into pieces, as in a stream."""
    return [text[start : start + 12] for start in range(0, len(text), 12)]


def event_of(name: str, data: Data) -> bytes:
    """Return one named event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **data}))


CHAT: Final = _Chat()
RESPONSES: Final = _Responses()
MESSAGES: Final = _Messages()
TONGUES: Final[dict[str, Tongue]] = {each.name: each for each in (CHAT, RESPONSES, MESSAGES)}
BY_PATH: Final[dict[str, Tongue]] = {each.path: each for each in TONGUES.values()}
