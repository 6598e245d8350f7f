"""The place in a list, newest first, after which a page begins."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from proxy.errors import InvalidRequest
from proxy.store.plain import is_plain

_LARGEST: Final = 2**63


class Cursor(Struct, frozen=True, kw_only=True):
    """Time and name of the last row that was shown; rows of one time are told apart by name."""

    time: int
    name: str

    def __str__(self) -> str:
        """Return it as clients get it and send it back."""
        return f"{self.time}.{self.name}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Read what `str` made.

        Raises:
            InvalidRequest: it is something else.
        """
        time, dot, name = text.partition(".")
        if (
            dot
            and time.isascii()
            and time.isdecimal()
            and len(time) < 20
            and int(time) < _LARGEST
            and is_plain(name)
        ):
            return cls(time=int(time), name=name)
        raise InvalidRequest("after must be the `next` of the page before, unchanged.", param="after")
