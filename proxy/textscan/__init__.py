"""Reads plain text and JSON: finds values, makes digests, and compacts. Pure; it knows no messages and no policies.

    scan        finds the values of a text (ids, paths, dates, numbers, names) and the words near them
    digest      chooses the values that a later step is most likely to need, up to a number of characters
    document    reads and writes JSON without changing a value; finds documents inside of texts

Compaction, one module for each kind of text:

    table       writes records that share their keys as a table                 lossless
    preview     cuts long lists and long texts of a document                    marks what it left out
    plaintext   shortens terminal output, logs, encoded bytes and HTML          marks what it left out

No function raises on any text, and each runs in linear time.
"""

from __future__ import annotations

from proxy.textscan.digest import Mentions, digest_of, words_of
from proxy.textscan.document import (
    Embedded,
    JsonValue,
    Number,
    is_items,
    is_members,
    leaves_of,
    read_json,
    split_documents,
    string_literal,
    write_json,
    write_json_lines,
)
from proxy.textscan.plaintext import (
    condense_log,
    ending_mark,
    fold_lines,
    group_lines,
    head_and_tail,
    is_markup,
    names_ref,
    omission_mark,
    page_text,
    strip_noise,
    weight,
    without_blobs,
)
from proxy.textscan.preview import preview
from proxy.textscan.scan import (
    CHUNKS,
    CJK,
    IDENTIFYING,
    SMALLEST_NUMBER,
    atoms_of_arguments,
    beginning_of,
    identifiers,
    kind_of,
    labels_of,
    occurs,
    stands_alone,
    values_of,
    words_near,
)
from proxy.textscan.table import as_table, lines_as_table
