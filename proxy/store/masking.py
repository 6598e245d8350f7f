"""Masks secrets before anything is stored, or all content with `store.content: none`.

Each match of a pattern becomes `[masked:0123456789ab]`, an HMAC of the matched text. The same secret always gets the
same mark, and different secrets get different ones, so a client that resends its history is recognised by the masked
texts. Without content, each whole text becomes such an HMAC.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final, cast

import msgspec
import re2  # type: ignore[import-untyped]  # the package ships no types
from cachetools import LRUCache
from msgspec.structs import replace

from proxy.dialects import Message, Request
from proxy.dialects.jsontext import write
from proxy.errors import InvalidRequest
from proxy.store.records import Body, Opening, Reply, Settlement, SummaryRow
from proxy.trimming import Change, Cut

_RE2: Final[Any] = re2
_MARK: Final = re.compile(r"\[(?:content )?not stored: [0-9a-f]+\]")
"""The placeholder of a text that is not stored."""
_DATA_MARK: Final = "not_stored"  # the only field of JSON data that is not stored
_WITHHELD: Final = re.compile(
    rb'(?<!\\)"\[(?:content )?not stored: [0-9a-f]+\]"|' + _DATA_MARK.encode() + rb"\W+[0-9a-f]{16}"
)
"""A placeholder that is a whole string, or all of some JSON data. A text that merely quotes one does not match."""
_NO_SUMMARY: Final = "no summary: "
"""Prefix of a warning whose rest may quote a model."""
CONTENT: Final = "content"
"""Field of a receipt; its value is `none` if the content of the exchange is not stored."""
_SHORT: Final = 24  # a shorter text, in characters, cannot identify a session alone, so its placeholder must not either
_NAMES: Final = frozenset({"role", "type", "id", "name", "status", "call_id", "tool_call_id", "tool_use_id", "agent"})
"""Fields of messages, parts and calls that are not content."""
_LONGEST_NAME: Final = 200
_DATA: Final = frozenset({"arguments", "input", "parameters", "input_schema", "function_call", "schema"})
"""Fields with arbitrary data of the client or the model."""
_FREE: Final = _DATA | {"metadata"}
"""Fields in which member names are content too."""
_KINDS: Final = frozenset({"role", "type"})
"""Fields that tell what a message or a part is. They are not masked, even if a pattern matches."""
MARK: Final = "[masked:"
PRESETS: Final[Mapping[str, str]] = {
    "openai": r"\bsk-[A-Za-z0-9_-]{20,}",
    "anthropic": r"\bsk-ant-[A-Za-z0-9_-]{20,}",
    "aws": r"\b(AKIA|ASIA)[A-Z0-9]{16}\b",
    "github": r"\b(gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})",
    "google": r"\bAIza[A-Za-z0-9_-]{35}",
    "slack": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "stripe": r"\b[rs]k_(live|test)_[A-Za-z0-9]{16,}",
    "jwt": r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    "pem": r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
}
"""Patterns of common API keys, by their names in `store.mask`; `keys` there means all of them."""
_SAID: Final = frozenset({"text", "reply"})
"""String fields of an export's records that are texts, not ids."""
_REMEMBERED: Final = 20_000
_LONGEST: Final = 100_000  # messages up to so many bytes are cached


def is_withheld(message: Message) -> bool:
    """Tell whether the text of a stored message is withheld."""
    raw = message.raw
    # A search for bytes is a hundred times faster than one for a pattern.
    return (b"not stored: " in raw or b"not_stored" in raw) and _WITHHELD.search(raw) is not None


def require_content(messages: Iterable[Message]) -> None:
    """Raise `InvalidRequest` if the content of one of the stored messages, which is needed, was not stored."""
    if any(map(is_withheld, messages)):
        raise InvalidRequest(
            "What was said before is not stored (store.content: none). Send the whole history with each request.",
            code="content_not_stored",
        )


class Masker:
    """Masks texts and messages. One instance serves for the life of the process."""

    keeps_cuts = True  # whether the texts that edits wrote are stored, so that they can be sent again

    def __init__(self, patterns: Iterable[str], secret: bytes) -> None:
        """Compile `patterns`: regular expressions in RE2's syntax, or names of presets."""
        chosen: list[str] = []
        for pattern in patterns:
            chosen += PRESETS.values() if pattern == "keys" else [PRESETS.get(pattern, pattern)]
        self._patterns = [_RE2.compile(pattern) for pattern in chosen]
        self._secret = secret
        self._known: LRUCache[tuple[type[Message], bytes], Message] = LRUCache(_REMEMBERED)

    def text(self, text: str) -> str:
        """Mask a text."""
        for pattern in self._patterns:
            if pattern.search(text) is not None:
                text = pattern.sub(self._mark, text)
        return text

    def _mark(self, match: Any) -> str:
        found: str = match.group(0)
        if not found or found.startswith(MARK):
            return found
        return f"{MARK}{self._digest(found)[:12]}]"

    def _digest(self, text: str) -> str:
        return hmac.new(self._secret, text.encode("utf-8", "surrogatepass"), sha256).hexdigest()

    def data(self, value: Any, *, free: bool = False) -> Any:
        """Mask all strings in JSON data. Returns the same object if there is nothing to mask.

        `free`: the names of members are arbitrary, so they are masked too.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            masked = {
                name: each if name in _KINDS and not free else self.data(each, free=free or name in _FREE)
                for name, each in members.items()
            }
            changed = any(masked[name] is not each for name, each in members.items())
            if free and any(self.text(name) != name for name in members):
                return {self.text(name): each for name, each in masked.items()}
            return masked if changed else members
        if isinstance(value, list | tuple):
            items = cast("Sequence[Any]", value)
            done = [self.data(each, free=free) for each in items]
            return done if any(new is not old for new, old in zip(done, items, strict=True)) else items
        return value

    def message(self, message: Message) -> Message:
        """Mask a message. Returns the same object if there is nothing to mask."""
        name = (type(message), message.raw)  # the same text may be a message in several dialects
        known = self._known.get(name)
        if known is not None:
            return known
        data = message.data
        # The arguments of calls are JSON in a string. They stay valid JSON, because a mark needs no escapes.
        masked = self.data(data)
        made = message if masked is data else type(message).of(masked)
        if len(message.raw) <= _LONGEST:
            self._known[name] = made
        return made

    def messages(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Mask messages."""
        return tuple([self.message(message) for message in messages])

    def request(self, request: Request) -> Request:
        """Mask a request. Its place in the history is found with the masked messages, as they are stored."""
        return replace(
            request,
            messages=self.messages(request.messages),
            instructions=self.messages(request.instructions),
            tools=self.tools(request.tools),
        )

    def tools(self, tools: bytes | None) -> bytes | None:
        """Mask the text of tools."""
        return None if tools is None else self.text(tools.decode()).encode()

    def check(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Raise `InvalidRequest` if masking would change records of an export, whose ids are hashes of their texts."""
        for line, record in enumerate(records, 1):
            told = {name: value for name, value in record.items() if name in _SAID or not isinstance(value, str)}
            if self.data(told, free=True) is not told:
                raise InvalidRequest(
                    f"Line {line} of the import holds what store.mask masks, and an import is stored unchanged."
                )

    # ------------------------------------------------------------------------------ records of the store

    def opening(self, opening: Opening) -> Opening:
        """Mask the beginning of an exchange."""
        lead = opening.instructions
        return replace(
            opening,
            messages=tuple([self._body(body) for body in opening.messages]),
            instructions=None if lead is None else self.messages(lead),
            forms=tuple([(node, self.message(form)) for node, form in opening.forms]),
            parameters=self.data(opening.parameters),
            tools=self.tools(opening.tools),
        )

    def settlement(self, settlement: Settlement) -> Settlement:
        """Mask the end of an exchange."""
        cut = settlement.cut
        return replace(
            settlement,
            messages=tuple([self._body(body) for body in settlement.messages]),
            arrivals=tuple([self._changes(changes) for changes in settlement.arrivals]),
            replies=tuple([self._reply(reply) for reply in settlement.replies]),
            cut=None if cut is None else self._cut(cut),
            receipt=self.data(settlement.receipt),
        )

    def summary(self, row: SummaryRow) -> SummaryRow:
        """Mask a summary."""
        return replace(row, text=self.text(row.text), state=self.data(row.state), reason=self.text(row.reason))

    def _body(self, body: Body) -> Body:
        masked = self.message(body.message)
        return body if masked is body.message else replace(body, message=masked)

    def _changes(self, changes: tuple[Change, ...]) -> tuple[Change, ...]:
        return tuple(
            [
                change if change.message is None else replace(change, message=self.message(change.message))
                for change in changes
            ]
        )

    def _cut(self, cut: Cut) -> Cut:
        summary = cut.summary
        if summary is not None:
            summary = replace(summary, text=self.text(summary.text), state=self.data(summary.state))
        return replace(cut, changes=self._changes(cut.changes), summary=summary)

    def _reply(self, reply: Reply) -> Reply:
        hidden = reply.hidden
        if hidden is not None:
            hidden = replace(
                hidden,
                before=self.messages(hidden.before),
                after=self.messages(hidden.after),
                reply=None if hidden.reply is None else self.message(hidden.reply),
            )
        return replace(reply, body=self._body(reply.body), hidden=hidden)


class Withholder(Masker):
    """Withholds all content. Roles, ids and names of tools are kept."""

    keeps_cuts = False

    def __init__(self, secret: bytes) -> None:
        """Key the placeholders with `secret`. If it changed, resent histories would no longer be recognised."""
        super().__init__((), secret)

    def text(self, text: str) -> str:
        """Return the placeholder of a text. It ignores white space around the text."""
        bare = text.strip()
        if not bare or _MARK.fullmatch(bare):
            return bare
        digest = self._digest(bare)
        return f"[content not stored: {digest[:16]}]" if len(bare) >= _SHORT else f"[not stored: {digest[:8]}]"

    def data(self, value: Any, *, free: bool = False) -> Any:  # noqa: ARG002 - free data is withheld as a whole
        """Return a message, or a part of one, with its content withheld."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            return {name: self._member(name, each) for name, each in members.items()}
        if isinstance(value, list | tuple):
            return [self.data(each) for each in cast("Sequence[Any]", value)]
        return value

    def tools(self, tools: bytes | None) -> bytes | None:
        """Return the text of tools with all but names withheld."""
        if tools is None:
            return None
        try:
            return write(self.data(msgspec.json.decode(tools)))
        except msgspec.DecodeError:
            return write([])

    def opening(self, opening: Opening) -> Opening:
        """Return the beginning of an exchange with its content withheld."""
        return replace(super().opening(replace(opening, forms=())), parameters={})

    def settlement(self, settlement: Settlement) -> Settlement:
        """Return the end of an exchange with its content withheld.

        A cut is stored only if all its changes drop messages. Any other cut is planned again for each request.
        """
        cut, receipt = settlement.cut, settlement.receipt
        drops = cut is not None and cut.summary is None and all(change.message is None for change in cut.changes)
        status = receipt.get("upstream_status")
        error = receipt.get("error")
        if error is not None and status is not None:  # the provider's message, which may quote content
            error = f"HTTP {status}; the words are not stored"
        warnings = [
            f"{_NO_SUMMARY}the words are not stored" if warning.startswith(_NO_SUMMARY) else warning
            for warning in receipt.get("warnings", ())
        ]
        return replace(
            super().settlement(replace(settlement, arrivals=(), cut=None, receipt={})),
            cut=cut if drops else None,
            kept=settlement.kept if drops else None,
            receipt={**receipt, "error": error, "warnings": warnings, CONTENT: "none"},
        )

    def _member(self, name: str, value: Any) -> Any:
        if name in _NAMES and isinstance(value, str) and len(value) <= _LONGEST_NAME:
            return value
        if name in _DATA and not (name == "function_call" and isinstance(value, Mapping) and "name" in value):
            return self._whole(value)
        return self.data(value)

    def _whole(self, value: Any) -> Any:
        """Return a placeholder of the same type for a JSON object, or for a string that holds one.

        Any other value is withheld as `data` does.
        """
        held = value
        if isinstance(value, str):
            with suppress(msgspec.DecodeError, RecursionError):
                held = msgspec.json.decode(value)
        if not isinstance(held, Mapping):
            return self.data(value)
        members = cast("Mapping[str, Any]", held)
        if not members or set(members) == {_DATA_MARK}:
            return value
        made = {_DATA_MARK: self._digest(msgspec.json.encode(members, order="deterministic").decode())[:16]}
        return write(made).decode() if isinstance(value, str) else made
