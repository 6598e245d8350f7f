"""Names of nodes: a hash of the parent's name and the message's canonical form, as in git.

So a name stands for the whole history up to it, nothing can be overwritten, and storing the
same message at the same place twice is storing it once.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from proxy.wire.canonical import canonical
from proxy.wire.messages import Message

ROOT: Final = ""
"""The parent of every first message. It is no node itself."""

_NODE_BYTES: Final = 20
_BODY_BYTES: Final = 20
_CONTENT_BYTES: Final = 20


def node_id(parent: str, message: Message) -> str:
    """Return the node's name, 40 hexadecimal digits, of `message` under the node `parent` (or `ROOT`).

    The message counts by a hash of its own, so that its canonical form need be made only once,
    wherever it stands.
    """
    digest = blake2b(bytes.fromhex(parent), digest_size=_NODE_BYTES, person=b"palimpsest-node")
    digest.update(content_hash(message))
    return digest.hexdigest()


def content_hash(message: Message) -> bytes:
    """Return a hash, 20 bytes, of what the message says, whatever its form and its place."""
    return blake2b(canonical(message.data), digest_size=_CONTENT_BYTES, person=b"palimpsest-text").digest()


def chain(parent: str, messages: Iterable[Message]) -> list[str]:
    """Return the names of `messages` in a row under `parent`, oldest first."""
    names: list[str] = []
    for message in messages:
        parent = node_id(parent, message)
        names.append(parent)
    return names


def body_id(raw: bytes) -> str:
    """Return the name of a text, 40 hexadecimal digits: equal texts have equal names, wherever they stand."""
    return blake2b(raw, digest_size=_BODY_BYTES, person=b"palimpsest-body").hexdigest()
