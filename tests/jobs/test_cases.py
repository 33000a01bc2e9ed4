"""What went wrong for others doing this job: one or more claims about each row of the list of cases.

The workers of row 14 are in `test_scheduler.py`, row 16 for factors in `test_terms.py`, damage to every file of a store
of factors (rows 20 to 23) in `test_faults.py`.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
import jacstore.kernels.plan.schedule
import jacstore.rows.build
import jacstore.rows.device_pass
import jacstore.storage.files
import jacstore.storage.ledger
import jacstore.store.layout
from helpers_errors import refusal
from helpers_kill import Job, run_job
from helpers_limits import limited
from helpers_process import LATCHED, Command, contents, invoke, run_command, write_target
from jacstore import Problem, StoreWriter, build, gram, ntk
from jacstore.base.events import SlabDone, UnitDone, Waiting
from jacstore.base.machine import boot_id
from jacstore.errors import (
    DamagedDataError,
    IncompleteError,
    InvalidFunctionError,
    LockedError,
    NonFiniteError,
    RequestMismatchError,
    RunInterruptedError,
)
from jacstore.testing import (
    TOLERANCE,
    Counting,
    Stopping,
    dense_kernel,
    dense_outputs,
    dense_rows,
    kernel_error,
    mlp,
    nested,
    row_error,
)
from support import rows_of, values

FLOAT32, FLOAT64 = TOLERANCE["float32"], TOLERANCE["float64"]
# Rows, and factors wherever there are any; leaves as small as these stay rows unless factors are asked for.
LAYOUTS = ("dense", "factored")


@pytest.fixture
def tiny_pieces(limits):
    """Pieces and slabs of at most 14 columns: 66 columns are five of them."""
    limits(piece_columns=(14, 14), slab_columns=14)


@pytest.fixture(scope="module")
def truth():
    """Rows `(10, 3, 66)` of `mlp(10)`."""
    return dense_rows(mlp(10))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A store of `mlp(10)` in five units and five pieces, to be copied."""
    path = tmp_path_factory.mktemp("finished") / "run.jac"
    with limited(piece_columns=(14, 14)):
        build(mlp(10), path, unit_size=2, codec="none")
    return path


@pytest.fixture(scope="module")
def factors():
    """The same by factors, in RAM."""
    return build(mlp(10), None, unit_size=2, layout="factored")


@pytest.fixture
def store_path(finished, tmp_path):
    """A copy of `finished` that a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "run.jac"))


def flip(path, at=None):
    """Flip one bit of a byte, by default of the one in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


# --- 1 to 3: what is there already ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_01_a_killed_build_computes_only_the_missing_units(layout, tmp_path):
    job = Job(kind="build", out=str(tmp_path / "run.jac"), options=(("layout", layout),))
    outcome = run_job(job, tmp_path, when="record ledger/unit-0000001.json")
    assert outcome.killed and jacstore.open(job.out).info()["units_done"] == 1
    again = run_job(job, tmp_path)
    assert again.exitcode == 0
    assert (again.report["units_computed"], again.report["units_reused"]) == (4, 1)
    whole = run_job(Job(kind="build", out=str(tmp_path / "whole.jac"), options=job.options), tmp_path)
    assert whole.report["units_computed"] == 5
    arrays = ("rows" if layout == "dense" else "factors", "outputs", "norms")
    assert contents(tmp_path / "run.jac", *arrays) == contents(tmp_path / "whole.jac", *arrays)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_02_another_batch_size_continues_a_build(layout, tmp_path, truth):
    out = tmp_path / "run.jac"
    first = build(mlp(10), out, unit_size=4, batch_size=4, codec="none", part="1/3", layout=layout)
    assert first.report["units_computed"] == 1 and not first.complete
    store = build(mlp(10), out, batch_size=3, codec="none", layout=layout)
    assert store.report["units_reused"] == 1 and store.report["batch_size"] == 3
    assert store.complete and row_error(rows_of(store), truth) <= FLOAT32


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_03_the_second_part_leaves_the_first_alone(layout, order, tmp_path, truth):
    out = tmp_path / "run.jac"
    for place, number in enumerate(order):
        store = build(mlp(10), out, unit_size=2, codec="none", part=f"{number}/2", layout=layout)
        assert store.report["complete"] == store.complete == (place == 1)
        assert store.report["units_computed"] == (2 if number == 1 else 3)
    assert row_error(rows_of(store), truth) <= FLOAT32
    np.testing.assert_allclose(
        store.outputs, dense_outputs(mlp(10)), rtol=0, atol=FLOAT32 * np.abs(store.outputs).max()
    )


# --- 4 and 5: another request -----------------------------------------------------------------------------------------


def test_case_04_other_settings_over_old_bytes_are_refused(store_path):
    before = contents(store_path)
    text = refusal(build, mlp(10), store_path, dtype="bfloat16", codec="none", error=RequestMismatchError)
    assert "dtype: float32 -> bfloat16" in text and "--overwrite" in text and "overwrite=True" in text
    assert "codec: none -> zstd" in refusal(build, mlp(10), store_path, codec="zstd", error=RequestMismatchError)
    assert contents(store_path) == before


@pytest.mark.parametrize("size", [5, 10, 100])
def test_case_04_another_unit_size_is_refused(size, store_path):
    named = f"unit_size: 2 -> {min(size, 10)}"
    assert named in refusal(build, mlp(10), store_path, codec="none", unit_size=size, error=RequestMismatchError)


def test_case_05_other_weights_are_refused(store_path):
    text = refusal(build, mlp(10, seed=1), store_path, codec="none", error=RequestMismatchError)
    assert "parameters: " in text and " -> " in text


def test_case_05_other_inputs_of_the_same_shape_are_refused(store_path):
    problem = mlp(10)
    changed = mlp(10, inputs=problem.inputs + 1)
    assert "inputs: examples 0 to 1 changed" in refusal(
        build, changed, store_path, codec="none", error=RequestMismatchError
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"outputs": [0, 1, 2]}, "outputs: all -> [0, 1, 2]"),
        ({"select": "w"}, 'selection: ["layer0/b", "layer0/w", "layer1/b", "layer1/w"] -> ["la'),
        ({"inputs": mlp(11).inputs}, "n_examples: 10 -> 11"),
        ({"apply": lambda p, x: jnp.sin(x @ p["layer0"]["w"]) @ p["layer1"]["w"]}, "function: "),
    ],
)
def test_case_05_whatever_decides_the_rows_is_named_when_it_changes(changes, named, store_path):
    assert named in refusal(build, mlp(10, **changes), store_path, codec="none", error=RequestMismatchError)


# --- 6 to 9: batches, functions that couple examples, sizes of nothing ------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_06_rows_do_not_depend_on_the_batch_size(layout, truth):
    rows = [rows_of(build(mlp(10), None, batch_size=size, unit_size=8, layout=layout)) for size in (1, 3, 8)]
    for found in rows:
        assert row_error(found, truth) <= FLOAT32
        assert row_error(found, rows[0].astype(np.float64)) <= FLOAT32


def batch_norm(params, batch):
    y = batch @ params["layer0"]["w"]
    return (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5)


def test_case_07_batchnorm_in_training_mode_is_refused(tmp_path):
    text = refusal(build, mlp(10, apply=batch_norm, batched=True), tmp_path / "run.jac", error=InvalidFunctionError)
    assert "other examples" in text and "eval mode" in text
    assert not (tmp_path / "run.jac").exists()


def test_case_07_dropout_that_draws_anew_is_refused(tmp_path):
    draw = np.random.default_rng(0)

    def dropout(params, x):
        return (x @ params["layer0"]["w"]) * (draw.random(7) > 0.5)

    assert "call to call" in refusal(build, mlp(10, apply=dropout), tmp_path / "run.jac", error=InvalidFunctionError)
    assert not (tmp_path / "run.jac").exists()


def test_case_07_batchnorm_in_evaluation_mode_is_taken():
    mean = np.linspace(-1, 1, 7, dtype=np.float32)
    problem = mlp(4, apply=lambda p, batch: jnp.tanh(batch @ p["layer0"]["w"] - mean), batched=True, select="layer0/w")
    assert row_error(rows_of(build(problem, None)), dense_rows(problem)) <= FLOAT32


@pytest.mark.parametrize(("n", "batch"), [(6, 3), (7, 3), (8, 3), (2, 3), (1, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_08_a_ragged_last_batch_is_neither_dropped_nor_padded(layout, n, batch, tmp_path):
    out, seen = tmp_path / "run.jac", Counting()
    store = build(mlp(n), out, batch_size=batch, unit_size=min(n, 6), codec="none", listener=seen, layout=layout)
    assert store.array.shape == (n * 3, 66) and store.outputs.shape == (n, 3) and store.norms.shape == (n, 3, 4)
    assert sum(event.examples for event in seen.of(UnitDone)) == n
    assert store.info()["examples"] == n and store.info()["bytes_dense"] == n * 3 * 66 * 4
    rows = rows_of(store)
    assert row_error(rows, dense_rows(mlp(n))) <= FLOAT32
    np.testing.assert_allclose(store.norms.sum(-1).ravel(), np.square(rows, dtype=np.float64).sum(-1), rtol=FLOAT32)
    kernel = gram(store)
    assert kernel.shape == (n * 3, n * 3)
    assert kernel.report["passes"] == 1.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"inputs": np.zeros((0, 5), np.float32)}, "0 examples"),
        ({"apply": lambda p, x: {}}, "K = 0"),
        ({"apply": lambda p, x: p["layer0"]["b"][:0]}, "K = 0"),
        ({"select": "nothing"}, "select 'nothing' matches no floating-point leaf"),
        ({"params": {}}, "no leaf at all"),
    ],
)
def test_case_09_nothing_to_compute_is_refused_with_the_reason(changes, named, tmp_path):
    assert named in refusal(build, mlp(3, **changes), tmp_path / "run.jac")
    assert not (tmp_path / "run.jac").exists()


def test_case_09_a_writer_of_nothing_is_refused(tmp_path):
    for leaves, n, k in (([("a", (3,))], 0, 1), ([("a", (3,))], 1, 0), ([], 1, 1)):
        assert "at least 1" in refusal(StoreWriter, tmp_path / "run.jac", leaves, n, k)
    assert "A < B" in refusal(build, mlp(3), tmp_path / "run.jac", examples="1:1")
    assert not (tmp_path / "run.jac").exists()


def test_case_09_an_empty_leaf_takes_no_column(tmp_path):
    problem = with_empty_leaf()
    store = build(problem, tmp_path / "run.jac", codec="none")
    assert store.n_parameters == 66 and store.norms.shape == (4, 3, 6)
    assert row_error(rows_of(store), dense_rows(problem)) <= FLOAT32


def test_case_09_an_empty_leaf_has_a_kernel_of_zeros(tmp_path):
    store = build(with_empty_leaf(), tmp_path / "run.jac", codec="none")
    kernel = gram(store, out=tmp_path / "run.ntk", by_leaf=True)
    assert kernel.complete and not np.any(kernel.leaf_arrays["empty"].compute())


def with_empty_leaf():
    whole = mlp(4)
    params = {**whole.params, "empty": np.zeros((0, 3), np.float32), "zempty": np.zeros(0, np.float32)}
    return mlp(4, params=params, apply=lambda p, x: whole.apply({k: v for k, v in p.items() if "empty" not in k}, x))


# --- 10 to 12: rows of zeros, of NaN, of large numbers ----------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_10_zero_rows_are_stored_and_counted(layout, tmp_path):
    # Examples below zero die in the first layer, and the output bias is left out: their rows are zero.
    inputs = np.abs(mlp(8).inputs) * np.where(np.arange(8) % 3, 1, -1)[:, None].astype(np.float32)
    params = {"w": np.abs(mlp(1).params["layer0"]["w"]), "v": mlp(1).params["layer1"]["w"]}
    problem = Problem(apply=lambda p, x: jax.nn.relu(x @ p["w"]) @ p["v"], params=params, inputs=inputs)
    store = build(problem, tmp_path / "run.jac", codec="none", unit_size=3, layout=layout)
    assert store.info()["zero_rows"] == 3 * 3
    truth = dense_rows(problem)
    assert not rows_of(store)[0].any() and row_error(rows_of(store), truth) <= FLOAT32
    assert kernel_error(values(gram(store)), dense_kernel(truth), truth) <= FLOAT32


def test_case_10_outputs_that_ignore_the_parameters_make_zero_rows(tmp_path):
    problem = mlp(4, apply=lambda p, x: x[:2], select="layer0/b")
    store = build(problem, tmp_path / "run.jac", codec="none")
    assert store.info()["zero_rows"] == 8 and not rows_of(store).any()
    assert not values(gram(store)).any()


def with_nan(at=4):
    problem = mlp(6)
    inputs = problem.inputs.copy()
    inputs[at, 1] = np.nan
    return mlp(6, inputs=inputs)


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_11_an_example_with_nan_is_refused_by_name(layout, at, tmp_path):
    options = {"unit_size": 2, "codec": "none", "layout": layout}
    text = refusal(build, with_nan(at), tmp_path / "run.jac", **options, error=NonFiniteError)
    assert f"example(s) {at} hold" in text and "--allow-nonfinite" in text and "allow_nonfinite=True" in text
    store = jacstore.open(tmp_path / "run.jac")
    assert at // 2 not in store.ledger.done("unit")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_11_nan_stays_in_its_own_row_and_column_if_allowed(layout, tmp_path):
    options = {"unit_size": 2, "codec": "none", "layout": layout}
    store = build(with_nan(), tmp_path / "run.jac", **options, allow_nonfinite=True)
    assert store.info()["nonfinite_examples"] == [4]
    found, clean = values(gram(store)), values(gram(build(mlp(6), None, **options)))
    hit = np.repeat(np.arange(6) == 4, 3)
    assert np.isnan(found[hit]).all() and np.isnan(found[:, hit]).all()
    assert np.array_equal(found[np.ix_(~hit, ~hit)], clean[np.ix_(~hit, ~hit)])


@pytest.mark.parametrize("options", [{}, {"engine": "xla"}, {"precision": "fast"}, {"precision": "float64"}])
def test_case_12_a_float16_store_is_summed_in_a_wide_type(options, tmp_path):
    out = tmp_path / "run.jac"
    with StoreWriter(out, {"w": (1000,)}, 3, 1, dtype="float16", unit_size=3) as writer:
        writer.write_unit(0, {"w": np.full((3, 1, 1000), 100.0)})
    assert np.array_equal(values(gram(out, **options)), np.full((3, 3), 1e7))
    assert np.array_equal(writer.store.norms, np.full((3, 1, 1), 1e7))


def test_case_12_a_row_beyond_float16_is_refused(tmp_path):
    problem = Problem(apply=lambda p, x: p["w"] * x, params={"w": np.ones(3, np.float32)}, inputs=np.float32([1, 7e4]))
    text = refusal(build, problem, tmp_path / "run.jac", dtype="float16", codec="none", error=NonFiniteError)
    assert "example(s) 1" in text and "as float16" in text and "--dtype" in text


# --- 13 to 15: what a kernel is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"tile": 64}, {"engine": "xla", "tile": 64}, {"dtype": "float32"}, {"mode": "trace"}], ids=str
)
def test_case_13_a_kernel_is_symmetric_to_the_bit_and_positive(options, store_of_300):
    kernel = values(gram(store_of_300, **options))
    assert kernel.shape == (300, 300) and np.array_equal(kernel, kernel.T)
    eigenvalues = np.linalg.eigvalsh(kernel.astype(np.float64))
    assert eigenvalues[0] > -10 * np.finfo(np.float32).eps * eigenvalues[-1]


@pytest.fixture(scope="module", params=LAYOUTS)
def store_of_300(request):
    return build(mlp(300, outputs="sum"), None, layout=request.param)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_13_float64_products_are_better_than_float32_ones(layout, truth):
    store = build(mlp(10), None, dtype="float64", layout=layout)
    assert row_error(rows_of(store), truth) <= FLOAT64
    kernel = gram(store)
    assert kernel.report["engine"] == "blas"
    assert kernel_error(values(kernel), dense_kernel(truth)) <= FLOAT64


@pytest.mark.parametrize("mode", ["full", "trace", "diagonal", "blocks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_14_the_kernel_does_not_depend_on_tile_or_engine(layout, mode, finished, factors, truth):
    store = finished if layout == "dense" else factors
    expected = dense_kernel(truth, mode=mode)
    for options in ({"tile": 5}, {"tile": 7}, {"tile": 20}, {"tile": 3, "engine": "xla"}, {"tile": 4, "by_leaf": True}):
        kernel = gram(store, mode=mode, **options)
        assert kernel_error(values(kernel), expected, truth, mode=mode) <= FLOAT32, options
    lazy = jacstore.lazy_kernel(store, mode, tile=3).compute(scheduler="synchronous")
    assert kernel_error(lazy, expected, truth, mode=mode) <= FLOAT32


def test_case_14_the_kernel_does_not_depend_on_the_slabs(finished, truth, tmp_path, tiny_pieces):
    seen = Counting()
    kernel = gram(finished, listener=seen, tile=4)
    assert len(seen.of(SlabDone)) == 5 and kernel.report["passes"] == 1.0
    assert kernel_error(values(kernel), dense_kernel(truth)) <= FLOAT32


@pytest.mark.parametrize("mode", ["full", "trace", "diagonal"])
def test_case_15_a_rectangular_kernel_of_sizes_that_do_not_divide(mode, rectangle, tmp_path):
    stores, rows = rectangle
    expected = dense_kernel(*rows, mode=mode)
    for tile in (5, 40):
        kernel = gram(*stores, tmp_path / f"{tile}.ntk", tile=tile, mode=mode)
        assert kernel.shape == expected.shape and kernel.report["passes"] == 1.0
        assert kernel_error(values(kernel), expected, *rows, mode=mode) <= FLOAT32


@pytest.fixture(scope="module", params=LAYOUTS)
def rectangle(request):
    problems = mlp(37), mlp(23, inputs=mlp(23, seed=5).inputs)
    stores = [build(p, None, unit_size=4, batch_size=4, layout=request.param) for p in problems]
    return stores, [dense_rows(p) for p in problems]


# --- 16 to 18: kinds of parameters ------------------------------------------------------------------------------------


def test_case_16_an_embedding_of_integer_tokens_is_correct(tmp_path):
    draw = np.random.default_rng(0)
    params = {"table": draw.normal(size=(11, 4)).astype("f4"), "head": draw.normal(size=(4, 3)).astype("f4")}
    tokens = draw.integers(0, 11, size=(8, 5))

    def apply(p, x):
        return jnp.tanh(p["table"][x].mean(0)) @ p["head"]

    problem = Problem(apply=apply, params=params, inputs=tokens)
    store = build(problem, tmp_path / "run.jac", codec="none", unit_size=3)
    truth = dense_rows(problem)
    assert row_error(rows_of(store), truth) <= FLOAT32
    assert kernel_error(values(gram(store)), dense_kernel(truth)) <= FLOAT32
    # Rows of tokens that an example does not hold are zero in its row.
    absent = np.setdiff1d(np.arange(11), tokens[0])
    assert not rows_of(store)[:3, 12:].reshape(3, 11, 4)[:, absent].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_17_a_matrix_used_in_two_layers_counts_both(layout):
    params = {"w": np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)}
    inputs = mlp(4).inputs

    def tied(p, x):
        return jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]) @ p["w"].T

    problem = Problem(apply=tied, params=params, inputs=inputs)
    assert row_error(rows_of(build(problem, None, layout=layout)), dense_rows(problem)) <= FLOAT32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_18_biases_on_some_layers_mixed_types_and_integer_leaves(layout, tmp_path):
    draw = np.random.default_rng(0)
    params = {
        "first": {"w": draw.normal(size=(5, 4)).astype(np.float32)},
        "second": {"w": draw.normal(size=(4, 3)).astype(np.float16), "b": draw.normal(size=3).astype(jnp.bfloat16)},
        "steps": np.arange(4),
        "on": True,
        "name": "net",
    }

    def apply(p, x):
        return jnp.tanh(x @ p["first"]["w"]) @ p["second"]["w"] * 2.0 ** p["on"] + p["second"]["b"]

    problem = Problem(apply=apply, params=params, inputs=mlp(4).inputs)
    store = build(problem, tmp_path / "run.jac", codec="none", layout=layout)
    assert store.n_parameters == 20 + 12 + 3
    assert [leaf.path for leaf in store.leaves] == ["first/w", "second/b", "second/w"]
    left_out = json.loads(invoke("info", tmp_path / "run.jac", "--json").stdout)["left_out"]
    assert [path for path, _ in left_out] == ["name", "on", "steps"]
    assert ["steps", "not floating point (int64)"] in left_out
    truth = dense_rows(problem)
    # Rows of 16-bit leaves are as good as the network's own arithmetic; those of the float32 leaf come after it.
    coarse = float(jnp.finfo(jnp.float16).eps)
    assert row_error(rows_of(store), truth) <= 4 * coarse
    columns = rows_of(store)[:, 20:23].reshape(4, 3, 3)
    assert np.array_equal(columns, np.broadcast_to(np.eye(3), (4, 3, 3)))


def test_case_18_paths_are_encoded_and_outputs_may_be_a_tree(tmp_path):
    store = build(nested(8), tmp_path / "run.jac", codec="none", unit_size=3)
    assert [leaf.path for leaf in store.leaves] == ["100%25/0", "a%2Fb/0", "a%2Fb/1/scale"]
    truth = dense_rows(nested(8))
    assert row_error(rows_of(store), truth) <= FLOAT32
    kernel = gram(store, out=tmp_path / "run.ntk", by_leaf=True)
    assert kernel_error(values(kernel), dense_kernel(truth), truth) <= FLOAT32
    first = dense_kernel(truth[:, :, :3])
    assert kernel_error(kernel.leaf_arrays["100%25/0"].compute(), first, truth) <= FLOAT32
    assert sorted(p.name for p in (tmp_path / "run.ntk" / "leaves").iterdir() if p.is_dir()) == [
        "100%2525%2F0",
        "a%252Fb%2F0",
        "a%252Fb%2F1%2Fscale",
    ]


# --- 19: zero ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["batch-size", "output-batch", "unit-size", "memory", "device-memory"])
def test_case_19_zero_is_refused_by_build(flag, tmp_path):
    for value in ("0", "-1") if flag.endswith(("size", "batch")) else ("0", "0GB"):
        result = invoke("build", write_target(tmp_path), "--out", tmp_path / "run.jac", f"--{flag}", value)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        for named in (f"--{flag} {value}", f"({flag.replace('-', '_')}=)"):
            assert named in result.stderr
        assert not (tmp_path / "run.jac").exists()


@pytest.mark.parametrize("flag", ["tile", "workers", "memory", "device-memory"])
def test_case_19_zero_is_refused_by_gram(flag, finished, tmp_path):
    result = invoke("gram", finished, "--out", tmp_path / "run.ntk", f"--{flag}", "0")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert f"--{flag} 0" in result.stderr and f"({flag.replace('-', '_')}=)" in result.stderr
    assert not (tmp_path / "run.ntk").exists()


def test_case_19_numbers_are_integers_of_whatever_kind(tmp_path):
    assert build(mlp(4), tmp_path / "run.jac", unit_size=np.int64(2), codec="none").n_units == 2
    assert "--unit-size False" in refusal(build, mlp(4), tmp_path / "other.jac", unit_size=False)


# --- 20 to 22: bytes that are gone or changed -------------------------------------------------------------------------


def test_case_20_a_deleted_chunk_is_reported_and_never_read_as_zeros(store_path, tmp_path):
    before = contents(store_path, "rows")
    (store_path / "rows/c/3/0/0").unlink()
    result = invoke("gram", store_path, "--out", tmp_path / "run.ntk")
    assert result.exit_code == 3 and result.stderr.count("\n") == 1
    for named in ("unit 3 (examples 6 to 7)", "layer0/b", "rows/c/3/0/0 is missing", "build"):
        assert named in result.stderr
    assert not jacstore.open(tmp_path / "run.ntk").complete
    assert "unit 3" in refusal(jacstore.open(store_path).array.compute, scheduler="synchronous", error=DamagedDataError)
    again = build(mlp(10), store_path, codec="none")
    assert again.report["units_computed"] == 1 and contents(store_path, "rows") == before
    assert invoke("gram", store_path, "--out", tmp_path / "run.ntk").exit_code == 0


def test_case_20_a_deleted_chunk_of_a_factor_is_reported_and_never_read_as_zeros(tmp_path):
    out, options = tmp_path / "run.jac", {"codec": "none", "unit_size": 2, "layout": "factored"}
    operand = build(mlp(10), out, **options).leaves[1].operands[0]
    before = contents(out, "factors")
    (out / "factors" / operand / "c/3/0/0/0").unlink()
    result = invoke("gram", out, "--out", tmp_path / "run.ntk")
    assert result.exit_code == 3 and result.stderr.count("\n") == 1
    for named in ("unit 3 (examples 6 to 7)", "layer0/w", f"factors/{operand}/c/3/0/0/0 is missing"):
        assert named in result.stderr
    assert build(mlp(10), out, **options).report["units_computed"] == 1 and contents(out, "factors") == before
    assert invoke("gram", out, "--out", tmp_path / "run.ntk").exit_code == 0


@pytest.mark.parametrize("array", ["outputs", "norms"])
def test_case_20_a_deleted_chunk_of_a_small_array_is_reported(array, store_path):
    (store_path / array / "c/2/0" / ("0" if array == "norms" else "")).unlink()
    store = jacstore.open(store_path)
    assert "unit 2" in refusal(lambda: getattr(store, array), error=DamagedDataError)
    assert build(mlp(10), store_path, codec="none").report["units_computed"] == 1
    assert np.isfinite(getattr(jacstore.open(store_path), array)).all()


def test_case_20_a_deleted_or_changed_tile_is_reported(finished, tmp_path):
    for damage in (flip, Path.unlink):
        kernel = gram(finished, out=tmp_path / f"{damage.__name__}.ntk", tile=4)
        damage(tmp_path / f"{damage.__name__}.ntk" / "kernel/c/1/2")
        assert "tile (1, 2)" in refusal(
            jacstore.open(kernel.path).array.compute, scheduler="synchronous", error=DamagedDataError
        )


def test_case_20_verify_names_unit_and_leaf_of_a_deleted_chunk(store_path):
    (store_path / "rows/c/3/0/0").unlink()
    result = invoke("verify", store_path)
    assert result.exit_code == 3 and result.stderr.count("\n") == 1
    for named in ("unit 3 (examples 6 to 7)", "layer0/b to layer1/w", "rows/c/3/0/0 is missing", "build"):
        assert named in result.stderr
    assert build(mlp(10), store_path, codec="none").report["units_computed"] == 1
    assert invoke("verify", store_path).exit_code == 0


def test_case_21_verify_names_unit_and_leaf_of_a_flipped_byte_and_the_tile_of_a_kernel(store_path, tmp_path):
    gram(store_path, out=tmp_path / "run.ntk", tile=4)
    # In the middle of the file is the third of five pieces.
    flip(store_path / "rows/c/1/0/0")
    flip(tmp_path / "run.ntk" / "kernel/c/1/2")
    result = invoke("verify", store_path)
    assert result.exit_code == 3 and "unit 1 (examples 2 to 3), leaf layer0/w: rows/c/1/0/0: bytes" in result.stderr
    result = invoke("verify", tmp_path / "run.ntk", "--json")
    assert result.exit_code == 3 and json.loads(result.stdout)["to_recompute"] == ["tile (1, 2)"]
    # Only verify found it, and that is enough.
    assert build(mlp(10), store_path, codec="none").report["units_computed"] == 1
    assert gram(store_path, out=tmp_path / "run.ntk", tile=4).report["tiles_computed"] == 1
    assert invoke("verify", tmp_path / "run.ntk").exit_code == 0


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_case_21_a_flipped_byte_is_reported_and_mended(codec, tmp_path, tiny_pieces):
    out = tmp_path / "run.jac"
    build(mlp(10), out, unit_size=2, codec=codec)
    before = contents(out, "rows")
    size = len(before["rows/c/1/0/0"])
    # Somewhere in the second of five pieces: only its columns are lost.
    flip(out / "rows/c/1/0/0", size // 4)
    store = jacstore.open(out)
    text = refusal(gram, store, out=tmp_path / "run.ntk", error=DamagedDataError)
    assert "unit 1 (examples 2 to 3)" in text and "leaf layer0/w" in text and "checksum" in text
    rows = np.empty((10, 3, 14), np.float32)
    store.read_rows(0, 10, 42, 56, rows)
    assert np.isfinite(rows).all()
    # The size is right, so only the reader's note tells the next build to look.
    again = build(mlp(10), out, codec=codec)
    assert again.report["units_computed"] == 1 and contents(out, "rows") == before
    assert gram(again, out=tmp_path / "run.ntk").complete


def test_case_21_every_byte_of_the_data_is_guarded(store_path):
    store = jacstore.open(store_path)
    path = store_path / "rows/c/0/0/0"
    size = path.stat().st_size
    index = 5 * 16 + 4
    for at in range(0, size - index, 97):
        flip(path, at)
        # Between the pieces stand their checksums, which only other readers need.
        if at % (14 * 2 * 3 * 4 + 4) < 14 * 2 * 3 * 4:
            assert store.check_unit(0) is not None, at
        flip(path, at)
    assert store.check_unit(0) is None


def test_case_21_the_index_of_a_shard_is_guarded_too(store_path):
    path = store_path / "rows/c/0/0/0"
    flip(path, path.stat().st_size - 20)
    assert jacstore.open(store_path).check_unit(0) is not None


def test_case_21_a_damaged_record_is_repaired_by_the_same_build(store_path):
    record = store_path / "ledger/unit-0000002.json"
    good = json.loads(record.read_text())
    for damage in ("{", "{}", json.dumps({**good, "files": 3})):
        record.write_text(damage)
        result = invoke("info", store_path)
        assert result.exit_code == 3 and result.stderr.count("\n") == 1
        assert "record of unit 2" in result.stderr and "run the same build again" in result.stderr
        assert build(mlp(10), store_path, codec="none").report["units_computed"] == 1
        assert json.loads(record.read_text()) == good


def test_case_22_a_torn_file_of_an_unfinished_unit_is_written_anew(store_path):
    before = contents(store_path, "rows", "outputs", "norms")
    (store_path / "ledger/unit-0000003.json").unlink()
    torn = store_path / "rows/c/3/0/0"
    torn.write_bytes(torn.read_bytes()[:100])
    store = build(mlp(10), store_path, codec="none")
    assert store.report["units_computed"] == 1
    assert contents(store_path, "rows", "outputs", "norms") == before


def test_case_22_a_torn_file_of_a_finished_unit_is_noticed(store_path):
    before = contents(store_path, "rows", "outputs", "norms")
    for name, size in (("rows/c/3/0/0", 100), ("norms/c/1/0/0", 0)):
        (store_path / name).write_bytes((store_path / name).read_bytes()[:size])
    assert build(mlp(10), store_path, codec="none").report["units_computed"] == 2
    assert contents(store_path, "rows", "outputs", "norms") == before


# --- 23: disk full ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 20 MB, where this process may mount one."""
    libc = ctypes.CDLL(None, use_errno=True)
    where = str(tmp_path / "disk").encode()
    os.mkdir(where)
    if libc.mount(b"tmpfs", where, b"tmpfs", 0, b"size=20m") != 0:
        pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield tmp_path / "disk"
    assert libc.umount2(where, 2) == 0


def wide(n, size):
    """A linear problem whose rows take `4 * size` bytes."""
    w = np.ones(size, np.float32)
    return Problem(apply=lambda p, x: (p * x).sum(), params=w, inputs=np.arange(1, n + 1, dtype=np.float32))


def test_case_23_a_store_larger_than_its_disk_is_refused_before_it_starts(small_disk):
    text = refusal(build, wide(10, 750_000), small_disk / "run.jac", codec="none")
    for named in ("30 MB", "free", "--out", "--dtype bfloat16"):
        assert named in text
    assert not list(small_disk.rglob("zarr.json"))


def test_case_23_so_it_is_when_the_codec_is_still_to_be_measured(small_disk):
    assert "30 MB" in refusal(build, wide(10, 750_000), small_disk / "run.jac")
    assert build(wide(2, 1000), small_disk / "small.jac").complete


def test_case_23_a_disk_that_fills_later_keeps_what_is_finished(small_disk):
    ballast = small_disk / "ballast"

    def fill(event):
        if isinstance(event, UnitDone) and not ballast.exists():
            free = shutil.disk_usage(small_disk).free
            ballast.write_bytes(bytes(free - 3_000_000))

    problem = wide(5, 500_000)
    text = refusal(build, problem, small_disk / "run.jac", unit_size=1, codec="none", listener=fill)
    assert "disk full while writing" in text and "run the same command again" in text
    store = jacstore.open(small_disk / "run.jac")
    done = store.info()["units_done"]
    assert 1 <= done < 5
    ballast.unlink()
    store = build(problem, small_disk / "run.jac", unit_size=1, codec="none")
    assert store.report["units_reused"] == done and store.complete
    assert np.array_equal(rows_of(store)[:, 0], problem.inputs)


def full_disk(monkeypatch, step, ending):
    """Make one kind of step fail as on a full disk; a `write` fails once its file is there."""

    def fail(found, name):
        if found == step and name.endswith(ending):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(jacstore.storage.files, "before_step", fail)


@pytest.mark.parametrize(
    ("step", "ending"),
    [("fsync", "rows/c/2/0/0"), ("fsync record", "unit-0000002.json"), ("rename", "unit-0000002.json")],
)
def test_case_23_wherever_a_unit_fails_the_others_stay(step, ending, tmp_path, monkeypatch, truth):
    full_disk(monkeypatch, step, ending)
    text = refusal(build, mlp(10), tmp_path / "run.jac", unit_size=2, codec="none")
    assert "disk full" in text and ending in text
    monkeypatch.undo()
    done = jacstore.open(tmp_path / "run.jac").ledger.done("unit")
    # Units that were under way are finished, whatever happened to this one.
    assert {0, 1} <= set(done) and 2 not in done
    assert not [name for name in os.listdir(tmp_path / "run.jac/ledger") if name.endswith(".tmp")]
    store = build(mlp(10), tmp_path / "run.jac", codec="none")
    assert store.report["units_reused"] == len(done) and row_error(rows_of(store), truth) <= FLOAT32


@pytest.mark.parametrize(("step", "ending"), [("fsync", "kernel/c/1/1"), ("fsync record", "tiles-0000000.json")])
def test_case_23_a_kernel_on_a_full_disk_can_be_continued(step, ending, finished, tmp_path, monkeypatch, truth):
    full_disk(monkeypatch, step, ending)
    text = refusal(gram, finished, out=tmp_path / "run.ntk", tile=4)
    assert "disk full" in text and "\n" not in text
    monkeypatch.undo()
    kernel = gram(finished, out=tmp_path / "run.ntk", tile=4)
    assert kernel.complete and kernel_error(values(kernel), dense_kernel(truth)) <= FLOAT32


# --- 24 and 25: one store, many processes, many files -----------------------------------------------------------------


def test_case_24_a_second_build_is_refused_while_the_first_lives(tmp_path, truth):
    target, out = write_target(tmp_path), tmp_path / "run.jac"
    words = ("build", f"{target}:held", "--out", out, "--codec", "none", "--unit-size", 2, "--batch-size", 2)
    with Command(*words) as first:
        first.wait_for(lambda: (out / "ledger/unit-0000000.json").exists() and (tmp_path / "reached").exists())
        text = refusal(build, mlp(10), out, codec="none", error=LockedError)
        assert f"process {first.process.pid} on this host" in text and "--part" in text
        text = refusal(build, mlp(10), out, codec="none", overwrite=True, error=LockedError)
        assert f"process {first.process.pid}" in text and (out / "ledger/unit-0000000.json").exists()
        first.process.kill()
        first.process.wait()
        done = len(jacstore.open(out).ledger.done("unit"))
        # The lock of a dead process is taken over without waiting.
        seen = Counting()
        store = build(mlp(10), out, codec="none", listener=seen)
    assert not seen.of(Waiting)
    assert store.report["units_reused"] == done >= 1 and row_error(rows_of(store), truth) <= FLOAT32
    assert not list((out / "ledger").glob("lock-*"))


def test_case_24_a_lock_of_a_process_id_that_was_given_anew_is_taken_over(store_path, limits):
    lock = {
        "host": jacstore.base.machine.hostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
        "start": "1",
        "first": 0,
        "last": 9,
    }
    # Of a boot before this one or of another machine of this name: taken over once its heartbeat has stood still.
    limits(lock_stale_seconds=0.05)
    mine = {"start": jacstore.base.machine.process_start(os.getpid())}
    for changes, waits in (({}, 0), (mine | {"boot": "another boot"}, 1), (mine | {"space": "another"}, 1)):
        (store_path / "ledger/lock-0000000-0000004.json").write_text(json.dumps(lock | changes))
        seen = Counting()
        assert build(mlp(10), store_path, codec="none", listener=seen).complete and len(seen.of(Waiting)) == waits


def test_case_24_two_parts_may_run_at_once_but_not_one_part_twice(tmp_path):
    leaves, options = {"w": (4,)}, {"unit_size": 1}
    with StoreWriter(tmp_path / "run.jac", leaves, 4, 1, part=(1, 2), **options):
        with StoreWriter(tmp_path / "run.jac", leaves, 4, 1, part=(2, 2), **options) as other:
            assert other.missing == [(2, 3), (3, 4)]
        again = StoreWriter(tmp_path / "run.jac", leaves, 4, 1, part=(1, 2), **options)
        assert "process" in refusal(again.__enter__, error=LockedError)


MANY_FILES = """
import resource, sys
import numpy as np
import jacstore
from jacstore.base.limits import LIMITS

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
LIMITS.piece_columns, LIMITS.file_bytes = (4, 4), 1
out = sys.argv[1]
with jacstore.StoreWriter(out + "/run.jac", {"w": (100,)}, 40, 1, unit_size=1) as writer:
    for n in range(40):
        writer.write_unit(n, {"w": np.full((1, 1, 100), n + 1.0)}, outputs=np.ones((1, 1)))
assert np.array_equal(writer.store.array.compute()[:, 99], np.arange(1.0, 41))
assert writer.store.outputs.all()
kernel = jacstore.gram(writer.store, out=out + "/run.ntk", tile=3)
assert kernel.array.compute()[1, 2] == 2 * 3 * 100
"""


def test_case_25_a_thousand_files_need_few_open_ones(tmp_path):
    finished = run_command(tmp_path, code=MANY_FILES)
    assert finished.returncode == 0, finished.stderr
    assert sum(1 for path in (tmp_path / "run.jac").glob("*/c/**/*") if path.is_file()) == 40 * (25 + 2)


# --- 26 and 36: signals -----------------------------------------------------------------------------------------------

SIGNALS = [(26, "SIGINT"), (36, "SIGTERM"), (36, "SIGUSR1")]


def interrupted_build(name, folder):
    target, out = write_target(folder), folder / "run.jac"
    words = ("build", f"{target}:held", "--out", out, "--codec", "none", "--unit-size", 2, "--batch-size", 2)
    with Command(*words) as command:
        command.wait_for(lambda: (out / "ledger/unit-0000000.json").exists() and (folder / "reached").exists())
        command.signal(getattr(signal, name))
        (folder / "go").touch()
        code, stdout, stderr = command.finish()
    assert code == 130 and stdout == "", stderr
    return words, out, stderr


def check_build(name, folder, truth):
    words, out, stderr = interrupted_build(name, folder)
    line = stderr.splitlines()[-1]
    done = jacstore.open(out).ledger.done("unit")
    assert done == list(range(len(done))) and 1 <= len(done) <= 3
    assert line.startswith(f"jacstore: {name}: ") and re.search(r"[2-5] of 5 units missing", line)
    assert line.endswith(f"to continue: jacstore {' '.join(map(str, words))}")
    assert not list((out / "ledger").glob("lock-*"))
    store = build(mlp(10, inputs=HeldNoMore(mlp(10).inputs)), out, codec="none")
    assert store.report["units_reused"] == len(done) and row_error(rows_of(store), truth) <= FLOAT32


class HeldNoMore:
    """The same dataset as the target's, no longer held up."""

    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        return self.inputs[i]


def check_gram(name, folder, finished, truth, limits):
    out = folder / "run.ntk"
    words = ("gram", finished, "--out", out)
    with Command(*words, code=LATCHED, LATCH=str(folder), LATCH_COLUMN="42") as command:
        command.wait_for(lambda: list(folder.glob("reached-*")))
        command.signal(getattr(signal, name))
        (folder / "go").touch()
        code, stdout, stderr = command.finish()
    assert code == 130 and stdout == "", stderr
    line = stderr.splitlines()[-1]
    assert line.startswith(f"jacstore: {name}: interrupted in item 0, slab ")
    assert line.endswith(f"to continue: jacstore {' '.join(map(str, words))}")
    kernel = jacstore.open(out)
    assert not kernel.complete and kernel.info()["tiles_done"] == 0
    assert "incomplete" in refusal(lambda: kernel.array, error=IncompleteError)
    first, seen = int(line.split("slab ")[1].split()[0]), Counting()
    limits(slab_columns=14)
    again = gram(finished, out=out, listener=seen)
    # The interrupted run left its sums: no slab is multiplied twice.
    assert first in (2, 3) and [event.slab for event in seen.of(SlabDone)] == list(range(first, 5))
    assert np.array_equal(values(again), values(gram(finished)))
    assert kernel_error(values(again), dense_kernel(truth)) <= FLOAT32


def test_case_26_ctrl_c_in_a_build_keeps_whole_units(tmp_path, truth):
    check_build("SIGINT", tmp_path, truth)


def test_case_26_units_that_were_being_written_are_not_called_missing(tmp_path, monkeypatch):
    writing, asked = threading.Event(), threading.Event()

    def hold(step, name):
        if name.endswith("unit-0000001.json") and step == "record":
            writing.set()
            asked.wait(5)
            # Long enough for a message that does not wait for this unit.
            time.sleep(0.2)

    def stop():
        if writing.is_set():
            asked.set()
        return asked.is_set()

    monkeypatch.setattr(jacstore.storage.files, "before_step", hold)
    text = refusal(
        build, mlp(20), tmp_path / "run.jac", unit_size=2, codec="none", stop=stop, error=RunInterruptedError
    )
    done = len(jacstore.open(tmp_path / "run.jac").ledger.done("unit"))
    assert f"{10 - done} of 10 units missing" in text


def test_case_26_ctrl_c_in_a_gram_keeps_its_sums(tmp_path, finished, truth, limits):
    check_gram("SIGINT", tmp_path, finished, truth, limits)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_case_36_a_schedulers_signal_in_a_build_keeps_whole_units(name, tmp_path, truth):
    check_build(name, tmp_path, truth)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_case_36_a_schedulers_signal_in_a_gram_keeps_its_sums(name, tmp_path, finished, truth, limits):
    check_gram(name, tmp_path, finished, truth, limits)


# --- 27 and 28: device and memory -------------------------------------------------------------------------------------

on_cpu_only = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the device that is asked for is there")


@on_cpu_only
def test_case_27_a_device_that_is_not_there_is_refused_by_build(tmp_path):
    finished = run_command("build", write_target(tmp_path), "--out", tmp_path / "run.jac", JAX_PLATFORMS="cuda")
    assert finished.returncode == 2 and finished.stderr.count("\n") == 1
    assert "JAX_PLATFORMS=cuda" in finished.stderr and "JAX_PLATFORMS=cpu" in finished.stderr
    assert not (tmp_path / "run.jac").exists()


@on_cpu_only
def test_case_27_a_device_that_is_not_there_is_refused_by_gram(finished, tmp_path):
    done = run_command("gram", finished, "--out", tmp_path / "run.ntk", JAX_PLATFORMS="cuda")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "JAX_PLATFORMS=cuda" in done.stderr


PEAK = """
import sys
from pathlib import Path
import jacstore.kernels.gram

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

store, out, *tile = sys.argv[1:]
jacstore.kernels.gram.gram(store, out=out + ".warm", mode="trace", memory="50MB")
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
kernel = jacstore.kernels.gram.gram(store, out=out, memory="50MB", tile=int(tile[0]) if tile else None)
print(status("VmHWM") - before, kernel.report["passes"], kernel.plan.memory_bytes, kernel.plan.schedule)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is measured through /proc")
@pytest.mark.parametrize(
    "tile",
    [
        pytest.param((50,), id="100 tiles"),
        pytest.param(
            (),
            id="tiles of the plan's choice",
            marks=[
                pytest.mark.slow,
            ],
        ),
    ],
)
def test_case_28_a_kernel_of_200_mb_takes_50_mb(tile, tmp_path):
    n, k, p = 500, 10, 64
    rows = np.random.default_rng(0).normal(size=(n, k, p)).astype(np.float32)
    with StoreWriter(tmp_path / "run.jac", {"w": (p,)}, n, k, unit_size=100) as writer:
        for a, b in writer.missing:
            writer.write_unit(a, {"w": rows[a:b]})
    done = run_command(tmp_path / "run.jac", tmp_path / "run.ntk", *tile, code=PEAK)
    assert done.returncode == 0, done.stderr
    peak, passes, planned, *_ = done.stdout.split()
    assert int(planned) <= 50_000_000 and int(peak) <= 50_000_000, done.stdout
    assert float(passes) > 1
    kernel = jacstore.open(tmp_path / "run.ntk")
    assert kernel.complete and kernel.array.shape == (5000, 5000)
    corner = kernel.array[4900:, :100].compute(scheduler="synchronous")
    left, right = rows.reshape(-1, p)[4900:, None], rows.reshape(-1, p)[:100, None]
    assert kernel_error(corner, dense_kernel(left, right), left, right) <= FLOAT32


def test_case_28_a_store_in_ram_holds_many_pieces(truth, tiny_pieces):
    assert row_error(rows_of(build(mlp(10), None, unit_size=5)), truth) <= FLOAT32


def test_case_28_a_unit_is_written_before_the_next_where_memory_holds_one(truth, tmp_path):
    one_unit = 2 * 3 * 66 * 4
    options = {"unit_size": 2, "batch_size": 1, "output_batch": 1, "codec": "none"}
    store = build(mlp(10), tmp_path / "run.jac", memory=2 * one_unit + 400, **options)
    assert row_error(rows_of(store), truth) <= FLOAT32


def test_case_28_a_store_in_ram_moves_to_a_folder_beyond_its_memory(truth, tmp_path, monkeypatch, limits):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits(piece_columns=(66, 66))
    store = build(mlp(10), None, unit_size=2, memory=5000, batch_size=1, output_batch=1)
    assert len(list(tmp_path.iterdir())) == 1 and "rows/c/4/0/0" in contents(next(tmp_path.iterdir()))
    assert row_error(rows_of(store), truth) <= FLOAT32
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del store
        gc.collect()
    assert not caught and not list(tmp_path.iterdir())


# --- 29 and 30: stores that do not fit --------------------------------------------------------------------------------


def test_case_29_gram_of_an_unfinished_build_says_what_is_missing(tmp_path):
    job = Job(kind="build", out=str(tmp_path / "run.jac"))
    assert run_job(job, tmp_path, when="record ledger/unit-0000002.json").killed
    result = invoke("gram", job.out, "--out", tmp_path / "run.ntk")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "3 of 5 units missing" in result.stderr and f"jacstore build TARGET --out {job.out}" in result.stderr
    assert not (tmp_path / "run.ntk").exists()
    text = refusal(jacstore.open(job.out).array.compute, scheduler="synchronous", error=IncompleteError)
    assert "3 of 5 units missing" in text


def test_case_29_three_of_ten_units_are_counted(tmp_path):
    with StoreWriter(tmp_path / "run.jac", {"w": (3,)}, 10, 1, unit_size=1) as writer:
        for a in (0, 1, 2, 4, 5, 7, 8):
            writer.write_unit(a, {"w": np.ones((1, 1, 3))})
    for other in (None, writer.store):
        text = refusal(gram, writer.store, other, tmp_path / "run.ntk", error=IncompleteError)
        assert "3 of 10 units missing" in text
    assert "3 of 10" in refusal(jacstore.lazy_kernel, writer.store, error=IncompleteError)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "parameters"),
        ({"select": "w"}, "selection"),
        ({"sizes": (5, 6, 3)}, "leaves"),
        ({"outputs": [0, 1]}, "outputs"),
    ],
)
def test_case_30_rows_of_two_networks_are_refused(changes, named, finished, tmp_path):
    text = refusal(gram, finished, build(mlp(3, **changes), None), tmp_path / "run.ntk", error=RequestMismatchError)
    assert named in text and "one network" in text
    assert not (tmp_path / "run.ntk").exists()


@pytest.mark.parametrize(
    "changes", [{"apply": lambda p, x: x @ p["layer0"]["w"] @ p["layer1"]["w"]}, {"outputs": [0, 2, 1]}]
)
def test_case_30_another_function_of_the_same_parameters_is_another_network(changes, finished):
    refusal(gram, finished, build(mlp(3, **changes), None), error=RequestMismatchError)


def test_case_30_other_types_and_units_are_no_reason_to_refuse(finished, truth):
    other = build(mlp(10), None, dtype="float64", unit_size=3)
    kernel = gram(finished, other, tile=4)
    assert kernel_error(values(kernel), dense_kernel(truth)) <= FLOAT32


# --- 31 to 34: duplicates, targets, constants, choices ----------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_31_the_same_example_twice_makes_two_equal_rows(layout, tmp_path):
    inputs = mlp(4).inputs[[0, 1, 1, 0]]
    options = {"codec": "none", "unit_size": 2, "batch_size": 2, "layout": layout}
    store = build(mlp(4, inputs=inputs), tmp_path / "run.jac", **options)
    rows = rows_of(store).reshape(4, 3, 66)
    assert row_error(rows[[1, 0]], rows[[2, 3]].astype(np.float64)) <= FLOAT32
    kernel = values(gram(store)).reshape(4, 3, 4, 3)
    assert kernel.shape[0] == 4 and kernel_error(kernel[1, :, 1], kernel[2, :, 1], rows[1:2]) <= FLOAT32


BROKEN = """
import jacstore
x = 1
def fails():
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("missing.py", "there is no file"),
        ("broken.py:x", "is a int; it has to be a jacstore.Problem"),
        ("broken.py:fails", "broken.py:5"),
        ("broken.py:nothing", "there is no name nothing"),
        ("no_such_module_here:problem", "no module no_such_module_here"),
    ],
)
def test_case_32_an_unreadable_target_is_one_line(name, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    result = invoke("build", name, "--out", "run.jac")
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert named in result.stderr and "Traceback" not in result.stderr
    if "fails" in name:
        result = invoke("build", name, "--out", "run.jac", "--debug")
        assert result.exit_code == 2 and "ZeroDivisionError" in result.stderr and "Traceback" in result.stderr
        assert 'broken.py", line 5' in result.stderr
    assert not (tmp_path / "run.jac").exists()


def test_case_33_closed_over_arrays_of_other_values_are_refused(tmp_path):
    def with_statistics(mean):
        return mlp(4, apply=lambda p, x: (x - mean) @ p["layer0"]["w"], select="layer0/w")

    build(with_statistics(np.float32([1, 2, 3, 4, 5])), tmp_path / "run.jac", codec="none")
    text = refusal(
        build,
        with_statistics(np.float32([1, 2, 3, 4, 6])),
        tmp_path / "run.jac",
        codec="none",
        error=RequestMismatchError,
    )
    assert "constants: " in text and "function" not in text.split("constants")[0]


def test_case_34_a_measured_codec_is_kept_when_measuring_again_says_otherwise(tmp_path, monkeypatch, truth):
    out = tmp_path / "run.jac"
    monkeypatch.setattr(jacstore.rows.build, "fastest_codec", lambda *_: "lz4")
    build(mlp(10), out, unit_size=2, part="1/2")
    monkeypatch.setattr(jacstore.rows.build, "fastest_codec", lambda *_: "zstd")
    store = build(mlp(10), out)
    assert store.report["units_reused"] == 2 and store.info()["codecs"] == ["lz4", "none"]
    assert store.report["codec"] == "lz4" and row_error(rows_of(store), truth) <= FLOAT32


@pytest.mark.parametrize(("part", "again"), [("1/1", 0), ("1/2", 0), ("2/2", 1)])
def test_case_34_rows_that_a_codec_was_measured_on_are_not_computed_twice(
    part, again, tmp_path, monkeypatch, limits, truth
):
    """A part that does not begin with the first example has no use for them."""
    fetched, fetch = [], jacstore.rows.device_pass.DevicePass.fetch

    def counting(self, first, values, count):
        fetched.append((first, count))
        return fetch(self, first, values, count)

    monkeypatch.setattr(jacstore.rows.device_pass.DevicePass, "fetch", counting)
    # No pass is too short to be timed.
    limits(long_run_seconds=1e-9)
    store = build(mlp(10), tmp_path / "run.jac", unit_size=5, batch_size=2, output_batch=2, part=part)
    expected = [(first, count) for count in (2, 2, 1) for first in (0, 2)] * (2 if part == "1/1" else 1)
    assert fetched == [(0, 2)] * again + expected
    build(mlp(10), tmp_path / "run.jac")
    assert row_error(rows_of(store), truth) <= FLOAT32


def test_case_34_a_plan_made_with_other_memory_is_kept(finished, tmp_path, truth, tiny_pieces):
    seen = Stopping(SlabDone, 2)
    with pytest.raises(RunInterruptedError):
        gram(finished, out=tmp_path / "run.ntk", memory="120kB", listener=seen, stop=seen.stop)
    before = jacstore.open(tmp_path / "run.ntk").plan
    kernel = gram(finished, out=tmp_path / "run.ntk", memory="8GB")
    assert kernel.plan == before and kernel_error(values(kernel), dense_kernel(truth)) <= FLOAT32


@pytest.mark.parametrize("layout", ["dense", "factored"])
@pytest.mark.parametrize("mode", ["full", "trace"])
def test_products_beyond_float32_are_refused_and_computed_in_float64(layout, mode, tmp_path):
    def far(factor):
        return mlp(6, apply=lambda p, x: x @ p["layer0"]["w"] * np.float32(factor), select="layer0/w")

    build(far(1e25), tmp_path / "run.jac", codec="none", layout=layout)
    for options in ({}, {"precision": "float64", "dtype": "float32"}):
        text = refusal(gram, tmp_path / "run.jac", out=tmp_path / "run.ntk", mode=mode, **options)
        assert "float32 ends at 3.4e+38" in text and "--precision float64" in text
    assert not (tmp_path / "run.ntk" / "zarr.json").exists()
    large = gram(tmp_path / "run.jac", out=tmp_path / "run.ntk", mode=mode, precision="float64")
    plain = ntk(far(1.0).apply, far(1.0).params, far(1.0).inputs, mode=mode, select="layer0/w", dtype="float64")
    assert kernel_error(values(large) / 1e50, plain) <= FLOAT32


# --- 35: many outputs -------------------------------------------------------------------------------------------------


def test_case_35_many_outputs_are_taken_in_slices_that_fit(tmp_path):
    problem = mlp(3, sizes=(5, 4, 200))
    truth = dense_rows(problem)
    planned = jacstore.rows.build.plan_build(problem, None, memory="4MB", layout="dense")
    assert planned.outputs == 200 and planned.output_batch < 200
    store = build(problem, tmp_path / "run.jac", memory="4MB", codec="none", layout="dense")
    assert row_error(rows_of(store), truth) <= FLOAT32
    np.testing.assert_allclose(
        store.outputs, dense_outputs(problem), rtol=0, atol=FLOAT32 * np.abs(store.outputs).max()
    )
    sliced = build(problem, tmp_path / "sliced.jac", output_batch=7, codec="none")
    assert row_error(rows_of(sliced), truth) <= FLOAT32
    np.testing.assert_allclose(sliced.norms, store.norms, rtol=FLOAT32)


# --- 37: a lock of another host ---------------------------------------------------------------------------------------


def foreign_lock(store_path, beat=0):
    path = store_path / "ledger/lock-0000000-0000004.json"
    owner = {
        "host": "elsewhere",
        "boot": "b",
        "pid": 1,
        "start": "1",
        "token": "t",
        "beat": beat,
        "first": 0,
        "last": 4,
    }
    path.write_text(json.dumps(owner))
    return path


def test_case_37_a_lock_of_another_host_is_waited_for(store_path, limits):
    limits(lock_stale_seconds=0.05)
    (store_path / "ledger/unit-0000001.json").unlink()
    path, seen = foreign_lock(store_path), Counting()
    store = build(mlp(10), store_path, codec="none", listener=seen)
    assert len(seen.of(Waiting)) == 1 and "host elsewhere" in seen.of(Waiting)[0].reason
    assert store.complete and store.report["units_computed"] == 1 and not path.exists()


def test_case_37_a_lock_whose_heart_beats_is_respected(store_path, limits):
    limits(lock_stale_seconds=30)
    foreign_lock(store_path)

    def beat(event):
        if isinstance(event, Waiting):
            foreign_lock(store_path, beat=1)

    text = refusal(build, mlp(10), store_path, codec="none", listener=beat, error=LockedError)
    assert "host elsewhere" in text and "stop it there" in text


def test_case_37_a_lock_that_goes_away_is_not_waited_for(store_path, limits):
    limits(lock_stale_seconds=3600)
    path = foreign_lock(store_path)

    def release(event):
        if isinstance(event, Waiting):
            path.unlink()

    assert build(mlp(10), store_path, codec="none", listener=release).complete


def test_case_37_another_parts_lock_is_nobodys_business(store_path, limits):
    limits(lock_stale_seconds=3600)
    owner = json.loads(foreign_lock(store_path).read_text())
    (store_path / "ledger/lock-0000000-0000004.json").rename(store_path / "ledger/lock-0000000-0000001.json")
    assert owner["host"] == "elsewhere" and build(mlp(10), store_path, codec="none", part="2/2").complete


def test_case_37_a_signal_ends_the_waiting(store_path, limits):
    limits(lock_stale_seconds=1.0)
    foreign_lock(store_path)
    seen = Stopping(Waiting)
    with pytest.raises(RunInterruptedError):
        build(mlp(10), store_path, codec="none", listener=seen, stop=seen.stop)


# --- 38: rows from outside --------------------------------------------------------------------------------------------

LEAVES = {"a": (2, 3), "b": (4,)}


def outside(n=4, k=2, seed=0):
    draw = np.random.default_rng(seed)
    return {"a": draw.normal(size=(n, k, 2, 3)), "b": draw.normal(size=(n, k, 4))}


def part_of(rows, a, b):
    return {name: array[a:b] for name, array in rows.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_case_38_rows_from_outside_are_kept_and_multiplied(dtype, tmp_path):
    rows = outside()
    truth = np.concatenate([array.reshape(4, 2, -1) for array in rows.values()], -1)
    with StoreWriter(tmp_path / "run.jac", LEAVES, 4, 2, dtype=dtype, unit_size=3) as writer:
        assert writer.missing == [(0, 3), (3, 4)]
        for a, b in writer.missing:
            writer.write_unit(a, part_of(rows, a, b))
        assert writer.missing == []
    store = jacstore.open(tmp_path / "run.jac")
    rounding = {"float64": 2**-53, "float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    assert store.complete and row_error(rows_of(store), truth) <= rounding
    np.testing.assert_allclose(store.norms.sum(-1), np.square(truth).sum(-1), rtol=FLOAT64)
    assert kernel_error(values(gram(store)), dense_kernel(truth)) <= max(4 * rounding, FLOAT32)


def test_case_38_a_missing_unit_can_be_added_later(tmp_path):
    rows = outside()
    with StoreWriter(tmp_path / "run.jac", LEAVES, 4, 2, unit_size=1) as writer:
        writer.write_unit(2, part_of(rows, 2, 3))
    assert "3 of 4 units missing" in refusal(gram, writer.store, error=IncompleteError)
    with StoreWriter(tmp_path / "run.jac", LEAVES, 4, 2) as writer:
        assert writer.missing == [(0, 1), (1, 2), (3, 4)]
        for a, b in writer.missing:
            writer.write_unit(a, part_of(rows, a, b))
    assert writer.store.complete


@pytest.mark.parametrize(
    ("start", "changes", "named"),
    [
        (0, {}, "examples 0 to 1 are stored already"),
        (1, {}, "start 1: no unit of this writer begins there"),
        (-2, {}, "start -2"),
        (4, {}, "start 4"),
        (2, {"a": np.zeros((2, 2, 3, 2))}, "leaf 'a': rows of shape (2, 2, 3, 2), allowed is (2, 2, 2, 3)"),
        (2, {"a": np.zeros((1, 2, 2, 3))}, "allowed is (2, 2, 2, 3)"),
        (2, {"b": None}, "leaf 'b': no rows given"),
        (2, {"c": np.zeros(2)}, "leaf 'c': not a leaf of this store"),
        (2, {"b": np.full((2, 2, 4), np.nan)}, "example(s) 2, 3 hold NaN"),
        (2, {"b": np.full((2, 2, 4), -np.inf)}, "example(s) 2, 3 hold NaN"),
    ],
)
def test_case_38_a_unit_that_does_not_fit_is_refused(start, changes, named, tmp_path):
    given = {name: array for name, array in (part_of(outside(), 2, 4) | changes).items() if array is not None}
    with StoreWriter(tmp_path / "run.jac", LEAVES, 4, 2, unit_size=2) as writer:
        writer.write_unit(0, part_of(outside(), 0, 2))
        before = contents(tmp_path / "run.jac", "rows")
        assert named in refusal(writer.write_unit, start, given)
        assert contents(tmp_path / "run.jac", "rows") == before and writer.missing == [(2, 4)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float16"}, "dtype: float32 -> float16"),
        ({"unit_size": 1}, "unit_size: 2 -> 1"),
        ({"requested": {"checkpoint": "epoch 4"}}, "checkpoint: epoch 3 -> epoch 4"),
        ({"leaves": {"a": (3, 2), "b": (4,)}}, "leaves: "),
        ({"n_examples": 5}, "n_examples: 4 -> 5"),
    ],
)
def test_case_38_a_writer_of_something_else_is_refused(changes, named, tmp_path):
    first = {"leaves": LEAVES, "n_examples": 4, "n_outputs": 2, "unit_size": 2, "requested": {"checkpoint": "epoch 3"}}
    StoreWriter(tmp_path / "run.jac", **first)
    assert named in refusal(StoreWriter, tmp_path / "run.jac", **(first | changes), error=RequestMismatchError)
    assert "dtype" in refusal(StoreWriter, tmp_path / "other.jac", **first, dtype="int8")
    assert "codec" in refusal(StoreWriter, tmp_path / "other.jac", **first, codec="auto")
    assert "same path" in refusal(StoreWriter, tmp_path / "other.jac", [("a", (1,)), ("a", (2,))], 4, 2)


def test_case_38_a_writer_that_dies_in_a_unit_leaves_it_missing(tmp_path, monkeypatch):
    def stop(step, name):
        if step == "rename":
            raise KeyboardInterrupt

    monkeypatch.setattr(jacstore.storage.files, "before_step", stop)
    with pytest.raises(KeyboardInterrupt), StoreWriter(tmp_path / "run.jac", LEAVES, 4, 2, unit_size=2) as writer:
        writer.write_unit(0, part_of(outside(), 0, 2))
    monkeypatch.undo()
    assert writer.store.ledger.done("unit") == []
    with StoreWriter(tmp_path / "run.jac", LEAVES, 4, 2) as writer:
        assert writer.missing == [(0, 2), (2, 4)]
        writer.write_unit(0, part_of(outside(), 0, 2))
    # The dead attempt's temporary record is swept.
    assert not [name for name in os.listdir(tmp_path / "run.jac/ledger") if name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("dtype", "value", "norms"),
    [("float32", 1e100, None), ("bfloat16", 3.4e38, None), ("float32", np.nan, np.zeros((2, 2, 2)))],
)
def test_case_38_no_row_becomes_infinite_unseen(dtype, value, norms, tmp_path):
    rows = part_of(outside(), 0, 2) | {"b": np.full((2, 2, 4), value)}
    with StoreWriter(tmp_path / "run.jac", LEAVES, 4, 2, dtype=dtype, unit_size=2) as writer:
        refusal(writer.write_unit, 0, rows, norms=norms, error=NonFiniteError)


@pytest.mark.parametrize(
    "changes",
    [
        {"outputs": np.zeros((2, 3))},
        {"b": np.ones((2, 2, 4), complex)},
        {"b": np.ones((2, 2, 4), np.uint16)},
        {"b": np.full((2, 2, 4), "text")},
    ],
    ids=["outputs of another shape", "complex", "bfloat16 bits for float32", "text"],
)
def test_case_38_a_wrong_array_is_refused(changes, tmp_path):
    given = part_of(outside(), 0, 2) | {k: v for k, v in changes.items() if k != "outputs"}
    with StoreWriter(tmp_path / "run.jac", LEAVES, 4, 2, unit_size=2) as writer:
        refusal(writer.write_unit, 0, given, outputs=changes.get("outputs"))


def test_case_38_a_unit_is_written_under_the_lock_only(tmp_path):
    writer = StoreWriter(tmp_path / "run.jac", LEAVES, 4, 2, unit_size=2)
    assert "with StoreWriter" in refusal(writer.write_unit, 0, part_of(outside(), 0, 2))
