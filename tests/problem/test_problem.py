"""Claims about `Problem`, `prepare` and `load_target`: what is read, refused, probed and fingerprinted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import NamedTuple

import dask.array as da
import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

import jacstore
from helpers_errors import refusal
from jacstore.errors import InvalidFunctionError, InvalidRequestError, SelectedStateWarning
from jacstore.problem.loading import load_target
from jacstore.problem.problem import Problem, precision_context, prepare
from jacstore.problem.program import program_text
from support import Table

pytestmark = pytest.mark.filterwarnings("error")

N, D, K = 5, 3, 2
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(D, K)).astype(np.float32)


def linear(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def params():
    return {"w": W, "b": np.zeros(K, np.float32)}


def linear_problem(**changes):
    return Problem(**{"apply": linear, "params": params(), "inputs": X, **changes})


def requested(**changes):
    return prepare(linear_problem(**changes)).requested


class Items:
    """A map-style dataset."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


# --- Problem ----------------------------------------------------------------------------------------------------------


def test_a_problem_is_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        linear_problem().batched = True
    with pytest.raises(TypeError):
        Problem(linear, params(), X)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"apply": 3}, "apply is a int"),
        ({"batched": 1}, "batched is 1"),
        ({"outputs": "mean"}, "'mean'"),
        ({"outputs": 0}, "outputs is 0"),
        ({"outputs": [0.5]}, "0.5"),
        ({"outputs": [True, False]}, "mask"),
        ({"outputs": []}, "outputs is []"),
        ({"outputs": [-1]}, "outputs is [-1]"),
        ({"outputs": [0, 1, 0]}, "outputs names 0 twice"),
        ({"select": "("}, "regular expression"),
        ({"select": 3}, "select is a int"),
        ({"inputs": None}, "inputs holds no array"),
        ({"inputs": {"x": X, "scale": 2.0}}, "'scale'"),
        ({"inputs": np.float32(2)}, "first axis"),
        ({"inputs": {"x": X, "y": X[:4]}}, "'x': 5, 'y': 4"),
        ({"inputs": da.from_array(X)[da.from_array(X[:, 0]) > 0]}, "compute_chunk_sizes"),
    ],
)
def test_a_field_that_cannot_be_is_refused_at_once(changes, named):
    text = refusal(linear_problem, **changes)
    assert named in text
    assert "change" in text or "compute_chunk_sizes" in text


def array_sources(folder):
    mapped = np.memmap(folder / "x.bin", np.float32, "w+", shape=X.shape)
    mapped[:] = X
    file = h5py.File(folder / "x.h5", "w")
    store = zarr.create_array(folder / "x.zarr", shape=X.shape, chunks=(2, D), dtype="float32")
    store[:] = X
    return {
        "numpy": X,
        "big_endian": X.astype(">f4"),
        "memmap": mapped,
        "jax": jnp.asarray(X),
        "dask": da.from_array(X, chunks=(2, 2)),
        "h5py": file.create_dataset("x", data=X),
        "zarr": store,
        "dataset": Items(list(X)),
    }


@pytest.mark.parametrize("kind", ["numpy", "big_endian", "memmap", "jax", "dask", "h5py", "zarr", "dataset"])
def test_examples_read_the_same_from_every_kind_of_array(kind, tmp_path):
    problem = linear_problem(inputs=array_sources(tmp_path)[kind])
    assert problem.n_examples == N
    for start, stop in [(0, N), (1, 4), (2, 2)]:
        read = problem.read(start, stop)
        assert isinstance(read, np.ndarray) and read.dtype == np.float32
        np.testing.assert_array_equal(read, X[start:stop])
    assert prepare(problem).n_outputs == K


def test_inputs_keep_their_structure():
    read = linear_problem(inputs={"x": X, "pair": (np.arange(N), da.from_array(X))}).read(1, 3)
    assert list(read) == ["pair", "x"]
    np.testing.assert_array_equal(read["pair"][0], [1, 2])
    np.testing.assert_array_equal(read["pair"][1], X[1:3])


def test_a_dataset_of_pytrees_is_stacked_leaf_by_leaf():
    problem = linear_problem(inputs=Items([{"x": x, "y": float(i)} for i, x in enumerate(X)]))
    read = problem.read(1, 4)
    np.testing.assert_array_equal(read["x"], X[1:4])
    np.testing.assert_array_equal(read["y"], [1.0, 2.0, 3.0])
    assert read["y"].dtype == np.float64


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([X[0], X[1], X[2][:2]], "inputs[2] leaf '.' is float32[2], in inputs[0] it is float32[3]"),
        ([X[0], X[1].astype(int)], "inputs[1]"),
        ([{"x": X[0]}, {"y": X[0]}], "inputs[1] has the structure"),
        (["a"], "str"),
    ],
)
def test_a_ragged_dataset_is_refused_and_names_the_item(items, named):
    assert named in refusal(linear_problem(inputs=Items(items)).read, 0, len(items))


def test_an_exception_in_a_dataset_is_one_line_with_its_place():
    class Broken(Items):
        def __getitem__(self, i):
            raise OSError("no such\nimage")

    text = refusal(linear_problem(inputs=Broken([1, 2])).read, 1, 2)
    assert "inputs[0] raised OSError: no such image" in text
    assert "test_problem.py:" in text


def test_text_and_ranges_outside_are_refused():
    assert "type" in refusal(linear_problem(inputs=np.array(["a", "b"])).read, 0, 2)
    assert "there are 5" in refusal(linear_problem().read, 3, 6)


# --- prepare: leaves --------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    weight: object
    depth: object


def test_paths_join_encoded_keys_in_tree_order():
    tree = {"b": [W, Layer(W, 3)], "a/c%": W}

    def apply(tree, x):
        return x @ tree["b"][0] * tree["b"][1].depth + x @ tree["b"][1].weight + x @ tree["a/c%"]

    prepared = prepare(Problem(apply=apply, params=tree, inputs=X))
    assert [leaf.path for leaf in prepared.leaves] == ["a%2Fc%25", "b/0", "b/1/weight"]
    assert prepared.leaves[0].shape == (D, K) and prepared.leaves[0].dtype == "float32"
    assert prepared.left_out == (("b/1/depth", "not floating point (int)"),)


def test_a_bare_array_has_the_path_dot():
    prepared = prepare(Problem(apply=lambda w, x: x @ w, params=W, inputs=X))
    assert [leaf.path for leaf in prepared.leaves] == ["."]


def test_leaves_that_are_not_floating_are_constants():
    tree = {
        "w": jnp.asarray(W, jnp.bfloat16),
        "scale": 0.5,
        "half": np.ones(K, np.float16),
        "steps": np.array([1, 2]),
        "mask": np.array([True, False]),
        "depth": 2,
        "bias": True,
        "name": "net",
        "nothing": None,
        "act": jnp.tanh,
        "key": jax.random.key(0),
    }

    def apply(tree, x):
        y = tree["act"](x @ tree["w"]) * tree["scale"] + tree["steps"] * tree["mask"] + tree["half"]
        assert tree["name"] == "net" and tree["nothing"] is None
        for _ in range(tree["depth"] if tree["bias"] else 0):
            y = y + jax.random.normal(tree["key"], (K,))
        return y

    prepared = prepare(Problem(apply=apply, params=tree, inputs=X))
    assert [(leaf.path, leaf.dtype) for leaf in prepared.leaves] == [
        ("half", "float16"),
        ("scale", "float32"),
        ("w", "bfloat16"),
    ]
    assert dict(prepared.left_out) == {
        "act": f"not floating point ({type(jnp.tanh).__name__})",
        "bias": "not floating point (bool)",
        "depth": "not floating point (int)",
        "key": "not floating point (key<fry>)",
        "mask": "not floating point (bool)",
        "name": "not floating point (str)",
        "steps": "not floating point (int64)",
    }
    assert len(prepared.rest) == 3
    value = jax.jit(prepared.function)(prepared.selected, prepared.rest, X[0])
    truth = jax.jit(lambda arrays, x: apply({**tree, **arrays}, x))({k: tree[k] for k in ("w", "half", "scale")}, X[0])
    np.testing.assert_allclose(value, truth, rtol=1e-5)


def test_select_takes_a_regular_expression_or_a_predicate():
    for select in ("^w$", lambda path: path == "w"):
        prepared = prepare(linear_problem(select=select))
        assert [leaf.path for leaf in prepared.leaves] == ["w"]
        assert prepared.left_out == (("b", "not selected"),)
        assert prepared.requested["selection"] == ["w"]
        assert len(prepared.rest) == 1
        value = jax.jit(prepared.function)(prepared.selected, prepared.rest, X[0])
        np.testing.assert_allclose(value, np.tanh(X[0] @ W), rtol=1e-6)


def test_params_of_float64_become_float32_without_a_warning_unless_asked_for():
    wide = {"w": W.astype(np.float64), "b": np.zeros(K)}
    prepared = prepare(linear_problem(params=wide, inputs=X.astype(np.float64)))
    assert {leaf.dtype for leaf in prepared.leaves} == {"float32"}
    assert prepared.read(0, 2).dtype == np.float32
    assert prepared.requested["inputs"] == [[".", [D], "float64"]]


def test_float64_computes_in_float64():
    prepared = prepare(
        linear_problem(inputs={"x": X, "i": np.arange(N)}, apply=lambda p, e: linear(p, e["x"])), float64=True
    )
    assert {leaf.dtype for leaf in prepared.leaves} == {"float64"}
    example = jax.tree_util.tree_map(lambda leaf: leaf[0], prepared.read(0, 1))
    assert example["x"].dtype == np.float64 and example["i"].dtype == np.int64
    with precision_context(True):
        value = jax.jit(prepared.function)(prepared.selected, prepared.rest, example)
    truth = np.tanh(X[0].astype(np.float64) @ W.astype(np.float64))
    assert value.dtype == np.float64
    assert np.linalg.norm(np.asarray(value) - truth) <= 1e-14 * np.linalg.norm(truth)
    assert not jax.config.jax_enable_x64


def test_params_are_copied_so_that_later_changes_do_not_reach_the_result():
    tree = params()
    prepared = prepare(linear_problem(params=tree))
    tree["w"][:] = 0
    try:
        assert np.asarray(prepared.selected[1]).any()
    finally:
        tree["w"][:] = np.random.default_rng(1).normal(size=(D, K))


def test_products_are_computed_in_the_highest_precision():
    with precision_context(False):
        assert "HIGHEST" in str(jax.make_jaxpr(jnp.dot)(X, W))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"inputs": X[:0]}, "0 examples"),
        ({"inputs": Items([])}, "0 examples"),
        ({"select": "kernel"}, "there are 'b', 'w'"),
        ({"select": lambda path: False}, "the predicate matches no"),
        ({"params": {"w": W.astype(int)}}, "no floating-point leaf ('w': int64)"),
        ({"params": {}}, "no leaf at all"),
        ({"params": {"w": W, "b": W[:0]}, "select": "b"}, "P = 0"),
        ({"params": {"w": W, "b": np.ones(K, np.complex64)}}, "'b' is complex64"),
        ({"outputs": [0, 2]}, "index 2; apply has 2 outputs"),
        ({"apply": lambda p, x: {}}, "K = 0"),
        ({"apply": lambda p, x: p["w"][:0]}, "K = 0"),
        ({"apply": lambda p, x: {"y": p["w"], "label": jnp.argmax(x)}}, "'label' of type int32"),
        ({"apply": lambda p, x: "text"}, "of type str"),
        ({"apply": lambda p, x: p["w"][0] + 1j}, "complex64"),
        ({"apply": lambda p, x: None}, "K = 0"),
    ],
)
def test_nothing_to_compute_is_refused_with_the_reason(changes, named):
    assert named in refusal(prepare, linear_problem(**changes))


def test_at_most_five_paths_are_shown():
    text = refusal(prepare, linear_problem(params={f"w{i}": W for i in range(9)}, select="kernel"))
    assert "'w4', …" in text and "w5" not in text


def test_two_leaves_with_one_path_are_refused():
    @jax.tree_util.register_pytree_with_keys_class
    class Twice:
        def __init__(self, a, b):
            self.a, self.b = a, b

        def tree_flatten_with_keys(self):
            key = jax.tree_util.GetAttrKey("w")
            return ((key, self.a), (key, self.b)), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    assert "two leaves with path 'w'" in refusal(prepare, linear_problem(params=Twice(W, W)))


def test_an_exception_in_apply_is_one_line_with_type_message_and_place():
    def apply(params, x):
        return x @ params["w"].T @ x

    line = apply.__code__.co_firstlineno + 1
    text = refusal(prepare, linear_problem(apply=apply))
    assert "apply raised TypeError: " in text
    assert f"test_problem.py:{line}" in text
    assert "batched=True" in text


def test_a_function_without_a_derivative_is_refused():
    def apply(params, x):
        like = jax.ShapeDtypeStruct((K,), np.float32)
        return jax.pure_callback(lambda w: np.asarray(w)[0], like, params["w"])

    assert "cannot be differentiated" in refusal(prepare, linear_problem(apply=apply))


def test_a_left_out_backbone_needs_no_derivative():
    def apply(params, x):
        features = jax.pure_callback(lambda w: np.asarray(w)[0], jax.ShapeDtypeStruct((K,), np.float32), params["w"])
        return features * params["b"]

    assert prepare(linear_problem(apply=apply, select="b")).n_outputs == K


# --- prepare: outputs -------------------------------------------------------------------------------------------------


def tree_outputs(params, x):
    y = linear(params, x)
    return {"b": y, "a": jnp.stack([y, 2 * y]).astype(jnp.bfloat16), "c": y[0]}


@pytest.mark.parametrize(
    ("outputs", "take"),
    [
        ("all", lambda flat: flat),
        ("sum", lambda flat: flat.sum(keepdims=True)),
        ([6, 0], lambda flat: flat[np.array([6, 0])]),
        (np.arange(3), lambda flat: flat[:3]),
    ],
)
def test_outputs_are_flattened_in_tree_order_and_chosen(outputs, take):
    prepared = prepare(linear_problem(apply=tree_outputs, outputs=outputs))
    y = np.tanh(X[1] @ W)
    rounded = np.stack([y, 2 * y]).astype(jnp.bfloat16).astype(np.float32)
    truth = take(np.concatenate([rounded.ravel(), y, y[:1]]))
    value = jax.jit(prepared.function)(prepared.selected, prepared.rest, X[1])
    assert value.shape == (prepared.n_outputs,) and value.dtype == np.float32
    # A value at the border between two bfloat16 may be rounded either way.
    assert np.linalg.norm(value - truth) <= 2**-8 * np.linalg.norm(truth)
    jacobian = jax.eval_shape(jax.jacrev(prepared.function), prepared.selected, prepared.rest, X[1])
    assert jacobian[1].shape == (prepared.n_outputs, D, K)
    assert prepared.requested["outputs"] == (outputs if isinstance(outputs, str) else [int(k) for k in outputs])


# --- probes -----------------------------------------------------------------------------------------------------------


def batch_linear(params, batch):
    assert batch.ndim == 2
    return jnp.tanh(batch @ params["w"] + params["b"])


def batch_norm(params, batch):
    y = batch @ params["w"]
    return (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5) + params["b"]


def test_a_batched_function_is_called_with_one_example():
    prepared = prepare(linear_problem(apply=batch_linear, batched=True))
    value = jax.jit(prepared.function)(prepared.selected, prepared.rest, X[2])
    np.testing.assert_allclose(value, np.tanh(X[2] @ W), rtol=1e-6)


def test_batch_norm_in_training_mode_is_refused():
    assert "BatchNorm" in refusal(prepare, linear_problem(apply=batch_norm, batched=True), error=InvalidFunctionError)
    identical = np.repeat(X[:1], N, axis=0)
    problem = linear_problem(apply=batch_norm, batched=True, inputs=identical)
    assert "other examples" in refusal(prepare, problem, error=InvalidFunctionError)


def test_tokens_coupled_over_the_batch_are_refused():
    tokens = np.zeros((N, 4), np.int32)

    def apply(params, batch):
        return params["w"][batch].mean((0, 1))[None].repeat(len(batch), 0)

    assert "other examples" in refusal(
        prepare, linear_problem(apply=apply, batched=True, inputs=tokens), error=InvalidFunctionError
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_, np.float16, jnp.bfloat16])
def test_a_scalar_of_any_type_can_be_an_example(dtype):
    def apply(params, batch):
        return params["b"] + batch[:, None].astype(np.float32)

    inputs = np.zeros(N, dtype) if np.dtype(dtype).kind in "bui" else np.full(N, 6e4, dtype)
    assert prepare(linear_problem(apply=apply, batched=True, inputs=inputs)).n_outputs == K


def test_a_value_too_large_for_float32_is_left_to_the_build():
    inputs = X.astype(np.float64)
    inputs[0, 0] = 1e300
    assert np.isinf(prepare(linear_problem(inputs=inputs)).read(0, 1)[0, 0])


def test_a_batched_function_has_to_keep_the_batch_axis():
    text = refusal(prepare, linear_problem(apply=lambda p, x: (x @ p["w"])[0], batched=True))
    assert "shape (2,) for a batch of 1" in text


@pytest.mark.parametrize("jitted", [False, True])
def test_noise_is_refused_even_inside_a_jit_of_the_user(jitted):
    noise = np.random.default_rng(3)

    def apply(params, x):
        return linear(params, x) * (noise.random(K) > 0.5) + noise.random(K)

    problem = linear_problem(apply=jax.jit(apply) if jitted else apply)
    assert "change from call to call" in refusal(prepare, problem, error=InvalidFunctionError)


@pytest.mark.parametrize("drawn", ["when traced", "when called"])
def test_noise_behind_a_callback_is_refused(drawn):
    noise = np.random.default_rng(3)

    def apply(params, x):
        fixed = noise.random(K, np.float32) if drawn == "when traced" else None
        like = jax.ShapeDtypeStruct((K,), np.float32)
        return linear(params, x) + jax.pure_callback(
            lambda: noise.random(K, np.float32) if fixed is None else fixed, like
        )

    assert "change from call to call" in refusal(prepare, linear_problem(apply=apply), error=InvalidFunctionError)


def test_a_function_is_compiled_once_unless_its_two_traces_differ():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    try:
        prepare(linear_problem())
        assert len(compiled) == 1
        noise = np.random.default_rng(3)
        refusal(prepare, linear_problem(apply=lambda p, x: linear(p, x) + noise.random()), error=InvalidFunctionError)
        assert len(compiled) == 3
    finally:
        jax.monitoring.clear_event_listeners()


def test_outputs_that_are_not_finite_are_refused():
    text = refusal(prepare, linear_problem(apply=lambda p, x: linear(p, x) / 0), error=InvalidFunctionError)
    assert "example 0" in text and "finite" in text
    broken = {"w": W * np.nan, "b": np.zeros(K, np.float32)}
    assert "params leaf 'w'" in refusal(prepare, linear_problem(params=broken), error=InvalidFunctionError)


@pytest.mark.parametrize("batched", [False, True])
def test_a_non_finite_example_0_is_left_to_the_build(batched):
    inputs = X.copy()
    inputs[0, 1] = np.nan
    assert prepare(linear_problem(inputs=inputs, apply=batch_linear if batched else linear, batched=batched))
    if batched:
        refusal(prepare, linear_problem(inputs=inputs, apply=batch_norm, batched=True), error=InvalidFunctionError)


def test_a_table_of_named_columns_is_a_dataset():
    problem = linear_problem(inputs=Table(X), apply=lambda p, x: linear(p, x["pixels"]))
    assert problem.n_examples == N
    assert np.array_equal(problem.read(1, 4)["pixels"], X[1:4])
    assert jacstore.build(problem, None).report["complete"]


def test_running_statistics_among_the_parameters_are_warned_of_with_the_pattern_that_leaves_them_out():
    variables = {"params": params(), "batch_stats": {"norm": {"mean": np.ones(K, np.float32)}}}

    def apply(v, x):
        return linear(v["params"], x) - v["batch_stats"]["norm"]["mean"]

    with pytest.warns(SelectedStateWarning, match="batch_stats/norm/mean") as seen:
        store = jacstore.build(linear_problem(apply=apply, params=variables), None)
    assert len(store.leaves) == 3
    (said,) = [str(warning.message) for warning in seen]
    pattern = said.split("select=r'")[1].removesuffix("'")
    kept = jacstore.build(linear_problem(apply=apply, params=variables, select=pattern), None)
    assert [leaf.path for leaf in kept.leaves] == ["params/b", "params/w"]


class Chunked:
    """An array in chunks of which every one touched is decoded whole, as in Zarr; counts what is decoded at once."""

    def __init__(self, values, length):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.chunks, self.most, self.decoded = (length, *values.shape[1:]), 0, 0

    def __getitem__(self, at):
        touched = -(-at.stop // self.chunks[0]) - at.start // self.chunks[0]
        self.most, self.decoded = max(self.most, touched), self.decoded + touched
        return self.values[at]


def test_chunks_of_inputs_are_decoded_one_after_the_other():
    held = Chunked(np.random.default_rng(0).normal(size=(20, D)).astype(np.float32), 3)
    problem = linear_problem(inputs=held)
    assert np.array_equal(problem.read(1, 20), held.values[1:20]) and held.most == 1
    assert problem.bytes_held() == (4 * D, 3 * 3 * 4 * D)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 6, 25])
def test_each_chunk_of_inputs_is_decoded_once_while_examples_are_read_in_order(batch_size):
    held = Chunked(np.random.default_rng(0).normal(size=(25, D)).astype(np.float32), 6)
    problem = linear_problem(inputs=held)
    read = [problem.read(a, min(a + batch_size, 25)) for a in range(0, 25, batch_size)]
    assert np.array_equal(np.concatenate(read), held.values)
    assert (held.decoded, held.most) == (5, 1)
    assert np.array_equal(problem.read(2, 3), held.values[2:3]) and np.array_equal(problem.read(0, 25), held.values)


def test_a_chunk_that_gives_other_examples_than_asked_for_is_refused():
    held = Chunked(np.zeros((25, D), np.float32), 6)
    held.values = held.values[:22]
    problem = linear_problem(inputs=held)
    assert "the first axis has to be 2" in refusal(problem.read, 22, 24)


def test_chunks_of_inputs_that_do_not_fit_are_refused():
    held = Chunked(np.zeros((4, 100), np.float32), 1_000_000)
    problem = linear_problem(inputs=held, apply=lambda p, x: linear(p, x[:D]))
    assert "smaller chunks" in refusal(jacstore.build, problem, None, memory="100MB")
    assert jacstore.build(problem, None, memory="2GB").report["complete"]


def reads_of(monkeypatch):
    """The numbers of examples of each read that follows."""
    seen, read = [], Problem.read

    def counted(problem, start, stop):
        seen.append(stop - start)
        return read(problem, start, stop)

    monkeypatch.setattr(Problem, "read", counted)
    return seen


def large_examples(length):
    """Forty examples of 64 kB, in chunks."""
    held = Chunked(np.random.default_rng(0).normal(0, 0.1, (40, 16_000)).astype(np.float32), length)
    return linear_problem(inputs=held, apply=lambda p, x: linear(p, x[:D]))


@pytest.mark.parametrize("doing", ["build", "verify"])
def test_inputs_of_finished_units_are_compared_as_many_at_once_as_fit(doing, monkeypatch, tmp_path):
    problem, memory = large_examples(5), 4_000_000
    options = {"codec": "none", "unit_size": 40}
    jacstore.build(problem, tmp_path / "run.jac", memory="1GB", **options)

    def compare(memory):
        if doing == "build":
            again = jacstore.build(problem, tmp_path / "run.jac", memory=memory, **options)
            return again.report["units_computed"] == 0
        return jacstore.verify(tmp_path / "run.jac", problem, memory=memory).ok

    seen, (each, beside) = reads_of(monkeypatch), problem.bytes_held()
    assert compare("1GB") and max(seen) == 40
    seen.clear()
    assert compare(memory) and max(seen) > 1 and beside + 2 * max(seen) * each <= memory
    monkeypatch.setattr(Problem, "bytes_held", lambda problem: (each, memory))
    assert "smaller chunks" in refusal(compare, memory)


# --- fingerprint ------------------------------------------------------------------------------------------------------


def test_requested_is_json_and_repeats():
    first = requested(outputs=(1, 0))
    assert json.loads(json.dumps(first)) == first == requested(outputs=(1, 0))
    assert set(first) == {"parameters", "function", "constants", "outputs", "selection", "inputs", "examples"}
    assert first["examples"] == N and first["inputs"] == [[".", [D], "float32"]]


def changed(a, b):
    return {name for name in a if a[name] != b[name]}


def test_each_change_is_seen_in_its_own_field():
    base = requested()
    assert changed(base, requested(params={"w": W + 1, "b": np.zeros(K, np.float32)})) == {"parameters"}
    assert changed(base, requested(apply=lambda p, x: jnp.sin(x @ p["w"] + p["b"]))) == {"function"}
    assert changed(base, requested(outputs="sum")) == {"outputs"}
    assert changed(base, requested(select="w")) == {"selection"}
    assert changed(base, requested(inputs=X[:3])) == {"examples"}
    assert "inputs" in changed(base, requested(inputs=X.astype(np.float64)))


def test_parameters_that_are_left_out_count():
    a = {"w": W, "steps": np.arange(2), "name": "a"}
    apply = {"apply": lambda p, x: x @ p["w"] + p["steps"]}
    base = requested(params=a, **apply)
    assert changed(base, requested(params={**a, "steps": np.arange(2) + 1}, **apply)) == {"parameters"}
    assert changed(base, requested(params={**a, "name": "b"}, **apply)) == {"parameters"}


def closing_over(c, how):
    @jax.custom_vjp
    def rule(y):
        return y

    rule.defvjp(lambda y: (y, None), lambda _, ct: (ct * c,))
    inner = {
        "directly": lambda y: y + c,
        "in a jit": jax.jit(lambda y: y + c),
        "in a jit in a scan": lambda y: jax.lax.scan(lambda s, _: (jax.jit(lambda z: z * c)(s), None), y, length=2)[0],
        "in a custom vjp": rule,
        "in a jitted custom vjp": jax.jit(rule),
        "in a checkpoint": jax.checkpoint(lambda y: jnp.sin(y * c)),
    }[how]
    return lambda params, x: inner(linear(params, x))


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    "how",
    ["directly", "in a jit", "in a jit in a scan", "in a custom vjp", "in a jitted custom vjp", "in a checkpoint"],
)
def test_closed_over_arrays_count_by_value(how, make):
    values = np.array([1.5, 2.5], np.float32)
    base = requested(apply=closing_over(make(values), how))
    assert base == requested(apply=closing_over(make(values.copy()), how))
    assert changed(base, requested(apply=closing_over(make(values + 1), how))) == {"constants"}


def test_a_closed_over_array_changed_in_place_is_seen():
    c = np.ones(K, np.float32)
    apply = jax.jit(lambda p, x: linear(p, x) + c)
    base = requested(apply=apply)
    c += 1
    assert changed(base, requested(apply=apply)) == {"constants"}


def test_parameters_are_never_constants():
    assert requested()["constants"] == requested(params={"w": W + 1, "b": np.ones(K, np.float32)})["constants"]


SCRIPT = """
import json, jax, jax.numpy as jnp, numpy as np
from jacstore.problem.problem import Problem, prepare

@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1)

@clipped.defjvp
def rule(primals, tangents):
    return clipped(*primals), tangents[0] * jnp.asarray([1.0, 2.0, 3.0])

@jax.custom_vjp
def doubled(x):
    return 2 * x

doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (np.arange(3.0) * ct,))
table = jnp.arange(3.0)

def apply(p, x):
    x = jax.nn.gelu(jax.nn.relu(x) @ p["w"]) + jax.nn.relu(table)
    return jax.jit(lambda y: jax.nn.softmax(doubled(clipped(p["act"](y)))))(x)

params = {"w": np.eye(3, dtype="f4"), "act": lambda y: jax.nn.silu(y)}
print(json.dumps(prepare(Problem(apply=apply, params=params, inputs=np.ones((2, 3), "f4"))).requested))
"""


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process():
    runs = [
        subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and json.loads(runs[0])["constants"]


def twice_jitted(between):
    """A function that calls `jax.nn.relu`, which is a jit, twice, and does something between the calls."""

    def apply(params, x):
        first = jax.nn.relu(linear(params, x))
        between()
        return jax.nn.relu(first - 1)

    return apply


def test_the_fingerprint_does_not_depend_on_what_tracing_caches_hold():
    shared = requested(apply=twice_jitted(lambda: None))
    assert shared == requested(apply=twice_jitted(jax.clear_caches))


def test_the_fingerprint_does_not_depend_on_the_seed_of_hashes():
    runs = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", SCRIPT]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        runs.append(json.loads(done.stdout))
    assert runs[0] == runs[1]


def test_programs_that_differ_in_one_place_have_other_texts():
    table = np.arange(3.0, dtype=np.float32)

    def text(function):
        return program_text(jax.make_jaxpr(function)(np.ones(3, np.float32)))

    functions = [
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: 1 - x,
        lambda x: x - 1,
        jax.jit(lambda y: y + 1),
        jax.jit(lambda y: y + 2),
        lambda x: jax.lax.scan(lambda s, _: (s + 1, None), x, length=2)[0],
        lambda x: jax.lax.scan(lambda s, _: (s + 1, None), x, length=3)[0],
        lambda x: x + table,
        lambda x: x + table[:1],
        lambda x: jnp.dot(x, x),
        lambda x: jnp.dot(x, x, precision="highest"),
        lambda x: jax.nn.relu(x) + jax.nn.gelu(x),
        lambda x: jax.nn.gelu(x) + jax.nn.relu(x),
    ]
    texts = [text(function) for function in functions]
    assert len(set(texts)) == len(texts)
    assert texts == [text(function) for function in functions]
    assert not any(" at 0x" in one for one in texts)


@pytest.mark.parametrize("within", [nullcontext(), jax.default_matmul_precision("float32")])
def test_noise_behind_a_kept_jit_is_found_and_programs_of_the_user_stay(within):
    noise = np.random.default_rng(3)
    drawn, traced = jax.jit(lambda: jnp.asarray(noise.random(K, np.float32))), []

    def apply(params, x):
        with within:
            return linear(params, x) + drawn()

    @jax.jit
    def of_the_user(x):
        traced.append(x)
        return x + 1

    of_the_user(X)
    for _ in range(3):
        problem = {"apply": apply, "params": params(), "inputs": X}
        assert "change from call to call" in refusal(jacstore.ntk, **problem, error=InvalidFunctionError)
        jacstore.ntk(linear, params(), X)
        of_the_user(X)
    assert len(traced) == 1


def test_the_fingerprint_is_the_same_where_the_output_is_a_terminal():
    prepared = prepare(linear_problem(apply=coloured)).requested
    # The folders of the tests and of their helpers.
    here = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "helpers")]
    script = (
        f"import json, sys; sys.path[:0] = {here!r}\n"
        f"import {__name__} as t\n"
        "print(json.dumps(t.prepare(t.linear_problem(apply=t.coloured)).requested), file=sys.stderr)"
    )
    master, terminal = os.openpty()
    try:
        done = subprocess.run([sys.executable, "-c", script], stdout=terminal, stderr=subprocess.PIPE, check=True)
    finally:
        os.close(terminal)
        os.close(master)
    assert json.loads(done.stderr)["function"] == prepared["function"]


def coloured(params, x):
    return jax.nn.relu(linear(params, x))  # calls and their names are printed in colours


# --- targets ----------------------------------------------------------------------------------------------------------

TARGET = """
import numpy as np
import jacstore.problem.problem as jp
from helper_of_target import W

def make():
    import late_of_target
    return jp.Problem(apply=lambda p, x: x @ p, params=W, inputs=np.ones((2, 3), "f4"))

def wants(size):
    return make()

def fails():
    return 1 / 0

problem = make()
number = 3
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    (tmp_path / "helper_of_target.py").write_text("import numpy as np\nW = np.ones((3, 2), 'f4')\n")
    (tmp_path / "late_of_target.py").write_text("")
    file = tmp_path / "my-net.py"
    file.write_text(TARGET)
    yield file
    for name in [name for name in sys.modules if name.endswith("_of_target") or name.startswith("target_")]:
        del sys.modules[name]


def test_a_target_is_a_problem_or_a_function_that_returns_one(target):
    before = list(sys.path)
    for text in (f"{target}:problem", f"{target}:make", str(target)):
        assert load_target(text).n_examples == 2
    assert sys.path == before


def test_a_target_may_be_named_relative_to_the_current_folder(target, monkeypatch):
    monkeypatch.chdir(target.parent)
    assert load_target("my-net.py:problem").n_examples == 2
    package = target.parent / "pack_of_target"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net_of_target.py").write_text(TARGET)
    try:
        assert load_target("pack_of_target.net_of_target:make").n_examples == 2
        assert load_target("pack_of_target.net_of_target").n_examples == 2
        assert "no module pack_of_target.missing" in refusal(load_target, "pack_of_target.missing:problem")
    finally:
        sys.modules.pop("pack_of_target.net_of_target", None)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("model", "no name model"),
        ("model", "it has make, wants, fails, problem"),
        ("number", "is a int"),
        ("wants", "needs arguments"),
        ("fails", "raised ZeroDivisionError: division by zero"),
        ("fails", "my-net.py:14"),
        ("not a name", "names nothing"),
    ],
)
def test_a_target_that_is_no_problem_is_refused(target, name, named):
    assert named in refusal(load_target, f"{target}:{name}")


@pytest.mark.parametrize("text", ["missing.py:problem", "folder/missing.py", "missing_module:problem", ":problem", ""])
def test_a_missing_target_is_refused(text):
    assert "path/to/file.py:name" in refusal(load_target, text)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("x = 1\nraise ValueError('two\\nlines')\n", "ValueError: two lines"),
        ("x = 1\nimport not_installed_here\n", "ModuleNotFoundError"),
        ("x = 1\ndef f(:\n", "SyntaxError"),
        ("import sys\nsys.exit(1)\n", "SystemExit"),
        (
            "from jacstore.problem.problem import Problem\nproblem = Problem(apply=3, params=1, inputs=2)\n",
            "apply is a int",
        ),
    ],
)
def test_an_exception_inside_a_target_is_one_line_with_file_and_line(tmp_path, source, named):
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(InvalidRequestError) as caught:
        load_target(f"{file}:problem")
    text = str(caught.value)
    assert named in text and f"{file}:2" in text and "\n" not in text
    assert caught.value.__cause__ is not None
    assert "target_broken" not in sys.modules


def test_a_target_edited_within_a_second_is_read_anew(target):
    assert load_target(str(target)).n_examples == 2
    target.write_text(TARGET.replace("(2, 3)", "(4, 3)"))
    assert load_target(str(target)).n_examples == 4


def test_random_numbers_that_float64_would_change_are_refused():
    """JAX draws in its default type, which float64 makes another one: rows would be those of another network."""
    params, x = {"w": np.ones((4, 3), np.float32)}, np.ones((6, 4), np.float32)

    def noisy(dtype):
        return lambda params, x: jnp.tanh(x @ params["w"] / 4 + jax.random.normal(jax.random.key(0), (3,), dtype))

    problem = Problem(apply=noisy(float), params=params, inputs=x)
    with pytest.raises(InvalidFunctionError, match="random numbers"):
        prepare(problem, float64=True)
    prepare(problem)
    prepare(Problem(apply=noisy(np.float32), params=params, inputs=x), float64=True)
    with jax.enable_x64(True):
        prepare(problem, float64=True)


def test_a_callback_without_a_way_to_be_batched_is_named():
    def apply(params, x):
        twice = jax.pure_callback(lambda v: 2 * np.asarray(v), jax.ShapeDtypeStruct((4,), np.float32), x)
        return jnp.tanh(jax.lax.stop_gradient(twice) @ params["w"])

    problem = Problem(apply=apply, params={"w": np.ones((4, 3), np.float32)}, inputs=np.ones((6, 4), np.float32))
    with pytest.raises(InvalidRequestError, match="vmap_method"):
        jacstore.build(problem)
