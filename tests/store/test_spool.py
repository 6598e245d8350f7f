"""The spool: durable, in order, readable after truncation at any byte, shared by processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.errors import StoreUnavailable
from proxy.store import Spool, spool_name, waiting_beside
from tests.support.forked import Forked, run_program
from tests.support.waiting import until

MOST = 10_000_000


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    opened = Spool(tmp_path / "spool", "s", MOST)
    opened.open()
    yield opened
    opened.close()


def another(spool: Spool) -> Spool:
    """The same spool as opened by another process."""
    again = Spool(spool._path.parent, "s", MOST)
    again.open()
    return again


def contents(spool: Spool) -> list[bytes]:
    return [record.content for record in spool.read()]


@pytest.mark.anyio
async def test_records_come_back_in_order_until_they_are_stored(spool: Spool) -> None:
    assert not spool.flag[0]
    await asyncio.gather(*[spool.append("k", b"record %d" % number) for number in range(5)])
    assert spool.flag[0]
    other = another(spool)
    assert other.flag[0]
    records = other.read()
    assert [record.content for record in records] == [b"record %d" % number for number in range(5)]
    other.stored(records[2].after)
    assert contents(spool) == [b"record 3", b"record 4"]
    spool.stored(records[4].after)
    await other.append("k", b"late")
    assert contents(spool) == [b"late"]
    spool.stored(spool.read()[-1].after)
    assert contents(other) == []
    assert not spool.flag[0]
    assert not any(spool._path.read_bytes()[4096:])
    assert spool._path.stat().st_size < 2_000_000
    await spool.append("k", b"again")
    assert contents(other) == [b"again"]
    other.close()


@pytest.mark.anyio
async def test_files_are_their_owners_alone(spool: Spool) -> None:
    await spool.append("k", b"x")
    with spool.turn() as mine:
        assert mine
    folder = spool._path.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


@pytest.mark.anyio
async def test_a_file_that_was_cut_off_at_any_byte_keeps_all_before(spool: Spool) -> None:
    sizes = [4096]
    for number in range(3):
        await spool.append("key", b"record %d" % number)
        sizes.append(spool._end)
    whole = spool._path.read_bytes()[: sizes[-1]]
    folder = spool._path.parent.parent
    for cut in range(sizes[1], len(whole) + 1):
        torn = Spool(folder / f"cut-{cut}", "s", MOST)
        torn._path.parent.mkdir()
        torn._path.write_bytes(whole[:cut])
        torn.open()
        kept = sum(size <= cut for size in sizes) - 1
        await torn.append("key", b"after")
        assert contents(torn) == [b"record %d" % number for number in range(kept)] + [b"after"]
        torn.close()


@pytest.mark.anyio
async def test_one_damaged_record_does_not_take_those_behind_it(spool: Spool) -> None:
    for number in range(3):
        await spool.append("key", b"record %d" % number)
    records = spool.read()
    with spool._path.open("r+b") as file:
        file.seek(records[1].after - 2)
        file.write(b"\xff")
    again = another(spool)
    assert contents(again) == [b"record 0", b"record 2"]
    again.close()


@pytest.mark.anyio
@pytest.mark.parametrize("damage", ["state", "length", "two records", "zeros"])
async def test_a_damaged_part_does_not_take_what_is_behind_it(spool: Spool, damage: str) -> None:
    for number in range(5):
        await spool.append("key", b"record %d" % number + bytes(5000))
    records = spool.read()
    begins, ends = records[0].after, records[1].after
    with spool._path.open("r+b") as file:
        file.seek(begins + {"two records": ends - begins - 2, "length": 4}.get(damage, 0))
        file.write({"state": b"\x07", "length": b"\xff" * 4, "two records": b"\xff" * 20}.get(damage, bytes(4500)))
    again = another(spool)
    kept = [0, 3, 4] if damage == "two records" else [0, 2, 3, 4]
    tracemalloc.start()
    assert contents(again) == [b"record %d" % number + bytes(5000) for number in kept]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_000_000
    await again.append("key", b"after")
    assert contents(again) == [*(b"record %d" % number + bytes(5000) for number in kept), b"after"]
    again.close()


@pytest.mark.anyio
async def test_a_damaged_beginning_takes_no_record_along(spool: Spool) -> None:
    for number in range(3):
        await spool.append("key", b"record %d" % number)
    with spool._path.open("r+b") as file:
        file.seek(32)
        file.write(b"\xff" * 16)
    assert contents(spool) == [b"record 0", b"record 1", b"record 2"]
    spool.stored(spool.read()[-1].after)
    assert (contents(spool), spool.flag[0]) == ([], 0)
    await spool.append("key", b"after")
    assert contents(spool) == [b"after"]


@pytest.mark.anyio
@pytest.mark.parametrize("read_only", ["pwrite", "open"])
async def test_a_spool_on_a_disk_that_became_read_only_says_so(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, read_only: str
) -> None:
    await spool.append("key", b"record")

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, read_only, refuse)
        if read_only == "open":
            with pytest.raises(StoreUnavailable, match="Read-only"), spool.turn():
                pass
        else:
            record = spool.read()[-1]
            with pytest.raises(StoreUnavailable, match="Read-only"):
                spool.stored(record.after)
    assert contents(spool) == [b"record"]
    with spool.turn() as mine:
        assert mine


@pytest.mark.anyio
async def test_a_spool_that_is_deleted_with_what_waits_is_told(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    await spool.append("key", b"record")
    spool._path.unlink()
    assert contents(spool) == []
    assert "the spool was deleted or replaced" in caplog.text


@pytest.mark.anyio
async def test_what_waits_of_a_session_can_be_erased(spool: Spool) -> None:
    for number in range(4):
        await spool.append(f"key-{number % 2}", b"secret %d" % number)
    assert spool.drop(lambda key, _: key == "key-1") == 2
    assert contents(spool) == [b"secret 0", b"secret 2"]
    assert b"secret 1" not in spool._path.read_bytes()
    assert spool.drop(lambda key, _: key == "key-1") == 0
    await spool.append("key-1", b"new")
    assert contents(spool) == [b"secret 0", b"secret 2", b"new"]


@pytest.mark.anyio
async def test_a_full_spool_takes_nothing_new_but_what_was_paid_for(tmp_path: Path) -> None:
    small = Spool(tmp_path / "spool", "s", 10_000)
    small.open()
    room = await small.reserve(5_000)
    with pytest.raises(StoreUnavailable, match="spool_max_bytes"):
        await small.reserve(5_000)
    await small.append("k", bytes(20_000))
    del room
    with pytest.raises(StoreUnavailable, match="spool_max_bytes"):
        await small.reserve(1)
    small.stored(small.read()[0].after)
    assert small.read() == []
    await small.reserve(5_000)
    small.close()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="room cannot be taken here")
@pytest.mark.anyio
async def test_what_is_under_way_when_the_disk_gets_full_has_room(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await spool.append("k", b"earlier")
    spool.stored(spool.read()[0].after)
    assert contents(spool) == []
    write = os.pwrite

    def pwrite(file: int, content: bytes, start: int) -> int:
        if start + len(content) > os.fstat(file).st_blocks * 512:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content, start)

    def posix_fallocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    await spool.append("k", b"x" * 500_000)
    with pytest.raises(StoreUnavailable, match="No space"):
        await spool.append("k", b"y" * 2_000_000)
    assert [len(content) for content in contents(spool)] == [500_000]


@pytest.mark.anyio
async def test_a_spool_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    spool = Spool(tmp_path / "file", "s", MOST)
    with pytest.raises(StoreUnavailable, match="another folder"):
        spool.open()
    with pytest.raises(StoreUnavailable, match="another folder"):
        await spool.reserve(1)
    with pytest.raises(StoreUnavailable, match="another folder"):
        await spool.append("k", b"x")
    assert (not spool.usable, spool.secrets, spool.flag[0]) == (True, b"", 0)
    spool.close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "s.spool").write_bytes(b"x" * 5000)
    foreign = Spool(tmp_path / "other", "s", MOST)
    with pytest.raises(StoreUnavailable, match="no spool"):
        foreign.open()


@pytest.mark.anyio
async def test_a_folder_that_was_deleted_is_made_again(spool: Spool) -> None:
    await spool.append("k", b"lost")
    for file in spool._path.parent.iterdir():
        file.unlink()
    spool._path.parent.rmdir()
    await spool.append("k", b"kept")
    assert contents(spool) == [b"kept"]


def test_one_process_at_a_time_stores(spool: Spool) -> None:
    other = another(spool)
    with spool.turn() as mine, other.turn() as theirs, spool.turn() as again:
        assert (mine, theirs, again) == (True, False, False)
    with other.turn() as theirs:
        assert theirs
    other.close()


def test_secrets_are_kept(spool: Spool) -> None:
    assert spool.secrets == b""
    spool.keep_secrets(b"s" * 64)
    other = another(spool)
    assert other.secrets == b"s" * 64
    other.close()


def test_a_store_has_one_spool_however_its_url_is_written(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    assert spool_name(f"sqlite:///{file}") == spool_name(f"sqlite+aiosqlite:///{file}") != spool_name("sqlite:///t.db")
    asked = "postgresql+psycopg://me:secret@db/one"
    assert spool_name(asked) == spool_name("postgresql://me:other@db/one") != spool_name("postgresql://me@db/two")


@pytest.mark.anyio
async def test_a_spool_of_another_store_in_which_something_waits_is_found(spool: Spool) -> None:
    folder = spool._path.parent
    (folder / "other.spool").write_bytes(b"\1 is no spool")
    assert waiting_beside(folder, "n") == []
    await spool.append("key", b"record")
    assert waiting_beside(folder, "n") == [spool._path]
    assert waiting_beside(folder, spool._path.stem) == []
    spool.stored(spool.read()[-1].after)
    assert spool.read() == []
    assert waiting_beside(folder, "n") == []


APPENDS = """
import asyncio, sys
from pathlib import Path
from proxy.store import Spool
spool = Spool(Path(sys.argv[1]), "s", 10**8)
spool.open()
async def run():
    with open(sys.argv[3], "w") as told:
        for number in range(100_000):
            await spool.append(sys.argv[2], b"%s %d " % (sys.argv[2].encode(), number) + b"x" * 20_000)
            print(number, file=told, flush=True)
asyncio.run(run())
"""


def told_by(file: Path) -> int:
    """Return of how many appends a process has told."""
    return file.read_text().count("\n") if file.exists() else 0


def test_whatever_was_appended_survives_kill_9(spool: Spool, tmp_path: Path) -> None:
    folder = str(spool._path.parent)
    told: dict[str, int] = {}
    for turn in range(3):
        files = {f"{name}{turn}": tmp_path / f"{name}{turn}.txt" for name in "ab"}
        running = [Forked(run_program, APPENDS, folder, name, str(file)) for name, file in files.items()]
        try:
            until(lambda: all(told_by(file) >= 15 for file in files.values()), "both append")  # noqa: B023 - asked at once
        finally:
            for process in running:
                process.kill()
        for process, (name, file) in zip(running, files.items(), strict=True):
            assert process.wait() == -signal.SIGKILL
            told[name] = max(map(int, file.read_text().split()))
    found: dict[str, list[int]] = {}
    while records := spool.read():
        for record in records:
            key, number, _ = record.content.split(b" ", 2)
            assert key.decode() == record.key
            found.setdefault(record.key, []).append(int(number))
        spool.stored(records[-1].after)
    for name, last in told.items():
        assert found[name] == list(range(len(found[name])))
        assert found[name][-1] >= last
