"""The example policies: each is valid, has an effect, says what it is for, and harms no conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import load
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming import Entry, PlanningContext, Trigger, plan
from proxy.trimming.planner import UNKNOWN_PRICES
from tests.support.command import run_command
from tests.support.examples import FILES, serving
from tests.support.replay import Recording, difference, unsteady
from tests.support.upstream import Upstream

ROOT = Path(__file__).parents[1]
TRAJECTORIES = ROOT / "tests" / "data" / "trajectories"
REPLAYED = ("tau-airline-t46-r3", "smile-53930")
SAID = ("What it does", "When to use it", "What it costs", "What it loses", "palimpsest serve --config")

pytestmark = pytest.mark.parametrize("example", FILES, ids=lambda path: path.stem)


def commented(text: str) -> dict[str, Any]:
    """Return the policies in the comment under `policies:`."""
    lines = text.partition("\n#   policies:\n")[2].split("\n")
    taken: list[str] = []
    for line in lines:
        if not line.startswith("#     "):
            break
        taken.append(line.removeprefix("#     "))
    policies: dict[str, Any] = yaml.safe_load("\n".join(taken))
    return policies


def test_it_is_valid_and_every_setting_has_an_effect(
    example: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    code, out, errors = run_command(monkeypatch, capfdbinary, "check", "--json", "--config", example)
    assert (code, errors) == (0, "")
    told = json.loads(out)
    for warning in told["warnings"]:  # a policy that is used only by name is announced as one
        by_name = re.search(r"policies\.([\w-]+): .+ used only if a request names it", warning)
        assert by_name, warning
        assert f"# Used only by name: X-Context-Policy: {by_name[1]}." in example.read_text("utf-8")
    assert told["merged"]["default"]["match"] == {"models": ["*"], "tenants": ["*"]}
    assert all(policy["edits"] for policy in told["merged"].values())


def test_it_says_what_it_is_for(example: Path) -> None:
    text = example.read_text("utf-8")
    assert f"]({example.name})" in (example.parent / "README.md").read_text("utf-8")
    assert all(words in text for words in SAID)
    assert f"examples/policies/{example.name}" in text
    assert max(map(len, text.split("\n"))) <= 120


def test_the_policy_for_one_tenant_in_its_comment_is_valid(example: Path, tmp_path: Path) -> None:
    text = example.read_text("utf-8")
    more = commented(text)
    assert more
    data = yaml.safe_load(text)
    data["policies"] = {**more, **data["policies"]}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False), "utf-8")
    policies = load(file).policies
    assert [name for name in policies if "anne" in policies[name].match.tenants] == ["anne"]
    base = policies[str(policies["anne"].extends)]
    assert policies["anne"].version != base.version


def test_deduplication_never_makes_a_trim_larger(example: Path) -> None:
    """If an older copy is trimmed and the newer one restored, another edit trims that in the same trim."""
    policy = load(example).policies["default"]
    policy = policy.model_copy(update={"trigger": Trigger(every_request=True)})
    output = "\n".join(f"order {at}: shipped from depot {at % 7} to customer {at * 31}" for at in range(200))
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello."},  # a first user message may be kept, with its round
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Look at all the orders."},
    ]
    for at in range(20):
        arguments = {"page": at, "states": ["shipped", "returned", "lost"], "since": f"2024-01-{at + 1:02}"}
        function = {"name": "list_orders", "arguments": json.dumps(arguments)}  # a stub is longer than a pointer
        call = {"id": f"c{at}", "type": "function", "function": function}
        said.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = output if at % 4 == 0 else f"page {at}\n{output}"
        said.append({"role": "tool", "tool_call_id": f"c{at}", "content": text})
        said += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "Go on."}]
    messages = [ChatMessage.of(each) for each in said]
    log = [
        Entry(message=each, tokens=len(each.raw) // 4, ref=f"ref_{at}", position=at) for at, each in enumerate(messages)
    ]
    known = PlanningContext(count=lambda message: len(message.raw) // 4)
    edits = tuple(edit for edit in policy.edits if edit.type != "deduplicate_results")
    alone = plan(log, policy.model_copy(update={"edits": edits}), "p", known)
    both = plan(log, policy, "p", known)
    assert both.trimmed
    assert both.trimmed == alone.trimmed
    assert both.tokens_sent <= alone.tokens_sent
    reasons = [change.reason for change in both.made]
    assert not any("does not stand whole" in reason for reason in reasons)


@pytest.fixture(scope="module")
def provider() -> Iterator[Upstream]:
    with pytest.MonkeyPatch.context() as patch, Upstream() as upstream:
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield upstream


def test_recorded_sessions_pass_through_it(example: Path, provider: Upstream, tmp_path: Path) -> None:
    """Nothing is refused or lost, and between two trims each request extends the previous one."""
    with serving(example.stem, provider, tmp_path) as proxy:
        for name in REPLAYED:
            recording = Recording.read(TRAJECTORIES / f"{name}.json")
            provider.forget()
            tools = {"tools": recording.tools} if recording.tools else {}
            for turn in recording.turns(append=False):
                provider.load("s", [turn.reply])
                answer = proxy.chat(name, turn.messages, "script:s+lenient", **tools)
                assert answer.status_code == 200, answer.text
                assert answer.headers.get("x-context-warning", UNKNOWN_PRICES) == UNKNOWN_PRICES
            assert all(request.refused is None for request in provider.log)
            assert difference(proxy.messages(name), recording) is None
            receipts = proxy.exchanges(name)
            assert unsteady([request.body for request in provider.log], receipts) is None
