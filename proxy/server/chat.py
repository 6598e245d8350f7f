"""`POST /v1/chat/completions`: hands the request to the exchange, and stops it when the client leaves."""

from __future__ import annotations

from proxy.config import Settings
from proxy.errors import Forbidden, InvalidRequest, PalimpsestError
from proxy.pipeline import Call, ChatCompletions
from proxy.server.connection import ClientLeft, Connection
from proxy.server.gate import Authenticator


class ChatEndpoint:
    """The hot route, without a framework's request handling. One for the life of the process."""

    def __init__(self, settings: Settings, gate: Authenticator, chat: ChatCompletions) -> None:
        """Let `gate` decide who asks and `chat` answer."""
        self._limit = settings.server.max_body_bytes
        self._cancels = settings.sessions.on_disconnect == "cancel"
        self._gate = gate
        self._chat = chat

    async def serve(self, connection: Connection) -> None:
        """Answer one request, whatever comes of it."""
        try:
            call = await self._call(connection)
            await connection.serve(self._chat.answer(call, connection), stops=self._cancels)
        except PalimpsestError as why:
            await connection.fail(why)
        except ClientLeft:
            pass

    async def _call(self, connection: Connection) -> Call:
        """Read the request.

        Raises:
            PalimpsestError: the caller is unknown, or the body cannot be taken.
            ClientLeft: it left before its request was here.
        """
        caller = self._gate.admit(connection.headers)
        if caller.admin:
            raise Forbidden("The admin key owns no sessions. Use a tenant's key for chat completions.")
        encoding = connection.header(b"content-encoding") or b"identity"
        if encoding.lower() != b"identity":
            raise InvalidRequest("Send the request body without Content-Encoding.", param="Content-Encoding")
        body = await connection.body(self._limit)
        return Call(tenant=caller.tenant, headers=connection.headers, query=connection.query, body=body)
