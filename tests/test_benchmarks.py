"""The benchmarks run: each program compiles, each subject answers, and each request is as documented.

No test checks a measured time.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest

from benchmarks import against, appends, bodies, cases, first, memory, profiling, prove, report, subjects, wrong_prices
from benchmarks.compiling import NoCompiler, Programs, compile_programs
from benchmarks.load import Plan, run
from benchmarks.subjects import Subject
from proxy.backtest import Backtest, PolicyStrategy, price_class, read_files
from proxy.backtest.histories import of_messages
from proxy.config import BUILT_IN
from proxy.tokens import TokenCounter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks need Linux: epoll and /proc")

EFFORT = cases.Effort(rounds=1, seconds=0.01)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    try:
        return compile_programs(tmp_path_factory.mktemp("programs"))
    except NoCompiler as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def upstream(programs: Programs, folder: Path) -> Iterator[Subject]:
    with subjects.upstream(programs, folder) as running:
        yield running


@pytest.fixture(scope="module")
def palimpsest(upstream: Subject, folder: Path) -> Iterator[Subject]:
    with subjects.palimpsest(upstream, folder, appends.POLICIES) as running:
        yield running


def told(subject: Subject, path: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{subject.port}{path}", timeout=30) as answer:
        return json.load(answer)


def kinds(subject: Subject, session: str) -> list[str]:
    """Return the context kinds of a session's requests, the oldest first."""
    exchanges = told(subject, f"/sessions/{session}/exchanges?limit=1000")["data"]
    assert {one["status"] for one in exchanges} == {"complete"}
    return [one["kind"] for one in exchanges][::-1]


def test_every_subject_answers_json_and_streams(
    programs: Programs, folder: Path, upstream: Subject, palimpsest: Subject
) -> None:
    with (
        subjects.passthrough(upstream, folder, subjects.PASSTHROUGH) as direct,
        subjects.passthrough(upstream, folder, subjects.CLIENT) as client,
    ):
        everybody = [upstream, direct, client, palimpsest]
        chosen = [cases.Case("small", 2, stream=False), cases.Case("small", 2, stream=True)]
        records = list(cases.measure(programs, everybody, chosen, EFFORT, folder, lambda _: None))
    assert [record["name"] for record in records] == ["small-2-json", "small-2-stream"]
    for record in records:
        assert list(record["subjects"]) == [
            name for name in subjects.ALL if name not in {subjects.POSTGRES, subjects.LITELLM}
        ]
        for measured in record["subjects"].values():
            assert measured["rounds"][0]["requests"] >= 2
            assert 0 < measured["first_byte_ms"]["p50"] <= measured["latency_ms"]["p50"]
        assert set(record["compared"]) == set(record["subjects"]) - {subjects.PALIMPSEST}
    # The history was stored once, and each request branched off at the same place.
    for connection in ("small-00000000", "small-00000001"):
        assert kinds(palimpsest, connection)[0] == "first"
        assert set(kinds(palimpsest, connection)[1:]) == {"rewind"}


def test_a_growing_history_is_resent_as_it_was_answered(programs: Programs, folder: Path, palimpsest: Subject) -> None:
    history = bodies.history(12, 4000)
    question: bodies.Message = {"role": "user", "content": bodies.question(60)}
    template, turn = folder / "grow.http", folder / "grow.txt"
    turn.write_bytes(bodies.turn(bodies.question(60)))
    for stream in (False, True):
        session = f"grown-{stream}-{bodies.CONNECTION}"
        template.write_bytes(bodies.request(session, [*history, question], stream=stream, growing=True))
        run(
            programs.load,
            palimpsest,
            Plan(templates=[template], connections=2, stream=stream, requests=3, warmup=1, grow=turn),
        )
        for connection in range(2):
            named = f"grown-{stream}-{connection:08}"
            assert kinds(palimpsest, named) == ["first", "resend", "resend", "resend"]
            stored = told(palimpsest, f"/sessions/{named}/messages")["data"]
            assert len(stored) == 12 + 4 * 2
            assert len({message["content"] for message in stored[12:]}) == 8


def test_two_states_are_compared_round_by_round(
    programs: Programs, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Path(__file__).parents[1]
    monkeypatch.setattr(against, "_STARTS", 1)
    monkeypatch.setattr(against, "_IDLE_SECONDS", 0.0)
    if not (checkout / ".venv" / "bin" / "palimpsest").exists():
        pytest.skip("this checkout has no .venv of its own")
    chosen = [cases.Case("small", 2, stream=False)]
    results = against.measure(programs, checkout, chosen, EFFORT, folder, lambda _: None)
    [case] = results["cases"]
    assert case["name"] == "small-2-json"
    assert set(case["figures"]["per_second"]) == {against.HERE, against.OTHER}
    assert len(case["ratios"]["per_second"]) == EFFORT.rounds
    assert set(results["start_seconds"]) == set(results["idle_mb"]) == {against.HERE, against.OTHER}
    titles = [row[0] for row in against.table(results)]
    assert titles == [
        "",
        "small-2-json, requests/s",
        "small-2-json, CPU ms",
        "small-2-json, p50 ms",
        "start-up, s",
        "memory idle, MB",
        "memory after load, MB",
    ]


def test_a_checkout_without_its_own_programs_is_refused(programs: Programs, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=re.escape("has no .venv/bin/palimpsest")):
        against.measure(programs, tmp_path, [], EFFORT, tmp_path, lambda _: None)


def test_a_new_session_for_every_request(programs: Programs, folder: Path, palimpsest: Subject) -> None:
    case = cases.Case("new", 2, stream=False)
    [record] = cases.measure(programs, [palimpsest], [case], EFFORT, folder, lambda _: None)
    new = [row for row in told(palimpsest, "/sessions?limit=1000")["data"] if row["id"].startswith("new-")]
    assert len(new) >= record["subjects"][subjects.PALIMPSEST]["rounds"][0]["requests"]
    assert kinds(palimpsest, new[0]["id"]) == ["first"]


def test_appends_take_turns_and_send_what_the_policy_lets_through(
    programs: Programs, folder: Path, palimpsest: Subject
) -> None:
    measured = appends.measure(
        programs, palimpsest, folder, store="palimpsest", phases=1, seconds=30, sizes=(100, 150), say=lambda _: None
    )
    lines = measured["sizes"]
    assert [line["stored"] for line in lines] == [100, 150]
    for line in lines:
        assert line["appends"] == 16
        assert 2000 <= line["tokens_sent"] <= 3000
        assert line["moves"] == 1
        assert line["longest"] == line["stored"] + 31
    assert kinds(palimpsest, "stored-100-0") == ["first"] + ["append"] * 16


def test_first_requests_are_timed_beside_others(folder: Path, upstream: Subject) -> None:
    with subjects.palimpsest(upstream, folder, name="first") as subject:
        lines = first.measure(subject, 1, lambda _: None, sizes=(400,))
    assert [(line["kind"], line["messages"]) for line in lines] == [("first", 400), ("trim", 400)]
    assert all(0 < line["longest"] < line["seconds"] + 1 for line in lines)


def test_memory_is_that_of_all_processes(programs: Programs, folder: Path, upstream: Subject) -> None:
    (line,) = memory.measure(programs, upstream, folder, seconds=0.05, say=lambda _: None, workers=(2,))
    assert line["workers"] == 2
    for when in ("idle", "loaded"):
        assert line[when]["rss_mb"] > 3 * 50  # three processes
        assert line[when]["pss_mb"] < 0.7 * line[when]["rss_mb"]  # shared pages count once


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_size_follows_each_other_equally_often(count: int) -> None:
    order = appends.turns(count)
    rows = [order[start : start + count] for start in range(0, len(order), count)]
    assert all(sorted(row) == list(range(count)) for row in rows)
    followed = Counter(pair for row in rows for pair in pairwise(row))
    assert set(followed) == set(permutations(range(count), 2))
    assert len(set(followed.values())) == 1


def test_a_wrong_answer_ends_the_run(programs: Programs, folder: Path, palimpsest: Subject) -> None:
    template = folder / "wrong.http"
    asked = bodies.request("wrong", [{"role": "user", "content": "hi"}])
    template.write_bytes(asked.replace(b"/v1/chat/completions", b"/nothing"))
    with pytest.raises(RuntimeError, match="not a 200; status 404"):
        run(programs.load, palimpsest, Plan(templates=[template], requests=1))
    # A stream was expected, but the answer was not one.
    template.write_bytes(asked)
    with pytest.raises(RuntimeError, match=re.escape("did not end with [DONE]")):
        run(programs.load, palimpsest, Plan(templates=[template], requests=1, stream=True))


@pytest.mark.parametrize(("messages", "size"), [(2, 830), (10, 9_000), (200, 123_500)])
def test_histories_have_the_requested_size(messages: int, size: int) -> None:
    history = bodies.history(messages, size)
    assert [message["role"] for message in history[:2]] == ["system", "user"]
    assert len(history) == messages + 1
    assert history[-1]["role"] == "assistant"
    assert abs(len(json.dumps(history, separators=(",", ":"))) - size) < 10
    calls = [call["id"] for message in history for call in message.get("tool_calls", ())]
    assert calls == [message["tool_call_id"] for message in history if message["role"] == "tool"]
    assert len(calls) == messages // 4


def test_code_is_assigned_to_rooms_by_its_file() -> None:
    assert profiling.room_of("/any/where/proxy/store/sqlite.py") == "store"
    assert profiling.room_of("/any/where/proxy/server/app.py") == "server"
    assert profiling.room_of("/any/where/proxy/errors.py") == "app"
    assert profiling.room_of("/lib/python3.11/site-packages/aiohttp/client.py") == "upstream: aiohttp"
    assert profiling.room_of("/lib/python3.11/asyncio/tasks.py") == "asyncio, anyio"
    assert profiling.room_of("~") is None
    counts = profiling.count_stacks(
        [
            "run (/lib/python3.11/asyncio/runners.py:1);ask (/x/proxy/server/chat.py:2);f (/y/json.py:3) 4",
            "main (/y/bin:1) 1",
            "run (/l/python3.11/threading.py:1);Condition.wait (/l/python3.11/threading.py:327) 9",
        ]
    )
    assert counts["server"] == 4
    assert sum(counts.values()) == 5


def test_published_tables_replace_the_earlier_ones_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    shutil.copy(Path(__file__).parents[1] / "docs" / "performance.md", page)
    report.publish("TABLES OF RUN 1", page)
    report.publish("TABLES OF RUN 2", page)
    assert page.read_text("utf-8").count("TABLES OF RUN 2\n") == 1
    assert "TABLES OF RUN 1" not in page.read_text("utf-8")
    page.write_text("no place", "utf-8")
    with pytest.raises(ValueError, match="no place"):
        report.publish("TABLES OF RUN 1", page)


# ------------------------------------------------------------------------------- beside other packages

FAKE = """
import json, sys
for session in json.load(sys.stdin):
    cleared = {"role": "tool", "tool_call_id": "c0", "content": "gone"}
    views = [[at if at != 2 else len(session["messages"]) for at in range(stop)] for stop in session["requests"]]
    told = {"session": session["name"], "rival": "litellm", "version": "1", "made": [cleared], "views": views}
    print(json.dumps(told))
"""


def test_what_packages_send_is_replayed_and_put_into_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "HERE", tmp_path)
    (tmp_path / "rivals.py").write_text(FAKE)
    call = {"id": "c0", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "found " * 2000},
        *({"role": "assistant", "content": "well"}, {"role": "user", "content": "more"}),
    ]
    histories = [of_messages(f"s{at}", messages) for at in range(2)]
    (rival,) = prove.rivals(sys.executable, histories)
    assert rival.name == "litellm 1: `trim_messages` to 30k"
    test = Backtest([rival, *prove.baselines()], [price_class(0.1)], TokenCounter("estimate"))
    text = prove.table(test.run(histories), len(histories), 2)
    lines = text.splitlines()
    assert lines[0].startswith("|  | input cost | far values kept |")
    assert any(line.startswith("| litellm 1: `trim_messages` to 30k | ") for line in lines)
    assert "| *knows the future* |" in text
    assert "2 sessions from 2 recordings of real agents, cut where they compacted, 6 requests" in text
    (tmp_path / "rivals.py").write_text("raise SystemExit('no such package')")
    with pytest.raises(SystemExit, match="no such package"):
        list(prove.rivals(sys.executable, histories))


def test_the_readme_has_the_table_that_is_made() -> None:
    text = prove.README.read_text("utf-8")
    assert 0 < text.index(prove.BEGIN) < text.index("| **the default policy** |") < text.index(prove.END)


def test_what_wrong_prices_cost_is_what_a_backtest_tells() -> None:
    histories = read_files(prove.SESSIONS / "livemcp-spliced-open-b.json.gz")
    sums = wrong_prices.measured([*wrong_prices.planned(), *wrong_prices.fixed([10_000])], histories, 1)
    own = PolicyStrategy(name="own", policy=BUILT_IN)
    test = Backtest([own], wrong_prices.CLASSES, TokenCounter(), windows=lambda _: prove.WINDOW, recall=False)
    told = {each.prices: each for each in test.run(histories).strategies if each.strategy == "own"}
    for name, each in told.items():
        planned = f"{wrong_prices.AUTO} at {name}"
        assert sums.pooled(planned, name) == pytest.approx(each.ratio)
        value, session = sums.worst(planned, name)
        assert value == pytest.approx(each.highest_ratio)
        assert session == each.most_expensive_session
    # A plan made at other prices gets another bill.
    dear, cheap = next(iter(told)), list(told)[-1]
    assert sums.pooled(f"{wrong_prices.AUTO} at {dear}", cheap) != told[cheap].ratio
    lines = [*wrong_prices.matrix(sums), *wrong_prices.beside_fixed(sums, [10_000])]
    assert lines[1].startswith(f"{dear:22}{told[dear].ratio:.3f}, worst {told[dear].highest_ratio:.3f} ")
    assert lines[6].startswith(f"The worst session of all: {histories[0].name}, ")
    assert f"{sums.pooled('10,000 tokens, read at 0.5', dear):.3f} at 10,000 tokens" in lines[8]


def test_a_session_that_was_cut_is_put_together_again(tmp_path: Path) -> None:
    messages = [{"role": "user" if at % 2 == 0 else "assistant", "content": f"{at}"} for at in range(6)]
    messages = [{"role": "system", "content": "be brief"}, *messages]
    for name, cuts in (("cut", [2, 4]), ("other", [])):
        recorded = {"id": name, "messages": messages, "compactions": [{"after_message": at} for at in cuts]}
        (tmp_path / f"{name}.json").write_text(json.dumps(recorded))
    histories = read_files(tmp_path)
    assert [each.name for each in histories] == ["cut:1", "cut:2", "cut:3", "other"]
    one, other = wrong_prices.whole(histories)
    assert (one.name, one.messages, one.instructions) == ("cut", other.messages, other.instructions)
