"""What stands between two contents of one reply, of which the second knew nothing of being the second.

It does not know what happened between them.
"""

from __future__ import annotations

from typing import Any, Final

from proxy.dialects.shapes import is_array, is_object

BLANK_LINE: Final = "\n\n"


def gap(before: Any, after: Any) -> str:
    """Return what keeps the text `after` apart from the content `before`: a blank line, or nothing.

    Nothing where either has white space there, has no text there, or `after` comes in parts, which stand
    apart by themselves.
    """
    end = _end(before)
    if not end or not isinstance(after, str) or not after:
        return ""
    return "" if end[-1].isspace() or after[0].isspace() else BLANK_LINE


def _end(content: Any) -> str:
    """Return the text that a content ends in; empty where it ends in something else."""
    if is_array(content) and content:
        content = content[-1]
        content = content.get("text") if is_object(content) else None
    return content if isinstance(content, str) else ""
