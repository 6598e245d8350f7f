"""What is in a text, and how the same text is said in less. Pure; it knows no message and no policy.

    scan        the values of a text: ids, paths, dates, numbers, names; where they stand; the words near them
    digest      those that a later step is most likely to need, within so many characters
    document    JSON read and written so that no value changes; where it stands in a text; its leaves

Compaction, each of one kind of text:

    table       records that share their keys, as a table                 nothing is lost
    preview     a document with its long lists and texts cut              what is lost is marked
    plaintext   terminal output, logs, bytes as text, HTML as text        what is lost is marked

No function fails on any text, and each takes time in proportion to it.
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
    pieces,
    read,
    spelled,
    write,
    write_lines,
)
from proxy.textscan.plaintext import (
    condensed,
    ending,
    ends,
    folded,
    grouped,
    is_markup,
    names_ref,
    omitted,
    shown,
    tidied,
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
from proxy.textscan.table import tabulated, tabulated_lines
