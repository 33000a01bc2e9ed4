"""Weights that are masked, scaled or normalised entry by entry: factors of the product, the constant map once."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from jacstore import DamagedDataError, Problem
from jacstore.testing import dense_kernel, dense_rows, kernel_error
from support import terms_of, three

N = 5


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def conv(x, w, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x[None], w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )[0]


def normalised(axis):
    def apply(p, x):
        return three(x @ (p["v"] * (p["g"] / jnp.linalg.norm(p["v"], axis=axis, keepdims=axis is not None))))

    return apply


W, X, MANY = normal(24, 40), normal(N, 24), normal(N, 3, 24, seed=1)
MASK = np.random.default_rng(0).random((24, 40)) < 0.5
FILTER, IMAGES = normal(3, 3, 4, 16), normal(N, 5, 5, 4)
FILTER_MASK = np.random.default_rng(1).random(FILTER.shape) < 0.5

# (function, parameters, inputs, terms of the leaves in tree order)
CASES = {
    "mask": (lambda p, x: three(x @ (p * MASK)), W, X, "gain"),
    "mask at several positions": (lambda p, x: three(x @ (p * MASK)), W, MANY, "gain"),
    "scale": (lambda p, x: three(x @ (p * normal(24, 40, seed=3))), W, MANY, "gain"),
    "quotient": (lambda p, x: three(x @ (p / (1 + MASK))), W, X, "gain"),
    "another weight": (
        lambda p, x: three(x @ (p["w"] * jax.lax.stop_gradient(p["s"]))),
        {"s": normal(24, 40, seed=3), "w": W},
        X,
        "dense gain",
    ),
    "transposed": (lambda p, x: three(x @ (p * MASK.T).T), normal(40, 24), MANY, "gain"),
    "with a bias": (
        lambda p, x: three(x @ (p["w"] * MASK) + p["b"]),
        {"b": normal(40), "w": W},
        MANY,
        "dot gain",
    ),
    "used twice": (
        lambda p, x: three(jnp.tanh(x @ (p * MASK)) + (x**2) @ (p * MASK)),
        W,
        X,
        "gain+gain",
    ),
    "masked and not": (lambda p, x: three(jnp.tanh(x @ (p * MASK)) + (x**2) @ p), W, X, "gain+gain"),
    "heads": (
        lambda p, x: three(jnp.einsum("tc,chd->thd", x, p * MASK.reshape(24, 8, 5))),
        normal(24, 8, 5),
        MANY,
        "gain",
    ),
    "filter": (lambda p, x: three(conv(x, p * FILTER_MASK)), FILTER, IMAGES, "gain"),
    "filter in groups": (lambda p, x: three(conv(x, p * FILTER_MASK[:, :, :2], 2)), FILTER[:, :, :2], IMAGES, "gain"),
    "normalised columns": (normalised(0), {"g": normal(40), "v": W}, MANY, "gain gain+gain"),
    "normalised rows": (normalised(1), {"g": normal(24, 1), "v": W}, X, "gain gain+gain"),
    "normalised as a whole": (normalised(None), {"g": normal(1), "v": W}, X, "gain gain+gain"),
}


@pytest.fixture(scope="module")
def made():
    """Stores and their rows by `jax.jacrev`, each once."""
    kept = {}

    def make(name):
        if name not in kept:
            apply, params, inputs, _ = CASES[name]
            problem = Problem(apply=apply, params=params, inputs=inputs)
            kept[name] = (jacstore.build(problem, None, dtype="float64", layout="factored"), dense_rows(problem))
        return kept[name]

    return make


@pytest.mark.parametrize("name", CASES)
def test_rows_norms_and_products_with_columns_are_those_of_jacrev(made, name):
    store, rows = made(name)
    assert terms_of(store) == CASES[name][3]
    found = store.array.compute(scheduler="synchronous").reshape(rows.shape)
    assert np.linalg.norm(found - rows) <= 1e-12 * np.linalg.norm(rows)
    np.testing.assert_allclose(store.norms.sum(-1), np.square(rows).sum(-1), rtol=1e-10)
    flat = rows.reshape(-1, rows.shape[-1])
    v, u = normal(flat.shape[1], 3).astype(float), normal(len(flat), 3).astype(float)
    operator = jacstore.operator(store)
    for products, truth in ((operator @ v, flat @ v), (operator.T @ u, flat.T @ u)):
        assert np.linalg.norm(products - truth) <= 1e-12 * np.linalg.norm(truth)


@pytest.mark.parametrize("mode", ["full", "trace", "diagonal", "blocks"])
@pytest.mark.parametrize("name", ["mask", "filter", "filter in groups", "heads", "normalised columns"])
def test_kernels_of_every_mode_are_those_of_jacrev(made, name, mode):
    store, rows = made(name)
    kernel = jacstore.gram(store, mode=mode).array.compute(scheduler="synchronous")
    pairs = np.einsum("nkp,mop->nkmo", rows, rows)
    each = np.arange(rows.shape[1])
    truth = {
        "full": lambda: dense_kernel(rows),
        "trace": lambda: np.einsum("nkmk->nm", pairs),
        "diagonal": lambda: np.moveaxis(pairs[:, each, :, each], 0, 0),
        "blocks": lambda: np.stack([pairs[n, :, n] for n in range(N)]),
    }[mode]()
    assert np.linalg.norm(kernel - truth) <= 1e-12 * np.linalg.norm(truth)


@pytest.mark.parametrize("name", CASES)
def test_full_kernels_are_those_of_jacrev(made, name):
    store, rows = made(name)
    kernel = jacstore.gram(store).array.compute(scheduler="synchronous")
    assert kernel_error(kernel, dense_kernel(rows)) <= 1e-12
    assert jacstore.verify(store).ok


def test_a_masked_weight_takes_its_factors_for_each_example_and_the_mask_once(tmp_path):
    problem = Problem(apply=lambda p, x: three(x @ (p * MASK)), params=W, inputs=X)
    store = jacstore.build(problem, tmp_path / "run.jac")
    assert terms_of(store) == "gain"
    factors = N * (24 + 3 * 40) * 4
    assert store.bytes_decoded == factors
    kept = sum(path.stat().st_size for path in (tmp_path / "run.jac" / "constants").rglob("c/**/*") if path.is_file())
    assert kept == MASK.size * 4 + 4
    assert store.info()["bytes_stored"] < factors + MASK.size * 4 + 1000


def test_the_length_of_a_normalised_weight_costs_nothing_more():
    apply, params, inputs, _ = CASES["normalised columns"]
    store = jacstore.build(Problem(apply=apply, params=params, inputs=inputs), None)
    assert terms_of(store) == "gain gain+gain"
    assert sorted(operand.role for operand in store.operands) == ["cotangents", "inputs"]


def test_zarr_reads_the_constant(tmp_path):
    import zarr

    jacstore.build(Problem(apply=lambda p, x: three(x @ (p * MASK)), params=W, inputs=X), tmp_path / "run.jac")
    group = zarr.open_group(tmp_path / "run.jac" / "constants", mode="r")
    (array,) = (array for _, array in group.arrays())
    assert np.array_equal(np.asarray(array[...]).reshape(MASK.shape), MASK)


@pytest.mark.parametrize("fault", ["missing", "flipped"])
def test_a_damaged_constant_is_refused_and_written_anew_by_the_same_build(tmp_path, fault):
    problem = Problem(apply=lambda p, x: three(x @ (p * MASK)), params=W, inputs=X)
    store = jacstore.build(problem, tmp_path / "run.jac")
    rows = store.array.compute(scheduler="synchronous")
    (file,) = (path for path in (tmp_path / "run.jac" / "constants").rglob("c/**/*") if path.is_file())
    if fault == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
    with pytest.raises(DamagedDataError, match="constants/gain0 is missing or damaged; run the same build again"):
        jacstore.JacobianStore(store.files, store.path).array.compute(scheduler="synchronous")
    again = jacstore.build(problem, tmp_path / "run.jac")
    assert again.report["units_computed"] == 0
    assert np.array_equal(again.array.compute(scheduler="synchronous"), rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["mask at several positions", "filter", "normalised columns"])
def test_stores_in_every_type_and_kernels_of_them_are_verified(name, dtype):
    apply, params, inputs, _ = CASES[name]
    problem = Problem(apply=apply, params=params, inputs=inputs)
    store = jacstore.build(problem, None, dtype=dtype, layout="factored")
    assert "gain" in terms_of(store)
    assert jacstore.verify(store, problem=problem).ok
    kernel = jacstore.gram(store)
    assert jacstore.verify(kernel).ok


@pytest.mark.parametrize("options", [{"engine": "xla"}, {"engine": "xla", "mode": "blocks"}, {"tile": 2}])
@pytest.mark.parametrize("name", ["mask", "normalised rows"])
def test_engines_and_plans_agree(made, name, options):
    store, _ = made(name)
    truth, found = (jacstore.gram(store, **more) for more in ({**options, "engine": "blas"}, options))
    truth, found = (kernel.array.compute(scheduler="synchronous") for kernel in (truth, found))
    assert np.linalg.norm(found - truth) <= 1e-6 * np.linalg.norm(truth)


def test_columns_in_narrow_slabs_are_those_of_whole_rows(made, limits):
    from jacstore.terms.expand_rows import expanded_slabs

    limits(expanded_bytes=1)
    for name in CASES:
        store, rows = made(name)
        for leaf in (leaf for leaf in store.leaves if not leaf.dense):
            operands = {name: store.read_operand(name, 0, N) for name in leaf.operands}
            slabs = [slab for (slab,) in expanded_slabs(leaf, [operands], 7, patches_kept=False)]
            assert len(slabs) > 1 or leaf.size < 8
            part = rows[..., leaf.offset : leaf.offset + leaf.size]
            found = sum(np.einsum("nkp,mop->nkmo", slab, slab) for slab in slabs)
            truth = np.einsum("nkp,mop->nkmo", part, part)
            assert np.linalg.norm(found - truth) <= 1e-12 * np.linalg.norm(truth)


def test_a_build_that_was_stopped_continues_and_keeps_the_first_constant(tmp_path):
    problem = Problem(apply=lambda p, x: three(x @ (p * MASK)), params=W, inputs=X)
    whole = jacstore.build(problem, None, unit_size=2).array.compute(scheduler="synchronous")
    jacstore.build(problem, tmp_path / "run.jac", unit_size=2, part="1/2")
    store = jacstore.build(problem, tmp_path / "run.jac", unit_size=2)
    assert store.report["units_reused"] == 1
    assert np.array_equal(store.array.compute(scheduler="synchronous"), whole)
    other = Problem(apply=lambda p, x: three(x @ (p * ~MASK)), params=W, inputs=X)
    with pytest.raises(jacstore.RequestMismatchError):
        jacstore.build(other, tmp_path / "run.jac", unit_size=2)


def test_a_constant_that_was_rounded_otherwise_is_no_other_request(tmp_path):
    from dataclasses import replace

    apply, params, inputs, _ = CASES["mask"]
    store = jacstore.build(Problem(apply=apply, params=params, inputs=inputs), None)
    leaves = [leaf.with_constants(lambda c: replace(c, source=c.values())) for leaf in store.leaves]
    rounded = [leaf.with_constants(lambda c: c.of(c.name, c.values() * np.float32(1 + 1e-7))) for leaf in leaves]
    for given in (leaves, rounded):
        writer = jacstore.StoreWriter(tmp_path / "run.jac", given, N, 3, operands=store.operands)
        (constant,) = writer.store.leaves[0].constants
        assert np.array_equal(constant.values(), leaves[0].constants[0].values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("maps", []),
        ("maps", [["reshape", [1, 24, 40]], ["gain", [1]]]),
        ("maps", [["reshape", [1, 24, 41]]]),
        ("maps", [["reshape", [1, 24, 40]], ["sum", [3]]]),
        ("maps", [["reshape", [1, 24, 40]], ["sum", [1]]]),
        ("maps", [["reshape", [1, 24, 40]], ["repeat", [2, 24, 41]]]),
        ("maps", [["reshape", [1, 24, 40]], ["transpose", [0, 1]]]),
        ("maps", [["reshape", [1, 24, 40]], ["power", [2]]]),
        ("constants", []),
    ],
)
def test_maps_that_contradict_themselves_are_refused(made, field, value):
    from jacstore.base.schema import typed
    from jacstore.store.metadata import StoreAttributes, check_store

    store, _ = made("mask")
    attributes = {
        "N": N,
        "K": 3,
        "P": W.size,
        "leaves": [leaf.to_dict() for leaf in store.leaves],
        "operands": [operand.to_dict() for operand in store.operands],
        "left_out": [],
        "fingerprint": {},
        "resolved": dataclasses.asdict(store.choices),
        "versions": {},
    }
    attributes = json.loads(json.dumps(attributes))
    check_store(typed(StoreAttributes, attributes))
    attributes["leaves"][0]["terms"][0][field] = value
    with pytest.raises(DamagedDataError):
        check_store(typed(StoreAttributes, attributes))
