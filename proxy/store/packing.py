"""How values are packed in the tables. The rest of the program sees plain text everywhere; columns translate it.

- Names (hashes in hexadecimal digits, ids of sessions and exchanges) are bytes, half as long. What is no such name is
  kept as text behind `~`, and is never as long as the bytes of a name.
- Texts are compressed where that makes them shorter. The first byte says how a value is packed, so that rows of every
  version stay readable. Zstandard's dictionaries are shipped in `dictionaries`; one that was in use is never changed:
  a better one gets a new number.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import orjson
import zstandard
from sqlalchemy import LargeBinary, TypeDecorator
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeEngine

from proxy.errors import InvalidRequest

# --------------------------------------------------------------------------------- texts that can be stored

_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")


def is_plain(text: str) -> bool:
    """Tell whether every database can hold `text`. What it cannot hold, it does not hold: look no further."""
    return _UNSTORABLE.search(text) is None


def require_plain(**texts: str | None) -> None:
    """Refuse a request that names something by a text that cannot be stored."""
    for name, text in texts.items():
        if text is not None and not is_plain(text):
            raise InvalidRequest(
                f"{name} holds a NUL or half of a surrogate pair, which cannot be stored: send it without.", param=name
            )


def sanitize(text: str) -> str:
    """Return `text` with U+FFFD in place of what cannot be stored."""
    return _UNSTORABLE.sub("\ufffd", text)


# -------------------------------------------------------------------------------------------- packed texts

_PLAIN: Final = 0
TEXTS: Final = 1
"""Dictionary of messages, tools and instructions."""
RECORDS: Final = 2
"""Dictionary of what the program itself writes: cuts, usage of summaries. Receipts, up to migration 19."""
_AGAINST: Final = 3
"""Compressed with another text for a dictionary: who reads it must have that one. Ends with a checksum of the text."""
RECEIPTS: Final = 4
"""Dictionary of receipts and of requests' parameters."""

_SHORTEST: Final = 16  # bytes of a text that is worth a try
_LEVEL: Final = 5
"""Level 3, Zstandard's own default, leaves a twenty-fifth more and takes two thirds as long; level 9 saves a thirtieth
and takes twice as long."""
_FOLDER: Final = Path(__file__).parent / "dictionaries"
_FILES: Final = {TEXTS: "texts-1.zdict", RECORDS: "records-1.zdict", RECEIPTS: "receipts-1.zdict"}
_LARGEST_BASE: Final = 32 * 1024 * 1024  # bytes of a text that others are compressed against


def pack(text: str, dictionary: int) -> bytes:
    """Return `text` as it is stored, compressed with one of the shipped dictionaries."""
    raw = text.encode()
    if len(raw) >= _SHORTEST:
        packed = _OF_THREAD.compressor(dictionary).compress(raw)
        if len(packed) < len(raw):
            return bytes((dictionary,)) + packed
    return bytes((_PLAIN,)) + raw


def pack_all(texts: Sequence[bytes], dictionary: int) -> list[bytes]:
    """Return texts as `pack` does, in one step, which other threads do not wait for."""
    packed = [bytes((_PLAIN,)) + raw for raw in texts]
    tried = [place for place, raw in enumerate(texts) if len(raw) >= _SHORTEST]
    if tried:
        compressor: Any = _OF_THREAD.compressor(dictionary)  # its stub leaves this out
        shorter = compressor.multi_compress_to_buffer([texts[place] for place in tried])
        for place, segment in zip(tried, shorter, strict=True):
            if len(segment) < len(texts[place]):
                packed[place] = bytes((dictionary,)) + segment.tobytes()
    return packed


def pack_against(base: str, text: str, dictionary: int) -> bytes:
    """Return `text` as it is stored where it says nearly what `base` says; plainly packed if that is shorter."""
    alone, other, raw = pack(text, dictionary), base.encode(), text.encode()
    if len(other) > _LARGEST_BASE:
        return alone
    settings = _parameters(dict_size=len(other), source_size=len(raw) + len(other), write_checksum=True)
    against = zstandard.ZstdCompressor(compression_params=settings, dict_data=_raw_dictionary(other)).compress(raw)
    return bytes((_AGAINST,)) + against if len(against) < len(alone) else alone


def is_against(packed: bytes) -> bool:
    """Tell whether a value is packed against another text."""
    return packed[:1] == bytes((_AGAINST,))


def unpack(packed: bytes, base: str | None = None) -> str:
    """Return the text of a stored value; `base` is the one that it was packed against.

    Raises ValueError where that is missing or another one, or the value is of a newer version of the program.
    """
    how = packed[0]
    if how == _PLAIN:
        return packed[1:].decode()
    if how in _FILES:
        return _OF_THREAD.decompressor(how).decompress(packed[1:]).decode()
    if how != _AGAINST:
        raise ValueError(f"a stored text is packed in way {how}, which is not known here")
    if base is None:
        raise ValueError("a stored text is packed against another one, which is not there")
    try:
        reader = zstandard.ZstdDecompressor(
            dict_data=_raw_dictionary(base.encode()), format=zstandard.FORMAT_ZSTD1_MAGICLESS
        )
        return reader.decompress(packed[1:]).decode()
    except zstandard.ZstdError as why:
        raise ValueError(f"a stored text does not fit the one that it was packed against: {why}") from why


def _raw_dictionary(content: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


@cache
def _dictionary(number: int) -> zstandard.ZstdCompressionDict:
    found = zstandard.ZstdCompressionDict((_FOLDER / _FILES[number]).read_bytes())
    loose: Any = found  # its stub leaves types out
    loose.precompute_compress(compression_params=_settings())
    return found


@cache
def _settings() -> zstandard.ZstdCompressionParameters:
    return _parameters(write_checksum=False)


def _parameters(**given: Any) -> zstandard.ZstdCompressionParameters:
    kind: Any = zstandard.ZstdCompressionParameters  # its stub leaves types out
    made: zstandard.ZstdCompressionParameters = kind.from_level(
        _LEVEL, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=True, write_dict_id=False, **given
    )
    return made


class _OfThread(threading.local):
    """Compressors and decompressors by the number of their dictionary: one may be used by one thread only."""

    def __init__(self) -> None:
        self.compressor = cache(_new_compressor)
        self.decompressor = cache(_new_decompressor)


def _new_compressor(number: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(compression_params=_settings(), dict_data=_dictionary(number))


def _new_decompressor(number: int) -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(dict_data=_dictionary(number), format=zstandard.FORMAT_ZSTD1_MAGICLESS)


_OF_THREAD: Final = _OfThread()


# ----------------------------------------------------------------------------------------------------- names

_HASHES: Final = frozenset({8, 16, 20, 32})  # bytes of the hashes that are names
_NAME: Final = 20  # bytes of the name of a node, a text, a version
_KEY: Final = 16  # bytes of the hash in a session's internal name, and of the id of an exchange
_EXCHANGE: Final = "exc_"
_RECENT: Final = 4096  # names that are remembered: a request has each of its own in several rows
_DIALECTS: Final = {"responses": b"r", "messages": b"m"}
"""What stands before the hash of a session of another dialect than Chat Completions."""
_DIALECT_OF: Final = {mark: name for name, mark in _DIALECTS.items()}


@lru_cache(maxsize=_RECENT)
def encode_name(name: str) -> bytes:
    """Return a hash as its bytes, anything else as it is kept beside them."""
    raw = _from_digits(name)
    if raw is not None and len(raw) in _HASHES:
        return raw
    return _as_text(name, _HASHES) if name else b""


def decode_name(stored: bytes) -> str:
    """Return what `encode_name` was given."""
    return stored.hex() if not stored or len(stored) in _HASHES else _text_in(stored)


@lru_cache(maxsize=_RECENT)
def encode_exchange(exchange: str) -> bytes:
    """Return the id of an exchange as it is stored."""
    raw = _from_digits(exchange.removeprefix(_EXCHANGE))
    if raw is not None and len(raw) == _KEY and exchange.startswith(_EXCHANGE):
        return raw
    return _as_text(exchange, {_KEY})


def decode_exchange(stored: bytes) -> str:
    """Return what `encode_exchange` was given."""
    return _EXCHANGE + stored.hex() if len(stored) == _KEY else _text_in(stored)


@lru_cache(maxsize=1024)
def encode_session(key: str) -> bytes:
    """Return the internal name of a session as it is stored."""
    dialect, _, digits = key.rpartition("-")
    raw = _from_digits(digits)
    if raw is not None and len(raw) == _KEY and (not dialect or dialect in _DIALECTS):
        return _DIALECTS.get(dialect, b"") + raw
    return _as_text(key, {_KEY})


def decode_session(stored: bytes) -> str:
    """Return what `encode_session` was given."""
    if len(stored) == _KEY:
        return stored.hex()
    dialect = _DIALECT_OF.get(stored[:1])
    return _text_in(stored) if dialect is None else f"{dialect}-{stored[1:].hex()}"


def encode_names(array: str) -> bytes:
    """Return a JSON array of names as their bytes, one after the other."""
    names: list[str] = orjson.loads(array)
    if all([len(name) == 2 * _NAME for name in names]) and (raw := _from_digits("".join(names))) is not None:
        return raw
    text = _as_text(array, frozenset())
    return text if len(text) % _NAME else text + b"\0"


def decode_names(stored: bytes) -> str:
    """Return what `encode_names` was given, as compact JSON."""
    if len(stored) % _NAME:
        return _text_in(stored)
    names = [stored[start : start + _NAME].hex() for start in range(0, len(stored), _NAME)]
    return orjson.dumps(names).decode()


def _from_digits(digits: str) -> bytes | None:
    """Return the bytes of lower-case hexadecimal digits; None of any other text."""
    try:
        raw = bytes.fromhex(digits)
    except ValueError:
        return None
    return raw if raw.hex() == digits else None


def _as_text(name: str, taken: frozenset[int] | set[int]) -> bytes:
    """Return a name as text that is known from bytes by its length."""
    text = b"~" + name.encode()
    return text + b"\0" if len(text) in taken else text


def _text_in(stored: bytes) -> str:
    return stored[1:].removesuffix(b"\0").decode()


# ------------------------------------------------------------------------------------------- types of columns


class StoredAsBytes(TypeDecorator[str]):
    """A text that is stored as bytes."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, encode: Callable[[str], bytes], decode: Callable[[bytes], str]) -> None:
        """Store a text as `encode` makes it; `decode` returns the text again."""
        super().__init__()
        self.encode = encode
        self.decode = decode

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:  # noqa: ARG002
        """Return the value as it is stored."""
        return None if value is None else self.encode(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Return the text of what is stored."""
        return None if value is None else self.decode(value)


def _packing(dictionary: int) -> StoredAsBytes:
    """Return the type of texts that are compressed; bytes are so already."""

    def encode(text: str | bytes) -> bytes:
        return text if isinstance(text, bytes) else pack(text, dictionary)

    return StoredAsBytes(encode, unpack)


HASH_NAME: Final = StoredAsBytes(encode_name, decode_name)
SESSION_NAME: Final = StoredAsBytes(encode_session, decode_session)
EXCHANGE_NAME: Final = StoredAsBytes(encode_exchange, decode_exchange)
HASH_NAMES: Final = StoredAsBytes(encode_names, decode_names)
"""A JSON array of hashes."""
PACKED_TEXT: Final = _packing(TEXTS)
"""A text that came from a client or a model."""
PACKED_RECORD: Final = _packing(RECORDS)
"""A text that the program wrote."""
PACKED_RECEIPT: Final = _packing(RECEIPTS)
"""A receipt, or the parameters of a request."""


def encoder_of(kind: TypeEngine[Any]) -> Callable[[str], bytes] | None:
    """Return what encodes values of a type; None where they are stored as they are."""
    return kind.encode if isinstance(kind, StoredAsBytes) else None


def decoder_of(kind: TypeEngine[Any]) -> Callable[[bytes], str] | None:
    """Return what decodes values of a type; None where they are stored as they are."""
    return kind.decode if isinstance(kind, StoredAsBytes) else None
