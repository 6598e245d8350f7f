"""The names under which originals are read again: `ref_` and 16 hexadecimal digits.

They are the beginnings of the names of stored texts, so they are good as long as the session is. One format
stands in stubs, digests and answers. Whether there is a text of that name is the store's to say.
"""

from __future__ import annotations

import re
from typing import Final

REF_PREFIX: Final = "ref_"
REF_DIGITS: Final = 16

_NAMED: Final = re.compile(r"(?:ref_)?([0-9a-f]{12,40})")
_AROUND: Final = " \t\r\n\"'`[](){}<>.,;:"
_LONGEST: Final = 200


def ref_of(body: str) -> str:
    """Return the name under which a stored text is read again, from its `body_id`."""
    return REF_PREFIX + body[:REF_DIGITS]


def name_in(ref: str) -> str | None:
    """Return the 12 to 40 digits with which the name of a stored text begins; None where it is no ref."""
    found = _NAMED.fullmatch(ref)
    return found[1] if found else None


def copied(ref: str) -> str:
    """Return a ref without what a model may copy with it: `ref=`, quotes, brackets, white space, capitals."""
    bare = ref[:_LONGEST].strip(_AROUND).lower()
    return bare.removeprefix("ref=").removeprefix("ref:").strip(_AROUND)
