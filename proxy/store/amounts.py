"""Numbers that every database holds and every client can be shown, as the records of an export have them."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

LIMIT: Final = 2**31
Amount: TypeAlias = Annotated[int, Meta(ge=0, lt=LIMIT)]
"""Of messages or tokens."""
Time: TypeAlias = Annotated[int, Meta(ge=0, lt=253_402_300_800_000)]
"""Milliseconds since 1970, up to the end of the year 9999: later ones cannot be shown."""
