"""Making summaries: in the background, awaited, by several workers at once, and with every failure.

The store is real; the tests control the model's answers and their time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from shutil import copy2
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.config import ModelPrices, ModelRule, SummarizerSettings, UpstreamSettings
from proxy.errors import NoAnswer, StoreUnavailable
from proxy.models import Catalogue
from proxy.pipeline import Background
from proxy.store import Store, SummaryRow, SummaryStatus
from proxy.summaries import Caller, Given, Summaries, Summarizer, Work
from proxy.summaries.jobs import NOT_YET, SummaryAttempt, Terms, held
from proxy.summaries.prompt import Prompt
from proxy.summaries.render import SummaryState
from proxy.summaries.summarizer import ModelAnswer, SummarizerTarget
from proxy.tokens import TokenCounter
from proxy.trimming import Summarize, SummaryRequest
from proxy.upstream import Upstream
from tests.support.stores import empty_store
from tests.support.talk import Talk, body

pytestmark = pytest.mark.anyio

RULE = "You must never write to the folder /etc/parcels."
GOOD = "## Goal\nmove the parcels to the depot\n## Next step\nlook for the depot"
EDIT = Summarize(mode="model", min_new_messages=4, max_generations=2)
USAGE = {"prompt_tokens": 100, "completion_tokens": 10}
PRICES = ModelRule(match=("gpt",), prices=ModelPrices(input=10, output=100))
TOKENS = 60
"""Of each message, as it was counted when it was stored."""
SPENT = (100 * 10 + 10 * 100) / 1_000_000


class Told(Summarizer):
    """Gives the answers of a list, then `GOOD`; it waits while `let` is not set."""

    def __init__(self, upstream: Upstream, **settings: Any) -> None:
        super().__init__(SummarizerSettings(**settings), upstream)
        self.answers: list[str | Exception] = []
        self.prompts: list[str] = []
        self.came = asyncio.Semaphore(0)
        self.let = asyncio.Event()
        self.let.set()

    async def ask(self, target: SummarizerTarget, prompt: Prompt) -> ModelAnswer:
        self.prompts.append(f"{prompt.system}\n{prompt.user}")
        self.came.release()
        await self.let.wait()
        answer = self.answers.pop(0) if self.answers else GOOD
        if isinstance(answer, Exception):
            raise answer
        return ModelAnswer(text=answer, finish="stop", calls=False, usage=USAGE, model=target.model)


class Bench:
    """A session in a store, and its workers."""

    def __init__(self, store: Store, upstream: Upstream) -> None:
        self.store = store
        self.told = Told(upstream)
        self.talk = Talk(store=store)
        self.background = Background()
        self.workers: list[Summaries] = []

    def worker(self, **options: Any) -> Summaries:
        made = Summaries(
            self.store,
            self.told,
            TokenCounter("estimate"),
            Catalogue((PRICES,)).facts,
            self.background.start,
            **options,
        )
        self.workers.append(made)
        return made

    async def speak(self, turns: int) -> None:
        session = await self.store.session("tenant", "session")
        first = session.rounds if session is not None else 0
        for number in range(first, first + turns):
            said = f"Move the parcels to the depot, part {number}. {RULE if number == 0 else ''}"
            asked = body("user", f"{said} {'more words ' * 30}", TOKENS)
            exchange = await self.talk.begin(asked)
            replies = (body("assistant", f"I look for the depot, part {number}.", TOKENS),)
            await self.talk.settle(exchange, asked, replies=replies)

    async def work(self, stop: int, **changes: Any) -> Work:
        session = await self.store.session("tenant", "session")
        assert session is not None
        wanted = SummaryRequest(stop=stop, room=400, urgent=False)
        work = Work(
            key=self.talk.key,
            session="session",
            tip=session.head,
            wanted=wanted,
            edit=EDIT,
            model="gpt",
            caller=Caller(tenant="tenant"),
        )
        return replace(work, **changes)

    async def rows(self) -> list[SummaryRow]:
        return await self.store.summary_rows(self.talk.key)

    async def began(self) -> None:
        """Wait until the model is asked."""
        async with asyncio.timeout(20):
            await self.told.came.acquire()

    async def close(self) -> None:
        for worker in self.workers:
            await worker.aclose()
        await self.background.drain()


def unreachable() -> Upstream:
    return Upstream(UpstreamSettings(base_url="http://127.0.0.1:1/v1"), shares_key=False)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a session of six turns, to be copied. (Leases have tests on PostgreSQL too.)"""
    file = tmp_path_factory.mktemp("spoken") / "palimpsest.db"

    async def speak() -> None:
        store, upstream = await Store.open(empty_store(file)), unreachable()
        await Bench(store, upstream).speak(6)
        await upstream.aclose()
        await store.close()

    asyncio.run(speak())
    return file


@pytest.fixture
async def bench(spoken: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    file = Path(copy2(spoken, tmp_path))
    store, upstream = await Store.open(empty_store(file), migrate=False), unreachable()
    bench = Bench(store, upstream)
    yield bench
    bench.told.let.set()
    await bench.close()
    await upstream.aclose()
    await store.close()


# ------------------------------------------------------------------------------------ what is made


async def test_an_awaited_summary_is_stored_and_returned(bench: Bench) -> None:
    made = await bench.worker().make(await bench.work(8, exchange="exc_1"))
    (row,) = await bench.rows()
    assert made.row == row
    assert made.reason == ""
    assert (row.status, row.until, row.generation, row.predecessor) == (SummaryStatus.READY, 8, 1, None)
    assert (row.covered_messages, row.covered_tokens) == (8, 8 * TOKENS)
    assert (row.model, row.exchange, row.asked, row.recipe) == ("gpt", "exc_1", False, EDIT.recipe)
    assert row.usage == USAGE
    assert row.cost == pytest.approx(SPENT)
    assert RULE in row.text
    path = await bench.store.path(bench.talk.key, row.tip)
    assert row.node == path[7].node
    session = await bench.store.session("tenant", "session")
    assert session is not None
    assert session.summaries == 1
    assert session.cost == pytest.approx(SPENT)
    assert "part 3" in bench.told.prompts[0]
    assert "part 4" not in bench.told.prompts[0]


async def test_a_summary_in_the_background_blocks_nobody(bench: Bench) -> None:
    bench.told.let.clear()
    worker = bench.worker()
    work = await bench.work(8)
    worker.begin(work)
    worker.begin(work)  # it is being made
    await bench.began()
    worker.begin(work)
    assert await bench.rows() == []
    bench.told.let.set()
    await bench.background.drain()
    assert [row.until for row in await bench.rows()] == [8]
    assert len(bench.told.prompts) == 1


async def test_summaries_continue_their_predecessors_until_the_last_generation(bench: Bench) -> None:
    worker = bench.worker()
    first = (await worker.make(await bench.work(4))).row
    second = (await worker.make(await bench.work(8))).row
    assert first is not None
    assert second is not None
    assert (second.generation, second.predecessor) == (2, first.id)
    assert "part 0" not in bench.told.prompts[1]
    assert RULE in second.text
    third = (await worker.make(await bench.work(12))).row  # max_generations: 2
    assert third is not None
    assert (third.generation, third.predecessor) == (1, None)
    assert "part 0" in bench.told.prompts[2]
    state = SummaryState.read(third.state)
    assert state is not None
    assert state.facts.messages == 12


async def test_a_summary_with_an_invalid_state_is_not_continued(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bench.worker()
    made = (await worker.make(await bench.work(4))).row
    assert made is not None
    rows = bench.store.summary_rows

    async def spoilt_rows(key: str) -> list[SummaryRow]:
        return [replace(row, state={"facts": 3}) if row.id == made.id else row for row in await rows(key)]

    monkeypatch.setattr(bench.store, "summary_rows", spoilt_rows)
    second = (await worker.make(await bench.work(8))).row
    assert second is not None
    assert (second.generation, second.predecessor) == (1, None)
    assert "part 0" in bench.told.prompts[1]


async def test_a_stored_summary_is_not_made_again(bench: Bench) -> None:
    made = await bench.worker().make(await bench.work(8))
    again = await bench.worker().make(await bench.work(6))
    assert again.row == made.row
    assert len(bench.told.prompts) == 1


async def test_no_summary_is_made_if_a_newer_one_leaves_little_to_cover(bench: Bench) -> None:
    worker = bench.worker()
    made = await worker.make(await bench.work(4))
    for stop in (5, 7):  # min_new_messages: 4
        assert await worker.make(await bench.work(stop)) == made
    slow = EDIT.model_copy(update={"growth_ratio": 99.0})
    assert await worker.make(await bench.work(8, edit=slow)) == made
    assert len(bench.told.prompts) == 1
    further = (await worker.make(await bench.work(7, asked=True))).row  # but where somebody wants it
    assert further is not None
    assert further.until == 7


async def test_messages_that_are_not_stored_yet_are_covered(bench: Bench) -> None:
    path = await bench.store.path(bench.talk.key, (await bench.work(1)).tip)
    given = Given(messages=tuple(row.message for row in path[:8]), nodes=(*(row.node for row in path[:7]), "f" * 40))
    made = await bench.worker().make(await bench.work(8, tip="f" * 40, given=given))
    assert made.row is not None
    assert made.row.node == "f" * 40
    assert made.row.covered_tokens == sum(TokenCounter("estimate").messages([row.message for row in path[:8]], "gpt"))


async def test_a_missing_branch_is_the_reason(bench: Bench) -> None:
    made = await bench.worker().make(await bench.work(13))
    assert (made.row, made.reason) == (None, "the branch is not there any more")


# ---------------------------------------------------------------------------------- what is refused, or fails


async def test_a_refusal_is_stored_and_holds_until_enough_messages_were_added(bench: Bench) -> None:
    bench.told.answers = [""] * 4
    worker = bench.worker()
    made = await worker.make(await bench.work(6))
    (row,) = await bench.rows()
    assert made.row == row
    assert made.reason == row.reason != ""
    assert (row.status, row.text) == (SummaryStatus.REFUSED, "")
    assert row.cost == pytest.approx(2 * SPENT)
    assert len(bench.told.prompts) == 2

    for stop in (6, 9):
        assert (await worker.make(await bench.work(stop))).row == row
        worker.begin(await bench.work(stop, attempt=row))  # who knows of it need not look
        assert (await worker.make(await bench.work(stop, attempt=row))).reason == row.reason
    assert len(bench.told.prompts) == 2

    again = (await worker.make(await bench.work(6, asked=True))).row  # somebody wants it all the same
    assert again is not None
    assert again.id != row.id
    assert len(bench.told.prompts) == 4
    grown = (await worker.make(await bench.work(10))).row  # min_new_messages: 4
    assert grown is not None
    assert grown.status is SummaryStatus.READY


async def test_a_failure_is_stored_and_the_next_request_tries_again(bench: Bench) -> None:
    bench.told.answers = [NoAnswer("the summarizer answered 500")]
    made = await bench.worker().make(await bench.work(8))
    assert made.row is not None
    assert (made.row.status, made.reason) == (SummaryStatus.FAILED, "the summarizer answered 500")
    assert made.row.usage is None
    again = await bench.worker().make(await bench.work(8))
    assert again.row is not None
    assert again.row.status is SummaryStatus.READY


async def test_while_the_breaker_is_open_nothing_begins(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.told, "pause", lambda _: 30.0)
    worker = bench.worker()
    monkeypatch.setattr(bench.store, "lease", None)
    worker.begin(await bench.work(8))
    work = await bench.work(8)
    made = await worker.make(work)
    assert (made.row, made.reason) == (None, "the summarizer failed repeatedly and is paused")
    assert worker.none_begins(work.model, work.caller) == made.reason
    monkeypatch.setattr(bench.told, "pause", lambda _: 0.0)
    assert worker.none_begins(work.model, work.caller) == ""
    await worker.aclose()
    assert worker.none_begins(work.model, work.caller) == "the proxy is being closed"


async def test_a_waiting_summary_does_not_begin_if_the_breaker_opened_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.told.let.clear()
    worker = bench.worker(at_once=1)
    early = await bench.work(8)
    late = await bench.work(8, edit=Summarize(mode="model", heading="# Other"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.make(early))
        await bench.began()
        second = tasks.create_task(worker.make(late))
        await asyncio.sleep(0)
        monkeypatch.setattr(bench.told, "pause", lambda _: 30.0)
        bench.told.let.set()
    assert second.result() == SummaryAttempt(row=None, reason="the summarizer failed repeatedly and is paused")
    assert len(bench.told.prompts) == 1


async def test_a_store_failure_becomes_the_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> Any:
        raise StoreUnavailable("The store is gone.")

    worker = bench.worker()
    for name in ("keep_summary", "summary_rows", "lease"):
        monkeypatch.setattr(bench.store, name, fail)
        made = await worker.make(await bench.work(8))
        assert (made.row, made.reason) == (None, "The store is gone.")


async def test_an_internal_error_becomes_the_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.told.answers = [RuntimeError("secret text")]
    made = await bench.worker().make(await bench.work(8))
    assert made.row is None
    assert "fault of the proxy's own" in made.reason
    assert any(record.exc_info for record in caplog.records)


async def test_a_session_may_be_deleted_meanwhile(bench: Bench) -> None:
    bench.told.let.clear()
    worker = bench.worker()
    worker.begin(await bench.work(8))
    await bench.began()
    await bench.store.delete(bench.talk.key)
    bench.told.let.set()
    await bench.background.drain()
    assert await bench.rows() == []


async def test_the_summary_of_a_deleted_session_is_not_stored_in_a_new_one_of_its_name(bench: Bench) -> None:
    bench.told.let.clear()
    worker = bench.worker()
    worker.begin(await bench.work(8))
    await bench.began()
    await bench.store.delete(bench.talk.key)
    exchange = await bench.talk.begin(body("user", "I am another one."), created_at=7_000)
    await bench.talk.settle(exchange, body("user", "I am another one."), replies=(body("assistant", "Yes."),))
    bench.told.let.set()
    await bench.background.drain()
    assert await bench.rows() == []


async def test_each_attempt_is_logged_without_content(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "palimpsest.summaries"):
        await bench.worker().make(await bench.work(8))
    (line,) = [record.__dict__["fields"] for record in caplog.records if record.name == "palimpsest.summaries"]
    assert line["status"] == "ready"
    assert line["messages"] == 8
    assert line["tries"] == 1
    assert "depot" not in str(line)


# ------------------------------------------------------------------------------------ one at a time


async def test_a_waiter_gets_the_summary_that_is_being_made(bench: Bench) -> None:
    bench.told.let.clear()
    worker = bench.worker()
    work = await bench.work(8)
    worker.begin(work)
    await bench.began()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(worker.make(work))
        bench.told.let.set()
    (row,) = await bench.rows()
    assert waiting.result().row == row
    assert len(bench.told.prompts) == 1


async def test_after_its_patience_a_waiter_leaves_and_the_summary_is_made(bench: Bench) -> None:
    bench.told.let.clear()
    worker = bench.worker()
    made = await worker.make(await bench.work(8), patience=0.05)
    assert (made.row, made.reason) == (None, NOT_YET)
    await bench.began()
    bench.told.let.set()
    await bench.background.drain()
    assert len(await bench.rows()) == 1


async def test_the_default_patience_is_the_summarizers_timeout(bench: Bench) -> None:
    upstream = unreachable()
    bench.told = Told(upstream, timeout=0.05)
    bench.told.let.clear()
    assert (await bench.worker().make(await bench.work(8))).reason == NOT_YET
    await upstream.aclose()


async def test_a_cancelled_request_does_not_cancel_the_summary(bench: Bench) -> None:
    bench.told.let.clear()
    worker = bench.worker()
    async with asyncio.TaskGroup() as group:
        request = group.create_task(worker.make(await bench.work(8)))
        await bench.began()
        request.cancel()
    bench.told.let.set()
    await bench.background.drain()
    assert len(await bench.rows()) == 1


async def test_two_workers_make_one(bench: Bench) -> None:
    one, other = bench.worker(), bench.worker()
    work = await bench.work(8)
    async with asyncio.TaskGroup() as group:
        made = [group.create_task(worker.make(work)) for worker in (one, other)]
    (row,) = await bench.rows()
    assert [task.result().row for task in made] == [row, row]
    assert len(bench.told.prompts) == 1


async def test_of_two_workers_in_the_background_one_does_nothing(bench: Bench) -> None:
    bench.told.let.clear()
    one, other = bench.worker(), bench.worker()
    work = await bench.work(8)
    one.begin(work)
    await bench.began()
    other.begin(work)
    made = await other.make(work, patience=0.1)
    assert (made.row, made.reason) in [(None, NOT_YET), (None, "another process is making the summary")]
    bench.told.let.set()
    await bench.background.drain()
    assert len(await bench.rows()) == 1


async def test_another_recipe_is_another_summary(bench: Bench) -> None:
    worker = bench.worker()
    other = Summarize(mode="model", heading="Another one")
    assert other.recipe != EDIT.recipe
    await worker.make(await bench.work(8))
    await worker.make(await bench.work(8, edit=other))
    assert len(await bench.rows()) == 2


async def test_the_lease_of_a_dead_worker_is_taken_over(bench: Bench) -> None:
    now = [1_000.0]
    terms = Terms(clock=lambda: now[0])
    key = bench.talk.key
    assert await bench.store.lease(key, EDIT.recipe, "dead", 1_000_000, 1_015_000)
    worker = bench.worker(terms=terms)
    made = await worker.make(await bench.work(8), patience=0.1)
    assert made.row is None
    await bench.background.drain()
    now[0] += 15
    assert (await worker.make(await bench.work(8))).row is not None


async def test_of_two_summaries_by_workers_with_an_expired_lease_one_is_stored(bench: Bench) -> None:
    """As after a process that stood still for longer than its lease."""
    now = [1_000.0]
    bench.told.let.clear()
    late = bench.worker(terms=Terms(clock=lambda: now[0], renewed_after=1_000))
    work = await bench.work(8)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(late.make(work))
        await bench.began()
        now[0] += 16
        second = group.create_task(bench.worker(terms=Terms(clock=lambda: now[0])).make(work))
        await bench.began()
        bench.told.let.set()
    (row,) = await bench.rows()
    assert first.result().row == second.result().row == row
    session = await bench.store.session("tenant", "session")
    assert session is not None
    assert session.cost == pytest.approx(2 * SPENT)  # both were paid for


# ------------------------------------------------------------------------------------ the end


async def test_closing_waits_for_running_summaries(bench: Bench) -> None:
    bench.told.let.clear()
    worker = bench.worker(grace=60)
    worker.begin(await bench.work(8))
    await bench.began()
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.aclose())
        await asyncio.sleep(0)
        bench.told.let.set()
    assert len(await bench.rows()) == 1


async def test_closing_cancels_slow_summaries_and_releases_their_leases(bench: Bench) -> None:
    bench.told.let.clear()
    worker = bench.worker(grace=0)
    work = await bench.work(8)
    worker.begin(work)
    await bench.began()
    await worker.aclose()
    assert await bench.rows() == []
    worker.begin(work)
    assert (await worker.make(work)).reason == "the proxy is being closed"
    bench.told.let.set()
    assert (await bench.worker().make(work)).row is not None  # at once: the lease is free


# ------------------------------------------------------------------------------------ the lease


class Clock:
    """Seconds that pass only when they are told to."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def key(store: Store) -> str:
    talk = Talk(store=store)
    await talk.say("hello", "hi")
    return talk.key


async def is_free(store: Store, key: str, name: str, at: float) -> bool:
    """Tell whether another one could take it, and leave it as it is."""
    free = await store.lease(key, name, "asker", int(at * 1000), int(at * 1000) + 1)
    await store.release(key, name, "asker")
    return free


async def test_a_lease_has_one_holder(store: Store, key: str) -> None:
    async with held(store, key, "r", "a", Terms()) as mine:
        assert mine
        async with held(store, key, "r", "b", Terms()) as other:
            assert not other
        async with held(store, key, "of another name", "b", Terms()) as other:
            assert other
        async with held(store, key, "r", "b", Terms()) as other:
            assert not other  # who had not got it has given back nothing
    async with held(store, key, "r", "b", Terms()) as other:
        assert other


async def test_a_waiter_obtains_the_lease_once_it_is_free(store: Store, key: str) -> None:
    order: list[str] = []

    async def second() -> None:
        async with held(store, key, "r", "b", Terms(), patience=60) as mine:
            assert mine
            order.append("second")

    async with asyncio.TaskGroup() as group, held(store, key, "r", "a", Terms()):
        group.create_task(second())
        await asyncio.sleep(0.12)  # it tries at least twice
        order.append("first")
    assert order == ["first", "second"]


async def test_a_waiter_gives_up_after_its_patience(store: Store, key: str) -> None:
    terms = Terms()
    async with held(store, key, "r", "a", terms), held(store, key, "r", "b", terms, patience=0.1) as other:
        assert not other


async def test_the_lease_of_a_dead_holder_ends(store: Store, key: str) -> None:
    clock = Clock()
    assert await store.lease(key, "r", "dead", 1_000_000, 1_015_000)
    terms = Terms(clock=clock)
    clock.now += 14.9
    async with held(store, key, "r", "b", terms) as mine:
        assert not mine
    clock.now += 0.1
    async with held(store, key, "r", "b", terms) as mine:
        assert mine


async def test_a_lease_is_renewed_during_the_work(store: Store, key: str) -> None:
    clock = Clock()
    async with held(store, key, "r", "a", Terms(renewed_after=0.001, clock=clock)):
        clock.now += 14
        async with asyncio.timeout(20):
            # Without that it would have ended long before.
            while await is_free(store, key, "r", clock.now + 10):  # noqa: ASYNC110 - the database has no event
                await asyncio.sleep(0)


async def test_a_store_failure_during_the_work_is_ignored(
    store: Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Event()

    async def fail(*_: object) -> bool:
        tried.set()
        raise StoreUnavailable("gone")

    async with held(store, key, "r", "a", Terms(renewed_after=0.001)) as mine:
        assert mine
        monkeypatch.setattr(store, "lease", fail)
        monkeypatch.setattr(store, "release", fail)
        await tried.wait()


async def test_a_lease_is_released_when_the_work_is_cancelled(store: Store, key: str) -> None:
    begun = asyncio.Event()

    async def work() -> None:
        async with held(store, key, "r", "a", Terms()):
            begun.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(work())
        await begun.wait()
        task.cancel()
    async with held(store, key, "r", "b", Terms()) as mine:
        assert mine


async def test_a_missing_session_has_no_leases(store: Store) -> None:
    async with held(store, "0" * 32, "r", "a", Terms()) as mine:
        assert not mine
