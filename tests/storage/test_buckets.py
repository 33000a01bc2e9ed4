"""Stores and kernels in buckets: the same bits, whatever is killed, fails, or writes at the same time."""

from __future__ import annotations

import json
import os
import sys
import threading

import numpy as np
import pytest

import jacstore
import jacstore.base.machine
import jacstore.kernels.plan.schedule
import jacstore.store.layout
import jacstore.store.reader
from helpers_buckets import URL, a_server, in_memory, objects, server  # noqa: F401
from helpers_process import contents, invoke, run_command, write_target
from jacstore.errors import DamagedDataError, InvalidRequestError, LockedError
from jacstore.kernels.gram import plan_for
from jacstore.rows.build import plan_build
from jacstore.storage import buckets, files, ledger
from jacstore.storage.buckets import Bucket, absolute, joined, relative
from jacstore.storage.files import Folder, Memory
from jacstore.testing import mlp
from support import flipped, refused, rows_of, values

STORE, KERNEL = f"{URL}/a/run.jac", f"{URL}/a/run.ntk"
ROWS = ("rows", "factors", "outputs", "norms", "zarr.json")
BUILD = {"unit_size": 2, "codec": "none"}
GRAM = {"tile": 4}
# The command line, killed before a step of the write protocol.
KILLED = """
import os, signal
import jacstore.storage.files as files

def before_step(step, name):
    if f"{step} {name}".endswith(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)

files.before_step = before_step
from jacstore.cli.commands import main
main()
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A store and a kernel on disk."""
    folder = tmp_path_factory.mktemp("local")
    jacstore.build(mlp(10), folder / "run.jac", **BUILD)
    jacstore.gram(folder / "run.jac", out=folder / "run.ntk", **GRAM)
    return folder


def arrays(found, *below):
    """Files without the attributes of the root, which name versions and paths."""
    return {name: data for name, data in found.items() if name != "zarr.json"}


# ------------------------------------------------------------------------------------------------------ the same bits


def test_a_store_and_a_kernel_in_a_bucket_have_the_objects_that_are_files_on_disk(in_memory, local):
    store = jacstore.build(mlp(10), STORE, **BUILD)
    kernel = jacstore.gram(STORE, out=KERNEL, **GRAM)
    assert store.complete and kernel.complete
    assert arrays(objects(in_memory, "a/run.jac", *ROWS)) == arrays(contents(local / "run.jac", *ROWS[:-1]))
    assert objects(in_memory, "a/run.ntk", "kernel") == contents(local / "run.ntk", "kernel")
    assert kernel.store_paths == [STORE]
    assert isinstance(jacstore.open(STORE), jacstore.JacobianStore)
    assert jacstore.verify(KERNEL).ok and jacstore.verify(STORE, mlp(10)).ok


@pytest.mark.parametrize("place", ["store", "kernel"])
def test_a_store_in_a_bucket_and_a_kernel_on_disk_go_together_and_the_reverse(in_memory, local, tmp_path, place):
    if place == "store":
        jacstore.build(mlp(10), STORE, **BUILD)
        kernel = jacstore.gram(STORE, out=tmp_path / "run.ntk", **GRAM)
    else:
        kernel = jacstore.gram(local / "run.jac", out=KERNEL, **GRAM)
    np.testing.assert_array_equal(values(kernel), values(jacstore.open(local / "run.ntk")))
    assert jacstore.verify(kernel.path).ok


def test_every_command_takes_a_place_in_a_bucket(in_memory, tmp_path):
    target = f"{write_target(tmp_path)}:problem"
    labels = tmp_path / "labels.npy"
    np.save(labels, np.arange(30.0).reshape(10, 3))
    said = [
        invoke("build", target, "--out", STORE, "--unit-size", 4),
        invoke("gram", STORE, "--out", KERNEL),
        invoke("info", STORE),
        invoke("info", KERNEL),
        invoke("verify", KERNEL),
        invoke("verify", STORE, "--target", target),
        invoke("spectrum", KERNEL, "--top", 2),
        invoke("predict", KERNEL, KERNEL, "--labels", labels, "--alpha", 0.1, "--out", f"{URL}/a/predicted.npy"),
    ]
    assert [(one.exit_code, one.stderr) for one in said if one.exit_code] == []
    assert objects(in_memory, "a", "predicted.npy")
    # The factorization is kept with the kernel, and goes when it is told to.
    assert objects(in_memory, "a/run.ntk", "factors")
    assert jacstore.open(KERNEL).kept()[0].bytes
    assert len(jacstore.clean(KERNEL)) == 1 and not objects(in_memory, "a/run.ntk", "factors")


def test_what_is_replaced_goes_and_what_is_foreign_stays(in_memory):
    jacstore.build(mlp(10), STORE, **BUILD)
    before = objects(in_memory, "a/run.jac", "outputs")
    jacstore.build(mlp(10, seed=1), STORE, overwrite=True, **BUILD)
    assert objects(in_memory, "a/run.jac", "outputs") != before
    Bucket(f"{URL}/b").write("letter.txt", [b"dear"])
    assert "letter.txt" in refused(jacstore.build, mlp(10), f"{URL}/b")
    assert "request" in refused(jacstore.build, mlp(10), STORE, error=jacstore.errors.RequestMismatchError)


# ------------------------------------------------------------------------------------------------------------ a server


def test_killed_at_any_kind_of_step_the_same_command_continues_with_the_same_bits(server, tmp_path):
    target = f"{write_target(tmp_path)}:problem"
    build = ["build", target, "--unit-size", 2, "--codec", "none", "--out"]
    gram = ["gram", "--tile", 4, "--out"]
    assert run_command(*build, tmp_path / "run.jac").returncode == 0
    assert run_command(*gram, tmp_path / "run.ntk", tmp_path / "run.jac").returncode == 0
    for kill_at in ("write outputs/c/1/0", "record ledger/unit-0000003.json"):
        assert run_command(*build, STORE, code=KILLED, KILL_AT=kill_at).returncode == -9
    again = run_command(*build, STORE, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["units_reused"] >= 1
    for kill_at in ("write kernel/zarr.json", "record ledger/tiles-0000000.json"):
        assert run_command(*gram, KERNEL, STORE, code=KILLED, KILL_AT=kill_at).returncode == -9
    assert run_command(*gram, KERNEL, STORE).returncode == 0
    store = buckets.connect(URL)
    assert objects(store, "a/run.jac", "rows", "factors") == contents(tmp_path / "run.jac", "rows", "factors")
    assert objects(store, "a/run.ntk", "kernel") == contents(tmp_path / "run.ntk", "kernel")
    # Other processes take part, each of which finds the bucket by itself.
    shared = run_command(*gram, f"{KERNEL}2", STORE, "--scheduler", "processes", "--workers", 2)
    assert shared.returncode == 0, shared.stderr
    assert objects(store, "a/run.ntk2", "kernel") == contents(tmp_path / "run.ntk", "kernel")


def test_a_twentieth_of_all_requests_may_fail_and_others_be_slow(server, local):
    server.share = 0.05
    jacstore.build(mlp(10), STORE, **BUILD)
    kernel = jacstore.gram(STORE, out=KERNEL, **GRAM)
    assert jacstore.verify(KERNEL).ok
    np.testing.assert_array_equal(values(kernel), values(jacstore.open(local / "run.ntk")))
    assert server.failed > 5


def test_the_requests_that_are_counted_are_those_that_the_server_sees(server):
    before = buckets.requests()
    jacstore.build(mlp(10), STORE, **BUILD)
    jacstore.gram(STORE, out=KERNEL, **GRAM)
    made = buckets.requests() - before
    seen = server.requests
    assert (made["put"], made["head"]) == (seen["PUT"], seen["HEAD"])
    assert made["get"] + made["get_range"] + made["list"] == seen["GET"]
    assert made["delete"] == seen["DELETE"] + seen["POST"]


def test_readers_of_zarr_open_what_is_in_a_bucket(server, local):
    import zarr
    from obstore.store import from_url

    da = pytest.importorskip("dask.array")
    jacstore.build(mlp(10), STORE, **BUILD)
    jacstore.gram(STORE, out=KERNEL, **GRAM)
    truth = values(jacstore.open(local / "run.ntk"))
    place = zarr.storage.ObjectStore(from_url(KERNEL, client_options={"allow_http": True}), read_only=True)
    group = zarr.open_group(place, mode="r")
    np.testing.assert_array_equal(group["kernel"][:], truth)
    np.testing.assert_array_equal(da.from_zarr(group["kernel"]).compute(scheduler="synchronous"), truth)


def test_tensorstore_opens_what_is_in_a_bucket(server, local):
    tensorstore = pytest.importorskip("tensorstore")
    jacstore.gram(local / "run.jac", out=KERNEL, **GRAM)
    truth = values(jacstore.open(local / "run.ntk"))
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "s3", "bucket": "bucket", "path": "a/run.ntk/kernel/", "endpoint": server.address},
    }
    np.testing.assert_array_equal(tensorstore.open(spec).result().read().result(), truth)


def test_a_bucket_that_is_not_there_is_refused_in_one_line(server):
    for call in (jacstore.open, lambda path: jacstore.build(mlp(3), path)):
        said = refused(call, "s3://nobody/run.jac")
        assert "s3://nobody/run.jac" in said and len(said) < 500


# ------------------------------------------------------------------------------------------------- several at one time


@pytest.mark.parametrize("kind", ["folder", "folder without links", "memory", "bucket"])
def test_of_many_that_create_or_replace_a_file_one_wins(kind, request, tmp_path, monkeypatch):
    if kind == "bucket":
        request.getfixturevalue("in_memory")
    if kind == "folder without links":
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links")))
    place = Memory(10**6) if kind == "memory" else Bucket(STORE) if kind == "bucket" else Folder(tmp_path)
    won = together(8, lambda n: place.create("ledger/one", b"%d" % n))
    assert sum(won) == 1 and place.read("ledger/one") == b"%d" % won.index(True)
    assert not place.replace("ledger/one", b"x", b"what it does not say")
    assert not place.replace("ledger/none", b"x", b"")
    before = place.read("ledger/one")
    if kind == "bucket":
        assert sum(together(8, lambda n: place.replace("ledger/one", b"r%d" % n, before))) == 1
    else:
        assert place.replace("ledger/one", b"r", before) and place.read("ledger/one") == b"r"
    assert place.names("ledger") == ["one"]


def together(count, work):
    """Results of `work(n)` in as many threads, begun at the same moment."""
    barrier, results = threading.Barrier(count), [None] * count

    def one(n):
        barrier.wait()
        results[n] = work(n)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_one_at_a_time_is_inside_a_guard_and_what_a_dead_one_holds_is_taken(in_memory, limits):
    limits(bucket_pause_seconds=0.001)
    place, inside, most = Bucket(STORE), [], []

    def enter(n):
        with place.guard("ledger/.guard"):
            inside.append(n)
            most.append(len(inside))
            inside.remove(n)

    together(6, enter)
    assert most == [1] * 6
    # A process of this host that is no more.
    place.write("ledger/.guard.held", [json.dumps({**jacstore.base.machine.this_process(), "start": "1"}).encode()])
    enter(0)
    assert place.read("ledger/.guard.held") == buckets.NOBODY


def test_of_two_writers_of_a_store_the_second_is_refused_while_the_first_lives(in_memory):
    with jacstore.StoreWriter(STORE, {"w": (3,)}, 4, 1, unit_size=2) as first:
        assert "process" in refused(
            jacstore.StoreWriter(STORE, {"w": (3,)}, 4, 1, unit_size=2).__enter__, error=LockedError
        )
        for start in (0, 2):
            first.write_unit(start, {"w": np.ones((2, 1, 3))})
    assert jacstore.open(STORE).complete


def test_a_run_whose_lease_was_taken_writes_nothing_more(in_memory):
    with jacstore.StoreWriter(STORE, {"w": (3,)}, 4, 1, unit_size=2) as writer:
        writer.write_unit(0, {"w": np.ones((2, 1, 3))})
        before = objects(in_memory, "a/run.jac", "rows", "ledger")
        (name,) = [f"ledger/{name}" for name in writer.files.names("ledger") if name.startswith("lock-")]
        other = json.loads(writer.files.read(name)) | {"token": "another"}
        Bucket(STORE).write(name, [json.dumps(other).encode()])
        refused(writer.write_unit, 2, {"w": np.ones((2, 1, 3))}, error=LockedError)
        # It leaves the lock of its successor.
    after = objects(in_memory, "a/run.jac", "rows", "ledger")
    assert json.loads(after.pop(name))["token"] == "another"
    before.pop(name)
    assert after == before


def test_a_record_that_a_successor_has_put_meanwhile_is_not_replaced(in_memory, monkeypatch):
    late, early = Bucket(STORE), Bucket(STORE)
    late.publish("ledger/unit-0000000.json", b"first")
    get, read = Bucket._get, []

    def overtaken(self, name):
        found = get(self, name)
        read.append(found)
        # Once to see whose it is, and once for the version that is to be replaced.
        if self is late and len(read) == 2:
            early.write(name, [b"the successor's"])
        return found

    monkeypatch.setattr(Bucket, "_get", overtaken)
    assert "another process" in refused(late.publish, "ledger/unit-0000000.json", b"late")
    assert early.read("ledger/unit-0000000.json") == b"the successor's"


def test_a_heartbeat_that_finds_another_owner_stops_the_run(in_memory, limits):
    limits(heartbeat_seconds=0.01)
    place = Bucket(STORE)
    with ledger.Lock(place, 0, 9, print) as lock:
        place.write(lock.file, [b'{"token": "another"}'])
        lock._thread.join(30)
        assert lock.lost()


# ------------------------------------------------------------------------------------------------------------- requests


def test_what_a_slab_needs_of_an_object_is_one_request(in_memory, limits):
    limits(piece_columns=(14, 14))
    store = jacstore.build(mlp(10), STORE, layout="dense", **BUILD)
    layout = store.layouts["rows"]
    assert layout.per_file[-1] > 3
    before = buckets.requests()
    out = np.empty((10, store.n_outputs, 40), np.float32)
    opened = jacstore.open(STORE)
    opened.read("rows", 0, 10, 3, 43, out)
    assert (buckets.requests() - before)["get_range"] == opened.n_units == 5
    np.testing.assert_array_equal(out.reshape(10 * store.n_outputs, 40), rows_of(store)[:, 3:43])


@pytest.mark.parametrize("layout", ["dense", "factored"])
@pytest.mark.parametrize("by_leaf", [False, True])
def test_a_plan_says_the_requests_that_a_run_makes(in_memory, monkeypatch, layout, by_leaf, limits):
    limits(piece_columns=(14, 14))
    limits(slab_columns=14)
    expected = plan_build(mlp(10), STORE, layout=layout, **BUILD).expected_requests
    before = puts_of_units(in_memory)
    report = jacstore.build(mlp(10), STORE, layout=layout, **BUILD).report
    assert report["requests"]["put"] >= expected["put"] == puts_of_units(in_memory) - before
    expected = plan_for(STORE, out=KERNEL, by_leaf=by_leaf, **GRAM).expected_requests
    windows, window = [], Bucket.window
    monkeypatch.setattr(Bucket, "window", lambda self, *given: windows.append(given[0]) or window(self, *given))
    made = jacstore.gram(STORE, out=KERNEL, by_leaf=by_leaf, **GRAM).report["requests"]
    # Norms are a few small objects, which may be read more than once; J is read as planned.
    norms = sum(name.startswith("norms/") for name in windows)
    assert len(windows) - norms == expected["get_range"] - 5, sorted(windows)
    assert made["get_range"] == len(windows)
    # Locks and guards are put on top.
    assert made["put"] >= expected["put"]


def puts_of_units(store):
    """Objects that were put for units: chunks and records."""
    found = objects(store, "a/run.jac", "rows", "factors", "outputs", "norms", "ledger")
    return sum("/c/" in name or "unit-" in name for name in found)


def test_requests_are_reported_for_buckets_alone_and_said_in_words(in_memory, tmp_path):
    assert jacstore.build(mlp(4), tmp_path / "run.jac").report["requests"] == {}
    jacstore.build(mlp(4), STORE)
    kernel = jacstore.gram(STORE, out=tmp_path / "run.ntk")
    assert set(kernel.report["requests"]) <= {"get", "get_range", "list", "head"}
    said = invoke("gram", STORE, "--out", KERNEL, "--dry-run").stdout
    assert "requests" in said and "get_range" in said and "no limit" in said


def test_a_slab_larger_than_a_window_is_read_in_several(in_memory, limits):
    limits(piece_columns=(14, 14))
    store = jacstore.build(mlp(10), STORE, layout="dense", **BUILD)
    expected = rows_of(store)
    limits(window_bytes=2 * store.layouts["rows"].piece_bytes)
    before = buckets.requests()
    np.testing.assert_array_equal(rows_of(jacstore.open(STORE)), expected)
    assert (buckets.requests() - before)["get_range"] == 5 * 3


def test_many_objects_are_read_at_once(in_memory, monkeypatch):
    store = jacstore.build(mlp(40), STORE, layout="dense", unit_size=1, codec="none")
    barrier, window = threading.Barrier(32), Bucket.window
    met = []

    def waits(self, *given):
        if len(met) < 32:
            # Ends only when as many are inside.
            barrier.wait(60)
            met.append(given)
        return window(self, *given)

    expected = rows_of(store)
    monkeypatch.setattr(Bucket, "window", waits)
    out = np.empty((32, store.n_outputs, store.n_columns), np.float32)
    jacstore.open(STORE).read("rows", 0, 32, 0, store.n_columns, out)
    np.testing.assert_array_equal(out.reshape(-1, store.n_columns), expected[: 32 * store.n_outputs])
    assert len(met) == 32


def test_neighbours_are_one_request_and_others_are_not(in_memory):
    place = Bucket(STORE)
    place.write("x", [bytes(range(100))])
    found = [bytearray(4) for _ in range(4)]
    before = buckets.requests()
    place.read_into("x", [(offset, memoryview(one)) for offset, one in zip((20, 0, 8, 60), found, strict=True)])
    assert (buckets.requests() - before)["get_range"] == 3
    assert [one[0] for one in found] == [20, 0, 8, 60]


def test_a_large_object_is_put_in_parts_and_read_as_one(server, limits):
    limits(bucket_part_bytes=5 * 2**20)
    place, data = Bucket(STORE), np.random.default_rng(0).bytes(13 * 2**20)
    assert place.write("x", [data[: 2**20], data[2**20 :]]) == len(data)
    assert bytes(place.window("x", 0, len(data))) == data


# ---------------------------------------------------------------------------------------------- damage, and mistakes


def test_damage_in_a_bucket_is_found_and_named(in_memory):
    jacstore.build(mlp(10), STORE, layout="dense", **BUILD)
    jacstore.gram(STORE, out=KERNEL, **GRAM)
    place = Bucket(STORE)
    data = place.read("rows/c/2/0/0")
    for damaged in (flipped(data, 40), data[:50]):
        place.write("rows/c/2/0/0", [damaged])
        with pytest.raises(DamagedDataError, match="unit 2"):
            jacstore.gram(STORE, out=None)
    place.remove("rows/c/2/0/0")
    with pytest.raises(DamagedDataError, match=r"unit 2.*missing"):
        jacstore.gram(STORE, out=None)
    assert not jacstore.verify(STORE).ok
    assert jacstore.build(mlp(10), STORE, layout="dense", **BUILD).report["units_computed"] == 1
    assert jacstore.verify(STORE).ok


@pytest.mark.parametrize(
    "given", ["ftp://host/run.jac", "hdfs://host/run.jac", "S4://bucket/x", "file:///tmp/x", "https://host/x"]
)
def test_an_address_that_is_not_known_is_refused_with_the_extra_that_adds_some(given, tmp_path):
    for call in (
        lambda: jacstore.build(mlp(3), given),
        lambda: jacstore.open(given),
        lambda: jacstore.gram(jacstore.build(mlp(3)), out=given),
    ):
        assert "jacstore[remote]" in refused(call)


def test_without_the_extra_one_line_says_how_to_install_it(monkeypatch):
    for name in ("obstore", "obstore.store", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    buckets.connect.cache_clear()
    assert refused(jacstore.open, STORE).endswith("pip install 'jacstore[remote]'")


@pytest.mark.parametrize("given", ["s3://bucket", "s3://bucket/", "s3://bucket/a//b", "s3://bucket/../x", "gs:///x"])
def test_an_address_without_a_path_is_refused(given):
    assert "scheme://BUCKET/PATH" in refused(jacstore.open, given)


@pytest.mark.parametrize(
    ("store", "kernel", "kept"),
    [
        ("s3://b/x/run.jac", "s3://b/x/run.ntk", "../run.jac"),
        ("s3://b/run.jac", "s3://c/run.ntk", "s3://b/run.jac"),
        ("s3://b/run.jac", "/tmp/run.ntk", "s3://b/run.jac"),
        ("/tmp/run.jac", "s3://b/run.ntk", "/tmp/run.jac"),
        ("/tmp/run.jac", "/tmp/run.ntk", "../run.jac"),
        ("memory://", "s3://b/run.ntk", "memory://"),
    ],
)
def test_a_kernel_knows_where_its_store_is(store, kernel, kept):
    assert relative(store, kernel) == kept
    assert joined(kernel, kept) == store
    assert absolute(store) == store


def test_no_step_of_the_write_protocol_is_hidden_from_fault_injection(in_memory, monkeypatch):
    steps = []
    monkeypatch.setattr(files, "before_step", lambda *step: steps.append(step))
    with jacstore.StoreWriter(STORE, {"w": (3,)}, 2, 1, unit_size=2) as writer:
        writer.write_unit(0, {"w": np.ones((2, 1, 3))})
    put = {name for _, name in steps}
    assert {"rows/c/0/0/0", "ledger/unit-0000000.json"} <= put


def test_an_error_of_the_bucket_is_no_damage(in_memory, monkeypatch):
    import obstore
    from obstore.exceptions import GenericError

    jacstore.build(mlp(10), STORE, layout="dense", **BUILD)
    monkeypatch.setattr(obstore, "get_range", lambda *_, **__: (_ for _ in ()).throw(GenericError("no network")))
    assert "no network" in refused(jacstore.gram, STORE, error=InvalidRequestError)
    assert not [name for name in Bucket(STORE).names("ledger") if "suspect" in name]
