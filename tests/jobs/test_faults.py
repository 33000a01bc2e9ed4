"""Files that are torn, gone, swapped or changed, disks that are full or closed, clocks that go back: named, and mended.

For a store of rows and one of factors; what the list of cases asks of one of them stands in `test_cases.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import jacstore
import jacstore.storage.files
from helpers_faults import bits, is_right, make, quick, ram_folder
from helpers_process import contents
from jacstore import gram
from jacstore.base.events import ItemDone, SlabDone, UnitDone
from jacstore.base.threads import all_done
from jacstore.errors import DamagedDataError, InvalidRequestError, LockedError

KINDS = ("dense", "factored")
TILE = {"tile": 3}


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with quick():
        yield


@pytest.fixture(scope="module", params=KINDS)
def pristine(request):
    """A store, its kernel, and what they hold."""
    with ram_folder() as folder:
        make(request.param, folder / "run.jac")
        gram(folder / "run.jac", folder / "run.ntk", **TILE)
        truth = {name: bits(jacstore.open(folder / name)) for name in ("run.jac", "run.ntk")}
        yield request.param, folder, truth


@pytest.fixture
def place(pristine):
    """A copy to be damaged."""
    with ram_folder() as folder:
        for name in ("run.jac", "run.ntk"):
            shutil.copytree(pristine[1] / name, folder / name)
        yield folder


def flip(path, draw):
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def tear(path, draw):
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def lengthen(path, draw):
    path.write_bytes(path.read_bytes() + bytes(draw.randrange(1, 100)))


def remove(path, draw):
    path.unlink()


def fill_with_zeros(path, draw):
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES = (flip, tear, lengthen, remove, fill_with_zeros)


def data_files(path):
    """Every file of an array: chunks and shards."""
    return sorted(file for file in path.rglob("*") if file.is_file() and "c" in file.relative_to(path).parts)


def reads_right(path, truth):
    """Whether every read passes its check and gives what nobody damaged."""
    try:
        return is_right(path, truth)
    except DamagedDataError:
        return False


def found_damaged(path):
    """Whether some read of everything stops with a line that names the place."""
    try:
        bits(jacstore.open(path))
    except DamagedDataError as error:
        assert "unit" in str(error) or "tile" in str(error)
        return True
    return False


@pytest.mark.parametrize("damage", [flip, tear, fill_with_zeros], ids=lambda damage: damage.__name__)
def test_a_damaged_record_hinders_no_report_and_no_other_part(damage, pristine, place):
    kind, _, truth = pristine
    for name, damaged, run in (
        ("run.jac", "units_damaged", lambda part: make(kind, place / "run.jac", part=part)),
        ("run.ntk", "groups_damaged", lambda part: gram(place / "run.jac", place / "run.ntk", part=part, **TILE)),
    ):
        path = place / name
        whole = jacstore.open(path).info()
        damage(next((path / "ledger").glob("[ut]*-0000000.json")), random.Random(0))
        found = jacstore.open(path).info()
        assert whole["complete"] and whole[damaged] == []
        assert not found["complete"] and found[damaged] == [0] and found["bytes_stored"] < whole["bytes_stored"]
        with pytest.raises(DamagedDataError, match=r"record of (unit|group) 0"):
            bits(jacstore.open(path))
        if name == "run.jac":
            report = run("2/2").report
            assert not report["complete"] and report["units_computed"] == 0
        assert run(None).info()["complete"] and is_right(path, truth[name])


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damaged_file_of_a_store_is_named_and_its_unit_alone_computed_again(damage, pristine, place):
    kind, _, truth = pristine
    store, draw = place / "run.jac", random.Random(0)
    for file in data_files(store):
        before = file.read_bytes()
        damage(file, draw)
        # Only other readers need the checksum behind a piece, nobody what stands beyond; the next build tidies it up.
        harmless = reads_right(store, truth["run.jac"])
        assert harmless != found_damaged(store) and (harmless or damage is not lengthen)
        checksum_only = damage is flip and harmless
        again = make(kind, store)
        assert again.report["units_computed"] == (0 if checksum_only else 1), file
        assert is_right(store, truth["run.jac"])
        if not checksum_only:
            assert file.read_bytes() == before
        file.write_bytes(before)


@pytest.mark.parametrize("damage", [tear, lengthen, remove], ids=lambda damage: damage.__name__)
def test_every_file_of_a_kernel_that_is_gone_or_of_another_size_is_written_again(damage, pristine, place):
    truth = pristine[2]
    kernel, draw = place / "run.ntk", random.Random(0)
    for file in data_files(kernel):
        before = file.read_bytes()
        damage(file, draw)
        assert found_damaged(kernel) != reads_right(kernel, truth["run.ntk"])
        gram(place / "run.jac", kernel, **TILE)
        assert file.read_bytes() == before and is_right(kernel, truth["run.ntk"])


@pytest.mark.parametrize("name", ["run.jac", "run.ntk"])
def test_two_files_of_one_size_that_changed_places_are_named(name, pristine, place):
    whole, draw = place / name, random.Random(0)
    files = data_files(whole)
    for _ in range(20):
        first, second = draw.sample(files, 2)
        a, b = first.read_bytes(), second.read_bytes()
        if a == b:
            continue
        first.write_bytes(b)
        second.write_bytes(a)
        assert found_damaged(whole), (first, second)
        first.write_bytes(a)
        second.write_bytes(b)
    # Bytes put back right are right again.
    assert is_right(whole, pristine[2][name])


def test_a_whole_array_that_is_gone_is_named_and_mended(pristine, place):
    kind, _, truth = pristine
    for array in sorted(layout.name for layout in jacstore.open(place / "run.jac").layouts.values()):
        shutil.rmtree(place / "run.jac" / array / "c")
        assert found_damaged(place / "run.jac")
        assert make(kind, place / "run.jac").report["units_computed"] == 4
        assert is_right(place / "run.jac", truth["run.jac"])


# --- disks that do not take what they are given -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("step", ["fsync", "fsync record", "rename"])
def test_wherever_a_disk_fails_what_is_finished_stays(step, error, pristine, place, monkeypatch):
    kind, _, truth = pristine

    def failing(found, name):
        if found == step and "2" in Path(name).name + Path(name).parent.name:
            raise OSError(error, os.strerror(error))

    for name, run in (
        ("new.jac", lambda: make(kind, place / "new.jac")),
        ("new.ntk", lambda: gram(place / "run.jac", place / "new.ntk", **TILE)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(jacstore.storage.files, "before_step", failing)
            try:
                run()
            except InvalidRequestError as refused:
                text = str(refused)
                assert "\n" not in text and str(place / name) in text
                assert ("disk full" in text) == (error in (errno.ENOSPC, errno.EDQUOT))
        info = jacstore.open(place / name).info()
        kept = info.get("units_done", 0)
        again = run()
        assert again.complete and is_right(place / name, truth["run" + name[3:]])
        assert again.report.get("units_reused", 0) == kept


@pytest.fixture
def disk(tmp_path):
    """A function that mounts a disk of so many bytes, where this process may, and one that closes it for writing."""
    libc, where = ctypes.CDLL(None, use_errno=True), tmp_path / "disk"
    where.mkdir()
    remount, read_only = 32, 1

    def mount(size, flags=0):
        given = str(where).encode(), b"tmpfs", flags, b"size=%d" % size
        if libc.mount(b"tmpfs", *given) != 0:
            pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
        return where

    mount(50_000_000)
    yield where, lambda closed: mount(50_000_000, remount | (read_only if closed else 0))
    assert libc.umount2(str(where).encode(), 2) == 0


def test_a_disk_that_is_closed_for_writing_can_be_read_and_later_continued(disk, pristine):
    kind, folder, truth = pristine
    where, close = disk
    make(kind, where / "run.jac", part="1/2")
    close(True)
    for run in (
        lambda: make(kind, where / "run.jac"),
        lambda: make(kind, where / "new.jac"),
        lambda: make(kind, where / "run.jac", overwrite=True),
        lambda: gram(folder / "run.jac", where / "new.ntk"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            run()
        assert "\n" not in str(refused.value)
    assert jacstore.open(where / "run.jac").info()["units_done"] == 2
    close(False)
    store = make(kind, where / "run.jac")
    assert store.report["units_reused"] == 2 and is_right(where / "run.jac", truth["run.jac"])
    close(True)
    # A reader needs no place to write to, not even for a note that something is damaged.
    assert is_right(where / "run.jac", truth["run.jac"])
    assert gram(where / "run.jac").complete


def test_a_disk_that_fills_in_a_gram_can_be_continued_when_there_is_space(disk, pristine, monkeypatch):
    _, folder, truth = pristine
    where, _ = disk
    ballast = where / "ballast"

    def fill(step, name):
        if step == "write" and name.startswith("kernel/") and not ballast.exists():
            with open(ballast, "wb", buffering=0) as file:
                for size in (10**6, 4096, 1):
                    try:
                        while True:
                            file.write(bytes(size))
                    except OSError:
                        continue

    with monkeypatch.context() as patch:
        patch.setattr(jacstore.storage.files, "before_step", fill)
        with pytest.raises(InvalidRequestError, match="disk full while writing"):
            gram(folder / "run.jac", where / "run.ntk", **TILE)
    assert not jacstore.open(where / "run.ntk").complete
    ballast.unlink()
    assert gram(folder / "run.jac", where / "run.ntk", **TILE).complete and is_right(
        where / "run.ntk", truth["run.ntk"]
    )


# --- time and other processes -----------------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_changes_nothing(pristine, place, monkeypatch):
    kind, _, truth = pristine
    shutil.rmtree(place / "run.jac")
    make(kind, place / "run.jac", part="1/2")
    future = time.time() + 10**8
    for path in place.rglob("*"):
        os.utime(path, (future, future))
    monkeypatch.setattr(time, "time", lambda: 1.0)
    store = make(kind, place / "run.jac")
    assert store.report["units_reused"] == 2 and is_right(place / "run.jac", truth["run.jac"])
    assert gram(place / "run.jac", place / "run.ntk", **TILE).report["tiles_reused"] == 6


def test_a_second_writer_is_refused_while_the_first_is_at_work(pristine, place):
    kind, _, truth = pristine
    refused = []

    def second(run):
        def listener(event):
            if isinstance(event, UnitDone | SlabDone | ItemDone) and not refused:
                with pytest.raises(LockedError) as error:
                    run()
                refused.append(str(error.value))

        return listener

    make(kind, place / "new.jac", listener=second(lambda: make(kind, place / "new.jac")))
    assert f"process {os.getpid()} on this host" in refused.pop()
    again = gram(
        place / "run.jac",
        place / "new.ntk",
        listener=second(lambda: gram(place / "run.jac", place / "new.ntk", **TILE)),
        **TILE,
    )
    assert "--part" in refused.pop() and again.complete
    assert is_right(place / "new.jac", truth["run.jac"]) and is_right(place / "new.ntk", truth["run.ntk"])


def test_reading_writes_nothing(pristine, place):
    before = contents(place)
    for name in ("run.jac", "run.ntk"):
        jacstore.open(place / name).info()
        bits(jacstore.open(place / name))
    assert contents(place) == before


def test_once_a_command_has_failed_nothing_of_it_goes_on(place, monkeypatch):
    """Reads that still ran wrote their notes after the error, into a folder that its owner had removed by then."""
    for file in data_files(place / "run.jac"):
        if "outputs" not in file.parts and "norms" not in file.parts:
            file.write_bytes(bytes(file.stat().st_size))
    mark = jacstore.JacobianStore.mark

    def slowly(self, unit, wrong=False):
        if unit:
            time.sleep(0.05)
        mark(self, unit, wrong)

    monkeypatch.setattr(jacstore.JacobianStore, "mark", slowly)
    for work in (lambda: bits(jacstore.open(place / "run.jac")), lambda: gram(place / "run.jac", out=place / "x.ntk")):
        with pytest.raises(DamagedDataError):
            work()
        shutil.copytree(place / "run.jac", place / "kept.jac")
        shutil.rmtree(place / "run.jac")
        time.sleep(0.1)
        assert not (place / "run.jac").exists()
        (place / "kept.jac").rename(place / "run.jac")


def test_a_failed_task_waits_for_those_that_run_and_leaves_out_the_rest():
    begun, ended, both = [], [], threading.Barrier(2, timeout=10)

    def work(task):
        begun.append(task)
        if task < 2:
            both.wait()
        if task == 0:
            raise ValueError("the first")
        time.sleep(0.1)
        ended.append(task)

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(ValueError, match="the first"):
            all_done(pool, work, range(100))
        assert sorted(begun) == [0, *sorted(ended)] and len(begun) < 100
        assert all_done(pool, lambda task: task**2, range(5)) == [0, 1, 4, 9, 16]
