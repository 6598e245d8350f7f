"""The conversation that every recorded SDK holds: twenty questions, the tools, and what the model replies.

The replies are fixed, and odd where real models are odd: arguments with spaces, escapes, floats, long
integers and unsorted keys, calls with and without text beside them, reasoning, texts that begin and
end with white space. Each SDK asks by its own means; this file knows none of them, and imports nothing
that an environment of theirs may lack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Reply = dict[str, Any]

SYSTEM = "You plan trips. Use the tools; never guess a price.\nAnswer in the language of the question."


def weather(city: str, days: int = 1) -> dict[str, Any]:
    """Tell the weather of a city for some days."""
    return {"city": city, "days": days, "sky": "☀ heiter", "degrees": [21.5, 19.0][:days]}


def convert(amount: float, source: str, target: str, reference: int = 0) -> str:
    """Convert an amount of money from one currency into another."""
    return f"{amount:.2f} {source} = {amount * 2:.2f} {target} (ref {reference})"


def book(route: list[str], traveller: dict[str, Any], flexible: bool = False) -> dict[str, Any]:
    """Book a route for a traveller."""
    return {"booked": route, "for": traveller, "flexible": flexible, "price": None, "seats": []}


def note(text: str) -> str:
    """Write a note down."""
    return f'noted: "{text}"'


def clock() -> str:
    """Tell the time."""
    return "2024-05-01T12:00:00Z"


TOOLS: list[Callable[..., Any]] = [weather, convert, book, note, clock]

_STRING = {"type": "string"}
_PARAMETERS: dict[str, dict[str, Any]] = {
    "weather": {"city": _STRING, "days": {"type": "integer"}},
    "convert": {"amount": {"type": "number"}, "source": _STRING, "target": _STRING, "reference": {"type": "integer"}},
    "book": {
        "route": {"type": "array", "items": _STRING},
        "traveller": {"type": "object"},
        "flexible": {"type": "boolean"},
    },
    "note": {"text": _STRING},
    "clock": {},
}

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": tool.__name__,
            "description": tool.__doc__,
            "parameters": {"type": "object", "properties": _PARAMETERS[tool.__name__]},
        },
    }
    for tool in TOOLS
]
"""The tools as the API takes them, for SDKs that do not make this themselves."""


def _calls(*calls: tuple[str, str, str], **fields: Any) -> Reply:
    """Return a reply that calls tools, each given as id, name and arguments."""
    made = [
        {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call, name, arguments in calls
    ]
    return {"role": "assistant", "content": None, **fields, "tool_calls": made}


def _says(text: str, **fields: Any) -> Reply:
    return {"role": "assistant", "content": text, **fields}


_BOOKING = (
    '{"traveller": {"name": "Zoë \\"Z\\" O\'Neil", "age": 41.0, "ids": {"b": [1, 2.50, null], "a": {}}, '
    '"path": "C:\\\\tmp"}, "route": ["Bern", "Wien"], "flexible": true}'
)

TURNS: list[tuple[str, list[Reply]]] = [
    ("Hello! What can you do?", [_says("I plan trips: weather, money, bookings, notes.")]),
    (
        "How is the weather in Zürich?",
        [_calls(("call_1", "weather", '{"city":"Zürich"}')), _says("Sunny, 21.5 degrees.")],
    ),
    (
        "And in 東京, for two days?",
        [
            _calls(("call_2", "weather", '{"days": 2, "city": "\\u6771\\u4eac"}'), content=""),
            _says("東京は晴れです。😀"),
        ],
    ),
    (
        "Compare Paris and Oslo.",
        [
            _calls(
                ("call_3a", "weather", '{ "city" : "Paris" ,\n  "days" : 1 }'),
                ("call_3b", "weather", '{"city":"Oslo","days":2}'),
                content="I shall look at both.",
            ),
            _says("\n\nParis: 21.5\nOslo: 21.5, then 19.0\n"),
        ],
    ),
    ("Thanks.", [_says("You are welcome! ")]),
    (
        "How much is 1 euro, and how much are 1000?",
        [
            _calls(
                ("call_5a", "convert", '{"amount":1.0,"source":"EUR","target":"USD"}'),
                ("call_5b", "convert", '{"target":"USD","source":"EUR","amount":1e3,"reference":0}'),
                ("call_5c", "convert", '{"amount":0.1,"source":"EUR","target":"¥"}'),
            ),
            _says("2, and 2000."),
        ],
    ),
    ("What time is it?", [_calls(("call_6", "clock", "{}")), _says("Noon.")]),
    (
        "Book Bern – Wien for Zoë.",
        [
            _calls(("call_7", "book", _BOOKING), reasoning_content="She wants a booking. I have all that I need."),
            _says("Booked.", reasoning_content="It worked."),
        ],
    ),
    ("Why the train?", [_says("It is *faster*.\n\n```\nBern -> Wien\n```", reasoning_content="Be short.")]),
    (
        "Note that, then tell me the weather there, then the price in euro.",
        [
            _calls(("call_9a", "note", '{"text":"train: Bern → Wien\\n\\ttabs & <tags>"}')),
            _calls(("call_9b", "weather", '{"city":"Wien","days":2}'), content="Noted."),
            _calls(
                ("call_9c", "convert", '{"amount":99.90,"source":"CHF","target":"EUR","reference":9223372036854775809}')
            ),
            _says("All done: noted, sunny, 199.80."),
        ],
    ),
    ("Continue.", [_says("What is next?")]),
    ("Continue.", [_says("What is next?")]),
    (
        "Two notes, please: a and b.",
        [_calls(("call_12a", "note", '{"text":"a"}'), ("call_12b", "note", '{"text":"b"}')), _says("Both noted.")],
    ),
    ("你好,明天呢?", [_says("明天也是晴天。")]),
    (
        "The time again, twice.",
        [_calls(("call_14a", "clock", "{}"), ("call_14b", "clock", "{ }")), _says("Noon, and noon.")],
    ),
    ("A long answer?", [_says(" ".join(f"Step {number}." for number in range(1, 41)))]),
    ("  Leading spaces, and a trailing line\n", [_says("Seen.")]),
    (
        "The same city as at first.",
        [_calls(("call_17", "weather", '{"city":"Zürich"}')), _says("Sunny, 21.5 degrees.")],
    ),
    ("JSON, please.", [_says('{"sky": "clear", "degrees": 21.50}')]),
    ("Goodbye.", [_says("Goodbye, and a good journey!")]),
]
"""The questions, each with the replies that lead to its answer: calls first, a text last."""

QUESTIONS = [question for question, _ in TURNS]
REPLIES = [reply for _, replies in TURNS for reply in replies]


def call(name: str, arguments: dict[str, Any]) -> Any:
    """Call a tool by name."""
    return next(tool for tool in TOOLS if tool.__name__ == name)(**arguments)
