"""Items on other processes, on a cluster, and in parts: the kernel is that of one process, and J is read once."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from dask.base import get_scheduler
from distributed import Client, LocalCluster

import jacstore
import jacstore.kernels.executors
import jacstore.kernels.plan.plan
import jacstore.kernels.plan.schedule
import jacstore.storage.files
import jacstore.store.layout
from helpers_errors import refusal
from helpers_limits import limited
from helpers_process import SECONDS, contents, environment, hold_reads, invoke
from jacstore import StoreWriter, build, gram
from jacstore.base.events import ItemDone
from jacstore.errors import DamagedDataError, IncompleteError, LockedError, RequestMismatchError, RunInterruptedError
from jacstore.testing import TOLERANCE, Counting, dense_kernel, kernel_error, mlp
from support import values

N, K, P = 20, 3, 660
FLOAT32 = TOLERANCE["float32"]


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).normal(size=(N, K, P)).astype(np.float32)


@pytest.fixture(scope="module")
def store(rows, tmp_path_factory):
    """Rows in 48 pieces of columns, so that workers can share them."""
    path = tmp_path_factory.mktemp("store") / "run.jac"
    with limited(piece_columns=(14, 14)), StoreWriter(path, {"w": (P,)}, N, K, unit_size=4) as writer:
        for a, b in writer.missing:
            writer.write_unit(a, {"w": rows[a:b]})
    return path


@pytest.fixture(scope="module")
def alone(store):
    """The kernel of one process."""
    return values(gram(store, tile=7))


@pytest.fixture(scope="module")
def cluster():
    """A cluster elsewhere: three workers, spawned before any test changed the working directory."""
    settings = {"n_workers": 3, "threads_per_worker": 1, "memory_limit": 0, "silence_logs": 50}
    with LocalCluster(processes=True, dashboard_address="127.0.0.1:0", **settings) as cluster:
        yield cluster


def check(kernel, alone, rows):
    assert kernel.complete and kernel.report["passes"] == 1.0
    assert kernel_error(values(kernel), alone, rows) <= FLOAT32
    assert kernel_error(values(kernel), dense_kernel(rows)) <= FLOAT32
    assert np.array_equal(values(kernel), values(kernel).T)


# --- processes and clusters -------------------------------------------------------------------------------------------


def test_two_processes_read_j_once_and_agree_with_one(store, alone, rows, tmp_path):
    seen = Counting()
    kernel = gram(store, out=tmp_path / "run.ntk", scheduler="processes", workers=2, tile=7, listener=seen)
    check(kernel, alone, rows)
    assert len(kernel.plan.items) == len(seen.of(ItemDone)) == kernel.report["items_computed"] == 2
    assert kernel.report["tiles_computed"] == kernel.report["tiles_total"] == 6
    # A finished kernel is left alone, whoever asks.
    again = gram(store, out=tmp_path / "run.ntk", scheduler="processes", workers=2, tile=7)
    assert again.report["items_computed"] == 0 and again.report["bytes_read"] == 0


def test_case_14_one_and_three_workers_of_a_cluster_agree(store, cluster, alone, rows, tmp_path):
    for workers in (1, 3, None):
        out = tmp_path / f"{workers}.ntk"
        kernel = gram(store, out=out, scheduler=cluster.scheduler_address, workers=workers, tile=7)
        check(kernel, alone, rows)
        assert len(kernel.plan.items) == (workers or 3)


@pytest.mark.parametrize(
    "options", [{"mode": "trace"}, {"mode": "diagonal"}, {"by_leaf": True}, {"triangle": True}], ids=str
)
def test_every_mode_can_be_shared(options, store, cluster, rows, tmp_path):
    kernel = gram(store, out=tmp_path / "run.ntk", scheduler=cluster.scheduler_address, workers=2, tile=7, **options)
    mode = options.get("mode", "full")
    assert kernel.complete and kernel.report["passes"] == 1.0
    assert kernel_error(values(kernel), dense_kernel(rows, mode=mode), rows, mode=mode) <= FLOAT32


def test_a_cluster_with_another_working_directory_finds_the_store(store, cluster, alone, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(store.parent)
    kernel = gram("run.jac", out=os.path.relpath(tmp_path / "run.ntk"), scheduler=cluster.scheduler_address, tile=7)
    check(kernel, alone, rows)
    assert kernel.path == os.path.relpath(tmp_path / "run.ntk") and (tmp_path / "run.ntk/zarr.json").exists()


def test_damage_that_a_worker_finds_is_reported_as_here(store, cluster, tmp_path):
    damaged = Path(shutil.copytree(store, tmp_path / "run.jac"))
    (damaged / "rows/c/3/0/0").unlink()
    text = refusal(gram, damaged, out=tmp_path / "run.ntk", scheduler=cluster.scheduler_address, error=DamagedDataError)
    assert "unit 3 (examples 12 to 15)" in text and "leaf w" in text and "rows/c/3/0/0 is missing" in text


def test_a_run_on_a_cluster_can_be_interrupted_and_continued(store, cluster, alone, rows, tmp_path):
    words = {"out": tmp_path / "run.ntk", "scheduler": cluster.scheduler_address, "workers": 3, "tile": 1}
    with pytest.raises(RunInterruptedError):
        gram(store, **words, stop=lambda: True)
    kernel = gram(store, **words)
    assert kernel.complete and kernel_error(values(kernel), alone, rows) <= FLOAT32


def until(condition):
    """Wait for another process to come so far."""
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_a_worker_killed_in_an_item_changes_nothing(store, cluster, alone, rows, tmp_path, limits):
    limits(slab_columns=14)
    latch = tmp_path / "latch"
    latch.mkdir()

    def hold():
        os.environ.update(LATCH=str(latch), LATCH_COLUMN="100")
        hold_reads()

    with Client(cluster) as client:
        client.run(hold)
    words = {"scheduler": cluster.scheduler_address, "workers": 3, "tile": 7}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gram, store, out=tmp_path / "run.ntk", **words)
        try:
            # The item of the first columns has multiplied some slabs by then, the others none.
            until(lambda: len(list(latch.glob("reached-*"))) == 3)
            reached = sorted(latch.glob("reached-*"), key=lambda path: path.stat().st_mtime_ns)
            os.kill(int(reached[-1].name.split("-")[1]), signal.SIGKILL)
        finally:
            (latch / "go").touch()
        kernel = running.result(SECONDS)
    assert kernel.complete and kernel_error(values(kernel), alone, rows) <= FLOAT32
    # What the killed worker read is not counted, and what it left in a checkpoint is not read again.
    assert kernel.report["items_computed"] == 3 and 0.5 < kernel.report["passes"] <= 1.0
    assert not [name for name in contents(tmp_path / "run.ntk") if name.startswith("partials/")]


def test_a_worker_that_comes_back_after_its_run_ended_writes_nothing(store, tmp_path, limits):
    """Tiles of a finished kernel were replaced by those of a run that had been interrupted, and verify failed."""
    latch, out = tmp_path / "latch", tmp_path / "run.ntk"
    latch.mkdir()

    def hold():
        os.environ.update(LATCH=str(latch), LATCH_COLUMN="100")
        hold_reads()

    settings = {"n_workers": 1, "threads_per_worker": 1, "memory_limit": 0, "silence_logs": 50}
    with LocalCluster(processes=True, dashboard_address="127.0.0.1:0", **settings) as own, Client(own) as client:
        client.run(hold)
        words = {"scheduler": own.scheduler_address, "workers": 1, "tile": 7}
        limits(slab_columns=14, ending_seconds=0.1)
        with pytest.raises(RunInterruptedError):
            gram(store, out=out, stop=lambda: bool(list(latch.glob("reached-*"))), **words)
        assert gram(store, out=out, overwrite=True, dtype="float32", tile=7).complete
        before = contents(out)
        (latch / "go").touch()
        # An item of nobody has its turn when the worker is done with the other.
        until(lambda: not any(client.processing().values()) and client.submit(os.getpid, pure=False).result(SECONDS))
        assert contents(out) == before and jacstore.verify(out).ok


def test_an_interrupt_is_told_to_workers_who_save_a_checkpoint_and_end(store, tmp_path, limits):
    limits(slab_columns=14)
    latch, out = tmp_path / "latch", tmp_path / "run.ntk"
    latch.mkdir()

    def hold():
        os.environ.update(LATCH=str(latch), LATCH_COLUMN="100")
        hold_reads()

    def reached():
        if len(list(latch.glob("reached-*"))) < 3:
            return False
        (latch / "go").touch()
        return True

    with LocalCluster(
        processes=True, n_workers=3, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0"
    ) as own:
        with Client(own) as client:
            client.run(hold)
        with pytest.raises(RunInterruptedError):
            gram(store, out=out, scheduler=own.scheduler_address, workers=3, tile=7, stop=reached)
    # All have ended by then, the one that had multiplied some slabs with a checkpoint.
    assert [name for name in contents(out) if name.startswith("checkpoints/")]
    assert not list((out / "ledger").glob("lock-*"))


def test_two_clusters_may_run_on_one_machine(store, tmp_path):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8787))
            taken.listen()
        except OSError:
            # Somebody else has it already, which is as good.
            pass
        assert gram(store, out=tmp_path / "run.ntk", scheduler="processes", workers=1, tile=7).complete


SCRIPT = """
import os, sys
from pathlib import Path

with open("runs", "a") as file:
    file.write(f"{os.getpid()} ")

import jacstore

if sys.argv[1:]:
    from tests.jobs import test_scheduler
    test_scheduler.kill_a_worker()
for name in ("first.ntk", "second.ntk"):
    kernel = jacstore.gram("run.jac", out=name, scheduler="processes", workers=2, tile=7)
print(Path(__file__).name, __spec__, kernel.complete)
"""


def kill_a_worker():
    """Before the first item is handed out, kill a worker and wait for the one that takes its place."""
    submit = Client.submit

    def killing(self, *args, **words):
        Client.submit = submit
        (address, pid), *_ = self.run(os.getpid).items()
        os.kill(pid, signal.SIGKILL)
        until(lambda: address not in (there := self.scheduler_info()["workers"]) and len(there) == 2)
        return submit(self, *args, **words)

    Client.submit = killing


@pytest.mark.parametrize("killed", [False, True])
def test_a_script_without_a_guard_is_not_run_again_by_its_workers(store, alone, rows, tmp_path, killed):
    shutil.copytree(store, tmp_path / "run.jac")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", *["killed"] * killed]
    run = subprocess.run(
        command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=SECONDS, env=environment()
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "script.py None True\n", "")
    assert len((tmp_path / "runs").read_text().split()) == 1
    for name in ("first.ntk", "second.ntk"):
        kernel = jacstore.open(tmp_path / name)
        assert kernel.complete and kernel_error(values(kernel), alone, rows) <= FLOAT32


# --- many items -------------------------------------------------------------------------------------------------------


def test_a_run_and_a_rerun_list_their_items_and_their_records_no_more_often_for_many(tmp_path, monkeypatch):
    """Lists of all items were made anew several times for each of them: 300 CPU seconds for 5,050."""
    made, listed = [], []
    plans, names = jacstore.kernels.plan.plan, jacstore.storage.files.Folder.names
    monkeypatch.setattr(plans, "Item", lambda real=plans.Item, **named: made.append(1) or real(**named))
    monkeypatch.setattr(jacstore.storage.files.Folder, "names", lambda *given: listed.append(1) or names(*given))
    counts = {}
    for n, items in ((5, 15), (15, 120)):
        held = build(mlp(n), tmp_path / f"{n}.jac", layout="factored", codec="none")
        for name in ("run", "rerun"):
            made.clear()
            listed.clear()
            gram(held, out=tmp_path / f"{n}.ntk", tile=1)
            counts[name, n] = len(listed)
            assert len(made) == items
    assert counts["run", 15] == counts["run", 5] and counts["rerun", 15] == counts["rerun", 5]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_store_in_ram_cannot_go_to_processes(tmp_path):
    held = build(mlp(3), None)
    for other in (None, held):
        text = refusal(gram, held, other, tmp_path / "run.ntk", scheduler="processes", workers=1)
        assert "RAM" in text and "--scheduler threads" in text and "scheduler=" in text
    assert not (tmp_path / "run.ntk").exists()


def test_a_kernel_in_ram_cannot_come_from_processes(store):
    text = refusal(gram, store, scheduler="processes", workers=1)
    assert "RAM" in text and "--scheduler threads" in text and "--out" in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"scheduler": "dask"}, "--scheduler dask: allowed are threads, processes or an address (scheduler=)"),
        ({"scheduler": "udp://nowhere"}, "--scheduler udp://nowhere"),
        ({"workers": 2}, "--scheduler processes"),
    ],
)
def test_a_scheduler_that_cannot_be_is_refused(words, named, store, tmp_path):
    assert named in refusal(gram, store, out=tmp_path / "run.ntk", **words)


def test_a_scheduler_that_does_not_answer_is_refused(store, tmp_path, monkeypatch):
    import jacstore.kernels.executors

    patient = jacstore.kernels.executors.Client
    monkeypatch.setattr(
        jacstore.kernels.executors, "Client", lambda address, **named: patient(address, **named | {"timeout": "0.5s"})
    )
    with socket.socket() as closed:
        # Bound all the while, so that no cluster of another test takes the port.
        closed.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        text = refusal(gram, store, out=tmp_path / "run.ntk", scheduler=address)
    assert address in text and "no Dask scheduler answers" in text and "scheduler=" in text


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_whichever_part_comes_last_seals_the_kernel(order, store, alone, rows, tmp_path):
    passes = 0.0
    for place, number in enumerate(order):
        kernel = gram(store, out=tmp_path / "run.ntk", part=f"{number}/2", tile=7)
        assert kernel.complete == kernel.report["complete"] == (place == 1)
        assert kernel.report["items_computed"] == 1 and kernel.report["items_total"] == 2
        passes += kernel.report["passes"]
    assert passes == 1.0
    assert kernel_error(values(kernel), alone, rows) <= FLOAT32
    # Both may be run again, in any order, and are found finished.
    for number in (1, 2):
        again = gram(store, out=tmp_path / "run.ntk", part=f"{number}/2", tile=7)
        assert again.complete and again.report["items_computed"] == 0


def test_the_order_of_the_parts_does_not_show_in_the_bits(store, tmp_path):
    for name, order in (("a", (1, 2, 3)), ("b", (3, 1, 2))):
        for number in order:
            gram(store, out=tmp_path / name, part=(number, 3), tile=7)
    assert contents(tmp_path / "a", "kernel") == contents(tmp_path / "b", "kernel")


def test_half_a_kernel_is_not_a_kernel(store, tmp_path):
    kernel = gram(store, out=tmp_path / "run.ntk", part="2/2", tile=7)
    assert "incomplete" in refusal(lambda: kernel.array, error=IncompleteError)
    result = invoke("info", tmp_path / "run.ntk")
    assert result.exit_code == 0 and "incomplete: 0 of 6 tiles" in result.stdout


@pytest.mark.parametrize("part", ["1/3", "2/1", None])
def test_parts_of_another_number_are_refused(part, store, tmp_path):
    gram(store, out=tmp_path / "run.ntk", part="1/2", tile=7)
    text = refusal(gram, store, out=tmp_path / "run.ntk", part=part, tile=7)
    assert "--part 2/1: allowed are 1/1 to 1/1" in text if part == "2/1" else "parts: 2 -> " in text


def test_more_parts_than_items_leave_some_with_nothing_to_do(tmp_path):
    small = build(mlp(3), tmp_path / "run.jac", codec="none")
    reports = [gram(small, out=tmp_path / "run.ntk", part=(n, 3)).report for n in (1, 2, 3)]
    assert sum(report["items_computed"] for report in reports) == 1 and reports[-1]["complete"]


def test_two_parts_may_run_at_once_but_not_one_part_twice(store, alone, rows, tmp_path):
    holding, going = threading.Event(), threading.Event()

    def hold(event):
        if isinstance(event, ItemDone):
            holding.set()
            assert going.wait(SECONDS)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gram, store, out=tmp_path / "run.ntk", part="1/2", tile=7, listener=hold)
        assert holding.wait(SECONDS)
        try:
            text = refusal(gram, store, out=tmp_path / "run.ntk", part="1/2", tile=7, error=LockedError)
            assert re.search(rf"process {os.getpid()} on this host", text) and "--part" in text
            kernel = gram(store, out=tmp_path / "run.ntk", part="2/2", tile=7)
        finally:
            going.set()
        assert first.result(SECONDS).complete and kernel.complete
    assert kernel_error(values(kernel), alone, rows) <= FLOAT32


def test_other_options_than_the_first_parts_are_refused(store, tmp_path):
    gram(store, out=tmp_path / "run.ntk", part="1/2", tile=7)
    for changes in ({"tile": 5}, {"mode": "trace"}, {"dtype": "float32"}, {"precision": "float64"}, {"by_leaf": True}):
        text = refusal(
            gram, store, out=tmp_path / "run.ntk", part="2/2", **({"tile": 7} | changes), error=RequestMismatchError
        )
        assert f"{next(iter(changes))}: " in text
    other = build(mlp(3), tmp_path / "other.jac", codec="none")
    assert "store: " in refusal(gram, other, out=tmp_path / "run.ntk", part="2/2", tile=7, error=RequestMismatchError)
    assert Path(tmp_path / "run.ntk/zarr.json").exists()


# --- a cluster of the user's own --------------------------------------------------------------------------------------


def test_what_is_loaded_while_a_client_is_active_is_what_workers_computed(store, cluster, alone, rows, tmp_path):
    """Dask then computes on other processes, whose copies of an array here are nothing to this one."""
    kernel = gram(store, out=tmp_path / "run.ntk", tile=7)
    y = np.random.default_rng(0).standard_normal(len(alone))
    truth = np.linalg.solve(alone + np.eye(len(alone)), y)
    with Client(cluster):
        for matrix in (alone, da.from_array(alone, chunks=(7, 5)), kernel, kernel.array, jacstore.lazy_kernel(store)):
            found = jacstore.KernelFactor(matrix, 1.0, keep=False).solve(y)
            assert np.abs(found - truth).max() <= 1e-4 * np.abs(truth).max()


def test_a_cluster_of_ours_is_not_what_others_compute_on(store, cluster, tmp_path):
    seen = []
    words = {"scheduler": cluster.scheduler_address, "workers": 2, "tile": 7}
    gram(store, out=tmp_path / "run.ntk", listener=lambda event: seen.append(get_scheduler()), **words)
    assert seen and all(found is None for found in seen)
