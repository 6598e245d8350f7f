"""How an exchange begins: what is new is stored before or while upstream is asked."""

from __future__ import annotations

import orjson

from proxy.conversation import body_of
from proxy.store.database import Connection
from proxy.store.plain import require_plain
from proxy.store.records import Body, Opening, Status, session_key
from proxy.store.schema import EXCHANGES, FORMS, insert_new
from proxy.store.sessions import open_session
from proxy.store.texts import add_bodies, add_instructions, add_tools, named_bodies


def begin(connection: Connection, opening: Opening) -> None:
    """Store a pending exchange with its new texts; a second time changes nothing.

    Raises:
        InvalidRequest: a name in it holds characters that cannot be stored.
    """
    require_plain(
        session=opening.session,
        tenant=opening.tenant,
        exchange=opening.exchange,
        model=opening.model,
        agent=opening.agent,
        policy=opening.policy,
    )
    key = session_key(opening.tenant, opening.session)
    newest = open_session(connection, key, opening.tenant, opening.session, opening.created_at)
    forms = [(node, body_of(form), form) for node, form in opening.forms]
    # A form has no count of its own: it is what the stored message says, in other words.
    texts = {name: Body(message=form, tokens=0) for _, name, form in forms} | named_bodies(opening.messages)
    add_bodies(connection, key, texts)
    tools = None if opening.tools is None else add_tools(connection, key, opening.tools)
    instructions = None
    if opening.instructions is not None:
        tokens, at = opening.instructions_tokens, opening.created_at
        instructions = add_instructions(connection, key, opening.instructions, tokens, at, there=newest)
    insert_new(
        connection,
        FORMS,
        [
            {"session": key, "node": node, "body": name, "exchange": opening.exchange}
            for node, name, _ in forms
        ],
    )
    names = [body_of(body.message) for body in opening.messages]
    row = {
        "session": key,
        "id": opening.exchange,
        "created_at": opening.created_at,
        "settled_at": None,
        "status": Status.PENDING.value,
        "kind": opening.kind,
        "base": opening.base,
        "digest": opening.digest,
        "model": opening.model,
        "agent": opening.agent,
        "policy": opening.policy,
        "policy_version": opening.policy_version,
        "stream": opening.stream,
        "parameters": orjson.dumps(dict(opening.parameters)).decode(),
        "tools": tools,
        "instructions": instructions,
        "messages": orjson.dumps(names).decode(),
        "nodes": "[]",
        "replies": "[]",
        "cut_node": None,
        "tokens_before": 0,
        "tokens_sent": 0,
        "receipt": "{}",
        "idempotency": opening.idempotency,
    }
    insert_new(connection, EXCHANGES, [row])
