"""Secrets are masked before anything is stored; or whatever was said is, with `store.content: none`.

What a pattern finds becomes `[masked:0123456789ab]`, an HMAC of what stood there: the same secret is masked alike, and
another one otherwise. So a client that sends its history again is recognised by masked texts. Without content each text
becomes such an HMAC as a whole.
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
"""What stands in the place of a text that is not stored."""
_DATA_MARK: Final = "not_stored"  # the only field of JSON data that is not stored
_WITHHELD: Final = re.compile(
    rb'(?<!\\)"\[(?:content )?not stored: [0-9a-f]+\]"|' + _DATA_MARK.encode() + rb"\W+[0-9a-f]{16}"
)
"""A whole text, or all of some JSON data: a message that speaks of a mark is no mark."""
_NO_SUMMARY: Final = "no summary: "
"""Begins the warning whose rest may quote a model."""
CONTENT: Final = "content"
"""Says in the receipt of an exchange whose content is not stored: `none`."""
_SHORT: Final = 24  # characters: a shorter text tells no session by itself, and neither may what stands in its place
_NAMES: Final = frozenset({"role", "type", "id", "name", "status", "call_id", "tool_call_id", "tool_use_id", "agent"})
"""Fields of messages, parts and calls that are no content."""
_LONGEST_NAME: Final = 200
_DATA: Final = frozenset({"arguments", "input", "parameters", "input_schema", "function_call", "schema"})
"""Fields that hold whatever the client or the model likes."""
_FREE: Final = _DATA | {"metadata"}
"""Fields in which names are content, too."""
_KINDS: Final = frozenset({"role", "type"})
"""Fields that say what a message or a part is, whatever a pattern would find there."""
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
"""Patterns of common keys, by the names under which `store.mask` has them; `keys` means all of them."""
_SAID: Final = frozenset({"text", "reply"})
"""Fields of an export's records that are texts and no ids."""
_REMEMBERED: Final = 20_000
_LONGEST: Final = 100_000  # bytes of a text that is remembered


def is_withheld(message: Message) -> bool:
    """Tell whether a stored message has its text withheld."""
    raw = message.raw
    # Looking for bytes is a hundred times faster than looking for what matches an expression.
    return (b"not stored: " in raw or b"not_stored" in raw) and _WITHHELD.search(raw) is not None


def require_content(messages: Iterable[Message]) -> None:
    """Raise `InvalidRequest` if the content of a stored message is needed, and is not stored."""
    if any(map(is_withheld, messages)):
        raise InvalidRequest(
            "What was said before is not stored (store.content: none). Send the whole history with each request.",
            code="content_not_stored",
        )


class Masker:
    """Masks texts and messages. One for the life of the process."""

    keeps_cuts = True  # whether what an edit wrote can be stored, and so be sent again

    def __init__(self, patterns: Iterable[str], secret: bytes) -> None:
        """`patterns` are regular expressions in RE2's syntax, or names of presets."""
        chosen: list[str] = []
        for pattern in patterns:
            chosen += PRESETS.values() if pattern == "keys" else [PRESETS.get(pattern, pattern)]
        self._patterns = [_RE2.compile(pattern) for pattern in chosen]
        self._secret = secret
        self._known: LRUCache[tuple[type[Message], bytes], Message] = LRUCache(_REMEMBERED)

    def text(self, text: str) -> str:
        """Return a text masked."""
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
        """Return JSON data with all its texts masked; the same object where there is nothing to mask.

        `free`: somebody chose the names of its members as they liked, and they are masked too.
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
        """Return a message masked; the same one where there is nothing to mask."""
        name = (type(message), message.raw)  # the same text may be a message of several APIs
        known = self._known.get(name)
        if known is not None:
            return known
        data = message.data
        # Arguments of calls are JSON in a text: what is masked there stays JSON, since a mark needs no escapes.
        masked = self.data(data)
        made = message if masked is data else type(message).of(masked)
        if len(message.raw) <= _LONGEST:
            self._known[name] = made
        return made

    def messages(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages masked."""
        return tuple([self.message(message) for message in messages])

    def request(self, request: Request) -> Request:
        """Return a request as it is stored; its place in the history depends on that."""
        return replace(
            request,
            messages=self.messages(request.messages),
            instructions=self.messages(request.instructions),
            tools=self.tools(request.tools),
        )

    def tools(self, tools: bytes | None) -> bytes | None:
        """Return the text of tools masked."""
        return None if tools is None else self.text(tools.decode()).encode()

    def check(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Raise `InvalidRequest` if records of an export hold what is masked: their ids are made of their texts."""
        for line, record in enumerate(records, 1):
            told = {name: value for name, value in record.items() if name in _SAID or not isinstance(value, str)}
            if self.data(told, free=True) is not told:
                raise InvalidRequest(
                    f"Line {line} of the import holds what store.mask masks, and an import is stored unchanged."
                )

    # ------------------------------------------------------------------------------ what goes into the store

    def opening(self, opening: Opening) -> Opening:
        """Return a request masked."""
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
        """Return the end of an exchange masked."""
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
        """Return a summary masked."""
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
    """Withholds all that was said: roles, ids and names of tools stay."""

    keeps_cuts = False

    def __init__(self, secret: bytes) -> None:
        """`secret` makes the marks; with another one, clients would not be recognised by what they send."""
        super().__init__((), secret)

    def text(self, text: str) -> str:
        """Return the mark of a text; white space around it does not count."""
        bare = text.strip()
        if not bare or _MARK.fullmatch(bare):
            return bare
        digest = self._digest(bare)
        return f"[content not stored: {digest[:16]}]" if len(bare) >= _SHORT else f"[not stored: {digest[:8]}]"

    def data(self, value: Any, *, free: bool = False) -> Any:  # noqa: ARG002 - what is free is withheld whole
        """Return a message, or a part of one, without what it says."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            return {name: self._member(name, each) for name, each in members.items()}
        if isinstance(value, list | tuple):
            return [self.data(each) for each in cast("Sequence[Any]", value)]
        return value

    def tools(self, tools: bytes | None) -> bytes | None:
        """Return the text of tools, of which the names stay."""
        if tools is None:
            return None
        try:
            return write(self.data(msgspec.json.decode(tools)))
        except msgspec.DecodeError:
            return write([])

    def opening(self, opening: Opening) -> Opening:
        """Return a request without what it says."""
        return replace(super().opening(replace(opening, forms=())), parameters={})

    def settlement(self, settlement: Settlement) -> Settlement:
        """Return the end of an exchange without what was said in it.

        A cut is stored if it only drops: another one is planned anew at each request.
        """
        cut, receipt = settlement.cut, settlement.receipt
        drops = cut is not None and cut.summary is None and all(change.message is None for change in cut.changes)
        status = receipt.get("upstream_status")
        error = receipt.get("error")
        if error is not None and status is not None:  # these are the provider's words, which may quote
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
        """Return what stands in the place of JSON data, or of a text that holds some: of the same type."""
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
