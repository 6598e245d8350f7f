"""What travels between client and upstream, as bytes and plain data. Pure: no I/O, no clock.

base         the dialect seam: what every other room may ask of an API
chat/        Chat Completions; as in the other two:
               message or items   one entry: reading and rewriting
               canonical          the form by which it is recognised; never sent
               protocol           spans, rules and their repair, and the `Dialect`
               request            a request beside its bytes, and the body that goes upstream
               completion, reply  what an answer says
               own_tools          calls of the proxy's own tools, taken out of a reply
responses/   Responses
messages/    Messages
sse          a byte stream as server-sent events
bodies       what the dialects share of requests: reading, errors, changed fields
cache_marks  what the dialects with cache marks share
own_tools    what the dialects share of the proxy's own tools
jsontext     JSON from strangers: reading, writing, changing and measuring a text without parsing it
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
