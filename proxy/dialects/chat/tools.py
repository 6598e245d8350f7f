"""Tools of the proxy's own, offered beside the client's.

Their definitions are constant bytes after the client's own tools, in one order, and whether they are offered
follows from the request alone: the beginning of every request stays what it was. Nothing is required. Among
strict functions the schemas are as strict mode wants them: every property required, none beside them, no
unions of types; an empty string then stands for what is not given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import orjson
from msgspec import Struct

from proxy.dialects.base import ToolDefinition
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.jsontext import is_object

MOST_TOOLS: Final = 128
"""Tools that a request may offer; with more it is refused."""
_LEAVES_ROOM: Final[dict[str, tuple[Any, ...]]] = {
    "tool_choice": (None, "auto", "required"),
    "n": (None, 1),
    "functions": (None, []),
    "function_call": (None,),
}
"""Fields of a request, and what they say where the model may call any tool, and is asked for one reply."""


class ToolOffer(Struct, frozen=True, kw_only=True):
    """The tools of a request with the proxy's own."""

    names: tuple[str, ...]
    """Those of the proxy's own; empty where the request leaves no room for them."""
    tools: bytes | None
    """The JSON text of all of them; None where there are none."""


def offer_tools(request: ChatRequest, own: Sequence[ToolDefinition]) -> ToolOffer:
    """Return the tools to send: the client's, whose bytes stay, then these.

    None of these where the request chooses a tool itself or none, wants several choices, speaks of
    `functions` or has too many tools; and not a tool whose name is one of the client's. Where all functions
    of the client's are strict, these are: some providers take strict functions only beside others.
    """
    plain = ToolOffer(names=(), tools=request.tools)
    for name, fine in _LEAVES_ROOM.items():
        text = request.fields.get(name)
        if (None if text is None else orjson.loads(text)) not in fine:
            return plain
    theirs: list[Any] = orjson.loads(request.tools) if request.tools is not None else []
    taken = {_name_of(tool) for tool in theirs}
    added = [tool for tool in own if tool.name not in taken]
    if not added or len(theirs) + len(added) > MOST_TOOLS:
        return plain
    functions = [tool["function"] for tool in theirs if is_object(tool) and is_object(tool.get("function"))]
    strict = bool(functions) and all(function.get("strict") is True for function in functions)
    ours = b",".join([_definition(tool, strict=strict) for tool in added])
    names = tuple([tool.name for tool in added])
    if not theirs or request.tools is None:
        return ToolOffer(names=names, tools=b"[%b]" % ours)
    end = request.tools.rindex(b"]")
    return ToolOffer(names=names, tools=b"%b,%b%b" % (request.tools[:end], ours, request.tools[end:]))


@lru_cache
def _definition(tool: ToolDefinition, *, strict: bool) -> bytes:
    """Return the JSON text of a tool."""
    unset = "Empty" if strict else "Leave out"
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {
            name: {"type": "string", "description": told.format(unset=unset)} for name, told in tool.parameters
        },
    }
    if strict:
        parameters["required"] = [name for name, _ in tool.parameters]
    parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": parameters}
    if strict:
        function["strict"] = True
    return orjson.dumps({"type": "function", "function": function})


def _name_of(tool: Any) -> Any:
    """Return the name of a tool of the client's, whatever kind it is; None where it has none."""
    if not is_object(tool):
        return None
    inner = next((tool[kind] for kind in ("function", "custom") if is_object(tool.get(kind))), tool)
    name = inner.get("name")
    return name if isinstance(name, str) else None
