"""File systems without locks, and folders that cannot be flushed: the same bytes, one at a time, and one line."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import jacstore
import jacstore.kernels.gram
import jacstore.rows.build
import jacstore.storage.exclusive
from helpers_errors import refusal
from helpers_process import MAIN, Command, contents, environment, invoke, run_command, write_target
from jacstore import build, gram
from jacstore.base.events import Waiting
from jacstore.errors import InvalidRequestError, LockedError
from jacstore.storage.exclusive import held
from jacstore.storage.files import UNFLUSHED
from jacstore.store.codec_choice import measured_disk_speed
from jacstore.testing import mlp

# What a process on such a file system does first.
WITHOUT = """
import errno, fcntl, os, stat
real = os.fsync
def flock(*_):
    raise OSError({number}, os.strerror({number}))
def fsync(descriptor):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    real(descriptor)
fcntl.flock, os.fsync = flock, fsync
"""


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, None])
def no_locks(request, monkeypatch):
    """A file system without locks, or one whose locks hold on one machine only: elsewhere they do nothing."""

    def refuse(*_):
        if request.param:
            raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_build_and_a_gram_without_locks_give_the_same(no_locks, tmp_path):
    assert build(mlp(7), tmp_path / "run.jac", unit_size=2).complete
    assert gram(tmp_path / "run.jac", out=tmp_path / "run.ntk", tile=3).complete
    truth = gram(build(mlp(7), None, unit_size=2), tile=3)
    assert (jacstore.open(tmp_path / "run.ntk").array.compute() == truth.array.compute()).all()
    assert not list(tmp_path.rglob("*.held*"))


def refuse_to_flush(monkeypatch, kind, number):
    real = os.fsync

    def fsync(descriptor):
        if kind(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_folders_that_cannot_be_flushed_are_no_fault(number, monkeypatch, tmp_path):
    refuse_to_flush(monkeypatch, stat.S_ISDIR, number)
    build(mlp(7), tmp_path / "run.jac", unit_size=2)
    assert gram(tmp_path / "run.jac", out=tmp_path / "run.ntk").complete


@pytest.mark.parametrize(("kind", "number"), [(stat.S_ISREG, errno.EINVAL), (stat.S_ISDIR, errno.EIO)])
def test_files_must_be_flushed_and_folders_without_an_error(kind, number, monkeypatch, tmp_path):
    refuse_to_flush(monkeypatch, kind, number)
    assert "cannot be written" in refusal(build, mlp(7), tmp_path / "run.jac", codec="none", error=InvalidRequestError)


@pytest.mark.parametrize("number", UNFLUSHED)
def test_the_speed_of_a_disk_that_cannot_flush_is_that_of_writing_to_it(number, monkeypatch, tmp_path):
    refuse_to_flush(monkeypatch, stat.S_ISREG, number)
    assert 0 < measured_disk_speed(tmp_path / "run.jac") < float("inf")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO, errno.ENOSPC])
def test_a_build_that_measures_the_disk_is_refused_in_one_line_where_files_cannot_be_flushed(
    number, monkeypatch, tmp_path
):
    refuse_to_flush(monkeypatch, stat.S_ISREG, number)
    said = refusal(build, mlp(7), tmp_path / "run.jac", codec="auto", error=InvalidRequestError)
    assert ("disk full" if number == errno.ENOSPC else "cannot be written") in said and str(tmp_path) in said


def test_a_folder_in_which_no_file_can_be_made_to_measure_the_disk_is_named(monkeypatch, tmp_path):
    def refuse(**_):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    said = refusal(measured_disk_speed, tmp_path / "run.jac", error=InvalidRequestError)
    assert str(tmp_path) in said and "--out" in said


def test_a_build_without_locks_is_refused_a_second_time_killed_and_continued(tmp_path):
    target, out = write_target(tmp_path), tmp_path / "run.jac"
    code = WITHOUT.format(number=errno.ENOSYS) + MAIN
    words = ("build", f"{target}:held", "--out", out, "--codec", "none", "--unit-size", 2, "--batch-size", 2)
    with Command(*words, code=code) as first:
        first.wait_for(lambda: (out / "ledger/unit-0000000.json").exists() and (tmp_path / "reached").exists())
        second = run_command(*words, code=code)
        assert second.returncode == 2 and f"process {first.process.pid}" in second.stderr
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    (tmp_path / "go").touch()
    again = run_command(*words, code=code)
    assert again.returncode == 0 and "reused" in again.stdout
    kernel = run_command("gram", out, "--out", tmp_path / "run.ntk", code=code)
    assert kernel.returncode == 0 and "fault" not in kernel.stderr
    assert invoke("verify", out, "--target", f"{target}:held").exit_code == 0


def test_of_two_claims_on_the_same_units_exactly_one_wins(no_locks, tmp_path):
    from jacstore import StoreWriter

    with StoreWriter(tmp_path / "run.jac", {"w": (4,)}, 4, 1, unit_size=1):
        again = StoreWriter(tmp_path / "run.jac", {"w": (4,)}, 4, 1, unit_size=1)
        assert "process" in refusal(again.__enter__, error=LockedError)


COUNT = """
import sys
from pathlib import Path
from jacstore.storage.exclusive import held
folder = Path(sys.argv[1])
for _ in range(40):
    with held(folder / "turn"):
        number = int((folder / "count").read_text())
        (folder / "count").write_text(str(number + 1))
"""


def dead(**changes: object) -> str:
    """What a process that is no more left."""
    owner = {
        "host": jacstore.base.machine.hostname(),
        "boot": jacstore.base.machine.boot_id(),
        "pid": os.getpid(),
        "start": "1",
    }
    return json.dumps({**owner, "token": "x", **changes})


def test_processes_take_turns_and_one_alone_takes_over_what_a_dead_one_left(tmp_path):
    (tmp_path / "count").write_text("0")
    (tmp_path / "turn").write_text(dead())
    # One that died while it took that over.
    left = jacstore.storage.exclusive._identity(tmp_path / "turn")
    (tmp_path / f"turn.{left}").write_text(dead(token="y"))
    command = [sys.executable, "-c", COUNT, str(tmp_path)]
    running = [subprocess.Popen(command, env=environment()) for _ in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
    assert (tmp_path / "count").read_text() == "160"
    assert [path.name for path in tmp_path.iterdir()] == ["count"]


@pytest.mark.parametrize("body", [dead(host="elsewhere"), "", "{", "[]"], ids=["elsewhere", "empty", "torn", "list"])
def test_what_nobody_here_can_ask_about_is_taken_over_when_it_has_stood_still(body, limits, tmp_path):
    (tmp_path / "turn").write_text(body)
    limits(guard_stale_seconds=0.0)
    with held(tmp_path / "turn"):
        assert str(os.getpid()) in (tmp_path / "turn").read_text()
    assert not (tmp_path / "turn").exists()


def test_a_process_that_was_taken_for_dead_leaves_what_another_one_holds(tmp_path):
    with held(tmp_path / "turn"):
        (tmp_path / "turn").write_text(dead())
    assert (tmp_path / "turn").read_text() == dead()


# --- machines and containers that cannot ask each other ---------------------------------------------------------------


def guest(**changes):
    """A lock of a living process that this one cannot ask: it is another one's word against what is seen here."""
    return json.dumps(
        {**jacstore.base.machine.this_process(), "token": "x", "beat": 0, "first": 0, "last": 3} | changes
    )


@pytest.mark.parametrize(
    "changes",
    [{"space": "pid:[1]", "pid": 2**22 + 1}, {"boot": "another", "pid": 2**22 + 1}],
    ids=["a container of the same host name", "another machine of the same name"],
)
def test_a_lock_of_one_name_and_other_processes_is_watched_and_respected(changes, tmp_path):
    build(mlp(7), tmp_path / "run.jac", unit_size=2, part="1/2")
    path = tmp_path / "run.jac/ledger/lock-0000000-0000003.json"
    path.write_text(guest(**changes))

    def beat(event):
        if isinstance(event, Waiting):
            path.write_text(guest(**changes, beat=1))

    assert "being worked on" in refusal(build, mlp(7), tmp_path / "run.jac", listener=beat, error=LockedError)
    assert json.loads(path.read_text())["beat"] == 1


def test_a_creation_by_two_at_once_is_made_by_one_though_flock_does_nothing(monkeypatch, tmp_path):
    """The later one deleted the arrays, with finished units, of the first."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    create, inside, most = jacstore.storage.zarr_group._create_array, [], []

    def watched(*given):
        inside.append(threading.get_ident())
        most.append(len(set(inside)))
        create(*given)
        inside.remove(threading.get_ident())

    monkeypatch.setattr(jacstore.storage.zarr_group, "_create_array", watched)
    together = threading.Barrier(2, timeout=60)

    def begin(part):
        together.wait()
        with jacstore.StoreWriter(tmp_path / "run.jac", {"w": (4,)}, 4, 1, unit_size=1, part=part) as writer:
            for start, _ in writer.missing:
                writer.write_unit(start, {"w": np.ones((1, 1, 4), np.float32)})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(begin, [(1, 2), (2, 2)]))
    assert set(most) == {1} and len(most) == 3 and jacstore.open(tmp_path / "run.jac").complete


@pytest.mark.parametrize("codec", ["none", "auto"])
def test_a_choice_that_nobody_gave_is_not_compared_with_that_of_a_run_that_began_together(codec, monkeypatch, tmp_path):
    """It ended in "unit_size: 67 -> 100; repeat the first --unit-size", which nobody had given."""
    choose, words = jacstore.rows.build._Job.choose, {"codec": codec, "layout": "dense"}

    def later(job):
        monkeypatch.setattr(jacstore.rows.build._Job, "choose", choose)
        build(mlp(10), tmp_path / "run.jac", unit_size=3, part="1/2", **words)
        return choose(job)

    monkeypatch.setattr(jacstore.rows.build._Job, "choose", later)
    store = build(mlp(10), tmp_path / "run.jac", part="2/2", **words)
    assert store.complete and store.unit_size == 3 and store.report["units_computed"] == 2


def test_rows_of_a_first_batch_are_not_used_for_smaller_units_of_a_run_that_began_together(monkeypatch, tmp_path):
    """Rows computed to choose a codec are of as many examples as the units that were proposed."""
    choose, words = jacstore.rows.build._Job.choose, {"codec": "auto", "layout": "dense"}

    def earlier(job):
        monkeypatch.setattr(jacstore.rows.build._Job, "choose", choose)
        chosen = choose(job)
        build(mlp(10), tmp_path / "run.jac", unit_size=1, part="2/2", **words)
        return chosen

    monkeypatch.setattr(jacstore.rows.build._Job, "choose", earlier)
    store = build(mlp(10), tmp_path / "run.jac", part="1/2", **words)
    assert store.complete and store.unit_size == 1
    rows = build(mlp(10), None, **words).array.compute()
    np.testing.assert_allclose(store.array.compute(), rows, rtol=1e-5, atol=1e-6)
    assert jacstore.verify(store, mlp(10)).ok


def test_a_run_whose_lock_was_taken_over_writes_nothing_more(tmp_path):
    with jacstore.StoreWriter(tmp_path / "run.jac", {"w": (4,)}, 2, 1, unit_size=1) as writer:
        writer.write_unit(0, {"w": np.ones((1, 1, 4), np.float32)})
        (path,) = (tmp_path / "run.jac/ledger").glob("lock-*")
        path.write_text(guest(token="another"))
        before = contents(tmp_path)
        text = refusal(writer.write_unit, 1, {"w": np.ones((1, 1, 4), np.float32)}, error=LockedError)
        assert "took its lock over" in text and contents(tmp_path) == before
    assert path.read_text() == guest(token="another")


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("address", ["ftp://host/run", "hdfs://b/x", "MEMORY://", "file:///tmp/x", "ftp:/host/run"])
def test_an_address_that_is_not_known_is_refused_wherever_a_path_is_taken(address, kind, tmp_path, monkeypatch):
    """It became a local folder named ftp: and was reported as success."""
    held, given = build(mlp(3), None), kind(address)
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: build(mlp(3), given),
        lambda: jacstore.rows.build.plan_build(mlp(3), given, overwrite=True),
        lambda: jacstore.StoreWriter(given, {"w": (4,)}, 4, 1),
        lambda: jacstore.open(given),
        lambda: gram(given),
        lambda: gram(held, out=given),
        lambda: jacstore.kernels.gram.plan_for(held, out=given, overwrite=True),
        lambda: jacstore.sample(held, alpha=1.0, n=1, key=0, method="cg", out=f"{address}/x.npy"),
    ):
        text = refusal(call)
        assert "is an address" in text and "memory://" in text and "out=" in text
    assert list(tmp_path.iterdir()) == []


def test_a_name_with_a_colon_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert build(mlp(3), "run:1.jac").complete and jacstore.open("run:1.jac").complete
