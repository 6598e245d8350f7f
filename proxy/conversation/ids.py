"""Names of nodes: a hash of the parent's name and the message's canonical form, as in git.

So a name stands for the whole history up to it, nothing can be overwritten, and storing the same message at the same
place twice is storing it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import accumulate
from typing import Final

from proxy.dialects import Message, body_id, hash_of

ROOT: Final = ""  # the parent of every first message. It is no node itself


def node_id(parent: str, message: Message) -> str:
    """Return the node's name, 40 hexadecimal digits, of `message` under the node `parent` (or `ROOT`)."""
    return child(parent, content_hash(message))


def child(parent: str, content: bytes) -> str:
    """Return the name of the node that a message with this `content_hash` is under `parent`."""
    digest = blake2b(bytes.fromhex(parent), digest_size=20, person=b"palimpsest-node")
    digest.update(content)
    return digest.hexdigest()


def names_under(parent: str, contents: Iterable[bytes]) -> list[str]:
    """Return the names of messages with these content hashes in a row under `parent`, oldest first."""
    return list(accumulate(contents, child, initial=parent))[1:]


def fingerprints(parent: str, messages: Iterable[Message]) -> tuple[list[str], list[bytes]]:
    """Return the node and the content hash of each of `messages` in a row under `parent`, oldest first.

    A message that stood under the same parent before is not hashed again.
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
    """Return the nodes of `messages` in a row under `parent`, oldest first."""
    return fingerprints(parent, messages)[0]


def content_hash(message: Message) -> bytes:
    """Return a hash, 20 bytes, of what the message says, whatever its form and its place."""
    facts = message.facts
    if facts is not None and facts.content is not None:
        return facts.content
    content = hash_of(message.dialect.canonical(message))
    if facts is not None:
        facts.content = content
    return content


def earlier_names(parent: str, messages: Iterable[Message]) -> Iterator[list[str]]:
    """Yield the nodes of `messages` in a row under `parent` as each older version named them, the newest first."""
    for forms in zip(*[message.dialect.earlier_canonicals(message) for message in messages], strict=True):
        yield names_under(parent, map(hash_of, forms))


def body_of(message: Message) -> str:
    """Return the name of a message's text, its `body_id`."""
    facts = message.facts
    if facts is None:
        return body_id(message.raw)
    if facts.body is None:
        facts.body = body_id(message.raw)
    return facts.body


def version_of(instructions: Iterable[Message]) -> str:
    """Return the name of a version of the instructions, by what they say: clients give them new ids, and move marks."""
    return body_id(b"".join([content_hash(message) for message in instructions]))


def array_of(messages: Iterable[Message]) -> bytes:
    """Return messages as a JSON array, each with its own bytes."""
    return b"[%b]" % b",".join([message.raw for message in messages])


def content_key(content: bytes) -> str:
    """Return a short name, 16 hexadecimal digits, for a `content_hash`: enough to look places up by."""
    return content[:8].hex()
