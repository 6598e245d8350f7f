"""What holds of every edit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal, get_args

import orjson
import pytest
from msgspec.structs import replace

from proxy.dialects import Message
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import ChatMessage
from proxy.store.cuts import Decided, decode_cut, encode_cut
from proxy.trimming.cost import Costs
from proxy.trimming.draft import Draft
from proxy.trimming.edits import Edit
from proxy.trimming.edits.edit import Shortened, ToolOutputEdit
from proxy.trimming.model import Cut, Entry, PlanningContext
from proxy.trimming.policy import Policy
from proxy.trimming.settings import Trigger
from tests.trimming.edits.golden import Case
from tests.trimming.growing import check, hidden, requests
from tests.trimming.random_policies import PRICES, SETTINGS, chances, policy

# -------------------------------------------------------------------------------------- every_edit

DATA = Path(__file__).parents[2] / "data"
SESSIONS = sorted((DATA / "trajectories").glob("*.json"))
DIRTY = sorted((DATA / "dirty").glob("*.json"))
MOST = 12
"""Requests of one session at most: of a longer one not every request is planned."""
POLICIES = 12


@cache
def count(message: Message) -> int:
    """Return the tokens of a message, about."""
    return 4 + len(message.raw) // 4


HALF = r"abc\ud83d"
"""Half of an emoji, escaped: JSON may say it, and no text that is sent can hold it."""


def _call(at: int, arguments: str) -> dict[str, object]:
    return {"id": f"c{at}", "type": "function", "function": {"name": f"read {HALF}", "arguments": arguments}}


def _with_halves() -> tuple[Entry, ...]:
    """Return a session whose every text and argument holds half an emoji, escaped."""
    long = "x y z " * 60
    log: list[dict[str, object]] = []
    for at in range(8):
        document = f'{{"name":"{HALF}","id":"Z-\\ud83d{at}","path":"src/{at}\\uDE00.c","text":"{long}"}}'
        shapes = (document, f"broken {document}", document.replace("}", ""), json.dumps({"inner": document}))
        calls = [_call(at, f'{{"path":"{HALF}","id":"K-{at}\\ud83d","text":"Error: {HALF} {long}"}}')]
        log += [
            {"role": "user", "content": f'{{"note":"{HALF}-1x","n":"{at}"}}'},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c{at}", "content": shapes[at % 4]},
            {"role": "assistant", "content": f'{{"id":"{HALF}-2x"}}'},
        ]
    made = [ChatMessage(orjson.dumps(each)) for each in log]
    return tuple(
        Entry(message=each, tokens=count(each), ref=f"ref_{at:016}", position=at) for at, each in enumerate(made)
    )


@cache
def session(path: Path) -> tuple[tuple[Message, ...], tuple[Entry, ...]]:
    """Return the instructions and the log of a recorded session."""
    messages = [ChatMessage.of(each) for each in json.loads(path.read_text("utf-8"))["messages"]]
    lead = next(at for at, each in enumerate(messages) if each.role not in {"system", "developer"})
    log = [
        Entry(message=each, tokens=count(each), ref=f"ref_{position:016}", position=position)
        for position, each in enumerate(messages[lead:])
    ]
    return tuple(messages[:lead]), tuple(log)


def _stops(log: tuple[Entry, ...]) -> list[int]:
    """Return where the requests of a session end: before each reply, and at the end; at most `MOST`."""
    stops = [entry.position for entry in log if entry.message.role == "assistant" and entry.position]
    stops.append(len(log))
    step = max(1, -(-len(stops) // MOST))
    return stops[::-step][::-1]


def _hold(path: Path, trimming: Policy, chance: Random) -> int:
    """Check a policy on a recorded session; return how often the cut moved and something was changed."""
    return _holds(*session(path), trimming, chance)


def _holds(instructions: tuple[Message, ...], log: tuple[Entry, ...], trimming: Policy, chance: Random) -> int:
    """Check a policy on a session; return how often the cut moved and something was changed."""
    known = PlanningContext(
        count=count,
        fixed_tokens=sum(map(count, instructions)),
        context_window=chance.choice([None, _size(log)]),
        agent=chance.choice([None, "Coder"]),
        prices=chance.choice(PRICES),
        scale=chance.choice([1.0, 0.7, 1.3]),
    )
    some = [replace(entry, is_internal=chance.random() < 0.1) for entry in log]
    recalling = chance.choice([0, 0.2])
    some = [
        replace(entry, hidden=hidden(entry, known))
        if entry.message.role == "assistant" and chance.random() < recalling
        else entry
        for entry in some
    ]
    asking = [chance.random() < 0.1 for _ in range(7)]
    made = 0
    for request in requests(some, _stops(log), trimming, known, idle=[0, 0, 400, 0, 4000], asking=asking):
        check(request, trimming, known, instructions)
        for message in request.plan.view:
            orjson.loads(message.raw)
        if request.plan.trimmed:
            assert request.plan.cut is not None
            _is_stored(request.plan.cut)
        made += bool(request.plan.made)
    return made


def _is_stored(cut: Cut) -> None:
    """Check that a cut comes back from the store as it is."""
    decided = Decided(changes=cut.changes, gaps=cut.gaps, summary=cut.summary, account=cut.account)
    assert decode_cut(encode_cut(decided), CHAT) == decided


def _size(log: tuple[Entry, ...]) -> int:
    return max(60, sum(entry.tokens for entry in log))


def test_every_edit_has_settings_to_try() -> None:
    assert set(SETTINGS) == {each.model_fields["type"].default for each in get_args(get_args(Edit)[0])}


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_edit_alone(kind: str) -> None:
    chance = chances(f"alone {kind}")
    for path in SESSIONS:
        _hold(path, policy(chance, _size(session(path)[1]), [kind]), chance)


@pytest.mark.no_cover  # what they happen to reach is tested elsewhere
@pytest.mark.parametrize("seed", range(POLICIES))
def test_a_random_policy(seed: int) -> None:
    chance = chances(f"together {seed}")
    moved = 0
    for path in SESSIONS:
        moved += _hold(path, policy(chance, _size(session(path)[1])), chance)
    assert moved


@pytest.mark.no_cover  # what they happen to reach is tested elsewhere
@pytest.mark.parametrize("path", DIRTY, ids=lambda path: path.stem)
def test_a_broken_session(path: Path) -> None:
    chance = chances(f"broken {path.stem}")
    for _ in range(4):
        _hold(path, policy(chance, _size(session(path)[1])), chance)


@pytest.mark.no_cover  # what they happen to reach is tested elsewhere
@pytest.mark.parametrize("kind", SETTINGS)
def test_half_an_emoji(kind: str) -> None:
    chance = chances(f"halves {kind}")
    log = _with_halves()
    for _ in range(4):
        _holds((), log, policy(chance, _size(log), [kind]), chance)


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "clear_tool_results", "keep": 0},
        {"type": "clear_tool_results", "keep": 0, "clear_inputs": True, "fold_calls": True, "digest_chars": 900},
        {"type": "summarize", "mode": "statistics", "min_messages": 2, "keep_rounds": 1},
    ],
    ids=["results", "inputs", "summary"],
)
def test_half_an_emoji_in_what_is_read_of_a_text(edit: dict[str, object]) -> None:
    whole = {"trigger": {"every_request": True}, "keep": {"rounds": 0}, "edits": [edit]}
    assert _holds((), _with_halves(), Policy.model_validate(whole), chances("halves"))


# -------------------------------------------------------------------------------------------- edit


class SayLess(ToolOutputEdit, frozen=True):
    """Replaces every result by one text."""

    type: Literal["say_less"] = "say_less"
    """Which one."""
    text: str = "less"
    """What is said instead."""

    def shorten(self, message: Message, entry: Entry, asked: str = "") -> Shortened | None:  # noqa: ARG002
        if message.text == self.text:
            return None
        return Shortened(message=message.replacing("content", f"{self.text}"), reason=f"see {entry.ref}")


def draft(*before: str, pin: str = "^$never") -> Case:
    return Case({"before": list(before), "pin": [{"regex": pin}]})


LOG = ("user a long question", "assistant | a f", "tool a a long result", "assistant | f()", "function f another one")


def test_it_asks_for_each_result_of_both_forms_and_for_nothing_else() -> None:
    changes = list(SayLess().apply(draft(*LOG).draft()))
    assert [(change.position, change.reason) for change in changes] == [(2, "see ref_2"), (4, "see ref_4")]
    assert [(change.edit, change.tokens_before, change.tokens_after) for change in changes] == [
        ("say_less", 23, 14),
        ("say_less", 21, 14),
    ]


def test_what_is_protected_is_not_asked_for() -> None:
    changes = list(SayLess().apply(draft(*LOG, pin="long result").draft()))
    assert [change.position for change in changes] == [4]


def test_what_costs_no_less_stays() -> None:
    assert list(SayLess(text="something much longer than that").apply(draft(*LOG).draft())) == []


def test_what_is_short_already_stays() -> None:
    before = draft(*LOG).draft()
    assert list(SayLess().apply(before.after(list(SayLess().apply(before))))) == []


@pytest.mark.no_cover  # what they happen to reach is tested elsewhere
@pytest.mark.parametrize("seed", range(POLICIES))
def test_what_is_not_tried_out_would_not_have_paid(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = chances(f"not tried {seed}")
    may_pay, answers = Costs.may_pay, list[bool]()

    def asked(costs: Costs, starts: Iterable[int], tokens: Sequence[int]) -> bool:
        answers.append(may_pay(costs, starts, tokens))
        return answers[-1]

    for path in SESSIONS:
        log = session(path)[1]
        kinds = ["clear_tool_results", *chance.sample(["compact_tool_output", "truncate_tool_output"], seed % 3)]
        trimming = policy(chance, _size(log), kinds)
        trimming = trimming.model_copy(update={"trigger": Trigger(cost="auto"), "target": None})
        known = PlanningContext(count=count, prices=PRICES[seed % 3], context_window=_size(log))
        monkeypatch.setattr(Costs, "may_pay", asked)
        plans = [request.plan for request in requests(log, _stops(log), trimming, known)]
        monkeypatch.setattr(Costs, "may_pay", lambda *_: True)
        assert [request.plan for request in requests(log, _stops(log), trimming, known)] == plans
    assert False in answers


@pytest.mark.no_cover  # what they happen to reach is tested elsewhere
@pytest.mark.parametrize("seed", range(POLICIES))
def test_no_trim_leaves_fewer_tokens_than_at_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = chances(f"at best {seed}")
    first_place, least, compared = Costs.first_place, list[Sequence[int]](), 0

    def asked(_: Costs, __: Iterable[int], tokens: Sequence[int]) -> bool:
        least.append(tokens)
        return True

    def found(costs: Costs, starts: Iterable[int], made: Draft) -> int | None:
        nonlocal compared
        compared += any(least[-1])
        assert all(fewest <= left for fewest, left in zip(least[-1], made.tokens, strict=True))
        return first_place(costs, starts, made)

    monkeypatch.setattr(Costs, "may_pay", asked)
    monkeypatch.setattr(Costs, "first_place", found)
    for path in SESSIONS * 2:
        log = session(path)[1]
        some = ["clear_tool_results", "compact_tool_output", "truncate_tool_output"]
        trimming = policy(chance, _size(log), chance.choices(some, k=chance.randint(1, 4)))
        trimming = trimming.model_copy(update={"trigger": Trigger(cost="auto")})
        known = PlanningContext(count=count, context_window=_size(log))
        assert list(requests(log, _stops(log), trimming, known))
    assert compared
