"""Packs values for the tables. Column types encode and decode them, so the rest of the program sees plain text.

- Names (hashes in hexadecimal digits, ids of sessions and exchanges) are stored as bytes, half as long. Any other name
  is stored as `~` and its text, padded if necessary so that its length never equals that of a hash.
- Texts are compressed if that makes them shorter. The first byte tells how a value is packed, so that rows of every
  version stay readable. The Zstandard dictionaries are in `dictionaries`. A dictionary that was in use never changes; a
  better one gets a new number.
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
    """Tell whether every database can store `text`. If not, it cannot be in the store, so no look-up is needed."""
    return _UNSTORABLE.search(text) is None


def require_plain(**texts: str | None) -> None:
    """Raise `InvalidRequest` if one of the named texts of a request cannot be stored."""
    for name, text in texts.items():
        if text is not None and not is_plain(text):
            raise InvalidRequest(
                f"{name} holds a NUL or half of a surrogate pair, which cannot be stored: send it without.", param=name
            )


def sanitize(text: str) -> str:
    """Return `text` with U+FFFD in place of each character that cannot be stored."""
    return _UNSTORABLE.sub("\ufffd", text)


# -------------------------------------------------------------------------------------------- packed texts

_PLAIN: Final = 0
TEXTS: Final = 1
"""The dictionary for messages, tools and instructions."""
RECORDS: Final = 2
"""The dictionary for records of the program itself: cuts, the usage of summaries, and receipts up to migration 19."""
_AGAINST: Final = 3
"""Compressed with another text as the dictionary, which is needed to unpack it. Ends with a checksum of the text."""
RECEIPTS: Final = 4
"""The dictionary for receipts and the parameters of requests."""

_SHORTEST: Final = 16  # shorter texts, in bytes, are not compressed
_LEVEL: Final = 5
"""Compression level. Level 3, Zstandard's default, gives 1/25 more bytes in two thirds of the time; level 9 gives 1/30
fewer bytes in twice the time."""
_FOLDER: Final = Path(__file__).parent / "dictionaries"
_FILES: Final = {TEXTS: "texts-1.zdict", RECORDS: "records-1.zdict", RECEIPTS: "receipts-1.zdict"}
_LARGEST_BASE: Final = 32 * 1024 * 1024  # most bytes of a text that others are compressed against


def pack(text: str, dictionary: int) -> bytes:
    """Pack `text`, compressed with one of the shipped dictionaries if that makes it shorter."""
    raw = text.encode()
    if len(raw) >= _SHORTEST:
        packed = _OF_THREAD.compressor(dictionary).compress(raw)
        if len(packed) < len(raw):
            return bytes((dictionary,)) + packed
    return bytes((_PLAIN,)) + raw


def pack_all(texts: Sequence[bytes], dictionary: int) -> list[bytes]:
    """Pack texts as `pack` does, in one call that releases the GIL."""
    packed = [bytes((_PLAIN,)) + raw for raw in texts]
    tried = [place for place, raw in enumerate(texts) if len(raw) >= _SHORTEST]
    if tried:
        compressor: Any = _OF_THREAD.compressor(dictionary)  # Any: the stub lacks `multi_compress_to_buffer`
        shorter = compressor.multi_compress_to_buffer([texts[place] for place in tried])
        for place, segment in zip(tried, shorter, strict=True):
            if len(segment) < len(texts[place]):
                packed[place] = bytes((dictionary,)) + segment.tobytes()
    return packed


def pack_against(base: str, text: str, dictionary: int) -> bytes:
    """Pack `text` with the similar text `base` as the dictionary, or as `pack` does if that is not longer."""
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
    """Return the text of a packed value. `base` is the text that it was packed against, if any.

    Raises ValueError if `base` is missing or wrong, or if a newer version of the program packed the value.
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
    loose: Any = found  # the stub lacks types
    loose.precompute_compress(compression_params=_settings())
    return found


@cache
def _settings() -> zstandard.ZstdCompressionParameters:
    return _parameters(write_checksum=False)


def _parameters(**given: Any) -> zstandard.ZstdCompressionParameters:
    kind: Any = zstandard.ZstdCompressionParameters  # the stub lacks types
    made: zstandard.ZstdCompressionParameters = kind.from_level(
        _LEVEL, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=True, write_dict_id=False, **given
    )
    return made


class _OfThread(threading.local):
    """Compressors and decompressors of a thread, by dictionary number. They are not thread-safe."""

    def __init__(self) -> None:
        self.compressor = cache(_new_compressor)
        self.decompressor = cache(_new_decompressor)


def _new_compressor(number: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(compression_params=_settings(), dict_data=_dictionary(number))


def _new_decompressor(number: int) -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(dict_data=_dictionary(number), format=zstandard.FORMAT_ZSTD1_MAGICLESS)


_OF_THREAD: Final = _OfThread()


# ----------------------------------------------------------------------------------------------------- names

_HASHES: Final = frozenset({8, 16, 20, 32})  # lengths of hashes that are names, in bytes
_NAME: Final = 20  # bytes of the name of a node, a text or a version
_KEY: Final = 16  # bytes of the hash in a session's internal name, and of the id of an exchange
_EXCHANGE: Final = "exc_"
_RECENT: Final = 4096  # cached names: a request writes the same ones in several rows
_DIALECTS: Final = {"responses": b"r", "messages": b"m"}
"""Prefix of a stored session name, for dialects other than Chat Completions."""
_DIALECT_OF: Final = {mark: name for name, mark in _DIALECTS.items()}


@lru_cache(maxsize=_RECENT)
def encode_name(name: str) -> bytes:
    """Encode a hash as its bytes, or any other name as text that no hash can equal."""
    raw = _from_digits(name)
    if raw is not None and len(raw) in _HASHES:
        return raw
    return _as_text(name, _HASHES) if name else b""


def decode_name(stored: bytes) -> str:
    """Return the name that `encode_name` encoded."""
    return stored.hex() if not stored or len(stored) in _HASHES else _text_in(stored)


@lru_cache(maxsize=_RECENT)
def encode_exchange(exchange: str) -> bytes:
    """Encode the id of an exchange."""
    raw = _from_digits(exchange.removeprefix(_EXCHANGE))
    if raw is not None and len(raw) == _KEY and exchange.startswith(_EXCHANGE):
        return raw
    return _as_text(exchange, {_KEY})


def decode_exchange(stored: bytes) -> str:
    """Return the id that `encode_exchange` encoded."""
    return _EXCHANGE + stored.hex() if len(stored) == _KEY else _text_in(stored)


@lru_cache(maxsize=1024)
def encode_session(key: str) -> bytes:
    """Encode the internal name of a session."""
    dialect, _, digits = key.rpartition("-")
    raw = _from_digits(digits)
    if raw is not None and len(raw) == _KEY and (not dialect or dialect in _DIALECTS):
        return _DIALECTS.get(dialect, b"") + raw
    return _as_text(key, {_KEY})


def decode_session(stored: bytes) -> str:
    """Return the name that `encode_session` encoded."""
    if len(stored) == _KEY:
        return stored.hex()
    dialect = _DIALECT_OF.get(stored[:1])
    return _text_in(stored) if dialect is None else f"{dialect}-{stored[1:].hex()}"


def encode_names(array: str) -> bytes:
    """Encode a JSON array of names as their concatenated bytes, or as text if one is not a hash of `_NAME` bytes."""
    names: list[str] = orjson.loads(array)
    if all([len(name) == 2 * _NAME for name in names]) and (raw := _from_digits("".join(names))) is not None:
        return raw
    text = _as_text(array, frozenset())
    return text if len(text) % _NAME else text + b"\0"


def decode_names(stored: bytes) -> str:
    """Return the array that `encode_names` encoded, as compact JSON."""
    if len(stored) % _NAME:
        return _text_in(stored)
    names = [stored[start : start + _NAME].hex() for start in range(0, len(stored), _NAME)]
    return orjson.dumps(names).decode()


def _from_digits(digits: str) -> bytes | None:
    """Return the bytes of lower-case hexadecimal digits, or None for any other text."""
    try:
        raw = bytes.fromhex(digits)
    except ValueError:
        return None
    return raw if raw.hex() == digits else None


def _as_text(name: str, taken: frozenset[int] | set[int]) -> bytes:
    """Encode a name as text, with a length that is not in `taken` (the lengths of hashes)."""
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
        """Store the result of `encode`; `decode` is its inverse."""
        super().__init__()
        self.encode = encode
        self.decode = decode

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:  # noqa: ARG002
        """Encode a value for the database."""
        return None if value is None else self.encode(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Decode a value from the database."""
        return None if value is None else self.decode(value)


def _packing(dictionary: int) -> StoredAsBytes:
    """Return a column type that packs texts with a dictionary. Bytes count as packed already."""

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
"""A record of the program itself."""
PACKED_RECEIPT: Final = _packing(RECEIPTS)
"""A receipt, or the parameters of a request."""


def encoder_of(kind: TypeEngine[Any]) -> Callable[[str], bytes] | None:
    """Return the encoder of a column type, or None if its values are stored unchanged."""
    return kind.encode if isinstance(kind, StoredAsBytes) else None


def decoder_of(kind: TypeEngine[Any]) -> Callable[[bytes], str] | None:
    """Return the decoder of a column type, or None if its values are stored unchanged."""
    return kind.decode if isinstance(kind, StoredAsBytes) else None
