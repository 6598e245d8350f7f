"""The APIs that clients and upstreams speak, as bytes and plain data. Pure: no I/O, no clock.

base         the dialect interface: everything that other rooms may ask of an API
chat/        Chat Completions. The other two folders have the same modules:
               message or items   one entry: reading and rewriting it
               canonical          the form by which an entry is recognised; never sent
               protocol           spans, rules and repairs, and the `Dialect`
               request            parses a request, composes the body that goes upstream
               completion, reply  reads an answer
               own_tools          removes calls of the proxy's own tools from a reply
responses/   Responses
messages/    Messages
sse          splits a byte stream into server-sent events
bodies       shared by the dialects: reading requests, errors, changing fields
cache_marks  shared by the dialects that have cache marks
own_tools    shared by the dialects: the proxy's own tools
jsontext     untrusted JSON: reads, writes, changes and measures a text, mostly without parsing it
generations  a cache bounded by size
"""

from __future__ import annotations

from proxy.dialects.base import (
    DIALECTS,
    INSTRUCTION_ROLES,
    LONG_BODY,
    OWN_FIELDS,
    REPAIRED,
    Attachment,
    Call,
    Countable,
    Dialect,
    Facts,
    JoinedTexts,
    JsonObject,
    KnownMessages,
    MarkKind,
    Message,
    Overflow,
    OwnCalls,
    ReasoningMode,
    Repaired,
    Replies,
    ReplySide,
    Request,
    RequestSide,
    RoleOrder,
    Span,
    SpokenRole,
    StreamReader,
    ToolDefinition,
    ToolOffer,
    answer_of,
    begun_under,
    body_id,
    dialect_named,
    hash_of,
    is_random,
    one_line,
)
