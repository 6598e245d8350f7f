"""Names of nodes: a hash of the parent's name and the message's canonical form, as in git.

A name therefore identifies the whole history up to its node. Nothing can be overwritten, and storing the same message
at the same place twice is idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import accumulate
from typing import Final

from proxy.dialects import Message, body_id, hash_of

ROOT: Final = ""  # the parent of every first message; not a node itself


def node_id(parent: str, message: Message) -> str:
    """Return the name of `message` under the node `parent` (or `ROOT`): 40 hexadecimal digits."""
    return child(parent, content_hash(message))


def child(parent: str, content: bytes) -> str:
    """Return the name of a message with this `content_hash` under `parent`."""
    digest = blake2b(bytes.fromhex(parent), digest_size=20, person=b"palimpsest-node")
    digest.update(content)
    return digest.hexdigest()


def names_under(parent: str, contents: Iterable[bytes]) -> list[str]:
    """Return the names of a chain of messages under `parent`, given their content hashes; oldest first."""
    return list(accumulate(contents, child, initial=parent))[1:]


def fingerprints(parent: str, messages: Iterable[Message]) -> tuple[list[str], list[bytes]]:
    """Return the nodes and the content hashes of `messages`, a chain under `parent`; oldest first.

    Hashes are cached with a message: under the same parent it is not hashed again.
    """
    names: list[str] = []
    contents: list[bytes] = []
    for message in messages:
        facts = message.facts
        if facts is None:
            content = content_hash(message)
            parent = child(parent, content)
        else:
            content = facts.content or content_hash(message)
            step = facts.step
            if step is None or step[0] != parent:
                facts.step = step = (parent, child(parent, content))
            parent = step[1]
        names.append(parent)
        contents.append(content)
    return names, contents


def chain(parent: str, messages: Iterable[Message]) -> list[str]:
    """Return the nodes of `messages`, a chain under `parent`; oldest first."""
    return fingerprints(parent, messages)[0]


def content_hash(message: Message) -> bytes:
    """Return a hash of the message's canonical form, 20 bytes. It does not depend on the message's place."""
    facts = message.facts
    if facts is not None and facts.content is not None:
        return facts.content
    content = hash_of(message.dialect.canonical(message))
    if facts is not None:
        facts.content = content
    return content


def earlier_names(parent: str, messages: Iterable[Message]) -> Iterator[list[str]]:
    """Yield the nodes of the chain `messages` under `parent` as older versions named them, the newest version first."""
    for forms in zip(*[message.dialect.earlier_canonicals(message) for message in messages], strict=True):
        yield names_under(parent, map(hash_of, forms))


def body_of(message: Message) -> str:
    """Return the name of a message's raw text, its `body_id`; cached with the message."""
    facts = message.facts
    if facts is None:
        return body_id(message.raw)
    if facts.body is None:
        facts.body = body_id(message.raw)
    return facts.body


def version_of(instructions: Iterable[Message]) -> str:
    """Return the name of a version of the instructions.

    It depends on their canonical forms only, because clients assign new ids and move cache marks.
    """
    return body_id(b"".join([content_hash(message) for message in instructions]))


def array_of(messages: Iterable[Message]) -> bytes:
    """Return messages as a JSON array; each keeps its own bytes."""
    return b"[%b]" % b",".join([message.raw for message in messages])


def content_key(content: bytes) -> str:
    """Return a short lookup key for a `content_hash`: 16 hexadecimal digits."""
    return content[:8].hex()
