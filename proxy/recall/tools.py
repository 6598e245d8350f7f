"""The tools of the proxy's own: what the model is told of them, and when it is told.

Their definitions are constant bytes after the client's own tools, in one order, and whether they are offered
follows from the request and the settings alone: so the beginning of every request stays what it was.
Nothing is required, and what is not given is left out. Among strict functions the schemas are as strict mode
wants them: every property required, none beside them, without unions of types, which some providers refuse;
an empty string then stands for what is not given. What the tools do is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from proxy.config import VirtualToolSettings
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.jsontext import is_object

RECALL: Final = "recall_context"
COMPRESS: Final = "compress_chat_history"

MOST_TOOLS: Final = 128
"""Tools that a request may offer; with more it is refused."""
_LEAVES_ROOM: Final[dict[str, tuple[Any, ...]]] = {
    "tool_choice": (None, "auto", "required"),
    "n": (None, 1),
    "functions": (None, []),
    "function_call": (None,),
}
"""Fields of a request, and what they say where the model may call any tool, and is asked for one reply."""


def _definition(name: str, description: str, properties: dict[str, str], *, strict: bool) -> bytes:
    """Return the JSON text of a tool; `{unset}` in `properties` says how one is not given."""
    unset = "Empty" if strict else "Leave out"
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {
            name: {"type": "string", "description": told.format(unset=unset)}
            for name, told in properties.items()
        },
    }
    if strict:
        parameters["required"] = list(properties)
    parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if strict:
        function["strict"] = True
    return orjson.dumps({"type": "function", "function": function})


_TOOLS: Final = {
    RECALL: (
        (
            "Read again what was shortened or left out of this conversation. Give either `ref`, to get the "
            "original of something that is marked with a ref, or `query`, to search the whole conversation; "
            "the answer has excerpts with their refs."
        ),
        {
            "ref": "A ref as it stands in the conversation, such as ref_0123456789abcdef. {unset} to search.",
            "query": "Words, names or ids to look for. {unset} where you give a ref.",
            "lines": "With a ref: only these lines, such as 10-20. {unset} for all.",
            "grep": "With a ref: only lines that match this regular expression (RE2). {unset} for all.",
        },
    ),
    COMPRESS: (
        (
            "Ask for the older part of this conversation to be replaced by a summary. Call it when much lies "
            "behind that is not needed word for word any more, such as at the end of a part of the task. It "
            "takes effect with a later request."
        ),
        {"reason": "Why now, in a few words."},
    ),
}
"""What is said of each tool, and of each of its properties."""
_LAX: Final = {name: _definition(name, *told, strict=False) for name, told in _TOOLS.items()}
_STRICT: Final = {name: _definition(name, *told, strict=True) for name, told in _TOOLS.items()}


def offered(
    request: ChatRequest, settings: VirtualToolSettings, *, stateless: bool = False, off: bool = False
) -> tuple[str, ...]:
    """Return the names of the tools that are offered with a request, in order; none where it cannot take any.

    Not where nothing is stored (`stateless`) or trimmed (`off`), the request chooses a tool itself or none,
    wants several choices, speaks of `functions`, or offers no tools (unless the settings say so); and not a
    tool whose name is one of the client's.
    """
    switches = {RECALL: settings.recall_context, COMPRESS: settings.compress_chat_history}
    wanted = [name for name, on in switches.items() if on]
    if not wanted or stateless or off or not (request.has_tools or not settings.only_with_tools):
        return ()
    if any(_field(request, name) not in fine for name, fine in _LEAVES_ROOM.items()):
        return ()
    theirs = _tools_of(request)
    taken = {_name_of(tool) for tool in theirs}
    names = tuple([name for name in wanted if name not in taken])
    return names if len(theirs) + len(names) <= MOST_TOOLS else ()


def with_tools(request: ChatRequest, names: Sequence[str]) -> bytes | None:
    """Return the JSON text of `tools` with these of ours after the client's, whose bytes stay.

    None where `names` is empty: then it is what the client sent. Where all functions of the client's are
    strict, ours are: some providers take strict functions only beside others.
    """
    if not names:
        return None
    theirs = _tools_of(request)
    functions = [tool["function"] for tool in theirs if is_object(tool) and is_object(tool.get("function"))]
    strict = bool(functions) and all(function.get("strict") is True for function in functions)
    ours = b",".join([(_STRICT if strict else _LAX)[name] for name in names])
    if not theirs or request.tools is None:
        return b"[%b]" % ours
    end = request.tools.rindex(b"]")
    return b"%b,%b%b" % (request.tools[:end], ours, request.tools[end:])


def _tools_of(request: ChatRequest) -> list[Any]:
    return orjson.loads(request.tools) if request.tools is not None else []


def _name_of(tool: Any) -> Any:
    """Return the name of a tool of the client's, whatever kind it is; None where it has none."""
    if not is_object(tool):
        return None
    inner = next((tool[kind] for kind in ("function", "custom") if is_object(tool.get(kind))), tool)
    name = inner.get("name")
    return name if isinstance(name, str) else None


def _field(request: ChatRequest, name: str) -> Any:
    """Return the value of a field of the request; None where it says nothing."""
    text = request.fields.get(name)
    return None if text is None else orjson.loads(text)
