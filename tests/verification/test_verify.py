"""Claims about trust: what is right passes, what is wrong is found and named, and only that is computed again."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
import jacstore.kernels.finish
import jacstore.kernels.repair
import jacstore.storage.files
from helpers_process import contents, invoke, write_target
from jacstore import Problem, StoreWriter, build, gram, verify
from jacstore.base.precision import product_bound, squares_bound
from jacstore.errors import DamagedDataError, InvalidRequestError, RequestMismatchError
from jacstore.problem import fingerprint
from jacstore.problem.program import text_of_jax
from jacstore.storage.chunks import FileEncoder
from jacstore.testing import cnn, dense_kernel, dense_rows, kernel_error, mlp, nested
from jacstore.verification.eigenvalue_checks import lanczos

MODES = ("full", "trace", "diagonal", "blocks")
VALUES = ("diagonal", "entries", "products with random weights")
MEMORY = "400MB"
BITS = 100


def make(path, problem, **options):
    return build(problem, path, **{"unit_size": 3, "codec": "none", "memory": MEMORY} | options)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Stores of rows and of factors, to be copied: nine examples of `mlp` and seven of `cnn`."""
    folder = tmp_path_factory.mktemp("stores")
    make(folder / "mlp.jac", mlp(9), layout="dense")
    make(folder / "cnn.jac", cnn(7), layout="factored", codec="lz4")
    for name in ("mlp", "cnn"):
        gram(folder / f"{name}.jac", None, folder / f"{name}.ntk", tile=3, memory=MEMORY)
    return folder


@pytest.fixture
def copied(stores, tmp_path):
    """The same where a test may damage them."""
    return Path(shutil.copytree(stores, tmp_path / "copied"))


def problem_of(name, **fields):
    return mlp(9, **fields) if name == "mlp" else cnn(7, **fields)


def failed(report):
    return [check.name for check in report.failures]


def chunk_files(path):
    return sorted(file for file in path.rglob("*") if file.is_file() and "/c/" in str(file))


def forge(kernel, index, i, j, tile):
    """Write other numbers into a tile, with checksum and record to match."""
    number = kernel.number_of(index, i, j)
    record = kernel.ledger.read("tiles", number)
    record["files"] |= kernel.write_tile(index, i, j, tile)
    kernel.ledger.record("tiles", number, record)


# --- what is right passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        (mlp(9), {"layout": "factored", "dtype": "bfloat16"}),
        (cnn(7), {"layout": "factored", "dtype": "float16", "codec": "lz4"}),
        (nested(8), {"layout": "factored", "dtype": "float64"}),
        (mlp(9, outputs=[2, 0], select="layer1"), {"examples": (2, 8)}),
    ],
)
def test_a_right_store_passes_every_check_and_every_row_is_that_of_plain_vjp(problem, options, tmp_path):
    store = make(tmp_path / "s", problem, **options)
    report = verify(store, problem, full=True)
    assert report.ok and {check.state for check in report.checks} == {"ok"}
    assert (store.dtype == "float64") <= (report.check("rows").figure <= report.check("rows").bound)
    assert store.dtype == "float64" or report.check("rows").figure > 0
    assert report.check("norms").figure <= report.check("norms").bound
    assert report.to_recompute == () and json.dumps(report.to_dict())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {}),
        ("mlp", {"triangle": True, "dtype": "float32", "precision": "float64"}),
        ("mlp", {"precision": "fast", "engine": "xla", "memory": MEMORY}),
        ("cnn", {"by_leaf": True}),
        ("cnn", {"exact_diagonal": True}),
    ],
)
def test_a_right_kernel_passes_every_check(mode, name, options, stores, tmp_path):
    if mode == "blocks":
        options = {key: value for key, value in options.items() if key != "triangle"}
    kernel = gram(stores / f"{name}.jac", None, tmp_path / "k", mode=mode, tile=4, **options)
    report = verify(kernel, full=True, samples=20)
    assert report.ok and {check.state for check in report.checks} == {"ok"}
    for value in ("products with random weights", "every entry in float64"):
        assert 0 < report.check(value).figure <= report.check(value).bound


@pytest.mark.parametrize("mode", ["full", "trace", "diagonal"])
def test_a_right_kernel_between_two_stores_passes(mode, stores, tmp_path):
    other = make(tmp_path / "other", mlp(5, inputs=mlp(5, seed=3).inputs), layout="factored")
    kernel = gram(stores / "mlp.jac", other, tmp_path / "k", mode=mode, tile=4, memory=MEMORY)
    report = verify(kernel, full=True)
    assert report.ok and report.check("products with random weights").state == "ok"
    assert report.check("symmetry").state == report.check("diagonal").state == "skipped"


def test_a_store_and_a_kernel_in_ram_are_verified_too():
    store = build(mlp(5), None, memory=MEMORY)
    assert verify(store, mlp(5)).ok
    kernel = gram(store, memory=MEMORY)
    assert verify(kernel, store=store).check("entries").state == "ok"


def test_zero_rows_and_rows_that_are_not_finite_pass_where_they_are_known(tmp_path):
    inputs = mlp(9).inputs.copy()
    inputs[4] = np.nan
    problem = mlp(9, inputs=inputs)
    store = make(tmp_path / "s", problem, allow_nonfinite=True)
    assert verify(store, problem, full=True).ok
    assert verify(gram(store, None, tmp_path / "k", tile=4, memory=MEMORY)).ok
    still = Problem(
        apply=lambda p, x: 0 * p["w"] + x, params={"w": np.ones(3, np.float32)}, inputs=mlp(4).inputs[:, :3]
    )
    store = make(tmp_path / "z", still)
    assert store.info()["zero_rows"] == 12 and verify(store, still, full=True).ok
    assert verify(gram(store, None, tmp_path / "zk", memory=MEMORY)).ok


def test_rows_from_outside_are_checked_as_far_as_they_say_what_they_are(tmp_path):
    rows = np.random.default_rng(0).normal(size=(6, 2, 4, 3))
    with StoreWriter(tmp_path / "s", {"w": (4, 3)}, 6, 2, unit_size=2) as writer:
        for start, stop in writer.missing:
            writer.write_unit(start, {"w": rows[start:stop]})
    report = verify(tmp_path / "s")
    assert report.ok and report.check("rows").state == "skipped" and report.check("norms").figure > 0


# --- one flipped bit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["mlp.jac", "cnn.jac", "mlp.ntk", "cnn.ntk"])
def test_one_flipped_bit_at_100_random_positions_is_found_100_times(what, copied):
    draw, path = random.Random(7), copied / what
    files = chunk_files(path)
    found = 0
    for _ in range(BITS):
        file = draw.choices(files, [file.stat().st_size for file in files])[0]
        good = file.read_bytes()
        at, bit = draw.randrange(len(good)), draw.randrange(8)
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        report = verify(path, samples=1, memory=MEMORY)
        named = str(file.relative_to(path))
        found += "checksums" in failed(report) and named in report.check("checksums").where
        file.write_bytes(good)
    assert found == BITS
    # Bytes that were put back right are right again, and nothing is recomputed.
    assert verify(path).ok and not list(path.glob("ledger/suspect-*"))


@pytest.mark.parametrize(("what", "names"), [("mlp.jac", ("rows/c/0/0/0", "rows/c/1/0/0")), ("mlp.ntk", None)])
def test_two_files_that_changed_places_are_found(what, names, copied):
    names = names or ("kernel/c/0/1", "kernel/c/1/2")
    one, other = (copied / what / name for name in names)
    a, b = one.read_bytes(), other.read_bytes()
    assert len(a) == len(b) and a != b
    one.write_bytes(b)
    other.write_bytes(a)
    report = verify(copied / what)
    assert failed(report) == ["checksums"] and report.check("checksums").figure >= 2
    assert len(report.to_recompute) == 2


# --- wrong numbers with right checksums -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_tile_off_by_a_thousandth_with_its_checksum_made_right_is_found_by_name_and_mended(
    mode, name, copied, tmp_path
):
    store = copied / f"{name}.jac"
    kernel = gram(store, None, tmp_path / "k", mode=mode, tile=3, memory=MEMORY)
    i, j = (1, 1) if mode == "blocks" else (0, 1)
    before, tile = contents(tmp_path / "k", "kernel"), kernel.read_tile(0, i, j)
    forge(kernel, 0, i, j, tile * (1 + 1e-3))
    report = verify(kernel, samples=1)
    assert "products with random weights" in failed(report) and f"tile ({i}, {j})" in report.check(VALUES[2]).where
    assert report.check("checksums").state == report.check("symmetry").state == "ok"
    assert report.to_recompute == (f"tile ({i}, {j})",)
    again = gram(store, None, tmp_path / "k", mode=mode, tile=3, memory=MEMORY)
    assert again.report["tiles_computed"] == 1
    assert contents(tmp_path / "k", "kernel") == before and verify(again).ok


def test_a_wrong_entry_is_found_by_the_entries_where_all_are_recomputed(copied):
    kernel = jacstore.open(copied / "mlp.ntk")
    tile = kernel.read_tile(0, 0, 1)
    tile[2, 3] *= 1.001
    forge(kernel, 0, 0, 1, tile)
    report = verify(kernel, full=True, samples=2000)
    assert {"entries", "every entry in float64"} <= set(failed(report))
    assert "example 0, output 2 with example 4, output 0" in report.check("entries").where


def test_a_mirror_that_is_no_mirror_is_found(copied):
    kernel = jacstore.open(copied / "mlp.ntk")
    tile = kernel.read_tile(0, 1, 1)
    tile[0, 1] = np.nextafter(tile[0, 1], np.inf)
    forge(kernel, 0, 1, 1, tile)
    report = verify(kernel)
    assert failed(report) == ["symmetry"] and "tile (1, 1)" in report.check("symmetry").where


def test_a_wrong_leaf_of_a_kernel_that_keeps_leaves_apart_is_named(copied, tmp_path):
    kernel = gram(copied / "cnn.jac", None, tmp_path / "k", by_leaf=True, tile=3, memory=MEMORY)
    forge(kernel, 1, 0, 2, kernel.read_tile(1, 0, 2) * 1.001)
    report = verify(kernel)
    assert failed(report)[-1] == "products with random weights"
    assert report.to_recompute == ("tile (0, 2) of leaf conv/w",)
    assert (
        gram(copied / "cnn.jac", None, tmp_path / "k", by_leaf=True, tile=3, memory=MEMORY).report["tiles_computed"]
        == 1
    )
    assert verify(kernel).ok


def test_rows_that_are_not_those_of_their_norms_are_found_and_computed_again(copied):
    """As if a device had computed wrong numbers: checksums are right."""
    path = copied / "mlp.jac"
    right, store = contents(path, "rows"), jacstore.open(path)
    layout, name = store.layouts["rows"], "rows/c/1/0/0"
    values = np.frombuffer(right[name], np.float32, count=layout.piece_bytes // 4).reshape(layout.piece).copy()
    values[..., :20] *= 1.01
    record, encoder = store.ledger.read("unit", 1), FileEncoder(layout)
    (path / name).write_bytes(b"".join(map(bytes, encoder.encode(values) + encoder.close())))
    store.ledger.record("unit", 1, {**record, "files": {**record["files"], name: encoder.record().to_list()}})
    report = verify(path)
    assert failed(report) == ["norms"] and "unit 1 (examples 3 to 5), leaf layer0/b" in report.check("norms").where
    again = make(path, mlp(9), layout="dense")
    assert again.report["units_computed"] == 1 and contents(path, "rows") == right and verify(path, mlp(9)).ok


@pytest.mark.parametrize("field", ["start", "bytes", "zero_rows"])
def test_a_record_that_lies_is_found_and_mended(field, copied):
    path = copied / "mlp.jac"
    record = path / "ledger" / "unit-0000002.json"
    good = json.loads(record.read_text())
    record.write_text(json.dumps({**good, field: good[field] + 1}))
    report = verify(path)
    assert not report.ok and "unit 2" in report.failures[0].where and report.to_recompute == ("unit 2",)
    assert make(path, mlp(9), layout="dense").report["units_computed"] == 1
    assert json.loads(record.read_text()) == good and verify(path).ok


def test_what_has_no_record_is_named(copied):
    (copied / "mlp.jac" / "ledger" / "unit-0000001.json").unlink()
    (copied / "cnn.ntk" / "ledger" / "tiles-0000000.json").write_text("{")
    assert "unit 1 (examples 3 to 5) has no record" in verify(copied / "mlp.jac").check("records").where
    assert "damaged record" in verify(copied / "cnn.ntk").check("records").where
    assert gram(copied / "cnn.jac", None, copied / "cnn.ntk", tile=3, memory=MEMORY).complete
    assert verify(copied / "cnn.ntk").ok


# --- another target ---------------------------------------------------------------------------------------------------


def test_parameters_that_differ_in_one_value_are_found(stores):
    other = mlp(9)
    other.params["layer1"]["b"][2] = np.nextafter(other.params["layer1"]["b"][2], np.float32(9))
    report = verify(stores / "mlp.jac", other, samples=1)
    assert failed(report) == ["fingerprint: parameters"]
    assert report.to_recompute == ()


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_one_changed_example_is_found_and_its_unit_named(name, stores):
    inputs = problem_of(name).inputs.copy()
    inputs[5].flat[3] = np.nextafter(inputs[5].flat[3], np.float32(9))
    report = verify(stores / f"{name}.jac", problem_of(name, inputs=inputs), samples=1)
    assert failed(report) == ["inputs: all rows"] and "unit 1 (examples 3 to 5)" in report.failures[0].where
    assert report.to_recompute == ()


def test_a_changed_closed_over_array_is_found(tmp_path):
    def closing(shift):
        held = jnp.asarray(shift)
        return mlp(9, apply=lambda p, x: (x + held) @ p["layer0"]["w"])

    shift = np.ones(5, np.float32)
    make(tmp_path / "s", closing(shift))
    assert verify(tmp_path / "s", closing(shift)).ok
    shift[4] = np.nextafter(np.float32(1), np.float32(2))
    assert "fingerprint: constants" in failed(verify(tmp_path / "s", closing(shift), samples=1))


def test_another_function_is_found_by_its_rows_too(stores):
    twice = mlp(9)
    report = verify(stores / "mlp.jac", Problem(
        apply=lambda p, x: 2 * twice.apply(p, x), params=twice.params, inputs=twice.inputs
    ))  # fmt: skip
    assert {"fingerprint: function", "rows"} <= set(failed(report))
    # The store is what it was built to be: nothing of it is computed again.
    assert report.to_recompute == () and verify(stores / "mlp.jac", twice).ok


def test_a_store_by_the_text_of_jax_continues_and_verifies_while_its_program_is_the_same(tmp_path, monkeypatch):
    apply, path = problem_of("mlp").apply, tmp_path / "old.jac"
    problem, parts = problem_of("mlp", apply=lambda p, x: jax.nn.relu(jax.nn.relu(apply(p, x)) - 0.1)), ("1/2", "2/2")
    with monkeypatch.context() as before:
        before.setattr(fingerprint, "VERSION", "")
        before.setattr(fingerprint, "program_text", text_of_jax)
        half = build(problem, path, unit_size=2, part=parts[0])
    assert len(half.requested["function"]) == 64
    jax.nn.relu(np.ones(3, np.float32))  # caches hold another trace of it now
    assert build(problem, path, unit_size=2, part=parts[1]).report["complete"]
    assert jacstore.verify(path, problem).ok
    other = problem_of("mlp", apply=lambda p, x: jax.nn.relu(jax.nn.relu(apply(p, x)) - 0.2))
    with pytest.raises(RequestMismatchError, match="function"):
        build(other, path, unit_size=2)
    assert failed(jacstore.verify(path, other))[0] == "fingerprint: function"


def test_a_target_of_other_leaves_outputs_or_too_few_examples_says_so(stores):
    for other in (cnn(9), mlp(9, outputs="sum"), mlp(8)):
        report = verify(stores / "mlp.jac", other)
        assert not report.ok and report.check("rows").state == "skipped"


# --- precision --------------------------------------------------------------------------------------------------------


def test_a_relu_that_flips_between_float32_and_float64_is_reported_and_no_error(tmp_path):
    weight, inputs = np.float32(0.1), np.arange(1, 40, dtype=np.float32)[:, None]
    edges = weight * inputs[:, 0]

    def apply(p, example):
        x, edge = example
        return jax.nn.relu(p["w"] * x - edge) + p["w"] * 0.001

    problem = Problem(apply=apply, params={"w": np.full(1, weight)}, inputs=(inputs, edges[:, None]))
    exact = np.float64(weight) * inputs[:, 0].astype(np.float64)
    flips = int(np.sum(exact > edges.astype(np.float64)))
    assert flips > 5
    report = verify(make(tmp_path / "s", problem), problem, full=True)
    check = report.check("rows in the build's precision only")
    assert report.ok and check.figure == flips and "example" in check.where


def test_a_model_that_computes_in_bfloat16_is_no_error(tmp_path, stores):
    wide = mlp(9)

    def half(p, x):
        cast = jax.tree_util.tree_map(lambda a: a.astype(jnp.bfloat16), p)
        return wide.apply(cast, x.astype(jnp.bfloat16)).astype(jnp.float32)

    problem = Problem(apply=half, params=wide.params, inputs=wide.inputs)
    store = make(tmp_path / "s", problem, layout="factored")
    report = verify(store, problem, full=True)
    assert store.lowest == "bfloat16" and report.ok
    # Bounds follow the function: the same error would not pass for a network of float32.
    assert report.check("rows").figure > verify(stores / "mlp.jac", wide, samples=1).check("rows").bound
    assert verify(gram(store, None, tmp_path / "k", memory=MEMORY)).ok


@pytest.mark.parametrize(
    ("name", "dtype"), [("mlp", "bfloat16"), ("mlp", "float32"), ("cnn", "float16"), ("cnn", "float32")]
)
def test_expected_errors_hold_and_are_recorded(dtype, name, tmp_path):
    problem = problem_of(name)
    truth = dense_rows(problem)
    store = make(tmp_path / "s", problem, dtype=dtype, layout="factored")
    kernel = gram(store, None, tmp_path / "k", memory=MEMORY)
    found = kernel.info()["numerics"]
    measured = kernel_error(kernel.array.compute(scheduler="synchronous"), dense_kernel(truth))
    assert measured <= found["expected_error"] <= found["worst_case"]
    assert found["measured_error"] <= found["expected_error"]
    assert {"storage", "products", "sums", "device", "rounded_to"} <= set(found)
    found = store.info()["numerics"]
    assert found["storage"] == dtype and found["measured_error"] <= found["expected_error"] <= found["worst_case"]
    assert found["lowest"] == "float32" and "cpu" in found["device"]


def test_the_diagonal_may_be_that_of_exact_norms(tmp_path):
    problem = mlp(9)
    store = make(tmp_path / "s", problem, dtype="bfloat16")
    plain = gram(store, None, tmp_path / "plain", memory=MEMORY)
    exact = gram(store, None, tmp_path / "exact", exact_diagonal=True, memory=MEMORY)
    a, b = (kernel.array.compute(scheduler="synchronous") for kernel in (plain, exact))
    truth = np.square(dense_rows(problem)).sum(-1).reshape(-1)
    off = ~np.eye(len(a), dtype=bool)
    assert np.array_equal(a[off], b[off])
    assert np.abs(np.diag(b) / truth - 1).max() < 2e-6 < np.abs(np.diag(a) / truth - 1).max()
    assert (plain.exact_diagonal, exact.exact_diagonal) == (False, True)
    assert exact.info()["fingerprint"]["exact_diagonal"] and verify(exact, full=True).ok
    with pytest.raises(InvalidRequestError, match="exact-diagonal"):
        gram(store, make(tmp_path / "o", mlp(4, seed=0), dtype="bfloat16"), tmp_path / "r", exact_diagonal=True)


def test_gram_stops_at_a_tile_whose_diagonal_is_not_the_norms_and_names_it(stores, tmp_path, monkeypatch):
    symmetrize = jacstore.kernels.finish.symmetrize
    values = jacstore.open(stores / "mlp.ntk").array.compute(scheduler="synchronous")
    at = int(np.argmax(np.diag(values))) // 9
    limit = values.max() * 0.999
    monkeypatch.setattr(
        jacstore.kernels.finish,
        "symmetrize",
        lambda tile: symmetrize(tile) * (1 + 1e-4 * (tile.max() > limit)),
    )
    with pytest.raises(DamagedDataError, match=rf"tile \({at}, {at}\): the diagonal at example \d, output \d"):
        gram(stores / "mlp.jac", None, tmp_path / "k", tile=3, memory=MEMORY)
    assert not jacstore.open(tmp_path / "k").complete
    monkeypatch.undo()
    assert verify(gram(stores / "mlp.jac", None, tmp_path / "k", tile=3, memory=MEMORY)).ok


# --- verify, repair, verify -------------------------------------------------------------------------------------------


def test_only_damaged_units_and_tiles_are_computed_again(copied):
    store, kernel = copied / "mlp.jac", copied / "mlp.ntk"
    before = [contents(path, part) for path, part in ((store, "rows"), (kernel, "kernel"))]
    for path in (store / "rows/c/2/0/0", kernel / "kernel/c/0/2", kernel / "kernel/c/1/1"):
        data = bytearray(path.read_bytes())
        data[40] ^= 4
        path.write_bytes(data)
    reports = [verify(store), verify(kernel)]
    assert reports[0].to_recompute == ("unit 2",) and reports[1].to_recompute == ("tile (0, 2)", "tile (1, 1)")
    assert reports[1].check("store").state == "failed" and "unit 2" in reports[1].check("store").where
    assert make(store, mlp(9), layout="dense").report["units_computed"] == 1
    again = gram(store, None, kernel, tile=3, memory=MEMORY)
    assert (again.report["tiles_computed"], again.report["tiles_reused"]) == (2, 4)
    assert [contents(path, part) for path, part in ((store, "rows"), (kernel, "kernel"))] == before
    assert verify(store, mlp(9)).ok and verify(kernel).ok


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"memory": "3MB"}),
        ("mlp", {"engine": "xla"}),
        ("mlp", {"triangle": True, "mode": "trace"}),
        ("cnn", {}),
        ("cnn", {"by_leaf": True, "mode": "diagonal"}),
        ("cnn", {"mode": "blocks"}),
        ("cnn", {"part": "1/2"}),
    ],
)
def test_a_tile_that_is_gone_comes_back_to_the_bit(name, options, copied, tmp_path):
    def assemble(**more):
        return gram(copied / f"{name}.jac", None, tmp_path / "k", **{"tile": 3, "memory": MEMORY} | options | more)

    assemble()
    if "part" in options:
        assert len(assemble(part="2/2").plan.splits) == 2
    before = contents(tmp_path / "k")
    for file in chunk_files(tmp_path / "k")[1::3]:
        file.unlink()
        assert not verify(tmp_path / "k").ok
        assert assemble().report["tiles_computed"] == 1
    after = contents(tmp_path / "k")
    assert {name: after[name] for name in before if "/c/" in name or "tiles-" in name} == {
        name: before[name] for name in before if "/c/" in name or "tiles-" in name
    }
    assert verify(tmp_path / "k").ok


def test_a_reader_that_finds_a_damaged_tile_has_the_next_gram_mend_it(copied):
    file = copied / "mlp.ntk" / "kernel/c/1/0"
    good = file.read_bytes()
    file.write_bytes(good[:30] + b"\0\1\2" + good[33:])
    with pytest.raises(DamagedDataError, match=r"tile \(1, 0\)"):
        jacstore.open(copied / "mlp.ntk").array.compute(scheduler="synchronous")
    assert gram(copied / "mlp.jac", None, copied / "mlp.ntk", tile=3, memory=MEMORY).report["tiles_computed"] == 1
    assert file.read_bytes() == good


def test_where_nothing_can_be_written_verify_still_reports(copied, monkeypatch):
    def refuse(step, name):
        if step in ("record", "write", "remove"):
            raise InvalidRequestError("read-only")

    for name, file in (("mlp.jac", "rows/c/0/0/0"), ("mlp.ntk", "kernel/c/0/0")):
        data = bytearray((copied / name / file).read_bytes())
        data[8] ^= 1
        (copied / name / file).write_bytes(data)
        monkeypatch.setattr(jacstore.storage.files, "before_step", refuse)
        assert "checksums" in failed(verify(copied / name))
        monkeypatch.undo()
        assert not list((copied / name).glob("ledger/suspect-*"))


def test_without_its_store_a_kernel_is_checked_as_far_as_that_goes(copied):
    (copied / "mlp.jac").rename(copied / "moved.jac")
    report = verify(copied / "mlp.ntk")
    assert report.ok and [check.name for check in report.checks if check.state == "skipped"] == ["store", *VALUES]
    assert verify(copied / "mlp.ntk", store=copied / "moved.jac").check("entries").state == "ok"
    assert failed(verify(copied / "mlp.ntk", store=copied / "cnn.jac")) == ["store"]


def test_arguments_that_do_not_fit_are_refused(stores):
    for words, given in (("--store", {"store": stores / "cnn.jac"}), ("--samples 0", {"samples": 0})):
        with pytest.raises(InvalidRequestError, match=words):
            verify(stores / "mlp.jac", **given)
    with pytest.raises(InvalidRequestError, match="--target"):
        verify(stores / "mlp.ntk", mlp(9))


def test_lanczos_finds_extreme_eigenvalues():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(60, 60))
    matrix = a @ a.T + np.diag(np.linspace(0, 500, 60))
    low, high = lanczos(lambda x: matrix @ x, rng.normal(size=60), 60)
    values = np.linalg.eigvalsh(matrix)
    assert abs(low - values[0]) < 1e-8 * values[-1] and abs(high - values[-1]) < 1e-8 * values[-1]
    low, high = lanczos(lambda x: matrix @ x, rng.normal(size=60), 16)
    assert values[0] <= low <= high <= values[-1] and high > 0.98 * values[-1]


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_names_the_first_failure_and_exits_with_3(tmp_path):
    target = write_target(tmp_path)
    out, kernel = tmp_path / "run.jac", tmp_path / "run.ntk"
    assert invoke("build", target, "--out", out, "--unit-size", 2, "--codec", "none").exit_code == 0
    assert invoke("gram", out, "--out", kernel, "--tile", 4).exit_code == 0
    sound = invoke("verify", out, "--target", target, "--samples", 5)
    assert sound.exit_code == 0 and sound.stderr == ""
    assert all(name in sound.stdout for name in ("checksums", "norms", "fingerprint: parameters", "rows", "bound"))
    report = json.loads(invoke("verify", kernel, "--json").stdout)
    assert report["ok"] and {"name", "state", "figure", "bound", "where"} == set(report["checks"][0])
    other = invoke("verify", out, "--target", f"{target}:other_weights", "--samples", 1)
    assert other.exit_code == 3 and other.stderr.count("\n") == 1 and "fingerprint: parameters" in other.stderr
    (out / "rows/c/3/0/0").write_bytes((out / "rows/c/3/0/0").read_bytes()[:-1])
    broken = invoke("verify", out)
    assert broken.exit_code == 3 and "checksums failed" in broken.stderr and "unit 3 (examples 6 to 7)" in broken.stderr
    assert "running the same build again recomputes unit 3" in broken.stdout
    found = invoke("verify", out, "--json")
    assert found.exit_code == 3 and json.loads(found.stdout)["to_recompute"] == ["unit 3"]


def test_every_promise_names_a_test_that_there_is():
    root = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
    page = (root / "docs/explanation/promises.md").read_text(encoding="utf-8")
    section = page.split("\n## How resuming works")[0]
    named = re.findall(r"`(test_\w+)`", section)
    defined = {
        name
        for file in (root / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    promises = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(promises) >= 10 and all("`test_" in line for line in promises)
    assert named and set(named) <= defined


def test_squares_that_are_summed_one_after_the_other_stay_within_the_bound_of_a_diagonal():
    draw = np.random.default_rng(0)
    for value in draw.uniform(0.5, 1, 200).astype(np.float32):
        squares = np.full(4096, value * value)
        off = abs(float(np.cumsum(squares)[-1]) / float(squares.sum(dtype=np.float64)) - 1)
        assert off <= squares_bound("float32", "xla", 4096)


def test_rows_that_are_nearly_parallel_make_no_false_alarm(tmp_path):
    # Each further product is below half a unit in the last place of the sum, so that every rounding is downwards.
    rows = np.full((30, 1, 219), math.sqrt(0.9 * 2**-24), np.float32)
    rows[:, :, 0] = 1
    rows *= np.linspace(1, 1.02, 30, dtype=np.float32)[:, None, None]
    exact = rows[:, 0].astype(np.float64) @ rows[:, 0].T.astype(np.float64)
    with StoreWriter(tmp_path / "s", {"w": (219,)}, 30, 1, dtype="float32") as writer:
        for start, stop in writer.missing:
            writer.write_unit(start, {"w": rows[start:stop]})
    kernel = gram(tmp_path / "s", None, tmp_path / "k", engine="blas", tile=10, memory=MEMORY)
    off = np.abs(kernel.array.compute() / exact - 1).max()
    assert product_bound("float32", "blas", 219) < off < squares_bound("float32", "blas", 219)
    report = verify(kernel, samples=900, full=True)
    assert report.ok, report
    for value in ("entries", "every entry in float64"):
        assert report.check(value).figure == pytest.approx(off, rel=0.2)
    # BLAS sums one entry in many short runs and the next in one long run, as the processor's kernels have it.
    whole = gram(tmp_path / "s", None, tmp_path / "whole", engine="blas", tile=30, memory=MEMORY)
    one_sided = 0.9 * squares_bound("float32", "blas", 219) * (1 - np.indices(exact.shape).sum(0) % 2)
    forge(whole, 0, 0, 0, exact * (1 - one_sided))
    report = verify(whole, samples=900)
    assert report.ok, report
    assert report.check("smallest eigenvalue").figure < -30 * product_bound("float32", "blas", 219)
    # What is allowed is relative to the entries themselves; a tile that is off is found all the same.
    forge(kernel, 0, 0, 1, kernel.read_tile(0, 0, 1) * (1 + 1e-4))
    assert "entries" in failed(verify(kernel, samples=900))


def test_tiles_are_repaired_with_as_many_blas_threads_as_they_were_computed_with(stores, tmp_path, monkeypatch):
    # The number decides about bits: a tile of 325 rows came back with others, and its mirror was no mirror any more.
    asked, limit = [], jacstore.kernels.repair.blas_threads
    for module in ("item", "repair"):
        patched = f"jacstore.kernels.{module}.blas_threads"
        monkeypatch.setattr(patched, lambda count: (asked.append(count), limit(count))[1])
    store = make(tmp_path / "s", mlp(9), layout="factored")
    kernel = gram(store, None, tmp_path / "k", tile=4, memory=MEMORY)
    assert kernel.plan.resident and set(asked) == {1}
    before, tile = contents(tmp_path / "k", "kernel"), kernel.read_tile(0, 0, 1)
    forge(kernel, 0, 0, 1, tile * (1 + 1e-3))
    assert verify(kernel).to_recompute == ("tile (0, 1)",)
    asked.clear()
    assert gram(store, None, tmp_path / "k", tile=4, memory=MEMORY).report["tiles_computed"] == 1
    assert set(asked) == {1} and contents(tmp_path / "k", "kernel") == before


def test_a_right_row_of_which_rounding_leaves_little_is_no_fault_and_a_wrong_one_is(tmp_path):
    # Where tanh is close to 1 its slope is the rounding of 1 - tanh², in whichever order it is computed.
    inputs = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
    params = {"w": np.ones((10, 4), np.float32)}
    problem = Problem(apply=lambda p, x: jnp.tanh(x @ p["w"]), params=params, inputs=inputs)
    store = build(problem, tmp_path / "run.jac")
    assert verify(store, problem, full=True).ok
    wrong = Problem(apply=lambda p, x: 1.001 * jnp.tanh(x @ p["w"]), params=params, inputs=inputs)
    assert verify(store, wrong, full=True).check("rows").state == "failed"
