"""Generates a language model of random numbers: a GGUF file of about 120 kilobytes.

The architecture is `llama`. The vocabulary is a handful of words and every byte: each byte of a prompt that is not
part of a word is one token, and an answer consists of words. The answers make no sense but are deterministic: the
same seed gives the same file. The format follows the GGUF specification of the ggml project, version 3.
"""

from __future__ import annotations

import math
import random
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final

WORDS: Final = (
    *("red", "blue", "green", "one", "two", "three", "here", "there", "now", "then", "yes", "no"),
    *("and", "or", "but", "up", "down", "left", "right"),
)
"""The words that the model can say, each with a leading space."""

TEMPLATE: Final = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
"""The chat template."""

_WIDTH: Final = 32
_HIDDEN: Final = 64
_HEADS: Final = 2
_CONTEXT: Final = 4096
_SPREAD: Final = 1e-5
_ALIGNMENT: Final = 32
_PLAIN, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
"""Token types of GGUF."""
_INT32, _UINT32, _FLOAT32, _STRING, _ARRAY = 5, 4, 6, 8, 9
"""Value types of GGUF."""


def write_random_model(path: Path, seed: int = 1) -> None:
    """Write a model of one layer, with little-endian 32-bit numbers."""
    tensors = list(_tensors(random.Random(seed)))  # noqa: S311 - it is to be repeatable, not secret
    table, data = b"", b""
    for name, shape, values in tensors:
        table += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        table += struct.pack("<IQ", 0, len(data))  # 0: 32-bit numbers
        data += _padded(struct.pack(f"<{len(values)}f", *values))
    fields = list(_fields())
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields))
    path.write_bytes(_padded(head + b"".join(fields) + table) + data)


def _vocabulary() -> list[tuple[str, float, int]]:
    """Return text, score and type of every token."""
    words = [(f"\u2581{word}", -1.0 - place, _PLAIN) for place, word in enumerate(WORDS)]
    single = [(f"<0x{byte:02X}>", 0.0, _BYTE) for byte in range(256)]
    return [("<unk>", 0.0, _UNKNOWN), ("<s>", 0.0, _CONTROL), ("</s>", 0.0, _CONTROL), *single, *words]


def _tensors(dice: random.Random) -> Iterator[tuple[str, tuple[int, ...], array[float]]]:
    """Yield name, shape (the innermost dimension first) and numbers of each tensor."""

    def drawn(inner: int, outer: int) -> tuple[tuple[int, ...], array[float]]:
        spread = 1 / math.sqrt(inner)
        return (inner, outer), array("f", (dice.gauss(0, spread) for _ in range(inner * outer)))

    size = len(_vocabulary())
    ones = array("f", [1.0] * _WIDTH)
    yield ("token_embd.weight", *drawn(_WIDTH, size))
    yield "output_norm.weight", (_WIDTH,), ones
    shape, output = drawn(_WIDTH, size)
    # Tokens that are not words get weight 0, so that the likeliest token is always a word.
    output[: (size - len(WORDS)) * _WIDTH] = array("f", bytes(4 * (size - len(WORDS)) * _WIDTH))
    yield "output.weight", shape, output
    for name in ("attn_norm", "ffn_norm"):
        yield f"blk.0.{name}.weight", (_WIDTH,), ones
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        yield (f"blk.0.{name}.weight", *drawn(_WIDTH, _WIDTH))
    for name in ("ffn_gate", "ffn_up"):
        yield (f"blk.0.{name}.weight", *drawn(_WIDTH, _HIDDEN))
    yield ("blk.0.ffn_down.weight", *drawn(_HIDDEN, _WIDTH))


def _fields() -> Iterator[bytes]:
    """Yield the metadata fields of the file."""
    yield _field("general.architecture", _STRING, _text("llama"))
    for name, number in {
        "llama.context_length": _CONTEXT,
        "llama.embedding_length": _WIDTH,
        "llama.block_count": 1,
        "llama.feed_forward_length": _HIDDEN,
        "llama.attention.head_count": _HEADS,
        "llama.rope.dimension_count": _WIDTH // _HEADS,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }.items():
        yield _field(name, _UINT32, struct.pack("<I", number))
    yield _field("llama.attention.layer_norm_rms_epsilon", _FLOAT32, struct.pack("<f", _SPREAD))
    yield _field("tokenizer.ggml.model", _STRING, _text("llama"))
    texts, scores, kinds = zip(*_vocabulary(), strict=True)
    yield _list("tokenizer.ggml.tokens", _STRING, [_text(text) for text in texts])
    yield _list("tokenizer.ggml.scores", _FLOAT32, [struct.pack("<f", score) for score in scores])
    yield _list("tokenizer.ggml.token_type", _INT32, [struct.pack("<i", kind) for kind in kinds])
    yield _field("tokenizer.chat_template", _STRING, _text(TEMPLATE))


def _field(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _list(name: str, kind: int, values: list[bytes]) -> bytes:
    return _field(name, _ARRAY, struct.pack("<IQ", kind, len(values)) + b"".join(values))


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)
