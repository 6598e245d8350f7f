"""What is in a text, and how the same text is said in less. Pure; it knows no message and no policy.

Scanning:

    values      the pieces of a text that a later step may need verbatim, with what names them
    atoms       the same, in pieces small enough to be compared with other texts
    leaves      the numbers and strings of a JSON document
    shape       what kind of value a piece is: date, address, path, id, number
    readable    a text without its wrapping: escapes, colours, tags
    candidates, digest
                what is left of a long text when it goes

Compaction, each of one kind of text; none fails on any text, and each takes time in proportion to it:

    document    JSON read and written so that no value changes
    embedded    where documents stand in a text
    table       records that share their keys, as a table                 nothing is lost
    verbatim    strings full of escapes, between triple quotes            nothing is lost
    whitespace  terminal escapes, progress bars, blanks                   nothing that is read is lost
    markup      HTML as the text that it shows                            what is lost is marked
    blob        base64, hexadecimal                                       what is lost is marked
    log         lines that differ only in numbers, once                   what is lost is marked
    preview     a document with its long lists and texts cut              what is lost is marked
    alarm, weight, mark
                words of alarm; about how many tokens a text has; the marks
"""

from __future__ import annotations

from proxy.textscan.atoms import (
    CHUNKS,
    SMALLEST_NUMBER,
    atoms_of_arguments,
    labels_of,
    occurs,
    stands_alone,
    words_near,
)
from proxy.textscan.blob import without_blobs
from proxy.textscan.digest import digest_of, words_of
from proxy.textscan.document import JsonValue, Number, is_items, is_members, read, write
from proxy.textscan.embedded import Embedded, pieces
from proxy.textscan.leaves import leaves_of
from proxy.textscan.log import condensed
from proxy.textscan.mark import ending, names_ref
from proxy.textscan.markup import is_markup, shown
from proxy.textscan.preview import preview
from proxy.textscan.shape import CJK, INNER_CAPITAL, Kind, kind_of
from proxy.textscan.table import tabulated, tabulated_lines
from proxy.textscan.values import Value, beginning_of, end_of, values_of
from proxy.textscan.verbatim import spelled
from proxy.textscan.weight import weight
from proxy.textscan.whitespace import tidied

__all__ = [
    "CHUNKS",
    "CJK",
    "INNER_CAPITAL",
    "SMALLEST_NUMBER",
    "Embedded",
    "JsonValue",
    "Kind",
    "Number",
    "Value",
    "atoms_of_arguments",
    "beginning_of",
    "condensed",
    "digest_of",
    "end_of",
    "ending",
    "is_items",
    "is_markup",
    "is_members",
    "kind_of",
    "labels_of",
    "leaves_of",
    "names_ref",
    "occurs",
    "pieces",
    "preview",
    "read",
    "shown",
    "spelled",
    "stands_alone",
    "tabulated",
    "tabulated_lines",
    "tidied",
    "values_of",
    "weight",
    "without_blobs",
    "words_near",
    "words_of",
    "write",
]
