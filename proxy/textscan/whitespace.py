"""What a terminal shows and a model need not read: escapes, overwritten progress, blanks.

Nothing that says anything goes: of a line that was written over and over the last state stays, and
whatever differs from it by more than numbers and bars. It knows no kind of output.
"""

from __future__ import annotations

import re
from typing import Final

_WIDE: Final = 80
"""So many blanks in a row are no layout."""

# Colours, cursor movements, titles of windows; a link (8) holds an address and stays. Each repetition ends
# where another class of characters begins, so that a search is one pass.
_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\](?!8;)[^\x07\x1b\n]*(?:\x07|\x1b\\)|[()][0-9A-B])")
_BLANKS: Final = re.compile(rf"(?<! ) {{{_WIDE},}}")
_BLANK_ENDS: Final = (" \n", "\t\n")
_EMPTY_LINES: Final = re.compile(r"(?<!\n)\n{3,}")
_STATE: Final = re.compile(r"[\d.,:/%|#=<>~*+\-\s\\━─╸╺█▉▊▋▌▍▎▏░▒▓•●○⠀-⣿]+")
"""What changes from one state of a progress bar to the next."""
_UNIT: Final = re.compile(r"(?<=#)[A-Za-z?]{1,5}(?=#|$)")
"""A unit of measure between two numbers (kB, MiB, eta, s)."""


def tidied(text: str) -> str:
    """Return the text without escapes, overwritten progress, trailing blanks and runs of empty lines."""
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    if "\r" in text or any(end in text for end in _BLANK_ENDS) or text.endswith((" ", "\t")):
        lines = [line.rstrip(" \t\r") for line in text.split("\n")]
        text = "\n".join([_last_state(line) if "\r" in line else line for line in lines])
    if "\n\n\n" in text:
        text = _EMPTY_LINES.sub("\n\n", text)
    return _BLANKS.sub(" ", text) if " " * _WIDE in text else text


def _last_state(line: str) -> str:
    """Return a line without the states that were overwritten by one of the same kind."""
    states = line.split("\r")
    kinds = [_kind(state) for state in states]
    kept = [
        state
        for place, state in enumerate(states)
        if state and (place + 1 == len(states) or kinds[place] != kinds[place + 1])
    ]
    return "\r".join(kept)


def _kind(state: str) -> str:
    return _UNIT.sub("", _STATE.sub("#", state)).replace("#", "")
