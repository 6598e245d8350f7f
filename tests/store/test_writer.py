"""A process beside the server writes exchanges; whatever becomes of it, each is written, and once."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sqlite3
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from socket import socketpair
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from sqlalchemy import text

from proxy.errors import InternalError, StoreUnavailable
from proxy.store import Store, session_key, writer
from proxy.store.database import Tasks, address_of
from proxy.store.records import Reply, Status
from proxy.store.writer import WriterProcess, fork_writer, run_writer
from proxy.trimming import Cut
from tests.support.asides import HIDDEN
from tests.support.forked import Forked
from tests.support.served import is_running
from tests.support.stores import another_process, empty_store
from tests.support.story import SUMMARY
from tests.support.talk import Talk, body, opening, settlement
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
KEY = session_key("tenant", "session")


@pytest.fixture
async def writing(store: Store, store_url: str) -> AsyncGenerator[WriterProcess]:
    """The writer that the store uses, a process of its own."""
    here, there = socketpair()
    with Forked(run_writer, store_url, there) as process:
        there.close()
        writing = WriterProcess(process.pid, here)
        await store.use(writing)
        yield writing
        await store.close()
        assert process.wait(30) in {0, -signal.SIGKILL}


@pytest.fixture
def _alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process would write fails."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is not this process that writes")

    monkeypatch.setattr(store._database, "start", refuse)


def question(number: int) -> tuple[str, Any]:
    return f"exchange-{number:03}", body("user", f"question {number}")


async def told(store: Store) -> list[str]:
    """Return all that is stored of the session, in its order."""
    session = await store.session("tenant", "session")
    assert session is not None
    return [row.message.readable() for row in await store.path(KEY, session.head)]


async def exchange(store: Store, number: int) -> None:
    name, asked = question(number)
    began = store.begin(opening(name, asked, digest=name))
    await store.settle(settlement(name, asked, replies=(body("assistant", f"answer {number}"),)), began)


@pytest.mark.usefixtures("_alone", "writing")
async def test_exchanges_are_written_by_the_other_process(store: Store) -> None:
    talk = Talk(store=store)
    for number in range(3):
        name = await talk.begin(body("user", f"question {number}"))
        settled = await talk.settle(name, body("user", f"question {number}"), replies=(body("assistant", "yes"),))
        assert len(settled.nodes) == len(settled.replies) == 1
        row = await store.exchange(name)
        assert row is not None
        assert (row.status, row.replies) == (Status.COMPLETE, settled.replies)
    assert await told(store) == [said for number in range(3) for said in (f"question {number}", "yes")]


@pytest.mark.usefixtures("_alone", "writing")
async def test_what_is_submitted_together_is_all_answered(store: Store) -> None:
    names = [f"s{number}" for number in range(40)]
    await asyncio.gather(
        *[
            store.settle(
                settlement(f"e{name}", body("user", name), replies=(body("assistant", name),), session=name),
                store.begin(opening(f"e{name}", body("user", name), session=name)),
            )
            for name in names
        ]
    )
    for name in names:
        session = await store.session("tenant", name)
        assert session is not None
        assert (session.messages, session.requests) == (2, 1)


async def test_what_a_killed_writer_did_not_answer_is_written_here(
    store: Store, writing: WriterProcess, caplog: pytest.LogCaptureFixture
) -> None:
    await exchange(store, 0)
    os.kill(writing.pid, signal.SIGSTOP)
    asked = [Tasks().start(exchange(store, number)) for number in (1, 2)]
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in asked)
    os.kill(writing.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await asyncio.gather(*asked)
        await exchange(store, 3)
    assert not writing.works
    assert sorted(await told(store)) == sorted(said for n in range(4) for said in (f"question {n}", f"answer {n}"))
    assert [record.message.partition(" (")[0] for record in caplog.records if record.name == "palimpsest.store"] == [
        "the process that writes exchanges"
    ]


async def test_what_was_committed_before_the_writer_was_killed_is_there_once(
    store: Store, writing: WriterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[bytes]()
    frames = writing._frames
    assert frames is not None
    receive = frames._received

    def keep(frame: bytes) -> None:
        if any(written.settled is not None for written in writer._ANSWERS.decode(frame).written):
            kept.append(frame)
        else:
            receive(frame)

    monkeypatch.setattr(frames, "_received", keep)
    asked = Tasks().start(exchange(store, 0))
    async with asyncio.timeout(30):
        while not kept:  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0.01)
    assert not asked.done()
    assert await told(store) == ["question 0", "answer 0"]
    os.kill(writing.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await asked
    assert await told(store) == ["question 0", "answer 0"]
    session = await store.session("tenant", "session")
    assert session is not None
    assert session.requests == 1


async def test_a_writer_that_hangs_is_killed_once_the_store_is_looked_at(
    store: Store, writing: WriterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_SILENT_SECONDS", 0.1)
    os.kill(writing.pid, signal.SIGSTOP)
    asked = Tasks().start(exchange(store, 0))
    await asyncio.sleep(0.2)
    assert await store.health() is None
    async with asyncio.timeout(30):
        await asked
    assert not writing.works
    assert await told(store) == ["question 0", "answer 0"]


async def test_a_writer_that_waits_for_a_lock_is_left_alone(
    store: Store, writing: WriterProcess, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_SILENT_SECONDS", 0.1)
    await exchange(store, 0)

    async with asyncio.timeout(60):
        with another_process(store_url) as other:
            other.execute(text("UPDATE sessions SET requests = requests"))
            asked = Tasks().start(exchange(store, 1))
            await asyncio.sleep(0.3)
            await writing.require_alive()
            assert not asked.done()
        await asked
    assert writing.works


def locked_out() -> StoreUnavailable:
    locked = StoreUnavailable("It is locked.")
    locked.__cause__ = sqlite3.OperationalError()
    locked.__cause__.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return locked


async def test_a_writer_that_hangs_with_the_lock_is_killed(
    store: Store, writing: WriterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe(*_: Any, **__: Any) -> None:
        if writing.works:
            raise locked_out()

    monkeypatch.setattr(writer, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(store._database, "probe", probe)
    os.kill(writing.pid, signal.SIGSTOP)
    asked = Tasks().start(exchange(store, 0))
    await asyncio.sleep(0.2)
    assert await store.circuit.health(0.0) is not None
    async with asyncio.timeout(30):
        await asked
    assert not writing.works


@pytest.mark.usefixtures("writing")
@pytest.mark.parametrize("writes", [True, False])
async def test_a_lock_that_the_writer_holds_is_no_outage(
    store: Store, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = locked_out()
    monkeypatch.setattr("proxy.store.circuit.PROBE_SECONDS", 30.0)  # an exchange may take long on a busy machine

    async def probe(*_: Any, **__: Any) -> None:
        if writes:
            await exchange(store, 0)
        raise locked

    monkeypatch.setattr(store._database, "probe", probe)
    found = await store.circuit.health(0.0)
    assert found is (None if writes else locked)


async def test_an_outage_is_told_as_it_is_without_a_writer(tmp_path: Path) -> None:
    file = tmp_path / "palimpsest.db"
    url = empty_store(file)
    here, there = socketpair()
    with Forked(run_writer, url, there) as process:
        there.close()
        store = await Store.open(url, migrate=False)
        await store.use(WriterProcess(process.pid, here))
        await exchange(store, 0)
        file.rename(tmp_path / "elsewhere.db")
        with pytest.raises(StoreUnavailable, match="was deleted, or replaced by another one"):
            await exchange(store, 1)
        (tmp_path / "elsewhere.db").rename(file)
        assert await store.circuit.closes(30)
        await exchange(store, 2)
        assert "question 2" in await told(store)
        await store.close()


async def test_a_database_that_was_opened_anew_is_opened_by_the_writer_too(
    store: Store, writing: WriterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    await exchange(store, 0)
    await store.renew()
    monkeypatch.setattr(store._database, "start", None)
    await exchange(store, 1)
    assert writing.works
    assert await told(store) == ["question 0", "answer 0", "question 1", "answer 1"]


class Hanging:
    """A database that is at work on something, and never done."""

    is_busy = True

    def start(self, *_: Any, **__: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await asyncio.Event().wait()


async def test_a_database_that_hangs_is_left_alone_once_it_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = empty_store(tmp_path / "palimpsest.db")
    monkeypatch.setattr(writer, "_SILENT_SECONDS", 0.1)
    store = await Store.open(url, migrate=False)
    second = await writer.open_database(address_of(url))
    databases: list[Any] = [Hanging(), second]

    async def opened(*_: Any, **__: Any) -> Any:
        return databases.pop(0)

    monkeypatch.setattr(writer, "open_database", opened)
    here, there = socketpair()
    running = Tasks().start(writer._Writer(address_of(url)).run(there))
    writing = WriterProcess(os.getpid(), here)
    await writing.open(store._start_here)
    name, asked = question(0)
    item = opening(name, asked)
    lost = writing.start(item)
    async with asyncio.timeout(30):
        while not await writing.is_busy():  # it may not have got the exchange yet
            pass
        writing.renew()
        await writing.start(item)
    assert not lost.done()
    assert writing.written == 1
    assert writing._frames is not None
    writing._frames.close()
    await asyncio.sleep(0.3)  # it waits for the first one now
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await store.close()


@pytest.mark.usefixtures("_alone", "writing")
async def test_a_fault_of_the_writer_is_an_error_of_that_exchange_alone(store: Store) -> None:
    name, asked = question(0)
    await store.began(store.begin(opening(name, asked)))
    for broken, error in (
        ({"kind": 7}, InternalError),  # the other process cannot read it
        ({"receipt": {"answer": b"no JSON"}}, InternalError),  # nor write this
        ({"receipt": {"answer": object()}}, NotImplementedError),  # and this does not even get there
    ):
        with pytest.raises(error, match=r"could not be written\. The proxy's log has|does not go to another process"):
            await store.settle(settlement(name, asked, replies=(body("assistant", "x"),), **broken))
    await store.settle(settlement(name, asked, replies=(body("assistant", "answer 0"),)))
    assert await told(store) == ["question 0", "answer 0"]


async def test_closing_waits_for_what_was_submitted(store: Store, writing: WriterProcess, store_url: str) -> None:
    name, asked = question(0)
    store.begin(opening(name, asked))
    end = Tasks().start(store.settle(settlement(name, asked, replies=(body("assistant", "answer 0"),))))
    await asyncio.sleep(0)
    await store.close()
    await end
    assert not writing.works
    again = await Store.open(store_url, migrate=False)
    assert await told(again) == ["question 0", "answer 0"]
    await again.close()


async def test_closing_does_not_wait_for_a_writer_that_hangs(
    store: Store, writing: WriterProcess, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_SILENT_SECONDS", 0.1)
    os.kill(writing.pid, signal.SIGSTOP)
    name, asked = question(0)
    began = store.begin(opening(name, asked))
    async with asyncio.timeout(30):
        await store.close()
    await began
    again = await Store.open(store_url, migrate=False)
    row = await again.exchange(name)
    assert row is not None
    assert row.status is Status.PENDING
    await again.close()


async def test_closing_while_the_store_is_away_does_not_wait_for_the_writer(
    store: Store, writing: WriterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.store._LAST_SECONDS", 0.1)
    os.kill(writing.pid, signal.SIGSTOP)
    name, asked = question(0)
    began = store.begin(opening(name, asked))
    await asyncio.sleep(0)  # it is sent
    store.circuit.open(StoreUnavailable("The store cannot be used. It is a test."))
    await store.close()
    await asyncio.to_thread(until, lambda: not is_running(writing.pid), "it has ended")
    assert not began.done()


async def test_a_caller_that_leaves_does_not_take_its_exchange_along(store: Store, writing: WriterProcess) -> None:
    name, asked = question(0)
    await store.began(store.begin(opening(name, asked)))
    os.kill(writing.pid, signal.SIGSTOP)
    end = Tasks().start(store.settle(settlement(name, asked, replies=(body("assistant", "x"),))))
    await asyncio.sleep(0.1)
    end.cancel()
    await asyncio.gather(end, return_exceptions=True)
    os.kill(writing.pid, signal.SIGCONT)
    async with asyncio.timeout(30):
        while (row := await store.exchange(name)) is None or row.status is not Status.COMPLETE:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("_alone", "writing")
async def test_what_the_client_was_not_shown_gets_there(store: Store) -> None:
    name, asked = question(0)
    reply = Reply(body=body("assistant", "shown"), hidden=HIDDEN)
    end = replace(settlement(name, asked), status=Status.COMPLETE, replies=(reply,))
    settled = await store.settle(end, store.begin(opening(name, asked)))
    session = await store.session("tenant", "session")
    assert session is not None
    assert await store.hidden(session, settled.replies) == {settled.replies[0]: HIDDEN}


@pytest.mark.usefixtures("_alone", "writing")
async def test_a_cut_with_a_summary_gets_there(store: Store) -> None:
    name, asked = question(0)
    cut = Cut(
        position=1, policy="default", version="v1", changes=(), tokens=50, messages=1, tool_calls=0, summary=SUMMARY
    )
    end = replace(settlement(name, asked, replies=(body("assistant", "answer 0"),)), cut=cut)
    settled = await store.settle(end, store.begin(opening(name, asked)))
    kept = await store.cut_at(KEY, settled.nodes[0], "default", None)
    assert kept is not None
    assert kept.summary == SUMMARY


# ------------------------------------------------------------------------------------------- starting


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("proxy.store.writer.CAN_FORK", False),
        ("os.sched_getaffinity", lambda _: {0}),
        ("threading.active_count", lambda: 2),
    ],
)
def test_there_is_no_writer_where_none_can_be_or_none_helps(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.active_count", lambda: 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(name, value)
    assert fork_writer("sqlite:///never.db") is None


def test_the_quota_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("150000 100000\n", "ascii")
    monkeypatch.setattr("threading.active_count", lambda: 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("os.fork", lambda: pytest.fail("there is one processor and a half"))
    monkeypatch.setattr("proxy.store.writer._QUOTA", quota)
    assert fork_writer("sqlite:///never.db") is None


def test_there_is_no_writer_where_the_system_has_no_room_for_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("threading.active_count", lambda: 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr("os.fork", refuse)
    assert fork_writer("sqlite:///never.db") is None
    assert [record.message for record in caplog.records if record.name == "palimpsest.store"] == [
        "no process writes exchanges beside this one: Resource temporarily unavailable"
    ]


# -------------------------------------------------------------------------------------------- the stream


class Pipe(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def writelines(self, list_of_data: Any) -> None:
        self.written += b"".join(list_of_data)


@given(values=st.lists(st.binary(max_size=400), max_size=6), cuts=st.lists(st.integers(0, 3000), max_size=12))
def test_values_arrive_however_the_stream_is_cut(values: list[bytes], cuts: list[int]) -> None:
    pipe, came = Pipe(), list[bytes]()
    sending = writer._Frames(came.append, lambda: None)
    sending.connection_made(pipe)
    for value in values:
        sending.send(value)
    receiving = writer._Frames(came.append, lambda: None)
    places = sorted({min(cut, len(pipe.written)) for cut in cuts} | {0, len(pipe.written)})
    for start, end in pairwise(places):
        receiving.data_received(pipe.written[start:end])
    assert came == values
